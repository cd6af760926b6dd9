"""From the names of TensorFlow's nodes back to the operations of a program.

A Lowering lowers each operation in a TensorFlow name scope of its own, so the name of a node begins
with the scope of its operation. TensorFlow's errors and profiles have names of nodes.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._watching.nonfinite import NonFiniteError, nonfinite_data, nonfinite_message

__all__ = [
    "NodeNames",
    "add_to_message",
    "explain_run_error",
    "living_names",
    "names_in_current_graph",
    "raise_for_user",
    "site_text",
    "tell_lowering_error",
]

_numbers = itertools.count()
# Those that are in use, in order of creation. Threads make some while others list them.
_lock = threading.RLock()
_living: weakref.WeakValueDictionary[int, NodeNames] = weakref.WeakValueDictionary()
_NODE = re.compile(r"\{\{node ([^}\s]+)\}\}|[Dd]etected at node '?([^\s']+)|Node: '([^\s']+)'")
_TOLD = "mtf_told"
# Of tf.Graphs: their tables.
_ATTRIBUTE = "_mesh_tensorflow_node_names"


class NodeNames:
    """The name scopes of the operations of one Lowering.

    Attributes:
      of_graph: whether it is a Lowering in a TensorFlow graph, which has nodes of these names.
    """

    def __init__(self) -> None:
        """Creates an empty table; TensorFlow's current graphs keep it."""
        self._operations: dict[str, Operation] = {}
        self.of_graph = not tf.executing_eagerly()
        with _lock:
            _living[next(_numbers)] = self
        if not self.of_graph:
            return
        graph: Any = tf.get_default_graph()
        while graph is not None:
            if graph.building_function or not tf.executing_eagerly_outside_functions():
                kept = getattr(graph, _ATTRIBUTE, [])
                setattr(graph, _ATTRIBUTE, [*kept, self])
            graph = getattr(graph, "outer_graph", None)

    def add(self, scope: str, operation: Operation) -> None:
        """Notes the name scope of an operation.

        Args:
          scope: a string that ends in a slash.
          operation: an Operation.
        """
        self._operations[scope] = operation

    def place(self, node: str) -> Optional[tuple[Operation, str]]:
        """Returns the operation that a node belongs to, and the rest of the node's name, or None.

        Args:
          node: the name of a node; that of a function call may precede it, as in inlined functions.
        """
        parts = node.lstrip("^").split(":")[0].split("/")
        for begin in range(len(parts)):
            for end in range(len(parts), begin, -1):
                found = self._operations.get("/".join(parts[begin:end]) + "/")
                if found is not None:
                    return found, "/".join(parts[end:])
        return None


def living_names() -> list[NodeNames]:
    """Returns the tables of all Lowerings that are in use, the newest first."""
    with _lock:
        living = list(_living.items())
    return [names for _, names in sorted(living, reverse=True)]


def names_in_current_graph() -> list[NodeNames]:
    """Returns the tables of the Lowerings in TensorFlow's current graph; none in eager code."""
    return [] if tf.executing_eagerly() else getattr(tf.get_default_graph(), _ATTRIBUTE, [])


def _tables_of(error: Any) -> list[NodeNames]:
    """Returns the tables to look up an error in: those of its graph if it has one."""
    graph = getattr(getattr(error, "op", None), "graph", None)
    own = getattr(graph, _ATTRIBUTE, [])
    return own or [names for names in living_names() if names.of_graph]


def site_text(operation: Operation) -> str:
    """Returns lines that say where an operation was made; "" if that is unknown."""
    if operation.site is None:
        return ""
    what = "made here"
    if operation.gradient_of is not None:
        what = f"part of the gradient of {operation.gradient_of.name}, which was made here"
    elif operation.original is not None:
        what = f"a copy of {operation.original.name}, which was made here"
    return f"  {what}:\n{operation.site.trace}"


def add_to_message(error: BaseException, text: str) -> None:
    """Adds lines to the message of an exception, which keeps its type and attributes.

    Args:
      error: an exception that was raised.
      text: the lines.
    """
    if isinstance(error, tf.errors.OpError):
        error._message = f"{error.message}\n{text}"
        return
    before = error.args
    if before and isinstance(before[0], str):
        error.args = (f"{before[0]}\n{text}", *before[1:])
        if text in str(error):
            return
        error.args = before  # a KeyError would quote it
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:  # what later versions of Python, and tools for tracebacks, show
        setattr(error, "__notes__", [*getattr(error, "__notes__", ()), text])  # noqa: B010


def tell_lowering_error(error: Exception, operation: Operation) -> None:
    """Adds the operation that was being lowered, the innermost one, to the message of an error.

    Args:
      error: an exception, which keeps its type and attributes.
      operation: the operation.
    """
    if not hasattr(error, "mtf_operation"):
        add_to_message(error, f"  while lowering {operation}\n{site_text(operation)}".rstrip())
        error.mtf_operation = operation  # type: ignore[attr-defined]


def _nodes_of(error: Any) -> Iterator[str]:
    """Yields the names of nodes that a TensorFlow error mentions."""
    holders = (getattr(error, "op", None), getattr(error, "node_def", None))
    yield from filter(None, (getattr(holder, "name", None) for holder in holders))
    for match in _NODE.finditer(str(getattr(error, "message", error))):
        yield next(filter(None, match.groups()))


def operation_of_error(
    error: BaseException, tables: Optional[Iterable[NodeNames]] = None
) -> Optional[Operation]:
    """Returns the operation in which a step failed, or None.

    Args:
      error: an error of TensorFlow.
      tables: NodeNames; those of all Lowerings that are in use if None.
    """
    tables = list(_tables_of(error) if tables is None else tables)
    for node in _nodes_of(error):
        for names in tables:
            found = names.place(node)
            if found is not None:
                return found[0]
    return None


def explain_run_error(
    error: BaseException, tables: Optional[Iterable[NodeNames]] = None
) -> Optional[str]:
    """Returns lines on the operation in which a step failed, and the line that made it, or None.

    Args:
      error: an error of TensorFlow.
      tables: NodeNames; those of all Lowerings that are in use if None.
    """
    operation = operation_of_error(error, tables)
    if operation is None:
        return None
    data = nonfinite_data(str(getattr(error, "message", "")))
    if data is not None:
        return f"{nonfinite_message(operation, data)}\n{site_text(operation)}".rstrip()
    return _while_running(operation)


def raise_for_user(error: BaseException, tables: Optional[Iterable[NodeNames]] = None) -> NoReturn:
    """Raises TensorFlow's error of a step again, with the operation and the user's line.

    Call it where the error is handled.

    Args:
      error: an error of TensorFlow.
      tables: NodeNames; those of all Lowerings that are in use if None.

    Raises:
      NonFiniteError: the error is that of a check for NaNs.
      BaseException: `error` otherwise, with a longer message.
    """
    if not getattr(error, _TOLD, False):
        operation = operation_of_error(error, tables)
        data = None if operation is None else nonfinite_data(str(getattr(error, "message", "")))
        if operation is not None and data is not None:
            text = f"{nonfinite_message(operation, data)}\n{site_text(operation)}".rstrip()
            # Without its tf operation, whose stack trace is that of the Lowering.
            told = NonFiniteError(getattr(error, "node_def", None), None, text)
            setattr(told, _TOLD, True)
            raise told from error
        if operation is not None:
            add_to_message(error, _while_running(operation))
            setattr(error, _TOLD, True)
    raise error


@contextlib.contextmanager
def told_to_user(tables: Optional[Iterable[NodeNames]] = None) -> Iterator[None]:
    """Adds the operation and the user's line to errors of steps that are run within.

    Args:
      tables: NodeNames; those of all Lowerings that are in use if None.
    """
    try:
        yield
    except tf.errors.OpError as e:
        raise_for_user(e, tables)


def _while_running(operation: Operation) -> str:
    return f"  while running {operation}\n{site_text(operation)}".rstrip()

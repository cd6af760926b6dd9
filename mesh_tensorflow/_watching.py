"""What a user asks to see while a program runs, and the names of its nodes.

`mtf.debug` sets it, a Lowering does it, and functions are traced anew for it.

A Lowering lowers each operation in a TensorFlow name scope of its own, so the name of a node begins
with the scope of its operation. TensorFlow's errors and profiles have names of nodes.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import fnmatch
import itertools
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Optional

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._calls import within
from mesh_tensorflow._core.errors import did_you_mean, is_set
from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._units import counted

# How the label of the state of a value begins, in the data of the assertion that a step makes.
STATE = "NaNs, Infs, zeros, least, largest and elements of"
_DATA = re.compile(r"assertion failed: (\[NaN or Inf in .*\])", re.S)


class NonFiniteError(tf.errors.InvalidArgumentError, ArithmeticError):
    """A value of a program is NaN or infinite, found by `mtf.debug.nan_checks`.

    The message says in which operation, on which processor and in which slice, what its inputs
    were, and which line of the user's program made it. It is an InvalidArgumentError, as
    TensorFlow's own checks raise.
    """


def _nonfinite_data(error: BaseException) -> Optional[list[Any]]:
    """Returns the data of a failed check from the text of TensorFlow's error, or None.

    Where it is, then for the output and for each input a label and its state, six numbers.
    """
    match = _DATA.search(str(getattr(error, "message", "")))
    if match is None:
        return None
    pieces = re.findall(r"\[([^\[\]]*)\]", match[1])
    data: list[Any] = pieces[:1]
    for label, numbers in zip(pieces[1::2], pieces[2::2]):
        # What TensorFlow adds behind the data has brackets too, such as [[{{node assert}}]].
        if not label.startswith(STATE):
            break
        data += [label, np.array([float(x) for x in numbers.split()])]
    return data


def nonfinite_message(operation: Operation, data: Sequence[Any]) -> str:
    """Returns what a NonFiniteError says.

    Args:
      operation: the operation whose output it is.
      data: where it is, then for the output and for each input a label and its state.
    """
    where = data[0].decode() if isinstance(data[0], bytes) else str(data[0])
    kinds = [kind for kind, n in zip(("NaN", "Inf"), data[2]) if n]
    lines = [(" and ".join(kinds) or "NaN or Inf") + where.removeprefix("NaN or Inf")]
    for label, state in zip(data[1::2], data[2::2]):
        name = label.removeprefix(STATE).strip().rstrip(":")
        what = "its slice" if name == "the output" else f"input {name}"
        lines.append(f"  {what}: {_state_text(state)}")
    return "\n".join(lines)


def _state_text(state: Sequence[float]) -> str:
    """Returns the state of a slice in words."""
    nans, infs, zeros, least, largest, elements = state
    bad = [f"{int(n)} {kind}" for n, kind in ((nans, "NaN"), (infs, "Inf")) if n]
    if bad:
        return f"{' and '.join(bad)} of {counted(int(elements), 'element')}"
    if elements == 1:
        return f"1 finite element, {least:g}"
    return f"{int(elements)} finite elements from {least:g} to {largest:g}, {int(zeros)} of them 0"


# How the names of events of a trace begin that stand for operations in eager code.
EAGER_EVENT = "mtf_operation/"


@dataclasses.dataclass(frozen=True)
class NanChecks:
    """Which values are errors.

    Attributes:
      infinities: whether infinite values are, besides NaNs.
      operations: patterns of names of operations; those that match none are not checked.
    """

    infinities: bool = True
    operations: tuple[str, ...] = ("*",)

    def applies_to(self, name: str) -> bool:
        """Returns whether the operation of a name is checked."""
        return matches(name, self.operations)


class CollectedValues(dict):
    """Values by the names of what they were collected from; a dictionary."""

    def __missing__(self, name: object) -> NoReturn:
        known = ", ".join(map(str, list(self)[:16])) or "nothing"
        raise KeyError(
            f"{name!r} was not collected; collected: {known}{did_you_mean(str(name), self)} "
            "Values are collected from programs that are lowered within mtf.debug.collect, and "
            "not from inside of loops"
        )


@dataclasses.dataclass(frozen=True)
class Collector:
    """A request for values of the programs that are lowered within its context.

    Attributes:
      patterns: patterns of names, as of files.
      processor: the number of the processor whose slices are asked for; None for whole values.
      values: what was collected.
    """

    patterns: tuple[str, ...]
    processor: Optional[int]
    values: CollectedValues = dataclasses.field(default_factory=CollectedValues)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a name matches one of some patterns, such as "encoder/*/softmax"."""
    # Not fnmatch.fnmatch, which ignores case on some systems.
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


# No default: None says that a context has turned checks off, also those of MTF_DEBUG_NANS.
_checks: contextvars.ContextVar[Optional[NanChecks]] = contextvars.ContextVar("mtf_nan_checks")
_collectors: contextvars.ContextVar[tuple[Collector, ...]] = contextvars.ContextVar(
    "mtf_collectors", default=()
)
_lowerings: contextvars.ContextVar[Optional[list[Any]]] = contextvars.ContextVar(
    "mtf_lowerings", default=None
)


def use_nan_checks(checks: Optional[NanChecks]) -> contextlib.AbstractContextManager[None]:
    """Makes Lowerings within check values, or not if `checks` is None."""
    return within(_checks, checks)


def nan_checks_in_force() -> Optional[NanChecks]:
    """Returns the checks of the context, or those that MTF_DEBUG_NANS=1 asks for, or None."""
    try:
        return _checks.get()
    except LookupError:
        return NanChecks() if is_set("MTF_DEBUG_NANS", False) else None


def use_collector(collector: Collector) -> contextlib.AbstractContextManager[None]:
    """Makes Lowerings within hand values to a collector, besides those outside of it."""
    return within(_collectors, (*_collectors.get(), collector))


def collectors() -> tuple[Collector, ...]:
    """Returns the collectors in whose contexts this is called, the outermost first."""
    return _collectors.get()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Context of Lowerings that neither check values nor hand them out."""
    with within(_checks, None), within(_collectors, ()):
        yield


@contextlib.contextmanager
def recorded_lowerings() -> Iterator[list[Any]]:
    """Context that yields a list, to which each Lowering that is made within is added."""
    lowerings: list[Any] = []
    with within(_lowerings, lowerings):
        yield lowerings


def is_recorded() -> bool:
    """Returns whether programs are built within `recorded_lowerings`, to be looked at."""
    return _lowerings.get() is not None


def record_lowering(lowering: Any) -> None:
    """Adds a Lowering to the list of the context, if there is one."""
    lowerings = _lowerings.get()
    if lowerings is not None:
        lowerings.append(lowering)


def watch_key() -> Any:
    """Returns what the tracing of a function depends on; None if nothing is watched."""
    checks, collecting = nan_checks_in_force(), _collectors.get()
    if checks is None and not collecting:
        return None
    # Not the collectors themselves: a later context with the same request needs no new tracing.
    return checks, tuple((c.patterns, c.processor) for c in collecting)


def collecting(fn: Callable[..., Any]) -> Callable[..., tuple[Any, list[dict[str, Any]]]]:
    """Returns a function that also returns what is collected while it is traced.

    Its tensors are of the traced graph, so they have to be results of it. `hand_over` gives the
    values of these results to the collectors.

    Args:
      fn: a function that lowers programs.
    """

    def with_values(*args: Any, **named: Any) -> tuple[Any, list[dict[str, Any]]]:
        # Collectors outside would keep tensors of the traced graph, which nothing there can read.
        own = tuple(Collector(c.patterns, c.processor) for c in _collectors.get())
        with within(_collectors, own):
            result = fn(*args, **named)
        return result, [dict(c.values) for c in own]

    return with_values


def hand_over(collected: Sequence[Mapping[str, Any]]) -> None:
    """Gives the values that a traced function returned to the collectors of this context.

    Args:
      collected: a dictionary for each collector.
    """
    # Of each its own: what a function is traced for has the requests in this order (`watch_key`).
    for collector, values in zip(_collectors.get(), collected):
        collector.values.update(values)


# A context variable would be set in one thread only, and eager code may run in others.
_profiling = 0


@contextlib.contextmanager
def profiling() -> Iterator[None]:
    """Makes eager Lowerings mark their operations in the profiler's trace within, in any thread."""
    global _profiling
    _profiling += 1
    try:
        yield
    finally:
        _profiling -= 1


def is_profiling() -> bool:
    """Returns whether a profile is being made."""
    return _profiling > 0


def trace_mark(op: Operation) -> contextlib.AbstractContextManager:
    """Marks an operation of eager code in a profile; others are found by the names of their nodes.

    Args:
      op: the operation that is lowered within.
    """
    if not is_profiling() or not tf.executing_eagerly():
        return contextlib.nullcontext()
    return tf2.profiler.experimental.Trace(f"{EAGER_EVENT}{op.name}")


_LOGGER = logging.getLogger("mesh_tensorflow.lowering")
_ASKS = ("1", "true", "yes", "on", "all", "lowering")


class _Stderr(logging.StreamHandler):
    """Writes to what is standard error at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        # Notebooks and tests replace sys.stderr; a stream that was kept would write to the old one.
        self.setStream(sys.stderr)
        super().emit(record)


def operation_log() -> Optional[logging.Logger]:
    """Returns the log for a line about each operation, if MTF_LOG asks for it, or None."""
    words = os.environ.get("MTF_LOG", "").lower().replace(" ", "").split(",")
    if not any(word in _ASKS for word in words):
        return None
    # Each Lowering asks, and a second handler would write every line twice.
    if not _LOGGER.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(message)s"))
        _LOGGER.addHandler(handler)
        _LOGGER.setLevel(logging.INFO)
        # The root logger, which absl or the user has set up, would write each line a second time.
        _LOGGER.propagate = False
    return _LOGGER


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
        # Of outer graphs too: a session's error names a node of its own graph, the call.
        while graph is not None:
            # Not that of eager code, which lives as long as the process and would keep all tables.
            if graph.building_function or not tf.executing_eagerly_outside_functions():
                earlier = getattr(graph, _ATTRIBUTE, [])
                setattr(graph, _ATTRIBUTE, [*earlier, self])
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
        # A control input is written ^name, and a tensor name:0.
        names = node.lstrip("^").split(":")[0].split("/")
        for begin in range(len(names)):
            for end in range(len(names), begin, -1):
                # The longest first: the scope of a loop begins those of what is in it.
                operation = self._operations.get("/".join(names[begin:end]) + "/")
                if operation is not None:
                    return operation, "/".join(names[end:])
        return None


def living_names() -> list[NodeNames]:
    """Returns the tables of all Lowerings that are in use, the newest first."""
    with _lock:
        living = list(_living.items())
    # By number: no two are equal, so that Python never compares the tables, which have no order.
    return [names for _, names in sorted(living, reverse=True)]


def names_in_current_graph() -> list[NodeNames]:
    """Returns the tables of the Lowerings in TensorFlow's current graph; none in eager code."""
    return [] if tf.executing_eagerly() else getattr(tf.get_default_graph(), _ATTRIBUTE, [])


def _tables_of(error: Any) -> list[NodeNames]:
    """Returns the tables to look up an error in: those of its graph if it has one."""
    graph = getattr(getattr(error, "op", None), "graph", None)
    # Errors of functions have no operation, hence no graph; only their text names nodes.
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
        # TensorFlow's errors show this attribute, not their arguments; `message` cannot be set.
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
    # An error within a loop comes by again for the loop, after the innermost operation was told.
    if not hasattr(error, "mtf_operation"):
        add_to_message(error, f"  while lowering {operation}\n{site_text(operation)}".rstrip())
        error.mtf_operation = operation  # type: ignore[attr-defined]


def _nodes_of(error: Any) -> Iterator[str]:
    """Yields the names of nodes that a TensorFlow error mentions."""
    holders = (getattr(error, "op", None), getattr(error, "node_def", None))
    yield from filter(None, (getattr(holder, "name", None) for holder in holders))
    for match in _NODE.finditer(str(getattr(error, "message", error))):
        yield next(filter(None, match.groups()))


def _operation_of_error(
    error: BaseException, tables: Optional[Iterable[NodeNames]]
) -> Optional[Operation]:
    """Returns the operation in which a step failed, or None; see `explain_run_error`."""
    tables = list(_tables_of(error) if tables is None else tables)
    for node in _nodes_of(error):
        for names in tables:
            place = names.place(node)
            if place is not None:
                return place[0]
    return None


def explain_run_error(
    error: BaseException, tables: Optional[Iterable[NodeNames]] = None
) -> Optional[str]:
    """Returns lines on the operation in which a step failed, and the line that made it, or None.

    Args:
      error: an error of TensorFlow.
      tables: NodeNames; those of all Lowerings that are in use if None.
    """
    operation = _operation_of_error(error, tables)
    if operation is None:
        return None
    data = _nonfinite_data(error)
    what = f"  while running {operation}" if data is None else nonfinite_message(operation, data)
    return f"{what}\n{site_text(operation)}".rstrip()


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
    # Contexts that tell may be nested, and the inner one has done it.
    if not getattr(error, _TOLD, False):
        text = explain_run_error(error, tables)
        if text is not None and _nonfinite_data(error) is not None:
            # Without its tf operation, whose stack trace is that of the Lowering.
            raised = NonFiniteError(getattr(error, "node_def", None), None, text)
            setattr(raised, _TOLD, True)
            raise raised from error
        if text is not None:
            add_to_message(error, text)
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

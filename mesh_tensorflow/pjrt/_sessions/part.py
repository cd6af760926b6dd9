"""Divides the graph of a program between XLA and the session that runs it.

XLA compiles what is computed. Variables of TensorFlow, such as the global step, stay with the
session: it reads them before the compiled part, and assigns to them after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

if TYPE_CHECKING:
    from mesh_tensorflow.pjrt._sessions.variable import SessionVariable

__all__ = ["Part", "Update", "cut"]

_RAW: dict[str, Callable[..., tf.Operation]] = {
    "AssignVariableOp": tf.raw_ops.AssignVariableOp,
    "AssignAddVariableOp": tf.raw_ops.AssignAddVariableOp,
    "AssignSubVariableOp": tf.raw_ops.AssignSubVariableOp,
}
_KNOWN = {*_RAW, "ReadVariableOp"}
_HARMLESS = {"VarIsInitializedOp", "VariableShape"}


@dataclasses.dataclass(frozen=True)
class Update:
    """An assignment to a variable of TensorFlow, which the session does after the program.

    Attributes:
      kind: the type of the operation.
      handle: the handle of the variable, in the session's graph.
      value: what it is assigned, a tensor of the program.
    """

    kind: str
    handle: tf.Tensor
    value: tf.Tensor

    def make(self, value: tf.Tensor) -> tf.Operation:
        """Returns the assignment in the session's graph.

        Args:
          value: the value in that graph.
        """
        return _RAW[self.kind](resource=self.handle, value=value)


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a function's graph that XLA compiles.

    Attributes:
      graph_def: the operations.
      arguments: the tensors in it that the session gives.
      given: for each of them, the tensor of the session's graph.
      variables: the placeholders of the variables that it reads, by name.
      results: what it computes for the function's results; None for a variable of TensorFlow that
        is read after an assignment to it, which the session does.
      read: the handles of these variables, by the number of the result.
      updates: the assignments to variables of TensorFlow.
      new: the new values of variables.
      assigned: the names of these variables.
    """

    graph_def: tf.GraphDef
    arguments: list[tf.Tensor]
    given: list[tf.Tensor]
    variables: dict[str, tf.Tensor]
    results: list[Optional[tf.Tensor]]
    read: dict[int, tf.Tensor]
    updates: list[Update]
    new: list[tf.Tensor]
    assigned: list[str]

    @property
    def computed(self) -> list[tf.Tensor]:
        """The results that it computes, and the values of updates."""
        return [y for y in self.results if y is not None] + [u.value for u in self.updates]


def cut(
    concrete: Any, inputs: Sequence[tf.Tensor], variables: Mapping[str, SessionVariable]
) -> Part:
    """Returns what has to be computed for the results of a function, and from what.

    Args:
      concrete: a concrete function.
      inputs: its arguments, in the session's graph.
      variables: the variables of the mesh, by name.

    Raises:
      ValueError: it is computed from a resource other than a variable, or a variable of TensorFlow
        is used in a way that has no place outside of the program.
    """
    graph = concrete.graph
    own = graph.inputs[: len(inputs)]
    outer = {x.ref(): y for x, y in zip(own, inputs)}
    outer.update({inner.ref(): y for y, inner in graph.captures})
    firsts = {v.first.ref(): name for name, v in variables.items()}
    assigned = [name for name, v in variables.items() if v.value is not v.first]
    found = _Updates(graph, outer)
    read = {i: h for i, y in enumerate(graph.outputs) if (h := found.read_after(y)) is not None}
    with graph.as_default():  # a result may be an argument, which cannot be fed as well
        results = [None if i in read else tf.identity(y) for i, y in enumerate(graph.outputs)]
        updates = [dataclasses.replace(u, value=tf.identity(u.value)) for u in found.updates]
        new = [tf.identity(variables[name].value) for name in assigned]
    wanted = [*(y for y in results if y is not None), *(u.value for u in updates), *new]
    pairs, needed = _reached(wanted, outer, found)
    arguments, given, read_here = [], [], {}
    for x, inside in pairs:
        name = firsts.get(x.ref())
        if name is not None:
            read_here[name] = inside
        else:
            arguments.append(inside)
            given.append(x)
    kept = _operations(graph, needed, [*arguments, *read_here.values()])
    return Part(kept, arguments, given, read_here, results, read, updates, new, assigned)


class _Updates:
    """The assignments of a function to variables of TensorFlow, in order."""

    def __init__(self, graph: tf.Graph, outer: Mapping[Any, tf.Tensor]):
        self._outer = outer
        self.updates: list[Update] = []
        self._operations: dict[str, tf.Operation] = {}
        for op in graph.get_operations():
            handles = [x for x in op.inputs if self._is_variable(x)]
            if handles and op.type in _RAW:
                self._operations[op.name] = op
                self.updates.append(Update(op.type, outer[handles[0].ref()], op.inputs[1]))
            elif handles and op.type not in _KNOWN | _HARMLESS:
                raise ValueError(
                    f"a program for devices of JAX uses {outer[handles[0].ref()].name}, a variable "
                    f"of TensorFlow, by {op.type}: it can be read there, and be assigned to, but "
                    "not within a loop or a condition. Do this outside of the program"
                )

    def _is_variable(self, x: tf.Tensor) -> bool:
        given = self._outer.get(x.ref())
        return given is not None and given.op.type == "VarHandleOp"

    def read_after(self, y: tf.Tensor) -> Optional[tf.Tensor]:
        """Returns the outer handle if a tensor is the value of a variable after an update."""
        while y.op.type == "Identity":
            y = y.op.inputs[0]
        return self._outer[y.op.inputs[0].ref()] if self.follows(y.op) else None

    def follows(self, op: tf.Operation) -> bool:
        """Whether an operation reads a variable of TensorFlow after it was assigned to."""
        return (
            op.type == "ReadVariableOp"
            and self._is_variable(op.inputs[0])
            and any(
                c.name in self._operations and c.inputs[0] is op.inputs[0]
                for c in op.control_inputs
            )
        )


def _operations(
    graph: tf.Graph, needed: Collection[str], given: Sequence[tf.Tensor]
) -> tf.GraphDef:
    """Returns some of a graph's operations, with placeholders for the tensors that are given."""
    whole = graph.as_graph_def()
    kept = tf.GraphDef(versions=whole.versions, library=whole.library)
    for x in given:
        node = kept.node.add(name=x.op.name, op="Placeholder")
        node.attr["dtype"].type = x.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(x.shape.as_proto())
    for node in whole.node:
        if node.name in needed:
            kept.node.append(node)
            left = [x for x in node.input if not x.startswith("^") or x[1:] in needed]
            kept.node[-1].input[:] = left
    return kept


def _reached(
    fetches: Sequence[tf.Tensor], outer: Mapping[Any, tf.Tensor], updates: _Updates
) -> tuple[list[tuple[tf.Tensor, tf.Tensor]], set[str]]:
    """Returns pairs (tensor of the session, tensor of the program), and names of operations."""
    found: dict[Any, tuple[tf.Tensor, tf.Tensor]] = {}
    needed: set[str] = set()
    todo = [y.op for y in fetches]

    def stays(op: tf.Operation) -> bool:
        """Whether it is left to the session."""
        return op.type in _KNOWN and op.inputs[0].ref() in outer

    def is_given(op: tf.Operation) -> bool:
        """Whether it is an argument, which is there before anything is computed."""
        return any(y.ref() in outer for y in op.outputs)

    while todo:
        op = todo.pop()
        if op.name in needed:
            continue
        needed.add(op.name)
        # What is left to the session has its order there; arguments are there before anything runs.
        todo += [c for c in op.control_inputs if not stays(c) and not is_given(c)]
        for x in op.inputs:
            if stays(x.op):
                handle = outer[x.op.inputs[0].ref()]
                found.setdefault(x.ref(), (_value_before(x, handle, updates), x))
            elif x.ref() in outer:
                _check_value(x, outer[x.ref()])
                found.setdefault(x.ref(), (outer[x.ref()], x))
            else:
                todo.append(x.op)
    return list(found.values()), needed


def _value_before(x: tf.Tensor, handle: tf.Tensor, updates: _Updates) -> tf.Tensor:
    """Returns what a program reads of a variable of TensorFlow, in the session's graph."""
    if updates.follows(x.op):
        raise ValueError(
            f"a program for devices of JAX computes with {handle.op.name}, a variable of "
            "TensorFlow, after it has assigned to it; the session assigns only after the program. "
            "Read the variable before, and compute its new value within the program"
        )
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=x.dtype)
    value.set_shape(x.shape)
    return value


def _check_value(x: tf.Tensor, given: tf.Tensor) -> None:
    if x.dtype in (tf.resource, tf.variant, tf.string):
        raise ValueError(
            f"a program for devices of JAX is computed from {given.name}, which is a "
            f"{x.dtype.name} of TensorFlow, and not on these devices. Compute what depends on it "
            "outside of the program, and give the program the value"
        )

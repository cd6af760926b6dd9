"""Values of Tensors in eager code: `numpy`, `print`, `float`, `np.asarray`.

A graph that is built eagerly has one LookedAt, made when a value is first asked for. It is a
Lowering that begins empty, and lowers the operations that a Tensor depends on when that Tensor is
looked at. What was computed once is kept. Values of variables are those of now: what depends on a
variable is computed again after the variable has changed. No Tensor depends on an assignment, so
looking at a value never changes a variable.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import numpy.typing as npt
import tensorflow.compat.v1 as tf

from mesh_tensorflow._calls import within
from mesh_tensorflow._core.errors import NoValueError, slip
from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.operation import (
    Cost,
    Operation,
    Tensor,
    bind_methods,
    with_inner_operations,
)
from mesh_tensorflow._core.placement import cost_of
from mesh_tensorflow._lowering.lowering import Lowering, check_impls, fit_merged
from mesh_tensorflow.ops._variable import Assign, Variable
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

__all__: list[str] = []

# `print` and `repr` compute values only up to these numbers of operations; `numpy` always does.
_MOST_FLOPS = 10**9
_MOST_BYTES = 2**28
# Whether a Tensor is being shown: errors on the way may show Tensors, too.
_showing: contextvars.ContextVar[bool] = contextvars.ContextVar("mtf_showing", default=False)


class LookedAt(Lowering):
    """A Lowering of those operations whose values were asked for."""

    def __init__(self, graph: Graph):
        """Creates a LookedAt that has no values yet.

        Args:
          graph: a Graph that is built eagerly.
        """
        meshes = {op.mesh: op.mesh.mesh_impl for op in graph.operations}
        check_impls({mesh: impl for mesh, impl in meshes.items() if impl is not None})
        self.chosen = meshes
        # A Mesh of eager code need not have been given processors; values are the same on any.
        one_device = PlacementMeshImpl("", "", [""])
        self._begin(graph, {mesh: impl or one_device for mesh, impl in meshes.items()})
        self.may_merge = fit_merged(graph.operations)
        self._known = list(graph.operations[-1:])  # the last that `fits` has seen
        self._known_operations = len(graph.operations)
        # The values of variables that the values were computed with.
        self._read: dict[Variable, tf.Tensor] = {}

    def fits(self) -> bool:
        """Whether the meshes have the same implementations as before, and no new kind came."""
        operations = self.graph.operations
        count = self._known_operations
        # A call that fails takes its operations back, and others may follow in their places.
        if operations[count - 1 : count] != self._known:
            count = 0
        new = operations[count:]
        self._known, self._known_operations = list(operations[-1:]), len(operations)
        # Values so far may be on merged processors, which an operation of the user's own cannot
        # read.
        if self.may_merge and not fit_merged(new):
            return False
        all_chosen = all(op.mesh in self.chosen for op in new)
        return all_chosen and all(mesh.mesh_impl is impl for mesh, impl in self.chosen.items())

    def missing(self, x: Tensor) -> list[Operation]:
        """Returns the operations that are to be lowered for a Tensor, in order.

        Args:
          x: a Tensor of the graph.

        Raises:
          NoValueError: an operation is not of the eager program.
        """
        of_graph = set(map(id, self.graph.operations))
        needed: list[Operation] = []
        seen: set[int] = set()
        stack = [(x.operation, False)]
        while stack:
            op, inputs_done = stack.pop()
            if inputs_done:
                needed.append(op)
            elif id(op) not in seen:
                seen.add(id(op))
                _check_eager(op, x, id(op) in of_graph)
                _check_assigns_nothing(op, x)
                # A stack instead of recursion: programs are deeper than Python's limit of nested
                # calls.
                stack.append((op, True))
                stack += [(before, False) for before in _before(op)]
        self._forget_changed([op for op in needed if isinstance(op, Variable)])
        return self._without_value(needed)

    def _without_value(self, operations: Sequence[Operation]) -> list[Operation]:
        """Returns the operations that have no value, or that read one that is to be computed."""
        result: dict[Operation, None] = {}
        # A loop that was lowered before something needed its tape is lowered again.
        taped = {op.loop.tape_of for op in operations if op.loop and op.loop.tape_of}
        for op in operations:
            done = op.outputs and all(y in self.tensors for y in op.outputs)
            tape = op not in taped or op in self.loop_tapes
            # Inputs come first here, so what is computed again is known before what reads it.
            if not done or not tape or any(before in result for before in _before(op)):
                result[op] = None
        return list(result)

    def _forget_changed(self, variables: Iterable[Variable]) -> None:
        """Forgets values that depend on variables whose values have changed."""
        changed = set()
        for v in variables:
            value = v.stored_value()
            before = self._read.get(v)
            if before is None or before.shape != value.shape:
                changed.add(v.value)
            # Each read is another tensor, so only the elements tell whether there was an
            # assignment.
            elif not bool(tf.reduce_all(tf.equal(before, value))):
                # NaN equals nothing, so a variable with one is taken for changed, at no harm.
                changed.add(v.value)
            self._read[v] = value
        if not changed:
            return
        # In order of creation, so that one pass reaches all that depends on a change.
        for op in self.graph.operations:
            if not changed.isdisjoint(op.inputs):
                changed.update(op.outputs)
        for y in changed:
            self.tensors.pop(y, None)

    def lower_operations(self, operations: Iterable[Operation]) -> None:
        """Lowers operations in order; a variable is read, and stays as it is stored.

        Args:
          operations: operations in topological order.
        """
        for op in operations:
            if isinstance(op, Variable):
                # Lowering the Variable itself would lay its stored slices out again, for this mesh.
                # A look must not move the weights that a training Lowering works with.
                value = self.mesh_impl(op).import_tf_tensor(op.value, self._read[op])
                # Reads give it wherever they are: looking at values assigns nothing.
                self.variables[op] = SimpleNamespace(read=lambda value=value: value)
                self.set_tensor_lowering(op.value, value)
            else:
                super().lower_operations([op])

    def value(self, x: Tensor) -> tf.Tensor:
        """Returns the value of a Tensor, a tf.Tensor; computes what is missing.

        Args:
          x: a Tensor of the graph.
        """
        self.lower_operations(self.missing(x))
        return self.mesh_impl(x).export_to_tf_tensor(x, self.tensors[x].to_laid_out_tensor())


def _before(op: Operation) -> list[Operation]:
    """Returns the operations whose results an operation reads."""
    read = [x.operation for x in op.inputs]
    if op.loop is not None and op.loop.tape_of is not None:
        read.append(op.loop.tape_of)
    return read


def _check_eager(op: Operation, x: Tensor, in_graph: bool) -> None:
    if not op.is_eager:
        raise NoValueError(_unknown(x))
    if not in_graph:
        raise NoValueError(
            f"{x.name} {x.shape} has no value of its own: it depends on {op.name}, which is inside "
            "of a loop or was removed from the graph. Return it from the loop, or look at it there "
            "with mtf.Print"
        )


def _check_assigns_nothing(op: Operation, x: Tensor) -> None:
    inner = with_inner_operations([op])
    names = sorted({v.name for i in inner if isinstance(i, Assign) for v in i.variables})
    if names:
        raise NoValueError(
            f"{x.name} {x.shape} has no value that can be looked at: it depends on {op.name}, a "
            f"loop that assigns to {', '.join(names)}, and looking at values changes no variable. "
            "Make a Lowering, which runs the loop once; lowering.export_to_tf_tensor(x) is the "
            "value then"
        )


def _unknown(x: Tensor) -> str:
    return (
        f"{x.name} {x.shape} has no value yet: its program is built in the graph of a session, in "
        "a tf.function or on a SIMD mesh, and runs later. Make a Lowering; "
        "lowering.export_to_tf_tensor(x) is a tf.Tensor to fetch with session.run, or to return "
        "from the function"
    )


def _looked_at(x: Tensor) -> LookedAt:
    """Returns the LookedAt of a Tensor's graph."""
    if not (tf.executing_eagerly() and x.operation.is_eager):
        raise NoValueError(_unknown(x))
    graph = x.graph
    if graph.looked_at is None or not graph.looked_at.fits():
        # Begun anew, since what has been computed may be laid out for other processors.
        graph.looked_at = LookedAt(graph)
    return graph.looked_at


def _value(x: Tensor) -> np.ndarray:
    return _looked_at(x).value(x).numpy()


# -- methods of Tensor


def _numpy(self: Tensor) -> np.ndarray:
    """Returns the value as a NumPy array, in eager code.

    It is computed on one device, or on the attribute `mesh_impl` of its Mesh. What depends on
    variables has the value that follows from their present values.

    >>> import mesh_tensorflow as mtf
    >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
    >>> x = mtf.import_tf_tensor(mesh, [1.0, 2.0, 3.0], "a:3")
    >>> (2 * x).numpy()
    array([2., 4., 6.], dtype=float32)

    Raises:
      NoValueError: it is not in eager code. The error is a TypeError and a ValueError.
    """
    return _value(self)


def _array(
    self: Tensor, dtype: Optional[npt.DTypeLike] = None, copy: Optional[bool] = None
) -> np.ndarray:
    if copy is False:
        raise ValueError(f"{self.name} {self.shape}: its value as an array is always a copy")
    return np.asarray(_value(self), dtype)


def _number(self: Tensor, what: str) -> Any:
    values = _looked_at(self)
    if self.dtype.is_complex and what != "complex":
        raise NoValueError(
            f"{what}(x): {self.name} {self.shape} is {self.dtype.name}. Write complex(x), or "
            f"{what}(mtf.real(x)) or {what}(mtf.abs(x))"
        )
    if self.size != 1:
        raise NoValueError(
            f"{what}(x): {self.name} {self.shape} has {self.size} elements. Reduce it to one, as "
            "mtf.reduce_sum(x) or mtf.reduce_mean(x) do, or take the array x.numpy()"
        )
    return values.value(self).numpy().reshape(())[()]


def _bool(self: Tensor) -> bool:
    if not (tf.executing_eagerly() and self.operation.is_eager):
        if self.dtype == tf.bool:
            slip(
                f"the Tensor {self.name} {self.shape} is asked for its truth (by if, while, and, "
                "or, not), which is not known while the program is built: it is always true. Write "
                "mtf.where(condition, x, y), mtf.logical_and or mtf.while_loop; `x is not None` if "
                "that was the question"
            )
        # As in the classic, where `if x` is always true and asks whether there is one.
        return True
    if self.size != 1:
        raise NoValueError(
            f"bool(x): {self.name} {self.shape} has {self.size} elements, so it is neither true "
            "nor false (in if, while, and, or, not). Write `x is not None` to ask whether there is "
            "a Tensor, mtf.logical_and and mtf.where for each element, mtf.reduce_all(x) or "
            "mtf.reduce_any(x) for all of them"
        )
    return bool(_number(self, "bool"))


def _is_cheap(values: LookedAt, x: Tensor) -> bool:
    """Returns whether a value may be computed without being asked for."""
    missing = [op for op in values.missing(x) if not isinstance(op, Variable)]
    # The cost of a loop is that of one iteration, whatever their number, so it tells nothing here.
    if any(op.loop is not None for op in missing):
        return False
    total = sum((cost_of(op, values.requested_impl(op)) for op in missing), Cost())
    return total.flops <= _MOST_FLOPS and total.bytes <= _MOST_BYTES


def _repr(self: Tensor) -> str:
    """Returns name, shape and dtype; in eager code the value too."""
    if _showing.get() or not (tf.executing_eagerly() and self.operation.is_eager):
        return self.to_string
    # Around the error, too, whose text may show the Tensor itself.
    with within(_showing, True):
        try:
            values = _looked_at(self)
            if not _is_cheap(values, self):
                return f"{self.to_string}, computed by x.numpy()"
            value = values.value(self).numpy()
        except Exception as e:  # a debugger or a traceback shows what has no value, too
            return f"{self.to_string}, without a value: {e}"
    text = np.array2string(value, separator=" ")
    return f"{self.to_string} ={' ' if value.ndim < 2 else chr(10)}{text}"


_METHODS = {
    "numpy": _numpy,
    "__array__": _array,
    "__float__": lambda self: float(_number(self, "float")),
    "__complex__": lambda self: complex(_number(self, "complex")),
    "__int__": lambda self: int(_number(self, "int")),
    "__bool__": _bool,
    "__format__": lambda self, spec: format(_number(self, "format"), spec) if spec else str(self),
    "__repr__": _repr,
}


bind_methods(_METHODS)

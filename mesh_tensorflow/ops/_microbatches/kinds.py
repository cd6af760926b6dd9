"""Kinds: how the values of microbatches make those of the batch that they are parts of.

A model function is built for one microbatch. Of each Tensor in it, a kind says what the value of
the whole batch is:

    rows      of the examples: it has the dimension of the batch, or what became of it
    same      independent of the batch: weights, numbers, and what is computed of them
    drawn     the same, but for random numbers, which each microbatch draws anew
    mean      the mean over the microbatches, as that of `mtf.reduce_mean` over the batch
    sum       the sum over the microbatches, as that of `mtf.reduce_sum` over the batch
    function  a function of means and sums, which is to be computed of those of the whole batch
    unknown   none of these, or it is not known which

Kinds follow from the operations: a quotient of sums over the batch is a function of two sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.shape import Dimension
from mesh_tensorflow._core.tensor import Tensor, is_differentiable
from mesh_tensorflow.ops._contractions.einsum import EinsumOperation
from mesh_tensorflow.ops._contractions.reduce_broadcast import BroadcastOperation, ReduceOperation
from mesh_tensorflow.ops._control.control import CustomGradientOperation, Depend, StopGradient
from mesh_tensorflow.ops._control.while_loop import WhileLoopOperation
from mesh_tensorflow.ops._elementwise.binary import AddOperation
from mesh_tensorflow.ops._elementwise.scalar import ScalarAddOperation, ScalarMultiplyOperation
from mesh_tensorflow.ops._elementwise.slicewise import SlicewiseOperation
from mesh_tensorflow.ops._elementwise.unary import is_cast
from mesh_tensorflow.ops._movement.reshape import ReshapeOperation
from mesh_tensorflow.ops._movement.slice_pad import PadOperation, SliceOperation
from mesh_tensorflow.ops._movement.split_concat import (
    ConcatOperation,
    SplitOperation,
    StackOperation,
    UnstackOperation,
)
from mesh_tensorflow.ops._random import RandomOperation
from mesh_tensorflow.ops._source import Constant, ImportOperation

__all__ = ["Kind", "Kinds"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """The kind of a Tensor.

    Attributes:
      name: one of those above.
      dims: of rows, the dimensions that tell examples apart.
      why: why it is unknown, or would be once rows are reduced.
    """

    name: str
    dims: frozenset[Dimension] = frozenset()
    why: str = ""


_SAME, _DRAWN, _MEAN, _SUM, _FUNCTION = map(Kind, ("same", "drawn", "mean", "sum", "function"))
_FLAT = ("same", "drawn")
# What keeps the kind of all of its inputs, if they have one.
_LINEAR: tuple[type, ...] = (
    BroadcastOperation,
    ConcatOperation,
    Depend,
    ReshapeOperation,
    SliceOperation,
    SplitOperation,
    StackOperation,
    StopGradient,
    UnstackOperation,
)
# What may make a dimension with the name of the batch and another size.
_RESIZES = (ConcatOperation, PadOperation, ReshapeOperation, SliceOperation, SplitOperation)
_ROUNDS = 4  # of a loop, until the kinds of its variables settle
_TINY = 1e-6


class Kinds:
    """The kinds of the Tensors of a microbatch."""

    def __init__(self, batch_dim: Dimension, number: int, rows: Iterable[Tensor]):
        """Creates Kinds.

        Args:
          batch_dim: the Dimension of the batch.
          number: the number of microbatches.
          rows: the Tensors that are taken from the batch.
        """
        self._name, self._whole = batch_dim.name, batch_dim
        self._small = batch_dim.size // number
        self._kinds: dict[Tensor, Kind] = {x: Kind("rows", self._own_dims(x)) for x in rows}

    def __getitem__(self, x: Tensor) -> Kind:
        if x in self._kinds:
            return self._kinds[x]
        own = self._own_dims(x)
        return Kind("rows", own) if own else _SAME

    def _own_dims(self, x: Tensor) -> frozenset[Dimension]:
        return frozenset(d for d in x.shape if d.name == self._name)

    def add(self, operations: Iterable[Operation]) -> None:
        """Finds the kinds of the outputs of operations.

        Args:
          operations: operations in topological order.

        Raises:
          ValueError: one has the dimension of the whole batch.
        """
        for op in operations:
            kinds = [self[x] for x in op.inputs]
            if isinstance(op, WhileLoopOperation):
                self._loop(op, kinds)
                continue
            for i, y in enumerate(op.outputs):
                if y not in self._kinds:
                    self._kinds[y] = self._kind(op, y, kinds, i)

    def _loop(self, op: WhileLoopOperation, kinds: Sequence[Kind]) -> None:
        """Finds the kinds of a loop's results; those of its variables may change within."""
        n = op.num_vars
        before = list(kinds[:n])
        inner = [y for each in op.body_operations for y in each.outputs]
        for _ in range(_ROUNDS):
            # Kinds that were found with other kinds of the loop's variables are not to be kept.
            for y in inner:
                self._kinds.pop(y, None)
            self._kinds.update(zip(op.placeholders, before))
            self.add(op.body_operations)
            after = [self[y] for y in op.body_outputs[:n]]
            joined = [a if a == b else _of_two(a, b) for a, b in zip(before, after)]
            if joined == before:
                break
            before = joined
        sums = [self[y] for y in op.body_outputs[n:]]
        known = ("rows", "same", "drawn", "mean", "sum", "unknown")
        why = f"it is computed in the loop {op.name}"
        results = [k if k.name in known else Kind("unknown", why=why) for k in [*before, *sums]]
        self._kinds.update(zip(op.outputs, results))

    def _kind(self, op: Operation, y: Tensor, kinds: Sequence[Kind], index: int) -> Kind:
        """Returns the kind of an output."""
        carried = frozenset().union(*(k.dims for k in kinds))
        own = frozenset(d for d in y.shape if d in carried) | self._own_dims(y)
        if isinstance(op, ReshapeOperation) and carried - own:
            own |= frozenset(d for d in y.shape if d not in op.inputs[0].shape)
        self._check_size(op, y)
        if own:
            return Kind("rows", own, _why_mixed(op, own, kinds))
        if isinstance(op, CustomGradientOperation):
            kind = self[op.inputs[len(op.inputs) - len(op.outputs) + index]]
            why = f"it is computed in a function with a custom gradient, {op.name}"
            return Kind("unknown", why=why) if kind is _FUNCTION else kind
        unknown = [k for k in kinds if k.name == "unknown" or (k.dims and k.why)]
        if unknown:
            return Kind("unknown", why=unknown[0].why)
        if carried:
            return _reduced(op, kinds)
        if all(k.name in _FLAT for k in kinds):
            drawn = isinstance(op, RandomOperation) or _DRAWN in kinds
            return _DRAWN if drawn else _SAME
        if op.has_effect:
            return kinds[index]
        kind = self._of_totals(op, kinds)
        if kind is _FUNCTION and _DRAWN in kinds:
            why = f"{op.name} joins it with random numbers, which each microbatch draws anew"
            return Kind("unknown", why=why)
        return kind

    def _check_size(self, op: Operation, y: Tensor) -> None:
        """Raises ValueError for the dimension of the whole batch in a microbatch."""
        if self._whole.size == self._small or self._whole not in y.shape:
            return
        if not isinstance(op, _RESIZES):
            raise ValueError(
                f"the model function is called with microbatches of {self._name}={self._small}, "
                f"but {op.name} has the dimension of the whole batch, "
                f"{dims_text([self._whole])}: {y.name} {y.shape}. Take the dimension from the "
                "inputs, as x.shape.dims[0] does, instead of that of the whole batch"
                + (f" ({op.site.file}:{op.site.line})" if op.site is not None else "")
            )

    def _of_totals(self, op: Operation, kinds: Sequence[Kind]) -> Kind:
        """Returns the kind of what is computed of means and sums."""
        totals = [k for k in kinds if k.name not in _FLAT]
        names = {k.name for k in totals}
        if isinstance(op, ScalarMultiplyOperation):
            return self._times(op, kinds[0], op._scalar)
        if isinstance(op, EinsumOperation) and len(totals) == 1:
            [other] = [_number(x) for x, k in zip(op.inputs, kinds) if k.name in _FLAT] or [1.0]
            return self._times(op, totals[0], other)
        if isinstance(op, ScalarAddOperation):
            return _MEAN if names == {"mean"} else _FUNCTION
        if isinstance(op, AddOperation):
            all_sums = names == {"sum"} and len(totals) == len(kinds)
            return _SUM if all_sums else _MEAN if names == {"mean"} else _FUNCTION
        linear = isinstance(op, _LINEAR) or _is_linear_slicewise(op)
        linear = linear or (isinstance(op, ReduceOperation) and op._is_sum())
        same_kind = len(names) == 1 and len(totals) == len(kinds)
        return totals[0] if linear and same_kind else _FUNCTION

    def _times(self, op: Operation, kind: Kind, factor: Any) -> Kind:
        """Returns the kind of a product with a number, which may stand for the size of a batch."""
        if kind.name != "sum":
            return kind
        source = op.inputs[0].operation
        if isinstance(op, ScalarMultiplyOperation) and op.is_mean is not None:
            # A mean over other dimensions of sums over the batch is such a sum.
            others = isinstance(source, ReduceOperation) and self[source.inputs[0]] is _SUM
            return _MEAN if op.is_mean and not others else _SUM
        number = (
            None
            if factor is None
            else tf.get_static_value(factor, partial=False)
            if (tf.is_tensor(factor))
            else factor
        )
        if number is None or not self._may_be_size(number):
            return _SUM
        return Kind(
            "unknown",
            why=f"{op.name} multiplies a sum over the batch by {number!r}, which may be made of "
            f"the size of a microbatch ({self._small} examples) or of the batch",
        )

    def _may_be_size(self, factor: Any) -> bool:
        """Returns whether 1 / factor is a multiple of the size of a microbatch."""
        if not factor or factor == 1:
            return False
        # A factor such as 1 / 32 may be written by the user for the number of examples, of a
        # microbatch or of the batch. Which, cannot be told from the number, so the kind is unknown.
        share = 1.0 / abs(factor) / self._small
        return round(share) >= 1 and abs(share - round(share)) < _TINY * share


def _of_two(a: Kind, b: Kind) -> Kind:
    """Returns the kind of a loop variable that has one kind before, and another after it."""
    if a.dims or b.dims:
        return Kind("rows", a.dims | b.dims, a.why or b.why)
    names = {a.name, b.name}
    if "unknown" in names:
        return a if a.name == "unknown" else b
    if names <= {*_FLAT, "mean"}:
        return _MEAN if "mean" in names else _DRAWN
    return Kind("unknown", why="it is a variable of a loop that adds sums over the batch")


def _why_mixed(op: Operation, own: frozenset[Dimension], kinds: Sequence[Kind]) -> str:
    """Returns why rows are no rows of single examples: "" if they are."""
    rows = [k for k in kinds if k.dims]
    if rows and not isinstance(op, ReshapeOperation) and all(own > k.dims for k in rows):
        pairs = dims_text(sorted(own, key=lambda d: d.name))
        return f"{op.name} compares examples of a batch with each other ({pairs})"
    return next((k.why for k in rows if k.why), "")


def _reduced(op: Operation, kinds: Sequence[Kind]) -> Kind:
    """Returns the kind of what is reduced over the batch."""
    is_sum = isinstance(op, EinsumOperation) or (isinstance(op, ReduceOperation) and op._is_sum())
    if is_sum and len({k.dims for k in kinds if k.dims}) == 1:
        return _SUM
    return Kind("unknown", why=f"{op.name} ({type(op).__name__}) is no sum or mean over the batch")


def _is_linear_slicewise(op: Operation) -> bool:
    """Returns whether it is a change of sign, of nothing, or of the dtype."""
    if not isinstance(op, SlicewiseOperation):
        return False
    x, y = op.inputs[0], op.outputs[0]
    to_number = is_cast(op) and is_differentiable(y.dtype) and not x.dtype.is_bool
    return to_number or op._tf_fn in (tf.negative, tf.identity)


def _number(x: Tensor) -> Optional[float]:
    """Returns the number that a Tensor is filled with; None if it is not known."""
    op = x.operation
    if isinstance(op, Constant):
        value = op._value
        return tf.get_static_value(value) if tf.is_tensor(value) else value
    if isinstance(op, ImportOperation):
        value = tf.get_static_value(op._tf_tensor)
        return float(value) if value is not None and not value.shape else None
    if not op.inputs:
        return None
    inner = _number(op.inputs[0])
    if inner is None:
        return None
    unary: Mapping[Any, Callable[[float], float]] = {
        tf.math.reciprocal: lambda v: 1.0 / v if v else float("inf"),
        tf.negative: lambda v: -v,
        tf.identity: lambda v: v,
    }
    if isinstance(op, SlicewiseOperation):
        return inner if is_cast(op) else unary[op._tf_fn](inner) if op._tf_fn in unary else None
    return inner if isinstance(op, (BroadcastOperation, ReshapeOperation)) else None

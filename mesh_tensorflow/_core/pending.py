"""Predicts, without lowering, where a list of operations sums its partial sums.

`Operation.cost` cannot tell: who pays for an allreduce depends on the operations before and after.
A Walk visits them in order and keeps which Tensors are still to be summed, as a Lowering does with
LazyAllreduceSums; tests compare the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mesh_tensorflow._core.operation import Collective, Cost, Operation
from mesh_tensorflow._core.placement import cost_of, inner_mesh_impl
from mesh_tensorflow._core.tensor import Tensor

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.mesh_impl import MeshImpl

__all__ = ["Walk", "sums_of", "walk"]


@dataclasses.dataclass(eq=False)
class _Pending:
    """A partial sum; several Tensors may be the same one."""

    axes: tuple[int, ...]
    summed: bool = False


class Walk:
    """The state of a walk over operations: their costs and partial sums so far.

    Attributes:
      costs: pairs (operation, its Cost).
      asked: pairs (Tensor, a Collective of its sum).
    """

    def __init__(self, mesh_impl: MeshImpl):
        self._mesh_impl = mesh_impl
        self._pending: dict[Tensor, _Pending] = {}
        self.costs: list[tuple[Operation, Cost]] = []
        self.asked: list[tuple[Tensor, Collective]] = []

    def pending_axes(self, x: Tensor) -> tuple[int, ...]:
        """Returns the mesh axes that a Tensor still has to be summed over."""
        p = self._pending.get(x)
        return () if p is None or p.summed else p.axes

    def need(self, x: Tensor) -> list[Collective]:
        """Records that the value of a Tensor is needed; returns the allreduce that computes it."""
        axes = self.pending_axes(x)
        if not axes:
            return []
        # A LazyAllreduceSum keeps its sum: only the first use of any of its Tensors pays.
        self._pending[x].summed = True
        elements = self._mesh_impl.laid_out_size(x.shape)
        return self._ask(x, [Collective("allreduce", axes, elements, elements * x.dtype.size)])

    def _ask(self, x: Tensor, collectives: Sequence[Collective]) -> list[Collective]:
        self.asked += [(x, collective) for collective in collectives]
        return list(collectives)

    def sum_inputs(self, op: Operation) -> list[Collective]:
        """Visits one operation; returns the collectives that sum its inputs where it needs that."""
        # An executed mesh may split nothing, and the requested one decides what is moved.
        requested = getattr(self._mesh_impl, "requested", self._mesh_impl)
        if inner_mesh_impl(op, requested) is not None:
            # What moves to another layout is summed before, and what begins there is summed there.
            return [c for x in op.inputs for c in self.need(x)]
        given = {x: self.pending_axes(x) for x in op.inputs if self.pending_axes(x)}
        asked: list[Collective] = []
        made = op.partial_sums(self._mesh_impl, given)
        # All inputs or none: an addition can put off two sums over the same axes, but not one of
        # them.
        if made is None:
            for x in op.inputs:
                asked += self.need(x)
            made = op.partial_sums(self._mesh_impl, {}) or {}
        for y, partial in made.items():
            # What is scattered is summed and split. It stays pending: each processor got its part
            # of the sum, and a later use that needs all of it pays for that.
            asked += self._ask(next(iter(given), y), partial.scattered)
            # The same object for a Tensor that is the same sum, so that the first use of either is
            # charged.
            same = partial.same_as
            self._pending[y] = self._pending[same] if same is not None else _Pending(partial.axes)
        return asked

    def summed_over(self, x: Tensor, axes: Iterable[int]) -> None:
        """Records that a partial sum has been summed over some axes, such as by a scatter."""
        # A new object: other Tensors that were the same sum are still to be summed over all axes.
        left = tuple(axis for axis in self.pending_axes(x) if axis not in set(axes))
        self._pending[x] = _Pending(left, summed=not left)

    def same(self, y: Tensor, x: Tensor) -> None:
        """Records that `y` is the same partial sum as `x`, if that is one."""
        if x in self._pending:
            self._pending[y] = self._pending[x]

    def step(self, op: Operation) -> Cost:
        """Visits one operation; returns its cost, with the allreduces of inputs that it needs."""
        cost = cost_of(op, self._mesh_impl) + Cost(collectives=tuple(self.sum_inputs(op)))
        self.costs.append((op, cost))
        return cost


def sums_of(operations: Iterable[Operation], mesh_impl: MeshImpl) -> Walk:
    """Visits operations in order, without their costs; returns the Walk.

    For lowering: costs are those of the requested mesh, and the executed one, on which operations
    are lowered, may not be able to tell them.

    Args:
      operations: operations.
      mesh_impl: a MeshImpl, also an executed one.
    """
    state = Walk(mesh_impl)
    for op in operations:
        state.sum_inputs(op)
    return state


def walk(
    operations: Iterable[Operation], mesh_impl: MeshImpl, needed: Sequence[Tensor] = ()
) -> Walk:
    """Visits operations in order.

    Args:
      operations: operations.
      mesh_impl: a MeshImpl.
      needed: Tensors whose values are needed after the last operation.

    Returns:
      The Walk; its `costs` has a pair for each operation. The last one includes the allreduces for
      `needed`.
    """
    state = Walk(mesh_impl)
    for op in operations:
        state.step(op)
    # No operation needs these sums, so the last one pays for them.
    asked = tuple(c for x in needed for c in state.need(x))
    if asked and state.costs:
        op, cost = state.costs[-1]
        state.costs[-1] = (op, cost + Cost(collectives=asked))
    return state

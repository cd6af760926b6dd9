"""Partial sums and collectives of a list of operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mesh_tensorflow._core.cost import Collective, Cost
from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.tensor import Tensor

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.mesh_impl import MeshImpl

__all__ = ["Walk", "walk"]


@dataclasses.dataclass(eq=False)
class _Pending:
    """A sum that was not communicated yet; several Tensors may be the same one."""

    axes: tuple[int, ...]
    summed: bool = False


class Walk:
    """The state of a walk over operations: costs so far, and pending sums."""

    def __init__(self, mesh_impl: MeshImpl):
        self._mesh_impl = mesh_impl
        self._pending: dict[Tensor, _Pending] = {}
        self.costs: list[tuple[Operation, Cost]] = []

    def pending_axes(self, x: Tensor) -> tuple[int, ...]:
        """Returns the mesh axes over which a Tensor still awaits a sum."""
        p = self._pending.get(x)
        return () if p is None or p.summed else p.axes

    def need(self, x: Tensor) -> list[Collective]:
        """Notes that the value of a Tensor is needed; returns the allreduce this takes."""
        axes = self.pending_axes(x)
        if not axes:
            return []
        self._pending[x].summed = True
        elements = self._mesh_impl.laid_out_size(x.shape)
        return [Collective("allreduce", axes, elements, elements * x.dtype.size)]

    def ask(self, op: Operation) -> list[Collective]:
        """Goes over one operation; returns the sums that it asks for."""
        given = {x: self.pending_axes(x) for x in op.inputs if self.pending_axes(x)}
        asked: list[Collective] = []
        if given and not op.delays_sums(self._mesh_impl, given):
            for x in op.inputs:
                asked += self.need(x)
            given = {}
        for y, what in op.pending_sums(self._mesh_impl, given).items():
            self._pending[y] = self._pending[what] if isinstance(what, Tensor) else _Pending(what)
        return asked

    def same(self, y: Tensor, x: Tensor) -> None:
        """Notes that a Tensor awaits the sum that another one awaits, if that does."""
        if x in self._pending:
            self._pending[y] = self._pending[x]

    def step(self, op: Operation) -> Cost:
        """Goes over one operation; returns its cost with the sums that it asks for."""
        cost = op.cost(self._mesh_impl) + Cost(collectives=tuple(self.ask(op)))
        self.costs.append((op, cost))
        return cost


def walk(
    operations: Iterable[Operation], mesh_impl: MeshImpl, needed: Sequence[Tensor] = ()
) -> Walk:
    """Walks over operations in order.

    Args:
      operations: operations.
      mesh_impl: a MeshImpl.
      needed: Tensors whose values are needed in the end.

    Returns:
      The Walk; its `costs` has a pair for each operation, with the sums for `needed` at the
      end of the last one.
    """
    state = Walk(mesh_impl)
    for op in operations:
        state.step(op)
    asked = tuple(c for x in needed for c in state.need(x))
    if asked and state.costs:
        op, cost = state.costs[-1]
        state.costs[-1] = (op, cost + Cost(collectives=asked))
    return state

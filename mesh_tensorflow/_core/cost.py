"""Cost: the computation and communication of an operation, known before lowering."""

from __future__ import annotations

import dataclasses
from typing import Optional

__all__ = ["Collective", "Cost"]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective communication.

    Attributes:
      kind: "allreduce", "reduce_scatter", "allconcat", "alltoall" or "shift".
      mesh_axes: the mesh axes that processors communicate along.
      elements: number of input elements, or for an allconcat of output elements, over all
        processors.
      bytes: the size of these elements in bytes.
    """

    kind: str
    mesh_axes: tuple[int, ...]
    elements: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one operation, over all processors.

    Attributes:
      flops: floating point operations; a multiply-add counts as two. If processors do not have the
        same work, as many as if all had that of the busiest, for which the others wait.
      bytes: bytes read and written.
      collectives: its own communication. The allreduce of a partial sum is charged to the operation
        that first needs its value.
    """

    flops: int = 0
    bytes: int = 0
    collectives: tuple[Collective, ...] = ()

    def __add__(self, other: Optional[Cost]) -> Cost:
        if other is None:
            return self
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            # Side by side and not added up: each collective has a latency of its own.
            self.collectives + other.collectives,
        )

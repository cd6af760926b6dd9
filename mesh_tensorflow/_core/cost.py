"""Cost: the computation and communication of an operation, known before lowering."""

from __future__ import annotations

import dataclasses
from typing import Optional

__all__ = ["Collective", "Cost"]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One communication between processors.

    Attributes:
      kind: "allreduce", "allconcat", "alltoall" or "shift".
      mesh_axes: the mesh axes within which processors communicate.
      elements: number of elements that enter it, or that leave an allconcat, over all
        processors.
      bytes: the same in bytes.
    """

    kind: str
    mesh_axes: tuple[int, ...]
    elements: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one operation costs, over all processors.

    Attributes:
      flops: floating point operations; a multiply-add counts as two.
      bytes: bytes read and written.
      collectives: the communication it does itself. Sums that it leaves pending are charged
        to the operation that first needs their value.
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
            self.collectives + other.collectives,
        )

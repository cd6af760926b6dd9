"""Exchange: what a collective of a program gives each processor, from which processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

__all__ = ["ALLGATHER", "ALLTOALL", "PERMUTE", "Exchange"]

ALLGATHER, ALLTOALL, PERMUTE = "ALLGATHER", "ALLTOALL", "PERMUTE"


class Exchange:
    """A collective, as a function of the tensors of other processors.

    | kind | result of a processor |
    |---|---|
    | "SUM", "MAX", "MIN" | the reduced tensors of its sources |
    | `ALLGATHER` | the tensors of its sources, concatenated along their first dimension |
    | `ALLTOALL` | of each source the part that is the processor's own, stacked; the parts of a tensor are along its first dimension, in the order of the sources |
    | `PERMUTE` | the tensor of its only source |

    Attributes:
      kind: what it gives, see above.
      sources: for each processor the processors whose tensors it takes, in order. All are physical
        numbers.
      sent_by: the name of the operation that takes the tensors; None if it is the one that gives
        the results.
    """  # noqa: E501

    def __init__(self, kind: str, sources: Sequence[Sequence[int]], sent_by: Optional[str] = None):
        self.kind = kind
        self.sources = [list(taken) for taken in sources]
        self.sent_by = sent_by

    def part_of(self, pnum: int) -> Optional[int]:
        """Returns which part of each source's tensor a processor takes; None if all of it."""
        return self.sources[pnum].index(pnum) if self.kind == ALLTOALL else None

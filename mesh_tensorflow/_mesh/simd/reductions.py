"""Reduction: which processors of a program reduce together, and how."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Reduction"]


class Reduction:
    """A reduction over groups of processors.

    Attributes:
      groups: lists of physical processor numbers; each processor is in one of them.
      kind: "SUM", "MAX" or "MIN".
    """

    def __init__(self, groups: Sequence[Sequence[int]], kind: str):
        self.groups = [list(group) for group in groups]
        self.kind = kind
        self._group_of = {pnum: group for group in self.groups for pnum in group}

    def group_of(self, pnum: int) -> list[int]:
        """Returns the processors that a processor reduces with, itself among them."""
        return self._group_of[pnum]

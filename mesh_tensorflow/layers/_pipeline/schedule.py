"""The schedule of a pipeline: which microbatch is in which stage at each tick."""

from __future__ import annotations

from typing import NamedTuple, Optional

from mesh_tensorflow._core.errors import text_table

__all__ = ["PipelineSchedule"]


class PipelineSchedule(NamedTuple):
    """Which microbatch is in which stage of a pipeline at each tick.

    In a circular pipeline, every microbatch passes all stages several times.

    >>> schedule = mtf.layers.PipelineSchedule(num_stages=2, num_microbatches=3)
    >>> print(schedule.ticks, schedule.bubble)
    4 0.25
    >>> print(schedule.table())
    tick  stage 0  stage 1
    ----  -------  -------
    0           0        -
    1           1        0
    2           2        1
    3           -        2

    Attributes:
      num_stages: the number of stages, K.
      num_microbatches: the number of microbatches, M.
      num_repeats: how often each microbatch passes all stages, R.
    """

    num_stages: int
    num_microbatches: int
    num_repeats: int = 1

    @property
    def items(self) -> int:
        """How often each stage has something to do, M * R."""
        return self.num_microbatches * self.num_repeats

    @property
    def ticks(self) -> int:
        """The number of ticks, M * R + K - 1."""
        return self.items + self.num_stages - 1

    @property
    def bubble(self) -> float:
        """The fraction of its ticks that a stage has nothing to do, (K - 1) / (M * R + K - 1)."""
        return (self.num_stages - 1) / self.ticks

    def at(self, tick: int, stage: int) -> Optional[tuple[int, int]]:
        """Returns (repeat, microbatch) in a stage at a tick; None in a bubble."""
        item = tick - stage
        return divmod(item, self.num_microbatches) if 0 <= item < self.items else None

    def clipped(self, tick: int, stage: int) -> tuple[int, int]:
        """Returns (repeat, microbatch); in a bubble, those nearest in time."""
        # In a bubble a stage computes on something, as all processors run one program. With the
        # nearest microbatch, no further weights have to be fetched for it.
        item = min(max(tick - stage, 0), self.items - 1)
        return divmod(item, self.num_microbatches)

    def table(self) -> str:
        """Returns a table of the microbatches in all stages at each tick, with "-" for bubbles.

        In a circular pipeline, "1.0" is microbatch 0 when it passes the second time.
        """
        rows = [["tick", *(f"stage {k}" for k in range(self.num_stages))]]
        for tick in range(self.ticks):
            found = [self.at(tick, k) for k in range(self.num_stages)]
            rows.append([str(tick), *(self._cell(place) for place in found)])
        return "\n".join(text_table(rows))

    def _cell(self, place: Optional[tuple[int, int]]) -> str:
        if place is None:
            return "-"
        repeat, microbatch = place
        return str(microbatch) if self.num_repeats == 1 else f"{repeat}.{microbatch}"

"""Choice: what changes the graph of a program, besides its layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["ATTENTIONS", "Choice", "choices"]

ATTENTIONS = ("whole", "ring", "all_to_all")


class Choice(NamedTuple):
    """How a program is built, where the layout cannot say it.

    >>> import mesh_tensorflow as mtf
    >>> print(mtf.auto_mtf.Choice(stages=2, microbatches=4, recompute=True))
    2 stages, 4 microbatches; layers recomputed

    Attributes:
      stages: the number of stages of a pipeline; 1 for none.
      microbatches: the number of microbatches of a pipeline.
      repeats: how often each microbatch passes all stages, in a circular pipeline.
      recompute: whether layers are recomputed for the gradient.
      attention: "whole" if keys and values of all positions are on each processor; "ring" or
        "all_to_all" for layouts that split the length.
      sequence_parallel: whether the length between layers has a name of its own,
        `residual_length`, which a layout may split where tensor parallelism leaves it whole.
    """

    stages: int = 1
    microbatches: int = 1
    repeats: int = 1
    recompute: bool = False
    attention: str = "whole"
    sequence_parallel: bool = False

    def __str__(self) -> str:
        parts = []
        if self.stages > 1:
            again = f", {self.repeats} times" if self.repeats > 1 else ""
            parts.append(f"{self.stages} stages{again}, {self.microbatches} microbatches")
        if self.recompute:
            parts.append("layers recomputed")
        if self.attention != "whole":
            parts.append(f"attention {self.attention}")
        if self.sequence_parallel:
            parts.append("residuals by length")
        return "; ".join(parts) or "layers in a row"

    def check(self) -> None:
        """Checks the numbers.

        Raises:
          ValueError: a number is less than 1, `attention` is unknown, or a circular pipeline has
            fewer microbatches than stages.
        """
        for name in ("stages", "microbatches", "repeats"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a number of {name}, 1 or more")
        if self.attention not in ATTENTIONS:
            raise ValueError(
                f"attention={self.attention!r} is none of {', '.join(map(repr, ATTENTIONS))}"
            )
        if self.repeats > 1 and self.microbatches < self.stages:
            raise ValueError(
                f"repeats={self.repeats} makes the pipeline circular, which needs a microbatch for "
                f"each stage: microbatches={self.microbatches} is less than stages={self.stages}"
            )


def choices(
    stages: Iterable[int] = (1,),
    microbatches: Iterable[int] = (1,),
    repeats: Iterable[int] = (1,),
    recompute: Iterable[bool] = (False, True),
    attention: Iterable[str] = ("whole",),
    sequence_parallel: Iterable[bool] = (False,),
) -> list[Choice]:
    """Returns all combinations, without those that make no difference or no pipeline.

    >>> print(*mtf.auto_mtf.choices(stages=[1, 2], microbatches=[4], recompute=[False]), sep=" | ")
    layers in a row | 2 stages, 4 microbatches

    Args:
      stages: numbers of stages.
      microbatches: numbers of microbatches, of pipelines.
      repeats: how often microbatches pass all stages, in pipelines.
      recompute: whether layers are recomputed.
      attention: of "whole", "ring" and "all_to_all".
      sequence_parallel: whether residuals may be split by length.

    Raises:
      ValueError: see `Choice.check`.
    """
    found: dict[Choice, None] = {}
    combined = itertools.product(
        stages, microbatches, repeats, recompute, attention, sequence_parallel
    )
    for values in combined:
        choice = Choice(*values)
        if choice.stages == 1:
            choice = choice._replace(microbatches=1, repeats=1)
        elif choice.repeats > 1 and choice.microbatches < choice.stages:
            continue
        choice.check()
        found[choice] = None
    return list(found)

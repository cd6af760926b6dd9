"""The result of a training run."""

from __future__ import annotations

import dataclasses
from typing import Optional

import numpy as np

__all__ = ["Result"]


@dataclasses.dataclass
class Result:
    """What `mtf.train.fit` returns.

    >>> mtf.train.Result(2, [{"step": 2, "loss": 0.5}], [], None, None, {}).losses
    [0.5]

    Attributes:
      step: the number of steps that are done, those of earlier runs included.
      history: a dictionary for each log: "step", the loss and the metrics of the step, and rates.
      evaluations: a dictionary for each evaluation: "step", and the means of loss and metrics.
      stopped: why the run ended before its last step, or None.
      checkpoint: the path of the last checkpoint, or None.
      variables: the final value of each variable by name, as NumPy arrays.
    """

    step: int
    history: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    stopped: Optional[str]
    checkpoint: Optional[str]
    variables: dict[str, np.ndarray]

    @property
    def final(self) -> dict[str, float]:
        """The last record of `history`, and that of `evaluations` with "eval_" before its names."""
        last: dict[str, float] = {"step": self.step, **(self.history[-1] if self.history else {})}
        if self.evaluations:
            last.update({f"eval_{n}": v for n, v in self.evaluations[-1].items() if n != "step"})
        return last

    @property
    def losses(self) -> list[float]:
        """The losses of `history`."""
        return [record["loss"] for record in self.history if "loss" in record]

    def __repr__(self) -> str:
        values = [f"{n}={v:.4g}" for n, v in self.final.items() if n != "step"]
        stopped = [f"stopped={self.stopped!r}"] if self.stopped else []
        parts = [f"step={self.step}", *values, f"checkpoint={self.checkpoint!r}", *stopped]
        return f"Result({', '.join(parts)})"

"""The result of a training run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

__all__ = ["Result", "packed", "unpacked"]


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


def packed(result: Result) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Returns a Result as values that JSON can say, and arrays, for another process.

    Args:
      result: the Result.
    """
    values = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    for name in ("history", "evaluations"):
        values[name] = [{n: float(v) for n, v in record.items()} for record in values[name]]
    variables = values["variables"]
    return {**values, "variables": list(variables)}, list(variables.values())


def unpacked(values: dict[str, Any], arrays: Sequence[np.ndarray]) -> Result:
    """Returns the Result that `packed` was given.

    Args:
      values: the values.
      arrays: the arrays.
    """
    for record in [*values["history"], *values["evaluations"]]:
        record["step"] = int(record["step"])
    return Result(**{**values, "variables": dict(zip(values["variables"], arrays))})

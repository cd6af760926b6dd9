"""Which of two values of a metric is better."""

from __future__ import annotations

import math
from typing import Optional

__all__ = ["MODES", "is_better"]

MODES = ("min", "max")


def is_better(
    value: float, best: Optional[float], mode: str = "min", min_delta: float = 0.0
) -> bool:
    """Returns whether a value of a metric is better than the best one before it.

    NaN is never better, and any number is better than NaN.

    Args:
      value: the value.
      best: the best one before it, or None if there is none.
      mode: "min" if less is better, or "max".
      min_delta: the difference that is no improvement yet.
    """
    # As no comparison with NaN is true, one would stay the best.
    if math.isnan(value) or best is None or math.isnan(best):
        return not math.isnan(value)
    return (best - value if mode == "min" else value - best) > min_delta

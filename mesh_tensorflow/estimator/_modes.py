"""ModeKeys: the modes in which a model function is called."""

from __future__ import annotations

__all__ = ["DEFAULT_SIGNATURE", "ModeKeys", "STANDARD_MODES"]


class ModeKeys:
    """The values of `mode`: training, evaluation, or prediction."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


STANDARD_MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)
DEFAULT_SIGNATURE = "serving_default"

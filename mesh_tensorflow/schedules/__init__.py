"""Schedules: learning rates and other numbers as functions of the step."""

from mesh_tensorflow.schedules._schedule import (
    Schedule,
    constant,
    cosine,
    join,
    linear_decay,
    linear_warmup,
    noam,
    piecewise,
    rsqrt,
)

__all__ = [
    "Schedule",
    "constant",
    "cosine",
    "join",
    "linear_decay",
    "linear_warmup",
    "noam",
    "piecewise",
    "rsqrt",
]

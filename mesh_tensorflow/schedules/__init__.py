"""Schedules: learning rates and other numbers as functions of the step."""

from mesh_tensorflow.schedules._join import join, piecewise
from mesh_tensorflow.schedules._schedule import Schedule
from mesh_tensorflow.schedules._shapes import (
    constant,
    cosine,
    linear_decay,
    linear_warmup,
    noam,
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

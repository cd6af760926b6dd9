"""Schedules by formula: constant, warmup, decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gin

from mesh_tensorflow.schedules._arithmetic import Arithmetic
from mesh_tensorflow.schedules._schedule import Schedule, check_number

__all__ = ["constant", "cosine", "linear_decay", "linear_warmup", "noam", "rsqrt"]

_MODULE = "mesh_tensorflow.schedules"


def _ramp(step: Any, warmup_steps: float, of: Arithmetic) -> Any:
    """Returns a linear ramp from 0 at step 0 to 1 at `warmup_steps`, then 1."""
    return of.minimum(step / float(warmup_steps), 1.0) if warmup_steps else 1.0


def _progress(step: Any, warmup_steps: float, total_steps: float, of: Arithmetic) -> Any:
    """Returns a linear ramp from 0 at `warmup_steps` to 1 at `total_steps`; 0 before, 1 after."""
    part = (step - float(warmup_steps)) / float(total_steps - warmup_steps)
    return of.minimum(of.maximum(part, 0.0), 1.0)


def _decay(
    function: str,
    height: Callable[[Any, Arithmetic], Any],
    peak: float,
    total_steps: float,
    warmup_steps: float,
    floor: float,
) -> Schedule:
    """Returns a linear warmup and a decay of a certain shape.

    Args:
      function: the name of the schedule.
      height: a function of the progress of the decay from 0 to 1, which falls from 1 to 0.
      peak: the value between the warmup and the decay.
      total_steps: the step at which the decay ends.
      warmup_steps: the step at which it begins.
      floor: the last value.
    """
    for name, value in (("peak", peak), ("warmup_steps", warmup_steps), ("floor", floor)):
        check_number(function, name, value)
    check_number(function, "total_steps", total_steps, 1)
    if warmup_steps >= total_steps:
        raise ValueError(
            f"schedules.{function}: warmup_steps={warmup_steps!r} must be less than total_steps="
            f"{total_steps!r}, which includes the warmup"
        )
    if floor > peak:
        raise ValueError(
            f"schedules.{function}: floor={floor!r} must not be above peak={peak!r}; both are "
            "learning rates, the floor is no fraction of the peak"
        )

    def formula(step: Any, of: Arithmetic) -> Any:
        left = height(_progress(step, warmup_steps, total_steps, of), of)
        rising = _ramp(step, warmup_steps, of)
        return rising * (float(floor) + float(peak - floor) * left)

    arguments = {
        "peak": peak,
        "total_steps": total_steps,
        "warmup_steps": warmup_steps,
        "floor": floor,
    }
    return Schedule(function, arguments, formula)


@gin.configurable("constant_schedule", module=_MODULE)
def constant(value: float) -> Schedule:
    """Returns a schedule that is always `value`.

    >>> print(mtf.schedules.constant(0.1)(1000))
    0.1

    Args:
      value: a number.
    """
    check_number("constant", "value", value)
    return Schedule("constant", {"value": value}, lambda step, of: float(value))


@gin.configurable("linear_warmup_schedule", module=_MODULE)
def linear_warmup(peak: float, warmup_steps: float) -> Schedule:
    """Returns a linear rise from 0 at step 0 to `peak` at `warmup_steps`, then `peak`.

    >>> schedule = mtf.schedules.linear_warmup(0.4, warmup_steps=4)
    >>> print([schedule(step) for step in (0, 1, 4, 100)])
    [0.0, 0.1, 0.4, 0.4]

    Args:
      peak: a number.
      warmup_steps: a number of steps; if 0, the value is always `peak`.
    """
    check_number("linear_warmup", "peak", peak)
    check_number("linear_warmup", "warmup_steps", warmup_steps)
    return Schedule(
        "linear_warmup",
        {"peak": peak, "warmup_steps": warmup_steps},
        lambda step, of: float(peak) * _ramp(step, warmup_steps, of),
    )


@gin.configurable("linear_decay_schedule", module=_MODULE)
def linear_decay(
    peak: float, total_steps: float, warmup_steps: float = 0, floor: float = 0.0
) -> Schedule:
    """Returns a linear warmup to `peak`, then a linear decay to `floor` at `total_steps`.

    >>> schedule = mtf.schedules.linear_decay(1.0, total_steps=8, warmup_steps=4, floor=0.5)
    >>> print([schedule(step) for step in (0, 2, 4, 6, 8, 100)])
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.5]

    Args:
      peak: a number.
      total_steps: the step at which the decay ends; it includes the warmup.
      warmup_steps: the steps of the warmup from 0; none if 0.
      floor: the last value, a number.

    Raises:
      ValueError: the warmup is not shorter than the whole, or the floor is above the peak.
    """
    return _decay("linear_decay", lambda x, of: 1.0 - x, peak, total_steps, warmup_steps, floor)


@gin.configurable("cosine_schedule", module=_MODULE)
def cosine(
    peak: float, total_steps: float, warmup_steps: float = 0, floor: float = 0.0
) -> Schedule:
    """Returns a linear warmup to `peak`, then half a cosine wave to `floor` at `total_steps`.

    Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts" (2017), without
    restarts.

    >>> schedule = mtf.schedules.cosine(1.0, total_steps=12, warmup_steps=4)
    >>> print([round(schedule(step), 3) for step in (0, 2, 4, 8, 12, 100)])
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]

    Args:
      peak: a number.
      total_steps: the step at which the decay ends; it includes the warmup.
      warmup_steps: the steps of the warmup from 0; none if 0.
      floor: the last value, a number.

    Raises:
      ValueError: the warmup is not shorter than the whole, or the floor is above the peak.
    """

    def height(progress: Any, of: Arithmetic) -> Any:
        return (of.cos(math.pi * progress) + 1.0) * 0.5

    return _decay("cosine", height, peak, total_steps, warmup_steps, floor)


@gin.configurable("rsqrt_schedule", module=_MODULE)
def rsqrt(peak: float, warmup_steps: float = 10000, constant_start: bool = False) -> Schedule:
    """Returns a warmup to `peak`, then a decay with the inverse square root of the step.

    From `warmup_steps` on, the value is peak * sqrt(warmup_steps / step). T5 was pretrained with
    `rsqrt(0.01, 10000, constant_start=True)`.

    >>> schedule = mtf.schedules.rsqrt(0.1, warmup_steps=100)
    >>> print([round(schedule(step), 4) for step in (0, 50, 100, 400)])
    [0.0, 0.05, 0.1, 0.05]

    Args:
      peak: a number, the value at `warmup_steps`.
      warmup_steps: a number of steps, at least 1.
      constant_start: whether the value is `peak` before `warmup_steps`, instead of a linear rise.
    """
    check_number("rsqrt", "peak", peak)
    check_number("rsqrt", "warmup_steps", warmup_steps, 1)
    warmup = float(warmup_steps)

    def formula(step: Any, of: Arithmetic) -> Any:
        falling = of.rsqrt(of.maximum(step / warmup, 1.0)) * float(peak)
        return falling if constant_start else falling * _ramp(step, warmup, of)

    arguments = {"peak": peak, "warmup_steps": warmup_steps, "constant_start": constant_start}
    return Schedule("rsqrt", arguments, formula)


@gin.configurable("noam_schedule", module=_MODULE)
def noam(d_model: int, warmup_steps: float = 4000, scale: float = 1.0) -> Schedule:
    """Returns the schedule of the first transformers, after the size of the model.

    It is scale / sqrt(d_model) * min(1 / sqrt(t), t / warmup_steps ** 1.5) with t = step + 1:
    Vaswani et al., "Attention is all you need" (2017).

    >>> schedule = mtf.schedules.noam(d_model=512, warmup_steps=4000)
    >>> print([round(schedule(step), 6) for step in (0, 3999, 15999)])
    [0.0, 0.000699, 0.000349]

    Args:
      d_model: the size of the model dimension, at least 1.
      warmup_steps: the steps of the linear warmup, at least 1.
      scale: a factor.
    """
    check_number("noam", "d_model", d_model, 1)
    check_number("noam", "warmup_steps", warmup_steps, 1)
    check_number("noam", "scale", scale)
    warmup = float(warmup_steps)
    peak = scale / math.sqrt(d_model * warmup)

    def formula(step: Any, of: Arithmetic) -> Any:
        part = (step + 1.0) / warmup
        return of.rsqrt(of.maximum(part, 1.0)) * of.minimum(part, 1.0) * peak

    arguments = {"d_model": d_model, "warmup_steps": warmup_steps, "scale": scale}
    return Schedule("noam", arguments, formula)

"""Schedules in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Union

import gin

from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow.schedules._arithmetic import Arithmetic
from mesh_tensorflow.schedules._schedule import Schedule, check_number

__all__ = ["join", "piecewise"]

_MODULE = "mesh_tensorflow.schedules"


def _check_boundaries(
    function: str, boundaries: Sequence[float], what: str, pieces: Sequence[object]
) -> None:
    for name, given in (("boundaries", boundaries), (what, pieces)):
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise WrongTypeError(f"schedules.{function}: {name} must be a list, not {given!r}")
    for boundary in boundaries:
        check_number(function, "a boundary", boundary)
    if len(pieces) != len(boundaries) + 1:
        raise ValueError(
            f"schedules.{function}: {len(pieces)} {what} need {max(len(pieces) - 1, 0)} "
            f"boundaries between them, but there are {len(boundaries)}: {list(boundaries)}"
        )
    if any(a >= b for a, b in itertools.pairwise(boundaries)):
        raise ValueError(f"schedules.{function}: boundaries must increase, unlike {boundaries!r}")


def _selected(step: Any, boundaries: Sequence[float], values: Sequence[Any], of: Arithmetic) -> Any:
    """Returns the value of the piece in which the step is."""
    value = of.like(values[-1], step)
    for boundary, earlier in zip(reversed(boundaries), reversed(values[:-1])):
        value = of.select(step, of.like(earlier, step), float(boundary), value)
    return value


@gin.configurable("piecewise_schedule", module=_MODULE)
def piecewise(boundaries: Sequence[float], values: Sequence[float]) -> Schedule:
    """Returns a schedule that is constant between boundaries.

    >>> schedule = mtf.schedules.piecewise([100, 200], [0.1, 0.01, 0.001])
    >>> print([schedule(step) for step in (0, 99, 100, 200)])
    [0.1, 0.1, 0.01, 0.001]

    Args:
      boundaries: increasing steps; the value changes at each of them.
      values: numbers, one more than boundaries.

    Raises:
      ValueError: the numbers of values and boundaries do not fit, or boundaries do not increase.
    """
    _check_boundaries("piecewise", boundaries, "values", values)
    for value in values:
        check_number("piecewise", "a value", value)
    arguments = {"boundaries": list(boundaries), "values": list(values)}
    return Schedule(
        "piecewise", arguments, lambda step, of: _selected(step, boundaries, values, of)
    )


@gin.configurable("join_schedules", module=_MODULE)
def join(
    schedules: Sequence[Union[Schedule, Callable[[Any], Any]]], boundaries: Sequence[float]
) -> Schedule:
    """Returns schedules one after the other; each counts its steps from its own beginning.

    >>> warm = mtf.schedules.linear_warmup(0.2, warmup_steps=10)
    >>> schedule = mtf.schedules.join([warm, mtf.schedules.cosine(0.2, 100)], [10])
    >>> print([round(schedule(step), 3) for step in (5, 10, 60, 110)])
    [0.1, 0.2, 0.1, 0.0]

    Args:
      schedules: schedules, or functions of the step that take the kind of step that the joined
        schedule is called with.
      boundaries: increasing steps, at which the next schedule begins; one fewer than schedules.

    Raises:
      ValueError: the numbers of schedules and boundaries do not fit, or boundaries do not increase.
    """
    _check_boundaries("join", boundaries, "schedules", schedules)
    for schedule in schedules:
        if not callable(schedule):
            raise WrongTypeError(
                f"schedules.join: {schedule!r} is no schedule; mtf.schedules.constant makes one of "
                "a number"
            )
    starts = [0.0, *(float(boundary) for boundary in boundaries)]

    def formula(step: Any, of: Arithmetic) -> Any:
        own = [of.maximum(step - start, 0.0) for start in starts]
        values = [schedule(s) for schedule, s in zip(schedules, own)]
        return _selected(step, boundaries, values, of)

    return Schedule("join", {"schedules": list(schedules), "boundaries": list(boundaries)}, formula)

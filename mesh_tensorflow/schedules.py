"""Schedules: learning rates and other numbers as functions of the step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import WrongTypeError, is_real

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


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """Functions of one kind of scalars; `+`, `-`, `*` and `/` are Python's.

    Attributes:
      number: converts a step to a floating-point scalar.
      like: converts a Python number to the same kind of scalar as another one.
      minimum, maximum: of a scalar and a number.
      cos, rsqrt: of a scalar.
      select: the second argument if the first one, a step, is less than the third one, a number,
        otherwise the fourth: `select(step, if_less, bound, if_not)`.
    """

    number: Callable[[Any], Any]
    like: Callable[[float, Any], Any]
    minimum: Callable[[Any, float], Any]
    maximum: Callable[[Any, float], Any]
    cos: Callable[[Any], Any]
    rsqrt: Callable[[Any], Any]
    select: Callable[[Any, Any, float, Any], Any]


_PYTHON = Arithmetic(
    number=float,
    like=lambda value, step: float(value),
    minimum=min,
    maximum=max,
    cos=math.cos,
    rsqrt=lambda x: 1.0 / math.sqrt(x),
    select=lambda step, if_less, bound, if_not: if_less if step < bound else if_not,
)
TENSORFLOW = Arithmetic(
    number=lambda step: tf.cast(step, tf.float32),
    like=lambda value, step: tf.convert_to_tensor(value, tf.float32),
    minimum=tf.minimum,
    maximum=tf.maximum,
    cos=tf.cos,
    rsqrt=tf.math.rsqrt,
    select=lambda step, if_less, bound, if_not: tf.where(step < bound, if_less, if_not),
)


def arithmetic_of(step: Any, name: str) -> Arithmetic:
    """Returns the arithmetic of a step.

    Args:
      step: a Python or NumPy number, or a tf scalar or variable.
      name: the name of the schedule, for errors.

    Raises:
      WrongTypeError: it is none of these.
    """
    if is_real(step):
        return _PYTHON
    if tf.is_tensor(step) or isinstance(step, tf.Variable):
        if step.shape.ndims:
            raise WrongTypeError(f"{name}: the step must be a scalar, not of shape {step.shape}")
        return TENSORFLOW
    raise WrongTypeError(
        f"{name}: the step must be a number, a tf scalar or variable, or an mtf.Tensor without "
        f"dimensions, not {step!r}"
    )


class Schedule:
    """A number as a function of the step; optimizers take one as their learning rate.

    The functions of this module make schedules. The step counts completed updates, from 0.

    >>> schedule = mtf.schedules.cosine(1e-3, total_steps=100, warmup_steps=10)
    >>> print(schedule)
    cosine(peak=0.001, total_steps=100, warmup_steps=10, floor=0.0)
    >>> print([round(schedule(step), 6) for step in (0, 5, 10, 55, 100)])
    [0.0, 0.0005, 0.001, 0.0005, 0.0]
    >>> optimizer = mtf.optimize.AdamWOptimizer(learning_rate=schedule)
    """

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, object],
        formula: Callable[[Any, Arithmetic], Any],
    ):
        """Creates a schedule.

        Args:
          name: the name of the function that makes it.
          arguments: the arguments of that function, for `repr`.
          formula: takes the step as a floating-point scalar, and the Arithmetic to compute with;
            returns a scalar or a number.
        """
        self.name = name
        self.arguments = dict(arguments)
        self._formula = formula

    def __call__(
        self,
        step: Union[float, tf.Tensor, tf.Variable, mtf.Tensor],
        total_train_steps: object = None,
    ) -> Any:
        """Returns the value at a step.

        Args:
          step: the number of completed updates: a Python or NumPy number, a tf scalar or variable,
            or an mtf scalar Tensor.
          total_train_steps: not used; so a schedule can be a factor of
            `mtf.optimize.product_learning_rate`, and the learning rate of a transformer.

        Returns:
          A Python float, a float32 tf scalar, or a float32 mtf scalar Tensor, like the step.

        Raises:
          WrongTypeError: the step is none of these.
        """
        if isinstance(step, mtf.Tensor):
            if step.shape.ndims:
                raise WrongTypeError(f"{self.name}: the step must be a scalar, not {step}")
            # As one operation, since formulas are of TensorFlow's functions, which slices are given
            # to.
            return mtf.cwise(self._on_tensors, [step], output_dtype=tf.float32, name=self.name)
        of = arithmetic_of(step, self.name)
        # A formula such as that of `constant` gives a Python number for any kind of step.
        value = self._formula(of.number(step), of)
        return of.like(value, step)

    def _on_tensors(self, step: tf.Tensor) -> tf.Tensor:
        value = self._formula(TENSORFLOW.number(step), TENSORFLOW)
        return TENSORFLOW.like(value, step)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.name}({arguments})"


def check_number(function: str, name: str, value: object, least: float = 0.0) -> None:
    """Checks an argument of a schedule.

    Args:
      function: the function that was called.
      name: the parameter's name.
      value: the argument.
      least: the smallest number that is right.

    Raises:
      WrongTypeError: it is no number.
      ValueError: it is less than `least`.
    """
    if not is_real(value):
        raise WrongTypeError(f"schedules.{function}: {name} must be a number, not {value!r}")
    # Not `< least`, which lets NaN pass.
    if not float(value) >= least:
        raise ValueError(f"schedules.{function}: {name} must be at least {least:g}, not {value!r}")


_MODULE = "mesh_tensorflow.schedules"


def _ramp(step: Any, warmup_steps: float, of: Arithmetic) -> Any:
    """Returns a linear ramp from 0 at step 0 to 1 at `warmup_steps`, then 1."""
    # Without a warmup, the first step would have 0 / 0: NaN, or an error of Python's.
    return of.minimum(step / float(warmup_steps), 1.0) if warmup_steps else 1.0


def _progress(step: Any, warmup_steps: float, total_steps: float, of: Arithmetic) -> Any:
    """Returns a linear ramp from 0 at `warmup_steps` to 1 at `total_steps`; 0 before, 1 after."""
    # Divided after the subtraction: at the ends, x / x and 0 / x give exactly 1 and 0 in float32,
    # too.
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
        # min(t / warmup, 1) * (floor + (peak - floor) * height): the decay begins where the ramp
        # ends, so only one of the factors changes at a time.
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
        # floor + (peak - floor) * (1 + cos(pi * progress)) / 2: Loshchilov and Hutter, equation 5.
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
        # The maximum keeps the root at 1 until the warmup ends, and step 0 from a division by 0.
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
    # The value at t = warmup_steps, where the rise and the fall meet.
    peak = scale / math.sqrt(d_model * warmup)

    def formula(step: Any, of: Arithmetic) -> Any:
        # With x = t / warmup, min(1 / sqrt(t), t / warmup ** 1.5) = min(1 / sqrt(x), x) /
        # sqrt(warmup), and one of the two factors below is always 1.
        part = (step + 1.0) / warmup
        return of.rsqrt(of.maximum(part, 1.0)) * of.minimum(part, 1.0) * peak

    arguments = {"d_model": d_model, "warmup_steps": warmup_steps, "scale": scale}
    return Schedule("noam", arguments, formula)


def _check_boundaries(
    function: str, boundaries: Sequence[float], what: str, pieces: Sequence[object]
) -> None:
    for name, given in (("boundaries", boundaries), (what, pieces)):
        # A string is a sequence, too, of its letters.
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
    # Backwards, so that the first boundary above the step has the last word.
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
    boundaries, values = list(boundaries), list(values)  # the caller may change its own
    arguments = {"boundaries": boundaries, "values": values}
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
    schedules, boundaries = list(schedules), list(boundaries)  # the caller may change its own
    starts = [0.0, *(float(boundary) for boundary in boundaries)]

    def formula(step: Any, of: Arithmetic) -> Any:
        # All are called, since a tf step has no value yet; those that begin later see step 0, none
        # a negative one.
        own = [of.maximum(step - start, 0.0) for start in starts]
        values = [schedule(s) for schedule, s in zip(schedules, own)]
        return _selected(step, boundaries, values, of)

    return Schedule("join", {"schedules": schedules, "boundaries": boundaries}, formula)

"""Learning rate schedules: factors of a product, and older complete schedules.

A schedule is a function of (step, total_train_steps); gin binds further arguments. The step is an
integer; those that optimizers take, functions of the step alone, get a float32 scalar.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Sequence
from typing import Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow import optimize
from mesh_tensorflow._calls import requires, within
from mesh_tensorflow.utils import steps_done

__all__ = [
    "constant",
    "constant_learning_rate",
    "learning_rate_schedule_noam",
    "linear_decay",
    "linear_decay_learning_rate",
    "linear_warmup",
    "product_learning_rate",
    "slanted_triangular",
    "truncated_rsqrt",
]

_MODULE = "mesh_tensorflow.transformer.learning_rate_schedules"


def _to_float(step: Union[float, tf.Tensor]) -> tf.Tensor:
    return tf.cast(step, tf.float32)


def _check_total(name: str, total_train_steps: Optional[int]) -> None:
    if total_train_steps is None:
        raise ValueError(
            f"{name}: total_train_steps is None, but the schedule depends on the last step; say "
            "how long to train (utils.run.train_steps), or take a schedule without an end"
        )


def _number_of_steps(name: str, steps_or_fraction: float, total_train_steps: int) -> float:
    """Returns a number of steps; values up to 1 are fractions of the total."""
    if steps_or_fraction is None or steps_or_fraction < 0:
        raise ValueError(
            f"{name}: {steps_or_fraction!r} is neither a number of steps nor a fraction of "
            "total_train_steps"
        )
    # 1 is the whole training, not one step.
    if steps_or_fraction > 1:
        return steps_or_fraction
    if steps_or_fraction == 0:
        return 0
    _check_total(name, total_train_steps)
    return steps_or_fraction * total_train_steps


def _ramp(steps_from_zero: tf.Tensor, steps: Union[float, tf.Tensor]) -> tf.Tensor:
    """Returns a linear ramp from 0 to 1 over `steps`, then 1; always 1 if `steps` is 0."""
    # At step 0 the division below would be 0 / 0.
    if not tf.is_tensor(steps) and steps == 0:
        return tf.ones([], tf.float32)
    return tf.minimum(1.0, _to_float(steps_from_zero) / _to_float(steps))


@gin.configurable(module=_MODULE)
def product_learning_rate(
    step: Union[int, tf.Tensor],
    total_train_steps: int,
    factors: Sequence[Any] = gin.REQUIRED,
    offset: int = 0,
) -> tf.Tensor:
    """Returns the product of numbers and of the values of schedules.

    Args:
      step: an integer tf scalar, the step.
      total_train_steps: an integer, the total number of steps.
      factors: a list of numbers, tf scalars, and functions of (step, total_train_steps).
      offset: the step at which the schedules begin; subtracted from both of their arguments.

    Returns:
      A number or tf scalar.

    Raises:
      ValueError: `factors` is not such a list.
    """
    # Not the same function, since gin files name each by its module, with its own offset.
    return optimize.product_learning_rate(step, total_train_steps, factors, offset)


@gin.configurable(module=_MODULE)
def linear_warmup(
    step: Union[int, tf.Tensor], total_train_steps: int, steps_or_fraction: float = 10000
) -> tf.Tensor:
    """Returns a linear warmup from 0 at step 0 to 1.

    Args:
      step: an integer tf scalar, the step.
      total_train_steps: an integer, the total number of steps.
      steps_or_fraction: the length of the warmup: a fraction of `total_train_steps` if at most 1,
        otherwise a number of steps; if 0, the value is always 1.

    Returns:
      A float32 tf scalar.
    """
    return _ramp(step, _number_of_steps("linear_warmup", steps_or_fraction, total_train_steps))


@gin.configurable(module=_MODULE)
def linear_decay(
    step: Union[int, tf.Tensor], total_train_steps: int, steps_or_fraction: float = 0.1
) -> tf.Tensor:
    """Returns 1, then a linear decay to 0 at the last step, negative beyond it.

    Args:
      step: an integer tf scalar, the step.
      total_train_steps: an integer, the total number of steps.
      steps_or_fraction: the length of the decay: a fraction of `total_train_steps` if at most 1,
        otherwise a number of steps; if 0, the value is always 1.

    Returns:
      A float32 tf scalar.
    """
    _check_total("linear_decay", total_train_steps)
    steps = _number_of_steps("linear_decay", steps_or_fraction, total_train_steps)
    return _ramp(_to_float(total_train_steps) - _to_float(step), steps)


@gin.configurable(module=_MODULE)
def truncated_rsqrt(
    step: Union[int, tf.Tensor], total_train_steps: int, warmup_steps: int = 10000
) -> tf.Tensor:
    """Returns 1 / sqrt(max(step, warmup_steps)).

    Args:
      step: an integer tf scalar, the step.
      total_train_steps: not used.
      warmup_steps: the number of steps with a constant value, at least 1.

    Returns:
      A float32 tf scalar.
    """
    del total_train_steps
    # At least 1, as the inverse root of 0 is infinite.
    return tf.math.rsqrt(tf.maximum(_to_float(step), max(float(warmup_steps), 1.0)))


@gin.configurable(module=_MODULE)
def constant(step: object, total_train_steps: int, value: float = 1.0) -> float:
    """Returns `value`, a factor for `product_learning_rate`."""
    del step, total_train_steps
    return value


@gin.configurable(module=_MODULE)
def constant_learning_rate(
    step: object, total_train_steps: int, learning_rate: float = gin.REQUIRED
) -> tf.Tensor:
    """Returns `learning_rate` as a float32 tf scalar."""
    del step, total_train_steps
    return tf.cast(learning_rate, tf.float32)


@gin.configurable(module=_MODULE)
def linear_decay_learning_rate(
    step: Union[int, tf.Tensor], total_train_steps: int, initial_lr: float = 0.1, offset: int = 0
) -> tf.Tensor:
    """Returns `initial_lr` until the step `offset`, then a linear decay to 0 at the last step.

    Args:
      step: an integer tf scalar, the step.
      total_train_steps: an integer, the total number of steps.
      initial_lr: a number.
      offset: an integer, the step at which the decay begins.

    Returns:
      A float32 tf scalar.
    """
    _check_total("linear_decay_learning_rate", total_train_steps)
    left = _to_float(total_train_steps) - _to_float(step)
    return initial_lr * _ramp(left, total_train_steps - offset)


@gin.configurable(module=_MODULE)
def learning_rate_schedule_noam(
    step: Union[int, tf.Tensor],
    total_train_steps: int,
    warmup_steps: int = 10000,
    linear_decay_fraction: float = 0.1,
    multiplier: float = 1.0,
    offset: int = 0,
) -> tf.Tensor:
    """Returns the inverse square root of the step, with a constant beginning and a linear decay.

    After Vaswani et al., "Attention is all you need" (2017), with a constant in place of the linear
    warmup.

    Args:
      step: an integer tf scalar, the step.
      total_train_steps: an integer, the total number of steps.
      warmup_steps: for how many steps the value is constant.
      linear_decay_fraction: the fraction of the steps in which the value decays to 0.
      multiplier: a factor.
      offset: the step at which the schedule begins, subtracted from both `step` and
        `total_train_steps`.

    Returns:
      A float32 tf scalar.
    """
    value = multiplier * truncated_rsqrt(
        _to_float(step) - offset, total_train_steps, warmup_steps=warmup_steps
    )
    if linear_decay_fraction <= 0:
        return value
    _check_total("learning_rate_schedule_noam", total_train_steps)
    left = _to_float(total_train_steps) - _to_float(step)
    return value * _ramp(left, linear_decay_fraction * (total_train_steps - offset))


@gin.configurable(module=_MODULE)
def slanted_triangular(
    step: Union[int, tf.Tensor],
    total_train_steps: int,
    cut_fraction: float = 0.1,
    ratio: float = 32,
    max_learning_rate: float = 0.01,
    start_step: int = 0,
) -> tf.Tensor:
    """Returns a linear warmup and a longer linear decay, between max / ratio and max.

    See Howard and Ruder, "Universal language model fine-tuning for text classification" (2018),
    section 3.2.

    Args:
      step: an integer tf scalar, the step.
      total_train_steps: an integer, the total number of steps.
      cut_fraction: the fraction of the steps in which the rate rises.
      ratio: the largest rate divided by the smallest.
      max_learning_rate: the largest rate.
      start_step: the step at which the schedule begins.

    Returns:
      A float32 tf scalar.

    Raises:
      ValueError: the warmup is shorter than a step, or there is no decay.
    """
    _check_total("slanted_triangular", total_train_steps)
    cut = int(total_train_steps * cut_fraction)
    if cut < 1 or not cut_fraction < 1:
        raise ValueError(
            f"slanted_triangular: cut_fraction={cut_fraction} of "
            f"total_train_steps={total_train_steps} must be at least one step and less than all"
        )
    step = _to_float(step) - start_step
    rising = step / cut
    falling = 1.0 - (step - cut) / (cut * (1.0 / cut_fraction - 1.0))
    # The line that rises is the lower one before the cut, and the one that falls after it.
    height = tf.minimum(rising, falling)
    # Howard and Ruder (2018), equation 3, in which the height is called p.
    return max_learning_rate * (1.0 + height * (ratio - 1.0)) / ratio


# The rate of a step of training, of what users bind to `utils.run.learning_rate_schedule`.

# No plain global: another thread may train at the same time, with another number of steps.
_total_train_steps: contextvars.ContextVar[Optional[int]] = contextvars.ContextVar(
    "total_train_steps", default=None
)


def training_for(steps: int) -> contextlib.AbstractContextManager[None]:
    """Context in which `steps` is the default total number of steps of learning rate schedules.

    Args:
      steps: the number of steps.
    """
    return within(_total_train_steps, steps)


def with_total_steps(schedule: Any, total_train_steps: Optional[int]) -> Any:
    """Returns a learning rate schedule as a function of the step only.

    Args:
      schedule: a function of (step, total_train_steps), or a list of factors, which are numbers
        and such functions.
      total_train_steps: the number of steps.

    Returns:
      A function; or `schedule`, if it is a number or None.
    """
    if isinstance(schedule, (list, tuple)):
        schedule = functools.partial(product_learning_rate, factors=list(schedule))
    if not callable(schedule):
        return schedule
    return functools.partial(schedule, total_train_steps=total_train_steps)


def rate_of_step(schedule: Any) -> Any:
    """Returns the learning rate of the current step: a number, a tf scalar, or None.

    Args:
      schedule: what `with_total_steps` takes or returns, or a function of the step only; one that
        asks for the total number of steps gets that of `training_for`.
    """
    if isinstance(schedule, (list, tuple)) or (
        # What `with_total_steps` returns has the total already.
        callable(schedule) and requires(schedule, "total_train_steps")
    ):
        # `run` has bound the total; without it, only the call that trains knows the last step.
        schedule = with_total_steps(schedule, _total_train_steps.get())
    return schedule(step=steps_done()) if callable(schedule) else schedule

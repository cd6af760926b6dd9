"""Learning rates as products of schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeAlias, Union

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow.optimize._base import Rate
from mesh_tensorflow.utils import steps_done

__all__ = ["compute_lr_for_step", "product_learning_rate"]

# A factor of a learning rate: a value, or a function of (step, total_train_steps).
Factor: TypeAlias = Union[float, tf.Tensor, Callable]


@gin.configurable(module="mesh_tensorflow.optimize")
def product_learning_rate(
    step: Union[int, tf.Tensor],
    total_train_steps: int,
    factors: Sequence[Factor] = gin.REQUIRED,
    offset: int = 0,
) -> Union[float, tf.Tensor]:
    """Computes a learning rate as the product of numbers and schedules.

    >>> print(mtf.optimize.product_learning_rate(10, 100, [0.5, lambda step, total: step / total]))
    0.05

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
    if not isinstance(factors, (list, tuple)):
        raise ValueError(
            f"product_learning_rate: factors must be a list of numbers and schedules, not "
            f"{factors!r}; put a single one in brackets"
        )
    product: Any = 1.0
    for factor in factors:
        if callable(factor):
            factor = factor(step - offset, total_train_steps - offset)
        elif not isinstance(factor, (int, float)) and not tf.is_tensor(factor):
            raise ValueError(
                f"product_learning_rate: a factor must be a number, a tf scalar or a function of "
                f"(step, total_train_steps), not {factor!r}"
            )
        product *= factor
    return product


@gin.configurable(module="mesh_tensorflow.optimize")
def compute_lr_for_step(
    schedules: Sequence[Optional[Sequence[Factor]]],
    learning_rate: Rate,
    train_steps: int = 524288,
) -> list[Rate]:
    """Returns the learning rate of each schedule at the current global step.

    >>> print(mtf.optimize.compute_lr_for_step([None, [2.0, 0.5]], learning_rate=0.1))
    [0.1, 1.0]

    Args:
      schedules: a list, in which each schedule is a list of factors as for
        `product_learning_rate`, or None.
      learning_rate: a number or tf scalar, used where a schedule is None.
      train_steps: an integer, the total number of steps.

    Returns:
      A list of numbers and tf scalars.
    """
    step = steps_done()
    return [
        learning_rate if factors is None else product_learning_rate(step, train_steps, factors)
        for factors in schedules
    ]

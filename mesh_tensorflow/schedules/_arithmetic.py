"""The same arithmetic on Python numbers and on tf scalars."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import WrongTypeError

__all__ = ["TENSORFLOW", "Arithmetic", "arithmetic_of"]


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
    if isinstance(step, numbers.Real) and not isinstance(step, bool):
        return _PYTHON
    if tf.is_tensor(step) or isinstance(step, tf.Variable):
        if step.shape.ndims:
            raise WrongTypeError(f"{name}: the step must be a scalar, not of shape {step.shape}")
        return TENSORFLOW
    raise WrongTypeError(
        f"{name}: the step must be a number, a tf scalar or variable, or an mtf.Tensor without "
        f"dimensions, not {step!r}"
    )

"""Schedule: a function of the step that prints as the call that made it."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow.schedules._arithmetic import TENSORFLOW, Arithmetic, arithmetic_of

__all__ = ["Schedule", "check_number"]


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
            return mtf.cwise(self._on_tensors, [step], output_dtype=tf.float32, name=self.name)
        of = arithmetic_of(step, self.name)
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
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise WrongTypeError(f"schedules.{function}: {name} must be a number, not {value!r}")
    if not float(value) >= least:
        raise ValueError(f"schedules.{function}: {name} must be at least {least:g}, not {value!r}")

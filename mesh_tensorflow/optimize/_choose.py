"""Learning rates of Tensor2Tensor, optimizers with several rates, and optimizers by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeAlias, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import table_lookup
from mesh_tensorflow.optimize._adafactor import AdafactorOptimizer, adafactor_optimizer_from_hparams
from mesh_tensorflow.optimize._adam import AdamWeightDecayOptimizer
from mesh_tensorflow.optimize._base import Optimizer, Rate
from mesh_tensorflow.optimize._sgd import SgdOptimizer
from mesh_tensorflow.utils import steps_done

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


class _WithAlternatives:
    """Selects a schedule by the name of a variable.

    Attributes:
      variable_search: a list of regular expressions, or None.
      alt_lr_schedules: a list with a schedule of `compute_lr_for_step` for each, or None.
    """

    def __init__(
        self,
        variable_search: Optional[Sequence[str]] = None,
        alt_lr_schedules: Optional[Sequence[Optional[Sequence[Factor]]]] = None,
        **kwargs: Any,
    ):
        """Creates the optimizer.

        Only the last regular expression has an effect, as in release 0.1.21: variables whose
        names it matches use the last schedule, all others use `learning_rate`. So write one
        expression with alternatives, "a|b".

        Args:
          variable_search: a list of regular expressions; None for a single rate.
          alt_lr_schedules: a list with a schedule for each: a list of factors as for
            `product_learning_rate`, or None for `learning_rate`. None for a single rate.
          **kwargs: arguments of the optimizer.

        Raises:
          ValueError: there are fewer schedules than regular expressions.
        """
        super().__init__(**kwargs)
        both = variable_search is not None and alt_lr_schedules is not None
        if both and len(alt_lr_schedules) < len(variable_search):  # type: ignore[arg-type]
            raise ValueError(
                f"{type(self).__name__}: each of variable_search {variable_search!r} needs one of "
                f"alt_lr_schedules, but these are {alt_lr_schedules!r}; None is a schedule, too"
            )
        self.variable_search = variable_search
        self.alt_lr_schedules = alt_lr_schedules

    def _rate_of(self, var: mtf.Variable) -> Rate:
        rate = super()._rate_of(var)
        if not self.variable_search or self.alt_lr_schedules is None:
            return rate
        *earlier, last = self.variable_search
        if re.search(last, var.name):
            schedule = self.alt_lr_schedules[len(earlier)]
            return compute_lr_for_step([schedule], rate)[0]
        if any(re.search(pattern, var.name) for pattern in earlier):
            tf.logging.warning(
                "%s matches one of %r, but only the last expression, %r, has an effect",
                var.name,
                earlier,
                last,
            )
        return rate


@gin.configurable(module="mesh_tensorflow.optimize")
class AdafactorWithMultiLRSchedule(_WithAlternatives, AdafactorOptimizer):
    """Adafactor with an alternative learning rate for variables whose names match.

    >>> optimizer = mtf.optimize.AdafactorWithMultiLRSchedule(
    ...     variable_search=["embedding"], alt_lr_schedules=[[0.01]], learning_rate=0.1
    ... )

    Attributes:
      variable_search: a list of regular expressions, or None.
      alt_lr_schedules: a list with a schedule of `compute_lr_for_step` for each, or None.
    """


@gin.configurable(module="mesh_tensorflow.optimize")
class AdamWithMultiLRSchedule(_WithAlternatives, AdamWeightDecayOptimizer):
    """Adam with an alternative learning rate for variables whose names match.

    >>> optimizer = mtf.optimize.AdamWithMultiLRSchedule(
    ...     variable_search=["embedding"], alt_lr_schedules=[[1e-4]], learning_rate=1e-3
    ... )

    Attributes:
      variable_search: a list of regular expressions, or None.
      alt_lr_schedules: a list with a schedule of `compute_lr_for_step` for each, or None.
    """


_OPTIMIZERS: dict[str, Callable[[Any, Rate], Optimizer]] = {
    "SGD": lambda hparams, lr: SgdOptimizer(lr),
    "Adafactor": adafactor_optimizer_from_hparams,
}


def make_optimizer(hparams: Any, lr: Rate) -> Optimizer:
    """Creates the optimizer that `hparams.optimizer` names.

    >>> import types
    >>> hparams = types.SimpleNamespace(optimizer="SGD")
    >>> print(type(mtf.optimize.make_optimizer(hparams, 0.1)).__name__)
    SgdOptimizer

    Args:
      hparams: an object with the attribute optimizer, "SGD" or "Adafactor", and for the latter
        those that `adafactor_optimizer_from_hparams` reads.
      lr: a number or tf scalar, the learning rate.

    Raises:
      ValueError: the name is unknown.
    """
    return table_lookup(_OPTIMIZERS, hparams.optimizer, "hparams.optimizer")(hparams, lr)

"""Optimizers with several learning rates, and optimizers by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import table_lookup
from mesh_tensorflow.optimize._adafactor import AdafactorOptimizer, adafactor_optimizer_from_hparams
from mesh_tensorflow.optimize._adam import AdamWeightDecayOptimizer
from mesh_tensorflow.optimize._base import Factor, Optimizer, Rate, compute_lr_for_step
from mesh_tensorflow.optimize._sgd import SgdOptimizer


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

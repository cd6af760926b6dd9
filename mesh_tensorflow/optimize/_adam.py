"""Adam with decoupled weight decay."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import slip
from mesh_tensorflow.optimize._base import Optimizer, Rate, scalar_like, skip_without_gradient
from mesh_tensorflow.optimize._slots import ADAM

__all__ = ["AdamWeightDecayOptimizer"]


@gin.configurable(module="mesh_tensorflow.optimize")
class AdamWeightDecayOptimizer(Optimizer):
    """Adam with decoupled weight decay, without bias correction.

    Kingma and Ba, "Adam: a method for stochastic optimization" (2014); Loshchilov and Hutter,
    "Decoupled weight decay regularization" (2017). Slot variables: `<var>/adam_m` and
    `<var>/adam_v`.

    >>> optimizer = mtf.optimize.AdamWeightDecayOptimizer(1e-3, weight_decay_rate=0.01)
    >>> w = mtf.get_variable(mesh, "w", "d:4")
    >>> updates = optimizer.apply_grads([mtf.ones_like(w)], graph.trainable_variables)
    >>> print([v.name for v in graph.all_variables])
    ['w', 'w/adam_m', 'w/adam_v']

    Attributes:
      learning_rate, weight_decay_rate, beta_1, beta_2, epsilon: numbers.
      exclude_from_weight_decay: a list of regular expressions; variables whose names match one of
        them are not decayed.
    """

    takes_complex = False

    def __init__(
        self,
        learning_rate: Rate,
        weight_decay_rate: float = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        exclude_from_weight_decay: Optional[Sequence[str]] = None,
    ):
        """Creates the optimizer.

        Args:
          learning_rate: a number or tf scalar.
          weight_decay_rate: the weight decay per step, relative to the learning rate.
          beta_1: the decay of the first moment, the moving average of gradients.
          beta_2: the decay of the second moment, the moving average of squared gradients.
          epsilon: added to the square root of the second moment.
          exclude_from_weight_decay: a list of regular expressions, or None.
        """
        self._check_order(weight_decay_rate, beta_1)
        self.learning_rate = learning_rate
        self.weight_decay_rate = weight_decay_rate
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.exclude_from_weight_decay = exclude_from_weight_decay

    @staticmethod
    def _check_order(weight_decay_rate: Rate, beta_1: Rate) -> None:
        """Reports a slip if beta_1 and beta_2 seem to be given by position, as for other Adams."""
        if not isinstance(weight_decay_rate, (int, float)) or not isinstance(beta_1, (int, float)):
            return
        if weight_decay_rate >= 0.5 and beta_1 > 0.98:
            slip(
                f"AdamWeightDecayOptimizer: weight_decay_rate={weight_decay_rate}, "
                f"beta_1={beta_1}. By position, weight_decay_rate comes before beta_1 and beta_2; "
                f"write AdamWeightDecayOptimizer(learning_rate, beta_1={weight_decay_rate}, "
                f"beta_2={beta_1})"
            )

    def apply_grad(self, grad: Optional[mtf.Tensor], var: mtf.Variable) -> list[mtf.Operation]:
        """Returns operations that update one variable; see `Optimizer.apply_grad`."""
        if skip_without_gradient(grad, var):
            return []
        grad = mtf.to_float(grad)  # type: ignore[arg-type]
        m, v = self._slot(var, "adam_m"), self._slot(var, "adam_v")
        # As corrections of the slots: a product of a slot alone would be in memory from the
        # beginning of the step.
        next_m = m + (1.0 - self.beta_1) * (grad - m)
        next_v = v + (1.0 - self.beta_2) * (mtf.square(grad) - v)
        # Without the division of the moments by 1 - beta ** t, as BERT was trained: a warmup of the
        # rate takes its place.
        update = next_m / (mtf.sqrt(next_v) + self.epsilon)
        # Added to the update and not to the gradient, whose moments would otherwise contain it
        # (Loshchilov and Hutter, 2017).
        if self._decays(var):
            update = mtf.cwise(self._with_decay, [update, mtf.to_float(var.value)])
        update *= scalar_like(self._rate_of(var), update)
        return [mtf.assign_sub(var, update), mtf.assign(m, next_m), mtf.assign(v, next_v)]

    def _rate_of(self, var: mtf.Variable) -> Rate:
        """Returns the learning rate of a variable."""
        return self.learning_rate

    def _slot(self, var: mtf.Variable, name: str) -> mtf.Tensor:
        return mtf.get_variable(
            var.mesh,
            f"{var.name}{ADAM[name]}",
            var.shape,
            initializer=tf.zeros_initializer(),
            trainable=False,
        )

    def _with_decay(self, update: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        # Otherwise the product with the weights may be computed, and held, from the beginning of
        # the step.
        with tf.control_dependencies([update]):
            return update + value * self.weight_decay_rate

    def _decays(self, var: mtf.Variable) -> bool:
        patterns = self.exclude_from_weight_decay or []
        return bool(self.weight_decay_rate) and not any(re.search(p, var.name) for p in patterns)

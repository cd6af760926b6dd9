"""Adam with decoupled weight decay."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.optimize._base import Optimizer, scalar_like, skip_without_gradient

__all__ = ["AdamWeightDecayOptimizer"]


@gin.configurable(module="mesh_tensorflow.optimize")
class AdamWeightDecayOptimizer(Optimizer):
    """Adam without bias correction, and weight decay apart from the gradient.

    Kingma and Ba, "Adam: a method for stochastic optimization" (2014); Loshchilov and Hutter,
    "Decoupled weight decay regularization" (2017). Slots: `<var>/adam_m`, `<var>/adam_v`.

    Attributes:
      learning_rate, weight_decay_rate, beta_1, beta_2, epsilon: numbers.
      exclude_from_weight_decay: regular expressions; a variable whose name one of them is
        found in is not decayed.
    """

    def __init__(
        self,
        learning_rate: Any,
        weight_decay_rate: float = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        exclude_from_weight_decay: Optional[Sequence[str]] = None,
    ):
        self.learning_rate = learning_rate
        self.weight_decay_rate = weight_decay_rate
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.exclude_from_weight_decay = exclude_from_weight_decay

    def apply_grad(
        self, grad: Optional[mtf.Tensor], var: mtf.Variable
    ) -> list[mtf.Operation]:
        if skip_without_gradient(grad, var):
            return []
        grad = mtf.to_float(grad)  # type: ignore[arg-type]
        m, v = self._slot(var, "adam_m"), self._slot(var, "adam_v")
        next_m = self.beta_1 * m + (1.0 - self.beta_1) * grad
        next_v = self.beta_2 * v + (1.0 - self.beta_2) * mtf.square(grad)
        update = next_m / (mtf.sqrt(next_v) + self.epsilon)
        if self._decays(var):
            update += mtf.to_float(var.value) * self.weight_decay_rate
        update *= scalar_like(self._rate_of(var), update)
        return [mtf.assign_sub(var, update), mtf.assign(m, next_m), mtf.assign(v, next_v)]

    def _rate_of(self, var: mtf.Variable) -> Any:
        """Returns the learning rate of a variable."""
        return self.learning_rate

    def _slot(self, var: mtf.Variable, name: str) -> mtf.Tensor:
        return mtf.get_variable(
            var.mesh,
            f"{var.name}/{name}",
            var.shape,
            initializer=tf.zeros_initializer(),
            trainable=False,
        )

    def _decays(self, var: mtf.Variable) -> bool:
        patterns = self.exclude_from_weight_decay or []
        return bool(self.weight_decay_rate) and not any(re.search(p, var.name) for p in patterns)

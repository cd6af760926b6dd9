"""Stochastic gradient descent, plain and with momentum."""

from __future__ import annotations

from typing import Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.optimize._base import Optimizer, Rate, scalar_like, skip_without_gradient

__all__ = ["MomentumOptimizer", "SgdOptimizer"]


@gin.configurable(module="mesh_tensorflow.optimize")
class SgdOptimizer(Optimizer):
    """Stochastic gradient descent: subtracts the learning rate times the gradient."""

    def __init__(self, learning_rate: Rate):
        """Creates the optimizer.

        Args:
          learning_rate: a number or a tf scalar.
        """
        self._lr = learning_rate

    @property
    def lr(self) -> Rate:
        """The learning rate."""
        return self._lr

    def apply_grad(self, grad: Optional[mtf.Tensor], var: mtf.Variable) -> list[mtf.Operation]:
        """Returns operations that update one variable; see `Optimizer.apply_grad`."""
        if skip_without_gradient(grad, var):
            return []
        if isinstance(self.lr, mtf.Tensor):
            return [mtf.assign_sub(var, grad * scalar_like(self.lr, grad))]  # type: ignore
        return [mtf.assign(var, grad, assign_fn=self._descend)]  # type: ignore[arg-type]

    def _descend(
        self, variable: mtf.Variable, slice_var: tf.Variable, grad: tf.Tensor
    ) -> tf.Operation:
        """Updates one slice in a single pass over its memory."""
        dtype = variable.slice_dtype
        return tf.raw_ops.ResourceApplyGradientDescent(
            var=slice_var.handle, alpha=tf.cast(self.lr, dtype), delta=tf.cast(grad, dtype)
        )


@gin.configurable(module="mesh_tensorflow.optimize")
class MomentumOptimizer(Optimizer):
    """Gradient descent with momentum: subtracts the velocity from before the step.

    Slot variable: `<var>_momentum_v`, the velocity.
    """

    def __init__(self, learning_rate: Rate, momentum: Rate):
        """Creates the optimizer.

        Args:
          learning_rate: a number or a tf scalar.
          momentum: a number or a tf scalar, the decay of the velocity.
        """
        self._lr = learning_rate
        self._momentum = momentum

    @property
    def lr(self) -> Rate:
        """The learning rate."""
        return self._lr

    @property
    def momentum(self) -> Rate:
        """The decay of the velocity."""
        return self._momentum

    def apply_grad(self, grad: Optional[mtf.Tensor], var: mtf.Variable) -> list[mtf.Operation]:
        """Returns operations that update one variable; see `Optimizer.apply_grad`."""
        if skip_without_gradient(grad, var):
            return []
        v = mtf.get_variable(
            var.mesh,
            var.name + "_momentum_v",
            var.shape,
            dtype=var.dtype,
            initializer=tf.zeros_initializer(),
            trainable=False,
        )
        rate = scalar_like(self.lr, grad)  # type: ignore[arg-type]
        updated = v * scalar_like(self.momentum, v) + grad * rate  # type: ignore[operator]
        return [mtf.assign(v, updated), mtf.assign_sub(var, v)]

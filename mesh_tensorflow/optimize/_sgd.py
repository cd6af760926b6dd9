"""Stochastic gradient descent, plain and with momentum."""

from __future__ import annotations

from typing import Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import check_flag
from mesh_tensorflow.optimize._base import (
    MOMENTUM,
    Optimizer,
    Rate,
    float_slot,
    scalar_like,
    skip_without_gradient,
    stored_value,
)

__all__ = ["MomentumOptimizer", "SgdOptimizer"]


@gin.configurable(module="mesh_tensorflow.optimize")
class SgdOptimizer(Optimizer):
    """Stochastic gradient descent, with or without momentum.

    Without momentum, it subtracts the learning rate times the gradient. With momentum, it subtracts
    the learning rate times a sum of gradients, m = momentum * m + gradient; or, after Nesterov,
    times gradient + momentum * m: Sutskever et al., "On the importance of initialization and
    momentum in deep learning" (2013). Slot variable with momentum: `<var>/sgd_momentum`.

    >>> optimizer = mtf.optimize.SgdOptimizer(0.1, momentum=0.9, nesterov=True)
    >>> w = mtf.get_variable(mesh, "w", [mtf.Dimension("d", 4)])
    >>> updates = optimizer.apply_grads([mtf.ones_like(w)], graph.trainable_variables)
    >>> print([v.name for v in graph.all_variables])
    ['w', 'w/sgd_momentum']
    """

    def __init__(self, learning_rate: Rate, momentum: Rate = 0.0, nesterov: bool = False):
        """Creates the optimizer.

        Args:
          learning_rate: a number, a tf scalar, an mtf scalar Tensor or a schedule.
          momentum: a number or tf scalar, the decay of the sum of gradients; 0 for none.
          nesterov: whether to look one step ahead.

        Raises:
          ValueError: `nesterov` without momentum.
        """
        write = f"SgdOptimizer({learning_rate!r}, momentum={{value}})"
        check_flag("SgdOptimizer", "nesterov", nesterov, write)
        self._lr = learning_rate
        self._momentum = momentum
        self._nesterov = bool(nesterov)
        if nesterov and not self._has_momentum:
            raise ValueError(
                "SgdOptimizer: nesterov=True needs a momentum, such as momentum=0.9, not 0"
            )

    @property
    def lr(self) -> Rate:
        """The learning rate."""
        return self._lr

    @property
    def momentum(self) -> Rate:
        """The decay of the sum of gradients."""
        return self._momentum

    @property
    def takes_complex(self) -> bool:  # type: ignore[override]
        """Whether it updates complex variables: if it has no momentum, which is float32."""
        return not self._has_momentum

    @property
    def _has_momentum(self) -> bool:
        return not isinstance(self._momentum, (int, float)) or self._momentum != 0

    def apply_grad(self, grad: Optional[mtf.Tensor], var: mtf.Variable) -> list[mtf.Operation]:
        """Returns operations that update one variable; see `Optimizer.apply_grad`."""
        if skip_without_gradient(grad, var):
            return []
        if self._has_momentum:
            return self._with_momentum(mtf.to_float(grad), var)  # type: ignore[arg-type]
        # Such a rate becomes a Tensor of the mesh, whose slices no assign function is given.
        if callable(self.lr) or isinstance(self.lr, mtf.Tensor):
            return [mtf.assign_sub(var, grad * scalar_like(self.lr, grad))]  # type: ignore
        return [mtf.assign(var, grad, assign_fn=self._descend)]  # type: ignore[arg-type]

    def _with_momentum(self, grad: mtf.Tensor, var: mtf.Variable) -> list[mtf.Operation]:
        m = float_slot(var, f"{var.name}/sgd_momentum")
        momentum = scalar_like(self.momentum, grad)
        # A sum and no average: with a constant gradient g it tends to g / (1 - momentum).
        new_m = m * momentum + grad
        direction = new_m * momentum + grad if self._nesterov else new_m
        # The rate multiplies the sum, so that a schedule scales what earlier gradients left, too.
        update = direction * scalar_like(self.lr, grad)
        return [mtf.assign_sub(var, update), mtf.assign(m, new_m)]

    def _descend(
        self, variable: mtf.Variable, slice_var: tf.Variable, grad: tf.Tensor
    ) -> tf.Operation:
        """Updates one slice in a single pass over its memory."""
        dtype = variable.slice_dtype
        if not hasattr(slice_var, "handle"):  # a value that XLA's partitioner splits
            # It has no resource for the kernel below, which updates one in place.
            change = tf.cast(self.lr, dtype) * tf.cast(grad, dtype)
            return slice_var.assign_sub(change, read_value=False)
        if isinstance(self.lr, (int, float)):
            # The read of the slice is none of its inputs, so that all updates share one constant.
            with tf.control_dependencies(None):
                rate = tf.constant(self.lr, dtype)
        else:
            rate = tf.cast(self.lr, dtype)
        return tf.raw_ops.ResourceApplyGradientDescent(
            var=slice_var.handle,
            alpha=rate,
            delta=tf.cast(grad, dtype),
        )


@gin.configurable(module="mesh_tensorflow.optimize")
class MomentumOptimizer(Optimizer):
    """Gradient descent with momentum as in release 0.1.21.

    It subtracts the velocity from before the step, so gradients act one step later than with
    `SgdOptimizer(learning_rate, momentum)`. Slot variable: `<var>_momentum_v`, the velocity.

    >>> optimizer = mtf.optimize.MomentumOptimizer(0.1, momentum=0.9)
    >>> w = mtf.get_variable(mesh, "w", [mtf.Dimension("d", 4)])
    >>> updates = optimizer.apply_grads([mtf.ones_like(w)], graph.trainable_variables)
    >>> print([v.name for v in graph.all_variables])
    ['w', 'w_momentum_v']
    """

    def __init__(self, learning_rate: Rate, momentum: Rate):
        """Creates the optimizer.

        Args:
          learning_rate: a number, a tf scalar, an mtf scalar Tensor or a schedule.
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
            var.name + MOMENTUM,
            var.shape,
            dtype=var.dtype,
            initializer=tf.zeros_initializer(),
            trainable=False,
        )
        velocity = v
        if grad.dtype != v.dtype:  # type: ignore[union-attr]
            # Gradients of microbatches are float32, also where values of variables are bfloat16.
            velocity, grad = stored_value(v.operation), mtf.to_float(grad)  # type: ignore[arg-type]
        rate = scalar_like(self.lr, grad)  # type: ignore[arg-type]
        momentum = scalar_like(self.momentum, velocity)
        updated = velocity * momentum + grad * rate  # type: ignore[operator]
        # By the velocity from before, as in the classic, so a gradient first acts in the next step.
        return [mtf.assign(v, updated), mtf.assign_sub(var, velocity)]

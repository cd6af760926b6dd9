"""The base class of optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, TypeAlias, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import MissingMethodError
from mesh_tensorflow._core.strictness import slip

__all__ = ["Optimizer"]

# A learning rate or another hyperparameter that may change during training.
Rate: TypeAlias = Union[float, tf.Tensor, mtf.Tensor]


class Optimizer:
    """Base class of optimizers; a subclass implements `apply_grad` for one variable."""

    def apply_grads(
        self, grads: Sequence[Optional[mtf.Tensor]], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Operation]:
        """Returns operations that update variables.

        Args:
          grads: a list with a Tensor or None for each variable. If the numbers of gradients and
            variables differ, the excess is ignored, with a warning.
          variables: a list of Variable operations.

        Returns:
          A list of Assign operations, combined where possible.
        """
        assignments: list[mtf.Operation] = []
        if len(grads) != len(variables):
            slip(
                f"{type(self).__name__}.apply_grads: {len(grads)} gradients for {len(variables)} "
                f"variables; only the first {min(len(grads), len(variables))} variables are "
                "updated. Give a gradient, or None, for each",
                key="apply_grads",
            )
        for grad, var in zip(grads, variables):
            assignments += self.apply_grad(grad, var)
        if not assignments:
            return []
        return variables[0].graph.combine_assignments(assignments)

    def apply_grad(self, grad: Optional[mtf.Tensor], var: mtf.Variable) -> list[mtf.Operation]:
        """Returns operations that update one variable.

        Args:
          grad: a Tensor; or None, in which case the variable is skipped with a log message.
          var: a Variable operation.

        Returns:
          A list of Assign operations.
        """
        raise MissingMethodError(f"{type(self).__name__} has no apply_grad")


def skip_without_gradient(grad: Optional[mtf.Tensor], var: mtf.Variable) -> bool:
    """Returns whether there is no gradient, and logs it."""
    if grad is None:
        tf.logging.warning("no gradient for variable %s; it is not updated", var.name)
    return grad is None


def scalar_like(value: Rate, x: mtf.Tensor) -> Union[float, mtf.Tensor]:
    """Converts a learning rate to a scalar that can be multiplied with a Tensor.

    Args:
      value: a number, a tf scalar or an mtf Tensor.
      x: a Tensor.
    """
    if isinstance(value, mtf.Tensor):
        return mtf.cast(value, x.dtype)
    if tf.is_tensor(value):
        return mtf.import_tf_tensor(x.mesh, tf.cast(value, x.dtype), mtf.Shape([]))
    return value

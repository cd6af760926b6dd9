"""Sums and products of a Tensor and a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.interfaces import LoweringLike
from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.constants import constant
from mesh_tensorflow.ops._elementwise.beside import Number, check_scalar

__all__ = ["ScalarAddOperation", "ScalarMultiplyOperation"]


def _as_operand(scalar: Number, x: tf.Tensor) -> Number:
    """Returns a Python number as a constant of the dtype of `x`; others as they are."""
    return constant(scalar, x.dtype) if isinstance(scalar, (int, float)) else scalar


class ScalarMultiplyOperation(Operation):
    """Multiplies a Tensor by a number or a tf scalar; no gradient goes to the scalar."""

    def __init__(self, x: Tensor, scalar: Number, name: Optional[str] = None):
        """Creates the operation.

        Args:
          x: a Tensor.
          scalar: a number or a tf.Tensor without dimensions.
          name: a string or None.

        Raises:
          TypeError: `scalar` is floating and `x` has an integer dtype.
          ValueError: `scalar` is not a number.
        """
        check_scalar("multiply", x, scalar)
        super().__init__([x], name=name or "scalar_mul")
        self._scalar = scalar
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys: Sequence[Tensor]) -> Sequence[Tensor]:
        """Multiplies dy by the scalar."""
        return [grad_ys[0] * self._scalar]

    def lower(self, lowering: LoweringLike) -> None:
        """Multiplies each slice by the scalar."""
        value = lowering.mesh_impl(self).slicewise(
            lambda x: x * _as_operand(self._scalar, x), lowering.tensors[self.inputs[0]]
        )
        lowering.set_tensor_lowering(self.outputs[0], value)


class ScalarAddOperation(Operation):
    """Adds a number or a tf scalar to a Tensor; no gradient goes to the scalar."""

    def __init__(self, x: Tensor, scalar: Number, name: Optional[str] = None):
        """Creates the operation.

        Args:
          x: a Tensor.
          scalar: a number or a tf.Tensor without dimensions.
          name: a string or None.

        Raises:
          TypeError: `scalar` is floating and `x` has an integer dtype.
          ValueError: `scalar` is not a number.
        """
        check_scalar("add", x, scalar)
        super().__init__([x], name=name or "scalar_add")
        self._scalar = scalar
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys: Sequence[Tensor]) -> Sequence[Tensor]:
        """Passes the gradient on."""
        return list(grad_ys)

    def lower(self, lowering: LoweringLike) -> None:
        """Adds the scalar to each slice."""
        value = lowering.mesh_impl(self).slicewise(
            lambda x: x + _as_operand(self._scalar, x), lowering.tensors[self.inputs[0]]
        )
        lowering.set_tensor_lowering(self.outputs[0], value)

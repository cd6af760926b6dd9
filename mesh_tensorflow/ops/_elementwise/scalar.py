"""Sums and products of a Tensor and a number."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.interfaces import LoweringLike
from mesh_tensorflow._core.operation import Operation, gradient_of_output
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.constants import constant
from mesh_tensorflow.ops._elementwise.beside import Number, check_scalar

__all__ = ["ScalarAddOperation", "ScalarMultiplyOperation"]


def _as_operand(scalar: Number, x: tf.Tensor) -> Number:
    """Returns a Python number as a constant of the dtype of `x`; others as they are."""
    return constant(scalar, x.dtype) if isinstance(scalar, (int, float, complex)) else scalar


def _conjugate(scalar: Number) -> Number:
    """Returns the conjugate of a number; real ones as they are."""
    if tf.is_tensor(scalar):
        return tf.math.conj(scalar)
    return scalar.conjugate() if isinstance(scalar, complex) else scalar


class _ScalarOperation(Operation):
    """A Tensor and a number or a tf scalar; no gradient goes to the scalar."""

    works_by_name = True
    _verb: str
    _default_name: str

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
        check_scalar(self._verb, x, scalar)
        super().__init__([x], name=name or self._default_name)
        self._scalar = scalar
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    def _lower(self, lowering: LoweringLike, fn: Callable[[tf.Tensor, Number], tf.Tensor]) -> None:
        """Calls a function of a slice and the scalar."""
        value = lowering.mesh_impl(self).slicewise(
            lambda x: fn(x, _as_operand(self._scalar, x)), lowering.tensors[self.inputs[0]]
        )
        lowering.set_tensor_lowering(self.outputs[0], value)


class ScalarMultiplyOperation(_ScalarOperation):
    """Multiplies a Tensor by a number or a tf scalar; no gradient goes to the scalar.

    Attributes:
      is_mean: whether it makes the mean of a sum, by the number of what is summed; or divides a sum
        by another number, if False. None if it is not known. Microbatches ask for it.
    """

    _verb, _default_name = "multiply", "scalar_mul"
    is_mean: Optional[bool] = None

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Multiplies dy by the scalar, or by its conjugate if it is complex."""
        return [gradient_of_output(grad_ys) * _conjugate(self._scalar)]

    def lower(self, lowering: LoweringLike) -> None:
        """Multiplies each slice by the scalar."""
        self._lower(lowering, operator.mul)


class ScalarAddOperation(_ScalarOperation):
    """Adds a number or a tf scalar to a Tensor; no gradient goes to the scalar."""

    _verb, _default_name = "add", "scalar_add"

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Passes the gradient on."""
        return list(grad_ys)

    def lower(self, lowering: LoweringLike) -> None:
        """Adds the scalar to each slice."""
        self._lower(lowering, operator.add)

"""Comparisons, logic and selection, with broadcasting by dimension name."""

from __future__ import annotations

from typing import Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.shape import ShapeLike
from mesh_tensorflow._core.tensor import Operand, Tensor
from mesh_tensorflow.ops._elementwise.binary import add, binary_op_with_broadcasting, multiply

__all__ = [
    "equal",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "logical_and",
    "logical_or",
    "not_equal",
    "where",
]


def less(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 < x2, a boolean Tensor; see `binary_op_with_broadcasting`."""
    return binary_op_with_broadcasting(tf.less, x1, x2, output_shape, tf.bool)


def greater(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 > x2, a boolean Tensor; see `binary_op_with_broadcasting`."""
    return binary_op_with_broadcasting(tf.greater, x1, x2, output_shape, tf.bool)


def less_equal(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 <= x2, a boolean Tensor; see `binary_op_with_broadcasting`."""
    return binary_op_with_broadcasting(tf.less_equal, x1, x2, output_shape, tf.bool)


def greater_equal(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 >= x2, a boolean Tensor; see `binary_op_with_broadcasting`."""
    return binary_op_with_broadcasting(tf.greater_equal, x1, x2, output_shape, tf.bool)


def equal(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 == x2, a boolean Tensor; see `binary_op_with_broadcasting`."""
    return binary_op_with_broadcasting(tf.equal, x1, x2, output_shape, tf.bool)


def not_equal(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 != x2, a boolean Tensor; see `binary_op_with_broadcasting`."""
    return binary_op_with_broadcasting(tf.not_equal, x1, x2, output_shape, tf.bool)


def logical_and(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns x1 and x2, boolean Tensors; see `binary_op_with_broadcasting`."""
    return binary_op_with_broadcasting(tf.logical_and, x1, x2, output_shape, tf.bool)


def logical_or(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns x1 or x2, boolean Tensors; see `binary_op_with_broadcasting`."""
    return binary_op_with_broadcasting(tf.logical_or, x1, x2, output_shape, tf.bool)


@leaves_no_node
def where(
    condition: Tensor,
    if_true: Tensor,
    if_false: Union[Tensor, float],
    output_shape: Optional[ShapeLike] = None,
) -> Tensor:
    """Returns `if_true` where `condition` is true, and `if_false` elsewhere, broadcast.

    It is the sum of two masked products: if the value that is not selected is NaN or infinite, the
    result is NaN.

    Args:
      condition: a boolean Tensor.
      if_true: a Tensor.
      if_false: a Tensor or a number.
      output_shape: a Shape or None.
    """
    mask = mtf.cast(condition, if_true.dtype)
    taken = multiply(if_true, mask, output_shape)
    if not isinstance(if_false, Tensor) and isinstance(if_false, (int, float)) and if_false == 0:
        return taken
    other = multiply(if_false, mtf.cast(mtf.logical_not(condition), if_true.dtype), output_shape)
    return add(taken, other)

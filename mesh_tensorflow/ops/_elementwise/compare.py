"""Comparisons, logic and selection, with broadcasting by dimension name."""

from __future__ import annotations

from typing import Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.shape import ShapeLike
from mesh_tensorflow._core.tensor import Operand, Tensor, check_tensors
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
    """Returns whether x1 < x2, a boolean Tensor; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.less(a, b).numpy())
    [ True False False]
    """
    return binary_op_with_broadcasting(tf.less, x1, x2, output_shape, tf.bool)


def greater(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 > x2, a boolean Tensor; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.greater(a, b).numpy())
    [False False  True]
    """
    return binary_op_with_broadcasting(tf.greater, x1, x2, output_shape, tf.bool)


def less_equal(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 <= x2, a boolean Tensor; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.less_equal(a, b).numpy())
    [ True  True False]
    """
    return binary_op_with_broadcasting(tf.less_equal, x1, x2, output_shape, tf.bool)


def greater_equal(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 >= x2, a boolean Tensor; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.greater_equal(a, b).numpy())
    [False  True  True]
    """
    return binary_op_with_broadcasting(tf.greater_equal, x1, x2, output_shape, tf.bool)


def equal(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 == x2, a boolean Tensor; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.equal(a, b).numpy())
    [False  True False]
    """
    return binary_op_with_broadcasting(tf.equal, x1, x2, output_shape, tf.bool)


def not_equal(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 != x2, a boolean Tensor; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.not_equal(a, b).numpy())
    [ True False  True]
    """
    return binary_op_with_broadcasting(tf.not_equal, x1, x2, output_shape, tf.bool)


def logical_and(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns x1 and x2, boolean Tensors; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [True, True, False], "d:3", tf.bool)
    >>> b = mtf.constant(mesh, [True, False, False], "d:3", tf.bool)
    >>> print(mtf.logical_and(a, b).numpy())
    [ True False False]
    """
    return binary_op_with_broadcasting(tf.logical_and, x1, x2, output_shape, tf.bool)


def logical_or(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns x1 or x2, boolean Tensors; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [True, True, False], "d:3", tf.bool)
    >>> b = mtf.constant(mesh, [True, False, False], "d:3", tf.bool)
    >>> print(mtf.logical_or(a, b).numpy())
    [ True  True False]
    """
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

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.where(mtf.less(a, b), a, 0.0).numpy())
    [1. 0. 0.]

    Args:
      condition: a boolean Tensor.
      if_true: a Tensor.
      if_false: a Tensor or a number.
      output_shape: a Shape or None.

    Raises:
      WrongTypeError: `condition` is not a Tensor.
    """
    if isinstance(condition, bool):
        raise WrongTypeError(
            f"where: the condition is {condition}. `x == y` asks whether two Tensors are the same "
            "object; mtf.equal(x, y) and mtf.not_equal(x, y) compare their values"
        )
    check_tensors("where", [condition])
    mask = mtf.cast(condition, if_true.dtype)
    taken = multiply(if_true, mask, output_shape)
    if not isinstance(if_false, Tensor) and isinstance(if_false, (int, float)) and if_false == 0:
        return taken
    other = multiply(if_false, mtf.cast(mtf.logical_not(condition), if_true.dtype), output_shape)
    return add(taken, other)

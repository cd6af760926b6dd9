"""Comparisons, logic and selection, with broadcasting by dimension name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.operation import Operation, gradient_of_output
from mesh_tensorflow._core.shape import Shape, ShapeLike, broadcast_shape, convert_to_shape
from mesh_tensorflow._core.tensor import Operand, Tensor, check_tensors
from mesh_tensorflow.ops._elementwise.binary import (
    add,
    binary_arguments_to_tensors,
    binary_op_with_broadcasting,
    check_dtypes,
    lower_broadcast,
    multiply,
)

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
      WrongTypeError: `condition` or `if_true` is not a Tensor.
    """
    if isinstance(condition, bool):
        raise WrongTypeError(
            f"where: the condition is {condition}. `x == y` asks whether two Tensors are the same "
            "object; mtf.equal(x, y) and mtf.not_equal(x, y) compare their values"
        )
    check_tensors("where", [condition, if_true])
    # Products and sums are of numbers.
    if if_true.dtype.is_bool:
        other = mtf.to_int32(if_false) if isinstance(if_false, Tensor) else if_false
        return mtf.cast(where(condition, mtf.to_int32(if_true), other, output_shape), tf.bool)
    mask = mtf.cast(condition, if_true.dtype)
    taken = multiply(if_true, mask, output_shape)
    # The usual mask: a second product would only add zeros.
    if not isinstance(if_false, Tensor) and isinstance(if_false, (int, float)) and if_false == 0:
        return taken
    other = multiply(if_false, mtf.cast(mtf.logical_not(condition), if_true.dtype), output_shape)
    return add(taken, other)


class SelectOperation(Operation):
    """One of two Tensors, by a condition; what is not selected has no part in it, not even NaN."""

    works_by_name = True
    takes_padding = True

    def __init__(self, condition: Tensor, if_true: Tensor, if_false: Tensor, shape: Shape):
        """Creates the operation; `shape` has the dimensions of all inputs."""
        check_dtypes("select", [if_true, if_false])
        super().__init__([condition, if_true, if_false], name="select")
        self._outputs = [Tensor(self, shape, if_true.dtype)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Gives dy to the one that was selected, and 0 to the other."""
        (condition, *inputs), dy = self.inputs, gradient_of_output(grad_ys)
        # The gradient is selected, too: 0 times a NaN from what follows would be NaN.
        conditions = [condition, mtf.logical_not(condition)]
        return [
            None,
            *(
                mtf.reduce_sum(select(taken, dy, 0.0), output_shape=x.shape)
                for taken, x in zip(conditions, inputs)
            ),
        ]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Selects slices that are broadcast by name."""
        # The where of TensorFlow 1 does not broadcast.
        lower_broadcast(self, lowering, tf.where_v2)


def select(
    condition: Tensor,
    if_true: Operand,
    if_false: Operand,
    output_shape: Optional[ShapeLike] = None,
) -> Tensor:
    """Returns what `where` does, of whatever value the one is that is not selected.

    So the gradients of what is selected are numbers, too, where those of the other are not.

    Args:
      condition: a boolean Tensor.
      if_true: a Tensor or a number.
      if_false: a Tensor or a number; one of the two is a Tensor.
      output_shape: a Shape or None.
    """
    if_true, if_false = binary_arguments_to_tensors(if_true, if_false)
    shape = convert_to_shape(output_shape)
    if shape is None:
        shape = broadcast_shape(if_true.shape, if_false.shape, None)
        shape = broadcast_shape(shape, condition.shape, None)
    for x in (condition, if_true, if_false):
        broadcast_shape(shape, x.shape, shape)  # an error if it lacks a dimension
    return SelectOperation(condition, if_true, if_false, shape).outputs[0]

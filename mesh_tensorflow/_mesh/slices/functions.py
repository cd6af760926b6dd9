"""TensorFlow functions on one processor's slices, and tables of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import table_lookup
from mesh_tensorflow._core.shape import Shape, list_product
from mesh_tensorflow._mesh.constants import constant

__all__ = [
    "binary_reduction_fn",
    "broadcast_slice",
    "einsum_equation",
    "einsum_slice",
    "part_of",
    "parts_of",
    "reduction_fn",
]


# Matrix products are slower than elementwise products if a matrix, or all of them together, have
# fewer elements than these, because they are distributed over threads.
_SMALL_MATRIX, _SMALL_MATRICES = 2**6, 2**15

_REDUCTIONS = {"SUM": tf.reduce_sum, "MAX": tf.reduce_max, "MIN": tf.reduce_min}
_BINARY_REDUCTIONS = {"SUM": tf.add, "MAX": tf.maximum, "MIN": tf.minimum}


def reduction_fn(reduction_fn_string: str) -> Callable:
    """Returns tf.reduce_sum, _max or _min for "SUM", "MAX" or "MIN"."""
    return table_lookup(_REDUCTIONS, reduction_fn_string, "reduction")


def binary_reduction_fn(reduction_fn_string: str) -> Callable:
    """Returns tf.add, tf.maximum or tf.minimum for "SUM", "MAX" or "MIN"."""
    return table_lookup(_BINARY_REDUCTIONS, reduction_fn_string, "reduction")


def broadcast_slice(x: tf.Tensor, old_shape: Shape, new_shape: Shape) -> tf.Tensor:
    """Transposes a slice to the order of `new_shape`, with size 1 for the dimensions that it lacks.

    TensorFlow can broadcast the result to a slice of `new_shape`.

    Args:
      x: a tf.Tensor, a slice of a tensor of shape `old_shape`.
      old_shape: a Shape.
      new_shape: a Shape that has all dimensions of `old_shape`.
    """
    if old_shape == new_shape:
        return x
    kept = [d for d in new_shape if d in old_shape]
    perm = [old_shape.dims.index(d) for d in kept]
    if perm != sorted(perm):
        x = tf.transpose(x, constant(perm))
    # Leading dimensions of size 1 are implied.
    if kept == new_shape.dims[len(new_shape) - len(kept) :]:
        return x
    sizes = iter(x.shape.as_list())
    first = new_shape.dims.index(kept[0]) if kept else len(new_shape)
    aligned = [next(sizes) if d in old_shape else 1 for d in new_shape.dims[first:]]
    return tf.reshape(x, constant(aligned))


def einsum_equation(input_shapes: Sequence[Shape], output_shape: Shape) -> str:
    """Returns the equation of `tf.einsum`, with letters from "a" in order of appearance."""
    letters: dict = {}

    def text(shape: Shape) -> str:
        return "".join(letters.setdefault(d, chr(ord("a") + len(letters))) for d in shape)

    inputs = ",".join(text(shape) for shape in input_shapes)
    return f"{inputs}->{text(output_shape)}"


def einsum_slice(
    slices: Sequence[tf.Tensor],
    input_shapes: Sequence[Shape],
    output_shape: Shape,
    einsum_fn: Callable = tf.einsum,
) -> tf.Tensor:
    """Contracts slices by dimension.

    If one input or the output has all dimensions, or if the dtype is an integer, slices are
    broadcast, multiplied and summed, or multiplied as a batch of vectors and matrices. Otherwise
    `einsum_fn` is called.

    Args:
      slices: tf.Tensors.
      input_shapes: their Shapes (of the whole tensors).
      output_shape: a Shape; every dimension occurs in an input.
      einsum_fn: takes an equation and the slices.
    """
    all_dims = list(dict.fromkeys(d for shape in input_shapes for d in shape))
    full = next((s for s in [output_shape, *input_shapes] if all(d in s for d in all_dims)), None)
    if full is None and slices[0].dtype.is_integer:
        full = Shape(all_dims)
    if full is None:
        if len(slices) == 2 and _second_comes_first(input_shapes, output_shape):
            slices, input_shapes = slices[::-1], input_shapes[::-1]
        return einsum_fn(einsum_equation(input_shapes, output_shape), *slices)
    product = _rows_times_matrices(slices, input_shapes, output_shape)
    if product is not None:
        return product
    aligned = [broadcast_slice(x, s, full) for x, s in zip(slices, input_shapes)]
    product = functools.reduce(tf.multiply, aligned)
    if len(output_shape) == len(full):
        return transpose_slice(product, full, output_shape)
    # Leading dimensions that no input has were left out by broadcast_slice.
    offset = len(full) - product.shape.ndims
    summed = [i - offset for i, d in enumerate(full) if d not in output_shape]
    kept = Shape([d for d in full if d in output_shape])
    return transpose_slice(tf.reduce_sum(product, constant(summed)), kept, output_shape)


def _second_comes_first(input_shapes: Sequence[Shape], output_shape: Shape) -> bool:
    """Returns whether a product of two slices needs no transpose if they are swapped.

    After the dimensions that both have, kernels output those of the first operand, then those of
    the second.
    """
    left, right = input_shapes
    of_one = [d for d in output_shape if (d in left) != (d in right)]
    return bool(of_one) and of_one[0] in right


def _rows_times_matrices(
    slices: Sequence[tf.Tensor], input_shapes: Sequence[Shape], output_shape: Shape
) -> Optional[tf.Tensor]:
    """Returns a contraction as a batch of vectors times matrices; None if it is not one.

    An example is attention from a single position.
    """
    if len(slices) != 2 or not slices[0].dtype.is_floating:
        return None
    (row, dims), (matrix, matrix_dims) = sorted(
        zip(slices, (s.dims for s in input_shapes)), key=lambda pair: len(pair[1])
    )
    if not dims or len(matrix_dims) != len(dims) + 1:
        return None
    *batch, inner = dims
    if matrix_dims[:-2] != batch or inner not in matrix_dims[-2:]:
        return None
    [other] = [d for d in matrix_dims[-2:] if d != inner]
    sizes = matrix.shape.as_list()
    small = list_product(sizes[-2:]) < _SMALL_MATRIX or list_product(sizes) < _SMALL_MATRICES
    if small or output_shape.dims != [*batch, other]:
        return None
    product = tf.matmul(tf.expand_dims(row, -2), matrix, transpose_b=inner == matrix_dims[-1])
    return tf.squeeze(product, -2)


def transpose_slice(x: tf.Tensor, old_shape: Shape, new_shape: Shape) -> tf.Tensor:
    """Transposes a slice to the order of `new_shape`, which has the same dimensions."""
    perm = [old_shape.dims.index(d) for d in new_shape]
    return x if perm == sorted(perm) else tf.transpose(x, constant(perm))


def parts_of(axis: int, parts: int, x: tf.Tensor) -> tf.Tensor:
    """Returns equal parts of a slice, stacked.

    Args:
      axis: the axis along which it is cut.
      parts: the number of parts.
      x: a tf.Tensor.
    """
    if axis == 0 and x.shape.is_fully_defined():  # they lie in memory like that
        first, *others = x.shape.as_list()
        return tf.reshape(x, [parts, first // parts, *others])
    return tf.stack(tf.split(x, parts, axis))


def part_of(axis: int, parts: int, x: tf.Tensor, part: Union[int, tf.Tensor]) -> tf.Tensor:
    """Returns one of equal parts of a slice.

    Args:
      axis: the axis along which it is cut.
      parts: the number of parts.
      x: a tf.Tensor.
      part: the number of the part.
    """
    sizes = x.shape.as_list()
    sizes[axis] //= parts
    begin: list[Any] = [0] * len(sizes)
    begin[axis] = part * sizes[axis]
    return tf.slice(x, begin, sizes)


def tile_slice(x: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Broadcasts a slice to `sizes` where it is smaller."""
    same = x.shape.as_list() == list(sizes)
    return x if same else tf.broadcast_to(x, constant(list(sizes)))


def static_arange(begin: int, size: int, stride: int) -> np.ndarray:
    """Returns (begin .. begin + size - 1) * stride, modulo 2**32."""
    wide = (np.arange(begin, begin + size, dtype=np.uint64) * np.uint64(stride)) & np.uint64(
        0xFFFFFFFF
    )
    return wide.astype(np.uint32)

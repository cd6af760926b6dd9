"""Merges the first dimensions of a whole value to one so that each device keeps what it has.

It is what `GspmdMeshImpl` does for `MeshImpl.merge_dims`, which convolutions and others call whose
kernels take a single batch dimension.

XLA's partitioner has no sharding for the product of dimensions of which another than the first is
split: it would gather the value. So each split dimension is cut into its parts, and these come
first in the merged dimension: [a, b] with a over rows and b over cols becomes
[rows, cols, a / rows, b / cols], whose product is split over both mesh dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.shape import Shape, list_product

__all__ = ["merge_parts", "split_parts"]

Annotate = Callable[[tf.Tensor, Sequence], tf.Tensor]


class _Cut:
    """The sizes and axes of a value on the way from dimensions to their product."""

    def __init__(self, tensor_shape: Shape, axes: Sequence[Optional[int]], mesh: Shape, count: int):
        parts = [1 if axis is None else mesh[axis].size for axis in axes[:count]]
        sizes, rest = tensor_shape.to_integer_list, list(axes[count:])
        self.sizes = sizes
        self.axes = list(axes)
        self.merged_sizes = [list_product(sizes[:count]), *sizes[count:]]
        self.merged_axes = [[axis for axis in axes[:count] if axis is not None], *rest]
        cut_dims = [n for part, size in zip(parts, sizes) for n in (part, size // part)]
        self.cut_sizes = cut_dims + sizes[count:]
        self.cut_axes = [axis for a in axes[:count] for axis in (a, None)] + rest
        cut = len(cut_dims)
        # Where dimensions of the cut value are in the ordered one.
        self.order = [*range(0, cut, 2), *range(1, cut, 2), *range(cut, len(self.cut_sizes))]
        self.ordered_sizes = [self.cut_sizes[i] for i in self.order]
        self.ordered_axes = [self.cut_axes[i] for i in self.order]
        self.inverse = [self.order.index(i) for i in range(len(self.order))]


def merge_parts(
    value: tf.Tensor,
    tensor_shape: Shape,
    axes: Sequence[Optional[int]],
    mesh_shape: Shape,
    count: int,
    annotate: Annotate,
) -> tf.Tensor:
    """Returns a whole value with its first dimensions merged to one, parts of devices first.

    Args:
      value: a whole value.
      tensor_shape: its Shape.
      axes: for each dimension, the mesh axis that splits it, or None.
      mesh_shape: the Shape of the mesh.
      count: how many dimensions become one.
      annotate: annotates a value, given the mesh axes of each dimension.
    """
    cut = _Cut(tensor_shape, axes, mesh_shape, count)
    value = annotate(tf.reshape(value, cut.cut_sizes), cut.cut_axes)
    value = annotate(tf.transpose(value, cut.order), cut.ordered_axes)
    return annotate(tf.reshape(value, cut.merged_sizes), cut.merged_axes)


def split_parts(
    value: tf.Tensor,
    tensor_shape: Shape,
    axes: Sequence[Optional[int]],
    mesh_shape: Shape,
    count: int,
    annotate: Annotate,
) -> tf.Tensor:
    """Returns the whole value of a tensor from what `merge_parts` returns; arguments as there."""
    cut = _Cut(tensor_shape, axes, mesh_shape, count)
    value = annotate(value, cut.merged_axes)
    value = annotate(tf.reshape(value, cut.ordered_sizes), cut.ordered_axes)
    value = annotate(tf.transpose(value, cut.inverse), cut.cut_axes)
    return annotate(tf.reshape(value, cut.sizes), cut.axes)

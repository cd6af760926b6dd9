"""Merges the first dimensions of a slice to one, for kernels that take a single batch dimension.

These are the methods `merge_dims` and `split_dims` of MeshImpl; GspmdMeshImpl has others.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.shape import Shape, list_product

__all__ = ["merge_dims", "merged_sizes", "split_dims"]


def merged_sizes(mesh_impl: Any, tensor_shape: Shape, count: int) -> list[int]:
    """Returns the sizes of a slice, with the first `count` dimensions merged to one."""
    sizes = mesh_impl.slice_shape(tensor_shape)
    return [list_product(sizes[:count]), *sizes[count:]]


def merge_dims(mesh_impl: Any, x: tf.Tensor, tensor_shape: Shape, count: int) -> tf.Tensor:
    """Returns a slice with its first dimensions merged to one, in an order of the mesh's choice.

    Args:
      mesh_impl: a MeshImpl, whose method this is.
      x: a slice of a tensor.
      tensor_shape: the Shape of the tensor.
      count: how many dimensions become one.
    """
    return _reshaped(x, merged_sizes(mesh_impl, tensor_shape, count))


def split_dims(mesh_impl: Any, x: tf.Tensor, tensor_shape: Shape, count: int) -> tf.Tensor:
    """Returns the slice of a tensor from one whose first dimensions `merge_dims` merged."""
    return _reshaped(x, mesh_impl.slice_shape(tensor_shape))


def _reshaped(x: tf.Tensor, sizes: list[int]) -> tf.Tensor:
    return x if x.shape.as_list() == sizes else tf.reshape(x, sizes)

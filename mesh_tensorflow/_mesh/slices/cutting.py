"""Splitting a whole tensor into the slices of a mesh, and joining them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.layout import TensorLayout, pnum_to_processor_coordinates
from mesh_tensorflow._core.shape import Shape

__all__ = ["combine_slices", "in_own_memory", "make_slices", "slice_coordinates"]


def slice_coordinates(layout: TensorLayout, mesh_shape: Shape, pnum: int) -> tuple[int, ...]:
    """Returns, for each tensor axis, the number of the part that processor `pnum` holds."""
    coordinates = pnum_to_processor_coordinates(mesh_shape, pnum)
    return tuple(0 if axis is None else coordinates[axis] for axis in layout)


def make_slices(x: tf.Tensor, layout: TensorLayout, mesh_shape: Shape) -> list[tf.Tensor]:
    """Splits `x` into a slice for each processor; equal slices are the same tf.Tensor."""
    parts: dict[tuple[int, ...], Any] = {(): x}
    for tensor_axis, mesh_axis in enumerate(layout):
        grown = {}
        for key, part in parts.items():
            n = 1 if mesh_axis is None else mesh_shape[mesh_axis].size
            pieces = [part] if n == 1 else tf.split(part, n, tensor_axis)
            grown.update({key + (i,): piece for i, piece in enumerate(pieces)})
        parts = grown
    return [parts[slice_coordinates(layout, mesh_shape, pnum)] for pnum in range(mesh_shape.size)]


def in_own_memory(piece: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
    """Returns a slice that a variable can keep without keeping the whole tensor.

    TensorFlow cuts along the first axis without copying, and a view holds the memory of it all. Its
    graph optimizer takes operations that only copy (DeepCopy, Snapshot) away.

    Args:
      piece: a slice.
      whole: the tf.Tensor that it was cut from.
    """
    if piece is whole or piece.shape == whole.shape:
        return piece
    return tf.raw_ops.Roll(input=piece, shift=0, axis=0)


def combine_slices(
    slices: Sequence[Any], layout: TensorLayout, mesh_shape: Shape, device: Optional[str] = None
) -> tf.Tensor:
    """Joins the slices of all processors to the whole tensor.

    Args:
      slices: one tf.Tensor for each processor.
      layout: a TensorLayout.
      mesh_shape: a Shape.
      device: the device to join them on; chosen by TensorFlow if None.
    """
    parts: dict[tuple[int, ...], Any] = {}
    for pnum, piece in enumerate(slices):
        # One of several equal slices, that of the first processor that has it.
        parts.setdefault(slice_coordinates(layout, mesh_shape, pnum), piece)
    with tf.device(device):
        for tensor_axis in reversed(range(len(layout))):
            joined: dict[tuple[int, ...], list] = {}
            for key in sorted(parts):
                joined.setdefault(key[:-1], []).append(parts[key])
            parts = {
                key: pieces[0] if len(pieces) == 1 else tf.concat(pieces, tensor_axis)
                for key, pieces in joined.items()
            }
    return parts[()]

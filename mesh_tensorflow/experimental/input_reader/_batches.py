"""Batches of a data set, checked against the shapes of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.shape import Shape, convert_to_shape

__all__ = ["batched", "check_elements", "convert_shapes"]


def convert_shapes(mtf_input_shapes: Sequence[Any]) -> list[Shape]:
    """Returns the Shapes of a dataset's components, batch first.

    Args:
      mtf_input_shapes: a list of Shapes, or of what converts to them.

    Raises:
      ValueError: there are none, or their first dimensions differ.
    """
    shapes = [convert_to_shape(shape) for shape in mtf_input_shapes]
    if not shapes or any(not len(s) or s[0] != shapes[0][0] for s in shapes):  # type: ignore
        raise ValueError(
            "mtf_input_shapes: each input needs a shape that begins with the dimension of the "
            f"batch, the same for all; got {[str(s) for s in shapes]}"
        )
    return shapes  # type: ignore


def batched(
    ds_creator: Callable[[], Any], size: int, prefetch_size: int, shards: int = 1, index: int = 0
) -> Any:
    """Returns batches of a data set's elements; what is left over at its end is dropped.

    Args:
      ds_creator: a function that returns a tf.data.Dataset of single examples.
      size: how many examples a batch has.
      prefetch_size: how many batches to hold ready; -1 leaves it to TensorFlow, 0 is none.
      shards: take one batch of so many,
      index: this one of them.
    """
    ds = ds_creator().batch(size, drop_remainder=True)
    if shards > 1:
        ds = ds.shard(shards, index)
    if prefetch_size == 0:
        return ds
    return ds.prefetch(tf2.data.AUTOTUNE if prefetch_size < 0 else prefetch_size)


def check_elements(ds: Any, sizes: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> list[Any]:
    """Returns the dtypes of the inputs in the elements of a data set.

    Args:
      ds: a tf.data.Dataset of batches.
      sizes: for each input the sizes of a batch.
      shapes: the Shapes, for the message.

    Raises:
      ValueError: there are more or fewer inputs than shapes, or sizes differ.
    """
    specs = tf.nest.flatten(tf.data.get_output_shapes(ds))
    fits = len(specs) == len(sizes) and all(
        found.is_compatible_with(wanted) for found, wanted in zip(specs, sizes)
    )
    if not fits:
        raise ValueError(
            f"the data set has batches of {[s.as_list() for s in specs]}, but mtf_input_shapes "
            f"say {[dims_text(shape) for shape in shapes]}, of which {[list(s) for s in sizes]} is "
            "read at a time. ds_creator must return single examples, of the same sizes without "
            "the batch"
        )
    return tf.nest.flatten(tf.data.get_output_types(ds))

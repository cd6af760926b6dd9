"""Batches of a dataset, checked against the shapes of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.shape import Shape, ShapeLike, convert_to_shape

__all__ = ["batched", "check_elements", "convert_shapes"]


def convert_shapes(mtf_input_shapes: Sequence[ShapeLike]) -> list[Shape]:
    """Returns the Shapes of a dataset's components, batch first.

    Args:
      mtf_input_shapes: Shapes, or what converts to them.

    Raises:
      ValueError: there are none, or their first dimensions differ.
    """
    shapes = [convert_to_shape(shape) for shape in mtf_input_shapes]
    if not shapes or any(not len(s) or s[0] != shapes[0][0] for s in shapes):
        raise ValueError(
            "mtf_input_shapes: each input needs a shape that begins with the dimension of the "
            f"batch, the same for all; got {[str(s) for s in shapes]}"
        )
    return shapes


def batched(
    ds_creator: Callable[[], tf.data.Dataset],
    size: int,
    prefetch_size: int,
    shards: int = 1,
    index: int = 0,
) -> tf.data.Dataset:
    """Returns a dataset of batches; drops the remainder at the end.

    Args:
      ds_creator: a function that returns a tf.data.Dataset of single examples.
      size: the batch size.
      prefetch_size: the number of batches to prefetch; -1 lets TensorFlow choose, 0 is none.
      shards: the number of shards; a shard has one of so many batches.
      index: the number of the shard.
    """
    ds = ds_creator().batch(size, drop_remainder=True)
    if shards > 1:
        ds = ds.shard(shards, index)
    if prefetch_size == 0:
        return ds
    return ds.prefetch(tf2.data.AUTOTUNE if prefetch_size < 0 else prefetch_size)


def check_elements(
    ds: tf.data.Dataset, sizes: Sequence[Sequence[int]], shapes: Sequence[Shape]
) -> list[tf.DType]:
    """Checks the shapes of the elements of a dataset; returns the dtypes of the inputs.

    Args:
      ds: a tf.data.Dataset of batches.
      sizes: for each input, the shape of a batch.
      shapes: the Shapes of the inputs, for the error message.

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

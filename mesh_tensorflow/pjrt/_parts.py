"""The parts of arrays that this process has, as checkpoints have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import tensorflow.compat.v1 as tf
from jax.sharding import Sharding

from mesh_tensorflow._mesh.variables.files import Part, Reader, slice_spec
from mesh_tensorflow.pjrt._devices import all_dtypes

__all__ = ["own_specs", "parts_to_write", "read_array", "spec_of"]


def spec_of(sizes: Sequence[int], index: Sequence[slice]) -> str:
    """Returns a part in the notation of checkpoints; "" for the whole.

    Args:
      sizes: the shape of the whole.
      index: the range of the part along each dimension.
    """
    ranges = [s.indices(size)[:2] for s, size in zip(index, sizes)]
    return slice_spec(sizes, [b for b, _ in ranges], [e - b for b, e in ranges])


def parts_to_write(array: jax.Array, name: str, dtype: tf.DType) -> list[Part]:
    """Returns the parts that this process writes: of copies, one process has the first.

    Args:
      array: a variable.
      name: its name in files.
      dtype: its dtype in files.
    """
    return [
        Part(
            name,
            spec_of(array.shape, shard.index),
            np.asarray(shard.data).astype(dtype.as_numpy_dtype, copy=False),
        )
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def own_specs(sizes: Sequence[int], where: Sharding) -> list[str]:
    """Returns what `parts_to_write` would write of a variable, whether it has a value or not.

    Args:
      sizes: the shape of the variable.
      where: its sharding.
    """
    first: dict[str, Any] = {}
    for device, index in where.devices_indices_map(tuple(sizes)).items():
        first.setdefault(spec_of(sizes, index), device)
    return [s for s, device in first.items() if device.process_index == jax.process_index()]


def read_array(reader: Reader, name: str, dtype: tf.DType, like: Any, where: Sharding) -> jax.Array:
    """Returns a variable, of which this process reads the parts that its devices have.

    Args:
      reader: the Reader of a checkpoint.
      name: the name of the variable in the file.
      dtype: its dtype in the file.
      like: what has its shape and dtype.
      where: its sharding.

    Raises:
      OSError: it cannot be read.
    """
    sizes = tuple(like.shape)
    read: dict[str, np.ndarray] = {}

    def part(index: Sequence[slice]) -> np.ndarray:
        spec = spec_of(sizes, index)
        if spec not in read:
            read[spec] = reader.read(name, spec, dtype).astype(like.dtype, copy=False)
        return read[spec]

    make: Callable[..., jax.Array] = jax.make_array_from_callback
    with all_dtypes():
        return make(sizes, where, part)

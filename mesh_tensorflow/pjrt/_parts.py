"""The parts of arrays that this process has, as checkpoints have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import jax
import numpy as np
import tensorflow.compat.v1 as tf
from jax.sharding import Sharding

from mesh_tensorflow._mesh.variables.checkpoint_files import Part, Reader, reading, slice_spec
from mesh_tensorflow.checkpoint import CheckpointError, Wanted, check_checkpoint
from mesh_tensorflow.pjrt._devices import all_dtypes
from mesh_tensorflow.pjrt._hosts import in_any_process

__all__ = [
    "Restored",
    "check_together",
    "own_specs",
    "parts_to_write",
    "read_array",
    "read_arrays",
    "spec_of",
]


class Restored(NamedTuple):
    """A variable that is to be read from a checkpoint.

    Attributes:
      dtype: its dtype in files.
      like: what has its shape, and its dtype on the devices.
      where: its sharding.
    """

    dtype: tf.DType
    like: Any
    where: Sharding


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
        # Of copies, JAX numbers one with 0, whichever process has it, so each part is written once.
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


def check_together(path: str, variables: Mapping[str, Restored]) -> None:
    """Raises an error in all processes if one of them cannot read its parts of a checkpoint.

    Args:
      path: the path of the checkpoint.
      variables: what it should have, by name.

    Raises:
      CheckpointError: there is no such checkpoint, it is damaged, or it lacks variables or has them
        in other shapes.
    """
    wanted = {n: Wanted(tuple(v.like.shape), v.dtype) for n, v in variables.items()}
    specs = {n: own_specs(v.like.shape, v.where) for n, v in variables.items()}
    error: Optional[CheckpointError] = None
    try:
        check_checkpoint(path, wanted, specs)
    except CheckpointError as found:
        error = found
    # All processes raise an error or none does: one that went on alone would wait in a collective.
    if in_any_process(error is not None):
        raise error or CheckpointError(
            f"another process cannot read its parts of checkpoint {path}, and says why; no "
            "variable was changed"
        )


def read_arrays(path: str, variables: Mapping[str, Restored]) -> Iterator[tuple[str, jax.Array]]:
    """Yields the name and the value of each variable; see `read_array`.

    Args:
      path: the path of a checkpoint.
      variables: the variables, by name.
    """
    with reading(path) as reader:
        for name, v in variables.items():
            yield name, read_array(reader, name, v.dtype, v.like, v.where)

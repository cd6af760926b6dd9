"""Checkpoints that each process writes and reads its own parts of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Optional

import jax
import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow.checkpoint import check_checkpoint
from mesh_tensorflow.pjrt._devices import all_dtypes
from mesh_tensorflow.pjrt._hosts import wait
from mesh_tensorflow.pjrt._store import ArrayStore

__all__ = ["restore", "save"]

_STEP = "global_step"


def save(store: ArrayStore, path: str, step: Optional[int] = None) -> str:
    """Saves the variables of a store; with several processes, all have to call it.

    Each process writes the parts that its devices have, copies just once, to a file system that
    all share; the first process joins their files. Any mesh implementation, in any layout, and the
    classic can read them.

    Args:
      store: the `store` of a function of `mtf.pjrt.function`.
      path: the path of the checkpoint, such as "model/model.ckpt".
      step: a number that is appended to the path, and saved as "global_step"; or None.

    Returns:
      The path of the checkpoint.
    """
    path = path if step is None else f"{path}-{step}"
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    named = [(name, *part) for name in store.names for part in _own_parts(store, name)]
    if step is not None and jax.process_index() == 0:
        named.append((_STEP, "", np.int64(step)))
    parts = [f"{path}.part-{i}-of-{jax.process_count()}" for i in range(jax.process_count())]
    if named:
        names, slices, values = zip(*named)
        tf.raw_ops.SaveV2(
            prefix=parts[jax.process_index()],
            tensor_names=list(names),
            shape_and_slices=list(slices),
            tensors=list(values),
        )
    wait("mtf checkpoint written")
    if jax.process_index() == 0:
        found = [part for part in parts if tf.gfile.Exists(f"{part}.index")]
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=found, destination_prefix=path)
        tf.train.update_checkpoint_state(os.path.dirname(path) or ".", path)
    wait("mtf checkpoint joined")
    return path


def restore(store: ArrayStore, path: str) -> None:
    """Restores the variables of a store; each process reads the parts that its devices have.

    The variables have to be there: call the function, or its `make_variables`, before.

    Args:
      store: the `store` of a function of `mtf.pjrt.function`.
      path: the path of a checkpoint, of any mesh implementation.

    Raises:
      ValueError: there is no such checkpoint, or it lacks variables or has them in other shapes.
    """
    masters = store.masters
    check_checkpoint(path, masters)
    for name in store.names:
        array, dtype = store.array(name), masters[name].dtype
        read: dict[str, np.ndarray] = {}

        def part(index: Any, name: str = name, dtype: Any = dtype, read: Any = read) -> np.ndarray:
            array = store.array(name)
            spec = _slice_spec(array.shape, index)
            if spec not in read:
                [value] = tf.raw_ops.RestoreV2(
                    prefix=path, tensor_names=[name], shape_and_slices=[spec], dtypes=[dtype]
                )
                read[spec] = value.numpy().astype(array.dtype)
            return read[spec]

        with all_dtypes():
            made = jax.make_array_from_callback(array.shape, array.sharding, part)
        store.update([name], [made])


def _own_parts(store: ArrayStore, name: str) -> list[tuple[str, np.ndarray]]:
    """Returns the parts of a variable that this process writes, with where they belong."""
    array, dtype = store.array(name), store.masters[name].dtype.base_dtype.as_numpy_dtype
    return [
        (_slice_spec(array.shape, shard.index), np.asarray(shard.data).astype(dtype))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def _slice_spec(sizes: Sequence[int], index: Sequence[slice]) -> str:
    """Returns a part in the notation of checkpoints; "" for the whole."""
    ranges = [s.indices(size)[:2] for s, size in zip(index, sizes)]
    if all((begin, end) == (0, size) for (begin, end), size in zip(ranges, sizes)):
        return ""
    text = ":".join(f"{begin},{end - begin}" for begin, end in ranges)
    return " ".join(map(str, sizes)) + " " + text

"""Checkpoints that each process writes and reads its own parts of."""

from __future__ import annotations

import os
from typing import Optional

import jax
import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._deprecations import not_advised
from mesh_tensorflow._mesh.variables.checkpoint_files import Shard, join_files, write_parts
from mesh_tensorflow.pjrt._devices import together
from mesh_tensorflow.pjrt._store import ArrayStore, parts_to_write

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

    Raises:
      ValueError: the store has no variables yet.
      OSError: a process cannot write its file, and all raise an error.
    """
    path = path if step is None else f"{path}-{step}"
    if not store.names:
        raise ValueError(
            "mtf.pjrt.save: the store has no variables yet: call the function, or its "
            "make_variables, before"
        )
    masters = store.masters
    with store.lock:  # the values between two steps
        parts = [
            part
            for name in store.names
            for part in parts_to_write(store.array(name), name, masters[name].dtype.base_dtype)
        ]
    if step is not None and jax.process_index() == 0:
        # By one process: a tensor in two files could not be joined.
        parts.append(Shard(_STEP, "", np.asarray(step, np.int64)))
    count = jax.process_count()
    written = [f"{path}.part-{i}-of-{count}" for i in range(count)]

    def write() -> None:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if parts:
            write_parts(written[jax.process_index()], parts)

    def join() -> None:
        join_files([w for w in written if tf.gfile.Exists(f"{w}.index")], path)
        with not_advised():
            tf.train.update_checkpoint_state(os.path.dirname(path) or ".", path)

    # The files can be joined once all are written, and used once they are joined.
    for what, first in ((write, False), (join, True)):
        together(
            what,
            OSError(
                f"mtf.pjrt.save: another process could not write checkpoint {path}, and says why; "
                "the checkpoints before it are as they were"
            ),
            first,
        )
    return path


def restore(store: ArrayStore, path: str) -> None:
    """Restores all variables of a store, or none; each process reads the parts that it has.

    Variables that are made later get their values in the checkpoint as well, if it has them; those
    of the first call, where the store has none yet, have to be there. With several processes, all
    have to call it.

    Args:
      store: the `store` of a function of `mtf.pjrt.function`.
      path: the path of a checkpoint, of any mesh implementation.

    Raises:
      CheckpointError: there is no such checkpoint, it is damaged, or it lacks variables or has
        them in other shapes; no variable was changed.
    """
    store.restore(os.fspath(path))

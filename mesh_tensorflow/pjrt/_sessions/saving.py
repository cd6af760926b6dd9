"""What a process writes to a checkpoint, and reads of one: its parts of variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Optional

import jax
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables.checkpoint_files import (
    Apart,
    Faults,
    faults,
    reading,
    write_parts,
)
from mesh_tensorflow.pjrt._parts import own_specs, parts_to_write, read_array
from mesh_tensorflow.pjrt._sessions.executor import Executor

__all__ = ["Saved", "faults_here", "restore_here", "saved", "write_here"]

# The name in the file, the number of the program, the name there, and the name of the dtype in the
# file; what JSON can say.
Saved = tuple[str, int, str, str]


def saved(variables: Mapping[str, Apart]) -> list[Saved]:
    """Returns what other processes are told of variables.

    Args:
      variables: the variables, by name in files.
    """
    return [(name, v.number, v.name, v.dtype.name) for name, v in variables.items()]


def write_here(executor: Executor, prefix: str, variables: Sequence[Saved]) -> Optional[str]:
    """Writes the parts that this process has, of copies those that count as the first.

    Args:
      executor: what has the variables.
      prefix: the beginning of the path.
      variables: the variables.

    Returns:
      The path; None if this process has nothing to write.

    Raises:
      ValueError: a variable has no value yet.
      OSError: the parts cannot be written.
    """
    parts = [
        part
        for name, number, key, dtype in variables
        for part in parts_to_write(executor.current(number, key), name, tf.as_dtype(dtype))
    ]
    if not parts:
        return None
    path = f"{prefix}-{jax.process_index()}-of-{jax.process_count()}"
    write_parts(path, parts)
    return path


def restore_here(executor: Executor, path: str, variables: Sequence[Saved]) -> None:
    """Reads the parts that the devices of this process have, and sets the variables.

    Args:
      executor: what has the variables.
      path: the path of a checkpoint.
      variables: the variables.

    Raises:
      OSError: a part cannot be read.
    """
    with reading(path) as reader:
        for name, number, key, dtype in variables:
            like, where = executor.place(number, key)
            array = read_array(reader, name, tf.as_dtype(dtype), like, where)
            executor.put(number, key, array)


def faults_here(executor: Executor, path: str, variables: Sequence[Saved]) -> Faults:
    """Returns what is wrong with the parts that this process would write.

    Args:
      executor: what has the variables.
      path: the path of a checkpoint.
      variables: the variables.
    """
    wanted = {}
    for name, number, key, dtype in variables:
        like, where = executor.place(number, key)
        wanted[name] = tf.as_dtype(dtype), own_specs(like.shape, where)
    return faults(path, wanted)

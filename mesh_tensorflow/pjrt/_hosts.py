"""Several processes, each with a part of JAX's devices."""

from __future__ import annotations

import os
import secrets
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from mesh_tensorflow._mesh.slices.random_values import program_seed
from mesh_tensorflow._processes.processes import processes

__all__ = ["RUNTIME", "connect", "gathered", "placed", "process_count"]

RUNTIME = "MTF_RUNTIME"  # "pjrt" where the launcher started processes for JAX


def process_count() -> int:
    """Returns the number of processes that share JAX's devices."""
    if os.environ.get(RUNTIME) == "pjrt":
        return processes().count
    return jax.process_count() if jax.distributed.is_initialized() else 1


def connect() -> None:
    """Joins the processes of `mesh_tensorflow.launch --runtime pjrt`, if it started this one.

    Where a script has called jax.distributed.initialize(), they are joined already. Without
    tf.random.set_seed, the first process draws a seed for all.
    """
    if os.environ.get(RUNTIME) == "pjrt" and not jax.distributed.is_initialized():
        mine = processes()
        if mine.count > 1:
            jax.distributed.initialize(
                coordinator_address=mine.addresses[0],
                num_processes=mine.count,
                process_id=mine.index,
            )
    if process_count() > 1 and program_seed() is None:
        drawn = np.uint32(secrets.randbits(31))
        tf.random.set_seed(int(multihost_utils.broadcast_one_to_all(drawn)))


def placed(array: Any, where: NamedSharding) -> jax.Array:
    """Returns an array on devices; with several processes, each has all of it, and keeps its parts.

    Args:
      array: an array of NumPy, or of JAX.
      where: the sharding.
    """
    if where.is_fully_addressable:
        return jax.device_put(array, where)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.jit(lambda x: x, out_shardings=where)(array)
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])


def gathered(array: jax.Array) -> np.ndarray:
    """Returns the whole value of an array; with several processes, all have to call it.

    Args:
      array: an array of JAX, with parts in any processes.
    """
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))

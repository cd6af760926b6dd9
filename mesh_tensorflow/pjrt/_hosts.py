"""Joins several processes, each of which has a part of JAX's devices, and keeps them in step."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable
from typing import Any, Optional

import jax
import numpy as np
import tensorflow as tf
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from mesh_tensorflow._mesh.random_values import program_seed
from mesh_tensorflow._processes.processes import is_pjrt, processes
from mesh_tensorflow.pjrt._quiet import without_connection_lines

__all__ = [
    "check_kept",
    "connect",
    "driving",
    "gathered",
    "in_any_process",
    "join",
    "placed",
    "process_count",
    "run_step",
    "wait",
]

_connected: weakref.WeakSet[Any] = weakref.WeakSet()  # compiled functions that have run
_driving = False


def process_count() -> int:
    """Returns the number of processes that share JAX's devices."""
    if is_pjrt():
        return processes().count
    return jax.process_count() if jax.distributed.is_initialized() else 1


def driving(state: Optional[bool] = None) -> bool:
    """Returns whether the first process tells the others what to do; see `run_in_chief`.

    Args:
      state: whether it does from now on; None to leave it.
    """
    global _driving
    if state is not None:
        _driving = state
    return _driving


def join() -> None:
    """Joins the processes of `mesh_tensorflow.launch --runtime pjrt`, if it started this one.

    Where a script has called jax.distributed.initialize(), they are joined already.
    """
    if is_pjrt() and not jax.distributed.is_initialized():
        mine = processes()
        if mine.count > 1:
            jax.distributed.initialize(
                coordinator_address=mine.addresses[0],
                num_processes=mine.count,
                process_id=mine.index,
            )


def connect() -> None:
    """Joins the other processes; without tf.random.set_seed, the first draws a seed for all."""
    join()
    # Keys of random numbers are drawn in each process, and must be the same in all. Where the first
    # process drives the others, it draws them alone.
    if process_count() > 1 and not driving() and program_seed() is None:
        drawn = np.uint32(secrets.randbits(31))
        with without_connection_lines():
            tf.random.set_seed(int(multihost_utils.broadcast_one_to_all(drawn)))


def run_step(step: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a compiled function returns; the first time, processes may be connected.

    Args:
      step: what jax.jit returned.
      *arguments: its arguments.
    """
    if step in _connected or process_count() == 1:
        return step(*arguments)
    with without_connection_lines():
        # Until it is done, since connections are made, and their lines written, while it runs.
        results = jax.block_until_ready(step(*arguments))
    _connected.add(step)
    return results


def check_kept(name: str, array: jax.Array) -> None:
    """Raises RuntimeError for a variable whose memory a step was given, and did not give back.

    Args:
      name: its name.
      array: its value.
    """
    if array.is_deleted():
        raise RuntimeError(
            f"variable {name!r} is lost: a step was given its memory for the new value, and failed "
            "or was stopped before it had one. Restore a checkpoint"
        )


def wait(what: str) -> None:
    """Waits until all processes are here.

    Args:
      what: a name for what they wait for.
    """
    if jax.process_count() > 1:
        with without_connection_lines():
            multihost_utils.sync_global_devices(what)


def in_any_process(found: bool) -> bool:
    """Returns whether something is so in one of the processes, all of which have to call it.

    Args:
      found: whether it is so in this one.
    """
    if jax.process_count() == 1:
        return found
    with without_connection_lines():
        return bool(np.any(multihost_utils.process_allgather(np.asarray(found))))


def placed(array: Any, where: NamedSharding) -> jax.Array:
    """Returns an array on devices; with several processes, each has all of it, and keeps its parts.

    Args:
      array: an array of NumPy, or of JAX.
      where: the sharding.
    """
    if where.is_fully_addressable:
        return jax.device_put(array, where)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        with without_connection_lines():
            return jax.block_until_ready(jax.jit(lambda x: x, out_shardings=where)(array))
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])


def gathered(array: jax.Array) -> np.ndarray:
    """Returns the whole value of an array; with several processes, all have to call it.

    Args:
      array: an array of JAX, with parts in any processes.
    """
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    with without_connection_lines():
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))

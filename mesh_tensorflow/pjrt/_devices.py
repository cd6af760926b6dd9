"""Devices of JAX: the hosts that have them, how these join, and what they print.

While hosts join, Gloo, by which JAX connects CPUs of several processes, writes a line to std::cout
whenever it has connected some of them, and has no setting against that. What Python writes takes
another way.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional, Union

import jax
import numpy as np
import tensorflow as tf
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.layout import TensorLayout
from mesh_tensorflow._core.shape import Shape, single_axes
from mesh_tensorflow._mesh.random_values import program_seed
from mesh_tensorflow._processes.processes import is_pjrt, processes

_GOOD, _BAD = 0, 1  # std::ios_base::goodbit, and badbit, with which a stream writes nothing

_lock = threading.Lock()
_depth = 0


@functools.cache
def _set_state() -> Optional[Callable[[int], object]]:
    """Returns a function that sets the state of std::cout; None where it cannot be found.

    The library is GNU's, which JAX's wheels for Linux load. The std::ios part of a stream, a
    virtual base, is where the third entry before its table of virtual functions says.
    """
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        stream = ctypes.addressof(ctypes.c_char.in_dll(library, "_ZSt4cout"))
        clear = library["_ZNSt9basic_iosIcSt11char_traitsIcEE5clearESt12_Ios_Iostate"]
    except (OSError, ValueError, AttributeError):
        return None
    table = ctypes.c_void_p.from_address(stream).value
    if table is None:  # no library has initialized it
        return None
    offset = ctypes.c_ssize_t.from_address(table - 3 * ctypes.sizeof(ctypes.c_void_p)).value
    clear.argtypes, clear.restype = [ctypes.c_void_p, ctypes.c_int], None
    return functools.partial(clear, stream + offset)


@contextlib.contextmanager
def without_connection_lines() -> Iterator[None]:
    """Context in which std::cout writes nothing, where the library is known; else lines are seen.

    What Python and other processes write is not touched.
    """
    global _depth
    set_state = _set_state()
    if set_state is None:
        yield
        return
    with _lock:
        _depth += 1
        set_state(_BAD)
    try:
        yield
    finally:
        with _lock:
            # Several threads may be within: the last one to leave sets the state back.
            _depth -= 1
            if _depth == 0:
                set_state(_GOOD)


_connected: weakref.WeakSet[Any] = weakref.WeakSet()  # compiled functions that have run
_driving = False


def process_count() -> int:
    """Returns the number of processes that share JAX's devices."""
    if is_pjrt():
        return processes().count
    # JAX is asked only where processes are joined: to answer, it makes its devices, after which
    # none can join, and the number of CPUs is fixed.
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


# The seeds that processes without tf.random.set_seed have drawn, by the numbers of the processes.
_drawn: dict[frozenset[int], int] = {}


def share_seed(devices: Sequence[Any]) -> None:
    """Sets a seed for the processes of devices, drawn for all of them, if the user has set none.

    Keys of random numbers are drawn in each process, and must be the same in all that run a
    program.

    Args:
      devices: the devices of a program, which all of these processes make.
    """
    group = frozenset(d.process_index for d in devices)
    # Where the first process drives the others, it draws the keys alone.
    if len(group) == 1 or jax.process_index() not in group or driving():
        return
    # A process may be in several groups, whose others know nothing of each other: what one group
    # has drawn is no seed to another, or some would wait here for those that think to have one.
    if program_seed() not in (None, *_drawn.values()):
        return
    if group not in _drawn:
        _drawn[group] = _of_first(secrets.randbits(31), devices)
    if program_seed() != _drawn[group]:
        tf.random.set_seed(_drawn[group])


def _of_first(number: int, devices: Sequence[Any]) -> int:
    """Returns the number that the first process of devices gives; its other processes call it."""
    # By a program of these processes alone: broadcasts of JAX's own wait for all.
    own = {d.process_index: d for d in sorted(devices, key=lambda d: d.process_index)}
    mesh = Mesh(np.array(list(own.values())), ["process"])
    part = jax.device_put(np.array([number], np.uint32), own[jax.process_index()])
    numbers = jax.make_array_from_single_device_arrays(
        (len(own),), NamedSharding(mesh, PartitionSpec("process")), [part]
    )
    first = jax.jit(lambda x: x[0], out_shardings=NamedSharding(mesh, PartitionSpec()))
    with without_connection_lines():
        return int(first(numbers))


@functools.cache
def _waits_in_threads() -> bool:
    """Returns whether devices wait for each other in threads of this process, which are few.

    With several steps under way, those that wait for a device can have all of XLA's threads, and
    the device none; after 40 seconds XLA ends the process.
    """
    return jax.default_backend() == "cpu" and jax.local_device_count() > 1


def run_step(step: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a compiled function returns; the first time, processes may be connected.

    Args:
      step: what jax.jit returned.
      *arguments: its arguments.
    """
    if step in _connected or process_count() == 1:
        results = step(*arguments)
        return jax.block_until_ready(results) if _waits_in_threads() else results
    with without_connection_lines():
        # Until it is done, since connections are made, and their lines written, while it runs.
        results = jax.block_until_ready(step(*arguments))
    _connected.add(step)
    return results


def check_kept(name: str, array: jax.Array) -> None:
    """Raises RuntimeError for a variable whose memory a step was given, and did not give back."""
    if array.is_deleted():
        raise RuntimeError(
            f"variable {name!r} is lost: a step was given its memory for the new value, and failed "
            "or was stopped before it had one. Restore a checkpoint"
        )


def in_any_process(found: bool) -> bool:
    """Returns whether something is so in one of the processes, all of which have to call it.

    Args:
      found: whether it is so in this one.
    """
    if jax.process_count() == 1:
        return found
    with without_connection_lines():
        return bool(np.any(multihost_utils.process_allgather(np.asarray(found))))


def done_in_all(call: Callable[[], object], first: bool = False) -> bool:
    """Calls a function in all processes; returns whether none has failed, after all have called it.

    It raises its own error. The other processes have to raise one then, too: one that went on would
    wait for the one that failed, in the next collective.

    Args:
      call: a function.
      first: whether the first process alone calls it.
    """
    error: Optional[Exception] = None
    try:
        if not first or jax.process_index() == 0:
            call()
    except Exception as found:
        error = found
    # After an error, too: all others wait in this collective.
    failed = in_any_process(error is not None)
    if error is not None:
        raise error
    return not failed


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
            # No process has all of it: a compiled identity moves its parts, by collectives of all.
            return jax.block_until_ready(jax.jit(lambda x: x, out_shardings=where)(array))
    whole = np.asarray(array)
    # Each process is asked for the parts of its own devices alone.
    return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])


def gathered(array: jax.Array) -> np.ndarray:
    """Returns the whole value of an array; with several processes, all have to call it.

    Args:
      array: an array of JAX, with parts in any processes, such as a function of
        `mtf.pjrt.function` returns.

    Returns:
      A NumPy array.
    """
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    with without_connection_lines():
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))


AnyMesh = Union[Mesh, AbstractMesh]


def all_dtypes() -> contextlib.AbstractContextManager:
    """Returns a context in which JAX has 64 bit dtypes, which programs may have."""
    # Not by the setting of the process, which would change programs of the user's own.
    return jax.enable_x64(True)


def make_cpus(number: int) -> None:
    """Lets JAX show a number of CPU devices, if it has made no devices yet.

    Args:
      number: the least number of them, in all processes.
    """
    # The setting is for one process, and each has its share of the mesh.
    number = -(-number // process_count())
    count = getattr(jax.config, "jax_num_cpu_devices", -1)
    # A number that the user has set by XLA's flag stays.
    if count < number and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # If there are devices already, a mesh of too many says so.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", number)


def _all_devices() -> list[Any]:
    """Returns JAX's devices, without a log line for each kind of device that is not there."""
    logger = logging.getLogger("jax._src.xla_bridge")
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        return jax.devices()
    finally:
        logger.setLevel(level)


def device_mesh(mesh_shape: Shape, devices: Union[Sequence[Any], str, None]) -> AnyMesh:
    """Returns the JAX mesh of an mtf mesh, with the same names of dimensions.

    Args:
      mesh_shape: the Shape of the mesh.
      devices: JAX devices, one for each processor in row-major order; the first of all if None;
        none if "abstract".

    Raises:
      ValueError: the number of devices is wrong, or one is given several times.
      TypeError: they are no devices of JAX.
    """
    sizes, names = tuple(mesh_shape.to_integer_list), tuple(mesh_shape.dimension_names)
    if isinstance(devices, str):
        if devices != "abstract":
            raise ValueError(f'devices={devices!r}: pass a list of jax.devices(), or "abstract"')
        return AbstractMesh(sizes, names)
    if devices is None:
        # In this order: JAX makes devices of the processes that are joined by then, and no others.
        make_cpus(mesh_shape.size)
        join()
        devices = _all_devices()[: mesh_shape.size]
    devices = list(devices)
    others = [d for d in devices if not isinstance(d, jax.Device)]
    if others:
        raise TypeError(
            f"devices should be a list of jax.devices(), but has {others[0]!r} "
            f"({type(others[0]).__name__})"
        )
    repeated = [f"{d} {n} times" for d, n in collections.Counter(devices).items() if n > 1]
    if repeated:
        raise ValueError(
            f"the mesh {dims_text(mesh_shape)} needs a device for each of its processors, but "
            f"devices have {', '.join(repeated)}. Pass different ones, or make the mesh smaller"
        )
    if len(devices) != mesh_shape.size:
        raise ValueError(
            f"the mesh {dims_text(mesh_shape)} has {mesh_shape.size} processors, but there are "
            f"{len(devices)} devices: {', '.join(map(str, devices))}. Pass as many devices, or, on "
            f'a CPU, call jax.config.update("jax_num_cpu_devices", {mesh_shape.size}) before JAX '
            "makes the first"
        )
    share_seed(devices)
    return Mesh(np.array(devices).reshape(sizes), names)


def sharding(mesh: AnyMesh, layout: Optional[TensorLayout]) -> NamedSharding:
    """Returns the JAX sharding of a layout.

    Args:
      mesh: a JAX mesh.
      layout: the TensorLayout of a tensor; None if each device has all of it.
    """
    names = [tuple(mesh.axis_names[a] for a in single_axes([axis])) for axis in layout or []]
    # A name alone, and not in a tuple, is how JAX itself writes the split over one axis.
    axes_of_dims = [of_dim if len(of_dim) > 1 else next(iter(of_dim), None) for of_dim in names]
    return NamedSharding(mesh, PartitionSpec(*axes_of_dims))


def described(
    mesh: AnyMesh, sizes: Sequence[int], dtype: tf.DType, layout: Optional[TensorLayout]
) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of an array.

    Args:
      mesh: a JAX mesh.
      sizes: the shape.
      dtype: the dtype.
      layout: a TensorLayout; None if each device has all of it.
    """
    where = sharding(mesh, layout)
    return jax.ShapeDtypeStruct(tuple(sizes), dtype.as_numpy_dtype, sharding=where)


def device_kind(mesh_shape: Shape) -> str:
    """Returns what the devices of a mesh are called by their maker; "" for CPUs."""
    # Through a mesh, since JAX makes CPU devices, as many as it needs, when it is asked first.
    mesh: Any = device_mesh(mesh_shape, None)
    device = mesh.devices.flat[0]
    return "" if device.platform == "cpu" else device.device_kind

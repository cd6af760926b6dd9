"""Meshes and shardings of JAX, from those of mtf programs."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Optional, Union

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.layout import TensorLayout
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow.pjrt._hosts import connect, process_count

__all__ = ["AnyMesh", "all_dtypes", "device_mesh", "make_cpus", "sharding"]

AnyMesh = Union[Mesh, AbstractMesh]


def all_dtypes() -> contextlib.AbstractContextManager:
    """Returns a context in which JAX has 64 bit dtypes, which programs may have."""
    return jax.enable_x64(True)


def make_cpus(number: int) -> None:
    """Lets JAX show a number of CPU devices, if it has made no devices yet.

    Args:
      number: the least number of them, in all processes.
    """
    # The setting is for one process, and each has its share of the mesh.
    number = -(-number // process_count())
    known = getattr(jax.config, "jax_num_cpu_devices", -1)
    if known < number and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", number)
        except RuntimeError:
            pass  # there are devices already, and a mesh of too many says so


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
        make_cpus(mesh_shape.size)
        connect()
        devices = _all_devices()[: mesh_shape.size]
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
    return Mesh(np.array(devices).reshape(sizes), names)


def sharding(mesh: AnyMesh, layout: Optional[TensorLayout]) -> NamedSharding:
    """Returns the JAX sharding of a layout.

    Args:
      mesh: a JAX mesh.
      layout: the TensorLayout of a tensor; None if each device has all of it.
    """
    names = [None if axis is None else mesh.axis_names[axis] for axis in layout or []]
    return NamedSharding(mesh, PartitionSpec(*names))

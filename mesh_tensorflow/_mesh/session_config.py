"""Sessions whose logical CPUs are the processors of a mesh."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Optional

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.layout import LayoutLike, LayoutRules, convert_to_layout_rules
from mesh_tensorflow._core.shape import Shape, ShapeLike, convert_to_shape, list_product
from mesh_tensorflow._mesh.devices import check_devices, device_spec

__all__ = ["local_cpus", "session_config", "set_cpus", "set_threads"]


def session_config(
    mesh_shape: ShapeLike,
    layout: LayoutLike,
    devices: Optional[Sequence[str]] = None,
) -> tf.ConfigProto:
    """Returns the configuration of a session that computes on logical CPUs of this machine.

    It has a logical CPU for each processor. If the layout splits tensors into at least as many
    parts as the machine has cores, each operation is computed by one thread, since all cores have
    operations of other processors: that is faster than sharing each operation among all threads.
    The first session of a program decides about threads for all of them, and so does the first
    eager operation, or tracing a SIMD program. So this function also sets the threads of the
    process, unless TensorFlow has begun: call it before.

    Args:
      mesh_shape: a Shape, or a string such as "rows:2,cols:2".
      layout: LayoutRules, or a string such as "batch:rows,d_ff:cols".
      devices: the device of each processor, by default "cpu:0", "cpu:1" and so on. Devices that are
        no CPUs of this process are left to TensorFlow.

    Raises:
      ValueError: there is not a device for each processor, or one is malformed.
    """
    shape, rules = convert_to_shape(mesh_shape), convert_to_layout_rules(layout)
    if devices is None:
        devices = [f"cpu:{i}" for i in range(shape.size)]
    check_devices(devices, shape)
    config = tf.ConfigProto()
    set_cpus(config, local_cpus(devices), shape, rules)
    return config


def local_cpus(devices: Sequence[str]) -> list[int]:
    """Returns the numbers of the CPUs of this process among devices."""
    specs = [device_spec(device) for device in devices]
    return [
        spec.device_index or 0
        for spec in specs
        if spec.device_type in (None, "CPU") and spec.job in (None, "localhost")
    ]


def set_cpus(
    config: tf.ConfigProto, cpus: Sequence[int], mesh_shape: Shape, rules: Optional[LayoutRules]
) -> None:
    """Sets the logical CPUs of a session, and the threads of an operation.

    Args:
      config: the tf.ConfigProto that is changed.
      cpus: the numbers of the CPUs of this process in the mesh.
      mesh_shape: the Shape of the mesh.
      rules: its LayoutRules; if None, threads are left to TensorFlow.
    """
    config.device_count["CPU"] = 1 + max(cpus, default=0)
    threads = None if rules is None else set_threads(cpus, mesh_shape, rules)
    if threads is not None:
        config.intra_op_parallelism_threads, config.inter_op_parallelism_threads = threads


def set_threads(
    cpus: Sequence[int], mesh_shape: Shape, rules: LayoutRules
) -> Optional[tuple[int, int]]:
    """Sets, and returns, the threads of an operation, and those of operations at a time.

    They are set unless eager code has begun: TensorFlow's first session or function decides about
    threads for the whole process, and tracing a SIMD program counts as one.

    Args:
      cpus: the numbers of the CPUs of this process in the mesh.
      mesh_shape: the Shape of the mesh.
      rules: its LayoutRules.

    Returns:
      None if they are left to TensorFlow.
    """
    splitting = {mesh_dim for _, mesh_dim in rules.pairs}
    parts = list_product(d.size for d in mesh_shape if d.name in splitting)
    cores = _cores()
    # Fewer parts than cores would leave cores idle if each operation had one thread.
    if cores == 1 or min(parts, len(set(cpus))) < cores:
        return None
    with contextlib.suppress(RuntimeError):  # which says that it has begun
        tf2.config.threading.set_intra_op_parallelism_threads(1)
    return 1, cores


def _cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

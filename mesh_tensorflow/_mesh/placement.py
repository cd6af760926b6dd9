"""Sums and exchanges of tensors on several devices: rings of copies, TensorFlow's collectives.

In a sum by copies, values travel around a ring of the devices in both directions, so that each link
carries about the same amount. Bandwidth-optimal ring reduction: Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations" (JPDC 2009).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import table_lookup
from mesh_tensorflow._mesh.devices import (
    absent_devices,
    check_distinct_devices,
    devices_text,
)
from mesh_tensorflow._mesh.slice_functions import binary_reduction_fn, complex_view, real_view

if TYPE_CHECKING:
    pass


_MIN_ELEMENTS_TO_SHARD = 1024


def _check(xs: Sequence[tf.Tensor], devices: Sequence[str], what: str) -> None:
    if len(xs) != len(devices) or not xs:
        raise ValueError(
            f"{what}: needs one tensor for each device, got {len(xs)} tensors for "
            f"{len(devices)} devices"
        )


def allreduce_ring_single_shard(
    xs: Sequence[tf.Tensor], devices: Sequence[str], reduction_fn_string: str = "SUM"
) -> list[tf.Tensor]:
    """Reduces tensors from both ends of a line to its middle, and broadcasts the result.

    Args:
      xs: tf.Tensors of one shape, one for each device.
      devices: device strings.
      reduction_fn_string: "SUM", "MAX" or "MIN".

    Returns:
      The reduced value on each device.
    """
    _check(xs, devices, "allreduce_ring_single_shard")
    reduce_fn = binary_reduction_fn(reduction_fn_string)
    n = len(xs)
    middle = n // 2
    # From both ends at once, in half as many steps as from one. The order of additions is fixed, so
    # that results are the same in each run.
    left = xs[0]
    for i in range(1, middle + 1):
        with tf.device(devices[i]):
            left = reduce_fn(left, xs[i])
    total = left
    # Of two devices the second is the middle, and nothing comes from the right.
    if n > middle + 1:
        right = xs[n - 1]
        for i in range(n - 2, middle, -1):
            with tf.device(devices[i]):
                right = reduce_fn(right, xs[i])
        with tf.device(devices[middle]):
            total = reduce_fn(left, right)
    return _send_out(total, devices, middle)


def _send_out(x: tf.Tensor, devices: Sequence[str], origin: int) -> list[tf.Tensor]:
    """Copies a tensor from device `origin` to all, each device from its neighbor."""
    copies = [x] * len(devices)
    for step in (-1, 1):
        i = origin + step
        while 0 <= i < len(devices):
            with tf.device(devices[i]):
                # Of the neighbor's copy, so that each link of the line carries the value once.
                copies[i] = tf.identity(copies[i - step])
            i += step
    return copies


def allreduce_ring(
    xs: Sequence[tf.Tensor], devices: Sequence[str], reduction_fn_string: str = "SUM"
) -> list[tf.Tensor]:
    """Reduces tensors over devices; large ones in as many shards as there are devices.

    Args:
      xs: tf.Tensors of one shape, one for each device.
      devices: device strings.
      reduction_fn_string: "SUM", "MAX" or "MIN".

    Returns:
      The reduced value on each device.
    """
    _check(xs, devices, "allreduce_ring")
    n, sizes = len(xs), xs[0].shape.as_list()
    elements = xs[0].shape.num_elements()
    if n == 1:
        return list(xs)
    # A small tensor in shards takes more copies than it has work, and tf.split needs equal parts.
    if elements is None or elements < _MIN_ELEMENTS_TO_SHARD or elements % n:
        return allreduce_ring_single_shard(xs, devices, reduction_fn_string)
    shards_of = []
    for x, device in zip(xs, devices):
        with tf.device(device):
            shards_of.append(tf.split(tf.reshape(x, [-1]), n))
    reduced: list[list[tf.Tensor]] = [[] for _ in range(n)]
    for shard in range(n):
        # Each shard is reduced on another device.
        order = [(i + shard) % n for i in range(n)]
        result = allreduce_ring_single_shard(
            [shards_of[i][shard] for i in order], [devices[i] for i in order], reduction_fn_string
        )
        for i, value in zip(order, result):
            # Each device gets the shards in their order, and so can concatenate them.
            reduced[i].append(value)
    out = []
    for pieces, device in zip(reduced, devices):
        with tf.device(device):
            out.append(tf.reshape(tf.concat(pieces, 0), sizes))
    return out


def _ring_copies(x: tf.Tensor, devices: Sequence[str], origin: int) -> list[tf.Tensor]:
    """Copies a tensor from device `origin` to all, in both directions around the ring."""
    n = len(devices)
    copies = [x] * n
    # Together n - 1 hops: each device gets one copy, on the shorter way around.
    for step, hops in ((1, n // 2), (-1, (n - 1) // 2)):
        value = x
        for hop in range(1, hops + 1):
            i = (origin + step * hop) % n
            with tf.device(devices[i]):
                value = tf.identity(value)
            copies[i] = value
    return copies


def allconcat_ring(
    xs: Sequence[tf.Tensor], devices: Sequence[str], concat_axis: int
) -> list[tf.Tensor]:
    """Concatenates tensors along an axis, on each device.

    Args:
      xs: tf.Tensors, one for each device.
      devices: device strings.
      concat_axis: an axis.

    Returns:
      The concatenated value on each device.
    """
    _check(xs, devices, "allconcat_ring")
    copies = [_ring_copies(x, devices, i) for i, x in enumerate(xs)]
    out = []
    for i, device in enumerate(devices):
        with tf.device(device):
            # In the order of origins, that of the whole tensor, whatever way each copy took.
            out.append(tf.concat([copy[i] for copy in copies], concat_axis))
    return out


def _split_all(
    xs: Sequence[tf.Tensor], devices: Sequence[str], split_axis: int
) -> list[list[tf.Tensor]]:
    split = []
    for x, device in zip(xs, devices):
        with tf.device(device):
            split.append(tf.split(x, len(xs), split_axis))
    return split


def alltoall_pointtwise(
    xs: Sequence[tf.Tensor], devices: Sequence[str], split_axis: int, concat_axis: int
) -> list[tf.Tensor]:
    """Sends part i of each tensor directly to device i, and concatenates the received parts.

    Args:
      xs: tf.Tensors, one for each device.
      devices: device strings.
      split_axis: the axis along which tensors are split.
      concat_axis: the axis along which parts are concatenated.

    Returns:
      A list of tf.Tensors.
    """
    _check(xs, devices, "alltoall_pointtwise")
    parts = _split_all(xs, devices, split_axis)
    out = []
    for i, device in enumerate(devices):
        with tf.device(device):
            out.append(tf.concat([part[i] for part in parts], concat_axis))
    return out


def alltoall_ring(
    xs: Sequence[tf.Tensor], devices: Sequence[str], split_axis: int, concat_axis: int
) -> list[tf.Tensor]:
    """Like alltoall_pointtwise, with parts sent in both directions around the ring.

    The parts for all devices in one direction are sent together; each device keeps its own.

    Args:
      xs: tf.Tensors, one for each device.
      devices: device strings.
      split_axis: the axis along which tensors are split.
      concat_axis: the axis along which parts are concatenated.

    Returns:
      A list of tf.Tensors.
    """
    _check(xs, devices, "alltoall_ring")
    n = len(xs)
    parts = _split_all(xs, devices, split_axis)
    received: list[list] = [[None] * n for _ in range(n)]
    for source in range(n):
        received[source][source] = parts[source][source]
        for step, hops in ((1, n // 2), (-1, (n - 1) // 2)):
            route = [(source + step * hop) % n for hop in range(1, hops + 1)]
            # A part travels in as many loads as its receiver is hops away, each shorter by one.
            load = [parts[source][i] for i in route]
            for i in route:
                with tf.device(devices[i]):
                    load = [tf.identity(t) for t in load]
                # The first part of the load is for this device; the rest goes on to the next.
                received[i][source] = load.pop(0)
    out = []
    for pieces, device in zip(received, devices):
        with tf.device(device):
            out.append(tf.concat(pieces, concat_axis))
    return out


_IN_ANY_PLACE = 'give PlacementMeshImpl allreduce="ring"'
_MERGE_OPS = {"SUM": "Add", "MAX": "Max", "MIN": "Min"}

# TensorFlow's runtime identifies groups and instances of collectives by process-wide numbers.
_group_keys: dict[tuple[str, ...], int] = {}
# Above all groups of SIMD programs, which may be in one session with these.
_FIRST_GROUP = 3 * 2**29
# Shared without the lock below: to take a number of a count is one step for Python's threads.
_instance_keys = itertools.count(1)
_counting = threading.Lock()


def reduce_here(xs: Sequence[tf.Tensor], reduction: str) -> tf.Tensor:
    """Reduces tensors that are in one memory domain."""
    if len(xs) == 1:
        return xs[0]
    if reduction == "SUM":
        # One pass over all of them, without partial sums in memory.
        return tf.add_n(xs)
    fn = binary_reduction_fn(reduction)
    total = xs[0]
    for x in xs[1:]:
        # max(x, x) = x, and equal slices of one memory are one tensor.
        if x is not total:
            total = fn(total, x)
    return total


def group_key(devices: Sequence[str]) -> int:
    """Returns the unique number of a group of devices."""
    with _counting:
        # The same devices are one group for TensorFlow, in whatever order they are named.
        number = _FIRST_GROUP + len(_group_keys)
        return _group_keys.setdefault(tuple(sorted(devices)), number)


def _checked(devices: Sequence[str]) -> list[tf.Operation]:
    """Checks that devices are there, each by itself; returns what checks it in a session."""
    in_session = not tf.executing_eagerly_outside_functions()
    absent, here = absent_devices(devices, in_session)
    if absent:
        raise ValueError(
            f"collectives between {', '.join(devices)} would wait forever: this process has no "
            f"device {', '.join(map(repr, absent))}. It has "
            f"{devices_text(here)}. Name these, or {_IN_ANY_PLACE}"
        )
    # Only a session may place them elsewhere; eager code has the devices that it lists.
    return [check_distinct_devices(devices, _IN_ANY_PLACE)] if in_session else []


def allreduce_collective(
    xs: Sequence[tf.Tensor], devices: Sequence[str], reduction_fn_string: str = "SUM"
) -> list[tf.Tensor]:
    """Reduces tensors over devices with TensorFlow's collective operations.

    Fetching one result runs the whole group, because a single member would wait for the others.

    Args:
      xs: tf.Tensors of one shape, one for each device.
      devices: device strings, all different.
      reduction_fn_string: "SUM", "MAX" or "MIN".

    Returns:
      The reduced value on each device.

    Raises:
      ValueError: this process lacks a device.
    """
    before = _checked(devices)
    # Each call has a new instance: the members of a group find each other by that number.
    group, instance_key = group_key(devices), next(_instance_keys)
    merge_op = table_lookup(_MERGE_OPS, reduction_fn_string, "reduction")
    reduced = []
    for x, device in zip(xs, devices):
        with tf.device(device), tf.control_dependencies(before):
            reduced.append(
                tf.raw_ops.CollectiveReduceV2(
                    input=real_view(x),
                    group_size=len(xs),
                    group_key=group,
                    instance_key=instance_key,
                    ordering_token=[],
                    merge_op=merge_op,
                    final_op="Id",
                    communication_hint="auto",
                    # No time limit: for each, TensorFlow would use a thread that sleeps that long.
                    # What would never end is found before.
                )
            )
    out = []
    for x, value, device in zip(xs, reduced, devices):
        with tf.device(device), tf.control_dependencies(reduced):
            out.append(complex_view(tf.identity(value), x.dtype))
    return out

"""Collectives over devices that do not share memory, by point-to-point copies.

Values travel around a ring of the devices in both directions, so that each link carries about the
same amount. Bandwidth-optimal ring reduction: Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations" (JPDC 2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.slices.functions import binary_reduction_fn

__all__ = [
    "allconcat_ring",
    "allreduce_ring",
    "allreduce_ring_single_shard",
    "alltoall_pointtwise",
    "alltoall_ring",
]

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
            out.append(tf.concat([copy[i] for copy in copies], concat_axis))
    return out


def _split_all(
    xs: Sequence[tf.Tensor], devices: Sequence[str], split_axis: int
) -> list[list[tf.Tensor]]:
    parts = []
    for x, device in zip(xs, devices):
        with tf.device(device):
            parts.append(tf.split(x, len(xs), split_axis))
    return parts


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
            load = [parts[source][i] for i in route]
            for i in route:
                with tf.device(devices[i]):
                    load = [tf.identity(t) for t in load]
                received[i][source] = load.pop(0)
    out = []
    for pieces, device in zip(received, devices):
        with tf.device(device):
            out.append(tf.concat(pieces, concat_axis))
    return out

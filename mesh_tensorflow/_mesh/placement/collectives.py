"""Reductions over groups of devices, with an algorithm that depends on the devices."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import table_lookup
from mesh_tensorflow._core.layout import processor_groups
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.apart_in_session import apart_in_session
from mesh_tensorflow._mesh.devices import absent_devices, are_whole_gpus, devices_text
from mesh_tensorflow._mesh.placement.rings import allreduce_ring
from mesh_tensorflow._mesh.reducer import Reducer
from mesh_tensorflow._mesh.slices.complex_view import complex_view, real_view
from mesh_tensorflow._mesh.slices.functions import binary_reduction_fn

__all__ = ["PlacedReducer"]

_IN_ANY_PLACE = 'give PlacementMeshImpl allreduce="ring"'
_MERGE_OPS = {"SUM": "Add", "MAX": "Max", "MIN": "Min"}

# TensorFlow's runtime identifies groups and instances of collectives by process-wide numbers.
_group_keys: dict[tuple[str, ...], int] = {}
_instance_keys = itertools.count(1)
_counting = threading.Lock()


class PlacedReducer(Reducer[Sequence[tf.Tensor]]):
    """Reduces slices that are placed on devices.

    Members of a group in one memory domain are reduced on one device, in one operation; the results
    of several domains are then reduced by a ring of copies or by TensorFlow's collectives.
    """

    def __init__(
        self, mesh_shape: Shape, devices: Sequence[str], domains: Sequence[str], method: str
    ):
        """Creates a PlacedReducer.

        Args:
          mesh_shape: shape of the mesh.
          devices: device strings, one for each processor.
          domains: the name of each processor's memory domain.
          method: "ring", "collective", or "auto" for collectives between GPUs that are there, and
            rings otherwise.
        """
        across = {"ring": allreduce_ring, "collective": allreduce_collective, "auto": None}
        self._across = table_lookup(across, method, "allreduce method")
        self._mesh_shape = mesh_shape
        self._devices = devices
        self._domains = domains

    def allreduce(
        self, x: Sequence[tf.Tensor], mesh_axes: Sequence[int], reduction: str
    ) -> list[tf.Tensor]:
        """Reduces over the processors that differ along mesh axes.

        Groups of the same memory domains and the same tensors are reduced once.

        Args:
          x: a tf.Tensor for each processor.
          mesh_axes: the mesh axes to reduce over.
          reduction: "SUM", "MAX" or "MIN".

        Returns:
          The reduced value for each processor.
        """
        out: list[Any] = [None] * len(x)
        done: dict[tuple, dict[str, tf.Tensor]] = {}
        for group in processor_groups(self._mesh_shape, mesh_axes):
            key = tuple((self._domains[p], id(x[p])) for p in group)
            if key not in done:
                done[key] = self._reduce_group(x, group, reduction)
            for p in group:
                out[p] = done[key][self._domains[p]]
        return out

    def _reduce_group(
        self, slices: Sequence[tf.Tensor], group: Sequence[int], reduction: str
    ) -> dict[str, tf.Tensor]:
        """Returns the reduced value for each memory domain of the group."""
        # In memory first, so that only one value of each domain travels.
        leaders, partial = self._reduced_in_memory(slices, group, reduction)
        if len(partial) > 1:
            reduced = self._method(list(leaders.values()))(partial, [*leaders.values()], reduction)
            return dict(zip(leaders, reduced))
        return dict(zip(leaders, partial))

    def _reduced_in_memory(
        self, slices: Sequence[tf.Tensor], group: Sequence[int], reduction: str
    ) -> tuple[dict[str, str], list[tf.Tensor]]:
        """Reduces the slices of each memory domain of a group.

        Returns:
          The device of each domain, and the reduced value there.
        """
        members: dict[str, list[int]] = {}
        for p in group:
            members.setdefault(self._domains[p], []).append(p)
        leaders = {domain: self._devices[ps[0]] for domain, ps in members.items()}
        partial = []
        for domain, ps in members.items():
            with tf.device(leaders[domain]):
                partial.append(reduce_here([slices[p] for p in ps], reduction))
        return leaders, partial

    def reduce_scatter(
        self, x: Sequence[tf.Tensor], mesh_axis: int, split_axis: int
    ) -> list[tf.Tensor]:
        """Sums over the processors along a mesh axis, of which each keeps its own part.

        Memory domains send each other the parts that are needed there, and nothing else.

        Args:
          x: a tf.Tensor for each processor.
          mesh_axis: the mesh axis to sum over.
          split_axis: the axis of the slices to split.

        Returns:
          The part of each processor.
        """
        if self._mesh_shape[mesh_axis].size == 1:
            return list(x)
        out: list[Any] = [None] * len(x)
        done: dict[tuple, list[tf.Tensor]] = {}
        for group in processor_groups(self._mesh_shape, [mesh_axis]):
            key = tuple((self._domains[p], id(x[p])) for p in group)
            if key not in done:
                done[key] = self._scatter_group(x, group, split_axis)
            for p, part in zip(group, done[key]):
                out[p] = part
        return out

    def _scatter_group(
        self, slices: Sequence[tf.Tensor], group: Sequence[int], split_axis: int
    ) -> list[tf.Tensor]:
        """Returns the part of the sum of each member of a group."""
        leaders, partial = self._reduced_in_memory(slices, group, "SUM")
        columns = []
        for value, device in zip(partial, leaders.values()):
            with tf.device(device):
                columns.append(tf.split(value, len(group), split_axis))
        parts = []
        for p, column in zip(group, zip(*columns)):
            with tf.device(self._devices[p]):
                parts.append(reduce_here(column, "SUM"))
        return parts

    def _method(self, leaders: Sequence[str]) -> Callable[..., list[tf.Tensor]]:
        if self._across is not None:
            return self._across
        return allreduce_collective if are_whole_gpus(leaders) else allreduce_ring


def reduce_here(xs: Sequence[tf.Tensor], reduction: str) -> tf.Tensor:
    """Reduces tensors that are in one memory domain."""
    if len(xs) == 1:
        return xs[0]
    if reduction == "SUM":
        return tf.add_n(xs)
    fn = binary_reduction_fn(reduction)
    total = xs[0]
    for x in xs[1:]:
        if x is not total:
            total = fn(total, x)
    return total


def group_key(devices: Sequence[str]) -> int:
    """Returns the unique number of a group of devices."""
    with _counting:
        return _group_keys.setdefault(tuple(sorted(devices)), len(_group_keys) + 1)


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
    return [apart_in_session(devices, _IN_ANY_PLACE)] if in_session else []


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

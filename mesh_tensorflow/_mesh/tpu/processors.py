"""Processor numbers of a TPU, from its device assignment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorflow.tpu.experimental import DeviceAssignment

__all__ = ["pnum_to_processor_coordinates_nd", "processor_coordinates_to_pnum_map_nd"]


def pnum_to_processor_coordinates_nd(
    mesh_shape: Sequence[int], pnum: int, device_assignment: DeviceAssignment
) -> tuple[int, ...]:
    """Returns the physical coordinates of the core that runs replica `pnum`.

    Args:
      mesh_shape: the physical shape; ignored, as in earlier releases.
      pnum: a replica number.
      device_assignment: a tf DeviceAssignment.
    """
    del mesh_shape
    return tuple(int(c) for c in device_assignment.coordinates(pnum, 0))


def processor_coordinates_to_pnum_map_nd(
    mesh_shape: Sequence[int],
    logical_to_physical: Sequence[Sequence[int]],
    device_assignment: DeviceAssignment,
) -> list[int]:
    """Returns, for each logical processor, the replica number at its physical coordinates.

    It is for chips with one core, with coordinates from `auto_logical_to_physical_tpu`. Chips are
    numbered with x varying fastest, then y, then z; the two coordinates of `mesh_shape` give the
    same number, with the first varying fastest. Of several replicas on a chip, the last is used.

    Args:
      mesh_shape: the physical shape, a list of ints such as [x * y, z, 1].
      logical_to_physical: the physical coordinates of each logical processor; only the first two
        are used.
      device_assignment: a tf DeviceAssignment.

    Returns:
      A list of replica numbers; -1 where there is no replica.
    """
    sizes = device_assignment.topology.mesh_shape
    replica_on: dict[int, int] = {}
    for pnum in range(device_assignment.num_replicas):
        x, y, z, *_ = pnum_to_processor_coordinates_nd(mesh_shape, pnum, device_assignment)
        replica_on[x + int(sizes[0]) * (y + int(sizes[1]) * z)] = pnum
    rows = mesh_shape[0]
    return [replica_on.get(first + rows * second, -1) for first, second, *_ in logical_to_physical]

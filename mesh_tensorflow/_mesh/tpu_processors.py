"""Processor numbers of a TPU, through its device assignment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh_tensorflow._core.shape import Shape

__all__ = ["pnum_to_processor_coordinates_nd", "processor_coordinates_to_pnum_map_nd"]


def pnum_to_processor_coordinates_nd(
    mesh_shape: Sequence[int], pnum: int, device_assignment: Any
) -> list[int]:
    """Returns the physical coordinates of the core that runs replica `pnum`.

    Args:
      mesh_shape: the physical shape, a list of ints; its length is how many coordinates are
        wanted.
      pnum: a replica number.
      device_assignment: a tf DeviceAssignment.
    """
    coordinates = list(device_assignment.coordinates(pnum, 0))
    return coordinates[-len(mesh_shape) :] if len(coordinates) > len(mesh_shape) else coordinates


def processor_coordinates_to_pnum_map_nd(
    mesh_shape: Sequence[int], logical_to_physical: Sequence[Any], device_assignment: Any
) -> list[int]:
    """Returns, for each logical processor, the replica number at its physical coordinates.

    Args:
      mesh_shape: the physical shape, a list of ints.
      logical_to_physical: for each logical processor its physical coordinates.
      device_assignment: a tf DeviceAssignment.
    """
    size = 1
    for s in mesh_shape.to_integer_list if isinstance(mesh_shape, Shape) else mesh_shape:
        size *= s
    replica_at = {
        tuple(pnum_to_processor_coordinates_nd(mesh_shape, pnum, device_assignment)): pnum
        for pnum in range(size)
    }
    return [replica_at[tuple(coordinates)] for coordinates in logical_to_physical]

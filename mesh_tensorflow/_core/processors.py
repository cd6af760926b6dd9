"""Processor numbers, coordinates and groups of a mesh, in row-major order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from mesh_tensorflow._core.shape import Shape, list_product

__all__ = [
    "pnum_to_group",
    "pnum_to_processor_coordinates",
    "processor_coordinates_to_pnum",
    "processor_groups",
]


def pnum_to_processor_coordinates(mesh_shape: Shape, pnum: int) -> list[int]:
    """Returns the coordinates of processor `pnum`; the last mesh dimension varies fastest."""
    coordinates = []
    for size in reversed(mesh_shape.to_integer_list):
        coordinates.append(pnum % size)
        pnum //= size
    return coordinates[::-1]


def processor_coordinates_to_pnum(mesh_shape: Shape, coord: Sequence[int]) -> int:
    """Returns the number of the processor at coordinates `coord`."""
    pnum = 0
    for size, c in zip(mesh_shape.to_integer_list, coord):
        pnum = pnum * size + c
    return pnum


def pnum_to_group(mesh_shape: Shape, group_dims: Sequence[int], pnum: Any) -> Any:
    """Returns the number of the group that processor `pnum` is in.

    A group is the processors whose coordinates differ only along the mesh axes `group_dims`.

    Args:
      mesh_shape: a Shape.
      group_dims: mesh axes.
      pnum: a processor number; a Python int or an integer tf.Tensor.
    """
    group = 0
    stride = mesh_shape.size
    for axis, size in enumerate(mesh_shape.to_integer_list):
        stride //= size
        if axis not in group_dims:
            group = group * size + pnum // stride % size
    return group


def processor_groups(mesh_shape: Shape, group_dims: Sequence[int]) -> list[list[int]]:
    """Returns the groups of processors that differ only along mesh axes `group_dims`.

    Groups are in the order of `pnum_to_group`, their members in order of processor number.
    """
    outside = [s for axis, s in enumerate(mesh_shape.to_integer_list) if axis not in group_dims]
    groups: list[list[int]] = [[] for _ in range(list_product(outside))]
    for pnum in range(mesh_shape.size):
        groups[pnum_to_group(mesh_shape, group_dims, pnum)].append(pnum)
    return groups


def shifted_sources(size: int, offset: int, wrap: bool) -> list[Optional[int]]:
    """Returns, for each coordinate along a mesh axis, whom it receives from in a shift.

    Args:
      size: size of the mesh axis.
      offset: by how many processors values move.
      wrap: whether values that leave at one end come in at the other.
    """
    sources: list[Optional[int]] = []
    for coordinate in range(size):
        source = coordinate - offset
        inside = 0 <= source < size
        sources.append(source % size if wrap or inside else None)
    return sources

"""Processor numbers, coordinates and groups of a mesh, in row-major order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional, Union

from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow._core.shape import Shape, list_product

if TYPE_CHECKING:
    import tensorflow.compat.v1 as tf

__all__ = [
    "pnum_to_group",
    "pnum_to_processor_coordinates",
    "processor_coordinates_to_pnum",
    "processor_groups",
]


MeshShape = Union[Shape, Sequence[int]]


def _sizes(mesh_shape: MeshShape) -> list[int]:
    """Returns the sizes of a mesh, given as a Shape or as numbers."""
    if isinstance(mesh_shape, Shape):
        return mesh_shape.to_integer_list
    if not isinstance(mesh_shape, (list, tuple)) or not all(isinstance(s, int) for s in mesh_shape):
        raise WrongTypeError(f"the shape of a mesh is a mtf.Shape or sizes, not {mesh_shape!r}")
    return list(mesh_shape)


def pnum_to_processor_coordinates(mesh_shape: MeshShape, pnum: int) -> list[int]:
    """Returns the coordinates of processor `pnum`; the last mesh dimension varies fastest."""
    coordinates = []
    for size in reversed(_sizes(mesh_shape)):
        coordinates.append(pnum % size)
        pnum //= size
    return coordinates[::-1]


def processor_coordinates_to_pnum(mesh_shape: MeshShape, coord: Sequence[int]) -> int:
    """Returns the number of the processor at coordinates `coord`."""
    pnum = 0
    for size, c in zip(_sizes(mesh_shape), coord):
        pnum = pnum * size + c
    return pnum


def pnum_to_group(
    mesh_shape: MeshShape, group_dims: Sequence[int], pnum: Union[int, tf.Tensor]
) -> Union[int, tf.Tensor]:
    """Returns the number of the group that processor `pnum` is in.

    A group is the processors whose coordinates differ only along the mesh axes `group_dims`.

    Args:
      mesh_shape: a Shape, or its sizes.
      group_dims: mesh axes.
      pnum: a processor number; a Python int or an integer tf.Tensor.
    """
    group = 0
    stride = list_product(_sizes(mesh_shape))
    for axis, size in enumerate(_sizes(mesh_shape)):
        # Only +, * and // with numbers, so that `pnum` may be a tf.Tensor of a SIMD program.
        stride //= size
        if axis not in group_dims:
            group = group * size + pnum // stride % size
    return group


def processor_groups(mesh_shape: MeshShape, group_dims: Sequence[int]) -> list[list[int]]:
    """Returns the groups of processors that differ only along mesh axes `group_dims`.

    Groups are ordered by `pnum_to_group`, and their members by processor number.
    """
    outside = [s for axis, s in enumerate(_sizes(mesh_shape)) if axis not in group_dims]
    groups: list[list[int]] = [[] for _ in range(list_product(outside))]
    for pnum in range(list_product(_sizes(mesh_shape))):
        groups[pnum_to_group(mesh_shape, group_dims, pnum)].append(pnum)
    return groups


def shifted_sources(size: int, offset: int, wrap: bool) -> list[Optional[int]]:
    """Returns, for each coordinate along a mesh axis, the coordinate it receives from in a shift.

    Args:
      size: size of the mesh axis.
      offset: the number of processors to shift by.
      wrap: whether to wrap around; otherwise the source of processors at the end is None.
    """
    sources: list[Optional[int]] = []
    for coordinate in range(size):
        source = coordinate - offset
        inside = 0 <= source < size
        sources.append(source % size if wrap or inside else None)
    return sources

"""Which physical processors of a TPU the logical ones are.

Reductions along a mesh dimension are fastest if its processors form a ring of neighbors. The inner
dimensions of a logical mesh are therefore mapped to tiles of the TPU's chips: each tile is
traversed as a ring, and so are the tiles within the next larger tile. A ring traverses the rows of
a torus and returns along its first column:

    0  1  2  3
    15 6  5  4
    14 7  8  9
    13 12 11 10
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
from absl import flags

from mesh_tensorflow._core.shape import Dimension, Shape, list_product

if TYPE_CHECKING:
    from tensorflow.tpu.experimental import DeviceAssignment


_PUBLIC_MODULE = "mesh_tensorflow.simd_mesh_impl"
_FLAGS = (
    (
        flags.DEFINE_boolean,
        "fold_xy",
        False,
        "join the x and y dimensions of a 4-dimensional TPU topology, not y and z",
    ),
    (
        flags.DEFINE_integer,
        "logical_cores_per_chip",
        2,
        "cores of a TPU chip that a program sees: 1 where its cores work as one",
    ),
)


def _define_flags(into: flags.FlagValues) -> None:
    """Defines the flags that are not defined yet."""
    for define, name, default, text in _FLAGS:
        if name not in into:
            define(name, default, text, flag_values=into, module_name=_PUBLIC_MODULE)


_define_flags(flags.FLAGS)


def flag_value(name: str) -> Any:
    """Returns the value of a flag: as set, or as on the command line if none was parsed yet.

    Args:
      name: "fold_xy" or "logical_cores_per_chip".
    """
    flag = flags.FLAGS[name]
    if flags.FLAGS.is_parsed() or not flag.using_default_value:
        return flag.value
    # Parses only these flags; the command line and other flags are left to app.run.
    own = flags.FlagValues()
    _define_flags(own)
    own(sys.argv, known_only=True)
    return own[name].value


# -- rings

Coordinates = tuple[int, ...]
# For each logical dimension its name, and how many tiles it has along each physical dimension.
Spec = Sequence[tuple[str, Optional[Sequence[int]]]]


def _ring(sizes: Sequence[int]) -> list[Coordinates]:
    """Returns all coordinates of a box, with those of its first two dimensions as a ring.

    With an odd number of rows there is no such ring; the first dimension varies fastest then.
    """
    rows, columns = [*sizes, 1, 1][:2]
    if rows % 2 or columns == 1:
        walk = [(x, y) for y in range(columns) for x in range(rows)]
    else:
        # Rows there and back without the first column, which is left for the way home.
        forth, back = range(1, columns), range(columns - 1, 0, -1)
        walk = [(0, 0)]
        walk += [(x, y) for x in range(rows) for y in (back if x % 2 else forth)]
        walk += [(x, 0) for x in range(rows - 1, 0, -1)]
    # The cores of a chip are nearest to each other, so that their dimension varies fastest.
    rest = list(itertools.product(*(range(size) for size in sizes[2:])))
    return [(*xy[: len(sizes)], *inner) for xy in walk for inner in rest]


def _nested_rings(levels: Sequence[Sequence[int]]) -> list[Coordinates]:
    """Returns all coordinates of a box, tile by tile.

    Args:
      levels: for each logical dimension, outermost first, the number of tiles of the next level
        along each dimension of its own tiles.
    """
    walk: list[Coordinates] = [(0,) * len(levels[0])] if levels else [()]
    # In tiles of the next level: coordinate = (that of the tile) * size + (that within the tile).
    for sizes in levels:
        walk = [
            tuple(tile * size + c for tile, size, c in zip(outer, sizes, inner))
            for outer in walk
            for inner in _ring(sizes)
        ]
    return walk


def _row_major(sizes: Sequence[int], coordinates: Coordinates) -> int:
    return int(np.ravel_multi_index(coordinates, sizes))


# -- tiles of powers of two


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _tile(rows: int, columns: int, chips: int, is_ring: bool) -> tuple[int, int]:
    """Returns the rows and columns of a tile of `chips` chips; all are powers of two.

    Args:
      rows: the rows of the area to tile.
      columns: its columns.
      chips: the number of chips in a tile.
      is_ring: whether the tile has only one logical dimension, for which a whole row or column of a
        torus is the best ring. Otherwise the tile is as square as possible, to be tiled further.
    """
    # A whole row of a torus closes by itself, without a way back.
    if is_ring and chips in (rows, columns):
        return (rows, 1) if chips == rows else (1, columns)
    # The largest power of two up to the square root of chips; what rows lack columns make up for.
    height = min(1 << (chips.bit_length() - 1) // 2, rows)
    width = min(chips // height, columns)
    return chips // width, width


def _levels(logical: Sequence[int], physical: Sequence[int]) -> Optional[list[list[int]]]:
    """Returns the sizes for `_nested_rings`, or None if sizes are no powers of two.

    Args:
      logical: the logical mesh shape, without sizes of 1.
      physical: [x, y, cores].
    """
    x, y, cores = physical
    if not (_is_power_of_two(x) and _is_power_of_two(y)):
        return None
    # Tile i is what the dimensions from i on traverse together; the first one is the whole torus.
    tiles = [(x, y, cores)]
    for i in range(1, len(logical)):
        # All processors that differ along the dimensions from i on, which are to be close together.
        size = list_product(logical[i:])
        # A tile is some whole chips, or some cores of one: cores of a chip are nearer than chips.
        if size % cores == 0 and _is_power_of_two(size // cores):
            chips = _tile(*tiles[-1][:2], size // cores, is_ring=i == len(logical) - 1)
            tiles.append((*chips, cores))
        elif tiles[-1][2] % size == 0:  # several logical dimensions share the cores of a chip
            tiles.append((1, 1, size))
        else:
            return None
    # A level's sizes: how many of the next smaller tiles its own has along each dimension.
    inner_tiles = [*tiles[1:], (1, 1, 1)]
    return [[a // b for a, b in zip(tile, part)] for tile, part in zip(tiles, inner_tiles)]


# -- the public functions


def physical_shape_3d_from_topology_proto_4d(mesh_shape: Sequence[int]) -> list[int]:
    """Joins two dimensions of a TPU topology, to make it a two-dimensional torus of chips.

    Args:
      mesh_shape: [x, y, z, cores].

    Returns:
      [y * z, x, cores]; [x * y, z, cores] with the flag --fold_xy.

    Raises:
      ValueError: there are not four sizes.
    """
    if len(mesh_shape) != 4:
        raise ValueError(
            f"a TPU topology has a 4d shape [x, y, z, core]; got {list(mesh_shape)}. Give sizes "
            "of 1 for the dimensions it lacks"
        )
    x, y, z, cores = mesh_shape
    return [x * y, z, cores] if flag_value("fold_xy") else [y * z, x, cores]


def auto_logical_to_physical_tpu(
    logical_shape: Sequence[int],
    physical_shape: Sequence[int],
    return_coordinates: bool = False,
    device_assignment: Optional[DeviceAssignment] = None,
) -> list:
    """Maps a logical mesh to a TPU so that its dimensions form short rings.

    The last dimensions get the smallest tiles, whose chips are close together. If x, y or a tile is
    not a power of two, or the number of cores per chip is not that of the flag
    --logical_cores_per_chip, processors keep their order.

    Args:
      logical_shape: sizes of the logical mesh.
      physical_shape: [x, y, cores], or [x, y, z, cores], of which two are joined by
        `physical_shape_3d_from_topology_proto_4d`; with other lengths processors keep their order.
      return_coordinates: whether to return coordinates instead of numbers.
      device_assignment: a tf DeviceAssignment with one core per replica. It defines the numbers if
        chips have one core; with more cores, numbers are in row-major order.

    Returns:
      For each logical processor, in row-major order, its physical number or the tuple of its
      physical coordinates (three of them if four dimensions were joined).

    Raises:
      ValueError: the shapes have different products; or chips have one core, numbers are requested
        and `device_assignment` is None.
    """
    # Topologies have NumPy integers, which lack methods of Python's.
    logical, physical = [int(n) for n in logical_shape], [int(n) for n in physical_shape]
    if list_product(logical) != list_product(physical):
        raise ValueError(
            "physical and logical shapes must have the same product; "
            f"physical_shape={physical} has {list_product(physical)}, logical_shape={logical} has "
            f"{list_product(logical)}. Change a size of the logical mesh, or the topology"
        )
    if len(physical) == 4:
        physical = physical_shape_3d_from_topology_proto_4d(physical)
    levels = None
    if len(physical) == 3 and physical[-1] == flag_value("logical_cores_per_chip"):
        # Without dimensions of size 1: row-major numbers are the same, and they have no tiles.
        levels = _levels([size for size in logical if size > 1], physical)
    if levels is None:
        numbers = range(list_product(physical))
        if not return_coordinates:
            return list(numbers)
        return list(itertools.product(*(range(size) for size in physical)))
    walk = _nested_rings(levels)
    if return_coordinates:
        return walk
    if physical[-1] == 1 and len(walk) > 1:
        replica_at = _replicas_by_coordinates(physical, device_assignment)
        return [replica_at[coordinates] for coordinates in walk]
    return [_row_major(physical, coordinates) for coordinates in walk]


def _replicas_by_coordinates(
    physical: Sequence[int], device_assignment: Optional[DeviceAssignment]
) -> dict[Coordinates, int]:
    """Returns the replica at each coordinate of a physical shape.

    Chips are numbered with x varying fastest, then y, then z; the first dimension of `physical`
    varies fastest, too.

    Args:
      physical: [rows, columns, 1].
      device_assignment: a tf DeviceAssignment with one core per replica.

    Raises:
      ValueError: there is no device assignment, or it does not assign one replica to each chip.
    """
    rows, columns, _ = physical
    if device_assignment is None:
        raise ValueError(
            f"physical_shape={list(physical)} has one core a chip: physical_shape or "
            "device_assignment unset. Give the device_assignment that the replicas of the program "
            "get, or ask for coordinates with return_coordinates=True"
        )
    sizes = list(device_assignment.topology.mesh_shape)
    replica_at: dict[Coordinates, int] = {}
    for replica in range(device_assignment.num_replicas):
        # From [x, y, z, core] to (z, y, x), in whose row-major order x varies fastest.
        chip = _row_major(sizes[-2::-1], tuple(device_assignment.coordinates(replica, 0))[-2::-1])
        replica_at[chip % rows, chip // rows, 0] = replica
    if len(replica_at) != rows * columns or device_assignment.num_replicas != rows * columns:
        raise ValueError(
            f"the device assignment must have a replica on each of the {rows * columns} chips of "
            f"physical_shape={list(physical)}; its {device_assignment.num_replicas} replicas are "
            f"on {len(replica_at)} chips of a topology of {sizes}"
        )
    return replica_at


class HierarchicalTiling:
    """A logical mesh mapped to a physical one by tiles, each of them traversed as a ring.

    For example, `HierarchicalTiling([("outer", [2, 2]), ("inner", [4, 2])], [8, 4])` is a mesh
    `outer:4,inner:8`, where "inner" traverses a tile of 4x2 processors and "outer" the 2x2 tiles.
    """

    def __init__(self, spec: Spec, physical_shape: Sequence[int]):
        """Creates a HierarchicalTiling.

        Args:
          spec: pairs (name of a mesh dimension, list of tile counts along each physical
            dimension), outermost first. The first list may be None, for all remaining processors.
          physical_shape: sizes of the physical mesh.

        Raises:
          ValueError: the products of the tile counts differ from `physical_shape`.
        """
        physical = list(physical_shape)
        names, levels = _names_and_counts(spec)
        axes = max([len(physical), *(len(counts) for counts in levels if counts)])
        padded = _pad(physical, axes)
        if levels and levels[0] is None:
            # What the inner tiles leave of each physical dimension is the number of outer ones.
            inner = [_pad(counts or [], axes) for counts in levels[1:]]
            levels[0] = [size // list_product(c) for size, *c in zip(padded, *inner)]
        rings = [_pad(counts or [], axes) for counts in levels]
        # This finds a size that the inner tiles do not divide, too: the quotient above is a floor.
        products = [list_product(counts[axis] for counts in rings) for axis in range(axes)]
        if products != padded:
            raise ValueError(
                f"mesh spec multiplies to the wrong size: spec={spec} physical_shape={physical} "
                f"products={products}. Along each physical dimension the tile counts of all mesh "
                "dimensions must multiply to its size"
            )
        self._logical_to_physical = [_row_major(padded, c) for c in _nested_rings(rings)]
        self._mesh_shape = self.spec_to_mesh_shape(
            list(zip(names, rings)), len(self._logical_to_physical)
        )

    @classmethod
    def spec_to_mesh_shape(cls, spec: Spec, num_processors: int) -> Shape:
        """Returns the mesh shape of a spec.

        Args:
          spec: as for the constructor.
          num_processors: an int.

        Raises:
          ValueError: the spec has another number of processors.
        """
        names, levels = _names_and_counts(spec)
        sizes = [list_product(counts or []) for counts in levels]
        if levels and levels[0] is None:
            # What is None counts as 1 so far: this is the product of the others.
            sizes[0] = num_processors // list_product(sizes)
        if list_product(sizes) != num_processors:
            raise ValueError(
                f"product of spec must be num_processors; spec={spec} has {list_product(sizes)}, "
                f"num_processors={num_processors}. Change its tile counts, or give None for the "
                "first"
            )
        return Shape([Dimension(name, size) for name, size in zip(names, sizes)])

    @property
    def logical_to_physical(self) -> list[int]:
        """The physical number of each logical processor, in row-major order."""
        return self._logical_to_physical

    @property
    def mesh_shape(self) -> Shape:
        """The logical mesh, a Shape."""
        return self._mesh_shape


def _names_and_counts(
    spec: Spec,
) -> tuple[list[str], list[Optional[list[int]]]]:
    """Returns the names and the tile counts of a HierarchicalTiling's spec.

    Raises:
      ValueError: another list than the first is None.
    """
    names = [name for name, _ in spec]
    levels = [None if counts is None else list(counts) for _, counts in spec]
    if None in levels[1:]:
        raise ValueError(
            f"only the first tile counts of a spec can be None, those of {names[:1]}; spec={spec}"
        )
    return names, levels


def _pad(counts: Sequence[int], axes: int) -> list[int]:
    return [*counts, *[1] * (axes - len(counts))]

"""Which processor holds which tile of a tensor: as text, and as a picture."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional, Union

from mesh_tensorflow._core.errors import WrongTypeError, dims_text
from mesh_tensorflow._core.layout import pnum_to_processor_coordinates
from mesh_tensorflow._core.shape import Shape, ShapeLike, convert_to_shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._units import bytes_text
from mesh_tensorflow.ops._variables.variable import Variable
from mesh_tensorflow.visualize import _sharding_picture, _sharding_text
from mesh_tensorflow.visualize._summary import mesh_text

__all__ = ["Sharding", "Tile", "visualize_sharding"]


class Tile(NamedTuple):
    """A part of a tensor that one or more processors hold.

    Attributes:
      number: its number, from 0, in row-major order of the parts.
      parts: for each dimension of the tensor, the number of its part.
      begin: for each dimension, where the tile begins.
      end: for each dimension, where it ends.
      processors: the numbers of the processors that hold it.
    """

    number: int
    parts: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    processors: tuple[int, ...]


class Sharding:
    """The tiles of a tensor on a mesh; `print` it, or `save` a picture.

    Attributes:
      name: the name of the tensor, or "".
      shape: the Shape of the tensor.
      mesh_impl: the MeshImpl.
      parts: for each dimension, the number of parts that it is split into.
      mesh_axes: for each dimension, the mesh axis that splits it, or None.
      tiles: a Tile for each distinct slice.
      shown: the numbers of the two dimensions, or of one, that tables show.
      bytes_per_processor: the bytes of one processor's slice, or None if the dtype is not known.
    """

    def __init__(
        self,
        shape: Shape,
        mesh_impl: MeshImpl,
        name: str = "",
        item_size: Optional[int] = None,
        dims: Optional[Sequence[str]] = None,
    ):
        """Creates a Sharding; see `visualize_sharding`.

        Args:
          shape: a Shape.
          mesh_impl: a MeshImpl.
          name: the name of the tensor.
          item_size: the bytes of an element, or None.
          dims: the names of the dimensions to show.
        """
        self.name = name
        self.shape = shape
        self.mesh_impl = mesh_impl
        slice_shape = mesh_impl.slice_shape(shape)
        self.slice_shape = tuple(slice_shape)
        self.mesh_axes = tuple(mesh_impl.splitting_axis(d) for d in shape)
        self.parts = tuple(1 if a is None else mesh_impl.shape[a].size for a in self.mesh_axes)
        self.tiles = list(self._tiles())
        self.shown = _shown(shape, self.parts, dims)
        size = math.prod(slice_shape)
        self.bytes_per_processor = None if item_size is None else size * item_size

    def _tiles(self) -> Iterator[Tile]:
        holders: dict[tuple[int, ...], list[int]] = {}
        for pnum in range(self.mesh_impl.size):
            coordinates = pnum_to_processor_coordinates(self.mesh_impl.shape, pnum)
            index = tuple(0 if a is None else coordinates[a] for a in self.mesh_axes)
            holders.setdefault(index, []).append(pnum)
        for number, index in enumerate(itertools.product(*map(range, self.parts))):
            begin = tuple(i * s for i, s in zip(index, self.slice_shape))
            end = tuple(b + s for b, s in zip(begin, self.slice_shape))
            yield Tile(number, index, begin, end, tuple(holders[index]))

    @property
    def copies(self) -> int:
        """The number of processors that hold each tile."""
        # A mesh axis splits one dimension at most, so all tiles have equally many.
        return self.mesh_impl.size // len(self.tiles)

    def tile_of(self, processor: int) -> Tile:
        """Returns the Tile that a processor holds.

        Args:
          processor: the number of a processor.
        """
        return next(tile for tile in self.tiles if processor in tile.processors)

    def tile_at(self, index: Sequence[int]) -> Tile:
        """Returns a Tile.

        Args:
          index: for each dimension, the number of its part.
        """
        number = 0
        # Row-major, in the order in which `_tiles` numbers them.
        for i, parts in zip(index, self.parts):
            number = number * parts + i
        return self.tiles[number]

    @property
    def heading(self) -> list[str]:
        """Two lines: the tensor and the mesh; what is split, and what a processor holds."""
        shape = f"[{dims_text(self.shape)}]"
        where = f"the mesh {mesh_text(self.mesh_impl)}" if self.mesh_impl.ndims else "one processor"
        first = f"{self.name} {shape}".strip() + f" on {where}"
        splits = [
            f"{d.name} over {self.mesh_impl.shape[a].name} in {n} parts of {s}"
            for d, a, n, s in zip(self.shape, self.mesh_axes, self.parts, self.slice_shape)
            if a is not None
        ]
        size = self.bytes_per_processor
        each = f"each processor holds {list(self.slice_shape)}"
        each += "" if size is None else f", {bytes_text(size)}"
        copies = f"{self.copies} copies of each tile" if self.copies > 1 else "no copies"
        return [first, "; ".join([", ".join(splits) or "not split", each, copies])]

    def text(self, color: bool = False) -> str:
        """Returns a table of tiles, each with the numbers of the processors that hold it.

        Args:
          color: whether to color tiles, by the escape codes of terminals.
        """
        return _sharding_text.drawn(self, color)

    def __str__(self) -> str:
        # Escape codes are for terminals; in a file they would be noise.
        return self.text(sys.stdout.isatty())

    def __repr__(self) -> str:
        return self.text()

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes a picture of the tiles, and of the processors that hold them.

        Processors that hold copies of a tile have its color.

        Args:
          path: the path of an SVG file; or of a PNG or PDF file, which needs matplotlib.

        Raises:
          ValueError: the name of the file ends otherwise.
          ImportError: matplotlib is not installed.
        """
        _sharding_picture.picture(self).save(path)


def _shown(shape: Shape, parts: Sequence[int], dims: Optional[Sequence[str]]) -> tuple[int, ...]:
    """Returns the numbers of the dimensions to show: those named, or those that are split."""
    names = shape.dimension_names
    if dims is not None:
        wrong = [d for d in dims if d not in names]
        if wrong or not 1 <= len(set(dims)) == len(dims) <= 2:
            raise ValueError(
                f"visualize_sharding: dims={list(dims)} should be one or two of the dimensions "
                f"{', '.join(names)}"
            )
        return tuple(names.index(d) for d in dims)
    split = [i for i, n in enumerate(parts) if n > 1]
    others = sorted((i for i, n in enumerate(parts) if n == 1), key=lambda i: -shape[i].size)
    return tuple(sorted((split + others)[:2]))


def visualize_sharding(
    x: Union[Tensor, Variable, ShapeLike],
    mesh_impl: MeshImpl,
    dims: Optional[Sequence[str]] = None,
) -> Sharding:
    """Returns which processor holds which tile of a tensor.

    Args:
      x: a Tensor, a Variable, or a Shape or what converts to one.
      mesh_impl: a MeshImpl.
      dims: the names of the dimensions to show from top to bottom and from left to right. By
        default the first two that are split. Other dimensions that are split are shown by one
        table for each of their parts.

    Returns:
      A Sharding, which prints as a table, has the `tiles`, and writes pictures by `save(path)`.

    Raises:
      WrongTypeError: `mesh_impl` is not a MeshImpl.
      ValueError: the tensor cannot be split in this layout, or has no such dimensions.

    >>> import mesh_tensorflow as mtf
    >>> mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(
    ...     "rows:2,cols:2", "batch:rows", ["cpu:0"] * 4)
    >>> found = mtf.visualize.visualize_sharding("batch:8,d_model:16", mesh_impl)
    >>> found
    [batch=8, d_model=16] on the mesh rows=2, cols=2: 4 processors
    batch over rows in 2 parts of 4; each processor holds [4, 16]; 2 copies of each tile
    <BLANKLINE>
    batch ↓, d_model →
           0:16
         ┌──────┐
     0:4 │ 0, 1 │
         ├──────┤
     4:8 │ 2, 3 │
         └──────┘
    >>> found.tile_of(processor=3).begin
    (4, 0)
    """
    if not isinstance(mesh_impl, MeshImpl):
        raise WrongTypeError(
            "visualize_sharding: mesh_impl is a mesh implementation such as "
            f"mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout), not {mesh_impl!r}"
        )
    if isinstance(x, Variable):
        return Sharding(x.shape, mesh_impl, x.name, x.slice_dtype.size, dims)
    if isinstance(x, Tensor):
        made_by = x.operation
        name = made_by.name if isinstance(made_by, Variable) else x.name
        return Sharding(x.shape, mesh_impl, name, x.dtype.size, dims)
    return Sharding(convert_to_shape(x) or Shape([]), mesh_impl, "", None, dims)

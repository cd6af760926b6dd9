"""Which processor holds which tile of a tensor: as text, and as a picture."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Optional, Union

from mesh_tensorflow._core.errors import WrongTypeError, dims_text
from mesh_tensorflow._core.layout import pnum_to_processor_coordinates, slice_coordinates
from mesh_tensorflow._core.operation import Tensor
from mesh_tensorflow._core.shape import Shape, ShapeLike, convert_to_shape
from mesh_tensorflow._figure import (
    INK,
    MUTED,
    Picture,
    ansi,
    color_of,
    plain,
    points,
    text_color,
)
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._units import bytes_text, shortened
from mesh_tensorflow.ops._variable import Variable
from mesh_tensorflow.visualize._summary import mesh_text

__all__ = ["Sharding", "Tile", "visualize_sharding"]

_MOST_PARTS = 12  # of a dimension, that are shown
_LEAST_PARTS = 4
_WIDTH = 100
_MOST_TABLES = 8
_MOST_NUMBERS = 6  # of processors of a tile


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
            # A processor's part of a dimension is its coordinate along the axis that splits it.
            index = slice_coordinates(self.mesh_axes, self.mesh_impl.shape, pnum)
            holders.setdefault(index, []).append(pnum)
        for number, index in enumerate(itertools.product(*map(range, self.parts))):
            begin = tuple(i * s for i, s in zip(index, self.slice_shape))
            # Without padding, of which the last parts may have some, or nothing else.
            end = tuple(
                max(b, min(b + s, d.size)) for b, s, d in zip(begin, self.slice_shape, self.shape)
            )
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
            f"{', of which the last end in padding' if d.size % n else ''}"
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
        lines = [*self.heading, ""]
        names = [self.shape[i].name for i in self.shown]
        arrows = ["↓", "→"] if len(names) == 2 else ["→"]
        if names:
            lines.append(", ".join(f"{name} {arrow}" for name, arrow in zip(names, arrows)))
        tables = list(others(self))
        for what, index in tables[:_MOST_TABLES]:
            lines += ([f"{what}:"] if what else []) + _table(self, index, color)
        if len(tables) > _MOST_TABLES:
            lines.append(f"and {len(tables) - _MOST_TABLES} more tables like these")
        return "\n".join(lines)

    def __str__(self) -> str:
        # Escape codes are for terminals; in a file they would be noise.
        return self.text(sys.stdout.isatty())

    def __repr__(self) -> str:
        return self.text()

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes a picture of the tiles, and of the processors that hold them.

        Processors that hold copies of a tile have its color.

        Args:
          path: the path of an SVG, PNG or PDF file.

        Raises:
          ValueError: the name of the file ends otherwise.
          ImportError: matplotlib is not installed.
        """
        self.picture().save(path)

    def picture(self) -> Picture:
        """Returns the picture that `save` writes.

        Raises:
          ImportError: matplotlib is not installed.
        """
        return _ShardingPicture(self).draw()


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
    # In the order of the tensor again, so that a table has the earlier dimension as its rows.
    return tuple(sorted((split + others)[:2]))


# -- as text


def processors_text(numbers: Sequence[int]) -> str:
    """Returns "0, 2", or "0-3" of numbers without gaps, or "0, 4, ..., 28".

    Args:
      numbers: increasing numbers of processors.

    >>> processors_text([0, 2]), processors_text([4, 5, 6, 7]), processors_text(range(0, 64, 8))
    ('0, 2', '4-7', '0, 8, ..., 56')
    """
    numbers = list(numbers)
    # Without gaps, as the first and the last tell: increasing numbers are all different.
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    if len(numbers) > _MOST_NUMBERS:
        return f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
    return ", ".join(map(str, numbers))


def kept(count: int, most: int = _MOST_PARTS) -> list[int]:
    """Returns the numbers of the parts to show; -1 stands for those that are left out.

    Args:
      count: the number of parts.
      most: how many to show at most.
    """
    if count <= most:
        return list(range(count))
    # The last one says where the dimension ends.
    return [*range(most - 2), -1, count - 1]


def _part(tile: Tile, dimension: int) -> str:
    return f"{tile.begin[dimension]}:{tile.end[dimension]}"


def others(sharding: Sharding) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the tables to show: (the parts of the dimensions that are not shown, an index)."""
    ranges = [range(1) if i in sharding.shown else range(n) for i, n in enumerate(sharding.parts)]
    # One table for each combination of parts of the dimensions that tables do not show.
    for index in itertools.product(*ranges):
        tile = sharding.tile_at(index)
        names = [
            f"{d.name} {_part(tile, i)}"
            for i, d in enumerate(sharding.shape)
            if i not in sharding.shown and sharding.parts[i] > 1
        ]
        yield ", ".join(names), index


def grid(sharding: Sharding, index: Sequence[int]) -> list[list[Tile]]:
    """Returns the tiles of one table, by row and column.

    Args:
      sharding: a Sharding.
      index: the parts of the dimensions that the table does not show.
    """
    shown = list(sharding.shown)
    rows, columns = shown if len(shown) == 2 else (None, *shown) if shown else (None, None)
    lines = []
    for i in range(1 if rows is None else sharding.parts[rows]):
        line = []
        for j in range(1 if columns is None else sharding.parts[columns]):
            at = list(index)
            if rows is not None:
                at[rows] = i
            if columns is not None:
                at[columns] = j
            line.append(sharding.tile_at(at))
        lines.append(line)
    return lines


def _table(sharding: Sharding, index: Sequence[int], color: bool) -> list[str]:
    tiles = grid(sharding, index)
    rows, columns = kept(len(tiles)), kept(len(tiles[0]), _most_columns(sharding, tiles))
    shown = sharding.shown
    sides, heads = [""] * len(rows), [""] * len(columns)
    if shown:
        across = shown[-1]
        heads = [_part(tiles[0][j], across) if j >= 0 else "" for j in columns]
    if len(shown) == 2:
        sides = [_part(tiles[i][0], shown[0]) if i >= 0 else "" for i in rows]
    cells = [
        [processors_text(tiles[i][j].processors) if min(i, j) >= 0 else "..." for j in columns]
        for i in rows
    ]
    # One width for all, so that rules and cells of all rows meet.
    width = max(len(text) for text in [*heads, *itertools.chain(*cells)]) + 2
    side = max(map(len, sides)) + 1
    margin = " " * (side + 1)
    rules = [
        margin + left + middle.join("─" * width for _ in columns) + right
        for left, middle, right in ("┌┬┐", "├┼┤", "└┴┘")
    ]
    lines = [(margin + " " + " ".join(head.center(width) for head in heads)).rstrip()]
    for place, (i, text) in enumerate(zip(rows, sides)):
        lines.append(rules[1 if place else 0])
        painted = []
        for j, cell in zip(columns, cells[place]):
            # Before it is colored: the letters of escape codes would count.
            cell = cell.center(width)
            if color and min(i, j) >= 0:
                cell = ansi(cell, color_of(tiles[i][j].number, len(sharding.tiles)))
            painted.append(cell)
        lines.append(f"{text:>{side}} │{'│'.join(painted)}│")
    return [*lines, rules[2]]


def _most_columns(sharding: Sharding, tiles: Sequence[Sequence[Tile]]) -> int:
    """Returns how many columns fit side by side."""
    # The last tile has the largest numbers, and so the longest texts.
    last = tiles[-1][-1]
    texts = [processors_text(last.processors)]
    texts += [_part(last, dimension) for dimension in sharding.shown[-1:]]
    return max(_LEAST_PARTS, min(_MOST_PARTS, _WIDTH // (max(map(len, texts)) + 3)))


# -- as a picture

_SIDE = 260.0  # of a table of tiles, at most, in pixels
_MOST_PICTURES = 4  # of tables
_LEAST_LABELED = 14.0  # the height of a cell with a text
_LABELED = 8  # columns that are as wide as their labels
_DIGIT = 7.6  # the width of one, in pixels
_LINE = 20.0
_HEADS = 36.0  # the height of what stands above a table
_TILES = "tiles, with the processors that hold them"
_MOST_NAME = 90


def _cell_size(count: int, wanted: float, least: float = 3.0) -> float:
    # So that a table of many cells is no larger than `_SIDE`, as long as a cell can be seen.
    return max(least, min(wanted, _SIDE / max(1, count)))


def _fits(text: str, width: float) -> bool:
    return len(text) * _DIGIT + 4 <= width


class _ShardingPicture:
    """The picture of a Sharding: tables of tiles, and at their right the processors."""

    def __init__(self, sharding: Sharding):
        self.sharding = sharding
        self.picture = Picture(f"Tiles of {sharding.heading[0]}")

    def draw(self) -> Picture:
        """Draws all of it."""
        first, second = self.sharding.heading
        name, y = self.sharding.name, 0.0
        self.picture.words(0, y, shortened(name or first, _MOST_NAME), 14, weight="bold")
        below = second.split("; ")
        for text in [first[len(name) :].strip(), *below] if name else below:
            y += _LINE
            self.picture.words(0, y, text, color=MUTED)
        y += 34
        self.picture.words(0, y, _TILES, 13, weight="bold")
        # The processors stand beside the widest table.
        right = self._tables(y + 22)
        x = max(right, len(_TILES) * _DIGIT * 1.1) + 56
        self.picture.words(x, y, "processors, in the color of their tile", 13, weight="bold")
        self._processors(x, y + 22)
        return self.picture

    def _tables(self, y: float) -> float:
        """Draws the tables of tiles one below the other; returns where the widest ends."""
        tables = list(others(self.sharding))
        right = 0.0
        for what, index in tables[:_MOST_PICTURES]:
            if what:
                self.picture.words(0, y, what)
                y += 12
            width, height = self._tiles(index, y + _HEADS)
            right, y = max(right, width), y + _HEADS + height + 22
        if len(tables) > _MOST_PICTURES:
            text = f"and {len(tables) - _MOST_PICTURES} more tables like these"
            self.picture.words(0, y, text, color=MUTED)
        return right

    def _tiles(self, index: Sequence[int], top: float) -> tuple[float, float]:
        """Draws one table; returns where it ends at the right, and its height."""
        sharding = self.sharding
        tiles, shown = grid(sharding, index), sharding.shown
        rows, columns = len(tiles), len(tiles[0])
        heads = [_part(t, shown[-1]) for t in tiles[0]] if shown else [""] * columns
        sides = [_part(line[0], shown[0]) for line in tiles] if len(shown) == 2 else [""] * rows
        cells = {
            (i, j): (tile, processors_text(tile.processors), "")
            for i, line in enumerate(tiles)
            for j, tile in enumerate(line)
        }
        widest = max(map(len, heads)) * _DIGIT + 10
        longest = max(len(text) for _, text, _ in cells.values()) * _DIGIT + 14
        # A few columns are as wide as their labels; many have none.
        least = widest if columns <= _LABELED else 3.0
        width, height = _cell_size(columns, max(64.0, widest, longest), least), _cell_size(rows, 44)
        heads = [head if _fits(head, width) else "" for head in heads]
        names = [sharding.shape[i].name for i in shown]
        right = self._grid((0, top), (width, height), heads, sides, names, cells)
        return right, rows * height

    def _processors(self, x: float, y: float) -> None:
        """Draws the mesh: its last dimension from left to right, the others downward."""
        mesh = self.sharding.mesh_impl.shape
        columns = mesh[-1].size if len(mesh) else 1
        rows = mesh.size // columns
        width, height = _cell_size(columns, 48.0), _cell_size(rows, 36.0)
        heads, sides = [""] * columns, [""] * rows
        if len(mesh) and width >= _LEAST_LABELED:
            heads = [str(j) for j in range(columns)]
        leading = len(mesh) > 1
        if leading:
            first = (pnum_to_processor_coordinates(mesh, i * columns)[:-1] for i in range(rows))
            sides = [",".join(map(str, coordinates)) for coordinates in first]
        names = [", ".join(d.name for d in mesh[:-1])] * leading + [d.name for d in mesh[-1:]]
        cells = {
            divmod(p, columns): (tile, str(p), f"processor {p}: ")  # p = row * columns + column
            for tile in self.sharding.tiles
            for p in tile.processors
        }
        self._grid((x, y + _HEADS), (width, height), heads, sides, names, cells)

    def _grid(
        self,
        place: tuple[float, float],
        size: tuple[float, float],
        heads: Sequence[str],
        sides: Sequence[str],
        names: Sequence[str],
        cells: Mapping[tuple[int, int], tuple[Tile, str, str]],
    ) -> float:
        """Draws a table; returns where it ends at the right.

        Args:
          place: its upper left corner.
          size: the width and the height of a cell.
          heads: what stands above the columns.
          sides: what stands at the left of the rows, if they are high enough.
          names: the dimension of the rows, if they have one, and that of the columns.
          cells: by row and column a Tile, a text, and what begins the text that is shown on hover.
        """
        from matplotlib.patches import Rectangle

        (left, top), (width, height) = place, size
        is_high = height >= _LEAST_LABELED
        sides = sides if is_high else [""] * len(sides)
        if len(names) > 1:
            left += max(map(len, sides)) * _DIGIT + 30
        axes = self.picture.axes(left, top, len(heads) * width, len(sides) * height)
        axes.set_xlim(0, len(heads))
        axes.set_ylim(len(sides), 0)  # rows count downward
        # As a matrix is written, with the names of columns above it.
        axes.xaxis.tick_top()
        axes.xaxis.set_label_position("top")
        axes.set_xticks([j + 0.5 for j, text in enumerate(heads) if text], [*filter(None, heads)])
        axes.set_yticks([i + 0.5 for i, text in enumerate(sides) if text], [*filter(None, sides)])
        style = {"color": INK, "fontsize": points(12)}
        if len(names) > 1:
            axes.set_ylabel(plain(names[0]), **style)
        if names:
            axes.set_xlabel(plain(names[-1]), **style)
        for (i, j), (tile, text, title) in cells.items():
            fill = color_of(tile.number, len(self.sharding.tiles))
            box = Rectangle(
                (j, i), 1, 1, facecolor=fill, edgecolor=MUTED, linewidth=0.6, clip_on=False
            )
            axes.add_patch(box)
            ranges = [f"{d.name} {_part(tile, n)}" for n, d in enumerate(self.sharding.shape)]
            caption = f"{', '.join(ranges)}: processors {processors_text(tile.processors)}"
            self.picture.title(box, f"{title}{caption}")
            # A text only where it fits in.
            if is_high and _fits(text, width):
                axes.text(
                    j + 0.5, i + 0.5, text, ha="center", va="center", color=text_color(fill),
                    fontsize=points(12),
                )  # fmt: skip
        return left + len(heads) * width


# -- of what a user names


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

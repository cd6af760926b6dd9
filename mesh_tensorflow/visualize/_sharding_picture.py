"""A picture of tiles, beside the processors that hold them in the same colors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mesh_tensorflow._core.layout import pnum_to_processor_coordinates
from mesh_tensorflow._units import shortened
from mesh_tensorflow.visualize._picture import Box, Picture, Words, color_of, text_color, text_width
from mesh_tensorflow.visualize._picture import Shape as Drawn
from mesh_tensorflow.visualize._sharding_text import grid, others, processors_text

if TYPE_CHECKING:
    from mesh_tensorflow.visualize._sharding import Sharding, Tile

__all__ = ["picture"]

_SIZE = 12.0  # of the font
_MARGIN = 16.0
_GAP = 56.0  # between tiles and processors
_SIDE = 260.0  # of a table of tiles, at most
_MOST_TABLES = 4
_LEAST_CELL = 14.0
_LABELED = 8
_TILES = "tiles, with the processors that hold them"
_LINE = 20.0
_MOST_NAME = 90


class _Placed:
    """Shapes, and how far they reach."""

    def __init__(self) -> None:
        self.shapes: list[Drawn] = []
        self.right = 0.0
        self.bottom = 0.0

    def words(self, x: float, y: float, text: str, **style: object) -> None:
        """Adds a line of text."""
        words = Words(x, y, text, **style)  # type: ignore[arg-type]
        self.shapes.append(words)
        wide = text_width(text, words.size, words.bold)
        reach = {"start": wide, "middle": wide / 2, "end": 0.0}[words.anchor]
        if not words.turned:
            self.right = max(self.right, x + reach)
        self.bottom = max(self.bottom, y + words.size)

    def cell(self, box: Box, text: str) -> None:
        """Adds a rectangle, with a text if that fits in."""
        self.shapes.append(box)
        self.right = max(self.right, box.x + box.width)
        self.bottom = max(self.bottom, box.y + box.height)
        if text and text_width(text, _SIZE) < box.width - 4 and box.height >= _LEAST_CELL:
            middle = box.x + box.width / 2, box.y + box.height / 2
            self.shapes.append(Words(*middle, text, _SIZE, color=text_color(box.fill or "#ffffff")))


def _cell_size(count: int, wanted: float, least: float = 3.0) -> float:
    return max(least, min(wanted, _SIDE / max(1, count)))


def _color(sharding: Sharding, tile: Tile) -> str:
    return color_of(tile.number, len(sharding.tiles))


def _tile_title(sharding: Sharding, tile: Tile) -> str:
    parts = [f"{d.name} {b}:{e}" for d, b, e in zip(sharding.shape, tile.begin, tile.end)]
    return f"{', '.join(parts)}: processors {processors_text(tile.processors)}"


def _tiles(out: _Placed, sharding: Sharding, index: Sequence[int], x: float, y: float) -> None:
    """Draws one table of tiles."""
    tiles = grid(sharding, index)
    rows, columns = len(tiles), len(tiles[0])
    longest = max(len(processors_text(t.processors)) for line in tiles for t in line)
    parts = [f"{t.begin[i]}:{t.end[i]}" for t in tiles[-1] for i in sharding.shown[-1:]]
    heads = max((text_width(part, 11) for part in parts), default=0) + 10
    # A few columns are as wide as their labels; many have none.
    least = heads if columns <= _LABELED else 3.0
    width = _cell_size(columns, max(64.0, heads, longest * _SIZE * 0.64 + 14), least)
    height = _cell_size(rows, 44.0)
    shown = sharding.shown
    names = [sharding.shape[i] for i in shown]
    left = x
    if len(shown) == 2:
        sides = [f"{line[0].begin[shown[0]]}:{line[0].end[shown[0]]}" for line in tiles]
        left += max(text_width(s, 11) for s in sides) + 26
        out.words(x + 6, y + 24 + rows * height / 2, names[0].name, size=_SIZE, turned=True)
        if height >= _LEAST_CELL:
            for i, text in enumerate(sides):
                place = left - 6, y + 24 + (i + 0.5) * height
                out.words(*place, text, size=11, anchor="end", color="muted")
    top = y + 24
    if shown:
        out.words(left + columns * width / 2, y, names[-1].name, size=_SIZE)
        for j, tile in enumerate(tiles[0]):
            text = f"{tile.begin[shown[-1]]}:{tile.end[shown[-1]]}"
            if text_width(text, 11) < width:
                out.words(left + (j + 0.5) * width, y + 15, text, size=11, color="muted")
    for i, line in enumerate(tiles):
        for j, tile in enumerate(line):
            fill, title = _color(sharding, tile), _tile_title(sharding, tile)
            box = Box(left + j * width, top + i * height, width, height, fill, True, title)
            out.cell(box, processors_text(tile.processors))


def _processors(out: _Placed, sharding: Sharding, x: float, y: float) -> None:
    """Draws the mesh: processors along its last dimension from left to right, others downward."""
    mesh = sharding.mesh_impl.shape
    columns = mesh[-1].size if len(mesh) else 1
    rows = mesh.size // columns
    width, height = _cell_size(columns, 48.0), _cell_size(rows, 36.0)
    left, top = x, y + 24
    leading = [d.name for d in mesh][:-1]
    if leading:
        sides = [
            ",".join(map(str, pnum_to_processor_coordinates(mesh, i * columns)[:-1]))
            for i in range(rows)
        ]
        left += max(text_width(s, 11) for s in sides) + 26
        out.words(x + 6, top + rows * height / 2, ", ".join(leading), size=_SIZE, turned=True)
        if height >= _LEAST_CELL:
            for i, text in enumerate(sides):
                place = left - 6, top + (i + 0.5) * height
                out.words(*place, text, size=11, anchor="end", color="muted")
    if len(mesh):
        out.words(left + columns * width / 2, y, mesh[-1].name, size=_SIZE)
        if width >= _LEAST_CELL:
            for j in range(columns):
                out.words(left + (j + 0.5) * width, y + 15, str(j), size=11, color="muted")
    for tile in sharding.tiles:
        for p in tile.processors:
            i, j = divmod(p, columns)
            title = f"processor {p}: {_tile_title(sharding, tile)}"
            fill = _color(sharding, tile)
            box = Box(left + j * width, top + i * height, width, height, fill, True, title)
            out.cell(box, str(p))


def picture(sharding: Sharding) -> Picture:
    """Returns the picture of a Sharding.

    Args:
      sharding: a Sharding.
    """
    out = _Placed()
    first, second = sharding.heading
    x, y = _MARGIN, _MARGIN + 6
    name = sharding.name
    out.words(x, y, shortened(name or first, _MOST_NAME), size=14, anchor="start", bold=True)
    below = second.split("; ")
    for text in [first[len(name) :].strip(), *below] if name else below:
        y += _LINE
        out.words(x, y, text, anchor="start", color="muted", size=_SIZE)
    y += 34
    head = y
    tables = list(others(sharding))
    edge = 0.0
    out.words(x, head, _TILES, anchor="start", bold=True)
    # A heading wider than the tiles does not push the processors away from them.
    heading_right, out.right = out.right, 0.0
    y += 26
    for what, index in tables[:_MOST_TABLES]:
        if what:
            out.words(x, y, what, anchor="start", size=_SIZE)
            y += _LINE
        _tiles(out, sharding, index, x, y)
        y = out.bottom + 22
    if len(tables) > _MOST_TABLES:
        text = f"and {len(tables) - _MOST_TABLES} more tables like these"
        out.words(x, y, text, anchor="start", color="muted", size=_SIZE)
    edge = max(out.right, x + text_width(_TILES, 13, bold=True))
    place = edge + _GAP
    out.words(place, head, "processors, in the color of their tile", anchor="start", bold=True)
    _processors(out, sharding, place, head + 26)
    width = max(out.right, heading_right) + _MARGIN
    return Picture(width, out.bottom + _MARGIN, out.shapes, f"Tiles of {first}")

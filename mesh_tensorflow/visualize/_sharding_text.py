"""Tables of tiles with lines around them, for terminals."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mesh_tensorflow.visualize._picture import ansi, color_of

if TYPE_CHECKING:
    from mesh_tensorflow.visualize._sharding import Sharding, Tile

__all__ = ["drawn", "processors_text"]

_MOST_PARTS = 12  # of a dimension, that are shown
_LEAST_PARTS = 4
_WIDTH = 100
_MOST_TABLES = 8
_MOST_NUMBERS = 6  # of processors of a tile


def processors_text(numbers: Sequence[int], most: int = _MOST_NUMBERS) -> str:
    """Returns "0, 2", or "0-3" of numbers without gaps, or "0, 4, ..., 28".

    Args:
      numbers: increasing numbers of processors.
      most: how many to write at most.

    >>> processors_text([0, 2]), processors_text([4, 5, 6, 7]), processors_text(range(0, 64, 8))
    ('0, 2', '4-7', '0, 8, ..., 56')
    """
    numbers = list(numbers)
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    if len(numbers) > most:
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
    return [*range(most - 2), -1, count - 1]


def _range_text(begin: int, end: int) -> str:
    return f"{begin}:{end}"


def others(sharding: Sharding) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the tables to show: (the parts of the dimensions that are not shown, an index).

    Args:
      sharding: a Sharding.
    """
    ranges = [range(1) if i in sharding.shown else range(n) for i, n in enumerate(sharding.parts)]
    for index in itertools.product(*ranges):
        tile = sharding.tile_at(index)
        names = [
            f"{d.name} {_range_text(tile.begin[i], tile.end[i])}"
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
    found = []
    for i in range(1 if rows is None else sharding.parts[rows]):
        line = []
        for j in range(1 if columns is None else sharding.parts[columns]):
            at = list(index)
            if rows is not None:
                at[rows] = i
            if columns is not None:
                at[columns] = j
            line.append(sharding.tile_at(at))
        found.append(line)
    return found


def drawn(sharding: Sharding, color: bool) -> str:
    """Returns the heading and the tables of a Sharding.

    Args:
      sharding: a Sharding.
      color: whether to color tiles.
    """
    lines = [*sharding.heading, ""]
    names = [sharding.shape[i].name for i in sharding.shown]
    arrows = ["↓", "→"] if len(names) == 2 else ["→"]
    if names:
        lines.append(", ".join(f"{name} {arrow}" for name, arrow in zip(names, arrows)))
    tables = list(others(sharding))
    for what, index in tables[:_MOST_TABLES]:
        lines += ([f"{what}:"] if what else []) + _table(sharding, index, color)
    if len(tables) > _MOST_TABLES:
        lines.append(f"and {len(tables) - _MOST_TABLES} more tables like these")
    return "\n".join(lines)


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


def _part(tile: Tile, dimension: int) -> str:
    return _range_text(tile.begin[dimension], tile.end[dimension])

"""Charts: stacked bars by layer, and areas over time, with legends beneath them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mesh_tensorflow._units import bytes_text, shortened_apart, unit_of_bytes
from mesh_tensorflow.visualize._colors import KIND_COLORS
from mesh_tensorflow.visualize._picture import Box, Line, Picture, Polygon, Words, text_width
from mesh_tensorflow.visualize._picture import Shape as Drawn

__all__ = ["areas", "bars"]

_MARGIN = 16.0
_SIZE = 12.0
_ROW = 24.0
_PLOT = 520.0
_MOST_NAME = 40
_TICKS = 5
_MOST_POINTS = 160
_HEIGHT = 220.0


def _ticks(top: float) -> list[float]:
    """Returns round numbers from 0 to about `top`."""
    if top <= 0:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(top / _TICKS))
    step *= next(m for m in (1, 2, 5, 10) if top / (step * m) <= _TICKS)
    return [i * step for i in range(math.floor(top / step * (1 + 1e-9)) + 1)]


def _legend(names: Sequence[str], x: float, y: float, right: float) -> tuple[list[Drawn], float]:
    """Returns the shapes of a legend, and where it ends; entries that do not fit begin a line."""
    shapes: list[Drawn] = []
    at = x
    for i, name in enumerate(names):
        wide = 20 + text_width(name, _SIZE) + 22
        if at > x and at + wide > right:
            at, y = x, y + 20
        shapes.append(Box(at, y - 6, 12, 12, _color(i), False))
        shapes.append(Words(at + 18, y, name, _SIZE, "start"))
        at += wide
    return shapes, y + 12


def _color(number: int) -> str:
    return KIND_COLORS[number % len(KIND_COLORS)]


def bars(
    title: str, rows: Mapping[str, Mapping[str, float]], kinds: Sequence[str], what: str
) -> Picture:
    """Returns a chart with a stacked bar of bytes for each row.

    Args:
      title: its heading.
      rows: for each name, in the order from the top, the bytes of each kind.
      kinds: the names of all kinds, in the order of stacking.
      what: what is counted, such as "of each processor in a step".
    """
    names = dict(zip(rows, shortened_apart(list(rows), _MOST_NAME)))
    totals = {name: sum(values.values()) for name, values in rows.items()}
    most = max(totals.values(), default=0)
    unit, size = unit_of_bytes(most)
    left = _MARGIN + max((text_width(n, _SIZE) for n in names.values()), default=0) + 12
    top, labels = _MARGIN + 40, 76.0
    bottom = top + _ROW * len(rows)
    scale = _PLOT / (most or 1)
    shapes: list[Drawn] = [Words(_MARGIN, _MARGIN + 6, title, 14, "start", bold=True)]
    for tick in _ticks(most / size):
        x = left + tick * size * scale
        shapes.append(Line(x, top - 6, x, bottom + 4))
        shapes.append(Words(x, bottom + 14, f"{tick:g}", 11, color="muted"))
    shapes.append(Words(left + _PLOT / 2, bottom + 34, f"{unit} {what}", _SIZE))
    for i, (name, values) in enumerate(rows.items()):
        y = top + i * _ROW
        shapes.append(Words(left - 8, y + _ROW / 2, names[name], _SIZE, "end"))
        x = left
        for kind in kinds:
            wide = values.get(kind, 0) * scale
            if wide:
                hover = f"{name}, {kind}: {bytes_text(values[kind])}"
                fill = _color(kinds.index(kind))
                shapes.append(Box(x, y + 4, wide, _ROW - 8, fill, False, hover))
            x += wide
        text = bytes_text(totals[name])
        shapes.append(Words(x + 6, y + _ROW / 2, text, 11, "start", "muted"))
    right = left + _PLOT + labels
    legend, end = _legend(kinds, left, bottom + 60, right)
    width = max(right, _MARGIN + text_width(title, 14, bold=True) + _MARGIN)
    return Picture(width, end + _MARGIN, [*shapes, *legend], title)


def areas(
    title: str,
    kinds: Mapping[str, np.ndarray],
    what: str,
    limit: float = 0,
) -> Picture:
    """Returns a chart of stacked areas: bytes of each kind over time.

    Args:
      title: its heading.
      kinds: for each kind, an array of bytes, all of one length.
      what: the words under the axis.
      limit: the bytes at which to draw a line, if it is not much higher than the areas.
    """
    squeezed = _squeezed(kinds)
    length = max((len(v) for v in squeezed.values()), default=1)
    total = sum(squeezed.values(), np.zeros(length))
    most = float(total.max(initial=0))
    shows_limit = 0 < limit <= 1.5 * most
    high = max(most, limit) if shows_limit else most
    unit, size = unit_of_bytes(high)
    left, top = _MARGIN + 60, _MARGIN + 40
    bottom, right = top + _HEIGHT, left + _PLOT
    scale = _HEIGHT / (high or 1)
    shapes: list[Drawn] = [Words(_MARGIN, _MARGIN + 6, title, 14, "start", bold=True)]
    for tick in _ticks(high / size):
        y = bottom - tick * size * scale
        shapes.append(Line(left, y, right, y))
        shapes.append(Words(left - 8, y, f"{tick:g}", 11, "end", "muted"))
    shapes.append(Words(_MARGIN + 4, (top + bottom) / 2, unit, _SIZE, turned=True))
    below = np.zeros(length)
    step = _PLOT / length
    for i, (name, values) in enumerate(squeezed.items()):
        above = below + values
        edge = [(left + j * step, left + (j + 1) * step) for j in range(length)]
        up = [(x, bottom - above[j] * scale) for j in range(length) for x in edge[j]]
        down = [(x, bottom - below[j] * scale) for j in range(length) for x in edge[j]]
        hover = f"{name}: at most {bytes_text(float(kinds[name].max(initial=0)))}"
        shapes.append(Polygon([*up, *reversed(down)], _color(i), hover))
        below = above
    if shows_limit:
        y = bottom - limit * scale
        shapes.append(Line(left, y, right, y, muted=False, dashed=True))
        shapes.append(Words(right + 6, y, f"limit {bytes_text(limit)}", 11, "start"))
    shapes.append(Words((left + right) / 2, bottom + 18, what, _SIZE))
    legend, end = _legend(list(kinds), left, bottom + 46, right)
    width = right + (_MARGIN + 110 if shows_limit else _MARGIN)
    return Picture(width, end + _MARGIN, [*shapes, *legend], title)


def _squeezed(kinds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns at most 160 of the times, with the largest total of each group of neighbors."""
    if not kinds:
        return {}
    total = np.sum([np.asarray(v, np.float64) for v in kinds.values()], axis=0)
    groups = np.array_split(np.arange(len(total)), min(_MOST_POINTS, len(total)))
    kept = [int(group[total[group].argmax()]) for group in groups]
    return {name: np.asarray(values, np.float64)[kept] for name, values in kinds.items()}

"""Pictures of shapes and words, and charts, written as SVG, or by matplotlib as PNG or PDF."""

from __future__ import annotations

import colorsys
import html
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from mesh_tensorflow._units import bytes_text, shortened_apart, unit_of_bytes

# Okabe and Ito, "Color universal design" (2008), lightened where black text stands on it.
KIND_COLORS = (
    "#4c8bc0", "#e69f35", "#3fa88a", "#c9719f", "#8a7bc8", "#d5673a", "#82c4e8", "#b5a832",
    "#8c8c8c", "#5f9e4d",
)  # fmt: skip
_LIGHT = 0.5  # of luminance, above which text is black
_HUES = 12
_RESET = "\x1b[0m"


def color_of(number: int, count: int) -> str:
    """Returns the color of one of several tiles, as "#rrggbb".

    Args:
      number: the number of the tile.
      count: the number of tiles.
    """
    if count <= len(KIND_COLORS):
        return KIND_COLORS[number]
    # More hues are hard to tell apart; further tiles have them again in other shades.
    hues = min(count, _HUES)
    shades = -(-count // hues)
    lightness = 0.45 + 0.35 * (number // hues) / max(1, shades - 1)
    red, green, blue = colorsys.hls_to_rgb(number % hues / hues, lightness, 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def text_color(background: str) -> str:
    """Returns black or white, whichever is readable on a color.

    Args:
      background: "#rrggbb".
    """
    red, green, blue = _rgb(background)
    # By ITU-R BT.601: the eye takes green for brighter than red, and red than blue.
    luminance = (0.299 * red + 0.587 * green + 0.114 * blue) / 255
    return "#111111" if luminance > _LIGHT else "#ffffff"


def ansi(text: str, background: str) -> str:
    """Returns text with a background color, for terminals.

    Args:
      text: a string.
      background: "#rrggbb".
    """
    back, front = _rgb(background), _rgb(text_color(background))
    codes = ";".join(map(str, (48, 2, *back, 38, 2, *front)))
    return f"\x1b[{codes}m{text}{_RESET}"


# The widths of DejaVu Sans, as fractions of its size: the widest of the fonts below, so that what
# fits in it fits in all. Most lower-case letters and digits are 0.61 to 0.64 wide.
_WIDTHS = {
    **dict.fromkeys("ijl'|", 0.28),
    **dict.fromkeys(" ,.:;/!ft()[]-", 0.39),
    **dict.fromkeys("rsczJ_I", 0.53),
    **dict.fromkeys("ABCDEFGHKLNPRSTUVXYZ", 0.71),
    **dict.fromkeys("wOQ=+<>~↓→", 0.84),
    **dict.fromkeys("mMW@%…", 1.0),
}
_WIDTH = 0.64
_BOLD = 1.12  # a bold letter is so much wider
_DPI = 150
_POINTS = 72
_INK, _MUTED, _PAPER = "#24292f", "#6e7781", "#ffffff"
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_KINDS = (".svg", ".png", ".pdf")


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Returns how wide a text is at most, in the unit of the font size.

    Args:
      text: a string.
      size: the font size.
      bold: whether it is bold.
    """
    letters = sum(_WIDTHS.get(letter, _WIDTH) for letter in text)
    return letters * size * (_BOLD if bold else 1)


class Box(NamedTuple):
    """A rectangle; `fill` None for its outline only. `title` is what a browser shows on hover."""

    x: float
    y: float
    width: float
    height: float
    fill: Optional[str] = None
    outline: bool = True
    title: str = ""


class Polygon(NamedTuple):
    """A filled polygon."""

    points: Sequence[tuple[float, float]]
    fill: str
    title: str = ""


class Line(NamedTuple):
    """A straight line; muted lines are those of a grid."""

    x1: float
    y1: float
    x2: float
    y2: float
    muted: bool = True
    dashed: bool = False


class Words(NamedTuple):
    """A line of text around or beside a point, at half its height.

    `anchor` is "start", "middle" or "end"; `color` None for that of the page's text, "muted" for a
    grayer one; `turned` for text that reads upward.
    """

    x: float
    y: float
    text: str
    size: float = 13
    anchor: str = "middle"
    color: Optional[str] = None
    bold: bool = False
    turned: bool = False


Shape = Union[Box, Polygon, Line, Words]


class Picture:
    """Shapes on a rectangle of paper; y grows downward, the unit is a pixel.

    Attributes:
      width: in pixels.
      height: in pixels.
      shapes: Boxes, Polygons, Lines and Words, painted in this order.
      label: what the picture shows, for those who cannot see it.
    """

    def __init__(self, width: float, height: float, shapes: Sequence[Shape], label: str):
        """Creates a Picture."""
        self.width = width
        self.height = height
        self.shapes = list(shapes)
        self.label = label

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes the picture to a file.

        Args:
          path: the path of an SVG file; or of a PNG or PDF file, which needs matplotlib.

        Raises:
          ValueError: the name of the file ends otherwise.
          ImportError: matplotlib is not installed.
        """
        kind = os.path.splitext(os.fspath(path))[1].lower()
        if kind not in _KINDS:
            raise ValueError(
                f"{os.fspath(path)!r}: pictures are written to files that end in "
                f"{', '.join(_KINDS)}; give the path such an end"
            )
        if kind == ".svg":
            text = self.svg()  # before the file is made: an error leaves none
            with open(path, "w", encoding="utf-8") as f:
                f.write(text)
        else:
            self._draw_by_matplotlib(path)

    # -- SVG

    def svg(self, inline: bool = False) -> str:
        """Returns the picture as SVG.

        Args:
          inline: whether it stands in a web page, whose text color it then takes; otherwise it has
            white paper.
        """
        size = f'viewBox="0 0 {self.width:g} {self.height:g}"'
        fixed = f'width="{self.width:g}" height="{self.height:g}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {fixed} {size} role="img" '
            f'aria-label="{html.escape(self.label)}" font-family="{_FONT}">'
        ]
        if inline:
            ink, muted = "currentColor", "var(--muted)"
            parts[0] = parts[0].replace(' xmlns="http://www.w3.org/2000/svg"', "")
        else:
            ink, muted = _INK, _MUTED
            parts.append(f'<rect width="100%" height="100%" fill="{_PAPER}"/>')
        parts += [_SVG[type(shape)](shape, ink, muted) for shape in self.shapes]
        return "\n".join([*parts, "</svg>\n"])

    # -- matplotlib

    def _draw_by_matplotlib(self, path: Union[str, os.PathLike[str]]) -> None:
        try:
            # Not by pyplot, which would choose a window system and keep each figure.
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as e:
            raise ImportError(
                f"{os.fspath(path)!r}: a picture that is not SVG needs matplotlib: pip install "
                "matplotlib; or give a path that ends in .svg"
            ) from e
        # A pixel of a web page is 0.75 points.
        inches = (self.width / _POINTS * 0.75, self.height / _POINTS * 0.75)
        figure = Figure(figsize=inches, dpi=_DPI, facecolor=_PAPER)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        axes.axis("off")
        for shape in self.shapes:
            _MATPLOTLIB[type(shape)](axes, shape)
        figure.savefig(path)


def _attributes(**values: Optional[str]) -> str:
    return " ".join(f'{k.replace("_", "-")}="{v}"' for k, v in values.items() if v is not None)


def _tagged(tag: str, attributes: str, title: str) -> str:
    if not title:
        return f"<{tag} {attributes}/>"
    return f"<{tag} {attributes}><title>{html.escape(title)}</title></{tag}>"


def _svg_box(box: Box, ink: str, muted: str) -> str:
    place = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'
    stroke = muted if box.outline else None
    return _tagged(
        "rect", f"{place} {_attributes(fill=box.fill or 'none', stroke=stroke)}", box.title
    )


def _svg_polygon(polygon: Polygon, ink: str, muted: str) -> str:
    points = " ".join(f"{x:.4g},{y:.4g}" for x, y in polygon.points)
    return _tagged("polygon", f'points="{points}" fill="{polygon.fill}"', polygon.title)


def _svg_line(line: Line, ink: str, muted: str) -> str:
    place = f'x1="{line.x1:g}" y1="{line.y1:g}" x2="{line.x2:g}" y2="{line.y2:g}"'
    style = _attributes(
        stroke=muted if line.muted else ink,
        stroke_opacity="0.35" if line.muted else None,
        stroke_dasharray="6 4" if line.dashed else None,
    )
    return f"<line {place} {style}/>"


def _svg_words(words: Words, ink: str, muted: str) -> str:
    color = {None: ink, "muted": muted}.get(words.color, words.color)
    turn = f"rotate(-90 {words.x:g} {words.y:g})" if words.turned else None
    style = _attributes(
        text_anchor=words.anchor,
        dominant_baseline="central",
        font_size=f"{words.size:g}",
        fill=color,
        font_weight="600" if words.bold else None,
        transform=turn,
    )
    return f'<text x="{words.x:g}" y="{words.y:g}" {style}>{html.escape(words.text)}</text>'


_SVG: dict[type, Any] = {
    Box: _svg_box, Polygon: _svg_polygon, Line: _svg_line, Words: _svg_words
}  # fmt: skip


def _draw_box(axes: Any, box: Box) -> None:
    style = {"facecolor": box.fill or "none", "edgecolor": _MUTED if box.outline else "none"}
    axes.add_patch(_patches().Rectangle((box.x, box.y), box.width, box.height, lw=0.8, **style))


def _draw_polygon(axes: Any, polygon: Polygon) -> None:
    axes.add_patch(_patches().Polygon(list(polygon.points), color=polygon.fill, lw=0))


def _patches() -> Any:
    """Returns matplotlib's module of shapes, after it was found to be installed."""
    import matplotlib.patches

    return matplotlib.patches


def _draw_line(axes: Any, line: Line) -> None:
    color, alpha = (_MUTED, 0.35) if line.muted else (_INK, 1.0)
    style = {"color": color, "alpha": alpha, "ls": "--" if line.dashed else "-", "lw": 0.8}
    axes.plot([line.x1, line.x2], [line.y1, line.y2], **style)


_ALIGNED = {"start": "left", "middle": "center", "end": "right"}


def _draw_words(axes: Any, words: Words) -> None:
    color = {None: _INK, "muted": _MUTED}.get(words.color, words.color)
    axes.text(
        words.x,
        words.y,
        # matplotlib takes what is between two dollars for a formula.
        words.text.replace("$", r"\$"),
        fontsize=words.size * 0.75,
        color=color,
        # Of turned text, matplotlib aligns the box around it and not the line.
        ha="center" if words.turned else _ALIGNED[words.anchor],
        va="center",
        rotation=90 if words.turned else 0,
        weight="bold" if words.bold else "normal",
    )


_MATPLOTLIB: dict[type, Any] = {
    Box: _draw_box, Polygon: _draw_polygon, Line: _draw_line, Words: _draw_words
}  # fmt: skip


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
    # 1, 2 or 5 times a power of ten, the finest with so few ticks.
    step *= next(m for m in (1, 2, 5, 10) if top / (step * m) <= _TICKS)
    # A whole number of steps may be rounded to less.
    return [i * step for i in range(math.floor(top / step * (1 + 1e-9)) + 1)]


def _legend(names: Sequence[str], x: float, y: float, right: float) -> tuple[list[Shape], float]:
    """Returns the shapes of a legend, and where it ends; entries that do not fit begin a line."""
    shapes: list[Shape] = []
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
    shapes: list[Shape] = [Words(_MARGIN, _MARGIN + 6, title, 14, "start", bold=True)]
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
    shapes: list[Shape] = [Words(_MARGIN, _MARGIN + 6, title, 14, "start", bold=True)]
    for tick in _ticks(high / size):
        y = bottom - tick * size * scale
        shapes.append(Line(left, y, right, y))
        shapes.append(Words(left - 8, y, f"{tick:g}", 11, "end", "muted"))
    shapes.append(Words(_MARGIN + 4, (top + bottom) / 2, unit, _SIZE, turned=True))
    below = np.zeros(length)
    step = _PLOT / length
    for i, (name, values) in enumerate(squeezed.items()):
        above = below + values
        # Steps and not slopes: what an operation holds is held all through it.
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
    # One time for all kinds, so that what is stacked was in use at once; the peak is among them.
    kept = [int(group[total[group].argmax()]) for group in groups]
    return {name: np.asarray(values, np.float64)[kept] for name, values in kinds.items()}

"""Pictures of rectangles, polygons and words, written as SVG, or by matplotlib as PNG or PDF."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

__all__ = ["Box", "Line", "Picture", "Polygon", "Words", "text_width"]

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
            with open(path, "w", encoding="utf-8") as f:
                f.write(self.svg())
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
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as e:
            raise ImportError(
                f"{os.fspath(path)!r}: a picture that is not SVG needs matplotlib: pip install "
                "matplotlib; or give a path that ends in .svg"
            ) from e
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
        words.text.replace("$", r"\$"),
        fontsize=words.size * 0.75,
        color=color,
        ha="center" if words.turned else _ALIGNED[words.anchor],
        va="center",
        rotation=90 if words.turned else 0,
        weight="bold" if words.bold else "normal",
    )


_MATPLOTLIB: dict[type, Any] = {
    Box: _draw_box, Polygon: _draw_polygon, Line: _draw_line, Words: _draw_words
}  # fmt: skip

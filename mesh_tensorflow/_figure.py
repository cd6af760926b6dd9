"""Pictures drawn by matplotlib: how they are written, their colors, and charts of amounts."""

from __future__ import annotations

import colorsys
import io
import os
import xml.etree.ElementTree
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from mesh_tensorflow._units import bytes_text, ms_text, shortened_apart, unit_of_bytes

# Okabe and Ito, "Color universal design" (2008), lightened where black text stands on it.
KIND_COLORS = (
    "#4c8bc0", "#e69f35", "#3fa88a", "#c9719f", "#8a7bc8", "#d5673a", "#82c4e8", "#b5a832",
    "#8c8c8c", "#5f9e4d",
)  # fmt: skip
INK, MUTED, _PAPER = "#24292f", "#6e7781", "#ffffff"
_LIGHT = 0.5  # of luminance, above which text is black
_HUES = 12
_RESET = "\x1b[0m"
_KINDS = (".svg", ".png", ".pdf")
_UNDATED: dict[str, dict[str, None]] = {
    "svg": {"Date": None}, "png": {}, "pdf": {"CreationDate": None}
}  # fmt: skip
_DPI = 150
_PIXELS = 96  # of a web page, in an inch
_SVG = "http://www.w3.org/2000/svg"


# -- colors


def color_of(number: int, count: int) -> str:
    """Returns the color of one of several tiles, as "#rrggbb"."""
    if count <= len(KIND_COLORS):
        return KIND_COLORS[number]
    # More hues are hard to tell apart; further tiles have them again in other shades.
    hues = min(count, _HUES)
    shades = -(-count // hues)
    lightness = 0.45 + 0.35 * (number // hues) / max(1, shades - 1)
    red, green, blue = colorsys.hls_to_rgb(number % hues / hues, lightness, 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _color(number: int) -> str:
    return KIND_COLORS[number % len(KIND_COLORS)]


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


# -- pictures


def plain(text: str) -> str:
    """Returns a text as matplotlib takes it for one, and not for a formula."""
    return text.replace("$", r"\$")


class Picture:
    """A figure of matplotlib, whose artists may have titles that a browser shows on hover.

    Places are in pixels of a web page, from the upper left corner; what is drawn beyond the figure
    is part of the picture too, which is cut to what it shows.

    Attributes:
      figure: a matplotlib.figure.Figure.
      label: what the picture shows, for those who cannot see it.
      titles: what a browser shows on hover, by the `gid` of an artist.
      bottom: where the next chart begins.
    """

    def __init__(self, label: str):
        """Creates an empty Picture.

        Raises:
          ImportError: matplotlib is not installed.
        """
        try:
            # Not by pyplot, which would choose a window system and keep each figure.
            from matplotlib.figure import Figure
        except ImportError as e:
            raise ImportError(
                f"{label}: matplotlib draws pictures, and jinja2 puts reports together: pip "
                "install matplotlib jinja2"
            ) from e
        self.label = label
        # An inch, so that fractions of the figure are inches.
        self.figure = Figure(figsize=(1, 1), dpi=_PIXELS)
        self.titles: dict[str, str] = {}
        self.bottom = 0.0

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        """Returns new axes at a place."""
        # Matplotlib counts upward, and a page downward; axes begin at their lower left corner.
        place = (x / _PIXELS, -(y + height) / _PIXELS, width / _PIXELS, height / _PIXELS)
        axes = self.figure.add_axes(place)
        axes.patch.set_visible(False)
        axes.tick_params(colors=MUTED, labelsize=points(11), length=0)
        axes.spines[:].set_visible(False)
        return axes

    def words(self, x: float, y: float, text: str, size: float = 12, **style: Any) -> None:
        """Adds a line of text that begins at a place, at half its height."""
        style = {"color": INK, "va": "center", **style}
        self.figure.text(x / _PIXELS, -y / _PIXELS, plain(text), fontsize=points(size), **style)

    def title(self, artist: Any, text: str) -> None:
        """Gives an artist a text that is shown on hover."""
        name = f"titled_{len(self.titles)}"
        artist.set_gid(name)
        self.titles[name] = text

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes the picture to a file.

        Args:
          path: the path of an SVG, PNG or PDF file.

        Raises:
          ValueError: the name of the file ends otherwise.
        """
        kind = os.path.splitext(os.fspath(path))[1].lower()
        if kind not in _KINDS:
            raise ValueError(
                f"{os.fspath(path)!r}: pictures are written to files that end in "
                f"{', '.join(_KINDS)}; give the path such an end"
            )
        # Before the file is made: an error leaves none.
        data = self.svg().encode() if kind == ".svg" else self.drawn(kind[1:])
        with open(path, "wb") as f:
            f.write(data)

    def svg(self, inline: bool = False) -> str:
        """Returns the picture as SVG.

        Args:
          inline: whether it stands in a web page, whose text color it then takes; otherwise it has
            white paper.
        """
        data = self.drawn("svg", "none" if inline else _PAPER)
        # Otherwise tags would be written as ns0:svg, which a web page does not take for a picture.
        xml.etree.ElementTree.register_namespace("", _SVG)
        xml.etree.ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
        root = xml.etree.ElementTree.fromstring(data)
        for metadata in root.findall(f"{{{_SVG}}}metadata"):
            root.remove(metadata)
        root.attrib.update({"role": "img", "aria-label": self.label})
        for element in root.iter():
            text = self.titles.get(element.get("id", ""))
            if text is not None:
                title = xml.etree.ElementTree.Element(f"{{{_SVG}}}title")
                title.text = text
                element.insert(0, title)
        markup = xml.etree.ElementTree.tostring(root, encoding="unicode")
        if inline:
            # Light or dark, as the reader of the page wants it.
            markup = markup.replace(INK, "currentColor").replace(MUTED, "var(--muted)")
        return f"{markup}\n"

    def drawn(self, kind: str, paper: str = _PAPER) -> bytes:
        """Returns the picture as "svg", "png" or "pdf", without what matplotlib cannot draw."""
        import matplotlib

        data = io.BytesIO()
        # Text stays text; names within the file are the same each time, and differ from picture to
        # picture.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.label}):
            self.figure.savefig(
                data,
                format=kind,
                facecolor=paper,
                dpi=_DPI,
                bbox_inches="tight",
                pad_inches=16 / _PIXELS,
                metadata=_UNDATED[kind],
            )
        return data.getvalue()


def points(pixels: float) -> float:
    """Returns a size in points; a pixel of a web page is 0.75 of them."""
    return pixels * 0.75


# -- charts

_ROW = 24.0
_WIDTH = 520.0
_HEIGHT = 220.0
_LONGEST_NAME = 40
_MOST_POINTS = 160
_LETTER = 7.2  # the width of one, on average
_TICKS = 5
_BELOW = 150.0  # the height of the heading, the ticks and the legend of a chart


class Measure(NamedTuple):
    """What a chart is of.

    Attributes:
      unit: a function of the largest amount that returns the unit of an axis, and its size.
      text: a function of an amount that returns it with a unit.
    """

    unit: Callable[[float], tuple[str, float]]
    text: Callable[[float], str]


BYTES = Measure(unit_of_bytes, bytes_text)
SECONDS = Measure(lambda most: ("ms", 1e-3), lambda seconds: f"{ms_text(seconds)} ms")


def _new_axes(picture: Optional[Picture], title: str, height: float) -> tuple[Picture, Any]:
    """Returns the picture, a new one if None, with a heading, and axes below it."""
    picture = picture or Picture(title)
    picture.words(0, picture.bottom, title, 14, weight="bold")
    axes = picture.axes(0, picture.bottom + 26, _WIDTH, height)
    picture.bottom += height + _BELOW
    return picture, axes


def _legend(axes: Any, names: Sequence[str], below: float) -> None:
    """Draws the legend below the axes, in as many columns as fit."""
    # The anchor of a legend is a fraction of its axes, so that pixels are divided by their height.
    height = axes.get_position().height * _PIXELS
    columns = max(1, int(_WIDTH // (max(map(len, names), default=1) * _LETTER + 40)))
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0, -below / height),
        borderaxespad=0,
        ncols=columns,
        fontsize=points(12),
        frameon=False,
        labelcolor=INK,
        handlelength=1,
        handleheight=1,
    )


def bars(
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    kinds: Sequence[str],
    what: str,
    measure: Measure = BYTES,
    picture: Optional[Picture] = None,
) -> Picture:
    """Returns a chart with a stacked bar of amounts for each row.

    Args:
      title: its heading.
      rows: for each name, in the order from the top, the amount of each kind.
      kinds: the names of all kinds, in the order of stacking.
      what: what is counted, such as "of each processor in a step".
      measure: what the amounts are.
      picture: the Picture at whose bottom it is drawn; a new one if None.
    """
    totals = [sum(values.values()) for values in rows.values()]
    unit, size = measure.unit(max(totals, default=0))
    picture, axes = _new_axes(picture, title, _ROW * max(1, len(rows)))
    places, begin = np.arange(len(rows)), np.zeros(len(rows))
    for i, kind in enumerate(kinds):
        values = np.array([row.get(kind, 0) for row in rows.values()], np.float64)
        drawn = axes.barh(
            places, values / size, 0.66, left=begin / size, color=_color(i), label=kind
        )
        for bar, name, value in zip(drawn, rows, values):
            picture.title(bar, f"{name}, {kind}: {measure.text(value)}")
        begin += values
    for place, total in zip(places, totals):
        axes.annotate(
            measure.text(total), (total / size, place), (6, 0), textcoords="offset points",
            va="center", color=MUTED, fontsize=points(11),
        )  # fmt: skip
    axes.set_xlim(0, max(totals, default=0) / size or 1)
    axes.set_ylim(len(rows) - 0.5 if rows else 0.5, -0.5)  # the first row is on top
    names = shortened_apart(list(rows), _LONGEST_NAME)
    axes.set_yticks(places, [plain(name) for name in names], color=INK, fontsize=points(12))
    axes.locator_params(axis="x", nbins=_TICKS)
    axes.grid(axis="x", color=MUTED, alpha=0.35)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"{unit} {what}".strip(), color=INK, fontsize=points(12))
    _legend(axes, kinds, 50)
    return picture


def areas(
    title: str,
    kinds: Mapping[str, np.ndarray],
    what: str,
    limit: float = 0,
    picture: Optional[Picture] = None,
) -> Picture:
    """Returns a chart of stacked areas: bytes of each kind over time.

    Args:
      title: its heading.
      kinds: for each kind, an array of bytes, all of one length.
      what: the words under the axis.
      limit: the bytes at which to draw a line, if it is not much higher than the areas.
      picture: the Picture at whose bottom it is drawn; a new one if None.
    """
    squeezed = _squeezed(kinds)
    length = max((len(v) for v in squeezed.values()), default=1)
    most = float(sum(squeezed.values(), np.zeros(length)).max(initial=0))
    shows_limit = 0 < limit <= 1.5 * most
    high = max(most, limit) if shows_limit else most
    unit, size = unit_of_bytes(high)
    picture, axes = _new_axes(picture, title, _HEIGHT)
    # Steps and not slopes: what an operation holds is held all through it.
    values = [np.append(v, v[-1:]) / size for v in squeezed.values()]
    colors = [_color(i) for i in range(len(values))]
    times = np.arange(length + 1)
    drawn = (
        axes.stackplot(times, *values, labels=list(kinds), colors=colors, step="post")
        if values
        else []
    )
    for area, (name, held) in zip(drawn, kinds.items()):
        picture.title(area, f"{name}: at most {bytes_text(float(held.max(initial=0)))}")
    if shows_limit:
        axes.axhline(limit / size, color=INK, linestyle="--", linewidth=0.8, clip_on=False)
        axes.annotate(
            f"limit {bytes_text(limit)}", (length, limit / size), (6, 0), va="center", color=INK,
            textcoords="offset points", fontsize=points(11), annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(0, length)
    axes.set_ylim(0, high / size or 1)
    axes.set_xticks([])
    axes.locator_params(axis="y", nbins=_TICKS)
    axes.grid(axis="y", color=MUTED, alpha=0.35)
    axes.set_ylabel(unit, color=INK, fontsize=points(12))
    axes.set_xlabel(what, color=INK, fontsize=points(12))
    _legend(axes, list(kinds), 34)
    return picture


def _squeezed(kinds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns at most 160 of the times, with the largest total of each group of neighbors."""
    if not kinds:
        return {}
    total = np.sum([np.asarray(v, np.float64) for v in kinds.values()], axis=0)
    groups = np.array_split(np.arange(len(total)), min(_MOST_POINTS, len(total)))
    # One time for all kinds, so that what is stacked was in use at once; the peak is among them.
    highest = [int(group[total[group].argmax()]) for group in groups]
    return {name: np.asarray(values, np.float64)[highest] for name, values in kinds.items()}

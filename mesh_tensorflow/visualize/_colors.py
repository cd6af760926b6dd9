"""Colors of tiles and of kinds of things, told apart by most eyes, with readable text on them."""

from __future__ import annotations

import colorsys

__all__ = ["KIND_COLORS", "ansi", "color_of", "text_color"]

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

"""Numbers in words: bytes in binary units, milliseconds, and large counts."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "bytes_text",
    "count_text",
    "counted",
    "ms_text",
    "plural",
    "shortened",
    "shortened_apart",
    "unit_of_bytes",
]

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_COUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3))
_STEP = 1024


def unit_of_bytes(count: float) -> tuple[str, int]:
    """Returns the largest binary unit that is at most a number of bytes, and its size in bytes.

    Args:
      count: bytes, of either sign.

    >>> unit_of_bytes(5_000_000)
    ('MiB', 1048576)
    """
    power = 0
    # What would be rounded to 1024 of one unit is 1 of the next.
    while power + 1 < len(_BYTES) and abs(count) >= (_STEP - 0.5) * _STEP**power:
        power += 1
    return _BYTES[power], _STEP**power


def _three_figures(amount: float) -> str:
    """Returns a number with three significant figures, without an exponent."""
    return f"{amount:.3g}" if abs(amount) < 999.5 else f"{amount:,.0f}"


def bytes_text(count: float) -> str:
    """Returns a number of bytes in B, KiB, MiB, ..., with three significant figures.

    Args:
      count: bytes.

    >>> bytes_text(512), bytes_text(1536), bytes_text(16 * 2**30)
    ('512 B', '1.5 KiB', '16 GiB')
    """
    unit, size = unit_of_bytes(count)
    return f"{_three_figures(count / size)} {unit}"


def count_text(count: float) -> str:
    """Returns a number in thousands (K), millions (M), billions (B) or trillions (T).

    Args:
      count: a number, such as that of parameters.

    >>> count_text(999), count_text(2048), count_text(110_104_890)
    ('999', '2.05K', '110M')
    """
    for name, size in _COUNTS:
        # What three figures would round up to 1000 of one unit is 1 of the next.
        if abs(count) >= size * 0.9995:
            return f"{_three_figures(count / size)}{name}"
    return _three_figures(count)


def plural(noun: str, count: int) -> str:
    """Returns a noun, in the plural unless the number of what it names is one.

    Args:
      noun: the noun, in the singular.
      count: the number.

    >>> plural("batch", 1), plural("batch", 2), plural("entry", 2), plural("step", 0)
    ('batch', 'batches', 'entries', 'steps')
    """
    if count == 1:
        return noun
    if noun.endswith("y"):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Returns a number and a noun, in the plural unless the number is one.

    Args:
      count: the number.
      noun: the noun, in the singular.

    >>> counted(1, "collective"), counted(1200, "collective")
    ('1 collective', '1,200 collectives')
    """
    return f"{count:,} {plural(noun, count)}"


def ms_text(seconds: float) -> str:
    """Returns a time in milliseconds, with four significant figures, without the unit.

    Args:
      seconds: a time.

    >>> ms_text(0.00123456), ms_text(12.3456)
    ('1.235', '12,346')
    """
    return f"{seconds * 1e3:.4g}" if seconds * 1e3 < 1000 else f"{seconds * 1e3:,.0f}"


def shortened(name: str, width: int) -> str:
    """Returns a name with its middle left out, if it is longer than `width` characters.

    More of the end is kept than of the beginning, since names with scopes differ at the end.

    Args:
      name: a string.
      width: the most characters, at least 4.

    >>> shortened("decoder/block_000/layer_001/wi/kernel", 20)
    'decode…001/wi/kernel'
    """
    if len(name) <= width:
        return name
    head = max(1, (width - 1) // 3)
    return f"{name[:head]}…{name[head + 1 - width :]}"


def shortened_apart(names: Sequence[str], width: int) -> list[str]:
    """Returns names with their middles left out, as little as keeps different ones different.

    Args:
      names: strings.
      width: the most characters, where so many tell them apart.

    >>> shortened_apart(["encoder/block_000/layer_001/wi", "encoder/block_001/layer_001/wi"], 20)
    ['encode…0/layer_001/wi', 'encode…1/layer_001/wi']
    """
    longest = max(map(len, names), default=0)
    while width < longest and len({shortened(n, width) for n in names}) < len(set(names)):
        width += 1
    return [shortened(name, width) for name in names]

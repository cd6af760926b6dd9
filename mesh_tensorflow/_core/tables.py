"""Tables that are indexed by a string argument, and tables of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["table_lookup", "text_table"]


def table_lookup(table: dict[str, Any], key: str, what: str) -> Any:
    """Returns `table[key]`.

    Raises:
      ValueError: the key is not in the table; the message lists those that are.
    """
    if key not in table:
        raise ValueError(f"unknown {what} {key!r}; known are {', '.join(sorted(table))}")
    return table[key]


def text_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Formats a table, with a rule under its first row; returns its lines.

    Args:
      rows: lists of cells; the first has the headings.
      left: numbers of the columns that are aligned to the left.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]

"""Tables that are indexed by a string argument."""

from __future__ import annotations

from typing import Any

__all__ = ["table_lookup"]


def table_lookup(table: dict[str, Any], key: str, what: str) -> Any:
    """Returns `table[key]`.

    Raises:
      ValueError: the key is not in the table; the message lists those that are.
    """
    if key not in table:
        raise ValueError(f"unknown {what} {key!r}; known are {', '.join(sorted(table))}")
    return table[key]

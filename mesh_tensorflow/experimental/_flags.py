"""Command-line flags, of which each is defined once whatever the number of scripts imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from absl import flags

__all__ = ["define"]

_KINDS: dict[type, Any] = {
    bool: flags.DEFINE_boolean,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}


def define(definitions: Sequence[tuple[str, type, Any, str]]) -> None:
    """Defines flags, but for those that exist.

    A program that has a flag of one of these names keeps its own, default included.

    Args:
      definitions: a list of (name, type, default, help).
    """
    for name, kind, default, text in definitions:
        if name not in flags.FLAGS:
            _KINDS[kind](name, default, text)

"""Command-line flags, each defined once however many scripts are imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow.compat.v1 as tf
from absl import flags

__all__ = ["FLAGS", "Flag", "define"]

# How a flag is made, its name, its default, and what it means.
Flag = tuple[Callable[..., Any], str, Any, str]

# This form reads the command line by itself when a flag is first asked for.
FLAGS = tf.flags.FLAGS
flags.disclaim_key_flags()  # --help lists flags as those of the module that calls `define`


def define(definitions: Iterable[Flag]) -> None:
    """Defines flags, but for those that exist.

    A program that has a flag of one of these names keeps its own, default included; it is read
    through FLAGS all the same.

    Args:
      definitions: tuples (flags.DEFINE_string or its like, name, default, help).
    """
    for make, name, default, text in definitions:
        if name not in flags.FLAGS:
            make(name, default, text)

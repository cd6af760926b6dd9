"""Command-line flags that several scripts share; each is defined once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow.compat.v1 as tf
from absl import flags

__all__ = ["FLAGS", "Flag", "Setting", "define"]

# The function that defines a flag, its name, its default and its help text.
Flag = tuple[Callable[..., Any], str, Any, str]
# The default of a flag, which has its type, and its help text.
Setting = tuple[Any, str]

# This object parses the command line when a flag is first read.
FLAGS = tf.flags.FLAGS
flags.disclaim_key_flags()  # --help lists flags as those of the module that calls `define`

_BY_TYPE: dict[type, Callable[..., Any]] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
}


def define(definitions: Iterable[Flag] = (), /, **settings: Setting) -> None:
    """Defines flags, except for those that exist.

    If a program has defined a flag of the same name, its flag and default are kept, and are read
    through FLAGS.

    Args:
      definitions: tuples (a function such as flags.DEFINE_list, name, default, help), of flags
        whose type the default does not say.
      **settings: pairs (default, help) by name; a string or None is the default of a string.
    """
    typed = (
        (_BY_TYPE.get(type(default), flags.DEFINE_string), name, default, text)
        for name, (default, text) in settings.items()
    )
    for make, name, default, text in (*definitions, *typed):
        if name not in flags.FLAGS:
            make(name, default, text)

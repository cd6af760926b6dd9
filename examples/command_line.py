"""Options of examples as flags of absl, and how an example ends.

It is imported first, and imports mesh_tensorflow: TensorFlow is quiet if an example imports it
afterwards.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from absl import flags

import mesh_tensorflow as mesh_tensorflow

# The function that defines a flag, its name, its default and its help text.
Flag = tuple[Callable[..., Any], str, Any, str]

_DEFINE: dict[str, Callable[..., Any]] = {
    "int": flags.DEFINE_integer,
    "float": flags.DEFINE_float,
    "bool": flags.DEFINE_bool,
}


def option(default: Any, text: str) -> Any:
    """Returns a field of a dataclass of options, with the help text of its flag."""
    return dataclasses.field(default=default, metadata={"help": text})


def table_of(options: type) -> tuple[Flag, ...]:
    """Returns a flag for each field of a dataclass of options."""
    return tuple(
        (
            _DEFINE.get(str(field.type), flags.DEFINE_string),
            field.name,
            field.default,
            field.metadata["help"],
        )
        for field in dataclasses.fields(options)
    )


def define(table: Iterable[Flag]) -> None:
    """Defines flags of absl, as flags of the example, which --help lists."""
    flags.disclaim_key_flags()
    for make, name, default, text in table:
        make(name, default, text)


def tell_kept(directory: str, logdir: str) -> None:
    """Says where checkpoints and curves are; "" if they are not kept."""
    if directory:
        print(f"checkpoints in {directory}: the same command, with more steps, goes on from there")
    if logdir:
        print(f"curves: tensorboard --logdir {logdir}", flush=True)


def fail(message: object) -> NoReturn:
    """Ends the process because of a mistake in flags or data."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)

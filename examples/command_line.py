"""Starts an example: its flags are read before TensorFlow is imported, which then is quiet.

`begin` comes before the imports of TensorFlow and of mesh_tensorflow, so that `--help`, or a flag
that does not exist, needs no seconds. The flags are then those of absl, as usual.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from absl import flags

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


def begin(name: str, check: Callable[[Sequence[str]], Any]) -> None:
    """Checks the command line of an example, then imports the package; nothing if it is imported.

    Args:
      name: the `__name__` of the example.
      check: a function of the arguments that ends the process after `--help` or a mistake. It may
        use what is in mesh_tensorflow._command_lines, which needs no TensorFlow.
    """
    if name != "__main__":
        return
    unread = [check]
    main = sys.modules["__main__"]
    # The package calls it before it imports TensorFlow.
    main.before_tensorflow = lambda: unread.pop()(sys.argv[1:])  # type: ignore[attr-defined]
    importlib.import_module("mesh_tensorflow")
    if unread:  # the package had been imported before
        unread.pop()(sys.argv[1:])


def flag_check(doc: str, table: Callable[[], Iterable[Flag]]) -> Callable[[Sequence[str]], None]:
    """Returns what checks a command line of absl's flags, for `begin`.

    Args:
      doc: the docstring of the example: a line, and command lines that begin with "python".
      table: returns the flags.
    """

    def check(arguments: Sequence[str]) -> None:
        from mesh_tensorflow._command_lines.flag_table import FlagProgram

        name = "/".join(sys.argv[0].split("/")[-2:])
        lines = [line.strip() for line in doc.replace("\\\n", " ").splitlines()]
        examples = [
            " ".join(line.split()).removeprefix(f"python {name} ")
            for line in lines
            if line.startswith(f"python {name} ")
        ]
        FlagProgram(name, doc.splitlines()[0], examples, tuple(table())).check(list(arguments))

    return check


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

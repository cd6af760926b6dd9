"""What `python -m mesh_tensorflow` writes: the programs of the package, with a line about each."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

__all__ = ["show"]

_HELP = {"-h", "-help", "--help"}


def _sentence(file: str, name: str) -> str:
    """Returns the first sentence of the description of a program."""
    described = getattr(importlib.import_module(f"{__package__}.{file}"), name)
    text = getattr(described, "description", None) or described.make_parser().description
    return " ".join(text.split()).partition(". ")[0].rstrip(".:")


def _lines(programs: Mapping[str, tuple[str, str]]) -> list[str]:
    column = max(map(len, programs))
    return [
        "Programs of Mesh TensorFlow. Each is run by python -m, and lists its flags with --help:",
        "",
        *(f"  {program:{column}}  {_sentence(*place)}" for program, place in programs.items()),
    ]


def show(programs: Mapping[str, tuple[str, str]], arguments: Sequence[str]) -> NoReturn:
    """Lists the programs, and ends the process.

    Args:
      programs: the file here and the object in it that describe each.
      arguments: the command-line arguments; there should be none but --help.

    Raises:
      SystemExit: with 0; with 2 after other arguments.
    """
    given = next((argument for argument in arguments if argument not in _HELP), None)
    if given is None:
        print("\n".join(_lines(programs)))
        sys.exit(0)
    ends = {name.partition(".")[2]: name for name in programs}
    ends.update({name.rpartition(".")[2]: name for name in programs})
    near = difflib.get_close_matches(given, ends, 1)
    hint = f"; did you mean python -m {ends[near[0]]}?" if near else ""
    print(
        f"mesh_tensorflow: unknown: {given}{hint}\n"
        "Its programs are listed by: python -m mesh_tensorflow",
        file=sys.stderr,
    )
    sys.exit(2)

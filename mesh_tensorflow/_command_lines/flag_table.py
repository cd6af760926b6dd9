"""Programs whose flags are those of absl: help, and mistakes, from a table of flags."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Optional

from absl import app, flags, logging

__all__ = ["FOR_ALL", "Flag", "FlagProgram", "define_in"]

# The function that defines a flag, its name, its default and its help text.
Flag = tuple[Callable[..., Any], str, Any, str]

# Flags of modules that every program imports.
FOR_ALL: tuple[Flag, ...] = (
    (
        flags.DEFINE_boolean,
        "fold_xy",
        False,
        "join the x and y dimensions of a 4-dimensional TPU topology, not y and z",
    ),
    (
        flags.DEFINE_integer,
        "logical_cores_per_chip",
        2,
        "cores of a TPU chip that a program sees: 1 where its cores work as one",
    ),
)

_HELP = {"--help", "-help", "-h", "--helpshort", "-helpshort", "--helpfull", "-helpfull"}
_XML = {"--helpxml", "-helpxml"}
_FULL = {"--helpfull", "-helpfull"}
_KINDS = {
    "string": "TEXT",
    "int": "INTEGER",
    "float": "NUMBER",
    "multi string": "TEXT",
    "comma separated list of strings": "TEXT,TEXT",
}
_NOUNS = {"int": "an integer", "float": "a number", "bool": "true or false"}
_ILLEGAL = re.compile(r"flag --(\w+)=(.*?): ", re.DOTALL)
_REPEAT = "; repeat this option to specify a list of values"  # absl's
_COLUMN = 28  # where descriptions begin
_MOST_WIDTH = 100


def define_in(values: flags.FlagValues, table: Iterable[Flag]) -> None:
    """Defines flags, except for those that exist, in a set of flags other than absl's own.

    Args:
      values: the set.
      table: the flags.
    """
    for make, name, default, text in table:
        if name not in values:
            make(name, default, text, flag_values=values)


@dataclasses.dataclass(frozen=True)
class FlagProgram:
    """A program that is started by `python -m` or is a script, and its flags.

    Attributes:
      name: the module, as it is named after `python -m`; or the path of the script.
      description: what it does, in a line.
      examples: command lines, as they are typed after `python -m NAME` or `python NAME`.
      table: the flags.
      required: names of flags that have to be given.
      one_of: names of flags of which one has to be given at least.
      choices: by name of a flag, what it may be.
      sections: further parts of the help text: by title, lines.
    """

    name: str
    description: str
    examples: Sequence[str]
    table: tuple[Flag, ...]
    required: Sequence[str] = ()
    one_of: Sequence[str] = ()
    choices: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    sections: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def check(self, arguments: Sequence[str]) -> None:
        """Answers --help, or tells a mistake in the flags; in both cases ends the process.

        Args:
          arguments: the command-line arguments, without the program.

        Raises:
          SystemExit: with 0 after help, and 2 after a mistake.
        """
        # What follows -- is no flag, even if it is called --help.
        before = arguments[: arguments.index("--")] if "--" in arguments else arguments
        asked = _HELP.intersection(before)
        if _XML.intersection(before):
            return  # absl answers
        if asked:
            with contextlib.suppress(BrokenPipeError):  # of a pager that was left
                print(self.help_text(full=bool(asked & _FULL)), flush=True)
            sys.exit(0)
        message = self.mistake(arguments)
        if message:
            self._end(message)

    def _command(self) -> str:
        return f"python {self.name}" if self.name.endswith(".py") else f"python -m {self.name}"

    def _end(self, message: str) -> NoReturn:
        print(
            f"{self.name}: {message}\nIts flags are listed by: {self._command()} --help",
            file=sys.stderr,
        )
        sys.exit(2)

    def _values(self) -> flags.FlagValues:
        """Returns the flags of the program and of absl, of which none is parsed yet."""
        values = flags.FlagValues()
        define_in(values, (*self.table, *FOR_ALL))
        for module in (app, logging):  # which have defined flags when they were imported
            for flag in flags.FLAGS.get_flags_for_module(module.__name__):
                # Copies, since parsing sets their values, and absl is to parse them afterwards.
                values[flag.name] = copy.deepcopy(flag)
        return values

    def mistake(self, arguments: Sequence[str]) -> Optional[str]:
        """Returns what is wrong with command-line arguments, or None.

        Args:
          arguments: the command-line arguments, without the program.
        """
        values = self._values()
        try:
            rest = values([self.name, *arguments])[1:]
        except flags.UnrecognizedFlagError as error:
            return f"unknown flag --{error.flagname}{_nearest(error.flagname, values)}"
        except flags.Error as error:
            return _wrong_value(str(error), values)
        if rest:
            return (
                f"unexpected arguments {' '.join(rest)!r}: flags begin with --, and a value that "
                "has spaces needs quotes, as in --flag='a b'"
            )
        missing = [f"--{name}" for name in self.required if values[name].value in (None, "")]
        if missing:
            return f"{', '.join(missing)} must be given"
        if self.one_of and not any(values[name].value for name in self.one_of):
            return f"give at least one of {', '.join(f'--{name}' for name in self.one_of)}"
        for name, allowed in self.choices.items():
            value = values[name].value
            if value is not None and value.lower() not in allowed:
                near = difflib.get_close_matches(value, allowed, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                return f"--{name}={value} is none of {', '.join(allowed)}{hint}"
        return None

    # -- help

    def help_text(self, full: bool = False) -> str:
        """Returns the help text.

        Args:
          full: whether it lists the flags of absl too.
        """
        width = min(shutil.get_terminal_size().columns, _MOST_WIDTH)
        values = flags.FlagValues()
        define_in(values, self.table)
        own = [values[name] for _, name, _, _ in self.table]
        every = self._values()
        others = sorted(set(every) - {flag.name for flag in own})
        lines = [self.description, "", f"usage: {self._command()} [flags]", ""]
        lines += [f"  {self._command()} {example}" for example in self.examples]
        lines += ["", "Flags:", *self._flag_lines(own, width)]
        for title, section in self.sections.items():
            lines += ["", f"{title}:", *(f"  {line}" for line in section)]
        if full:
            rest = [every[name] for name in others]
            lines += ["", "Flags of TPUs and of absl:", *self._flag_lines(rest, width)]
        else:
            lines += ["", "--helpfull lists the flags of TPUs, logging and debugging too."]
        return "\n".join(lines)

    def _flag_lines(self, table: Iterable[flags.Flag], width: int) -> list[str]:
        lines = []
        for flag in table:
            kind = flag.flag_type()
            shown = f"--[no]{flag.name}" if kind == "bool" else f"--{flag.name}={_kind(kind)}"
            text = " ".join((flag.help or "").split())
            if kind.startswith("multi"):
                text = f"{text.removesuffix(_REPEAT)} It may be given several times."
            if flag.name in self.required:
                text += " (required)"
            else:
                text += f" (default: {_default(flag)})"
            head = f"  {shown}"
            if len(head) >= _COLUMN:
                lines.append(head)
                head = ""
            lines += textwrap.wrap(
                text,
                width,
                initial_indent=head.ljust(_COLUMN),
                subsequent_indent=" " * _COLUMN,
                break_long_words=False,
                break_on_hyphens=False,
            )
        return lines


def _kind(kind: str) -> str:
    return _KINDS.get(kind, "VALUE")


def _default(flag: flags.Flag) -> str:
    """Returns the default of a flag, as it would be typed."""
    if flag.default in (None, [], ""):
        return "none"
    if isinstance(flag.default, bool):
        return str(flag.default).lower()
    if isinstance(flag.default, list):
        return ",".join(map(str, flag.default))
    return str(flag.default)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), 1, 0.6)
    return f"; did you mean --{near[0]}?" if near else ""


def _wrong_value(message: str, values: flags.FlagValues) -> str:
    """Returns a sentence in place of absl's about the value of a flag."""
    found = _ILLEGAL.match(message)
    if found and found[1] in values:
        noun = _NOUNS.get(values[found[1]].flag_type())
        if noun:
            return f"--{found[1]}={found[2]}: the value should be {noun}"
    return message[:1].lower() + message[1:]

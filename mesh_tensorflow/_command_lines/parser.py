"""Programs whose command lines argparse reads: help with all defaults, and nearest names."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Optional

__all__ = ["Parser", "ParserProgram"]


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default to the help of every flag."""

    def _get_help_string(self, action: argparse.Action) -> Optional[str]:
        text = action.help or ""
        if action.default is argparse.SUPPRESS or not action.option_strings:
            return text
        if "default: " in text or "%(default)" in text:
            return text
        if action.required:
            return f"{text} (required)".strip()
        default = "none" if action.default in (None, [], "") else "%(default)s"
        if isinstance(action.default, bool):
            default = str(action.default).lower()
        return f"{text} (default: {default})".strip()


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that lists defaults, and names the nearest flag to an unknown one."""

    def __init__(self, **options: Any) -> None:
        """Creates a Parser.

        Args:
          **options: of argparse.ArgumentParser.
        """
        options.setdefault("formatter_class", _Formatter)
        super().__init__(**options)

    def _flag_names(self) -> list[str]:
        names = [name for action in self._actions for name in action.option_strings]
        for action in self._actions:
            # The error does not say of which command the unknown flag is.
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    names += parser._option_string_actions
        return [name for name in names if name.startswith("--")]

    def error(self, message: str) -> NoReturn:
        """Writes a message about a mistake, and ends the process with 2.

        Args:
          message: the message.
        """
        _, colon, rest = message.partition("unrecognized arguments: ")
        if colon:
            names = self._flag_names()
            unknown = [word.partition("=")[0] for word in rest.split() if word.startswith("-")]
            near = [n for w in unknown for n in difflib.get_close_matches(w, names, 1, 0.6)]
            message = f"unknown: {rest}" + (f"; did you mean {' '.join(near)}?" if near else "")
        self.exit(
            2,
            f"{self.prog.removeprefix('python -m ')}: {message}\n"
            f"Its flags are listed by: {self.prog} --help\n",
        )


class ParserProgram(NamedTuple):
    """A program that is started by `python -m`, and what makes its parser.

    Attributes:
      make_parser: a function that returns the ArgumentParser.
      check_options: a function of the parser and of what it parsed; it calls `parser.error` if
        something is wrong.
    """

    make_parser: Callable[[], argparse.ArgumentParser]
    check_options: Callable[[argparse.ArgumentParser, argparse.Namespace], None] = (
        lambda parser, options: None
    )

    def parse(self, arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
        """Returns the parsed command-line arguments.

        Args:
          arguments: the arguments; `sys.argv[1:]` if None.

        Raises:
          SystemExit: with 0 after --help, and 2 after a mistake.
        """
        parser = self.make_parser()
        options = parser.parse_args(arguments)
        self.check_options(parser, options)
        return options

    def check(self, arguments: Sequence[str]) -> None:
        """Answers --help, or tells a mistake in the flags; in both cases ends the process.

        Args:
          arguments: the command-line arguments, without the program.

        Raises:
          SystemExit: with 0 after help, and 2 after a mistake.
        """
        self.parse(arguments)

"""How programs run once TensorFlow is imported: flags, log, errors, and those of gin files."""

from __future__ import annotations

import argparse
import collections
import contextlib
import difflib
import inspect
import linecache
import logging
import os
import re
import sys
import sysconfig
import tokenize
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Optional, TextIO, Union

import gin
import tensorflow.compat.v1 as tf
from absl import app, flags

from mesh_tensorflow import _quiet
from mesh_tensorflow._core.errors import is_set, reason

__all__ = [
    "FLAGS",
    "Flag",
    "Setting",
    "define",
    "explained_errors",
    "mistakes_told",
    "parser_of",
    "run_with_flags",
    "run_with_parser",
]

# -- flags that several scripts share; each is defined once

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


# -- errors and the log

_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_LIBRARIES = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")
)
# Wherever they are: a virtual environment may use packages of a user or of the system.
_INSTALLED = frozenset(["site-packages", "dist-packages"])
_TENSORFLOW = os.path.join(tf.sysconfig.get_lib(), "")
# What these log, such as a line for each variable, the training report says shorter.
_LONG = tuple(os.path.join(_PACKAGE, *name) for name in (("_lowering",), ("ops", "_variable.py")))
_IN_CALL = re.compile(r"\n  In call to configurable .*")  # which gin adds to messages
_TRACEBACK = "MTF_TRACEBACK"
_INTERRUPTED = 130  # as shells say that SIGINT ended a process
# What a file that is missing, not readable or damaged raises, by whoever reads it.
_OF_FILES = (
    OSError,
    UnicodeDecodeError,
    tf.errors.DataLossError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
)


def _place(frame: types.FrameType) -> str:
    return os.path.abspath(frame.f_code.co_filename)


def _of_libraries(frame: types.FrameType) -> bool:
    generated = frame.f_code.co_filename.startswith("<")  # such as __init__ of a data class
    place = _place(frame)
    installed = place.startswith((_PACKAGE, *_LIBRARIES)) or _INSTALLED & set(place.split(os.sep))
    return generated or bool(installed)


def _explains_itself(error: BaseException) -> bool:
    """Whether the message of an error says all: it was raised on purpose, here or in gin.

    If code of the user's own was running, the traceback shows where.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames or not all(_of_libraries(frame) for frame, _ in frames):
        return False
    if isinstance(error, _OF_FILES):
        return True
    frame, line = frames[-1]
    of_gin = frame.f_globals.get("__name__", "").partition(".")[0] == "gin"
    # Python raises such errors too, as for missing arguments; those need the traceback.
    on_purpose = linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise")
    return (
        on_purpose
        and (of_gin or _place(frame).startswith(_PACKAGE))
        and isinstance(error, (ValueError, TypeError, RuntimeError, SyntaxError))
    )


def _text(error: BaseException) -> str:
    if isinstance(error, tf.errors.OpError):
        return reason(error)
    return _IN_CALL.sub("", str(error)).strip() or type(error).__name__


def _is_interrupt(error: BaseException) -> bool:
    """Whether an error is Ctrl-C.

    While TensorFlow's bindings make an exception of their own, as for each file that is not there,
    pybind11 replaces a KeyboardInterrupt by a RuntimeError.
    """
    replaced = isinstance(error, RuntimeError) and "REPLACED BY KeyboardInterrupt" in str(error)
    return replaced or isinstance(error, KeyboardInterrupt)


@contextlib.contextmanager
def mistakes_told(program: str) -> Iterator[None]:
    """Context that ends the process with one message, without a traceback, at an expected error.

    Expected are errors that this package or gin raises on purpose, and those of files. With the
    environment variable MTF_TRACEBACK=1 they are raised as all others are.

    Args:
      program: the name that the message begins with.

    Ctrl-C ends it likewise, where nothing else is done about it, as while it waits.

    Raises:
      SystemExit: with 2, or with 130 after Ctrl-C.
    """
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        interrupted = _is_interrupt(error)
        if is_set(_TRACEBACK, False) or not (interrupted or _explains_itself(error)):
            raise
        text = "stopped by Ctrl-C" if interrupted else _text(error)
        # Where both streams go to one file, earlier output would else come after the message.
        sys.stdout.flush()
        print(f"{program}: {text}", file=sys.stderr, flush=True)
        sys.exit(_INTERRUPTED if interrupted else 2)


class _Plain(logging.Formatter):
    """Log lines for users of a program: the message, perhaps after "warning: " or "error: "."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        text = super().format(record)
        return text if record.levelno <= logging.INFO else f"{record.levelname.lower()}: {text}"


def _for_the_user(record: logging.LogRecord) -> bool:
    """Whether a record of TensorFlow's logger is more than news about its own functions.

    Such are what its hooks and savers do, and which of its functions are deprecated.
    """
    place = os.path.abspath(record.pathname)
    of_tensorflow = place.startswith(_TENSORFLOW)
    if record.levelno <= logging.INFO:
        return not of_tensorflow and not place.startswith(_LONG)
    return not (of_tensorflow and "Instructions for updating" in str(record.msg))


def _warn(
    message: Union[Warning, str],
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Optional[TextIO] = None,
    line: Optional[str] = None,
) -> None:
    """Writes a warning in one line; where it is from matters for the user's own code only."""
    own = not os.path.abspath(filename).startswith((_PACKAGE, *_LIBRARIES, "<frozen"))
    place = f" ({filename}:{lineno})" if own else ""
    print(f"warning: {message}{place}", file=file or sys.stderr)


def _prepare(verbosity: int, eager: bool = False) -> None:
    """Selects graphs and sessions, or eager code, and what is logged."""
    _quiet.set_log_level()
    tf.logging.set_verbosity(tf.logging.ERROR)  # disable_v2_behavior says that it is deprecated
    if not eager:
        tf.disable_v2_behavior()
    log = tf.get_logger()
    log.propagate = False  # to absl's logger, which would print each line again
    log.addFilter(_for_the_user)
    for handler in log.handlers:
        handler.setFormatter(_Plain())
    tf.logging.set_verbosity(verbosity)
    warnings.showwarning = _warn


def run_with_flags(main: Callable[[Sequence[str]], Any], program: str) -> NoReturn:
    """Runs a program whose flags are absl's, and ends the process.

    Args:
      main: a function of the remaining command-line arguments.
      program: its name, as after `python -m`.

    Raises:
      SystemExit: with 0 at the end, 2 after a mistake in flags, files or configuration.
    """
    _prepare(tf.logging.INFO)

    def told(arguments: Sequence[str]) -> None:
        with mistakes_told(program):
            main(arguments)

    app.run(told, flags_parser=lambda arguments: _parsed(arguments, program))
    raise AssertionError("app.run returned")


def _parsed(arguments: Sequence[str], program: str) -> Sequence[str]:
    """Parses absl's flags; ends the process where they are wrong."""
    try:
        rest = flags.FLAGS(arguments)
    except flags.Error as error:
        mistake = str(error)
    else:
        if len(rest) == 1:
            return rest
        mistake = (
            f"unexpected arguments {' '.join(rest[1:])!r}: flags begin with --, and a value that "
            "has spaces needs quotes, as in --flag='a b'"
        )
    print(f"{program}: {mistake}\nIts flags are listed by --help", file=sys.stderr)
    sys.exit(2)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """The help of a command: defaults that say something, and examples as they are."""

    def _get_help_string(self, action: argparse.Action) -> Optional[str]:
        if action.default is None or action.default is False or action.default in ("", []):
            return action.help
        return super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        shares = [
            part if part.lstrip().startswith("python -m") else fill(part, width, indent)
            for part in text.strip().split("\n\n")
        ]
        return "\n\n".join(shares)


def parser_of(
    command: str, description: str, epilog: Optional[str] = None
) -> argparse.ArgumentParser:
    """Returns the parser of a command of the package, whose --help tells defaults.

    Args:
      command: the name of its module in the package.
      description: what it does.
      epilog: what comes after the flags, such as examples.
    """
    return argparse.ArgumentParser(
        formatter_class=_Help,
        prog=f"python -m mesh_tensorflow.{command}",
        description=description,
        epilog=epilog,
    )


def run_with_parser(main: Callable[[], Any], program: str, eager: bool = False) -> NoReturn:
    """Runs a program that parses its own command line, and ends the process.

    Args:
      main: a function that returns the exit code, or None.
      program: its name, as after `python -m`.
      eager: whether its code is eager, in place of graphs and sessions.

    Raises:
      SystemExit: with the exit code, or 2 after a mistake in flags or files.
    """
    _prepare(tf.logging.ERROR, eager)
    with mistakes_told(program):
        code = main()
    sys.exit(code)


# -- gin files and bindings

_MOST_NAMES = 3

_UNKNOWN_SELECTOR = re.compile(r"No configurable matching (?:reference )?'@?([^']*?)(?:\(\))?'")
_INCLUDE = re.compile(r"""\s*include\s+['"]([^'"]+)""")
_UNKNOWN_PARAMETER = re.compile(r"Configurable '([^']*)' doesn't have a parameter named '([^']*)'")


def _nearest(name: str, known: Sequence[str]) -> str:
    names = {k: k for k in known}
    # A file may use only the end of a name.
    names.update({k.rsplit(".", 1)[-1]: k for k in known})
    close = difflib.get_close_matches(name.rsplit(".", 1)[-1], names, _MOST_NAMES, 0.6)
    # Whole paths have much in common, so they have to be nearer than ends are.
    close += difflib.get_close_matches(name, names, _MOST_NAMES, 0.75)
    return ", ".join(dict.fromkeys(names[k] for k in close))


def _advice(message: str) -> str:
    """Returns a sentence with the nearest known names to one that gin does not know, or ""."""
    selector = _UNKNOWN_SELECTOR.search(message)
    if selector:
        # gin has no public way to list what is registered.
        near = _nearest(selector[1], [name for name, _ in gin.config._REGISTRY.items()])
        return (f"The nearest names are {near}." if near else "No name is near it.") + (
            " A module that registers it may have to be imported, by --module_import or by an "
            "`import` in the gin file."
        )
    parameter = _UNKNOWN_PARAMETER.search(message)
    if parameter:
        function = gin.get_configurable(parameter[1])
        names = inspect.signature(function).parameters
        parameters = [name for name in names if name not in ("self", "args", "kwargs")]
        near = _nearest(parameter[2], parameters)
        return f"The nearest names are {near}." if near else f"It has {', '.join(parameters)}."
    return ""


def _paths(files: Iterable[str], prefixes: Iterable[str]) -> Iterator[str]:
    """Yields the paths of gin files, and of the files that they include."""
    waiting, seen = list(files), set()
    while waiting:
        name = waiting.pop(0)
        paths = [os.path.join(prefix, name) for prefix in ("", *prefixes)]
        path = next((path for path in paths if os.path.isfile(path)), None)
        if path is None or path in seen:
            continue
        seen.add(path)
        yield path
        # The file that is searched for may be one that is not in UTF-8.
        with open(path, encoding="utf-8", errors="replace") as f:
            waiting += [include[1] for include in map(_INCLUDE.match, f) if include]


def _line_not_in_utf8(files: Iterable[str], prefixes: Iterable[str]) -> str:
    """Returns an error message if a gin file, or one that it includes, is not valid UTF-8."""
    for path in _paths(files, prefixes):
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                try:
                    line.decode("utf-8")
                except UnicodeDecodeError as error:
                    return (
                        f"line {number} of {path} is not in UTF-8 ({error.reason} at byte "
                        f"{error.start}: {line.strip()[:40]!r})"
                    )
    return ""


def _file_that_breaks_off(files: Iterable[str], prefixes: Iterable[str]) -> str:
    """Returns the path of a gin file in which a bracket or a string is not closed, or ""."""
    for path in _paths(files, prefixes):
        with open(path, encoding="utf-8") as f:
            try:
                collections.deque(tokenize.generate_tokens(f.readline), maxlen=0)
            except (tokenize.TokenError, SyntaxError):
                return path
    return ""


@contextlib.contextmanager
def _lines_in_errors_of_syntax(files: Iterable[str], prefixes: Iterable[str]) -> Iterator[None]:
    """Puts file, line and text into the messages of errors of syntax."""
    try:
        yield
    except tokenize.TokenError as error:
        place = _file_that_breaks_off(files, prefixes) or "--gin_param"
        raise SyntaxError(f"{place}: a bracket or a string is not closed") from error
    except SyntaxError as error:
        place = f"{error.filename}, line {error.lineno}" if error.filename else "--gin_param"
        text = (error.text or "").strip()
        raise SyntaxError(f"{place}: {error.msg}\n    {text}") from error


def _not_about_a_path(record: logging.LogRecord) -> bool:
    return os.path.basename(record.pathname) != "resource_reader.py"


@contextlib.contextmanager
def explained_errors(files: Iterable[str], prefixes: Iterable[str] = ()) -> Iterator[None]:
    """Context for reading gin files and bindings: errors say where, and what may have been meant.

    Args:
      files: the gin files that are read.
      prefixes: the directories in which they, and the files that they include, are searched for.

    Raises:
      ValueError: a name is unknown; the message has the nearest known ones. Or a file is not valid
        UTF-8; the message has the line.
      SyntaxError: a file or binding is no gin; the message has file, line and text.
    """
    files, prefixes = list(files), list(prefixes)
    root = logging.getLogger()  # to which gin writes of each directory that it searches
    root.addFilter(_not_about_a_path)
    try:
        # It reads files again, to find a bracket, and they may not be in UTF-8.
        with _lines_in_errors_of_syntax(files, prefixes):
            yield
    except UnicodeDecodeError as error:
        place = _line_not_in_utf8(files, prefixes)
        raise ValueError(
            f"a gin file should be text in UTF-8: {place or error}. Save it as UTF-8, as by "
            "`iconv -f latin1 -t utf-8`"
        ) from error
    except ValueError as error:
        advice = _advice(str(error))
        if not advice:
            raise
        raise ValueError(f"{error}\n{advice}") from error
    finally:
        root.removeFilter(_not_about_a_path)

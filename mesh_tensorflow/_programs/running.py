"""How the package's programs run: their mode of TensorFlow, what they log, and how they fail."""

from __future__ import annotations

import contextlib
import linecache
import logging
import os
import re
import sys
import sysconfig
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Optional, TextIO, Union

import tensorflow.compat.v1 as tf
from absl import app

from mesh_tensorflow._command_lines import chatter, check
from mesh_tensorflow._core.errors import is_set, reason

__all__ = ["mistakes_told", "run_with_flags", "run_with_parser"]

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LIBRARIES = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")
)
# Wherever they are: a virtual environment may use packages of a user or of the system.
_INSTALLED = frozenset(["site-packages", "dist-packages"])
_TENSORFLOW = os.path.join(tf.sysconfig.get_lib(), "")
# What these log, such as a line for each variable, the training report says shorter.
_LONG = tuple(os.path.join(_PACKAGE, *name) for name in (("_lowering",), ("ops", "_variables")))
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


def _said_in_its_message(error: BaseException) -> bool:
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
        if is_set(_TRACEBACK, False) or not (interrupted or _said_in_its_message(error)):
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


def _log_plainly(verbosity: int) -> None:
    log = tf.get_logger()
    log.propagate = False  # to absl's logger, which would print each line again
    log.addFilter(_for_the_user)
    for handler in log.handlers:
        handler.setFormatter(_Plain())
    tf.logging.set_verbosity(verbosity)
    warnings.showwarning = _warn


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


def _as_tensorflow_1(verbosity: int) -> None:
    """Selects graphs and sessions, and what is logged."""
    chatter.set_log_level()
    tf.logging.set_verbosity(tf.logging.ERROR)  # disable_v2_behavior says that it is deprecated
    tf.disable_v2_behavior()
    _log_plainly(verbosity)


def run_with_flags(main: Callable[[Sequence[str]], Any], program: str) -> NoReturn:
    """Runs a program whose flags are absl's, and ends the process.

    Args:
      main: a function of the remaining command-line arguments.
      program: its name, as after `python -m`.

    Raises:
      SystemExit: with 0 at the end, 2 after a mistake in flags, files or configuration.
    """
    check(program, sys.argv[1:])
    _as_tensorflow_1(tf.logging.INFO)

    def told(arguments: Sequence[str]) -> None:
        with mistakes_told(program):
            main(arguments)

    app.run(told)
    raise AssertionError("app.run returned")


def run_with_parser(main: Callable[[], Any], program: str) -> NoReturn:
    """Runs a program that parses its own command line, and ends the process.

    Args:
      main: a function that returns the exit code, or None.
      program: its name, as after `python -m`.

    Raises:
      SystemExit: with the exit code, or 2 after a mistake in flags or files.
    """
    check(program, sys.argv[1:])
    _as_tensorflow_1(tf.logging.ERROR)
    with mistakes_told(program):
        code = main()
    sys.exit(code)

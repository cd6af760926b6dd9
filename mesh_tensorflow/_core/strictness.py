"""Slips: legal programs that are hardly meant."""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator

__all__ = [
    "MeshTensorFlowWarning",
    "check_flag",
    "did_you_mean",
    "is_set",
    "is_strict",
    "slip",
    "strict",
]

_strict: contextvars.ContextVar[bool | None] = contextvars.ContextVar("mtf_strict", default=None)
_told: set[str] = set()
_telling = threading.Lock()
_FALSE = ("", "0", "false", "no", "off")
# Frames between the caller's line and a slip: this package, and what wraps its functions.
_NOT_THE_CALLERS = ("mesh_tensorflow", "gin", "contextlib", "functools", "tensorflow")


class MeshTensorFlowWarning(UserWarning):
    """The program is legal, but hardly meant as written.

    Each message is given once in a process. `warnings.filterwarnings("ignore",
    category=mtf.MeshTensorFlowWarning)` silences them; `mtf.strict()` makes them errors.
    """


@contextlib.contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Makes what is hardly meant an error: a ValueError in place of a MeshTensorFlowWarning.

    It holds for what is built within, in this thread. For programs as a whole, set the
    environment variable MTF_STRICT=1.

    Args:
      enabled: whether slips are errors within; False restores warnings inside of a strict part.
    """
    token = _strict.set(enabled)
    try:
        yield
    finally:
        _strict.reset(token)


def is_strict() -> bool:
    """Whether slips are errors: within `strict()`, or by the environment variable MTF_STRICT."""
    chosen = _strict.get()
    return is_set("MTF_STRICT", False) if chosen is None else chosen


def is_set(variable: str, default: bool) -> bool:
    """Returns whether an environment variable says yes; `default` if there is none."""
    text = os.environ.get(variable)
    return default if text is None else text.strip().lower() not in _FALSE


def slip(message: str, key: str | None = None) -> None:
    """Warns once per process of a slip; raises if slips are errors.

    To be called before anything is registered.

    Args:
      message: what, with the dimensions and sizes, and the mend.
      key: messages of one key are given once; the message itself if None.

    Raises:
      ValueError: within `strict()`.
    """
    if is_strict():
        raise ValueError(
            f"{message}\n  (an error by mtf.strict() or MTF_STRICT; a warning otherwise)"
        )
    key = message if key is None else key
    with _telling:
        if key in _told:
            return
        _told.add(key)
    try:
        warnings.warn(message, MeshTensorFlowWarning, stacklevel=_user_frame())
    except MeshTensorFlowWarning:  # filtered to be an error, and so it is the next time
        with _telling:
            _told.discard(key)
        raise


def _user_frame() -> int:
    """Returns the stacklevel, for the function that calls this, of the user's own line."""
    frame, level = sys._getframe(1), 1
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in _NOT_THE_CALLERS:
            return level
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return level


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a sentence: "; did you mean rows?" with the nearest name, or "."."""
    nearest = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else "."


def check_flag(function: str, name: str, value: object, instead: str) -> None:
    """Reports a slip if an argument that is true or false got something else.

    0 and 1 count as flags, as do None and the booleans of NumPy.

    Args:
      function: what was called.
      name: the parameter's name.
      value: what was given.
      instead: the call that was probably meant, with `{value}` where the value stands.

    Raises:
      ValueError: within `strict()`.
    """
    is_flag = value is None or isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")
    if is_flag or (isinstance(value, int) and value in (0, 1)):
        return
    slip(
        f"{function}: {name} is true or false, but was given {value!r}. By position, "
        f"arguments go to the parameters in their order; write {instead.format(value=repr(value))}"
    )

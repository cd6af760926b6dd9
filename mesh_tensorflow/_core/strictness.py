"""Slips: code that is legal but probably unintended."""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator

from mesh_tensorflow._site import is_users

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


class MeshTensorFlowWarning(UserWarning):
    """The code is legal, but probably unintended.

    Each message is given once per process. `warnings.filterwarnings("ignore",
    category=mtf.MeshTensorFlowWarning)` silences them; `mtf.strict()` makes them errors.
    """


@contextlib.contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Makes slips errors: a ValueError is raised instead of a MeshTensorFlowWarning.

    It applies to code within the context, in the current thread. To apply it to a whole program,
    set the environment variable MTF_STRICT=1.

    Args:
      enabled: whether slips are errors; False restores warnings within a strict context.
    """
    token = _strict.set(enabled)
    try:
        yield
    finally:
        _strict.reset(token)


def is_strict() -> bool:
    """Returns whether slips are errors, by `strict()` or the environment variable MTF_STRICT."""
    chosen = _strict.get()
    return is_set("MTF_STRICT", False) if chosen is None else chosen


def is_set(variable: str, default: bool) -> bool:
    """Returns whether an environment variable is set to true; `default` if it is not set."""
    text = os.environ.get(variable)
    return default if text is None else text.strip().lower() not in _FALSE


def slip(message: str, key: str | None = None) -> None:
    """Reports a slip: warns once per process, or raises if slips are errors.

    Call it before anything is added to the graph.

    Args:
      message: the problem, with dimensions and sizes, and how to fix it.
      key: messages with the same key are given once; the message itself if None.

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
    except MeshTensorFlowWarning:  # a filter makes it an error, and will the next time
        with _telling:
            _told.discard(key)
        raise


def _user_frame() -> int:
    """Returns the stacklevel of the user's own line, for the function that calls this one."""
    frame, level = sys._getframe(1), 1
    while frame is not None:
        if is_users(frame):
            return level
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return level


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a sentence: "; did you mean rows?" with the nearest name, or "."."""
    nearest = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else "."


def check_flag(function: str, name: str, value: object, instead: str) -> None:
    """Reports a slip if a boolean argument has another value.

    0, 1, None and NumPy booleans are accepted.

    Args:
      function: the name of the function that was called.
      name: the parameter's name.
      value: the argument.
      instead: the call that was probably intended, with `{value}` in place of the value.

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

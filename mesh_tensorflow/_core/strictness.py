"""Slips: what the language accepts although it can hardly be meant."""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import warnings
from collections.abc import Iterator

__all__ = ["MeshTensorFlowWarning", "is_strict", "slip", "strict"]

_strict: contextvars.ContextVar[bool | None] = contextvars.ContextVar("mtf_strict", default=None)
_told: set[str] = set()
_FALSE = ("", "0", "false", "no", "off")


class MeshTensorFlowWarning(UserWarning):
    """The program is legal, but what it says is hardly what is meant.

    Each message is given once in a process. `warnings.filterwarnings("ignore",
    category=mtf.MeshTensorFlowWarning)` silences them; `mtf.strict()` makes them errors.
    """


@contextlib.contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Makes what is hardly meant an error: a ValueError in place of a MeshTensorFlowWarning.

    For programs as a whole, set the environment variable MTF_STRICT=1.

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
    if chosen is not None:
        return chosen
    return os.environ.get("MTF_STRICT", "").strip().lower() not in _FALSE


def slip(message: str, key: str | None = None) -> None:
    """Warns once in a process of what can only be a slip; raises if slips are errors.

    To be called before anything is registered.

    Args:
      message: what, with the dimensions and sizes, and the mend.
      key: messages of one key are given once; the message itself if None.

    Raises:
      ValueError: within `strict()`.
    """
    if is_strict():
        raise ValueError(message)
    key = message if key is None else key
    if key in _told:
        return
    _told.add(key)
    warnings.warn(message, MeshTensorFlowWarning, stacklevel=_user_frame())


def _user_frame() -> int:
    """Returns the stacklevel at which the caller's own code stands, outside of this package."""
    frame, level = sys._getframe(1), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("mesh_tensorflow."):
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return level + 1

"""Context variables, such as a thread's current program, that have a value for a `with` block.

No plain globals: several threads may build programs, each with values of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def within(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """Gives a context variable a value within a block, and the former one afterwards.

    Args:
      variable: the context variable.
      value: its value within.
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)

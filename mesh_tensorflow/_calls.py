"""What a call is given: arguments by name, and context variables for a `with` block."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

# A parameter `*labels`, or one before `/`, has a name too, but is given by position.
_BY_POSITION = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)


@contextlib.contextmanager
def within(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """Gives a context variable a value within a block, and the former one afterwards.

    State of the package is in such variables and in no plain globals: several threads may build
    programs, each with values of its own.

    Args:
      variable: the context variable.
      value: its value within.
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def names_taken(function: Callable[..., Any]) -> set[str]:
    """Returns the names of the arguments that a function takes by name, without its `**kwargs`.

    Args:
      function: a function or a class.
    """
    named = inspect.signature(function).parameters.values()
    return {p.name for p in named if p.kind not in (*_BY_POSITION, p.VAR_KEYWORD)}


def _takes_any(function: Callable[..., Any]) -> bool:
    """Returns whether a function has `**kwargs`, and so takes any name.

    Args:
      function: a function or a class.
    """
    return any(p.kind == p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def takes(function: Callable[..., Any], name: str) -> bool:
    """Returns whether a function takes an argument by a name.

    Args:
      function: a function or a class.
      name: the name.
    """
    return _takes_any(function) or name in names_taken(function)


def requires(function: Callable[..., Any], name: str) -> bool:
    """Returns whether a function has an argument of a name that has no default.

    Args:
      function: a function or a class.
      name: the name.
    """
    parameter = inspect.signature(function).parameters.get(name)
    # What functools.partial has bound has a default in its signature.
    return parameter is not None and parameter.default is parameter.empty


def arguments_of(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of `values` that a function takes by name.

    What has the arguments of another function, and some of its own, hands them on by this.

    Args:
      function: a function or a class.
      values: values by name. If they are the `locals()` of the caller, call this before there are
        others than its arguments, which may have such names too.
    """
    if _takes_any(function):
        return dict(values)
    names = names_taken(function)
    return {name: value for name, value in values.items() if name in names}

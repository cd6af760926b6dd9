"""Calls of layers in the form that they had before they took `is_training`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from mesh_tensorflow._core.shape import Dimension

__all__: list[str] = []

_Layer = TypeVar("_Layer", bound=Callable[..., Any])


def trains_if_not_told(layer: _Layer) -> _Layer:
    """Makes calls without `is_training` calls in training, as before release 0.1.19.

    By position, the argument in its place is then the one that comes after it now.

    Args:
      layer: a function with the parameter `is_training`.
    """
    place = list(inspect.signature(layer).parameters).index("is_training")

    @functools.wraps(layer)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "is_training" not in kwargs:
            if len(args) <= place:
                kwargs["is_training"] = True
            elif _is_next(args[place]):
                args = (*args[:place], True, *args[place:])
        return layer(*args, **kwargs)

    return cast(_Layer, call)


def _is_next(value: object) -> bool:
    """Returns whether an argument is a rate, a size or a dimension, and no flag."""
    return isinstance(value, (float, Dimension)) or (isinstance(value, int) and value not in (0, 1))

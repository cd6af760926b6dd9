"""Keys of the arguments of functions: what of an argument a trace is made for.

TensorFlow takes Python values for the same argument if they are equal. 1, True and 1.0 are, and 0.0
and -0.0, and programs do different things with them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf2

__all__ = ["ToldApart", "original", "told_apart", "value_key"]

_SAME_IF_EQUAL = (str, bytes, type(None))


def value_key(value: Any) -> Optional[Hashable]:
    """Returns a key that only equal values of one type share, or None for tensors and objects.

    Args:
      value: a number, a string, None, or a frozen dataclass of these.
    """
    kind = type(value)
    if isinstance(value, (*_SAME_IF_EQUAL, int, range)):
        return kind, value
    if isinstance(value, np.generic):
        return None
    if isinstance(value, float):
        return kind, value.hex()  # which tells 0.0 and -0.0 apart, and finds a NaN again
    if isinstance(value, complex):
        return kind, value.real.hex(), value.imag.hex()
    if dataclasses.is_dataclass(kind) and _has_value(kind):
        keys = [value_key(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return None if None in keys else (kind, *keys)
    return None


def _has_value(kind: type) -> bool:
    """Returns whether objects of a dataclass are equal if their fields are, and stay it."""
    parameters = getattr(kind, "__dataclass_params__", None)
    return bool(parameters and parameters.frozen and parameters.eq)


@dataclasses.dataclass(frozen=True, eq=False)
class ToldApart:
    """An argument of a tf.function that is the same only if its key is."""

    key: Hashable
    value: Any

    def __tf_tracing_type__(self, context: Any) -> _KeyType:
        return _KeyType(self.key, self.value)


class _KeyType(tf2.types.experimental.TraceType):
    """The type of a ToldApart: tf.function passes its value to the function that it traces."""

    def __init__(self, key: Hashable, value: Any):
        self._key, self._value = key, value

    def is_subtype_of(self, other: Any) -> bool:
        return bool(self == other)

    def most_specific_common_supertype(self, others: Sequence[Any]) -> Optional[_KeyType]:
        return self if all(self == other for other in others) else None

    def placeholder_value(self, placeholder_context: Any) -> Any:
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _KeyType) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self._value)


def told_apart(value: Any) -> Any:
    """Returns arguments with their numbers told apart by type; in containers, too."""

    def leaf(x: Any) -> Any:
        if isinstance(x, _SAME_IF_EQUAL) and type(x) in _SAME_IF_EQUAL:
            return x
        key = value_key(x)
        return x if key is None else ToldApart(key, x)

    return _mapped(leaf, value)


def original(value: Any) -> Any:
    """Returns arguments as they were before `told_apart`."""
    return _mapped(lambda x: x.value if type(x) is ToldApart else x, value)


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(_mapped(fn, x) for x in value)
    if kind is dict or kind is collections.OrderedDict:
        return kind((name, _mapped(fn, x)) for name, x in value.items())
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*(_mapped(fn, x) for x in value))
    return fn(value)

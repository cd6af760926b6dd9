"""mtf.function: traced programs that keep their variables.

A trace is found by its arguments. TensorFlow takes Python values for the same argument if they are
equal; 1, True and 1.0 are, and 0.0 and -0.0, and programs do different things with them, so that
the keys here tell them apart.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf2

from mesh_tensorflow._core.layout import storing
from mesh_tensorflow._mesh.variables.store import VariableStore
from mesh_tensorflow._watching import (
    NodeNames,
    collecting,
    hand_over,
    names_in_current_graph,
    raise_for_user,
    watch_key,
)

_SAME_IF_EQUAL = (str, bytes, type(None))


def value_key(value: Any) -> Optional[Hashable]:
    """Returns a key that only equal values of one type share, or None for tensors and objects.

    Args:
      value: a number, a string, None, or a frozen dataclass of these.
    """
    kind = type(value)
    if isinstance(value, (*_SAME_IF_EQUAL, int, range)):
        return kind, value
    # Before floats, of which np.float64 is one: tf.function makes tensors of NumPy's numbers.
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
class KeyedArgument:
    """An argument of a tf.function that is the same only if its key is."""

    key: Hashable
    value: Any

    def __tf_tracing_type__(self, context: Any) -> _KeyType:
        return _KeyType(self.key, self.value)


class _KeyType(tf2.types.experimental.TraceType):
    """The type of a KeyedArgument: tf.function passes its value to the function that it traces."""

    def __init__(self, key: Hashable, value: Any):
        self._key, self._value = key, value

    def is_subtype_of(self, other: Any) -> bool:
        return bool(self == other)

    def most_specific_common_supertype(self, others: Sequence[Any]) -> Optional[_KeyType]:
        # No value stands for two others, so each has a trace of its own.
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
        return x if key is None else KeyedArgument(key, x)

    return _mapped(leaf, value)


def original(value: Any) -> Any:
    """Returns arguments as they were before `told_apart`."""
    return _mapped(lambda x: x.value if type(x) is KeyedArgument else x, value)


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    kind = type(value)
    # Of exactly these types, since a subclass may be built in another way; it is one leaf.
    if kind is list or kind is tuple:
        return kind(_mapped(fn, x) for x in value)
    if kind is dict or kind is collections.OrderedDict:
        return kind((name, _mapped(fn, x)) for name, x in value.items())
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*(_mapped(fn, x) for x in value))
    return fn(value)


_STORED = ("variable_layout", "zero", "zero_axis")


def function(fn: Optional[Callable[..., Any]] = None, **kwargs: Any) -> Any:
    """Compiles a function that builds and lowers mtf programs, as tf.function does.

    The first call creates the variables of the programs. They are kept in `.store`, a
    VariableStore. Unlike tf.function, it traces anew for 1, True and 1.0, which Python equates.

    >>> import tensorflow as tf
    >>> import mesh_tensorflow as mtf
    >>> @mtf.function
    ... def product(data):
    ...     mesh = mtf.Mesh(mtf.Graph(), "mesh")
    ...     x = mtf.import_tf_tensor(mesh, data, "batch:2,d_in:3")
    ...     w = mtf.get_variable(mesh, "w", mtf.Shape([("d_in", 3)]))
    ...     impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "batch:rows", ["cpu:0"] * 2)
    ...     y = x @ w
    ...     return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)
    >>> product(tf.ones([2, 3])).shape, product.store.names
    (TensorShape([2]), ['w'])

    Args:
      fn: a function of eager tensors; None to use `function` as a decorator with arguments.
      **kwargs: arguments of tf.function; `autograph` is False by default. And `zero`, `zero_axis`
        and `variable_layout`, which say how the mesh implementations that `fn` makes store
        variables, as their own arguments of these names do; and `store`, a VariableStore that
        several functions share, instead of one of its own.

    Returns:
      A function with the arguments and the result of `fn`. Its attributes `store` and
      `tf_function` are the VariableStore and the tf.function.
    """
    if fn is None:
        return functools.partial(function, **kwargs)
    # One for all traces of the function, so that a trace for other shapes has the same weights.
    shared_store = kwargs.pop("store", None)
    store = VariableStore() if shared_store is None else shared_store
    tables: list[NodeNames] = []  # of the traces, by which errors of steps are told
    # Programs are built by Python code, which autograph would rewrite, and take longer to trace.
    kwargs.setdefault("autograph", False)
    stored = {name: kwargs.pop(name) for name in _STORED if name in kwargs}

    @functools.wraps(fn)
    def within_store(*args: object, **named: object) -> Any:
        args, named = original((args, named))  # as they come where functions run eagerly
        with store.scope(), storing(**stored):
            result = fn(*args, **named)
        tables.extend(names_in_current_graph())
        return result

    traced = tf2.function(within_store, **kwargs)
    # A signature has no place for Python values.
    told = original if "input_signature" in kwargs else told_apart
    watched: dict[Any, Any] = {}  # the same, with checks and further results; see mtf.debug

    @functools.wraps(fn)
    def call(*args: object, **named: object) -> Any:
        key = watch_key()
        args, named = told((args, named))
        try:
            if key is None:
                return traced(*args, **named)
            if key not in watched:
                watched[key] = tf2.function(collecting(within_store), **kwargs)
            result, collected = watched[key](*args, **named)
        except tf2.errors.OpError as e:
            # Until a trace has been completed there are no tables: then those of all Lowerings are
            # searched.
            raise_for_user(e, tables or None)
        hand_over(collected)
        return result

    call.store = store  # type: ignore[attr-defined]
    call.tf_function = traced  # type: ignore[attr-defined]
    return call

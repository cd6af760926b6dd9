"""mtf.function: a tf.function that builds and lowers mtf programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

import tensorflow as tf2

from mesh_tensorflow._mesh.variables.store import VariableStore

__all__ = ["function"]


def function(fn: Optional[Callable[..., Any]] = None, **kwargs: Any) -> Any:
    """Compiles a function that builds and lowers mtf programs, as tf.function does.

    The first call creates the variables of the programs. They are kept in `.store`, a
    VariableStore.

    Args:
      fn: a function of eager tensors; None to use `function` as a decorator with arguments.
      **kwargs: arguments of tf.function; `autograph` is False by default.

    Returns:
      A function with the arguments and the result of `fn`. Its attributes `store` and
      `tf_function` are the VariableStore and the tf.function.
    """
    if fn is None:
        return functools.partial(function, **kwargs)
    store = VariableStore()
    kwargs.setdefault("autograph", False)

    @functools.wraps(fn)
    def within_store(*args: object, **named: object) -> Any:
        with store.scope():
            return fn(*args, **named)

    traced = tf2.function(within_store, **kwargs)

    @functools.wraps(fn)
    def call(*args: object, **named: object) -> Any:
        return traced(*args, **named)

    call.store = store  # type: ignore[attr-defined]
    call.tf_function = traced  # type: ignore[attr-defined]
    return call

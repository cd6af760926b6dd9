"""mtf.function: tf.function for functions that build and lower mtf programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

import tensorflow as tf2

from mesh_tensorflow._mesh.variables.store import VariableStore

__all__ = ["function"]


def function(fn: Optional[Callable] = None, **kwargs: Any) -> Any:
    """Is tf.function for functions that build and lower mtf programs.

    The variables of the programs are made at the first call and kept in `.store`, a
    VariableStore.

    Args:
      fn: a function of eager tensors.
      **kwargs: arguments of tf.function; autograph is off unless asked for.
    """
    if fn is None:
        return functools.partial(function, **kwargs)
    store = VariableStore()
    kwargs.setdefault("autograph", False)

    @functools.wraps(fn)
    def within_store(*args: Any, **named: Any) -> Any:
        with store.scope():
            return fn(*args, **named)

    traced = tf2.function(within_store, **kwargs)

    @functools.wraps(fn)
    def call(*args: Any, **named: Any) -> Any:
        return traced(*args, **named)

    call.store = store  # type: ignore[attr-defined]
    call.tf_function = traced  # type: ignore[attr-defined]
    return call

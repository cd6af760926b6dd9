"""Puts the nodes of a collective in a name scope of its own, by which profiles recognize them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow.compat.v1 as tf

__all__ = ["COLLECTIVES", "named_collective"]

# Methods of MeshImpl that communicate, and the parts of names that their nodes have.
COLLECTIVES = ("allreduce", "reduce_scatter", "allconcat", "alltoall", "receive")

F = TypeVar("F", bound=Callable[..., Any])


def named_collective(method: F) -> F:
    """Makes a method of a mesh implementation make its nodes in a name scope of its own name.

    Args:
      method: one of COLLECTIVES.
    """
    name = method.__name__
    assert name in COLLECTIVES, name

    @functools.wraps(method)
    def in_scope(*args: Any, **named: Any) -> Any:
        with tf.name_scope(name):
            return method(*args, **named)

    return in_scope  # type: ignore[return-value]

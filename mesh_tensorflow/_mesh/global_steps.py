"""GlobalSteps: the collection of the global step, in a program and in the graph that calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow.compat.v1 as tf

__all__ = ["GlobalSteps"]


class GlobalSteps:
    """Keeps the collection of the global step the same in a program and in the calling graph.

    Else the program would not find a global step that was made before it or while it is traced,
    since variables are made outside of it.
    """

    def __init__(self) -> None:
        """Notes those of the default graph, which calls the program."""
        self._outside = tf.get_collection_ref(tf.GraphKeys.GLOBAL_STEP)
        self._inside: list[tf.Variable] = []

    @contextlib.contextmanager
    def in_program(self) -> Iterator[None]:
        """Copies the collection to that of the default graph, and back at the end."""
        self._inside = tf.get_collection_ref(tf.GraphKeys.GLOBAL_STEP)
        _add_new(self._outside, self._inside)
        yield
        _add_new(self._inside, self._outside)

    def made(self, next_creator: Callable[..., tf.Variable], **arguments: object) -> tf.Variable:
        """Makes a variable, and notes it if it is a global step; a variable creator.

        Args:
          next_creator: makes the variable.
          **arguments: what variable creators are given.
        """
        variable = next_creator(**arguments)
        _add_new(self._outside, self._inside)
        return variable


def _add_new(source: Sequence[tf.Variable], target: list[tf.Variable]) -> None:
    """Adds to a list what it lacks of another one."""
    target.extend(v for v in source if not any(v is old for old in target))

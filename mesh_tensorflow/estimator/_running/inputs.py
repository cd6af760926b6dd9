"""The result of an input function as features and labels in a graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf2
import tensorflow.compat.v1 as tf

__all__ = ["InitializeIterator", "Inputs", "is_dataset", "make_inputs"]


class InitializeIterator(tf.train.SessionRunHook):
    """Initializes the iterator of a dataset in each new session."""

    def __init__(self, initializer: tf.Operation) -> None:
        """Creates an InitializeIterator.

        Args:
          initializer: the initializer of the iterator.
        """
        self._initializer = initializer

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Initializes the iterator.

        Args:
          session: the new session.
          coord: ignored.
        """
        session.run(self._initializer)


class Inputs(NamedTuple):
    """Features and labels as tensors, the hooks they need, and whether the data may end."""

    features: Any
    labels: Any
    hooks: list[tf.train.SessionRunHook]
    may_end: bool


def is_dataset(value: object) -> bool:
    """Returns whether a value is a tf.data.Dataset.

    Args:
      value: anything.

    Returns:
      a bool.
    """
    return isinstance(value, (tf2.data.Dataset, tf.data.Dataset))


def make_inputs(returned: object, features_only: bool = False) -> Inputs:
    """Returns the features and labels of a step.

    Args:
      returned: the result of an input function: a dataset, (features, labels) or features.
      features_only: whether to drop the labels.

    Returns:
      Inputs.

    Raises:
      ValueError: there are no features, or a tuple does not have two elements.
    """
    hooks: list[tf.train.SessionRunHook] = []
    may_end = is_dataset(returned)
    if may_end:
        iterator = tf.data.make_initializable_iterator(returned)
        hooks.append(InitializeIterator(iterator.initializer))
        returned = iterator.get_next()
    if isinstance(returned, (list, tuple)) and not hasattr(returned, "_fields"):
        if len(returned) != 2:
            raise ValueError(
                f"input_fn gives a tuple of {len(returned)}; it should give (features, labels) or "
                "features alone, where each of them may be a dict: {'x': x, 'y': y}"
            )
        features, labels = returned
    else:
        features, labels = returned, None
    if features is None or (isinstance(features, dict) and not features):
        raise ValueError(
            f"input_fn gives no features (but {features!r}): it should return a tf.data.Dataset, "
            "(features, labels) or features"
        )
    may_end = may_end or bool(tf.get_collection(tf.GraphKeys.QUEUE_RUNNERS))
    return Inputs(features, None if features_only else labels, hooks, may_end)

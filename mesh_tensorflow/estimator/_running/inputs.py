"""The result of an input function as features and labels in a graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._elements import Elements

__all__ = ["ElementsHook", "Inputs", "is_dataset", "make_inputs"]


class ElementsHook(tf.train.SessionRunHook):
    """Fetches an element of a dataset before each step, and ends the loop if there is none."""

    def __init__(self, elements: Elements) -> None:
        """Creates an ElementsHook.

        Args:
          elements: the elements of the dataset.
        """
        self._elements = elements
        self._is_new = self._has_element = False

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Fetches the first element, which hooks after this one may read.

        Args:
          session: the new session.
          coord: ignored.
        """
        session.run(self._elements.initializer)
        self._has_element, self._is_new = self._elements.advance(session), True

    def before_run(self, run_context: tf.train.SessionRunContext) -> None:
        """Fetches an element.

        Args:
          run_context: the context of the step.

        Raises:
          OutOfRangeError: there is none; monitored sessions then end without an error.
        """
        if not self._is_new:
            self._has_element = self._elements.advance(run_context.session)
        self._is_new = False
        if not self._has_element:
            raise tf.errors.OutOfRangeError(None, None, "the dataset has no more elements")


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
        elements = Elements(returned)
        hooks.append(ElementsHook(elements))
        returned = elements.current
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

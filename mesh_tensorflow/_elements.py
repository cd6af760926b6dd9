"""Reads a tf.data.Dataset in a session, one element a step: `Elements.advance`, then the step.

Whether there is another element is known before the step, which so never fails for want of one.
"""

from __future__ import annotations

import itertools
import uuid
from typing import Any

import tensorflow.compat.v1 as tf

__all__ = ["Elements"]

# Sessions of one server share resources by name.
_PROCESS = uuid.uuid4().hex
_count = itertools.count()


class Elements:
    """The elements of a dataset, one for each call of `advance`.

    An iterator that ends within a step fails that step, after parts of it have run, and cancels the
    parts on other devices, each of which TensorFlow logs. Here, the next element is fetched before
    the step, which reads it from a variable. If there is none, there is no step.

    >>> import tensorflow.compat.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as session:
    ...     elements = Elements(tf.data.Dataset.from_tensor_slices([1, 2]))
    ...     doubled = 2 * elements.current
    ...     session.run(elements.initializer)
    ...     while elements.advance(session):
    ...         print(session.run(doubled))
    2
    4

    Attributes:
      initializer: the tf.Operation that starts at the beginning of the dataset.
      current: the current element, in the structure of the dataset.
    """

    def __init__(self, dataset: Any):
        """Creates an instance in the default graph, on the current device, which has to be a CPU.

        Args:
          dataset: a tf.data.Dataset.
        """
        iterator = tf.data.make_initializable_iterator(dataset)
        self.initializer = iterator.initializer
        # An optional is a value also at the end of the dataset, where an element would be an error.
        following = iterator.get_next_as_optional()
        [value] = tf.nest.flatten(following, expand_composites=True)
        # By raw operations, as a tf.Variable needs an initial value, and there is none at first.
        place = tf.raw_ops.VarHandleOp(
            dtype=tf.variant,
            shape=[],
            container="",
            shared_name=f"element_{_PROCESS}_{next(_count)}",
            name="current_element",
        )
        keep = tf.raw_ops.AssignVariableOp(resource=place, value=value)
        # Once this has been fetched, the step may run, and the element has to be in its place.
        with tf.control_dependencies([keep]):
            self._advance = tf.identity(following.has_value(), name="has_element")
        variant = tf.raw_ops.ReadVariableOp(resource=place, dtype=tf.variant)
        optional = tf.nest.pack_sequence_as(following, [variant], expand_composites=True)
        self.current = optional.get_value()

    def advance(self, session: tf.Session) -> bool:
        """Fetches the next element, which is `current` from then on.

        Args:
          session: a tf.Session, in which the iterator has been initialized.

        Returns:
          whether there is one.

        Raises:
          tf.errors.OpError: the dataset failed to produce it.
        """
        return bool(session.run(self._advance))

"""RandomStepHook: the step on which random values in training depend."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow.compat.v1 as tf

__all__ = ["STEP_DONE", "RandomStepHook"]

STEP_DONE = "step_done"  # name of the tensor of the global step after the training operation


class RandomStepHook(tf.train.SessionRunHook):
    """Feeds the number of completed steps, which seeds random values of the next step.

    The global step itself may be read before or after the training operation increments it.
    """

    def __init__(self) -> None:
        """Creates a RandomStepHook, before the model function is called.

        Attributes:
          step: the number of completed steps, a tf.Tensor.
        """
        self.step = tf.placeholder_with_default(
            tf.zeros([], tf.int64), [], name="steps_done_for_random"
        )
        self._number: Any = None
        self._done = 0

    def follow(self, number: tf.Tensor) -> RandomStepHook:
        """Sets the tensor of the global step; returns itself.

        Args:
          number: a tf.Tensor, the global step after each step.
        """
        self._number = number
        return self

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Reads the global step.

        Args:
          session: the new session, restored.
          coord: ignored.
        """
        self._done = int(session.run(tf.train.get_global_step()))

    def before_run(
        self, run_context: tf.train.SessionRunContext
    ) -> Optional[tf.train.SessionRunArgs]:
        """Feeds the step.

        Args:
          run_context: ignored.
        """
        return tf.train.SessionRunArgs(self._number, feed_dict={self.step: self._done})

    def after_run(
        self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
    ) -> None:
        """Records the completed step.

        Args:
          run_context: ignored.
          run_values: the global step.
        """
        self._done = int(run_values.results)

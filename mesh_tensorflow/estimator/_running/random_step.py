"""The step that random values of a training depend on."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow.compat.v1 as tf

__all__ = ["STEP_DONE", "RandomStepHook"]

STEP_DONE = "step_done"  # the tensor that is the global step after the training operation


class RandomStepHook(tf.train.SessionRunHook):
    """Feeds the number of steps done, from which random values of the next step are made.

    The global step itself may be read before or after the training operation adds to it.
    """

    def __init__(self) -> None:
        """Creates a RandomStepHook, before the model function is called.

        Attributes:
          step: the number of steps done, a tf.Tensor.
        """
        self.step = tf.placeholder_with_default(
            tf.zeros([], tf.int64), [], name="steps_done_for_random"
        )
        self._number: Any = None
        self._done = 0

    def follow(self, number: tf.Tensor) -> RandomStepHook:
        """Returns itself, to go by the global step after each step.

        Args:
          number: a tf.Tensor, the global step after each step.
        """
        self._number = number
        return self

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Reads where the training is.

        Args:
          session: the new session, restored.
          coord: unused.
        """
        self._done = int(session.run(tf.train.get_global_step()))

    def before_run(
        self, run_context: tf.train.SessionRunContext
    ) -> Optional[tf.train.SessionRunArgs]:
        """Feeds the step.

        Args:
          run_context: unused.
        """
        return tf.train.SessionRunArgs(self._number, feed_dict={self.step: self._done})

    def after_run(
        self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
    ) -> None:
        """Notes the step that was made.

        Args:
          run_context: unused.
          run_values: of the step.
        """
        self._done = int(run_values.results)

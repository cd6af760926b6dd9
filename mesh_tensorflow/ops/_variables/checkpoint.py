"""Session hooks that copy values between masters and slices around checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow.utils import outside_all_rewrites

if TYPE_CHECKING:
    from mesh_tensorflow._lowering.lowering import Lowering

__all__ = ["MtfCheckpointSaverListener", "MtfRestoreHook"]


class MtfRestoreHook(tf.train.SessionRunHook):
    """Copies masters to slices after a session is created or restored."""

    def __init__(self, lowering: Lowering):
        """Creates the hook.

        Args:
          lowering: a Lowering.
        """
        self._lowering = lowering
        self._copy: Any = None

    def begin(self) -> None:
        """Creates the copy operation, before the graph is finalized."""
        with tf.name_scope("mtf_restore_hook"), outside_all_rewrites():
            self._copy = self._lowering.copy_masters_to_slices()

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Copies masters to slices.

        Args:
          session: the new session.
          coord: unused.
        """
        # A session that replaces a lost one is new, too, and its slices lack what was restored.
        session.run(self._copy)


class MtfCheckpointSaverListener(tf.train.CheckpointSaverListener):
    """Copies slices to masters before each save."""

    def __init__(self, lowering: Lowering):
        """Creates the listener and its copy operation, before the graph is finalized.

        Args:
          lowering: a Lowering.
        """
        with outside_all_rewrites():
            self._copy = lowering.copy_slices_to_masters()

    def begin(self) -> None:
        """Does nothing."""

    def before_save(self, session: tf.Session, global_step_value: int) -> None:
        """Copies slices to masters.

        Args:
          session: the session whose variables are saved.
          global_step_value: the global step.
        """
        # Savers know the masters alone, and training updates the slices.
        session.run(self._copy)
        tf.logging.info("copied slices to masters at step %d", global_step_value)

    def after_save(self, session: tf.Session, global_step_value: int) -> None:
        """Does nothing."""

    def end(self, session: tf.Session, global_step_value: int) -> None:
        """Does nothing."""

"""Hooks that an estimator adds to a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

__all__ = [
    "NanLossError",
    "NanLossHook",
    "OtherWriterListener",
    "StopAfterBatches",
    "SummaryWritersHook",
    "savers_last",
]

NAN_DIRECTORY = "nan"


def savers_last(hooks: Iterable[tf.train.SessionRunHook]) -> list[tf.train.SessionRunHook]:
    """Returns hooks with those that save at the end.

    A saver saves as soon as there is a session, and what other hooks do then, such as copying
    masters to slices, has to be done before.

    Args:
      hooks: hooks.

    Returns:
      a list.
    """
    return sorted(hooks, key=lambda hook: isinstance(hook, tf.train.CheckpointSaverHook))


class NanLossError(tf.train.NanLossDuringTrainingError):
    """The loss of a training is not a number."""

    def __init__(self, text: str, step: int) -> None:
        """Creates a NanLossError.

        Args:
          text: what happened.
          step: the step of this loss.
        """
        super().__init__(text)
        self.text, self.step = text, step

    def __str__(self) -> str:
        return self.text


class NanLossHook(tf.train.SessionRunHook):
    """Stops a training whose loss is NaN, and saves its state.

    The variables go to the directory "nan" of the model directory, so that a training that is
    resumed starts from the last checkpoint before.
    """

    def __init__(
        self,
        loss: tf.Tensor,
        step: tf.Tensor,
        scaffold: tf.train.Scaffold,
        model_dir: Optional[str],
        listeners: Callable[[], Iterable[tf.train.CheckpointSaverListener]],
        fail_on_nan_loss: bool = True,
    ) -> None:
        """Creates a NanLossHook.

        Args:
          loss: a scalar.
          step: the global step after each step.
          scaffold: whose saver saves.
          model_dir: the model directory, or None to save nothing.
          listeners: a function that returns the listeners of the training's savers.
          fail_on_nan_loss: whether to raise; if not, training ends with a warning.
        """
        self._fetches = {"loss": loss, "step": step}
        self._scaffold, self._model_dir, self._listeners = scaffold, model_dir, listeners
        self._fail = fail_on_nan_loss

    def before_run(
        self, run_context: tf.train.SessionRunContext
    ) -> Optional[tf.train.SessionRunArgs]:
        """Returns the fetches of a step.

        Args:
          run_context: unused.

        Returns:
          SessionRunArgs.
        """
        return tf.train.SessionRunArgs(self._fetches)

    def after_run(
        self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
    ) -> None:
        """Looks at the loss.

        Args:
          run_context: of the step.
          run_values: loss and step.

        Raises:
          NanLossDuringTrainingError: the loss is not a number.
        """
        if not np.isnan(run_values.results["loss"]):
            return
        step = int(run_values.results["step"])
        saved = self._save(run_context.session, step)
        before = tf.train.latest_checkpoint(self._model_dir) if self._model_dir else None
        text = f"the loss is NaN in step {step}."
        if saved:
            text += f" The variables after it were saved as {saved}."
        if before:
            text += f" Training resumes from {before}."
        text += " Look for a learning rate that is too high, log(0), 0/0 or bad data"
        if self._fail:
            raise NanLossError(text, step)
        tf.logging.warning("%s", text)
        run_context.request_stop()

    def _save(self, session: tf.Session, step: int) -> Optional[str]:
        if self._model_dir is None:
            return None
        for listener in self._listeners():
            listener.before_save(session, step)
        path = os.path.join(self._model_dir, NAN_DIRECTORY, "model.ckpt")
        tf.io.gfile.makedirs(os.path.dirname(path))
        # Not the training's saver itself, which would count this among its own checkpoints.
        saver = tf.train.Saver(saver_def=self._scaffold.saver.as_saver_def())
        return saver.save(session, path, global_step=step, write_meta_graph=False)


class StopAfterBatches(tf.train.SessionRunHook):
    """Ends an evaluation after some batches, and counts them."""

    def __init__(self, batches: Optional[int]) -> None:
        """Creates a StopAfterBatches.

        Args:
          batches: how many, or None until the data end.
        """
        self._batches = batches
        self._every = max(1, batches // 10) if batches else None
        self.done = 0

    def after_run(
        self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
    ) -> None:
        """Counts.

        Args:
          run_context: of the batch.
          run_values: unused.
        """
        self.done += 1
        if self._every and self.done % self._every == 0:
            tf.logging.info("Evaluation [%d/%d]", self.done, self._batches)
        if self._batches is not None and self.done >= self._batches:
            run_context.request_stop()


class SummaryWritersHook(tf.train.SessionRunHook):
    """Opens the writers that tf.compat.v2.summary makes in a graph, and empties them at the end."""

    COLLECTION = "_SUMMARY_WRITER_V2"

    def __init__(self) -> None:
        self._initializers: list[Any] = []
        self._flush: list[Any] = []

    def begin(self) -> None:
        """Finds the writers."""
        self._initializers = tf.get_collection(self.COLLECTION)
        with tf.control_dependencies(None):
            self._flush = [
                tf.raw_ops.FlushSummaryWriter(writer=op.inputs[0]) for op in self._initializers
            ]

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Opens them.

        Args:
          session: the new session.
          coord: unused.
        """
        session.run(self._initializers)

    def end(self, session: tf.Session) -> None:
        """Empties them.

        Args:
          session: the session.
        """
        session.run(self._flush)


class OtherWriterListener(tf.train.CheckpointSaverListener):
    """Says once that something else writes checkpoints to the directory of a training."""

    def __init__(self, directory: str) -> None:
        """Creates a listener.

        Args:
          directory: where the training writes.
        """
        self._directory = directory
        self._newest: Optional[str] = None  # as this training left it
        self._told = False

    def before_save(self, session: tf.Session, global_step_value: int) -> None:
        """Compares the newest checkpoint with that of this training.

        Args:
          session: unused.
          global_step_value: unused.
        """
        newest = tf.train.latest_checkpoint(self._directory)
        if self._newest and newest and newest != self._newest and not self._told:
            self._told = True
            tf.logging.warning(
                "%s was written since this training wrote %s: another program writes to the same "
                "model_dir. Each deletes and goes on from the other's checkpoints; end one, or "
                "give it a model_dir of its own.",
                newest,
                os.path.basename(self._newest),
            )

    def after_save(self, session: tf.Session, global_step_value: int) -> None:
        """Remembers the newest checkpoint.

        Args:
          session: unused.
          global_step_value: unused.
        """
        self._newest = tf.train.latest_checkpoint(self._directory)

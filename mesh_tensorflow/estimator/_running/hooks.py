"""Hooks that an estimator adds to a session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._progress import Progress

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
    """Returns hooks with the checkpoint savers last.

    A saver saves a checkpoint as soon as a session is created; other hooks, such as copying masters
    to slices, have to run before.

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
          text: the message.
          step: the step with this loss.
        """
        super().__init__(text)
        self.text, self.step = text, step

    def __str__(self) -> str:
        return self.text


class NanLossHook(tf.train.SessionRunHook):
    """Stops training if the loss is NaN, and saves the variables.

    The variables are saved in the directory "nan" of the model directory, so that training resumes
    from the last checkpoint before.
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
          loss: a scalar tf.Tensor.
          step: a tf.Tensor, the global step after each step.
          scaffold: the Scaffold whose saver is used.
          model_dir: the model directory, or None to save nothing.
          listeners: a function that returns the listeners of the savers of the training.
          fail_on_nan_loss: whether to raise an error instead of ending training with a warning.
        """
        self._fetches = {"loss": loss, "step": step}
        self._scaffold, self._model_dir, self._listeners = scaffold, model_dir, listeners
        self._fail = fail_on_nan_loss

    def before_run(
        self, run_context: tf.train.SessionRunContext
    ) -> Optional[tf.train.SessionRunArgs]:
        """Returns the fetches of a step.

        Args:
          run_context: ignored.

        Returns:
          SessionRunArgs.
        """
        return tf.train.SessionRunArgs(self._fetches)

    def after_run(
        self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
    ) -> None:
        """Checks the loss.

        Args:
          run_context: the context of the step.
          run_values: the loss and the step.

        Raises:
          NanLossDuringTrainingError: the loss is not a number.
        """
        if not np.isnan(run_values.results["loss"]):
            return
        step = int(run_values.results["step"])
        saved = self._save(run_context.session, step)
        before = checkpoint_files.latest(self._model_dir) if self._model_dir else None
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
        # The saver of the training itself would count this checkpoint as its own.
        saver = tf.train.Saver(saver_def=self._scaffold.saver.as_saver_def())
        return saver.save(session, path, global_step=step, write_meta_graph=False)


class StopAfterBatches(tf.train.SessionRunHook):
    """Counts the batches of an evaluation, shows them, and stops it after a given number."""

    def __init__(self, batches: Optional[int], show: bool = True) -> None:
        """Creates a StopAfterBatches.

        Args:
          batches: the number of batches, or None for all.
          show: whether a terminal shows how far the evaluation is.
        """
        self._batches = batches
        self._line: Optional[Progress] = None
        if show and sys.stderr.isatty():
            self._line = Progress(batches, "evaluate", leave=False)
        self.done = 0

    def after_run(
        self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
    ) -> None:
        """Counts the batch.

        Args:
          run_context: the context of the batch.
          run_values: ignored.
        """
        self.done += 1
        if self._line is not None:
            self._line.update()
        if self._batches is not None and self.done >= self._batches:
            run_context.request_stop()

    def close(self) -> None:
        """Ends the line of the terminal; also called when the evaluation failed."""
        if self._line is not None:
            self._line.close()


class SummaryWritersHook(tf.train.SessionRunHook):
    """Initializes the writers of tf.compat.v2.summary in a graph, and flushes them at the end."""

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
        """Initializes the writers.

        Args:
          session: the new session.
          coord: ignored.
        """
        session.run(self._initializers)

    def end(self, session: tf.Session) -> None:
        """Flushes the writers.

        Args:
          session: the session.
        """
        session.run(self._flush)


class OtherWriterListener(tf.train.CheckpointSaverListener):
    """Warns once if another program writes checkpoints to the directory of a training."""

    def __init__(self, directory: str) -> None:
        """Creates a listener.

        Args:
          directory: the model directory.
        """
        self._directory = directory
        self._newest: Optional[str] = None  # as of the last save of this training
        self._told = False

    def before_save(self, session: tf.Session, global_step_value: int) -> None:
        """Compares the newest checkpoint with the last one of this training.

        Args:
          session: ignored.
          global_step_value: ignored.
        """
        newest = checkpoint_files.latest(self._directory)
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
        """Records the newest checkpoint.

        Args:
          session: ignored.
          global_step_value: ignored.
        """
        self._newest = checkpoint_files.latest(self._directory)

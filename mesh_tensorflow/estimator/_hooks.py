"""Hooks of monitored sessions: progress, NaN losses, checkpoints, summaries, profiles."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Optional, TextIO, Union

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.client import timeline

from mesh_tensorflow import checkpoint
from mesh_tensorflow._lowering.lowering import Lowering
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._progress import Progress
from mesh_tensorflow.ops._variable import MtfCheckpointSaverListener


class _LossHook(tf.train.SessionRunHook):
    """Sees the loss and the number of each step."""

    def __init__(self, loss: tf.Tensor, step: tf.Tensor) -> None:
        """Creates a hook.

        Args:
          loss: a scalar tf.Tensor.
          step: a tf.Tensor, the global step after each step.
        """
        self._fetches = {"loss": loss, "step": step}

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


class ProgressHook(_LossHook):
    """Reports the step, steps/s, the loss and the remaining time."""

    def __init__(
        self,
        loss: tf.Tensor,
        step: tf.Tensor,
        every_n_steps: Optional[int],
        last_step: Optional[int] = None,
        stream: Optional[TextIO] = None,
    ) -> None:
        """Creates a ProgressHook.

        Args:
          loss: a scalar tf.Tensor.
          step: a tf.Tensor, the global step after each step.
          every_n_steps: steps between log lines; None for no reports at all.
          last_step: the last step of the training, or None if it is unknown.
          stream: the stream of the live line, if it is a terminal; standard error by default.
        """
        super().__init__(loss, step)
        self._every = every_n_steps
        self._last_step = last_step
        self._stream = sys.stderr if stream is None else stream
        self._live = bool(every_n_steps) and self._stream.isatty()
        self._line: Optional[Progress] = None
        self._since = (0.0, 0)  # time and step of the last report
        self._first = 0

    def after_run(
        self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
    ) -> None:
        """Reports progress if a report is due.

        Args:
          run_context: ignored.
          run_values: the loss and the step.
        """
        if not self._every:
            return
        step, loss = int(run_values.results["step"]), float(run_values.results["loss"])
        is_first = self._line is None
        if self._line is None:
            # The first report is after a step, and training may go on from a checkpoint. Lines of a
            # log are below.
            self._line = Progress(
                self._last_step, "train", stream=self._stream, start=step - 1, show=self._live
            )
        # By the difference, as one run of the session may do several steps.
        self._line.update(step - self._line.done, loss=loss)
        if self._live:
            return
        now = time.monotonic()
        if is_first:
            # It has no report before it, from which its rate could be counted.
            self._first, self._since = step, (now, step)
            tf.logging.info("loss = %.7g, step = %d", loss, step)
            return
        since, reported = self._since
        # A run may do several steps, so a multiple is passed rather than hit.
        if (step - self._first) // self._every > (reported - self._first) // self._every:
            self._since = (now, step)
            rate = self._line.rate() or 0.0
            rest = [f"{now - since:.3f} sec", f"{rate:.4g} steps/s"]
            if self._last_step and rate:
                left = max(0, self._last_step - step) / rate
                rest.append(f"ETA {datetime.timedelta(seconds=round(left))}")
            end = f" of {self._last_step}" if self._last_step else ""
            tf.logging.info("loss = %.7g, step = %d%s (%s)", loss, step, end, ", ".join(rest))

    def end(self, session: tf.Session) -> None:
        """Ends the live line.

        Args:
          session: ignored.
        """
        self.close()

    def close(self, stopped: bool = False) -> None:
        """Ends the live line; also called when training failed.

        Args:
          stopped: whether training failed.
        """
        if self._line is not None:
            self._line.close(stopped)


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
    # The sort is stable, so all other hooks keep their order.
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

    # TensorFlow's error has the same words each time, and leaves out what it is given.
    def __str__(self) -> str:
        return self.text


class NanLossHook(_LossHook):
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
        savers: Sequence[tf.train.CheckpointSaverHook] = (),
        fail_on_nan_loss: bool = True,
    ) -> None:
        """Creates a NanLossHook.

        Args:
          loss: a scalar tf.Tensor.
          step: a tf.Tensor, the global step after each step.
          scaffold: the Scaffold whose saver is used.
          model_dir: the model directory, or None to save nothing.
          savers: the savers of the training, which do not save the step then.
          fail_on_nan_loss: whether to raise an error instead of ending training with a warning.
        """
        super().__init__(loss, step)
        self._scaffold, self._model_dir, self._savers = scaffold, model_dir, savers
        self._fail = fail_on_nan_loss

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
        for saver in self._savers:
            # As if they had saved it: training ends in order, and they would save its last step.
            timer = getattr(saver, "_timer", None)
            if timer is not None:
                timer.update_last_triggered_step(step)
        run_context.request_stop()

    def _save(self, session: tf.Session, step: int) -> Optional[str]:
        if self._model_dir is None:
            return None
        # As the savers do: a listener may first have to copy slices to the masters that are saved.
        for saver in self._savers:
            # TensorFlow has no public way to get the listeners.
            for listener in saver._listeners:
                listener.before_save(session, step)
        path = os.path.join(self._model_dir, NAN_DIRECTORY, "model.ckpt")
        tf.io.gfile.makedirs(os.path.dirname(path))
        # The saver of the training itself would count this checkpoint as its own.
        own = tf.train.Saver(saver_def=self._scaffold.saver.as_saver_def())
        return own.save(session, path, global_step=step, write_meta_graph=False)


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

    # Where TensorFlow keeps the initializers of writers in a graph; it has no public name for it.
    COLLECTION = "_SUMMARY_WRITER_V2"

    def __init__(self) -> None:
        self._initializers: list[Any] = []
        self._flush: list[Any] = []

    def begin(self) -> None:
        """Finds the writers."""
        self._initializers = tf.get_collection(self.COLLECTION)
        with tf.control_dependencies(None):
            # What initializes a writer has its resource as the first input.
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
        # Each save of this training sets `_newest`, so another one is not of its making.
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


class ProfileHook(tf.train.SessionRunHook):
    """Writes timelines of operations and devices for some steps.

    The trace of a step is `<output_dir>/trace-<step>.json`, in the format of Chrome: open it at
    https://ui.perfetto.dev, or in Chrome at chrome://tracing. Traced steps are slower.
    """

    def __init__(
        self,
        output_dir: Union[str, os.PathLike[str]],
        every_n_steps: Optional[int] = None,
        steps: Optional[Iterable[int]] = None,
        show_memory: bool = False,
    ) -> None:
        """Creates a ProfileHook.

        Args:
          output_dir: the directory of the traces.
          every_n_steps: trace steps whose number is a multiple of this.
          steps: the numbers of the steps to trace; the first step of a new model is 1.
          show_memory: whether to trace allocations as well.

        Raises:
          ValueError: not exactly one of `every_n_steps` and `steps` is given, or a number is not
            positive.
        """
        if (every_n_steps is None) == (steps is None):
            raise ValueError(
                "ProfileHook: give every_n_steps=, such as 1000, or steps=, such as [10, 11]"
            )
        self._steps = None if steps is None else frozenset(steps)
        smallest = every_n_steps if self._steps is None else min(self._steps, default=1)
        if smallest is None or smallest <= 0:
            raise ValueError(f"ProfileHook: steps count from 1, but {smallest} is given")
        self._every = every_n_steps
        self._output_dir = os.fspath(output_dir)
        self._show_memory = show_memory
        self._step = 0

    def begin(self) -> None:
        """Creates the directory."""
        tf.io.gfile.makedirs(self._output_dir)

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Reads the global step.

        Args:
          session: the new session.
          coord: ignored.
        """
        # Also in a session that replaces a failed one, and goes on from an earlier checkpoint.
        global_step = tf.train.get_global_step(session.graph)
        self._step = 0 if global_step is None else int(session.run(global_step))

    def _is_chosen(self) -> bool:
        if self._steps is not None:
            return self._step in self._steps
        assert self._every is not None
        return self._step % self._every == 0

    def before_run(
        self, run_context: tf.train.SessionRunContext
    ) -> Optional[tf.train.SessionRunArgs]:
        """Requests a trace, if this step is to be traced.

        Args:
          run_context: ignored.

        Returns:
          SessionRunArgs.
        """
        # The global step counts the steps that are done, and this one is the next.
        self._step += 1
        if not self._is_chosen():
            return None
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        return tf.train.SessionRunArgs(None, options=options)

    def after_run(
        self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
    ) -> None:
        """Writes the trace.

        Args:
          run_context: ignored.
          run_values: the results of the step, with the trace.
        """
        if not self._is_chosen():
            return
        trace = timeline.Timeline(run_values.run_metadata.step_stats)
        path = os.path.join(self._output_dir, f"trace-{self._step}.json")
        with tf.io.gfile.GFile(path, "w") as file:
            file.write(trace.generate_chrome_trace_format(show_memory=self._show_memory))
        tf.logging.info("trace of step %d in %s", self._step, path)


GRAPH_FILE = "graph.pbtxt"
_CHECKPOINT_HOURS = 2


class SaverHook(tf.train.CheckpointSaverHook):
    """A CheckpointSaverHook that takes less time for graph.pbtxt.

    The hook of TensorFlow formats the graph in Python, which takes 1.2 s for T5-small's, before
    the first step. Protocol buffers have a text of their own, of the same messages, in 0.14 s.
    """

    def __init__(
        self, checkpoint_dir: Optional[str], *, save_graph_def: bool = True, **settings: Any
    ):
        """Creates a SaverHook.

        Args:
          checkpoint_dir: the directory of the checkpoints.
          save_graph_def: whether graph.pbtxt is written, and a `.meta` beside each checkpoint.
          **settings: other arguments of a CheckpointSaverHook.
        """
        super().__init__(checkpoint_dir, save_graph_def=False, **settings)
        self._directory = checkpoint_dir if save_graph_def else None

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Writes the graph, and what CheckpointSaverHook does."""
        if self._directory is not None:
            graph_def = tf.get_default_graph().as_graph_def(add_shapes=True)
            tf.io.gfile.makedirs(self._directory)
            with tf.io.gfile.GFile(os.path.join(self._directory, GRAPH_FILE), "w") as file:
                file.write(str(graph_def))
        # TensorFlow's hook has one flag for graph.pbtxt, which it would write here a second time,
        # and for the graph beside each checkpoint.
        self._save_graph_def = False
        # As in TensorFlow, the graph is there before the first checkpoint, which this saves.
        super().after_create_session(session, coord)

    def _save(self, session: tf.Session, step: int) -> Any:
        # For tf.train.import_meta_graph, which needs no code of the model.
        self._save_graph_def = self._directory is not None
        return super()._save(session, step)


def saver_hook(
    lowering: Lowering,
    directory: Optional[str],
    save_steps: Optional[int],
    max_to_keep: Optional[int] = 5,
) -> SaverHook:
    """Returns a hook that saves the variables of the tf graph, with those of a mesh.

    Args:
      lowering: the Lowering of the training step.
      directory: the directory of the checkpoints.
      save_steps: steps from one checkpoint to the next.
      max_to_keep: how many checkpoints are kept, besides one of each two hours; None for all.
    """
    saver = checkpoint.Saver(
        tf.global_variables(),
        sharded=True,
        max_to_keep=max_to_keep,
        keep_checkpoint_every_n_hours=_CHECKPOINT_HOURS,
        # So that the directory can be moved with its checkpoints.
        save_relative_paths=True,
    )
    # From here a session takes its saver, and otherwise makes another one.
    tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
    return SaverHook(
        directory,
        save_steps=save_steps,
        saver=saver,
        # A saver knows the masters alone; before each save this gives them the values of the
        # slices.
        listeners=[MtfCheckpointSaverListener(lowering)],
    )

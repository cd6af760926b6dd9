"""ProfileHook: traces of single steps."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Optional, Union

import tensorflow.compat.v1 as tf
from tensorflow.python.client import timeline

__all__ = ["ProfileHook"]


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

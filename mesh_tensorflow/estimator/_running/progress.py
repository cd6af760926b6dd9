"""ProgressHook: reports progress as one live line in a terminal, or as log lines."""

from __future__ import annotations

import datetime
import sys
import time
from typing import Optional, TextIO

import tensorflow.compat.v1 as tf

from mesh_tensorflow._progress import Progress

__all__ = ["ProgressHook"]

_SMOOTHING = 0.8  # of steps/s between reports


class ProgressHook(tf.train.SessionRunHook):
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
        self._fetches = {"loss": loss, "step": step}
        self._every = every_n_steps
        self._last_step = last_step
        self._stream = sys.stderr if stream is None else stream
        self._live = bool(every_n_steps) and self._stream.isatty()
        self._line: Optional[Progress] = None
        self._rate: Optional[float] = None
        self._since: Optional[tuple[float, int]] = None  # time and step of the last report
        self._first: Optional[int] = None

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
        """Reports progress if a report is due.

        Args:
          run_context: ignored.
          run_values: the loss and the step.
        """
        if not self._every:
            return
        step, loss = int(run_values.results["step"]), float(run_values.results["loss"])
        if self._live:
            self._show(step, loss)
        else:
            self._log(step, loss)

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

    def _show(self, step: int, loss: float) -> None:
        if self._line is None:
            self._line = Progress(self._last_step, "train", stream=self._stream, start=step - 1)
        self._line.update(step - self._line.done, loss=loss)

    def _log(self, step: int, loss: float) -> None:
        now = time.monotonic()
        if self._since is None:
            self._first, self._since = step, (now, step)
            tf.logging.info("loss = %.7g, step = %d", loss, step)
            return
        assert self._every is not None and self._first is not None
        seconds, steps = now - self._since[0], step - self._since[1]
        if (step - self._first) // self._every > (self._since[1] - self._first) // self._every:
            self._since = (now, step)
            self._update_rate(steps / max(seconds, 1e-9))
            end = f" of {self._last_step}" if self._last_step else ""
            rest = ", ".join([f"{seconds:.3f} sec", f"{self._rate:.4g} steps/s", *self._eta(step)])
            tf.logging.info("loss = %.7g, step = %d%s (%s)", loss, step, end, rest)

    def _update_rate(self, rate: float) -> None:
        old = rate if self._rate is None else self._rate
        self._rate = _SMOOTHING * old + (1 - _SMOOTHING) * rate

    def _eta(self, step: int) -> list[str]:
        if not self._last_step or not self._rate:
            return []
        left = max(0, self._last_step - step) / self._rate
        return [f"ETA {datetime.timedelta(seconds=round(left))}"]

"""Reports the progress of the MNIST example after each epoch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The result of an epoch: the mean training loss and, if it was tested, the test accuracy."""

    number: int
    loss: float
    accuracy: Optional[float]
    seconds: float


class Losses(tf.train.SessionRunHook):
    """Collects the loss of each step."""

    def __init__(self, loss: str) -> None:
        """Initializes the hook; `loss` is the name of the loss tensor."""
        self._loss = loss
        self.values: list[float] = []

    def before_run(self, run_context: Any) -> Any:
        """Requests the loss of the step."""
        return tf.train.SessionRunArgs(run_context.session.graph.get_tensor_by_name(self._loss))

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Records the loss of a step."""
        self.values.append(float(run_values.results))


class Report(tf.train.CheckpointSaverListener):
    """Runs tests after epochs, prints a line for each epoch, and records it in `history`."""

    def __init__(
        self, steps: int, epochs: int, between: int, losses: Losses, test: Callable[[], float]
    ) -> None:
        """Initializes the listener.

        Args:
          steps: the number of steps in an epoch.
          epochs: the total number of epochs.
          between: the number of epochs between tests.
          losses: the losses of the steps.
          test: returns the accuracy of the latest checkpoint.
        """
        self.history: list[Epoch] = []
        self._steps, self._epochs, self._between = steps, epochs, between
        self._losses, self._test = losses, test
        self._start = time.perf_counter()

    def after_save(self, session: tf.Session, global_step_value: int) -> None:
        """Reports an epoch if the checkpoint was saved at the end of one."""
        number, rest = divmod(global_step_value, self._steps)
        if self._losses.values and not rest:
            is_tested = number == self._epochs or not number % self._between
            accuracy = self._test() if is_tested else None
            loss = float(np.mean(self._losses.values))
            seconds = time.perf_counter() - self._start
            self.history.append(Epoch(number, loss, accuracy, seconds))
            print_epoch(self.history[-1], self._epochs)
            self._losses.values.clear()
        if not self._losses.values:
            self._start = time.perf_counter()


def print_epoch(epoch: Epoch, epochs: int) -> None:
    """Prints the result of an epoch.

    Args:
      epoch: the result.
      epochs: the total number of epochs.
    """
    tested = "" if epoch.accuracy is None else f"  test accuracy {epoch.accuracy:.2%}"
    print(
        f"epoch {epoch.number}/{epochs}  loss {epoch.loss:.4f}{tested}  {epoch.seconds:.1f} s",
        flush=True,
    )

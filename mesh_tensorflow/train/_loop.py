"""The loop of a training run: steps, evaluations, checkpoints, callbacks and the progress line."""

from __future__ import annotations

import dataclasses
import io
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._progress import Progress
from mesh_tensorflow.train._engine import Engine
from mesh_tensorflow.train._input.data import Batch, Source
from mesh_tensorflow.train._rates import SHORT_NAMES
from mesh_tensorflow.train._signals import Signals
from mesh_tensorflow.train.callbacks import Callback, Run

__all__ = ["Loop", "NotANumberError"]


_NO_DATA = "the data ended"


class NotANumberError(ValueError, ArithmeticError):
    """The loss is not a number, or infinite.

    >>> issubclass(mtf.train.NotANumberError, ValueError)
    True
    """


@dataclasses.dataclass
class Loop:
    """A run, and what it needs.

    Attributes:
      engine: carries out the steps.
      run: the state that callbacks see.
      source: the training data.
      eval_source: the evaluation data, or None.
      saves: whether this process saves checkpoints.
      eval_every: steps between evaluations, or None: only at the end.
      save_every: steps between checkpoints.
      log_every: steps between logs.
      callbacks: the callbacks.
      show: whether to write a progress line and messages.
      rates: returns further values of logs from a number of steps and seconds.
      history: the records of the logs.
      evaluations: the records of the evaluations.
    """

    engine: Engine
    run: Run
    source: Source
    eval_source: Optional[Source]
    saves: bool
    eval_every: Optional[int]
    save_every: int
    log_every: int
    callbacks: Sequence[Callback]
    show: bool
    rates: Callable[[int, float], Mapping[str, float]]
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    evaluations: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def say(self, text: str) -> None:
        """Writes a message to the standard error stream, unless the run is silent."""
        if self.show:
            print(text, file=sys.stderr, flush=True)

    def call(self, event: str, *args: Any) -> None:
        """Calls a method of all callbacks."""
        for callback in self.callbacks:
            getattr(callback, event)(self.run, *args)

    def train(self, batches: Iterator[Batch]) -> None:
        """Trains from `run.step` to `run.steps`, or until something stops the run.

        Args:
          batches: the batches from the next step on.

        Raises:
          NotANumberError: the loss is not a number.
          KeyboardInterrupt: the user pressed Ctrl-C; a checkpoint is saved first.
        """
        run = self.run
        self.call("on_begin")
        try:
            with Signals() as signals, self._progress() as progress:
                self._steps(batches, signals, progress)
                self._end()
        finally:
            self.call("on_end")
        if signals.received is not None:
            self.engine.finish()
            self.say(self._how_to_go_on(signals.name))
            raise signals.error(f"training stopped at step {run.step} of {run.steps}")
        if run.stopped:
            self.say(f"stopped at step {run.step} of {run.steps}: {run.stopped}")

    def _progress(self) -> Progress:
        stream = None if self.show else io.StringIO()
        return Progress(self.run.steps, "train", start=self.run.step, stream=stream)

    def _steps(self, batches: Iterator[Batch], signals: Signals, progress: Progress) -> None:
        run = self.run
        values: Mapping[str, float] = {}
        logged, since, ended = run.step, time.monotonic(), False
        while run.step < run.steps and not ended:
            batch = next(batches, None)
            if batch is None:
                run.stop(f"{_NO_DATA} after {run.step} steps")
                ended = True
            else:
                values = self.engine.train(batch)
                run.step += 1
                self._check(values)
                self.call("on_step", values)
                ended = self._ends(signals)
            last = ended or run.step == run.steps
            if logged < run.step and (run.step % self.log_every == 0 or last):
                now = time.monotonic()
                rates = self.rates(run.step - logged, max(now - since, 1e-9))
                logged, since = run.step, now
                self._log(values, rates)
                shown = {SHORT_NAMES[n]: v for n, v in rates.items() if n in SHORT_NAMES}
                progress.update(0, **shown)
            if batch is not None:
                progress.update(1, **{n: v for n, v in values.items() if n != "learning_rate"})
            if not last and self.eval_every and run.step % self.eval_every == 0:
                since += self._evaluate()
                ended = self._ends(signals)
            if run.step % self.save_every == 0 and run.step < run.steps and not ended:
                since += self._save()

    def _ends(self, signals: Signals) -> bool:
        """Returns whether the run ends after this step; several processes agree on one."""
        if signals.received is not None:
            self.run.stop(signals.name)
        ends = self.engine.stops(self.run.step, bool(self.run.stopped))
        if ends:
            self.run.stop("another process was asked to stop")
        return ends

    def _end(self) -> None:
        """Evaluates at the end, unless something stopped the run, and saves."""
        stopped = self.run.stopped
        evaluated = bool(self.evaluations) and self.evaluations[-1]["step"] == self.run.step
        if not evaluated and (not stopped or stopped.startswith(_NO_DATA)):
            self._evaluate()
        self._save()
        self.engine.settle(self.run.step)
        if self.run.directory is not None and not self.saves:
            self.run.checkpoint = tf.train.latest_checkpoint(self.run.directory)

    def _check(self, values: Mapping[str, float]) -> None:
        loss = values.get("loss", 0.0)
        if math.isfinite(loss):
            return
        raise NotANumberError(
            f"the loss is {loss} at step {self.run.step}. "
            + (
                f"The last checkpoint is {self.run.checkpoint}; no weights were saved since then. "
                if self.run.checkpoint
                else ""
            )
            + "Run the step within mtf.debug.nan_checks() to see which operation made the first "
            "value that is not a number; often a smaller learning rate or clip_norm helps"
        )

    def _log(self, values: Mapping[str, float], rates: Mapping[str, float]) -> None:
        record = {**values, **rates}
        self.history.append({"step": self.run.step, **record})
        self.call("on_log", record)

    def _evaluate(self) -> float:
        """Evaluates if there are data for it; returns the seconds that it took."""
        if self.eval_source is None:
            return 0.0
        start = time.monotonic()
        stream = None if self.show else io.StringIO()
        with Progress(None, "evaluate", unit="batch", stream=stream, leave=False) as progress:

            def counted(batches: Iterator[Batch]) -> Iterator[Batch]:
                for batch in batches:
                    yield batch
                    progress.update()

            values = self.engine.evaluate(counted(self.eval_source.once()))
        if not values:
            raise ValueError("fit: eval_data has no batches")
        self.evaluations.append({"step": self.run.step, **values})
        text = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self.say(f"step {self.run.step}: evaluation: {text}")
        self.call("on_evaluation", values)
        return time.monotonic() - start

    def _save(self) -> float:
        """Saves a checkpoint if there is a directory; returns the seconds that it took."""
        if self.run.directory is None or not self.saves:
            return 0.0
        start = time.monotonic()
        tf.gfile.MakeDirs(self.run.directory)
        self.run.checkpoint = self.engine.save(self.run.directory, self.run.step)
        self.call("on_checkpoint", self.run.checkpoint)
        return time.monotonic() - start

    def _how_to_go_on(self, name: str) -> str:
        run = self.run
        if run.checkpoint is None:
            return (
                f"{name}: stopped at step {run.step} of {run.steps}; nothing is saved, as fit was "
                "given no directory. fit(directory=...) saves, and goes on from there"
            )
        return (
            f"{name}: stopped at step {run.step} of {run.steps}, saved as {run.checkpoint}. Run "
            "the same program again to go on from there"
        )

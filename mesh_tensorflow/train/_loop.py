"""The loop of a training: steps, rates of what is done, and its result."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np

from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._progress import Progress
from mesh_tensorflow._stop_signals import StopSignals
from mesh_tensorflow.auto_mtf.hardware import Hardware, hardware_profile
from mesh_tensorflow.train._data import Batch, Features, Source
from mesh_tensorflow.train._engine import Engine
from mesh_tensorflow.train._saving import Best, Checkpoints, not_a_number
from mesh_tensorflow.train.callbacks import Callback, Run
from mesh_tensorflow.train.metrics import flops_per_step, model_flops_utilization


@dataclasses.dataclass
class Result:
    """What `mtf.train.fit` returns.

    >>> mtf.train.Result(2, [{"step": 2, "loss": 0.5}], [], None, None, {}).losses
    [0.5]

    Attributes:
      step: the number of steps that are done, those of earlier runs included.
      history: a dictionary for each log: "step", the loss and the metrics of the step, and rates.
      evaluations: a dictionary for each evaluation: "step", and the means of loss and metrics.
      stopped: why the run ended before its last step, or None.
      checkpoint: the path of the last checkpoint, or None.
      variables: the final value of each variable by name, as NumPy arrays.
      best: the path of the best checkpoint with `fit(keep_best=...)`, or None.
      layout: the layout rules, such as "batch:rows;hidden:cols"; None of a step function.
    """

    step: int
    history: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    stopped: Optional[str]
    checkpoint: Optional[str]
    variables: dict[str, np.ndarray]
    best: Optional[str] = None
    layout: Optional[str] = None

    @property
    def final(self) -> dict[str, float]:
        """The last record of `history`, and that of `evaluations` with "eval_" before its names."""
        last: dict[str, float] = {"step": self.step, **(self.history[-1] if self.history else {})}
        if self.evaluations:
            last.update({f"eval_{n}": v for n, v in self.evaluations[-1].items() if n != "step"})
        return last

    @property
    def losses(self) -> list[float]:
        """The losses of `history`."""
        return [record["loss"] for record in self.history if "loss" in record]

    def __repr__(self) -> str:
        values = [f"{n}={v:.4g}" for n, v in self.final.items() if n != "step"]
        stopped = [f"stopped={self.stopped!r}"] if self.stopped else []
        best = [f"best={self.best!r}"] if self.best else []
        fields = [f"step={self.step}", *values, f"checkpoint={self.checkpoint!r}", *best, *stopped]
        return f"Result({', '.join(fields)})"


def packed(result: Result) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Returns a Result as values that JSON can say, and arrays, for another process."""
    values = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    for name in ("history", "evaluations"):
        # JSON has none of NumPy's numbers, which a metric may be.
        values[name] = [{n: float(v) for n, v in record.items()} for record in values[name]]
    variables = values["variables"]
    return {**values, "variables": list(variables)}, list(variables.values())


def unpacked(values: dict[str, Any], arrays: Sequence[np.ndarray]) -> Result:
    """Returns the Result that `packed` was given."""
    for record in [*values["history"], *values["evaluations"]]:
        # `packed` made floats of all numbers, of steps too.
        record["step"] = int(record["step"])
    return Result(**{**values, "variables": dict(zip(values["variables"], arrays))})


# What the progress line calls them; the number of steps per second is there anyway.
SHORT_NAMES = {
    "examples_per_second": "examples/s",
    "tokens_per_second": "tokens/s",
    "model_flops_utilization": "MFU",
}


class Rates:
    """Returns the rates of some steps."""

    def __init__(
        self,
        engine: Engine,
        features: Features,
        tokens_per_batch: Optional[int],
        hardware: Union[str, Hardware, None],
    ):
        """Creates the rates of a run.

        Args:
          engine: the engine, whose program says how much a step computes.
          features: the features, whose batch dimension says how many examples a step has.
          tokens_per_batch: the number of tokens of a step, or None.
          hardware: the profile of a processor, or None.
        """
        self._engine = engine
        self._examples = None if features.shapes is None else features.batch_dim.size
        self._tokens = tokens_per_batch
        self._hardware = None if hardware is None else hardware_profile(hardware)
        self._flops: Optional[int] = None

    def __call__(self, steps: int, seconds: float) -> Mapping[str, float]:
        """Returns rates by name.

        Args:
          steps: a number of steps.
          seconds: how long they took.
        """
        rates = {"steps_per_second": steps / seconds}
        if self._examples is not None:
            rates["examples_per_second"] = steps * self._examples / seconds
        if self._tokens is not None:
            rates["tokens_per_second"] = steps * self._tokens / seconds
        lowered = self._engine.lowered
        if self._hardware is not None and lowered is not None:
            mesh = lowered.graph.operations[0].mesh
            impl = lowered.lowering.requested_impl(mesh)
            # Counted once, as it takes a walk over all operations of the program.
            if self._flops is None:
                self._flops = flops_per_step(lowered.graph, impl)
            rates["model_flops_utilization"] = model_flops_utilization(
                self._flops, seconds / steps, self._hardware, impl.size
            )
        return rates


@dataclasses.dataclass
class Loop:
    """A run, and what it needs.

    Attributes:
      engine: carries out the steps.
      run: the state that callbacks see.
      source: the training data.
      eval_source: the evaluation data, or None.
      checkpoints: what saves checkpoints; None if nothing, or another process, does.
      best: the best checkpoint of `run.directory`, whoever saves; or None.
      alone: whether there is one process.
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
    checkpoints: Optional[Checkpoints]
    best: Optional[Best]
    alone: bool
    eval_every: Optional[int]
    save_every: int
    log_every: int
    callbacks: Sequence[Callback]
    show: bool
    rates: Callable[[int, float], Mapping[str, float]]
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    evaluations: list[dict[str, float]] = dataclasses.field(default_factory=list)
    # The step of the last log, and when that was.
    _logged: int = dataclasses.field(default=0, init=False)
    _since: float = dataclasses.field(default=0.0, init=False)

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
        # The checkpoint that a run goes on from is not written again if no step follows.
        if self.checkpoints is not None and run.checkpoint is not None:
            self.checkpoints.last, self.checkpoints.step = run.checkpoint, run.step
        if self.best is not None and run.directory is not None:
            self.best.begin(run.directory, run.step)
        # Before callbacks begin, any of which may look at the variables then.
        run.reads(self.engine.values)
        begun: list[Callback] = []
        try:
            for callback in self.callbacks:
                callback.on_begin(run)
                begun.append(callback)
            with StopSignals() as signals:
                # A callback may stop the run as it begins.
                stops = self._asked_to_stop(signals)
                if run.step < run.steps and not stops:
                    with Progress(run.steps, "train", start=run.step, show=self.show) as progress:
                        stops = self._steps(batches, signals, progress)
                # Saved before the evaluation, so that nothing is lost if that fails.
                self._save()
                self._end_save()
                # A run that is stopped at its last step is done, and evaluated like any other.
                evaluated = self.evaluations and self.evaluations[-1]["step"] == run.step
                if (not stops or run.step >= run.steps) and not evaluated:
                    self._evaluate(signals)
                # Only one process saves, and others may be here first; afterwards the checkpoint is
                # there for all.
                self.engine.settle(run.step)
                if run.directory is not None and self.checkpoints is None:
                    run.checkpoint = checkpoint_files.latest(run.directory)
                    if self.best is not None:
                        self.best.begin(run.directory, run.step)
        except BaseException as e:
            run.error = e  # for callbacks, which show a run as failed
            # Of a step before the error. A signal that ends the run at once does not wait for it.
            if isinstance(e, Exception):
                self._end_save()
            raise
        finally:
            # Also after an error, such as of another one's beginning: callbacks may hold files or
            # processes that have to be closed.
            for callback in begun:
                callback.on_end(run)
        if signals.received is not None:
            # The others are waited for here: the exit of a process does not do so after an error,
            # as below.
            self.engine.finish()
            self.say(self._how_to_go_on(signals.name))
            # Only now, as the checkpoint is there and callbacks are closed.
            raise signals.error(f"training stopped at step {run.step} of {run.steps}")
        if run.stopped:
            self.say(f"stopped at step {run.step} of {run.steps}: {run.stopped}")

    def _steps(self, batches: Iterator[Batch], signals: StopSignals, progress: Progress) -> bool:
        """Does the steps; returns whether the run was asked to stop."""
        run = self.run
        values: Mapping[str, float] = {}
        self._logged, self._since, stops = run.step, time.monotonic(), False
        while run.step < run.steps and not stops:
            batch = next(batches, None)
            if batch is None:
                run.stop(f"the data ended after {run.step} steps")
                break
            values = self.engine.train(batch)
            run.step += 1
            # Before callbacks and checkpoints see the step: nothing after a NaN is of use.
            loss = values.get("loss", 0.0)
            if not math.isfinite(loss):
                self._end_save()
                raise not_a_number(f"the loss is {loss} at step {run.step}", run.checkpoint)
            self.call("on_step", values)
            # After callbacks, any of which may have asked for it.
            stops = self._asked_to_stop(signals)
            last = stops or run.step == run.steps
            if run.step % self.log_every == 0 or last:
                self._log(values, progress)
            progress.update(1, **{n: v for n, v in values.items() if n != "learning_rate"})
            # After the last step `train` saves and evaluates, so that both are done once.
            if not last and self.eval_every and run.step % self.eval_every == 0:
                self._evaluate(signals)
                # Evaluations take long, and callbacks stop runs by what they show.
                stops = self._asked_to_stop(signals)
            if not last and not stops and run.step % self.save_every == 0:
                self._save()
            self._end_save(wait=False)
        # The data may have ended between two logs.
        if self._logged < run.step:
            self._log(values, progress)
        return stops

    def _asked_to_stop(self, signals: StopSignals) -> bool:
        """Returns whether the run was asked to stop after this step; processes agree on one."""
        if signals.received is not None:
            self.run.stop(signals.name)
        stops = self.engine.stops(self.run.step, bool(self.run.stopped), signals)
        if stops:
            self.run.stop(signals.name or "another process was asked to stop")
        return stops

    def _log(self, values: Mapping[str, float], progress: Progress) -> None:
        now = time.monotonic()
        # Two logs may be at one moment of a coarse clock.
        rates = self.rates(self.run.step - self._logged, max(now - self._since, 1e-9))
        self._logged, self._since = self.run.step, now
        shown = {SHORT_NAMES[n]: v for n, v in rates.items() if n in SHORT_NAMES}
        progress.update(0, **shown)
        record = {**values, **rates}
        self.history.append({"step": self.run.step, **record})
        self.call("on_log", record)

    @contextlib.contextmanager
    def _not_timed(self) -> Iterator[None]:
        """Leaves out what is done within from the time of steps."""
        start = time.monotonic()
        yield
        # The rates in logs are those of training steps, without evaluations and checkpoints.
        self._since += time.monotonic() - start

    def _evaluate(self, signals: StopSignals) -> None:
        """Evaluates if there are data for it.

        A signal ends it without a result, if there is one process; several would have to agree.
        """
        if self.eval_source is None:
            return
        with self._not_timed():
            values = self._evaluation(self.eval_source.once(), signals)
            if self.alone and signals.received is not None:
                return
            if not values:
                raise ValueError(
                    "fit: eval_data gave no batch. An iterator can be read only once: give a "
                    "function that returns it"
                )
            self.evaluations.append({"step": self.run.step, **values})
            text = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            self.say(f"step {self.run.step}: evaluation: {text}")
            self.call("on_evaluation", values)
        if self.checkpoints is not None and self.best is not None and self.best.is_beaten(values):
            self._save(values)

    def _evaluation(self, batches: Iterator[Batch], signals: StopSignals) -> dict[str, float]:
        with Progress(None, "evaluate", unit="batch", leave=False, show=self.show) as progress:

            def counted() -> Iterator[Batch]:
                for batch in batches:
                    if self.alone and signals.received is not None:
                        return
                    yield batch
                    progress.update()

            return self.engine.evaluate(counted())

    def _save(self, best: Optional[Mapping[str, float]] = None) -> None:
        """Saves a checkpoint of a new step, if there is a directory.

        Args:
          best: the means of the evaluation of this step, if it was the best.
        """
        if self.checkpoints is None:
            return
        # One at a time, so that there is one copy of the variables.
        self._end_save()
        if self.checkpoints.step == self.run.step:
            if best is not None:
                self.checkpoints.record_best(best)
            return
        with self._not_timed():
            self._saved_as(self.checkpoints.begin(self.run.step, best))

    def _end_save(self, wait: bool = True) -> None:
        """Ends a save that a thread does, if it is done or is to be waited for."""
        if self.checkpoints is not None:
            with self._not_timed():
                self._saved_as(self.checkpoints.ended(wait))

    def _saved_as(self, path: Optional[str]) -> None:
        if path is not None:
            self.run.checkpoint = path
            self.call("on_checkpoint", path)

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

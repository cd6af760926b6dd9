"""Callbacks: what is done at steps, evaluations and checkpoints of a training run."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import missing_package
from mesh_tensorflow._mesh.variables.checkpoint_files import check_writable
from mesh_tensorflow._paths import write_whole
from mesh_tensorflow._units import plural
from mesh_tensorflow.estimator.export import MODES, is_better
from mesh_tensorflow.estimator.summaries import histograms, scalars

__all__ = [
    "Callback",
    "CsvLog",
    "EarlyStopping",
    "JsonLinesLog",
    "MLflow",
    "Run",
    "TensorBoard",
    "WandB",
]


class Run:
    """The state of a training run, which callbacks see.

    >>> run = mtf.train.Run(10, None, None)
    >>> run.stop("enough")
    >>> run.stopped
    'enough'

    Attributes:
      step: the number of steps that are done.
      steps: the number of steps to do.
      directory: where checkpoints are, or None.
      logdir: where logs are, or None.
      stopped: why the run ends before `steps`, or None.
      checkpoint: the path of the last checkpoint, or None.
      arguments: what `fit` was given that a line can say: numbers, strings, names of functions.
      error: the exception that ends the run, or None.
    """

    def __init__(
        self,
        steps: int,
        directory: Optional[str],
        logdir: Optional[str],
        arguments: Optional[Mapping[str, Any]] = None,
    ):
        """Creates the state of a run that has not begun.

        Args:
          steps: the number of steps to do.
          directory: where checkpoints are, or None.
          logdir: where logs are, or None.
          arguments: what `fit` was given, by name; or None.
        """
        self.step, self.steps = 0, steps
        self.directory, self.logdir = directory, logdir
        self.arguments = dict(arguments or {})
        self.stopped: Optional[str] = None
        self.checkpoint: Optional[str] = None
        self.error: Optional[BaseException] = None
        self._read: Callable[[], dict[str, np.ndarray]] = dict

    def variables(self) -> dict[str, np.ndarray]:
        """Returns the whole value of each variable, slots of optimizers included, by name.

        They are read from all processors, which may take as long as a step.
        """
        return self._read()

    def reads(self, read: Callable[[], dict[str, np.ndarray]]) -> None:
        """Says how the variables of the run are read.

        Args:
          read: returns the whole value of each variable by name.
        """
        self._read = read

    def stop(self, reason: str) -> None:
        """Ends the run after this step; a checkpoint is saved.

        Args:
          reason: what the result and the log say, such as "no improvement".
        """
        # The first reason stays, as it is the one that ended the run.
        self.stopped = self.stopped or reason


class Callback:
    """Base class of callbacks; a subclass overrides what it needs.

    >>> class Losses(mtf.train.Callback):
    ...     def on_step(self, run, values):
    ...         print(run.step, sorted(values))
    >>> Losses().on_step(mtf.train.Run(10, None, None), {"loss": 0.5})
    0 ['loss']
    """

    def on_begin(self, run: Run) -> None:
        """Is called before the first step, with the number of steps of a resumed run.

        Args:
          run: the Run.
        """

    def on_step(self, run: Run, values: Mapping[str, float]) -> None:
        """Is called after each step.

        Args:
          run: the Run.
          values: the loss and the metrics of the step's batch.
        """

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        """Is called every `log_every` steps and after the last.

        Args:
          run: the Run.
          values: those of the step, with the rates since the last call.
        """

    def on_evaluation(self, run: Run, values: Mapping[str, float]) -> None:
        """Is called after each evaluation.

        Args:
          run: the Run.
          values: the means of the loss and the metrics over the evaluation data.
        """

    def on_checkpoint(self, run: Run, path: str) -> None:
        """Is called after a checkpoint has been saved.

        Args:
          run: the Run; with `fit(save_in_background=True)`, it may be some steps further.
          path: the path of the checkpoint.
        """

    def on_end(self, run: Run) -> None:
        """Is called after the last step, also if the run ends by an error.

        Args:
          run: the Run.
        """


@dataclasses.dataclass(eq=False, repr=False)
class EarlyStopping(Callback):
    """Stops a run whose metric does not improve any more.

    >>> stopping = mtf.train.EarlyStopping("loss", patience=1)
    >>> run = mtf.train.Run(10, None, None)
    >>> for loss in (3.0, 2.0, 2.5):
    ...     stopping.on_evaluation(run, {"loss": loss})
    >>> run.stopped
    'loss has not improved on 2 for 1 evaluation'

    Attributes:
      metric: the name of the metric of evaluations.
      patience: the number of evaluations without an improvement after which to stop.
      min_delta: the least difference that is an improvement.
      mode: "min" if less is better, or "max".

    Raises:
      ValueError: `patience` is less than 1, or `mode` is unknown.
    """

    metric: str = "loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: str = "min"

    def __post_init__(self) -> None:
        if self.patience < 1 or self.mode not in MODES:
            raise ValueError(
                'EarlyStopping: patience is at least 1, and mode "min" or "max"; got '
                f"{self.patience} and {self.mode!r}"
            )
        self.best: Optional[float] = None
        self.waited = 0
        self._judged: list[tuple[int, float]] = []  # the step and the value of each evaluation

    def on_begin(self, run: Run) -> None:
        """Begins anew, or goes on from what the evaluations of a resumed run have shown."""
        self.best, self.waited, self._judged = None, 0, []
        # A run that begins anew does not count what an earlier one in its directory has judged.
        judged = read_json(_state_path(run)).get(self._key, []) if run.step else []
        for step, value in judged:
            if step <= run.step:  # the others came after the checkpoint
                # Judged anew and not restored, as `patience` or `min_delta` may have been changed
                # since.
                self._judge(run, step, value)

    def on_evaluation(self, run: Run, values: Mapping[str, float]) -> None:
        """Stops the run if the metric has not improved for `patience` evaluations."""
        value = metric_of(values, self.metric, "EarlyStopping")
        judgment = run.step, value
        # A finished run is evaluated again.
        if run.step >= run.steps and any(
            np.array_equal(judgment, known, equal_nan=True) for known in self._judged
        ):
            return
        self._judge(run, run.step, value)
        path = _state_path(run)
        if path is not None:
            tf.gfile.MakeDirs(os.path.dirname(path))
            # Callbacks for other metrics keep their values in the same file.
            write_whole(path, json.dumps({**read_json(path), self._key: self._judged}))

    @property
    def _key(self) -> str:
        """The name of its values in a file that it may share with others."""
        return f"{self.mode} {self.metric}"

    def _judge(self, run: Run, step: int, value: float) -> None:
        self._judged.append((step, value))
        if is_better(value, self.best, self.mode, self.min_delta):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        if self.waited >= self.patience:
            times = f"{self.patience} {plural('evaluation', self.patience)}"
            on = "" if self.best is None else f" on {self.best:.4g}"
            run.stop(f"{self.metric} has not improved{on} for {times}")


def _state_path(run: Run) -> Optional[str]:
    return run.directory and os.path.join(run.directory, "early_stopping.json")


def metric_of(values: Mapping[str, float], metric: str, who: str) -> float:
    """Returns a metric of an evaluation.

    Args:
      values: the means of the evaluation.
      metric: its name.
      who: what needs it, for the error.

    Raises:
      ValueError: the evaluation lacks it.
    """
    if metric not in values:
        raise ValueError(
            f"{who}: an evaluation has no {metric!r}, only {', '.join(values) or 'nothing'}"
        )
    return values[metric]


def read_json(path: Optional[str]) -> dict[str, Any]:
    """Returns what a file has; nothing if there is none.

    Args:
      path: the path of the file, or None.
    """
    if path is None or not tf.gfile.Exists(path):
        return {}
    with tf.gfile.GFile(path) as file:
        return json.loads(file.read())


class TensorBoard(Callback):
    """Writes the loss, the metrics and the rates for TensorBoard.

    Values of steps are under "train", those of evaluations under "eval". Histograms of weights have
    the names of the variables, and are under "train" too.

    >>> board = mtf.train.TensorBoard("logs", histograms_every=100)  # for fit(callbacks=[board])
    """

    def __init__(self, logdir: Optional[str] = None, histograms_every: Optional[int] = None):
        """Creates the callback.

        Args:
          logdir: where to write; that of the run if None.
          histograms_every: the number of steps between histograms of all variables of more than one
            element; None for none.

        Raises:
          ValueError: `histograms_every` is less than 1.
        """
        if histograms_every is not None and histograms_every < 1:
            raise ValueError(
                f"TensorBoard: histograms_every is {histograms_every}; give a number of steps, at "
                "least 1, or None for no histograms"
            )
        self._logdir = logdir
        self._histograms_every = histograms_every
        self._writers: dict[str, Any] = {}

    def on_begin(self, run: Run) -> None:
        """Sees whether logs can be written, before there are any."""
        logdir = self._logdir or run.logdir or run.directory
        if logdir is not None:
            check_writable(logdir, "fit: logdir")

    def _write(self, run: Run, part: str, values: Sequence[Any]) -> None:
        logdir = self._logdir or run.logdir or run.directory
        if logdir is None:
            raise ValueError("TensorBoard: no logdir: give fit(logdir=...) or TensorBoard(logdir)")
        if part not in self._writers:
            # Runs that begin within a second would otherwise write to one file.
            suffix = f".{os.getpid()}.{run.step}"
            with tf.Graph().as_default():  # eager code has no such writer
                self._writers[part] = tf.summary.FileWriter(
                    os.path.join(logdir, part), filename_suffix=suffix
                )
            # What a run wrote after the checkpoint that this one goes on from is left out.
            start = tf.SessionLog(status=tf.SessionLog.START)
            self._writers[part].add_session_log(start, run.step)
        self._writers[part].add_summary(tf.Summary(value=values), run.step)
        # At once: values that a killed process has not written would be missing from the curves.
        self._writers[part].flush()

    def on_step(self, run: Run, values: Mapping[str, float]) -> None:
        """Writes histograms of the variables, if it is time for them."""
        if self._histograms_every is not None and run.step % self._histograms_every == 0:
            self._write(run, "train", histograms(run.variables()))

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        """Writes the values of a step."""
        self._write(run, "train", scalars(values))

    def on_evaluation(self, run: Run, values: Mapping[str, float]) -> None:
        """Writes the means of an evaluation."""
        self._write(run, "eval", scalars(values))

    def on_end(self, run: Run) -> None:
        """Closes the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}


def has_board(callbacks: Sequence[Callback], logdir: str) -> bool:
    """Returns whether a TensorBoard among callbacks writes to the directory of a run's logs."""
    directories = [callback._logdir for callback in callbacks if isinstance(callback, TensorBoard)]
    return any(
        own is None or os.path.realpath(own) == os.path.realpath(logdir) for own in directories
    )


class _FileLog(Callback):
    """A file with a record for each log and each evaluation; a resumed run goes on with it."""

    _name = ""

    def __init__(self, path: Optional[str] = None):
        """Creates the callback.

        Args:
          path: the path of the file; if None, one in the directory of the run's logs.
        """
        self.path = path
        self._open = ""

    def on_begin(self, run: Run) -> None:
        """Opens the file, and leaves out records after the step that the run goes on from."""
        self._open = self.path or os.path.join(run.logdir or run.directory or "", self._name)
        tf.gfile.MakeDirs(os.path.dirname(self._open) or ".")
        # A run that begins anew begins a new file.
        records = self._read() if run.step and tf.gfile.Exists(self._open) else []
        records = [record for record in records if int(record["step"]) <= run.step]
        if run.step >= run.steps:  # a finished run is only evaluated again
            records = [r for r in records if int(r["step"]) < run.step or not _is_eval(r)]
        self._begin(records)

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        """Adds a record."""
        self._add({"step": run.step, **values})

    def on_evaluation(self, run: Run, values: Mapping[str, float]) -> None:
        """Adds a record, whose names begin with "eval_"."""
        self._add({"step": run.step, **{f"eval_{n}": v for n, v in values.items()}})

    def _append(self, text: str) -> None:
        # Closed again after each record, so that a process that is killed loses none.
        with tf.gfile.GFile(self._open, "a") as file:
            file.write(text)

    def _lines(self) -> list[str]:
        """Returns the lines of the file, each with its end."""
        with tf.gfile.GFile(self._open) as file:
            return io.StringIO(file.read(), newline="").readlines()

    def _begin(self, records: list[dict[str, Any]]) -> None:
        raise NotImplementedError

    def _add(self, record: dict[str, Any]) -> None:
        raise NotImplementedError

    def _read(self) -> list[dict[str, Any]]:
        raise NotImplementedError


def _is_eval(record: Mapping[str, Any]) -> bool:
    # All, as a metric of steps may have such a name, too.
    return all(name.startswith("eval_") for name in record if name != "step")


class JsonLinesLog(_FileLog):
    """Writes a JSON object for each log and each evaluation, one a line: `log.jsonl`.

    >>> mtf.train.JsonLinesLog("run.jsonl").path
    'run.jsonl'
    """

    _name = "log.jsonl"

    def _begin(self, records: list[dict[str, Any]]) -> None:
        write_whole(self._open, "".join(json.dumps(record) + "\n" for record in records))

    def _add(self, record: dict[str, Any]) -> None:
        self._append(json.dumps(record) + "\n")

    def _read(self) -> list[dict[str, Any]]:
        # A process that was killed may have left half a line.
        return [json.loads(line) for line in self._lines() if line.endswith("}\n")]


class CsvLog(_FileLog):
    """Writes a row for each log and each evaluation: `log.csv`, with a column for each name.

    >>> mtf.train.CsvLog("run.csv").path
    'run.csv'
    """

    _name = "log.csv"

    def __init__(self, path: Optional[str] = None):
        """Creates the callback.

        Args:
          path: the path of the file; if None, one in the directory of the run's logs.
        """
        super().__init__(path)
        self._records: list[dict[str, Any]] = []
        self._columns: dict[str, None] = {}

    def _begin(self, records: list[dict[str, Any]]) -> None:
        self._records = records
        self._columns = dict.fromkeys(name for record in records for name in record)
        write_whole(self._open, self._text(records, header=True))

    def _add(self, record: dict[str, Any]) -> None:
        self._records.append(record)
        if record.keys() <= self._columns.keys():
            self._append(self._text([record], header=False))
        else:
            # A new name is a new column in the header, at the file's beginning: all is rewritten.
            self._begin(self._records)

    def _text(self, records: list[dict[str, Any]], header: bool) -> str:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(self._columns))
        if header:
            writer.writeheader()
        writer.writerows(records)
        return text.getvalue()

    def _read(self) -> list[dict[str, Any]]:
        # A process that was killed may have left a part of a row, with a part of a number.
        lines = [line for line in self._lines() if line.endswith("\n")]
        rows = [dict(row) for row in csv.DictReader(lines)]
        return [{n: v for n, v in row.items() if n and v} for row in rows if row.get("step")]


# -- services that show runs


class _Tracker(Callback):
    """A run in a service that shows runs; a resumed training goes on in the same one.

    Values of steps are under "train/", those of evaluations under "eval/".
    """

    _name = ""  # of the package
    _begins = ""  # the function there that begins a run

    def __init__(self, config: Optional[Mapping[str, Any]]) -> None:
        # Now, and not at the first step, before which models are built and weights are loaded.
        try:
            self._package: Any = importlib.import_module(self._name)
        except ImportError as e:
            raise self._missing() from e
        # A folder of that name, as W&B writes one where it runs, is imported as an empty package.
        if not hasattr(self._package, self._begins):
            raise self._missing()
        self._config = dict(config or {})
        self._is_own = False  # whether the run is to be ended with the training

    def _missing(self) -> ImportError:
        install = f"pip install {self._name}"
        return missing_package(f"mtf.train.{type(self).__name__}", self._name, install)

    def on_begin(self, run: Run) -> None:
        """Begins a run there, or goes on in that of a resumed run."""
        where = run.directory or run.logdir
        path = where and os.path.join(where, f"{self._name}_run.json")
        resumed_id = read_json(path).get("id") if run.step else None
        run_id = self._begin(run, resumed_id, {**run.arguments, **self._config})
        if path is not None and run_id != resumed_id:
            tf.gfile.MakeDirs(where)
            write_whole(path, json.dumps({"id": run_id}))

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        """Adds the values of a step."""
        self._add(run, {f"train/{n}": float(v) for n, v in values.items()})

    def on_evaluation(self, run: Run, values: Mapping[str, float]) -> None:
        """Adds the means of an evaluation."""
        self._add(run, {f"eval/{n}": float(v) for n, v in values.items()})

    def _begin(self, run: Run, known: Optional[str], config: Mapping[str, Any]) -> str:
        """Begins a run, or goes on in the known one, with a configuration; returns its id."""
        raise NotImplementedError

    def _add(self, run: Run, values: Mapping[str, float]) -> None:
        raise NotImplementedError


class WandB(_Tracker):
    """Shows a run in Weights & Biases: losses and metrics by step, and what `fit` was given.

    A run that is resumed goes on in the same run there; one that an error ends has failed there. If
    the program has called `wandb.init` itself, that run is used, and left open.

    >>> shown = mtf.train.WandB("digits", group="small")  # doctest: +SKIP
    >>> mtf.train.fit(model_fn, data, steps=100, callbacks=[shown], ...)  # doctest: +SKIP
    """

    _name, _begins = "wandb", "init"

    def __init__(
        self, project: Optional[str] = None, config: Optional[Mapping[str, Any]] = None, **init: Any
    ):
        """Creates the callback.

        Args:
          project: the name of the project; wandb's own choice if None.
          config: values to show with the run, beside the arguments of `fit`.
          **init: further arguments of `wandb.init`, such as `name`, `group`, `tags`, or
            `mode="offline"`.

        Raises:
          ImportError: wandb is not installed.
        """
        super().__init__(config)
        self._init = {**({} if project is None else {"project": project}), **init}
        self._run: Any = None

    def _begin(self, run: Run, known: Optional[str], config: Mapping[str, Any]) -> str:
        self._run = self._package.run
        self._is_own = self._run is None
        if self._is_own:
            same = {} if known is None else {"id": known, "resume": "allow"}
            self._run = self._package.init(**{**same, **self._init})
        self._run.config.update(config, allow_val_change=True)
        # By the steps of the training: W&B's own count only grows, and would leave out the steps
        # that a resumed run does again.
        for part in ("train", "eval"):
            self._run.define_metric(f"{part}/*", step_metric="step")
        return self._run.id

    def _add(self, run: Run, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": run.step})

    def on_end(self, run: Run) -> None:
        """Ends the run there, as failed after an error."""
        if run.stopped:
            self._run.summary["stopped"] = run.stopped
        if self._is_own:
            self._run.finish(exit_code=int(run.error is not None))


class MLflow(_Tracker):
    """Shows a run in MLflow: losses and metrics by step, and what `fit` was given as parameters.

    A run that is resumed goes on in the same run there; one that an error ends has failed there. If
    the program has called `mlflow.start_run` itself, that run is used, and left open.

    >>> shown = mtf.train.MLflow("digits", tracking_uri="sqlite:///runs.db")  # doctest: +SKIP
    >>> mtf.train.fit(model_fn, data, steps=100, callbacks=[shown], ...)  # doctest: +SKIP
    """

    _name, _begins = "mlflow", "start_run"

    def __init__(
        self,
        experiment: Optional[str] = None,
        config: Optional[Mapping[str, Any]] = None,
        tracking_uri: Optional[str] = None,
        **start_run: Any,
    ):
        """Creates the callback.

        Args:
          experiment: the name of the experiment, which is made if it is not there; MLflow's own
            choice if None.
          config: values to show with the run, beside the arguments of `fit`.
          tracking_uri: the server, the database or the directory; MLflow's own choice if None.
          **start_run: further arguments of `mlflow.start_run`, such as `run_name` or `tags`.

        Raises:
          ImportError: MLflow is not installed.
        """
        super().__init__(config)
        self._experiment, self._uri, self._start_run = experiment, tracking_uri, start_run

    def _begin(self, run: Run, known: Optional[str], config: Mapping[str, Any]) -> str:
        mlflow = self._package
        active = mlflow.active_run()
        self._is_own = active is None
        if active is None:
            if self._uri is not None:
                mlflow.set_tracking_uri(self._uri)
            if self._experiment is not None:
                mlflow.set_experiment(self._experiment)
            try:
                active = mlflow.start_run(**{"run_id": known, **self._start_run})
            except mlflow.exceptions.MlflowException as e:
                if known is None:
                    raise
                raise ValueError(
                    f"mtf.train.MLflow: this training goes on in the run {known}, which cannot be "
                    f"resumed at {mlflow.get_tracking_uri()}: {e}. Give the tracking_uri that it "
                    "had, or remove mlflow_run.json from the directory to begin another run"
                ) from e
        settings = {_key(name): str(value) for name, value in config.items()}
        logged = active.data.params
        mlflow.log_params({n: v for n, v in settings.items() if n not in logged})
        # A parameter can't be changed: what a resumed run has in its place is told by tags.
        changed = {n: v for n, v in settings.items() if logged.get(n, v) != v}
        mlflow.set_tags({f"{n} from step {run.step}": v for n, v in changed.items()})
        return active.info.run_id

    def _add(self, run: Run, values: Mapping[str, float]) -> None:
        self._package.log_metrics({_key(n): v for n, v in values.items()}, step=run.step)

    def on_end(self, run: Run) -> None:
        """Ends the run there, as failed after an error."""
        if run.stopped:
            self._package.set_tag("stopped", run.stopped)
        if self._is_own:
            self._package.end_run("FINISHED" if run.error is None else "FAILED")


def _key(name: str) -> str:
    """Returns a name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", name)

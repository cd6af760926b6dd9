"""Callbacks: what is done at steps, evaluations and checkpoints of a training run."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._better import MODES, is_better
from mesh_tensorflow._mesh.variables.checkpoint_files import check_writable

__all__ = ["Callback", "CsvLog", "EarlyStopping", "JsonLinesLog", "Run", "TensorBoard"]


_BUCKETS = 30  # of a histogram, as TensorBoard draws them


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
    """

    def __init__(self, steps: int, directory: Optional[str], logdir: Optional[str]):
        """Creates the state of a run that has not begun.

        Args:
          steps: the number of steps to do.
          directory: where checkpoints are, or None.
          logdir: where logs are, or None.
        """
        self.step, self.steps = 0, steps
        self.directory, self.logdir = directory, logdir
        self.stopped: Optional[str] = None
        self.checkpoint: Optional[str] = None
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


class EarlyStopping(Callback):
    """Stops a run whose metric does not improve any more.

    >>> stopping = mtf.train.EarlyStopping("loss", patience=1)
    >>> run = mtf.train.Run(10, None, None)
    >>> for loss in (3.0, 2.0, 2.5):
    ...     stopping.on_evaluation(run, {"loss": loss})
    >>> run.stopped
    'loss has not improved on 2 for 1 evaluation'
    """

    def __init__(
        self, metric: str = "loss", patience: int = 3, min_delta: float = 0.0, mode: str = "min"
    ):
        """Creates the callback.

        Args:
          metric: the name of the metric of evaluations.
          patience: the number of evaluations without an improvement after which to stop.
          min_delta: the least difference that is an improvement.
          mode: "min" if less is better, or "max".

        Raises:
          ValueError: `patience` is less than 1, or `mode` is unknown.
        """
        if patience < 1 or mode not in MODES:
            raise ValueError(
                f'EarlyStopping: patience is at least 1, and mode "min" or "max"; got {patience} '
                f"and {mode!r}"
            )
        self.metric, self.patience, self.min_delta, self.mode = metric, patience, min_delta, mode
        self.best: Optional[float] = None
        self.waited = 0
        self._judged: list[tuple[int, float]] = []  # the step and the value of each evaluation

    def on_begin(self, run: Run) -> None:
        """Begins anew, or goes on from what the evaluations of a resumed run have shown."""
        self.best, self.waited, self._judged = None, 0, []
        # A run that begins anew does not count what an earlier one in its directory has judged.
        known = read_json(_state_path(run)).get(self._key, []) if run.step else []
        for step, value in known:
            if step <= run.step:  # the others came after the checkpoint
                # Judged anew and not restored, as `patience` or `min_delta` may have been changed
                # since.
                self._judge(run, step, value)

    def on_evaluation(self, run: Run, values: Mapping[str, float]) -> None:
        """Stops the run if the metric has not improved for `patience` evaluations."""
        value = metric_of(values, self.metric, "EarlyStopping")
        this = run.step, value
        # A finished run is evaluated again.
        if run.step >= run.steps and any(
            np.array_equal(this, known, equal_nan=True) for known in self._judged
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
            times = "1 evaluation" if self.patience == 1 else f"{self.patience} evaluations"
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


def write_whole(path: str, text: str) -> None:
    """Writes a file that a process which is killed leaves as it was before, or whole.

    Args:
      path: the path of the file.
      text: its content.
    """
    with tf.gfile.GFile(path + ".new", "w") as file:
        file.write(text)
    tf.gfile.Rename(path + ".new", path, overwrite=True)


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
            self._write(run, "train", _histograms(run.variables()))

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
    found = [callback._logdir for callback in callbacks if isinstance(callback, TensorBoard)]
    return any(own is None or os.path.realpath(own) == os.path.realpath(logdir) for own in found)


def scalars(values: Mapping[str, float]) -> list[Any]:
    """Returns the values of a tf.Summary.

    Args:
      values: numbers by tag.
    """
    return [tf.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]


def _histograms(variables: Mapping[str, np.ndarray]) -> list[Any]:
    """Returns a summary for each variable that has a distribution: real numbers, all finite."""
    made = []
    for name, value in variables.items():
        if value.size < 2 or np.iscomplexobj(value):
            continue
        # In float64: a sum of squares of float16 would soon be infinite.
        flat = value.astype(np.float64).ravel()
        flat = flat[np.isfinite(flat)]  # NaNs belong to no bucket
        if not flat.size:
            continue
        counts, edges = np.histogram(flat, _BUCKETS)
        made.append(
            tf.Summary.Value(
                tag=name,
                histo=tf.HistogramProto(
                    min=flat.min(),
                    max=flat.max(),
                    num=flat.size,
                    sum=flat.sum(),
                    sum_squares=np.square(flat).sum(),
                    # A HistogramProto has the upper end of each bucket alone.
                    bucket_limit=edges[1:],
                    bucket=counts,
                ),
            )
        )
    return made


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
        kept = self._read() if run.step and tf.gfile.Exists(self._open) else []
        kept = [record for record in kept if int(record["step"]) <= run.step]
        if run.step >= run.steps:  # a finished run is only evaluated again
            kept = [r for r in kept if int(r["step"]) < run.step or not _is_eval(r)]
        self._begin(kept)

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

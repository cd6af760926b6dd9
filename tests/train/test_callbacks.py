"""Callbacks: their order, early stopping, and the files of logs."""

import csv
import json
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.train import linear

import mesh_tensorflow as mtf

SMALL = {name: array[:4] for name, array in linear.DATA.items()}


class Events(mtf.train.Callback):
    """Notes what it is told."""

    def __init__(self):
        self.seen = []

    def on_begin(self, run):
        self.seen.append(("begin", run.step))

    def on_step(self, run, values):
        self.seen.append(("step", run.step))

    def on_evaluation(self, run, values):
        self.seen.append(("evaluation", run.step))

    def on_checkpoint(self, run, path):
        self.seen.append(("checkpoint", run.step))

    def on_end(self, run):
        self.seen.append(("end", run.step))


def events(steps, **arguments):
    callback = Events()
    linear.fit(steps, callbacks=(c for c in [callback]), **arguments)
    return callback.seen


def test_order(tmp_path):
    found = events(3, eval_data=SMALL, eval_every=2, directory=str(tmp_path), save_every=2)
    assert found == [
        ("begin", 0),
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("checkpoint", 2),
        ("step", 3),
        ("checkpoint", 3),
        ("evaluation", 3),
        ("end", 3),
    ]
    again = events(3, eval_data=SMALL, directory=str(tmp_path))
    assert again == [("begin", 3), ("evaluation", 3), ("end", 3)]


def test_on_end_is_called_after_an_error():
    class Failing(Events):
        def on_step(self, run, values):
            raise RuntimeError("on purpose")

    callback = Failing()
    with pytest.raises(RuntimeError, match="on purpose"):
        linear.fit(3, callbacks=[callback])
    assert callback.seen == [("begin", 0), ("end", 0)] or callback.seen[-1][0] == "end"


def stopped(losses, **arguments):
    """Returns the number of evaluations after which early stopping ends a run, and why."""
    callback = mtf.train.EarlyStopping(**arguments)
    run = mtf.train.Run(100, None, None)
    callback.on_begin(run)
    for i, loss in enumerate(losses, 1):
        callback.on_evaluation(run, {"loss": loss})
        if run.stopped:
            return i, run.stopped
    return None


def test_early_stopping():
    assert stopped([3, 2, 1, 0.5]) is None
    assert stopped([3, 2, 2.5, 2.1, 2.0], patience=3)[0] == 5
    assert stopped([3, 2.95, 2.92], patience=2, min_delta=0.1)[0] == 3
    assert stopped([1, 2, 3, 2, 1], patience=2, mode="max")[0] == 5
    with pytest.raises(ValueError, match="an evaluation has no 'f1', only loss"):
        stopped([1], metric="f1")
    with pytest.raises(ValueError, match="patience is at least 1"):
        mtf.train.EarlyStopping(patience=0)


def test_a_run_that_stops_early_saves_and_says_why(tmp_path, capsys):
    result = linear.fit(
        50,
        optimizer=mtf.optimize.SgdOptimizer(0.0),
        eval_data=SMALL,
        eval_every=2,
        directory=str(tmp_path),
        callbacks=[mtf.train.EarlyStopping(patience=2)],
        progress=True,
    )
    assert result.step == 6 and result.checkpoint.endswith("model.ckpt-6")
    assert result.stopped.startswith("loss has not improved on") and "stopped='loss" in repr(result)
    assert "stopped at step 6 of 50: loss has not improved" in capsys.readouterr().err


def test_a_callback_that_stops_the_run_before_its_first_step():
    class Stopping(Events):
        def on_begin(self, run):
            run.stop("at once")

    callback = Stopping()
    result = linear.fit(3, callbacks=[callback])
    assert repr(result) == "Result(step=0, checkpoint=None, stopped='at once')"
    assert callback.seen == [("end", 0)]


def test_a_callback_that_stops_the_run_after_its_last_step():
    class Stopping(Events):
        def on_step(self, run, values):
            if run.step == run.steps:
                run.stop("enough")

    callback = Stopping()
    result = linear.fit(2, callbacks=[callback], eval_data=SMALL)
    assert result.stopped == "enough"
    assert callback.seen == [("begin", 0), ("evaluation", 2), ("end", 2)]


def judged(directory, values, **arguments):
    """Returns early stopping after some evaluations of a run, which goes on if there was one."""
    callback = mtf.train.EarlyStopping("loss", **arguments)
    run = mtf.train.Run(100, str(directory), None)
    first, *rest = sorted(values)
    run.step = first - 1
    callback.on_begin(run)
    for run.step in (first, *rest):
        callback.on_evaluation(run, {"loss": values[run.step]})
    return callback, run.stopped


def test_early_stopping_of_resumed_runs(tmp_path):
    """Several share a file; what was evaluated after the checkpoint does not count."""
    nan = float("nan")
    low, _ = judged(tmp_path, {1: nan, 2: 5.0, 3: 6.0, 4: 1.0})
    high, _ = judged(tmp_path, {1: 7.0, 2: 6.0}, mode="max", patience=9)
    assert (low.best, low.waited, high.best, high.waited) == (1.0, 0, 7.0, 1)
    low, stopped = judged(tmp_path, {4: 5.5})
    assert (low.best, low.waited, stopped) == (5.0, 2, None)
    low, stopped = judged(tmp_path, {5: 7.0})
    assert (low.best, stopped) == (5.0, "loss has not improved on 5 for 3 evaluations")
    high, _ = judged(tmp_path, {3: 6.5}, mode="max", patience=9)
    assert (high.best, high.waited) == (7.0, 2)
    _, stopped = judged(tmp_path / "other", {1: nan, 2: nan}, patience=2)
    assert stopped == "loss has not improved for 2 evaluations"


def test_a_finished_run_is_judged_once(tmp_path):
    """Also by a value that equals no number."""
    for _ in range(3):
        callback = mtf.train.EarlyStopping("loss", patience=3)
        run = mtf.train.Run(2, str(tmp_path), None)
        run.step = 2
        callback.on_begin(run)
        callback.on_evaluation(run, {"loss": float("nan")})
        assert callback.waited == 1 and run.stopped is None


def test_logs_in_a_file_system_of_tensorflow():
    """In memory, as one of a cloud is; metrics of steps may be named as those of evaluations."""

    def model(mesh, features, training):
        found = linear.model_fn(mesh, features, training)
        return {**found, "eval_error": mtf.train.metrics.Metric(
            mtf.reduce_sum(found["error"]), mtf.constant(mesh, 4.0), np.float32)}  # fmt: skip

    logdir = f"ram://logs-{os.getpid()}/a"
    logs = [mtf.train.JsonLinesLog(), mtf.train.CsvLog()]

    def records(step):
        for log in logs:
            run = mtf.train.Run(2, None, logdir)
            run.step = step
            log.on_begin(run)
        by_lines, by_rows = (log._read() for log in logs)
        assert [{n: str(v) for n, v in r.items()} for r in by_lines] == by_rows
        return [(r["step"], "loss" in r) for r in by_lines]

    linear.fit(2, model_fn=model, eval_data=SMALL, eval_every=1, callbacks=logs, logdir=logdir)
    # The last evaluation is made again by a run that is finished, and no other record.
    assert records(2) == [(1, True), (1, False), (2, True)]
    assert records(1) == [(1, True), (1, False)]
    assert not os.path.exists("ram:")


@pytest.mark.slow
def test_files_of_logs(tmp_path):
    """A resumed run goes on with them, and leaves out what the checkpoint does not have."""
    arguments = {"directory": str(tmp_path), "eval_data": SMALL, "eval_every": 2}

    def run(steps):
        logs = [mtf.train.CsvLog(), mtf.train.JsonLinesLog(), mtf.train.TensorBoard()]
        return linear.fit(steps, callbacks=logs, logdir=str(tmp_path / "logs"), **arguments)

    run(3)
    path = tmp_path / "logs" / "log.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "loss": 9.0}\n{"step": 5, "lo')
    result = run(5)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [(record["step"], "eval_loss" in record) for record in records]
    expected = [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (5, 0), (5, 1)]
    assert steps == expected
    assert records[-2]["loss"] == result.losses[-1]
    with open(tmp_path / "logs" / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), bool(row["eval_loss"])) for row in rows] == expected
    assert float(rows[-1]["eval_loss"]) == result.evaluations[-1]["loss"]
    run(5)  # is evaluated again, and notes it once
    assert len(path.read_text().splitlines()) == len(expected)
    events = {"train": [], "eval": []}
    for part, found in events.items():
        for file in sorted((tmp_path / "logs" / part).glob("events*")):
            for event in tf.train.summary_iterator(str(file)):
                found += [(event.step, v.tag) for v in event.summary.value if v.tag == "loss"]
    assert events["train"] == [(step, "loss") for step in (1, 2, 3, 4, 5)]
    assert events["eval"] == [(step, "loss") for step in (2, 3, 4, 5, 5)]


@pytest.mark.parametrize("placing", [{}, {"mesh_shape": "all:2", "simd": True}])
def test_histograms_are_of_the_weights_at_their_steps(tmp_path, placing):
    class Weights(mtf.train.Callback):
        def __init__(self):
            self.seen = {}

        def on_step(self, run, values):
            self.seen[run.step] = run.variables()

    weights = Weights()
    board = mtf.train.TensorBoard(str(tmp_path), histograms_every=2)
    result = linear.fit(5, callbacks=[weights, board], **placing)
    np.testing.assert_array_equal(
        weights.seen[5]["linear/kernel"], result.variables["linear/kernel"]
    )
    found = {}
    for file in (tmp_path / "train").glob("events*"):
        for event in tf.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if value.HasField("histo"):
                    found[event.step, value.tag] = value.histo
    large = [name for name, value in result.variables.items() if value.size > 1]
    assert large and set(found) == {(step, name) for step in (2, 4) for name in large}
    for (step, name), histogram in found.items():
        value = weights.seen[step][name].astype(np.float64)
        assert (histogram.min, histogram.max) == (value.min(), value.max())
        assert sum(histogram.bucket) == histogram.num == value.size
        assert histogram.sum == pytest.approx(value.sum(), abs=1e-9)
        edges = [value.min(), *histogram.bucket_limit]
        np.testing.assert_array_equal(histogram.bucket, np.histogram(value, edges)[0])


def test_histograms_need_a_number_of_steps():
    with pytest.raises(ValueError, match="histograms_every is 0; give a number of steps, at least"):
        mtf.train.TensorBoard("logs", histograms_every=0)


@pytest.mark.parametrize("given, boards", [(None, 1), ("logs", 1), ("others", 2)])
def test_logs_of_the_run_beside_those_of_a_callback(given, boards, tmp_path):
    """There is one writer for each directory."""
    board = mtf.train.TensorBoard(given and str(tmp_path / given))

    def model(mesh, x):
        w = mtf.get_variable(mesh, "w", x.shape[1:], initializer=tf.ones_initializer())
        return mtf.reduce_mean(mtf.square(x * w))

    mtf.train.fit(
        model, np.ones([4, 2], np.float32), 1, dims="batch:4,d:2", progress=False,
        optimizer=mtf.optimize.SgdOptimizer(0.1), callbacks=[board], logdir=str(tmp_path / "logs"),
    )  # fmt: skip
    assert len(list(tmp_path.rglob("train/events*"))) == boards
    assert (tmp_path / "logs").exists()


def test_a_row_that_was_cut_is_left_out(tmp_path):
    path = tmp_path / "log.csv"
    path.write_bytes(b"step,loss\r\n1,0.5\r\n2,0.25\r\n3,0.12")
    log = mtf.train.CsvLog(str(path))
    log._open = str(path)
    assert [row["step"] for row in log._read()] == ["1", "2"]


def test_callbacks_that_have_begun_are_ended(tmp_path):
    """Where another one's beginning raises an error."""
    ended = []

    class Held(mtf.train.Callback):
        def __init__(self, fails):
            self.fails = fails

        def on_begin(self, run):
            if self.fails:
                raise OSError("no room")

        def on_end(self, run):
            ended.append(self.fails)

    def model(mesh, x):
        w = mtf.get_variable(mesh, "w", x.shape[1:], initializer=tf.ones_initializer())
        return mtf.reduce_mean(mtf.square(x * w))

    with pytest.raises(OSError, match="no room"):
        mtf.train.fit(
            model, np.ones([4, 2], np.float32), 1, dims="batch:4,d:2", progress=False,
            optimizer=mtf.optimize.SgdOptimizer(0.1), callbacks=[Held(False), Held(True), Held(False)],
        )  # fmt: skip
    assert ended == [False]


def test_an_event_that_there_is_not():
    """Other libraries have other names; a method of such a name would never be called."""

    class Stops(mtf.train.Callback):
        def on_step_end(self, run, values):
            raise AssertionError

    text = r"fit: Stops.on_step_end is never called; the events are on_begin, .*; did you mean on_step\?"
    with pytest.warns(mtf.MeshTensorFlowWarning, match=text):
        linear.fit(1, callbacks=[Stops()])

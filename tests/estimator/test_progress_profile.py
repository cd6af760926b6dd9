"""What is reported in a training, and traces of steps."""

import io
import json
import logging
import os
import re

import pytest
import tensorflow.compat.v1 as tf
from helpers.estimator import estimator_models as models

from mesh_tensorflow import estimator
from mesh_tensorflow.estimator._hooks import ProgressHook


def make(directory, **config):
    config = {"save_checkpoints_steps": 100, **config}
    return estimator.Estimator(
        models.linear_model, str(directory), estimator.RunConfig(**config), {"lr": 0.1}
    )


def test_log_lines(tmp_path, caplog):
    with caplog.at_level("INFO", logger="tensorflow"):
        make(tmp_path, log_step_count_steps=4).train(models.train_data, max_steps=10)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("loss = ")]
    losses, _ = models.descent(10)
    assert lines[0] == f"loss = {losses[0]:.7g}, step = 1"
    pattern = (
        r"loss = ([\d.e-]+), step = (\d+) of 10 \([\d.]+ sec, [\d.e+]+ steps/s, ETA 0:00:\d\d\)"
    )
    found = [re.fullmatch(pattern, line).groups() for line in lines[1:]]
    assert [int(step) for _, step in found] == [5, 9]
    assert [float(loss) for loss, _ in found] == pytest.approx([losses[4], losses[8]], rel=1e-5)


def test_no_log_lines(tmp_path, caplog):
    with caplog.at_level("INFO", logger="tensorflow"):
        make(tmp_path, log_step_count_steps=None).train(models.train_data, steps=10)
    assert "step = " not in caplog.text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def report(monkeypatch, hook, losses, seconds):
    """Lets a hook see steps, as many seconds apart."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    hook.begin()
    for step, loss in enumerate(losses, 1):
        clock[0] = step * seconds
        values = tf.train.SessionRunValues({"loss": loss, "step": step}, None, None)
        hook.after_run(None, values)


def test_a_live_line_in_a_terminal(monkeypatch):
    stream = Terminal()
    hook = ProgressHook(None, None, 100, last_step=7200, stream=stream)
    report(monkeypatch, hook, [2.0, 1.0, 0.5], 2.0)
    tf.logging.warning("something")
    hook.end(None)
    lines = [re.sub(r"\[.*\] ", "", line) for line in stream.getvalue().split("\r\x1b[K")]
    assert lines[0] == ""
    assert (
        lines[1].startswith("train 2/7200 steps, 2 s/step, 3:59:56 left, ") and "loss 1" in lines[1]
    )
    assert lines[2].startswith("train 3/7200 steps") and lines[2].endswith("left, loss 0.5\r")
    # Cleared before the message, and ended by a line that stays.
    assert lines[3].startswith("train: 3/7200 steps in 4.0 s") and lines[3].endswith("\n")
    before = stream.getvalue()
    tf.logging.warning("something else")
    assert stream.getvalue() == before


def test_a_live_line_is_not_written_for_every_step(monkeypatch):
    stream = Terminal()
    hook = ProgressHook(None, None, 100, stream=stream)
    report(monkeypatch, hook, [1.0] * 400, 0.01)
    hook.close()
    lines = stream.getvalue().split("\r\x1b[K")[1:]
    assert 20 <= len(lines) <= 40
    assert re.fullmatch(r"train: 400 steps in 4.0 s \(100 steps/s\), loss 1\n", lines[-1])


def test_a_terminal_is_left_in_order_if_training_fails(tmp_path, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)

    class Fail(tf.train.SessionRunHook):
        steps = 0

        def after_run(self, run_context, run_values):
            self.steps += 1
            if self.steps == 3:
                raise ArithmeticError

    make_record = logging.getLogRecordFactory()
    with pytest.raises(ArithmeticError):
        make(tmp_path).train(models.train_data, hooks=[Fail()], max_steps=5)
    assert logging.getLogRecordFactory() is make_record
    assert re.search(r"train: stopped at 2/5 steps in .*\n$", stream.getvalue())


def traces(directory):
    return sorted(os.listdir(directory))


def test_profile(tmp_path):
    est = make(tmp_path / "model")
    every = estimator.ProfileHook(tmp_path / "every", every_n_steps=3)
    chosen = estimator.ProfileHook(tmp_path / "chosen", steps=[2, 9], show_memory=True)
    est.train(models.train_data, hooks=[every], max_steps=4)
    est.train(models.train_data, hooks=[every, chosen], max_steps=9)
    assert traces(tmp_path / "every") == ["trace-3.json", "trace-6.json", "trace-9.json"]
    assert traces(tmp_path / "chosen") == ["trace-9.json"]
    with open(tmp_path / "chosen" / "trace-9.json") as file:
        found = json.load(file)["traceEvents"]
    assert any(event.get("name") == "MatMul" for event in found)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({}, "give every_n_steps=, such as 1000, or steps=, such as"),
        ({"every_n_steps": 1, "steps": [1]}, "give every_n_steps=, such as 1000, or steps="),
        ({"every_n_steps": 0}, "steps count from 1, but 0 is given"),
        ({"steps": [0, 1]}, "steps count from 1, but 0 is given"),
    ],
)
def test_mistakes(arguments, text, tmp_path):
    with pytest.raises(ValueError, match="ProfileHook: " + text):
        estimator.ProfileHook(tmp_path, **arguments)

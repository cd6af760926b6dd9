"""Ctrl-C saves and says how to go on; a run that is killed goes on from its last checkpoint."""

import os
import random
import signal
import time

import pytest
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.train import linear

from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow.checkpoint import fault_of


class Training:
    """A process that trains until it is ended."""

    def __init__(self, directory, **arguments):
        self.directory = str(directory / "model")
        self._steps, self._errors = directory / "steps", directory / "errors"
        self._steps.unlink(missing_ok=True)  # of a process before it
        self._process = processes.context().Process(
            target=linear.train_and_note,
            args=(self.directory, str(self._steps), str(self._errors)),
            kwargs=arguments,
        )
        self._process.start()

    def steps(self):
        lines = self._steps.read_text().split("\n")[:-1] if self._steps.exists() else []
        return len(lines)

    def end(self, number, after):
        """Sends a signal after a step; returns (exit code, steps that were done, stderr)."""
        deadline = time.monotonic() + 120
        while self.steps() < after:
            assert self._process.is_alive() and time.monotonic() < deadline, (
                self._errors.read_text()
            )
            time.sleep(0.01)
        os.kill(self._process.pid, number)
        self._process.join(300)
        return self._process.exitcode, self.steps(), self._errors.read_text()


def last_step(directory):
    return int(tf.train.latest_checkpoint(directory).rpartition("-")[2])


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_saves(name, in_background, tmp_path):
    training = Training(tmp_path, save_every=3, save_in_background=in_background)
    code, steps, errors = training.end(getattr(signal, name), after=3)
    assert last_step(training.directory) == steps
    key = "Ctrl-C" if name == "SIGINT" else "SIGTERM"
    assert f"{key}: stopped at step {steps} of 1000000, saved as" in errors
    assert "Run the same program again to go on from there" in errors
    assert code == (1 if name == "SIGINT" else 143)
    assert ("KeyboardInterrupt" in errors) == (name == "SIGINT")
    whole = linear.fit(steps + 2)
    rest = linear.fit(steps + 2, directory=training.directory)
    assert rest.losses == whole.losses[steps:]


@pytest.mark.slow
def test_a_killed_run_loses_the_steps_since_its_last_checkpoint(tmp_path):
    training = Training(tmp_path, save_every=2)
    code, steps, _ = training.end(signal.SIGKILL, after=5)
    assert code == -signal.SIGKILL
    last = last_step(training.directory)
    assert last % 2 == 0 and steps - last <= 2
    rest = linear.fit(last + 3, directory=training.directory)
    assert rest.losses == linear.fit(last + 3).losses[last:]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_killed_while_it_saves(seed, tmp_path):
    """At any moment, several times: the last checkpoint that is listed is whole."""
    chance = random.Random(seed)
    for _ in range(5):
        training = Training(tmp_path, save_every=2, save_in_background=True)
        training.end(signal.SIGKILL, after=chance.randrange(1, 60))
        last = checkpoint_files.latest(training.directory)
        assert last is None or not fault_of(last)
    last = last_step(training.directory)
    rest = linear.fit(last + 3, directory=training.directory, save_in_background=True)
    assert rest.losses == linear.fit(last + 3).losses[last:]


def interrupted_evaluation(directory, signals):
    """Sends signals while the first batch of the first evaluation is read; returns the batches."""
    read = []

    def batches():
        for i in (0, 4, 8):
            read.append(i)
            for _ in range(signals):
                signal.raise_signal(signal.SIGINT)
            yield {name: array[i : i + 4] for name, array in linear.DATA.items()}

    with pytest.raises(KeyboardInterrupt) as e:
        linear.fit(9, eval_data=batches, eval_every=2, directory=str(directory))
    return read, str(e.value)


def test_a_signal_ends_an_evaluation(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    read, text = interrupted_evaluation(tmp_path, signals=1)
    assert (read, text) == ([0], "training stopped at step 2 of 9")
    assert last_step(tmp_path) == 2 and signal.getsignal(signal.SIGINT) is before


def test_a_second_signal_ends_at_once(tmp_path):
    read, text = interrupted_evaluation(tmp_path, signals=2)
    assert (read, text) == ([0], "stopped at once by a second SIGINT")
    assert tf.train.latest_checkpoint(str(tmp_path)) is None


def test_a_failed_evaluation_at_the_end_loses_no_step(tmp_path):
    with pytest.raises(ValueError, match="eval_data gave no batch"):
        linear.fit(3, eval_data=iter([]), directory=str(tmp_path))
    assert last_step(tmp_path) == 3

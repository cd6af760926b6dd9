"""Training that is killed at any moment goes on to the same losses."""

import os
import random
import signal
import time

import pytest
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.workers import training_worker

KILLS = 50
SECONDS = 60  # for a process to make progress


def start(*arguments):
    process = processes.context().Process(target=training_worker.run, args=arguments)
    process.start()
    return process


def losses(log):
    """The loss of each step; in whatever run a step was made, it must be the same."""
    found = {}
    with open(log) as lines:
        for line in lines:
            if not line.endswith("\n"):
                continue  # the process was killed when it wrote this
            step, loss = line.split()
            assert found.setdefault(int(step), loss) == loss, f"step {step} differs"
    return found


def size(path):
    return os.path.getsize(path) if os.path.exists(path) else 0


@pytest.mark.every
@pytest.mark.slow
def test_killed_fifty_times(tmp_path):
    directory, log = str(tmp_path / "model"), str(tmp_path / "killed.log")
    moments = random.Random(0)
    for _ in range(KILLS):
        before, limit = size(log), time.monotonic() + SECONDS
        process = start(directory, log, 10**9)
        while size(log) == before and time.monotonic() < limit and process.is_alive():
            time.sleep(0.01)
        assert size(log) > before, "no step was made"
        time.sleep(moments.uniform(0, 0.1))  # a step and its save take about as long
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        # Whatever was being written, the last checkpoint that is named is whole.
        path = tf.train.latest_checkpoint(directory)
        reader = tf.train.load_checkpoint(path)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    last = max(losses(log))
    finish = start(directory, log, last + 3)
    finish.join()
    assert finish.exitcode == 0
    whole = str(tmp_path / "whole.log")
    straight = start(str(tmp_path / "other"), whole, last + 3)
    straight.join()
    assert straight.exitcode == 0
    killed, expected = losses(log), losses(whole)
    assert sorted(expected) == list(range(1, last + 4))
    assert killed.items() <= expected.items()
    # A process may be killed between the save of a step and the note of its loss.
    assert len(expected) - len(killed) <= KILLS


@pytest.mark.slow
def test_another_layout_goes_on_from_the_same_step(tmp_path):
    log = str(tmp_path / "log")
    for last, mesh_shape, layout in [(3, "x:4", "hidden:x"), (6, "x:2,y:2", "batch:x,width:y")]:
        process = start(str(tmp_path / "model"), log, last, mesh_shape, layout)
        process.join()
        assert process.exitcode == 0
    whole = str(tmp_path / "whole.log")
    process = start(str(tmp_path / "other"), whole, 6)
    process.join()
    split, straight = losses(log), losses(whole)
    assert sorted(split) == [1, 2, 3, 4, 5, 6]
    for step, loss in split.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(straight[step]), rel=1e-5)

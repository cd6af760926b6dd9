"""Sessions on the devices of several processes: the numbers of one, and a lost process."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers import pjrt_sessions
from helpers.paths import environment

import mesh_tensorflow as mtf


def launched(directory, what, *arguments):
    command = [sys.executable, "-m", "mesh_tensorflow.launch", "--runtime", "pjrt"]
    command += ["--processes", "2", pjrt_sessions.__file__, what, str(directory), *arguments]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=500, check=False
    )


def found(directory, what):
    """Returns what each process found, in a run that is as it should be."""
    done = launched(directory, what)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"{what} is done in process 0\n"  # and no lines of Gloo
    return [json.loads((directory / f"{i}.json").read_text()) for i in range(2)]


def test_a_session_runs_on_the_devices_of_two_processes(tmp_path):
    chief, other = found(tmp_path, "session")
    values = chief.pop("variables")
    assert chief == {"totals": [120.0, 240.0], "whole": [4.0] * 16}
    assert values == {"w": [4.0] * 16, "global_step": 2}
    assert other == [{**chief, "variables": values}, []]


@pytest.mark.slow
def test_fit_is_as_in_one_process(tmp_path):
    chief, other = found(tmp_path, "fit")
    assert chief == other
    expected = pjrt_sessions.with_fit(str(tmp_path / "one"))
    np.testing.assert_allclose(chief["losses"], expected["losses"], rtol=1e-5)
    for one, two in zip(expected["evaluations"], chief["evaluations"]):
        np.testing.assert_allclose(two["loss"], one["loss"], rtol=1e-5)
    for name, value in expected["sums"].items():
        np.testing.assert_allclose(chief["sums"][name], value, rtol=1e-4, atol=1e-5)
    # One process wrote the checkpoints, which others can go on from.
    resumed = pjrt_sessions.with_fit(str(tmp_path), "placement", steps=5)
    assert len(resumed["losses"]) == 1


@pytest.mark.slow
def test_utils_run_is_as_in_one_process(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    [events] = found(two, "utils")[0]
    assert re.match("events.out.tfevents", events)
    pjrt_sessions.with_utils(str(one))
    expected, reader = (tf.train.load_checkpoint(str(d)) for d in (one, two))
    assert expected.get_variable_to_shape_map() == reader.get_variable_to_shape_map()
    for name in expected.get_variable_to_shape_map():
        value = expected.get_tensor(name)
        np.testing.assert_allclose(
            reader.get_tensor(name), value, rtol=1e-3, atol=1e-5, err_msg=name
        )


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_is_lost_is_named(lost, tmp_path):
    done = launched(tmp_path, "fit", str(lost))
    assert done.returncode == 1
    assert re.search(rf"process {lost} \((chief|worker) 0, 127.0.0.1:\d+\) was killed", done.stderr)
    assert tf.train.latest_checkpoint(str(tmp_path)) is not None


def test_main_is_called_in_one_process():
    assert mtf.pjrt.run_in_chief(lambda: 3) == 3

"""Sessions on the devices of several processes: the numbers of one, and a lost process."""

import concurrent.futures
import json
import os
import pathlib
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

pytest.importorskip("jax", "0.8", reason="mesh_tensorflow.pjrt needs jax>=0.8")

from helpers import pjrt_sessions, processes

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh.variables.checkpoint_files import ShardedVariable
from mesh_tensorflow._mesh.variables.storage import Piece, PieceSaveable
from mesh_tensorflow._processes.peers import Peer
from mesh_tensorflow.pjrt._programs import PeerProcesses, programs_over


def launched(directory, what, *arguments, code=None):
    program = ["--runtime", "pjrt", pjrt_sessions.__file__]
    return processes.launch(2, *program, what, directory, *arguments, code=code, timeout=500)


def found(directory, what):
    """Returns what each process found, in a run that is as it should be."""
    done = launched(directory, what, code=0)
    assert done.stdout == f"{what} is done in process 0\n"  # and no lines of Gloo
    return [json.loads((directory / f"{i}.json").read_text()) for i in range(2)]


@pytest.mark.slow
def test_a_session_runs_on_the_devices_of_two_processes(tmp_path):
    chief, other = found(tmp_path, "session")
    values = chief.pop("variables")
    assert chief == {"totals": [480.0, 960.0], "whole": [4.0] * 16}
    assert values == {"w": [4.0] * 16, "global_step": 2}
    assert other == [{**chief, "variables": values}, []]


def values_after(steps):
    values = {name: 2.0**steps * x for name, x in pjrt_sessions.INITIAL.items()}
    return {**values, "global_step": 1}


def check_values(found, steps):
    for name, value in values_after(steps).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def check_files(path):
    """Each process wrote its parts, and the chief what is of TensorFlow."""
    reader = tf.train.load_checkpoint(path)
    shapes = {name: list(x.shape) for name, x in pjrt_sessions.INITIAL.items()}
    assert reader.get_variable_to_shape_map() == {**shapes, "global_step": []}
    assert set(reader.get_variable_to_dtype_map().values()) == {tf.float32, tf.int64}
    check_values({name: reader.get_tensor(name) for name in values_after(1)}, 1)
    files = [f"{path}.data-{i:05d}-of-00003" for i in range(3)]
    step, first, second = (pathlib.Path(f).read_bytes() for f in files)
    assert np.frombuffer(step, np.int64).tolist() == [1]
    whole = values_after(1)
    split = whole.pop("split")
    rest = [whole["whole"], whole["short"], whole["single"]]
    for data, own in [(first, [split[:, :2], *rest]), (second, [split[:, 2:]])]:
        expected = np.concatenate([np.ravel(x) for x in own])
        assert sorted(np.frombuffer(data, np.float32)) == sorted(expected)


@pytest.fixture(scope="module")
def savers(tmp_path_factory):
    """The directory of what two processes saved, and what they found."""
    directory = tmp_path_factory.mktemp("savers")
    chief, other = found(directory, "savers")
    assert other == [chief, []]
    return directory, chief


@pytest.mark.slow
def test_savers_write_and_read_part_by_part(savers):
    directory, chief = savers
    path = str(directory / "model-1")
    assert chief["written"] == ["write", "write"]
    check_files(path)
    assert tf.train.latest_checkpoint(str(directory)) == path
    check_values(chief["unchanged"], 1)
    # TensorFlow's own saver reads and assigns whole values.
    assert set(chief["plain"]) == {"read", "assign"}
    # In another layout, part by part, from what either saver wrote.
    for values, calls in chief["again"].values():
        # Programs whose graphs are collected meanwhile are forgotten.
        assert [call for call in calls if call != "forget"] == ["define", "faults", "restore"]
        check_values(values, 2)


@pytest.mark.slow
def test_what_two_processes_wrote_is_read_by_others(savers):
    path = str(savers[0] / "model-1")
    devices = [f"cpu:{i}" for i in range(4)]
    placed = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2,cols:2", "hidden:cols", devices)
    one = mtf.GspmdMeshImpl("rows:2,cols:2", "batch:cols")
    for values, calls in [
        pjrt_sessions.restored(path, one),
        pjrt_sessions.restored(path, placed, pjrt=False),
    ]:
        assert calls == []
        check_values(values, 2)


@pytest.mark.slow
def test_a_process_that_cannot_write_is_named(savers):
    directory, chief = savers
    for i in range(2):
        assert re.match(
            rf"checkpoint .*/fails could not be written: RuntimeError: /job:worker/task:{i} at 127.0.0.1:\d+ "
            rf"failed: OSError: .*fails_temp/parts-0-{i}-of-2 could not be written: .*Is a "
            "directory. The checkpoints before it are as they were. ",
            chief["fails"][i],
        )
    assert not [name for name in os.listdir(directory) if "fails" in name or "temp" in name]
    assert tf.train.latest_checkpoint(str(directory)) == str(directory / "model-1")
    # What a process finds wrong with the data is said as for whole variables.
    assert re.match(
        r"the data of checkpoint .*/damaged/model-1 is damaged or cut short \(/job:worker/"
        r"task:1 at 127.0.0.1:\d+: .*\); no variable "
        r"was changed.\n  Variables that cannot be read \(1\):\n    split\n",
        chief["damaged"],
    )
    assert re.search(r"Missing in the file \(4\):\n    global_step \[\]\n", chief["lacks"])
    assert "split: float32 [4, 4] in the file, float32 [8, 4] in the program" in chief["lacks"]
    [warning] = chief["with_nan"]
    assert re.search(r"values that are not numbers \(NaN\) in 1 of 5 variables: split", warning)


@pytest.mark.slow
def test_estimators_save_and_restore_part_by_part(tmp_path):
    chief, other = found(tmp_path, "estimator")
    assert other == [chief, []]
    assert chief["metrics"]["global_step"] == 2
    np.testing.assert_allclose(chief["predicted"], [chief["metrics"]["mean"]] * 4, rtol=1e-6)
    assert chief["first"] == ["assign", "define", "run", "write"]  # with initial values
    then = set(chief["then"]) - {"forget"}  # of programs whose graphs are collected
    assert then == {"define", "faults", "restore", "run", "write"}


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


@pytest.mark.every
def test_utils_run_is_as_in_one_process(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    chief, _ = found(two, "utils")
    [events] = chief["events"]
    assert re.match("events.out.tfevents", events)
    assert {"run", "write"} < set(chief["calls"]) and "read" not in chief["calls"]
    pjrt_sessions.with_utils(str(one))
    expected, reader = (tf.train.load_checkpoint(str(d)) for d in (one, two))
    assert expected.get_variable_to_shape_map() == reader.get_variable_to_shape_map()
    for name in expected.get_variable_to_shape_map():
        value = expected.get_tensor(name)
        np.testing.assert_allclose(
            reader.get_tensor(name), value, rtol=1e-3, atol=1e-5, err_msg=name
        )


@pytest.mark.every("1*")
@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_is_lost_is_named(lost, tmp_path):
    done = launched(tmp_path, "fit", str(lost))
    assert done.returncode == 1
    assert re.search(rf"process {lost} \((chief|worker) 0, 127.0.0.1:\d+\) was killed", done.stderr)
    assert tf.train.latest_checkpoint(str(tmp_path)) is not None


def test_another_thread_cannot_lead_at_the_same_time(monkeypatch):
    monkeypatch.setattr("mesh_tensorflow.pjrt._programs.several_of_jax", lambda: True)
    monkeypatch.setattr("mesh_tensorflow.pjrt._devices._driving", True)
    peers = PeerProcesses([], Peer("worker", 0, "here:1"))
    peers.watch.stop()
    with programs_over(peers):
        assert mtf.pjrt.run_in_chief(lambda: 3) == 3
        with concurrent.futures.ThreadPoolExecutor() as threads:
            found = threads.submit(mtf.pjrt.run_in_chief, lambda: 3)
            with pytest.raises(RuntimeError, match="another thread of this process tells"):
                found.result()


@pytest.mark.slow
def test_main_is_called_in_one_process():
    assert mtf.pjrt.run_in_chief(lambda: 3) == 3


@pytest.mark.slow
def test_files_that_only_another_process_sees(tmp_path):
    class Elsewhere:
        def write(self, prefix, variables):
            assert variables == {"w": variable}
            return [f"{prefix}-1-of-2"]

    variable = ShardedVariable(Elsewhere(), 0, "w", tf.float32)
    with tf.Graph().as_default(), tf.Session() as session:
        w = tf.get_variable("w", [2], initializer=tf.ones_initializer(), use_resource=True)
        piece = Piece((0,), (2,), "/cpu:0", w.read_value, w.assign, variable)
        saveable = PieceSaveable(w, [piece], "w", "w")
        saver = mtf.checkpoint.Saver([saveable])
        session.run(w.initializer)
        text = "another process has written .*/parts-0-1-of-2, which is not to be seen here: all pr"
        with pytest.raises(mtf.checkpoint.CheckpointError, match=text):
            saver.save(session, str(tmp_path / "model"))
    assert os.listdir(tmp_path) == []

"""mtf.train.fit in several processes: the numbers of one; errors if they are not connected."""

import contextlib
import json
import re
import types

import numpy as np
import pytest
from helpers import processes
from helpers.train import chosen, linear, odd_sizes, several

import mesh_tensorflow as mtf
from mesh_tensorflow import launch
from mesh_tensorflow._processes.processes import check_described
from mesh_tensorflow.train._placing import Placing, find_cluster


@pytest.mark.slow
def test_two_processes(tmp_path):
    processes.launch(2, "--show_all", several.__file__, tmp_path / "model", tmp_path / "out")
    found = [json.loads((tmp_path / f"out.{i}").read_text()) for i in range(2)]
    alone = linear.fit(5, eval_data=several.EVALUATION, eval_every=2)
    for record in found:
        np.testing.assert_allclose(record["losses"], alone.losses, rtol=1e-5)
        expected = [e["loss"] for e in alone.evaluations]
        np.testing.assert_allclose(
            [record["evaluations"][i] for i in (0, 2, 3)], expected, rtol=1e-5
        )
        norm = np.sum(np.abs(alone.variables["linear/kernel"]))
        assert record["norm"] == pytest.approx(norm, rel=1e-5)
        for called, text in zip(("evaluate", "predict"), record["refused"]):
            assert text.startswith(f"{called}: it is offered in one process: call it in a program")
    assert found[0]["checkpoint"].endswith("model.ckpt-5")
    rest = linear.fit(6, directory=str(tmp_path / "model"))
    np.testing.assert_allclose(rest.losses, linear.fit(6).losses[5:], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["h:x", "c:x"])
def test_three_processes_with_sizes_that_three_does_not_divide(layout, tmp_path):
    processes.launch(3, "--show_all", odd_sizes.__file__, layout, tmp_path / "out")
    alone = odd_sizes.fit().losses
    for i in range(3):
        found = json.loads((tmp_path / f"out.{i}").read_text())
        np.testing.assert_allclose(found, alone, rtol=1e-5)


def test_processes_that_do_not_know_each_other():
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE=4 says that there are 4 processes"):
        check_described({"OMPI_COMM_WORLD_SIZE": "4"})
    with pytest.raises(ValueError, match=r"python -m mesh_tensorflow\.launch --processes N"):
        check_described({"WORLD_SIZE": "2"})
    check_described({"WORLD_SIZE": "1"})


def test_processes_that_do_not_fit(monkeypatch):
    cluster = {"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(ValueError, match=r"fit\(simd=True\).*estimator.run_cluster"):
        find_cluster(False, 3)
    with pytest.raises(ValueError, match=r"4 processors, which 3 processes can't share"):
        find_cluster(True, 4)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", ["cpu:0"])
    with pytest.raises(ValueError, match=r"fit: there are 3 processes"):
        linear.fit(1, mesh_impl=impl)


def chosen_in_two(directory, runtime, impl, what):
    """Returns what two processes of helpers.train.chosen have written, and what both have said."""
    program = ["--show_all", "--runtime", runtime, chosen.__file__]
    done = processes.launch(2, *program, directory / "out", directory / "cache.json", impl, what)
    return [json.loads((directory / f"out.{i}").read_text()) for i in range(2)], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("runtime, impl", [("tensorflow", "simd"), ("pjrt", "pjrt")])
def test_two_processes_choose_one_layout(runtime, impl, tmp_path):
    (first, second), shown = chosen_in_two(tmp_path, runtime, impl, "runs")
    assert first == second
    np.testing.assert_allclose(first["losses"], linear.fit(3).losses, rtol=1e-5)
    # The first process says it, once.
    assert shown.count(f"layout {first['layout'] or 'no splits'}: the fastest of ") == 1
    again, shown = chosen_in_two(tmp_path, runtime, impl, "runs")
    assert again == [first, first] and shown.count("in an earlier run") == 1


@pytest.mark.slow
@pytest.mark.parametrize("runtime, impl", [("tensorflow", "simd"), ("pjrt", "pjrt")])
def test_all_fail_if_the_first_process_finds_no_layout(runtime, impl, tmp_path):
    (first, second), _ = chosen_in_two(tmp_path, runtime, impl, "limit")
    assert first["error"].startswith("MemoryLimitError: no layout fits in")
    stopped = r"RuntimeError: /job:worker/task:0 at 127.0.0.1:\d+ has stopped: "
    assert re.match(f"{stopped}MemoryLimitError: no layout fits", second["error"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, error",
    [
        ("other", "KeyError: 'nothing of that name is here'"),
        ("step", "OSError: nothing more is here"),
    ],
)
def test_all_fail_if_another_process_cannot_try_a_layout(what, error, tmp_path):
    """Also if the first one is in a step then, which would not end without the other."""
    (first, second), _ = chosen_in_two(tmp_path, "tensorflow", "simd", what)
    assert second["error"] == error
    stopped = r"RuntimeError: /job:worker/task:1 at 127.0.0.1:\d+ has stopped: "
    assert re.match(f"{stopped}{second['error']}", first["error"])


@pytest.mark.parametrize(
    "shape, processes, expected",
    [
        # Processors of one place along `a` are in two processes: all have to count alike.
        ("a:4,b:3", 6, [(0, 2), (0, 2), (0, 2), (1, 2), (1, 2), (1, 2)]),
        ("a:4,b:2", 4, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ("a:4,b:2", 2, [(0, 2), (1, 2)]),
        ("b:2,a:4", 2, [(0, 1), (0, 1)]),
        ("a:3,b:4", 2, [(0, 1), (0, 1)]),
    ],
)
def test_rows_of_each_process(shape, processes, expected):
    shape, batch = mtf.convert_to_shape(shape), mtf.Dimension("batch", 24)
    own = shape.size // processes
    found = []
    for i in range(processes):
        local = list(range(i * own, (i + 1) * own))
        cluster = types.SimpleNamespace(per_process=own, local=local)
        rules = mtf.convert_to_layout_rules("batch:a")
        part = Placing(shape, rules, (), simd=True, cluster=cluster).part(batch)
        found.append((part.index, part.count))
    assert found == expected


LOST = """
import os, signal, sys
import numpy as np
import mesh_tensorflow as mtf
from mesh_tensorflow import launch

def batches():
    for step in range(100):
        if step == 3 and launch.processes().index == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        yield np.ones([4, 3], np.float32)

def loss(mesh, x):
    y = mtf.layers.dense(x, mtf.Dimension("out", 2), reduced_dims=x.shape[1:], name="dense")
    return mtf.reduce_mean(mtf.square(y))

mtf.train.fit(
    loss, batches(), 50, dims=mtf.convert_to_shape("batch:4,d:3").dims, simd=True,
    mesh_shape="p:2", layout="batch:p", optimizer=mtf.optimize.SgdOptimizer(0.1), seed=0)
"""


def survivor_of(script, victim, monkeypatch, *arguments):
    """Runs two processes, of which one kills itself; returns their addresses and the other's end."""
    addresses = launch._free_addresses(2)
    with contextlib.ExitStack() as stack:
        running = []
        for index in range(2):
            task = {"type": "worker", "index": index}
            config = {"cluster": {"worker": addresses}, "task": task}
            monkeypatch.setenv("TF_CONFIG", json.dumps(config))
            started = processes.started("-c", script, str(victim), *arguments)
            running.append(stack.enter_context(started))
        assert running[victim].end(120).returncode == -9
        return addresses, running[1 - victim].end(60)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_process_is_told_in_a_few_lines(victim, monkeypatch):
    """Of the user's script, and not of the graph; whichever call of the session finds it."""
    addresses, done = survivor_of(LOST, victim, monkeypatch)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) < 50, done.stderr
    me, lost = (f"/job:worker/task:{i} at {addresses[i]}" for i in (1 - victim, victim))
    assert f"PeerLostError: {me} lost {lost}, which does not answer: see what it" in lines[-1]
    assert "have to be started again, from the last checkpoint" in lines[-1]


LOST_WHILE_CHOOSING = """
import os, signal, sys, threading, time
import numpy as np
import mesh_tensorflow as mtf
from mesh_tensorflow import launch

victim, when = int(sys.argv[1]), sys.argv[2]
calls = 0

def end():
    os.kill(os.getpid(), signal.SIGKILL)

def loss(mesh, x):
    global calls
    calls += 1
    if launch.processes().index == victim:
        if when == "times" and calls == 1:
            threading.Timer(2.0, end).start()
        if when == "tries" and calls == 3:
            end()
    for i in range(6):
        out = mtf.Dimension(f"out_{i}", 8)
        x = mtf.layers.dense(x, out, reduced_dims=x.shape[1:], name=f"dense_{i}")
    return mtf.reduce_mean(mtf.square(x))

mtf.train.fit(
    loss, (np.ones([4, 4], np.float32) for _ in range(100)), 50, dims=mtf.convert_to_shape("batch:4,d:4").dims,
    simd=True, mesh_shape="p:2,q:2", optimizer=mtf.optimize.SgdOptimizer(0.1), seed=0,
    layout=mtf.auto_mtf.Auto(120, 4, profile=when == "times", cache=""))
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["times", "tries"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_is_lost_while_a_layout_is_chosen(victim, when, monkeypatch):
    """The others say so in bounded time, whatever they waited for."""
    addresses, done = survivor_of(LOST_WHILE_CHOOSING, victim, monkeypatch, when)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) < 100, done.stderr  # the calls, and not the graph
    lost = f"/job:worker/task:{victim} at {addresses[victim]}"
    assert "PeerLostError: " in lines[-1] and lost in lines[-1], done.stderr

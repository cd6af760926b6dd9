"""Programs of several processes: how they find each other, train together, and end."""

import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from test_simd import network, train

from mesh_tensorflow import launch
from mesh_tensorflow._processes import peers
from mesh_tensorflow._processes.peers import Peer, PeerLostError
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

HERE = os.path.dirname(os.path.abspath(__file__))


def run_script(directory, count, *arguments, extra=(), script="simd_worker.py"):
    """Launches a worker script; returns the finished process."""
    path = [HERE, os.path.dirname(HERE), *(p for p in sys.path if p)]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path), TF_CPP_MIN_LOG_LEVEL="3")
    command = [
        sys.executable,
        "-m",
        "mesh_tensorflow.launch",
        "--processes",
        str(count),
        *extra,
        os.path.join(HERE, script),
        *map(str, arguments),
    ]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, cwd=directory
    )


@pytest.fixture(scope="module")
def placed():
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        return train(network(lambda: PlacementMeshImpl("x:1", "", [""])))


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, mesh_shape, layout, per_process",
    [
        (4, "x:2,y:2", "batch:x,hidden:y", 1),
        (2, "x:2,y:4", "hidden:y,width:x", 4),
    ],
)
def test_training_equals_placement(count, mesh_shape, layout, per_process, placed, tmp_path):
    done = run_script(tmp_path, count, mesh_shape, layout, per_process, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "chief is done" in done.stdout and "not to be shown" not in done.stdout
    found = np.load(tmp_path / "chief.npz")
    np.testing.assert_allclose(found["losses"], placed[0], rtol=1e-5)
    for name, weight in placed[1].items():
        np.testing.assert_allclose(
            found[name.replace("/", "|")], weight, rtol=1e-4, atol=1e-5, err_msg=name
        )
    reader = tf.train.load_checkpoint(str(tmp_path / "model"))
    assert set(reader.get_variable_to_shape_map()) == set(placed[1])
    for name in placed[1]:
        np.testing.assert_array_equal(reader.get_tensor(name), found[name.replace("/", "|")])


@pytest.mark.slow
def test_a_process_that_is_killed_is_named(tmp_path):
    start = time.monotonic()
    done = run_script(tmp_path, 2, "x:2", "batch:x", 1, tmp_path, 1)
    assert time.monotonic() - start < 60
    assert done.returncode == 1
    assert "process 1 (worker 0, 127.0.0.1:" in done.stderr
    assert "was killed by SIGKILL" in done.stderr and "Ending the other 1." in done.stderr


@pytest.mark.slow
def test_a_checkpoint_is_where_all_processes_go_on(placed, tmp_path):
    for resume in ("", "x"):
        done = run_script(tmp_path, 2, "x:2", "batch:x", 1, tmp_path, "", resume)
        assert done.returncode == 0, done.stderr
        losses = np.load(tmp_path / "chief.npz")["losses"]
        if not resume:
            np.testing.assert_allclose(losses, placed[0], rtol=1e-5)
    # Of the weights at the end of the first run; its random numbers begin again.
    assert losses[0] < placed[0][-1] * 1.5 and losses[0] < placed[0][0]


@pytest.mark.slow
def test_on_a_cluster_a_process_that_is_killed_is_named(tmp_path):
    addresses = launch._free_addresses(2)
    cluster = {"chief": addresses[:1], "worker": addresses[1:]}
    path = os.pathsep.join([HERE, os.path.dirname(HERE), *(p for p in sys.path if p)])
    script = [
        sys.executable,
        os.path.join(HERE, "simd_worker.py"),
        "x:2",
        "batch:x",
        "1",
        str(tmp_path),
        "1",
    ]
    started = [
        subprocess.Popen(
            script,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                **tf_config(cluster, kind, 0),
            },
        )
        for kind in ("chief", "worker")
    ]
    chief, worker = started
    _, text = chief.communicate(timeout=120)
    assert worker.wait(10) == -9
    assert chief.returncode == 1
    assert re.search(
        rf"/job:worker/task:0 at {addresses[0]} lost /job:worker/task:1 at {addresses[1]}, which "
        "does not answer",
        text,
    ), text


GROUPS = """
import sys
import time
import tensorflow.compat.v1 as tf
import mesh_tensorflow as mtf
from mesh_tensorflow import launch
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

tf.disable_v2_behavior()
mine = launch.processes()
server = mine.start_server()

def program():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, tf.range(8.0), [mtf.Dimension("batch", 8)])
    total = mtf.reduce_sum(x)
    lowering = mtf.Lowering(mesh.graph, {mesh: SimdMeshImpl("rows:2,cols:2", "batch:cols")})
    return lowering.export_to_tf_tensor(total)

result = replicate(program, devices=mine.devices(), local=mine.local())
with tf.Session(server.target, config=mine.config()) as session:
    mine.initialize(session)
    time.sleep([2, 2, 0, 4][mine.index])
    for _ in range(2):
        assert mine.run(session, result, timeout_seconds=20) == 28.0
if mine.index == int(sys.argv[1]):
    sys.exit(3)
mine.finish(server)
print("finished", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [-1, 2])
def test_processes_wait_for_each_other_at_their_end(fails, tmp_path):
    """The first two are one group of collectives, and could be done before the last begins."""
    (tmp_path / "groups.py").write_text(GROUPS)
    path = os.pathsep.join(p for p in sys.path if p)
    start = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mesh_tensorflow.launch",
            "--processes",
            "4",
            "groups.py",
            str(fails),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
        env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert time.monotonic() - start < 90
    assert (done.returncode == 0) == ("finished" in done.stdout) == (fails < 0), done.stderr
    if fails >= 0:
        assert "ended with status 3" in done.stderr


SLEEPS = """
import os, time
os.close(2)
with open(f"{os.getpid()}.pid", "w"):
    pass
time.sleep(120)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a child that its parent ended"
)
def test_no_process_outlives_a_launcher_that_is_killed(tmp_path):
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    started = subprocess.Popen(
        [sys.executable, "-m", "mesh_tensorflow.launch", "--processes", "2", "sleeps.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )

    def wait_until(condition):
        deadline = time.monotonic() + 90
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert condition()

    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    started.kill()
    assert started.wait() == -9
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid):
    """Whether a process is there, and not only its entry that nobody has waited for."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_process_that_is_missing_is_named():
    mine = launch.Processes(tuple(launch._free_addresses(2)), 0)
    with pytest.raises(
        PeerLostError,
        match=rf"waited 1 s for /job:worker/task:1 at "
        rf"{mine.addresses[1]}, in vain: start it",
    ):
        mine.start_server(wait_seconds=1)


def tf_config(cluster, kind, index):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    "environment, addresses, index",
    [
        ({}, ("localhost:0",), 0),
        (tf_config({"worker": ["a:1", "b:2"]}, "worker", 1), ("a:1", "b:2"), 1),
        (
            tf_config({"chief": ["c:0"], "worker": ["a:1", "b:2"]}, "worker", 1),
            ("c:0", "a:1", "b:2"),
            2,
        ),
        (tf_config({"chief": ["c:0"], "worker": ["a:1"]}, "chief", 0), ("c:0", "a:1"), 0),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, ("localhost:0",), 0),
        (
            {
                "SLURM_NTASKS": "5",
                "SLURM_PROCID": "4",
                "SLURM_STEP_NODELIST": "gpu[08-09],big",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
            },
            ("gpu08:8476", "gpu08:8477", "gpu09:8476", "gpu09:8477", "big:8476"),
            4,
        ),
    ],
)
def test_processes_are_read_from_the_environment(environment, addresses, index):
    found = launch.processes(environment)
    assert (found.addresses, found.index) == (addresses, index)
    assert found.is_chief == (index == 0)


def test_slurm_says_which_nodes_there_are(tmp_path, monkeypatch):
    """Its command knows more forms than TensorFlow; here a script stands for it."""
    command = tmp_path / "scontrol"
    command.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames r[1-2]n[1-2]" ] && printf "r1n1\\nr1n2\\nr2n1\\nr2n2\\n"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = launch.processes(
        {
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "2",
            "SLURM_STEP_NODELIST": "r[1-2]n[1-2]",
            "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
        }
    )
    assert found.addresses == ("r1n1:8476", "r1n2:8476", "r2n1:8476", "r2n2:8476")
    assert found.index == 2


def test_devices():
    mine = launch.Processes(("a:1", "b:2"), 1)
    assert mine.devices(per_process=2)[1:3] == [
        "/job:worker/replica:0/task:0/device:CPU:1",
        "/job:worker/replica:0/task:1/device:CPU:0",
    ]
    assert mine.local(2) == [2, 3]
    assert mine.devices("GPU") == [f"/job:worker/replica:0/task:{i}/device:GPU:0" for i in (0, 1)]


@pytest.mark.parametrize(
    "environment, text",
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG must be JSON such as"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "TF_CONFIG must be JSON such as"),
        (
            tf_config({"worker": ["a:1", "b"]}, "worker", 0),
            "the address 'b' should be \"host:port\"",
        ),
        (tf_config({"worker": ["a:port"]}, "worker", 0), "the address 'a:port' should be"),
        (tf_config({"worker": ["a:1", 7]}, "worker", 0), "the address 7 should be"),
        (
            tf_config({"worker": ["a:1"], "ps": ["b:1"]}, "ps", 0),
            "this task is ps 0, but all processes",
        ),
        (
            tf_config({"worker": ["a:1"]}, "evaluator", 0),
            "this task is evaluator 0, .* make it a worker",
        ),
        (
            {"SLURM_NTASKS": "two", "SLURM_PROCID": "0"},
            "SLURM_NTASKS should be a number, .* is 'two'",
        ),
        (
            {"SLURM_NTASKS": "2", "SLURM_PROCID": "-1"},
            "SLURM_PROCID should be a number, .* is '-1'",
        ),
        (tf_config({"worker": ["a:1"]}, "worker", 3), "is not one of the 1 in the cluster"),
        (
            {
                "SLURM_NTASKS": "3",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NODELIST": "a,b",
                "SLURM_STEP_TASKS_PER_NODE": "2",
            },
            r"3 tasks, but the nodes are \['a', 'b'\] with \[2\]",
        ),
        (
            {
                "SLURM_NTASKS": "2",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NODELIST": "a,b",
                "SLURM_STEP_TASKS_PER_NODE": "two",
            },
            "SLURM_STEP_TASKS_PER_NODE should be .* but is 'two'",
        ),
        (
            {
                "SLURM_NTASKS": "4",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NODELIST": "r[1-2]n[1-2]",
                "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
            },
            r"cannot tell which nodes 'r\[1-2\]n\[1-2\]' are: 'scontrol show hostnames'",
        ),
    ],
)
def test_a_wrong_environment(environment, text, monkeypatch):
    monkeypatch.setenv("PATH", "")  # where SLURM's commands would be
    with pytest.raises(ValueError, match=text):
        launch.processes(environment)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--processes", "2", "nowhere.py"], "there is no script nowhere.py"),
        (["--processes", "0", __file__], "--processes must be at least 1, got 0"),
        (["--processes", "1"], "name a script, or a module by -m"),
        (["--processes", "1", "-m"], "name a script, or a module by -m"),
    ],
)
def test_a_wrong_command_line(arguments, text, capsys):
    with pytest.raises(SystemExit):
        launch.main(arguments)
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_that_is_lost_before_the_variables_are_initialized_is_named(tmp_path):
    """By each of the others, also by one that hears of it after another has ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        patch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
        from helpers.workers import lost_worker

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lost_worker"])
        addresses = launch._free_addresses(3)
        logs = [tmp_path / f"{i}.log" for i in range(3)]
        started = [
            context.Process(target=lost_worker.run, args=(addresses, i, str(logs[i])))
            for i in range(3)
        ]
        for process in started:
            process.start()
        started[2].join(120)
        assert started[2].exitcode == -9
        for process in started[:2]:
            process.join(40)
            process.kill()
    for i in range(2):
        assert logs[i].exists(), f"process {i} waits for ever"
        text = logs[i].read_text()
        assert text.startswith(
            f"PeerLostError: /job:worker/task:{i} at {addresses[i]} lost /job:worker/task:2 at "
            f"{addresses[2]}, which does not answer: see what it wrote last"
        ), text


def test_who_is_lost_and_who_merely_ended(monkeypatch):
    """The first that is silent is lost; who is silent well after it ended for want of it."""
    found = [Peer("worker", i, f"127.0.0.1:{port}") for i, port in enumerate((1, 2, 3))]
    silent = set()
    monkeypatch.setattr(peers, "answers", lambda address: address not in silent)
    monkeypatch.setattr(peers, "_PING_SECS", 0.02)
    monkeypatch.setattr(peers, "_STAY_SECS", 0.3)
    lookout = peers.Lookout(found)
    assert lookout.confirmed() == []
    silent.add(found[1].address)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=r"^/job:worker/task:1 at 127\.0\.0\.1:2$"):
        lookout.call(lambda: time.sleep(60), 60, "waiting")
    assert 0.3 < time.monotonic() - start < 30
    silent.add(found[0].address)
    time.sleep(0.5)
    assert lookout.lost() == [found[1]]
    silent.clear()
    time.sleep(0.5)
    assert lookout.lost() == []
    with pytest.raises(TimeoutError, match=r"waiting took longer than 0.1 s"):
        lookout.call(lambda: time.sleep(60), 0.1, "waiting")
    with pytest.raises(KeyError):
        lookout.call(lambda: {}["absent"], 60, "looking")


@pytest.mark.parametrize("by_server", [False, True])
def test_a_port_that_is_in_use_is_named(by_server):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{other.getsockname()[1]}"
        if by_server:
            other.close()
            assert launch.Processes((address,), 0).start_server()
        else:
            other.listen()
        with pytest.raises(
            RuntimeError,
            match=rf"/job:worker/task:0 at {address}: its server "
            r"cannot be started \(Could not start gRPC server\)\. Another process",
        ):
            launch.Processes((address,), 0).start_server()

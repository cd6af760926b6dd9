"""Programs of several processes: how they find each other, train together, and end."""

import re
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.mesh.launching import run_script, tf_config
from helpers.mesh.residual_network import network, train
from helpers.paths import WORKERS, environment

from mesh_tensorflow import launch
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl


@pytest.fixture(scope="module")
def placed():
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        return train(network(lambda: PlacementMeshImpl("x:1", "", [""])))


@pytest.mark.every("2-x:2,y:4*")
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
    script = [
        sys.executable,
        str(WORKERS / "simd_worker.py"),
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
            env=environment(TF_CPP_MIN_LOG_LEVEL="3", **tf_config(cluster, kind, 0)),
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


@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize("fails", [-1, 2])
def test_processes_wait_for_each_other_at_their_end(fails, tmp_path):
    """The first two are one group of collectives, and could be done before the last begins."""
    (tmp_path / "groups.py").write_text(GROUPS)
    start = time.monotonic()
    done = processes.launch(
        4, "groups.py", fails, code=None, cwd=tmp_path, TF_CPP_MIN_LOG_LEVEL="3"
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


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a child that its parent ended"
)
def test_no_process_outlives_a_launcher_that_is_killed(tmp_path):
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    started = subprocess.Popen(
        [sys.executable, "-m", "mesh_tensorflow.launch", "--processes", "2", "sleeps.py"],
        cwd=tmp_path,
        env=environment(),
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

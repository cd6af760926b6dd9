"""One client drives a mesh whose processors are devices of two server processes."""

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.paths import WORKERS

import mesh_tensorflow as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

LEADER = "/job:worker/replica:0/task:0"
START_SECONDS = 60
STEP_SECONDS = 30
LIFETIME_SECONDS = 900
STEPS = 10
BATCH, D_IN, D_HIDDEN = 8, 6, 12
DATA = np.random.RandomState(0).randn(BATCH, D_IN).astype(np.float32)


def task_devices(*names):
    """Returns device strings from pairs such as "0:1", task and CPU."""
    pairs = [name.split(":") for name in names]
    return [f"/job:worker/task:{task}/device:CPU:{cpu}" for task, cpu in pairs]


# -- the cluster


def free_ports(count):
    """Returns port numbers that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


class Worker:
    """A running server process."""

    def __init__(self, addresses, task, cpus):
        options = {
            "cluster": addresses,
            "task": task,
            "cpus": cpus,
            "lifetime": LIFETIME_SECONDS,
        }
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        environment = {k: v for k, v in environment.items() if not k.lower().endswith("_proxy")}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKERS / "multi_process_worker.py"), json.dumps(options)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put(None)

    def wait_until_ready(self, deadline):
        """Returns whether the server runs before `deadline`."""
        try:
            return self._lines.get(timeout=max(0.1, deadline - time.monotonic())) == "ready"
        except queue.Empty:
            return False

    def stop(self):
        self.process.kill()
        self.process.wait(timeout=20)
        self.process.stdin.close()
        self.process.stdout.close()


def start_cluster(cpus):
    """Returns (workers, session target), or None if a port was taken meanwhile."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    deadline = time.monotonic() + START_SECONDS
    workers = [Worker(addresses, task, cpus) for task in range(2)]
    if all(w.wait_until_ready(deadline) for w in workers):
        return workers, f"grpc://{addresses[0]}"
    for w in workers:
        w.stop()
    return None


@pytest.fixture(scope="module")
def target():
    """The address of a cluster of two processes with two logical CPUs each."""
    for _ in range(3):
        started = start_cluster(cpus=2)
        if started is not None:
            break
    else:
        pytest.fail("no cluster of two local servers could be started")
    workers, address = started
    yield address
    for w in workers:
        w.stop()


def session_config():
    config = tf.ConfigProto(operation_timeout_in_ms=START_SECONDS * 1000)
    config.isolate_session_state = True  # sessions do not see each other's variables
    config.experimental.collective_group_leader = LEADER
    return config


# -- the program


def build(mesh_shape, layout, devices, **kwargs):
    """Builds a two-layer network with dropout and one step of SGD, and lowers it."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, d_in = mtf.Dimension("batch", BATCH), mtf.Dimension("d_in", D_IN)
    hidden = mtf.Dimension("hidden", D_HIDDEN)
    x = mtf.import_tf_tensor(mesh, tf.constant(DATA), [batch, d_in])
    h = mtf.layers.dense(x, [hidden], reduced_dims=[d_in], activation=mtf.relu, name="first")
    h = mtf.dropout(h, True, keep_prob=0.75)
    y = mtf.layers.dense(h, [d_in], reduced_dims=[hidden], name="second")
    noise = mtf.random_normal(mesh, [batch, d_in])
    loss = mtf.reduce_mean(mtf.square(y - x))
    grads = mtf.gradients([loss], [v.value for v in graph.trainable_variables])
    updates = mtf.optimize.SgdOptimizer(0.2).apply_grads(grads, graph.trainable_variables)
    impl = PlacementMeshImpl(mesh_shape, layout, devices, **kwargs)
    lowering = mtf.Lowering(graph, {mesh: impl}, autostack=False)
    return {
        "loss": lowering.export_to_tf_tensor(loss),
        "noise": lowering.export_to_tf_tensor(noise),
        "dropped": lowering.export_to_tf_tensor(h),
        "train": tf.group([lowering.lowered_operation(op) for op in updates]),
        "restore": lowering.copy_masters_to_slices(),
        "save": lowering.copy_slices_to_masters(),
        "slices": {v.name: s.slice_variables for v, s in lowering.variables.items()},
    }


def train(target, mesh_shape, layout, devices, **kwargs):
    """Trains for some steps; returns losses, random values of each step, weights, devices."""
    with tf.Graph().as_default():
        tf.set_random_seed(17)
        program = build(mesh_shape, layout, devices, **kwargs)
        fetches = [program[key] for key in ("loss", "noise", "dropped")]
        masters = {v.op.name: v for v in tf.global_variables()}
        init = tf.global_variables_initializer()
        limit = tf.RunOptions(timeout_in_ms=STEP_SECONDS * 1000)
        config = session_config() if target else None
        with tf.Session(target, config=config) as session:
            session.run(init, options=limit)
            session.run(program["restore"], options=limit)
            steps = []
            for _ in range(STEPS):
                # The update reads what the loss reads, so one run gives both of one step.
                values, _ = session.run([fetches, program["train"]], options=limit)
                steps.append(values)
            session.run(program["save"], options=limit)
            weights = session.run(masters, options=limit)
    losses, noise, dropped = zip(*steps)
    places = {name: [s.device for s in slices] for name, slices in program["slices"].items()}
    return {
        "losses": losses,
        "noise": noise,
        "dropped": dropped,
        "weights": weights,
        "places": places,
    }


@pytest.fixture(scope="module")
def alone():
    """The run of one process and one processor."""
    return train("", "rows:1", "", [""])


BOTH = "batch:rows,hidden:cols"
CASES = {
    "2 processors, data": ("rows:2", "batch:rows", ("0:0", "1:0"), {}),
    "2 processors, model": ("cols:2", "hidden:cols", ("0:0", "1:0"), {"allreduce": "ring"}),
    "4 processors, default": ("rows:2,cols:2", BOTH, ("0:0", "0:1", "1:0", "1:1"), {}),
    "4 processors, ring": (
        "rows:2,cols:2",
        BOTH,
        ("0:0", "0:1", "1:0", "1:1"),
        {"allreduce": "ring"},
    ),
    "4 processors, tasks along columns": (
        "rows:2,cols:2",
        BOTH,
        ("0:0", "1:0", "0:1", "1:1"),
        {"allreduce": "ring"},
    ),
    "4 processors on 2 devices": ("rows:2,cols:2", BOTH, ("0:0", "0:0", "1:0", "1:0"), {}),
    "4 processors, collective": (
        "rows:2,cols:2",
        BOTH,
        ("0:0", "0:1", "1:0", "1:1"),
        {"allreduce": "collective"},
    ),
}


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("case", CASES)
def test_training_equals_one_process(case, target, alone):
    mesh_shape, layout, names, kwargs = CASES[case]
    run = train(target, mesh_shape, layout, task_devices(*names), **kwargs)
    np.testing.assert_allclose(run["losses"], alone["losses"], rtol=1e-6, atol=1e-6)
    assert run["losses"][-1] < run["losses"][0]
    assert sorted(run["weights"]) == sorted(alone["weights"])
    for name, weight in run["weights"].items():
        np.testing.assert_allclose(weight, alone["weights"][name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("case", ["2 processors, data", "4 processors, default"])
def test_random_values_equal_one_process(case, target, alone):
    mesh_shape, layout, names, kwargs = CASES[case]
    run = train(target, mesh_shape, layout, task_devices(*names), **kwargs)
    np.testing.assert_allclose(run["noise"], alone["noise"], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(np.equal(run["dropped"], 0), np.equal(alone["dropped"], 0))
    np.testing.assert_allclose(run["dropped"], alone["dropped"], rtol=1e-5, atol=1e-6)
    assert not np.array_equal(run["noise"][0], run["noise"][1])


def tasks_and_cpus(places):
    specs = [tf.DeviceSpec.from_string(place) for place in places]
    return [f"{spec.task}:{spec.device_index}" for spec in specs]


def test_slices_live_on_the_devices_of_the_mesh():
    devices = task_devices("0:0", "0:1", "1:0", "1:1")
    with tf.Graph().as_default():
        slices = build("rows:2,cols:2", BOTH, devices)["slices"]
    places = {name: tasks_and_cpus(v.device for v in vs) for name, vs in slices.items()}
    assert places == {
        # Split over columns; rows are tasks, which share nothing.
        "first/kernel": ["0:0", "0:1", "1:0", "1:1"],
        "first/bias": ["0:0", "0:1", "1:0", "1:1"],
        "second/kernel": ["0:0", "0:1", "1:0", "1:1"],
        # Replicated: stored once in each task.
        "second/bias": ["0:0", "1:0"],
    }
    assert slices["first/kernel"][0].shape.as_list() == [D_IN, D_HIDDEN // 2]


def test_slices_are_stored_on_both_servers(target):
    """The servers themselves place the slice variables where the mesh says."""
    devices = task_devices("0:0", "0:1", "1:0", "1:1")
    with tf.Graph().as_default():
        build("rows:2,cols:2", BOTH, devices)
        metadata = tf.RunMetadata()
        limit = tf.RunOptions(
            timeout_in_ms=STEP_SECONDS * 1000, trace_level=tf.RunOptions.FULL_TRACE
        )
        with tf.Session(target, config=session_config()) as session:
            init = tf.global_variables_initializer()  # masters are in the slices alone
            session.run(init, options=limit, run_metadata=metadata)
    ran = {
        node.node_name: stats.device
        for stats in metadata.step_stats.dev_stats
        for node in stats.node_stats
    }
    for pnum, device in enumerate(devices):
        [place] = {d for n, d in ran.items() if n == f"first/kernel_slice_{pnum}"}
        assert place.replace("/replica:0", "") == device


def test_each_process_writes_its_slices(target, tmp_path):
    """A sharded saver writes a file from each process; together they are the whole weights."""
    with tf.Graph().as_default():
        build("rows:2,cols:2", BOTH, task_devices("0:0", "1:0", "0:1", "1:1"))
        masters = {v.op.name: v for v in tf.global_variables()}
        saver = tf.train.Saver(sharded=True)
        wipe = [tf.assign(v, tf.zeros(v.shape)) for v in masters.values()]
        with tf.Session(target, config=session_config()) as session:
            session.run(tf.global_variables_initializer())
            weights = session.run(masters)
            path = saver.save(session, str(tmp_path / "model"), write_meta_graph=False)
            session.run(wipe)
            saver.restore(session, path)
            for name, value in session.run(masters).items():
                np.testing.assert_array_equal(value, weights[name])
    shards = sorted(p.name for p in tmp_path.glob("model.data-*"))
    assert shards == ["model.data-00000-of-00002", "model.data-00001-of-00002"]
    assert all((tmp_path / shard).stat().st_size for shard in shards)
    reader = tf.train.load_checkpoint(path)
    for name, value in weights.items():
        np.testing.assert_array_equal(reader.get_tensor(name), value)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_wrong_number_of_devices(count):
    devices = task_devices(*[f"{i}:0" for i in range(count)])
    with pytest.raises(ValueError) as error:
        PlacementMeshImpl("rows:2,cols:2", "batch:rows", devices)
    text = str(error.value)
    assert f"the mesh rows=2, cols=2 needs 4 devices, but there are {count}" in text
    assert devices[-1] in text
    assert f"Mesh shapes that fit {count}:" in text

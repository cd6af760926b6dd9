"""A training over two processes: as in one process, also after one of them was killed."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers import paths

from mesh_tensorflow import estimator
from mesh_tensorflow._processes import peers
from mesh_tensorflow.estimator import processes

PROGRAM = paths.WORKERS / "cluster_process.py"
STEPS = 12
MINUTE = 60


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


class Process:
    """A running process of the program, whose output is read as it comes."""

    def __init__(self, directory, steps, seconds=0.0, cluster=None, job=None):
        environment = paths.environment(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
        environment = {k: v for k, v in environment.items() if not k.lower().endswith("_proxy")}
        if cluster is not None:
            environment["TF_CONFIG"] = json.dumps(
                {"cluster": cluster, "task": {"type": job, "index": 0}}
            )
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(directory), str(steps), str(seconds)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.lines, self.errors = [], []
        self._threads = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in [(self.process.stdout, self.lines), (self.process.stderr, self.errors)]
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _read(stream, lines):
        for line in stream:
            lines.append(line.rstrip())

    def wait_for(self, what):
        deadline = time.monotonic() + 2 * MINUTE
        while not any(f"{line} ".startswith(f"{what} ") for line in self.lines):
            assert time.monotonic() < deadline and self.process.poll() is None, self.errors[-20:]
            time.sleep(0.05)

    def end(self, seconds=2 * MINUTE):
        """Returns the exit code and the text of the errors, once the process has ended."""
        try:
            code = self.process.wait(timeout=seconds)
        finally:
            self.kill()
        for thread in self._threads:
            thread.join(timeout=10)
        return code, "\n".join(self.errors)

    def kill(self):
        self.process.kill()
        self.process.wait(timeout=20)

    @property
    def losses(self):
        found = [re.fullmatch(r"step (\d+) ([\d.]+)", line) for line in self.lines]
        return {int(m[1]): float(m[2]) for m in found if m}

    @property
    def evaluation(self):
        [line] = [line for line in self.lines if line.startswith("evaluated ")]
        return [float(word) for word in line.split()[1:]]


@pytest.fixture
def start():
    """Starts the chief and the worker of a new cluster; ends them after the test."""
    started = []

    def start_both(directory, steps, seconds=0.0):
        ports = free_ports(2)
        cluster = {"chief": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]}
        both = [Process(directory, steps, seconds, cluster, job) for job in cluster]
        started.extend(both)
        return [*both, cluster]

    yield start_both
    for process in started:
        process.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of a run in one process, and its evaluation."""
    process = Process(tmp_path_factory.mktemp("alone"), STEPS)
    code, errors = process.end()
    assert code == 0, errors
    assert len(process.losses) == STEPS
    return process.losses, process.evaluation


def assert_same(process, alone, first_step):
    losses, evaluation = alone
    expected = {step: loss for step, loss in losses.items() if step >= first_step}
    assert list(process.losses) == list(expected)
    np.testing.assert_allclose(list(process.losses.values()), list(expected.values()), rtol=1e-5)
    np.testing.assert_allclose(process.evaluation, evaluation, rtol=1e-5)


# -- real processes


@pytest.mark.slow
def test_training_equals_one_process(start, tmp_path, alone):
    chief, worker, _ = start(tmp_path, STEPS)
    for process, result in [(chief, "trained"), (worker, None)]:
        code, errors = process.end()
        assert code == 0, errors
        assert process.lines[-1] == f"result {result}"
    assert_same(chief, alone, 1)
    assert worker.losses == {}


@pytest.mark.every("chief*")
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["chief", "worker"])
def test_a_killed_process_is_named_and_training_resumes(victim, start, tmp_path, alone):
    chief, worker, cluster = start(tmp_path, 1000000, seconds=0.05)
    chief.wait_for("step 8")
    killed, other = (chief, worker) if victim == "chief" else (worker, chief)
    killed.process.kill()
    started = time.monotonic()
    code, errors = other.end()
    assert time.monotonic() - started < MINUTE
    assert code == 1
    gone = f"/job:{victim}/task:0 at {cluster[victim][0]} does not answer any more"
    assert gone in errors.splitlines()[-1], errors
    saved = int(tf.train.load_variable(str(tmp_path), "global_step"))
    assert 5 <= saved < STEPS
    chief, worker, _ = start(tmp_path, STEPS)
    assert [process.end()[0] for process in (chief, worker)] == [0, 0], chief.errors[-20:]
    assert_same(chief, alone, saved + 1)


@pytest.mark.every
def test_a_worker_killed_while_the_chief_saves(start, tmp_path, alone):
    """The checkpoint before is complete, and nothing of the one begun is in the way."""
    chief, worker, cluster = start(tmp_path, 1000000, seconds=0.5)
    chief.wait_for("saving 10")
    worker.process.kill()
    code, errors = chief.end()
    assert code == 1
    gone = f"/job:worker/task:0 at {cluster['worker'][0]} does not answer any more"
    assert gone in errors.splitlines()[-1], errors
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("model.ckpt-5")
    chief, worker, _ = start(tmp_path, STEPS)
    assert [process.end()[0] for process in (chief, worker)] == [0, 0], chief.errors[-20:]
    assert_same(chief, alone, 6)


@pytest.mark.every
@pytest.mark.slow
def test_a_process_that_hangs_is_named(start, tmp_path):
    chief, worker, cluster = start(tmp_path, 1000000, seconds=0.05)
    chief.wait_for("step 2")
    worker.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    code, errors = chief.end()
    assert time.monotonic() - started < MINUTE
    assert code == 1
    assert f"/job:worker/task:0 at {cluster['worker'][0]} does not answer" in errors


@pytest.mark.slow
def test_the_worker_says_why_the_chief_stopped(start, tmp_path):
    chief, worker, cluster = start(tmp_path, 1000000, seconds=0.05)
    chief.wait_for("step 2")
    chief.process.send_signal(signal.SIGTERM)
    assert chief.end()[0] == 143
    code, errors = worker.end()
    assert code == 1
    assert f"/job:chief/task:0 at {cluster['chief'][0]} has stopped: " in errors.splitlines()[-1]
    assert "training stopped by SIGTERM after step" in errors.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, True])
def test_a_worker_is_stopped_after_the_chief_has_saved(start, tmp_path, both):
    """Also where each process receives the signal, as from a cluster's manager."""
    chief, worker, _ = start(tmp_path, 1000000, seconds=0.05)
    chief.wait_for("step 2")
    for process in (worker, *([chief] if both else [])):
        process.process.send_signal(signal.SIGTERM)
    code, errors = chief.end()
    assert code == 143, errors
    saved = int(tf.train.load_variable(str(tmp_path), "global_step"))
    assert f"training stopped by SIGTERM after step {saved}; the latest checkpoint is" in errors
    assert worker.end()[0] == 143


# -- the watch


ME = peers.Peer("chief", 0, "127.0.0.1:1")


def test_answers():
    [port] = free_ports(1)
    assert not peers.answers(f"127.0.0.1:{port}")
    server = tf.distribute.Server.create_local_server()
    assert peers.answers(server.target.removeprefix("grpc://"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not peers.answers(f"127.0.0.1:{silent.getsockname()[1]}", seconds=0.2)


def test_a_process_that_was_never_started():
    [port] = free_ports(1)
    peer = peers.Peer("worker", 3, f"127.0.0.1:{port}")
    with pytest.raises(estimator.PeerLostError) as raised:
        peers.wait_for([peer], ME, 0.3)
    assert str(raised.value) == (
        f"/job:chief/task:0 at 127.0.0.1:1 waited 0.3 s for /job:worker/task:3 at 127.0.0.1:{port}, "
        "in vain: start it with the same TF_CONFIG but for its task, and see that nothing blocks "
        "the port"
    )
    assert raised.value.peer == peer


def test_no_session_in_place_of_one_of_a_lost_process(monkeypatch):
    monkeypatch.setattr(peers, "PING_SECS", 0.05)
    [port] = free_ports(1)
    peer = peers.Peer("worker", 0, f"127.0.0.1:{port}")
    watch = peers.Watch([peer], ME)
    made = []
    creator = processes.WatchedSessionCreator(
        lambda: made.append(tf.Session(graph=tf.Graph())) or made[-1], watch
    )
    session = creator.create_session()
    try:
        with pytest.raises(
            estimator.PeerLostError, match=f"task:0 at 127.0.0.1:{port} does not ans"
        ):
            creator.create_session()
    finally:
        watch.stop()
    assert watch.lost() == [peer] and made == [session]


# -- run_cluster in one process


def test_one_process_runs_the_function():
    assert estimator.run_cluster(lambda: 7, estimator.RunConfig()) == 7


def test_mistakes(monkeypatch):
    with pytest.raises(TypeError, match="config should be a RunConfig, but is 3"):
        estimator.run_cluster(lambda: None, 3)
    monkeypatch.setenv(
        "TF_CONFIG",
        json.dumps(
            {
                "cluster": {"chief": ["a:1"], "worker": ["b:1"]},
                "task": {"type": "evaluator", "index": 0},
            }
        ),
    )
    with pytest.raises(ValueError, match="makes this process an evaluator, which is not part"):
        estimator.run_cluster(lambda: None, estimator.RunConfig())

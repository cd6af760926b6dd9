"""A signal to one of several processes: all of them end after the same step, and it is saved."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.paths import environment
from helpers.train import linear, preempted

from mesh_tensorflow.launch import _free_addresses


class Cluster:
    """Two processes that train without an end."""

    def __init__(self, directory, mesh_impl):
        self.directory = directory
        addresses = _free_addresses(2)
        self._cluster = {"chief": addresses[:1], "worker": addresses[1:]}
        self._runtime = "pjrt" if mesh_impl == "pjrt" else "tensorflow"
        self.processes = [self._start(job, mesh_impl) for job in self._cluster]

    def _start(self, job, mesh_impl):
        config = json.dumps({"cluster": self._cluster, "task": {"type": job, "index": 0}})
        command = [sys.executable, preempted.__file__, str(self.directory), mesh_impl]
        with open(self.directory / job, "w") as errors:
            variables = environment(TF_CONFIG=config, MTF_RUNTIME=self._runtime)
            return subprocess.Popen(command, env=variables, stderr=errors)

    def steps(self):
        """Returns how many steps the chief has done."""
        path = self.directory / "steps"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def errors(self):
        return [(self.directory / job).read_text() for job in self._cluster]

    def send(self, number, process, after):
        """Sends a signal to a process after some steps; returns exit codes once all have ended."""
        deadline = time.monotonic() + 300
        while self.steps() < after:
            assert time.monotonic() < deadline, self.errors()
            assert [p.poll() for p in self.processes] == [None, None], self.errors()
            time.sleep(0.05)
        self.processes[process].send_signal(number)
        return [p.wait(300) for p in self.processes]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh_impl", "process", "name"),
    [
        ("simd", 0, "SIGTERM"),
        ("simd", 1, "SIGTERM"),
        ("simd", 1, "SIGINT"),
        ("pjrt", 0, "SIGTERM"),
        ("pjrt", 1, "SIGTERM"),
        ("pjrt", 1, "SIGINT"),
    ],
)
def test_all_end_after_one_step_which_is_saved(tmp_path, mesh_impl, process, name):
    cluster = Cluster(tmp_path, mesh_impl)
    try:
        codes = cluster.send(getattr(signal, name), process, after=3)
    finally:
        cluster.kill()
    expected = [-signal.SIGINT if name == "SIGINT" else 143] * 2
    if (mesh_impl, process) == ("pjrt", 0):
        expected[1] = 1  # with the error of the chief, whose program ended before its time
    assert codes == expected, cluster.errors()
    last, steps = tf.train.latest_checkpoint(str(tmp_path / "model")), cluster.steps()
    assert last.endswith(f"model.ckpt-{steps}")
    key = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM"}[name]
    where = " in another process" if process == 1 else ""
    said = f"{key}{where}: stopped at step {steps} of 1000000, saved as {last}. Run the same"
    assert said in cluster.errors()[0]
    whole = linear.fit(steps + 1)
    rest = linear.fit(steps + 1, directory=str(tmp_path / "model"))
    np.testing.assert_allclose(rest.losses, whole.losses[steps:], rtol=1e-4)

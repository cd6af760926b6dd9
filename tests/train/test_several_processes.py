"""mtf.train.fit in several processes: the numbers of one; errors if they are not connected."""

import json
import subprocess
import sys

import numpy as np
import pytest
from helpers.paths import environment
from helpers.train import linear, several

from mesh_tensorflow.train._cluster import check_connected, find_cluster


def test_two_processes(tmp_path):
    command = [sys.executable, "-m", "mesh_tensorflow.launch", "--processes", "2", "--show_all"]
    command += [several.__file__, str(tmp_path / "model"), str(tmp_path / "out")]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
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
    assert found[0]["checkpoint"].endswith("model.ckpt-5")
    rest = linear.fit(6, directory=str(tmp_path / "model"))
    np.testing.assert_allclose(rest.losses, linear.fit(6).losses[5:], rtol=1e-5)


def test_processes_that_do_not_know_each_other():
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE=4 says that there are 4 processes"):
        check_connected({"OMPI_COMM_WORLD_SIZE": "4"})
    with pytest.raises(ValueError, match=r"python -m mesh_tensorflow\.launch --processes N"):
        check_connected({"WORLD_SIZE": "2"})
    check_connected({"WORLD_SIZE": "1"})


def test_processes_that_do_not_fit(monkeypatch):
    cluster = {"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(ValueError, match=r"fit\(simd=True\).*estimator.run_cluster"):
        find_cluster(False, 3)
    with pytest.raises(ValueError, match=r"4 processors, which 3 processes can't share"):
        find_cluster(True, 4)

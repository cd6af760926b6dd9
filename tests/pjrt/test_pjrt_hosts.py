"""Several processes of JAX: the numbers of one, checkpoints of parts, and a lost process."""

import json
import re
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import pjrt, pjrt_hosts, processes
from helpers.paths import EXAMPLES

import mesh_tensorflow as mtf

sys.path.append(str(EXAMPLES))

import run_exported


def launched(*arguments, count=2, code=0):
    program = pjrt_hosts.__file__
    return processes.launch(count, "--runtime", "pjrt", program, *arguments, code=code)


@pytest.mark.slow
def test_two_processes_are_as_one(tmp_path):
    launched(tmp_path)
    found = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)]
    assert [f["devices"] for f in found] == [[4, 2], [4, 2]]
    tf.random.set_seed(5)
    on_jax = mtf.pjrt.function(mesh_shape=pjrt.MESH, layout=pjrt.LAYOUT)
    step = on_jax(pjrt.training(mtf.pjrt.mesh_impl))
    expected = [float(step(pjrt.DATA)) for _ in range(3)]
    for record in found:
        np.testing.assert_allclose(record["losses"][:3], expected, rtol=1e-6)
    first, second = (record.pop("error") for record in found)
    assert "damaged/model is damaged or cut short" in first
    assert "another process cannot read its parts of checkpoint" in second
    check_unwritten(*(record.pop("unwritten") for record in found))
    assert found[0] == found[1]
    assert found[0]["files"] == ["weights.safetensors", "program_4.bin", "program_1.bin"]
    for devices in (1, 4):
        [product] = run_exported.run(tmp_path / "exported", devices, [pjrt.DATA])
        np.testing.assert_allclose(product, pjrt.DATA @ np.array(pjrt_hosts.WEIGHTS), rtol=1e-5)

    copies = tf.train.load_checkpoint(str(tmp_path / "copies" / "copies"))
    np.testing.assert_array_equal(copies.get_tensor("w"), pjrt_hosts.WEIGHTS)

    # The files are those of one process, and the weights those after three steps.
    path = str(tmp_path / "model.ckpt-3")
    assert tf.train.latest_checkpoint(str(tmp_path)) == path
    reader = tf.train.load_checkpoint(path)
    assert reader.get_tensor("global_step") == 3
    for name in step.store.names:
        value = step.store.value(name)
        np.testing.assert_allclose(reader.get_tensor(name), value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[0]["sums"][name], np.sum(value), rtol=1e-4, atol=1e-5)
    step(pjrt.DATA)
    mtf.pjrt.restore(step.store, path)
    for name in step.store.names:
        np.testing.assert_array_equal(step.store.value(name), reader.get_tensor(name))
    again = mtf.pjrt.save(step.store, str(tmp_path / "again"))
    np.testing.assert_array_equal(
        tf.train.load_checkpoint(again).get_tensor(name), reader.get_tensor(name)
    )


def check_unwritten(first, second):
    """Whichever process cannot write, the others do not wait for it."""
    assert first[0].startswith("NotADirectoryError: ")
    assert re.match(
        r"RuntimeError: mtf.pjrt.export: the first process could not .*says why", second[0]
    )
    assert re.match(
        r"OSError: mtf.pjrt.save: another process could not write .*says why", second[1]
    )
    assert re.match(r"OSError: .*unwritten.part-0-of-2 could not be written: ", first[1])


@pytest.mark.slow
def test_some_of_the_processes_draw_one_seed(tmp_path):
    """Also a process that is in several groups, and then all, of which one was in another group."""
    launched(tmp_path, "some", count=3)
    found = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(3)]
    assert [[members for members, _ in f] for f in found] == [
        [[0, 1], [0, 1, 2]],
        [[1, 2], [0, 1], [1, 2], [0, 1, 2]],
        [[1, 2], [1, 2], [0, 1, 2]],
    ]
    zero, one, two = ([values for _, values in f] for f in found)
    assert one[0] == two[0]
    assert zero[0] == one[1]
    assert one[2] == two[1]
    assert zero[1] == one[3] == two[2]
    assert len({tuple(values) for values in one}) >= 3


@pytest.mark.slow
def test_a_process_that_is_lost_is_named(tmp_path):
    """Nothing is seeded here: the first process draws a seed for both, also for given devices."""
    done = launched(tmp_path, "1", code=1)
    assert "process 1 (worker 0, 127.0.0.1:" in done.stderr
    assert "was killed by SIGKILL" in done.stderr
    found = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)]
    assert found[0]["losses"] == found[1]["losses"] and found[0]["sums"] == found[1]["sums"]


def test_sessions_run_in_the_chief(monkeypatch):
    monkeypatch.setattr("mesh_tensorflow.pjrt._in_session.process_count", lambda: 2)
    message = r"there are 2 processes, of which the first runs the session.*run_in_chief\(main\)"
    with tf.Graph().as_default(), pytest.raises(ValueError, match=message):
        mtf.pjrt.in_session(lambda: tf.constant(1))


def test_a_checkpoint_that_is_not_there(tmp_path):
    on_jax = mtf.pjrt.function(mesh_shape=pjrt.MESH, layout=pjrt.LAYOUT)
    step = on_jax(pjrt.training(mtf.pjrt.mesh_impl))
    step.make_variables(pjrt.DATA)
    with pytest.raises(ValueError, match=r"model\.ckpt"):
        mtf.pjrt.restore(step.store, str(tmp_path / "model.ckpt"))

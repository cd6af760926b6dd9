"""A stage in each process: the losses of a training with layers in a row."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.mesh.launching import run_script
from helpers.transformer import pipelined

from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl


def losses_of(impl, blocks, in_stages):
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        step = pipelined.step_of(impl, blocks, in_stages)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return [session.run(step)["loss"] for _ in range(pipelined.STEPS)]


def in_a_row(blocks):
    return losses_of(PlacementMeshImpl("", "", [""]), blocks, False)


@pytest.mark.slow
def test_variables_in_parts():
    """ZeRO over the processors of the stages."""
    impl = PlacementMeshImpl("all:2", "stages:all", [""] * 2, zero=3, zero_axis="all")
    np.testing.assert_allclose(losses_of(impl, 2, True), in_a_row(2), rtol=1e-5)


@pytest.mark.every("4*")
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_trains_as_layers_in_a_row(count, tmp_path):
    """With dropout and Adam; each process checks that it communicates what is predicted."""
    done = run_script(tmp_path, count, tmp_path / "losses.npy", script="pipeline_worker.py")
    assert done.returncode == 0, done.stderr
    expected = in_a_row(count)
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(np.load(tmp_path / "losses.npy"), expected, rtol=1e-5)

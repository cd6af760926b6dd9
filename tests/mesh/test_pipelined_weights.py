"""A pipeline in processes: each one stores the weights and the slots of its own stage, and trains them."""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.mesh import pipelined_training
from helpers.mesh.launching import run_script

from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

MODEL, HIDDEN = pipelined_training.MODEL.size, pipelined_training.HIDDEN.size


@functools.cache
def whole(stages):
    """The losses of one process that stores everything, and its weights after the training."""
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        step, lowering = pipelined_training.step_of(PlacementMeshImpl("", "", [""]), stages)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            losses = [session.run(step)["loss"] for _ in range(pipelined_training.STEPS)]
            return losses, session.run({v.op.name: v for v in tf.trainable_variables()})


@pytest.mark.every("4*")
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_store_their_own_stage(count, tmp_path):
    """What follows the pipeline, one more weight, each of them has."""
    done = run_script(tmp_path, count, tmp_path, script="pipeline_weights_worker.py")
    assert done.returncode == 0, done.stderr
    losses, weights = whole(count)
    np.testing.assert_allclose(np.load(tmp_path / "losses.npy"), losses, rtol=1e-5)
    assert weights["wi"].shape == (count, MODEL, HIDDEN)
    for i in range(count):
        # Weights and the two slots of each: nothing else exists, such as a copy of all stages.
        assert np.load(tmp_path / f"elements{i}.npy") == 3 * (2 * MODEL * HIDDEN + MODEL)
        stored = dict(np.load(tmp_path / f"stored{i}.npz"))
        for name in ("wi", "wo"):
            np.testing.assert_allclose(stored[name], weights[name][i : i + 1], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(stored["head"], weights["head"], rtol=1e-4, atol=1e-6)
        slots = {name: x.shape for name, x in stored.items() if "adam" in name}
        assert slots == {
            "stacked/wi/adam_m": (2, 1, MODEL, HIDDEN),
            "stacked/wo/adam_m": (2, 1, HIDDEN, MODEL),
            "stacked/head/adam_m": (2, MODEL),
        }

"""Variables that processes store in parts: what each one stores, and how they train."""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.mesh import stored_training
from helpers.mesh.launching import run_script

from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl


@functools.cache
def whole():
    """The losses and the variables of one process that stores everything."""
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        step, lowering = stored_training.step_of(PlacementMeshImpl("", "", [""]))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            losses = [session.run(step)["loss"] for _ in range(stored_training.STEPS)]
            return losses, session.run({v.op.name: v for v in tf.global_variables()})


@pytest.mark.every("4*")
@pytest.mark.slow
@pytest.mark.parametrize(
    "count, stage, joint",
    [(2, 3, []), (2, 1, []), (2, 2, []), (4, 1, []), (4, 2, []), (4, 3, []), (4, 3, ["joint"])],
)
def test_trains_in_processes(count, stage, joint, tmp_path):
    """Each process checks how many elements it stores."""
    done = run_script(tmp_path, count, stage, tmp_path, *joint, script="stored_layouts_worker.py")
    assert done.returncode == 0, done.stderr
    found = dict(np.load(tmp_path / "found.npz"))
    losses, values = whole()
    np.testing.assert_allclose(found.pop("losses"), losses, rtol=1e-5)
    assert found.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)

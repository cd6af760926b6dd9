"""MNIST, the toy model and a transformer block train by SIMD as by placement."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.mesh import simd_models
from helpers.mesh.launching import run_script

from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

CPUS = [f"/cpu:{i}" for i in range(4)]
WAYS = {
    "placement": lambda name: simd_models.step_of(
        name, lambda shape, layout: PlacementMeshImpl(shape, layout, CPUS)
    ),
    "simd": lambda name: replicate(lambda: simd_models.step_of(name, SimdMeshImpl), devices=CPUS),
}


def losses_of(name, way):
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        step = WAYS[way](name)
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
            session.run(tf.global_variables_initializer())
            return [session.run(step)["loss"] for _ in range(simd_models.STEPS)]


@pytest.fixture(scope="module")
def placed():
    found = {name: losses_of(name, "placement") for name in simd_models.MODELS}
    for name, losses in found.items():
        assert losses[-1] < losses[0], name
    return found


@pytest.mark.slow("mnist*", "toy*", "transformer*")
@pytest.mark.parametrize("name", simd_models.MODELS)
def test_in_one_process(name, placed):
    np.testing.assert_allclose(losses_of(name, "simd"), placed[name], rtol=1e-5)


@pytest.mark.every
@pytest.mark.slow
def test_in_four_processes(placed, tmp_path):
    done = run_script(tmp_path, 4, tmp_path / "losses.npz", script="simd_models_worker.py")
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "losses.npz")
    for name, losses in placed.items():
        np.testing.assert_allclose(found[name], losses, rtol=1e-5, err_msg=name)

"""The MNIST example on devices of JAX."""

import re
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import processes
from helpers.paths import EXAMPLES

import mesh_tensorflow as mtf

sys.path.append(str(EXAMPLES))

import mnist
import mnist_pjrt


def batches(steps=3, size=8):
    """Returns images and labels of steps, and the number of each."""
    random = np.random.RandomState(0)
    return [
        (random.rand(size, 28, 28).astype("float32"), random.randint(0, 10, size, "int32"), step)
        for step in map(np.int64, range(steps))
    ]


def test_trains_as_on_placed_devices():
    options = mnist.Options(hidden_size=8, batch_size=8)

    @mtf.function
    def placed(images, labels, step):
        mesh = mtf.Mesh(mtf.Graph(), "mnist")
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            options.mesh_shape, options.layout, ["cpu:0"] * 4
        )
        with mtf.utils.counted_steps(step):
            _, loss = mnist.logits_and_loss(mesh, impl, images, labels, options)
            updates = mnist.training(loss, options, 10)
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        value = lowering.export_to_tf_tensor(loss)
        with tf.control_dependencies([lowering.lowered_operation(update) for update in updates]):
            return tf.identity(value)

    model = mnist_pjrt.Model(mnist.logits_and_loss, mnist.training, None, None)
    on_jax, right = mnist_pjrt.functions(model, options, 10)
    found = []
    for step in (placed, on_jax):
        tf.random.set_seed(1)
        found.append([float(step(*batch)) for batch in batches()])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
    images, labels, _ = batches()[0]
    assert float(right(images, labels, np.ones(8, "float32"))) in range(9)


@pytest.mark.slow
def test_resumes_what_was_trained_on_placed_devices(tmp_path):
    """And the other way around."""
    epochs = []
    for number, impl in enumerate(["placement", "pjrt", "placement"], 1):
        done = processes.run(
            EXAMPLES / "mnist.py",
            *["--hidden_size=8", "--batch_size=300", "--mesh_shape=all:2", "--layout=batch:all"],
            *[f"--model_dir={tmp_path}", f"--train_epochs={number}", f"--mesh_impl={impl}"],
            timeout=500,
        )
        assert done.returncode == 0, done.stderr
        epochs += re.findall(r"^epoch (\d)/\d  loss (\d\.\d+)", done.stdout, re.M)
        assert impl != "pjrt" or "Communication of a training step, by XLA:" in done.stdout
    assert [number for number, _ in epochs] == ["1", "2", "3"]
    assert sorted(epochs, key=lambda epoch: epoch[1], reverse=True) == epochs

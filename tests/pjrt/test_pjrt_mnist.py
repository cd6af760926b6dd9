"""The MNIST example on devices of JAX."""

import re
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.paths import EXAMPLES

from mesh_tensorflow import estimator

sys.path.append(str(EXAMPLES))

import mnist

RANDOM = np.random.RandomState(0)
IMAGES = RANDOM.rand(24, 28, 28).astype("float32")
LABELS = RANDOM.randint(0, 10, 24, "int32")


class Losses(tf.train.SessionRunHook):
    """Notes the loss of each step."""

    def __init__(self):
        self.values = []

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(mnist.LOSS)

    def after_run(self, run_context, run_values):
        self.values.append(float(run_values.results))


def input_fn(mode):
    data = {"images": IMAGES, "counted": np.ones(24, "float32")}
    return tf.data.Dataset.from_tensor_slices((data, LABELS)).batch(8, drop_remainder=True)


def classifier(mesh_impl, directory):
    options = mnist.Options(hidden_size=8, batch_size=8, mesh_impl=mesh_impl)
    config = estimator.RunConfig(directory, tf_random_seed=1, save_checkpoints_steps=3)
    params = {"options": options, "total_steps": 10, "shown": False}
    return estimator.Estimator(mnist.model_fn, config=config, params=params)


@pytest.mark.every
def test_trains_evaluates_and_predicts_as_on_placed_devices(tmp_path):
    found = {}
    for impl in ("placement", "pjrt"):
        model, losses = classifier(impl, str(tmp_path / impl)), Losses()
        model.train(input_fn, hooks=[losses], max_steps=3)
        predicted = [p["class"] for p in model.predict(input_fn)]
        found[impl] = losses.values, model.evaluate(input_fn), predicted
    (losses, metrics, predicted), (on_jax, other_metrics, other_predicted) = found.values()
    assert len(losses) == 3
    np.testing.assert_allclose(on_jax, losses, rtol=1e-5)
    assert other_metrics == pytest.approx(metrics, rel=1e-4)
    assert other_predicted == predicted
    # Each reads what the other wrote.
    for impl, other in [("placement", "pjrt"), ("pjrt", "placement")]:
        there = classifier(impl, str(tmp_path / other)).evaluate(input_fn)
        assert there == pytest.approx(metrics, rel=1e-4)


@pytest.mark.every
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
        assert impl != "pjrt" or "which XLA may choose otherwise:" in done.stdout
    assert [number for number, _ in epochs] == ["1", "2", "3"]
    assert sorted(epochs, key=lambda epoch: epoch[1], reverse=True) == epochs

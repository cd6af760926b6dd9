"""Programs import TensorFlow without Keras and JAX, which are loaded when they are used."""

import pytest
from helpers import processes

SCRIPT = '''
import sys

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import utils

print("keras" in sys.modules, "jax" in sys.modules)

import gin
import tensorflow as tf


@gin.configurable
def rate(optimizer=None, schedule=None):
    return float(optimizer.learning_rate.numpy()), float(schedule(5))


gin.parse_config("""
tf.keras.optimizers.SGD.learning_rate = 0.25
tf.keras.optimizers.schedules.ExponentialDecay.initial_learning_rate = 8.0
ExponentialDecay.decay_steps = 5
ExponentialDecay.decay_rate = 0.5
rate.optimizer = @tf.keras.optimizers.SGD()
rate.schedule = @tf.keras.optimizers.schedules.ExponentialDecay()
""")
print(rate())
print(isinstance(mtf.optimize.from_keras(tf.keras.optimizers.RMSprop(1e-3)), mtf.optimize.Optimizer))
'''


@pytest.mark.slow
def test_keras_and_jax_are_imported_when_they_are_used(tmp_path):
    path = tmp_path / "mtf-script"  # as the commands that are installed
    path.write_text(SCRIPT)
    assert processes.python(path).stdout.splitlines() == ["False False", "(0.25, 4.0)", "True"]

"""Second derivatives of functions of one value are those of TensorFlow."""

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf

X = np.float32([-1.7, -0.6, 0.3, 0.8, 1.9])
FUNCTIONS = {
    "swish": tf.nn.silu,
    "gelu": lambda t: tf.nn.gelu(t, approximate=True),
    "exp": tf.exp,
    "tanh": tf.tanh,
    "sigmoid": tf.sigmoid,
    "softplus": tf.math.softplus,
    "elu": tf.nn.elu,
    "selu": tf.nn.selu,
    "square": tf.square,
    "sin": tf.sin,
    "cos": tf.cos,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives(name):
    graph = mtf.Graph()
    x = mtf.import_tf_tensor(mtf.Mesh(graph, "mesh"), tf.constant(X), "d:5")
    [first] = mtf.gradients([mtf.reduce_sum(getattr(mtf, name)(x))], [x])
    [second] = mtf.gradients([mtf.reduce_sum(first * first)], [x])
    t = tf.constant(X)
    with tf.GradientTape() as outer:
        outer.watch(t)
        with tf.GradientTape() as inner:
            inner.watch(t)
            y = FUNCTIONS[name](t)
        expected = inner.gradient(y, t)
        total = tf.reduce_sum(tf.square(expected))
    np.testing.assert_allclose(first.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(second.numpy(), outer.gradient(total, t), atol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_narrow_ids_of_a_split_vocabulary(dtype):
    """A part begins where the dtype of the ids may not reach."""
    ids = np.array([0, 7, 100], dtype)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        "all:2", "vocab:all", ["cpu:0"] * 2, merge="none"
    )
    mesh = mtf.Mesh(mtf.Graph(), "mesh", mesh_impl=impl)
    found = mtf.one_hot(
        mtf.import_tf_tensor(mesh, tf.constant(ids), "batch:3"), mtf.Dimension("vocab", 384)
    )
    np.testing.assert_array_equal(found.numpy(), np.eye(384)[ids])

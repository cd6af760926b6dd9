"""Batch normalization over steps, and the correlation matrix."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import dims
from helpers.layers.layer_graph import LayerGraph
from helpers.world import World

import mesh_tensorflow as mtf

batch_norm = mtf.layers.batch_norm


def averages(run):
    return [v.value for v in run.graph.all_variables if "moving" in v.name]


@pytest.mark.parametrize("mesh_shape, layout", [("", ""), ("x:2,y:2", "b:x,c:y"), ("x:4", "b:x")])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_averages_come_to_the_statistics(mesh_shape, layout, dtype, tf_graph):
    """Of the whole batch, wherever its parts are; and with few bits in the activations."""
    run = LayerGraph(mesh_shape, layout)
    x = run.normal("b:8,l:3,c:4") * 2.0 + 1.0
    _, updates = batch_norm(mtf.cast(x, dtype), True, 0.99)
    x, mean, variance = run.values([x, *averages(run)], updates, steps=800)
    tolerance = 1e-3 if dtype == tf.float32 else 3e-2
    np.testing.assert_allclose(mean, x.mean((0, 1)), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(variance, x.var((0, 1)), rtol=tolerance)


def test_what_training_learns_evaluation_uses(tf_graph):
    run = LayerGraph("x:2", "b:x")
    x = run.normal("b:8,c:4")
    with tf.variable_scope("net") as scope:
        y, updates = batch_norm(x, True, 0.0, name="bn")
    with tf.variable_scope(scope, reuse=True):
        z, none = batch_norm(x, False, 0.0, name="bn")
    assert none == []
    assert [v.name for v in run.graph.trainable_variables] == [
        "net/bn/batch_norm_scale",
        "net/bn/batch_norm_bias",
    ]
    y, z = run.values([y, z], updates, steps=1)
    np.testing.assert_allclose(z, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("init_zero, scale", [(True, 0.0), (False, 1.0)])
def test_initial_values(init_zero, scale, tf_graph):
    tf.set_random_seed(0)
    run = LayerGraph()
    batch_norm(run.normal("b:8,c:1000"), True, 0.9, init_zero=init_zero)
    values = run.values([v.value for v in run.graph.all_variables])
    assert [np.unique(v).tolist() for v in (values[0], values[1], values[3])] == [
        [scale],
        [0.0],
        [1.0],
    ]
    assert abs(values[2].mean()) < 0.15 and abs(values[2].std() - 1.0) < 0.1


def test_gradients_reach_scale_and_bias_only(tf_graph):
    run = LayerGraph()
    y, _ = batch_norm(run.normal("b:8,c:4"), True, 0.9)
    variables = [v.value for v in run.graph.all_variables]
    grads = mtf.gradients([mtf.reduce_sum(mtf.square(y))], variables)
    assert [g is None for g in grads] == [False, False, True, True]


def test_corr_of_a_dimension_in_the_middle(tf_graph):
    run = LayerGraph("x:2", "b:x")
    x = run.normal("b:6,c:3,l:4")
    named, same = (
        mtf.layers.corr(x, x.shape.dims[1]),
        mtf.layers.corr(x * 3.0 + 2.0, dims("c:3")[0]),
    )
    assert named.shape == mtf.Shape(dims("c_1:3,c_2:3"))
    x, named, same = run.values([x, named, same])
    np.testing.assert_allclose(named, np.corrcoef(x.transpose(1, 0, 2).reshape(3, -1)), rtol=1e-5)
    np.testing.assert_allclose(same, named, rtol=1e-5)


def test_corr_of_what_does_not_vary(tf_graph):
    run = LayerGraph()
    y = mtf.layers.corr(run.tensor([[1.0, 2.0], [1.0, 3.0]], "b:2,c:2"), dims("c:2")[0])
    np.testing.assert_allclose(run.values([y])[0], [[0.0, 0.0], [0.0, 1.0]], atol=1e-6)


@pytest.mark.parametrize(
    "call, text",
    [
        (
            lambda w: batch_norm(w.x, True, 0.9, dims_idx_start=2),
            r"Shape\[a=8, b=16\] has no dimensions at \[2:-1\].*dims_idx_start",
        ),
        (
            lambda w: mtf.layers.corr(w.x, mtf.Dimension("b", 8)),
            r"Shape\[a=8, b=16\] has no dimension b=8",
        ),
    ],
    ids=["batch_norm", "corr"],
)
def test_errors(call, text, tf_graph):
    world = World()
    before = world.state()
    with pytest.raises(ValueError, match=text):
        call(world)
    assert world.state() == before

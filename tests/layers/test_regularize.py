"""Noise that falls off, jitter, and gradients with a bounded norm."""

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import dims
from helpers.layers.layer_graph import LayerGraph
from helpers.world import World

import mesh_tensorflow as mtf

layers = mtf.layers


def dropped(step, mesh_shape="", layout="", **kwargs):
    """Returns ones after annealed dropout from 0.5 at step 10 to 0 at step 20."""
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        global_step = tf.train.get_or_create_global_step()
        run = LayerGraph(mesh_shape, layout)
        x = mtf.ones(run.mesh, mtf.Shape(dims("b:64,c:256")))
        y = layers.annealed_dropout(x, True, 10, 20, 0.5, **kwargs)
        return run.values([y], before=lambda session: session.run(tf.assign(global_step, step)))[0]


@pytest.mark.parametrize("step, rate", [(0, 0.5), (10, 0.5), (12, 0.4), (15, 0.25), (18, 0.1)])
@pytest.mark.parametrize("mesh_shape, layout", [("", ""), ("x:2,y:2", "b:x,c:y")])
def test_annealed_rate(step, rate, mesh_shape, layout):
    y = dropped(step, mesh_shape, layout)
    kept = y[y != 0]
    np.testing.assert_allclose(kept, 1.0 / (1.0 - rate), rtol=1e-5)
    assert abs(kept.size / y.size - (1.0 - rate)) < 0.02


@pytest.mark.parametrize("step", [20, 21, 1000])
def test_annealed_dropout_ends(step):
    np.testing.assert_array_equal(dropped(step), 1.0)


def test_annealed_dropout_shares_noise():
    y = dropped(15, noise_shape=mtf.Shape(dims("b:64")))
    np.testing.assert_array_equal(y, np.broadcast_to(y[:, :1], y.shape))
    assert len(np.unique(y)) == 2


def test_annealed_dropout_has_a_gradient(tf_graph):
    tf.train.get_or_create_global_step()
    run = LayerGraph()
    x = run.normal("b:16,c:8")
    y = layers.annealed_dropout(x, True, 0, 10, 0.5, name="noise")
    assert y.operation.name.startswith("noise/")
    y, dx, x = run.values([y, *mtf.gradients([y], [x]), x])
    np.testing.assert_allclose(dx, y / x, rtol=1e-5)


def test_annealed_dropout_only_in_training(tf_graph):
    world = World()
    assert layers.annealed_dropout(world.x, False, 0, 10) is world.x


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_jitter(dtype, tf_graph):
    tf.set_random_seed(3)
    run = LayerGraph("x:2", "b:x")
    y = layers.multiplicative_jitter(mtf.ones(run.mesh, dims("b:64,c:64"), dtype=dtype), 0.25)
    assert y.dtype == dtype
    y = run.values([mtf.to_float(y)])[0]
    assert 0.75 <= y.min() < 0.77 and 1.23 < y.max() <= 1.25
    assert abs(y.mean() - 1.0) < 0.01


def test_jitter_of_nothing(tf_graph):
    world = World()
    assert layers.multiplicative_jitter(world.x, epsilon=0) is world.x


@pytest.mark.parametrize("mesh_shape, layout", [("", ""), ("x:2,y:2", "b:x,c:y")])
@pytest.mark.parametrize("clip, expected", [(None, 3.0), (0, 3.0), (0.5, 0.5), (10.0, 3.0)])
def test_clipped_gradient(mesh_shape, layout, clip, expected, tf_graph):
    """Scaled as a whole, to the root mean square that is allowed."""
    run = LayerGraph(mesh_shape, layout)
    x, dy = run.normal("b:8,c:4"), run.normal("b:8,c:4", seed=1)
    dy *= 3.0 * mtf.rsqrt(mtf.reduce_mean(mtf.square(dy)))
    y = layers.clip_activation_gradient(x, clip)
    x, y, dy, dx = run.values([x, y, dy, *mtf.gradients([y], [x], grad_ys=[dy])])
    np.testing.assert_array_equal(y, x)
    np.testing.assert_allclose(np.sqrt(np.mean(dx**2)), expected, rtol=1e-5)
    np.testing.assert_allclose(dx, dy * (expected / 3.0), rtol=1e-5)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_the_clipped_gradient_of_many_small_numbers(dtype):
    """Its mean of squares is one in float32: narrow sums would stop to grow, or overflow."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.ones(mesh, "d:100000", dtype=dtype)
    y = mtf.layers.clip_activation_gradient(x, clip_rms_norm=1.0)
    [dx] = mtf.gradients([y], [x], [mtf.constant(mesh, 300.0, x.shape, dtype)])
    assert dx.dtype == dtype
    np.testing.assert_allclose(dx.numpy().astype(np.float32), 1.0, rtol=1e-2)


def test_clipping_by_gin(tf_graph):
    run = LayerGraph()
    x = run.normal("b:8,c:4")
    gin.parse_config("mesh_tensorflow.layers.clip_activation_gradient.clip_rms_norm = 0.25")
    y = layers.clip_activation_gradient(x)
    dx = run.values(mtf.gradients([y], [x]))[0]
    np.testing.assert_allclose(dx, 0.25, rtol=1e-5)


def test_summaries(tf_graph):
    run = LayerGraph("x:2", "b:x")
    x = run.normal("b:8,l:3,c:4")
    with tf.variable_scope("layer"):
        layers.clip_activation_gradient(x)
    layers.summary_for_clip_activation_gradient(x, name="mine", batch_dims=x.shape.dims[:1])
    layers.summary_for_clip_activation_gradient(x)
    [value] = run.values([x])
    with tf.Session() as session:
        found = session.run(dict(tf.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY)))
    expected = {"mean/": value.mean(), "max/": value.max()}
    expected.update({"mean/_1": value.mean(), "max/_1": value.max()})
    expected.update({"layer/mean/": value.mean(), "layer/max/": value.max()})
    for tag, axes in {"layer/rms_%s/forward_act": 2, "rms_%s/mine": (1, 2)}.items():
        rms = np.sqrt((value**2).mean(axes))
        expected.update({tag % "mean": rms.mean(), tag % "max": rms.max(), tag % "var": rms.var()})
    assert sorted(found) == sorted(expected)
    for tag, number in expected.items():
        np.testing.assert_allclose(found[tag], number, rtol=1e-5, err_msg=tag)


RANGE = r"init_rate must be at least 0 and below 1, and start_step before end_step, got "
ERRORS = {
    "no_rate": (lambda w: layers.annealed_dropout(w.x, True, 0, 10), RANGE + "init_rate=None"),
    "rate": (lambda w: layers.annealed_dropout(w.x, True, 0, 10, 1.0), RANGE + r"init_rate=1.0"),
    "steps": (
        lambda w: layers.annealed_dropout(w.x, True, 10, 10, 0.5),
        "start_step=10, end_step=10",
    ),
    "clip": (
        lambda w: layers.clip_activation_gradient(w.x, -1.0),
        "must not be negative, got -1.0",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, tf_graph):
    call, text = ERRORS[name]
    world = World()
    before = world.state()
    with pytest.raises(ValueError, match=text):
        call(world)
    assert world.state() == before

"""Convolution layers: variables and their first values, dtypes, sequences in parts, errors."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import dims
from helpers.layers.layer_graph import LayerGraph
from helpers.world import World

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness

layers = mtf.layers
[OUT] = dims("out:2")
BF16 = mtf.VariableDType(tf.bfloat16, tf.float32, tf.bfloat16)

KERNELS = {
    "conv1d": ("b:2,l:5,c:3", {}, "conv2d/kernel", "fh:1,fw:3,c:3,out:2", "b:2,l:5,out:2"),
    "conv2d_transpose": (
        "b:2,h:3,w:3,c:3",
        {},
        "conv2d_transpose/kernel",
        "fh:2,fw:2,out:2,c:3",
        "b:2,h:6,w:6,out:2",
    ),
    "conv3d_transpose": (
        "b:2,d:1,h:2,w:3,c:3",
        {"name": "up", "strides": (2, 1, 1)},
        "up/kernel",
        "fd:2,fh:2,fw:2,out:2,c:3",
        "b:2,d:2,h:2,w:3,out:2",
    ),
    "conv2d_transpose_with_blocks": (
        "b:2,hb:2,h:3,w:3,c:3",
        {},
        "conv2d_transpose/kernel",
        "fh:2,fw:2,out:2,c:3",
        "b:2,hb:2,h:6,w:6,out:2",
    ),
    "conv3d_transpose_with_blocks": (
        "b:2,db:2,d:1,h:2,w:3,c:3",
        {"name": "up"},
        "up/kernel",
        "fd:2,fh:2,fw:2,out:2,c:3",
        "b:2,db:2,d:2,h:4,w:6,out:2",
    ),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "dtype, variable_dtype", [(tf.float32, None), (tf.bfloat16, None), (tf.bfloat16, BF16)]
)
def test_kernel(name, dtype, variable_dtype, tf_graph):
    shape, kwargs, variable, kernel, output = KERNELS[name]
    run = LayerGraph()
    y = getattr(layers, name)(
        mtf.cast(run.normal(shape), dtype), OUT, variable_dtype=variable_dtype, **kwargs
    )
    [v] = run.graph.all_variables
    assert (v.name, v.shape, v.trainable) == (variable, mtf.Shape(dims(kernel)), True)
    assert v.master_dtype == (tf.bfloat16 if variable_dtype else tf.float32)
    assert (y.shape, y.dtype, v.activation_dtype) == (mtf.Shape(dims(output)), dtype, dtype)
    [dv] = mtf.gradients([y], [v.value])
    assert dv.shape == v.shape


def test_conv1d_passes_arguments_on(tf_graph):
    run = LayerGraph()
    x = run.tensor(np.arange(5.0).reshape(1, 5, 1), "b:1,l:5,c:1")
    y = layers.conv1d(
        x,
        dims("o:1")[0],
        2,
        2,
        padding="VALID",
        filter_initializer=tf.ones_initializer(),
        name="sum",
    )
    assert [v.name for v in run.graph.all_variables] == ["sum/kernel"]
    np.testing.assert_allclose(run.values([y])[0].ravel(), [1.0, 5.0])


@pytest.mark.parametrize("mesh_shape, layout", [("", ""), ("x:2", "l:x"), ("x:2,y:2", "l:x,c:y")])
def test_separable_conv1d_looks_at_positions(mesh_shape, layout, tf_graph):
    """From min_relative_pos to max_relative_pos, each with its weight, also across processors."""
    run = LayerGraph(mesh_shape, layout)
    x = run.tensor(np.arange(1.0, 7.0)[None, :, None] * np.ones([1, 6, 2]), "b:1,l:6,c:2")
    weights = [run.tensor([10.0**i, 0.0], "c:2") for i in range(4)]
    y = layers.separable_conv1d(
        x, dims("o:1")[0], -2, 1, use_bias=False, kernel_depth_weights=weights, name="sum"
    )
    [kernel] = run.graph.all_variables
    assert kernel.name == "sum/pointwise_dense/kernel"
    one = tf.ones([2, 1])
    value = run.values(
        [y], before=lambda session: session.run(tf.assign(tf.global_variables()[0], one))
    )[0]
    np.testing.assert_allclose(value.ravel(), [2100, 3210, 4321, 5432, 6543, 654])


@pytest.mark.parametrize("scales", [(1.0, 1.0), (4.0, 9.0)])
def test_separable_conv1d_keeps_the_scale(scales, tf_graph):
    """Sums over positions, and over channels, have the variance that is asked for.

    A truncated normal has 0.774 of the variance of the normal that it is cut from.
    """
    tf.set_random_seed(0)
    run = LayerGraph()
    layers.separable_conv1d(run.normal("b:1,l:4,c:2000"), dims("o:50")[0], -3, 1, *scales)
    values = {
        v.name.split("/")[-2] + "/" + v.name.split("/")[-1]: v for v in run.graph.all_variables
    }
    assert sorted(values) == sorted(
        ["depthwise_dense_0/bias", "pointwise_dense/bias", "pointwise_dense/kernel"]
        + [f"depthwise_dense_{i}/kernel" for i in range(5)]
    )
    depthwise, pointwise = run.values(
        [values["depthwise_dense_3/kernel"].value, values["pointwise_dense/kernel"].value]
    )
    np.testing.assert_allclose(5 * depthwise.var(), 0.774 * scales[0], rtol=0.1)
    np.testing.assert_allclose(2000 * pointwise.var(), 0.774 * scales[1], rtol=0.02)


def of(fn, shape, *args, **kwargs):
    return lambda w: fn(w.tensor(dims(shape)), OUT, *args, **kwargs)


ONE, IMAGE, BLOCKS = "l:8", "b:2,h:4,w:4,c:2", "b:2,hb:2,wb:2,h:4,w:4,c:2"
WITH_BLOCKS = {"h_blocks_dim": dims("hb:2")[0], "w_blocks_dim": dims("wb:2")[0]}
ERRORS = {
    "conv1d": (
        of(layers.conv1d, ONE),
        r"conv1d: .* must be \[batch..., length, channels\], not Shape\[l=8\]",
    ),
    "separable": (of(layers.separable_conv1d, ONE), r"separable_conv1d: .* must be \[batch"),
    "no_positions": (of(layers.separable_conv1d, IMAGE, 1, 0), "from 1 to 0 there are 0 positions"),
    "weights": (
        lambda w: layers.separable_conv1d(w.x, OUT, kernel_depth_weights=[w.i]),
        "3 positions, with 1 kernel_depth_weights; there must be at least one, and a weight for each",
    ),
    "filter": (
        of(layers.conv2d_transpose, IMAGE, (2, 2, 2)),
        r"conv2d_transpose: filter_size and strides must have 2 positive numbers each, got \(2, 2, 2\)",
    ),
    "strides": (
        of(layers.conv2d_transpose_with_blocks, BLOCKS, strides=(0, 1), **WITH_BLOCKS),
        r"2 positive numbers each, got \(2, 2\) and \(0, 1\)",
    ),
    "filter_of_conv": (
        of(layers.conv3d, IMAGE, (2, 2)),
        r"conv3d: .* 3 positive numbers each, got \(2, 2\)",
    ),
    "dilations": (
        of(layers.conv2d, IMAGE, (3, 3), dilations=(2, 0)),
        r"conv2d: dilations must be 2 positive numbers, got \(2, 0\)",
    ),
    "padding": (
        of(layers.conv2d_transpose_with_blocks, BLOCKS, padding="FULL", **WITH_BLOCKS),
        'conv2d_transpose_with_blocks: padding must be "SAME" or "VALID", not \'FULL\'',
    ),
    "valid": (
        of(layers.conv2d_transpose_with_blocks, BLOCKS, padding="VALID", **WITH_BLOCKS),
        'with blocks hb=2, wb=2 the padding must be "SAME"',
    ),
}


def test_halos_of_dilated_windows(tf_graph):
    """Rows that are two apart come from the neighbors alone."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(mesh, np.zeros([2, 12, 8, 3], "f"), "n:2,h:12,w:8,d:3")
    y = layers.conv2d(x, mtf.Dimension("f", 4), (3, 3), dilations=(2, 1))
    place = harness.Placing("x:3", "h:x", merge="none")
    lowered = harness.lower(graph, mesh, place, [y])
    assert lowered.counted == lowered.predicted
    # Two rows from above and two from below, of 2 * 8 * 3 elements, to each of 3 processors.
    assert {c[0] for c in lowered.counted} == {"shift"}
    assert sum(c[2] * n for c, n in lowered.counted.items()) == 3 * 4 * 2 * 8 * 3


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, tf_graph):
    call, text = ERRORS[name]
    world = World()
    names = sorted(world.graph.name_to_variable)
    with pytest.raises(ValueError, match=text):
        call(world)
    assert sorted(world.graph.name_to_variable) == names

"""Convolutions on devices of JAX: blocks of images stay where they are, and no kernel is naive."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.ops._contractions.conv import conv_kind, wide_by_filter

SHAPE = mtf.convert_to_shape("batch:4,rows:4,cols:2,h:3,w:4,channels:2")
WINDOW = mtf.convert_to_shape("fh:5,fw:5,channels:2,out:6")


def values(shape, seed):
    sizes = shape.to_integer_list
    return np.random.RandomState(seed).normal(size=sizes).astype(np.float32)


def gradients_of_blocks(data, window):
    """Lowers a convolution of images in blocks; returns it and both gradients."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(mesh, data, SHAPE)
    w = mtf.import_tf_tensor(mesh, window, WINDOW)
    wider = x
    for blocks, block in ((SHAPE[1], SHAPE[3]), (SHAPE[2], SHAPE[4])):
        wider = mtf.halo_exchange(wider, blocks, block, 2)
    y = mtf.Conv2dOperation(wider, w, [1, 1, 1, 1], "VALID").outputs[0]
    grads = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x, w])
    lowering = mtf.Lowering(graph, {mesh: mtf.pjrt.mesh_impl()})
    return [lowering.export_to_tf_tensor(t) for t in (y, *grads)]


@pytest.fixture(scope="module")
def whole():
    return mtf.pjrt.function(gradients_of_blocks, mesh_shape="one:1", layout="")(
        values(SHAPE, 0), values(WINDOW, 1)
    )


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("mesh_shape, layout, cut", [
    ("a:2,b:2", "batch:a", None),
    ("a:2,b:2", "rows:a,cols:b", [8, 3, 4, 6]),
    ("a:2,b:2", "rows:b,cols:a", [8, 3, 4, 6]),
    ("a:2,b:4", "batch:a,rows:b", [4, 3, 4, 6]),
    ("a:2,b:2", "out:a", None),
])  # fmt: skip
def test_blocks_stay_on_their_devices(whole, mesh_shape, layout, cut):
    """Only halos and sums are sent: XLA gathered the blocks, which it could not merge."""
    step = mtf.pjrt.function(gradients_of_blocks, mesh_shape=mesh_shape, layout=layout)
    arguments = values(SHAPE, 0), values(WINDOW, 1)
    for found, expected in zip(step(*arguments), whole):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    lowered = step.lower(*arguments)
    assert {c.kind for c in lowered.collectives()} <= {"all-reduce", "collective-permute"}
    assert "rhs_reversal" not in lowered.compiled_text  # for which CPUs have no kernel
    if cut is not None:
        assert f"f32[{','.join(map(str, cut))}]" in lowered.compiled_text


def step_of_layer(data, stride):
    """Lowers a layer of images in blocks; returns its result and both gradients."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(mesh, data, SHAPE)
    w = mtf.import_tf_tensor(mesh, tf.constant(values(WINDOW, 1)), WINDOW)
    blocks = (SHAPE[1], SHAPE[2])
    y = mtf.Conv2dOperation(x, w, [1, *stride, 1], "SAME", blocks=blocks).outputs[0]
    grads = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x, w])
    lowering = mtf.Lowering(graph, {mesh: mtf.pjrt.mesh_impl()})
    return [lowering.export_to_tf_tensor(t) for t in (y, *grads)]


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("mesh_shape, layout, stride, image", [
    ("a:2,b:2", "rows:a", [1, 1], (4, 6 + 4, 8 + 4)),
    ("a:2,b:2", "cols:b,batch:a", [1, 1], (2, 12 + 4, 4 + 4)),
    ("a:2,b:2", "rows:a,cols:b", [3, 2], (4, 6 + 2, 4 + 3)),
    ("a:2,b:2", "rows:a,cols:b", [1, 1], (4, 6 + 4, 4 + 4)),
    ("a:4", "rows:a", [1, 2], (4, 3 + 4, 8 + 3)),
    ("a:2,b:2", "rows:a+b", [1, 1], (4, 3 + 4, 8 + 4)),
    ("a:4", "cols:a?", [1, 1], None),
])  # fmt: skip
def test_blocks_of_a_device_are_one_image(mesh_shape, layout, stride, image):
    """They have margins of other devices alone, and none between each other."""
    data = values(SHAPE, 0)
    found_of = {}
    for shape, rules in (("one:1", ""), (mesh_shape, layout)):
        step = mtf.pjrt.function(
            lambda data: step_of_layer(data, stride), mesh_shape=shape, layout=rules
        )
        found_of[rules] = step(data)
    for found, expected in zip(found_of[layout], found_of[""]):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    lowered = step.lower(data)
    if image is not None:
        assert {c.kind for c in lowered.collectives()} <= {"all-reduce", "collective-permute"}
        assert f"f32[{','.join(map(str, image))},2]" in lowered.compiled_text


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("image, window", [
    ((3, 4), (5, 5)), ((7, 7), (9, 9)), ((6, 3), (5, 7)), ((3, 9), (9, 4)), ((3, 3, 3), (4, 3, 5)),
])  # fmt: skip
def test_window_that_is_larger_than_the_image(image, window, padding):
    """The gradient of a convolution, with filter and image exchanged."""
    kind = conv_kind("test", len(image), False, [1] * (len(image) + 2), padding)
    sizes = [n + (k - 1 if padding == "VALID" else 0) for n, k in zip(image, window)]
    random = np.random.RandomState(0)
    dy = random.normal(size=[2, *image, 3]).astype(np.float32)
    filters = random.normal(size=[*window, 4, 3]).astype(np.float32)
    forward = {2: tf.nn.conv2d, 3: tf.nn.conv3d}[len(image)]
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.zeros([2, *sizes, 4])
        y = forward(x, tf.constant(filters), strides=kind.tf_strides, padding=padding)
        [expected] = tf.gradients([tf.reduce_sum(y * dy)], [x])
        found = wide_by_filter(kind, tf.constant(dy), tf.constant(filters), [2, *sizes, 4])
        np.testing.assert_allclose(*session.run([found, expected]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("image, window, stride", [
    ((9, 9), (3, 3), 1), ((1, 1), (3, 3), 1), ((3, 3), (5, 5), 2), ((1, 9), (9, 2), 1),
])  # fmt: skip
def test_what_xla_does_not_exchange(image, window, stride):
    kind = conv_kind("test", 2, False, [1, stride, stride, 1], "VALID")
    with tf.Graph().as_default():
        narrow, filters = tf.zeros([2, *image, 3]), tf.zeros([*window, 4, 3])
        sizes = [2, *((n - 1) * stride + k for n, k in zip(image, window)), 4]
        assert wide_by_filter(kind, narrow, filters, sizes) is None

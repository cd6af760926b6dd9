"""Functions of the user's own get the slices of the layout, also where XLA splits whole values."""

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

MESH = "row:2,col:2"
SHAPE = mtf.convert_to_shape("b:2,nx:4,ny:2,sx:3")
B, NX, NY, SX = SHAPE
DATA = np.random.default_rng(0).standard_normal(SHAPE.to_integer_list).astype("float32")


def _blocks(x):
    """Makes images of blocks, of which a slice has one."""
    fx, fy = mtf.convert_to_shape("fx:12,fy:2")
    return [
        mtf.slicewise(
            lambda t: t[:, 0, :, :] ** 2, [x], [B, fy, fx], splittable_dims=[B, NX, NY, fx, fy]
        )
    ]


def _sizes(x):
    return [
        mtf.slicewise(lambda t: t * t.shape[1] + tf.reduce_max(t), [x], splittable_dims=[NX, NY])
    ]


def _two(x):
    """Has two results, one without a dimension of its inputs, and of another dtype."""
    return mtf.slicewise(
        lambda t, u: (t - t[:, :1] * u[:1, None, :, None], tf.cast(t[:, 0, :, 0] > 0, tf.int32)),
        [x, mtf.reduce_sum(x, output_shape=[B, NY])],
        [SHAPE, mtf.Shape([B, NY])],
        [tf.float32, tf.int32],
        splittable_dims=[NX, NY],
    )


def _of_whole_inputs(x):
    """Each processor makes its part of a dimension that the input does not have."""
    new = mtf.Dimension("new", 4)
    sums = mtf.reduce_sum(x, output_shape=[B])
    return [
        mtf.slicewise(
            lambda t: tf.stack([t, 2 * t], -1), [sums], [B, new], splittable_dims=[B, new]
        )
    ]


CASES = [
    (_blocks, "nx:row+col,fx:row+col"),
    (_sizes, "nx:row,ny:col"),
    (_sizes, "nx:col,ny:row"),
    (_sizes, "nx:row+col"),
    (_sizes, ""),
    (_two, "ny:row"),
    (_two, "ny:col,nx:row"),
    (_of_whole_inputs, "new:row,b:col"),
]


def _program(make, is_in_loop, mesh_impl):
    """Returns a function of the data: results, and the gradient of the floating ones."""

    def step(data):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, data, SHAPE)
        ys = make(x)
        if is_in_loop:
            zero = mtf.constant(mesh, 0, dtype=tf.int32)
            [_, *ys] = mtf.while_loop(
                lambda i, *_: mtf.less(i, 2),
                lambda i, *zs: [i + 1, *(a + b for a, b in zip(make(x), zs))],
                [zero, *(mtf.zeros_like(y) for y in ys)],
                maximum_iterations=2,
            )
        loss = mtf.add_n([mtf.reduce_sum(mtf.square(y)) for y in ys if y.dtype.is_floating])
        results = [*ys, *mtf.gradients([loss], [x])]
        lowering = mtf.Lowering(mesh.graph, {mesh: mesh_impl()})
        return [lowering.export_to_tf_tensor(y) for y in results]

    return step


@pytest.mark.parametrize("is_in_loop", [False, True])
@pytest.mark.parametrize(("make", "layout"), CASES)
def test_slices_are_those_of_processors(make, layout, is_in_loop):
    """Results and gradients are those of processors of which each has its slice alone."""

    def placed():
        return PlacementMeshImpl(MESH, layout, ["cpu:0"] * 4, merge="none")

    compiled = mtf.pjrt.function(mesh_shape=MESH, layout=layout)
    found = compiled(_program(make, is_in_loop, mtf.pjrt.mesh_impl))(DATA)
    expected = mtf.function(_program(make, is_in_loop, placed))(tf.constant(DATA))
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_slices_are_not_gathered():
    """Each processor computes its own slice of what is split, and asks for no other."""

    @mtf.pjrt.function(mesh_shape=MESH, layout="nx:row,ny:col")
    def step(data):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, data, SHAPE)
        loss = mtf.reduce_sum(mtf.square(_sizes(x)[0]))
        of_x = mtf.reduce_sum(mtf.square(mtf.gradients([loss], [x])[0]))
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return [lowering.export_to_tf_tensor(y) for y in (loss, of_x)]

    found = step.lower(DATA).collectives()
    assert {(c.kind, c.bytes) for c in found} <= {("all-reduce", 4), ("all-reduce", 8)}, found


def test_a_slice_of_a_wrong_shape():
    @mtf.pjrt.function(mesh_shape=MESH, layout="nx:row")
    def step(data):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, data, SHAPE)
        y = mtf.slicewise(lambda t: t[:, 0], [x], splittable_dims=[NX])
        return mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()}).export_to_tf_tensor(y)

    text = r"b=2, nx=4, ny=2, sx=3\] must have shape \[2, 2, 2, 3\] .* but have \[2, 2, 3\]"
    with pytest.raises(ValueError, match=text):
        step(DATA)

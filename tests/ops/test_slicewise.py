"""Functions of TensorFlow applied slice by slice, and broadcast by names."""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl


def test_cwise_of_permuted_inputs_is_a_slip():
    """One set of dimensions in two orders is hardly meant; other shapes are the function's matter."""
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x, y = (
            mtf.import_tf_tensor(mesh, np.zeros([3, 3], np.float32), mtf.Shape(dims))
            for dims in ([("a", 3), ("b", 3)], [("b", 3), ("a", 3)])
        )
        row = mtf.import_tf_tensor(mesh, np.zeros([3], np.float32), mtf.Shape([("b", 3)]))
        number = len(mesh.graph.operations)
        with mtf.strict(), pytest.raises(ValueError, match=r"another order.*mtf\.transpose\(imp"):
            mtf.cwise(tf.add, [x, y])
        assert len(mesh.graph.operations) == number
        with mtf.strict():
            assert mtf.cwise(tf.add, [x, row]).shape == x.shape
        assert mtf.cwise(tf.add, [row, x]).shape == row.shape


def test_an_output_shape_of_pairs():
    x = mtf.ones(mtf.Mesh(mtf.Graph(), "mesh"), "a:4,b:6")
    y = mtf.slicewise(lambda t: t[:, :3], [x], output_shape=[("a", 4), ("c", 3)])
    assert y.shape.to_string == "Shape[a=4, c=3]"


_EVERY = "abcdefgh"


@pytest.mark.parametrize("layout", ["", "a:x", "d:x"])
@pytest.mark.parametrize("second", ["bdfh", "bh", _EVERY])
@pytest.mark.parametrize("out", [_EVERY, "hcabgfed"])
def test_dimensions_alternate_between_operands(second, out, layout):
    """Kernels of TensorFlow broadcast along five groups of dimensions; names know no such bound."""
    mesh_impl = PlacementMeshImpl("x:2", layout, ["cpu:0"] * 2)
    mesh = mtf.Mesh(mtf.Graph(), "mesh", mesh_impl=mesh_impl)
    out = "".join(d for d in out if d in second or d in "aceg")
    arrays = [
        np.random.default_rng(i).normal(size=[2] * len(names)).astype(np.float32)
        for i, names in enumerate(("aceg", second))
    ]
    x, y = (
        mtf.import_tf_tensor(mesh, array, mtf.Shape([(d, 2) for d in names]))
        for array, names in zip(arrays, ("aceg", second))
    )
    shape = mtf.Shape([(d, 2) for d in out])

    def of(fn):
        """Returns a NumPy function of the operands, broadcast to the output."""
        whole = [
            np.einsum(f"{names},{out}->{out}", a, np.ones([2] * len(out), np.float32))
            for a, names in zip(arrays, ("aceg", second))
        ]
        return fn(*whole)

    both = np.random.default_rng(2).normal(size=[2] * len(out)).astype(np.float32)
    condition = mtf.import_tf_tensor(mesh, both > 0, shape)
    for value, right in (
        (mtf.add(x, y, output_shape=shape), of(np.add)),
        (mtf.multiply(x, y, output_shape=shape), of(np.multiply)),
        (mtf.maximum(x, y, output_shape=shape), of(np.maximum)),
        (mtf.less(x, y, output_shape=shape), of(np.less)),
        (mtf.where(condition, x, y, output_shape=shape), of(lambda a, b: np.where(both > 0, a, b))),
        (mtf.broadcast(x, shape), of(lambda a, b: a)),
    ):
        np.testing.assert_allclose(value.numpy(), right, rtol=1e-6)
    [dy] = mtf.gradients([mtf.reduce_sum(mtf.square(mtf.add(x, y, output_shape=shape)))], [y])
    sums = np.einsum(f"{out}->{second}", of(np.add))
    np.testing.assert_allclose(dy.numpy(), 2 * sums, rtol=1e-4, atol=1e-5)


def _blocks_of_slices(x, b, fx, fy):
    """Takes the only block of each slice: published programs make images of blocks so."""
    dims = [*x.shape.dims[1:3], fx, fy]
    return mtf.slicewise(lambda t: t[:, 0, 0], [x], [b, fx, fy], splittable_dims=dims)


OF_SLICES = {
    "blocks": _blocks_of_slices,
    "sizes": lambda x, *_: mtf.slicewise(
        lambda t: t * 0 + t.shape[1], [x], splittable_dims=x.shape.dims[1:3]
    ),
    "places": lambda x, *_: mtf.slicewise(
        functools.partial(lambda n, t: t - t[:, :n, :n], 1), [x], splittable_dims=x.shape.dims[1:3]
    ),
}


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize("name", OF_SLICES)
@pytest.mark.parametrize("device", ["cpu:0", ""])
def test_a_users_function_gets_the_slice_of_each_processor(name, device, in_loop):
    """Also where all processors are on one device."""
    b, nx, ny, sx, sy, fx, fy = mtf.convert_to_shape("b:1,nx:2,ny:2,sx:3,sy:3,fx:6,fy:6").dims
    numbers = np.arange(36, dtype=np.float32).reshape(1, 2, 2, 3, 3)
    expected = {
        "blocks": numbers.transpose(0, 1, 3, 2, 4).reshape(1, 6, 6),
        "sizes": np.ones_like(numbers),
        "places": np.zeros_like(numbers),
    }[name]
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, numbers, [b, nx, ny, sx, sy])
        y = OF_SLICES[name](x, b, fx, fy)
        if in_loop:
            # Within a loop, whose operations count too.
            zero = mtf.constant(mesh, 0, dtype=tf.int32)
            _, y = mtf.while_loop(
                lambda i, _: mtf.less(i, 1),
                lambda i, _: [i + 1, OF_SLICES[name](x, b, fx, fy)],
                [zero, mtf.zeros(mesh, y.shape)],
            )
        layout = "nx:row,ny:col" + ",fx:row,fy:col" * (name == "blocks")
        impl = PlacementMeshImpl("row:2,col:2", layout, [device] * 4)
        value = mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(y)
        with tf.Session() as session:
            np.testing.assert_array_equal(session.run(value), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: mtf.slicewise(tf.sort, [x], splittable_dims=x.shape.dims[:1]),
        lambda x: mtf.cwise(lambda t: t * 2.0, [x]),
        lambda x: mtf.slicewise(tf.keras.activations.gelu, [x], splittable_dims=x.shape.dims),
        lambda x: mtf.cumsum(mtf.dropout(x, rate=0.5), x.shape.dims[0]),
    ],
)
def test_functions_of_any_part_are_called_once_for_merged_processors(make):
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        y = make(mtf.ones(mesh, "a:4,b:6"))
        lowering = mtf.Lowering(graph, {mesh: PlacementMeshImpl("x:2", "a:x", ["cpu:0"] * 2)})
        assert len(lowering.tensors[y].to_laid_out_tensor().tensor_list) == 1


def test_a_result_of_another_dtype_than_declared_is_a_slip():
    """A published program declares floating indices, and differentiates what it does with them."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, np.array([[2.5, 0.5], [1.5, 1.5]], np.float32), "a:2,b:2")
        at, part = mtf.slicewise(
            lambda t: (tf.cast(t, tf.int32), t - tf.floor(t)),
            [x],
            [x.shape, x.shape],
            [tf.float32, tf.float32],
            splittable_dims=x.shape.dims,
        )
        rows = mtf.slicewise(
            lambda i, p: tf.gather(tf.constant([1.0, 10.0, 100.0]), i) * p,
            [at, part],
            splittable_dims=x.shape.dims,
        )
        [dx] = mtf.gradients([mtf.reduce_sum(rows)], [x])
        impl = PlacementMeshImpl("x:2", "a:x", ["cpu:0"] * 2)
        with pytest.warns(
            mtf.MeshTensorFlowWarning,
            match=r"slicewise \(test_slicewise\.py:\d+\): the function returns int32",
        ):
            lowering = mtf.Lowering(graph, {mesh: impl})
        with tf.Session() as session:
            found = session.run([lowering.export_to_tf_tensor(t) for t in (rows, dx)])
        np.testing.assert_allclose(found[0], [[50.0, 0.5], [5.0, 5.0]])
        np.testing.assert_allclose(found[1], [[100.0, 1.0], [10.0, 10.0]])
        text = (
            r"returns int32 for slicewise:0 Shape\[a=2, b=2\], which was declared as float32\. "
            r"Operations and gradients go by what was declared: give output_dtype=tf\.int32, or "
            r"let the function return tf\.cast\(y, tf\.float32\)"
        )
        with mtf.strict(), pytest.raises(ValueError, match=text):
            mtf.Lowering(graph, {mesh: impl})


def test_a_line_that_makes_many_operations_is_told_once():
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        for _ in range(3):
            mtf.slicewise(lambda t: tf.cast(t, tf.int32), [mtf.ones(mesh, "a:2")])
        with pytest.warns(mtf.MeshTensorFlowWarning, match="the function returns int32") as found:
            mtf.Lowering(mesh.graph, {mesh: PlacementMeshImpl("x:1", "", [""])})
        assert len(found) == 1

"""GspmdMeshImpl: programs on whole tensors, on one device of TensorFlow; test_pjrt.py has several."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers import processes

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh.gspmd import annotating, sharding_text
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.testing.conformance import check, gspmd

MESH, LAYOUT = "rows:2,cols:2", "batch:rows,hidden:cols"


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("only", ["conv2d", "while", "gather", "training", "checkpoint"])
def test_conforms_to_the_contract(only):
    results = list(check(gspmd, only, 1))
    assert results and not [r for r in results if r.error]


@pytest.mark.every
@pytest.mark.slow
def test_conforms_to_all_of_it():
    name = "mesh_tensorflow.testing.conformance:gspmd"
    done = processes.run(
        "-m", "mesh_tensorflow.testing.conformance", name, "--layouts", "1", timeout=1200
    )
    assert done.returncode == 0 and " passed, 0 failed" in done.stdout, done.stdout[-3000:]


def expected_assignment(layout, sizes):
    """Returns the devices of each tile, as XLA lays an array of devices out."""
    split = [axis for axis in layout if axis is not None]
    rest = [axis for axis in range(len(sizes)) if axis not in split]
    devices = np.arange(np.prod(sizes)).reshape(sizes).transpose(split + rest)
    tiles = [1 if axis is None else sizes[axis] for axis in layout]
    copies = int(np.prod([sizes[axis] for axis in rest]))
    return devices.reshape(tiles + [copies] * (copies > 1)), copies > 1


@pytest.mark.parametrize(
    "mesh, axes",
    [("a:2,b:2", (1, None)), ("a:2,b:3", (1, 0)), ("a:2,b:3,c:4", (2, None, 0)), ("a:512", (0,))],
)
def test_shardings_are_those_of_xla(mesh, axes):
    """The text is read by XLA's own description of shardings."""
    from tensorflow.python.compiler.xla.experimental.xla_sharding import xla_data_pb2

    shape = mtf.convert_to_shape(mesh)
    text = sharding_text(mtf.TensorLayout(axes), shape)
    assert len(text) < 40
    found = xla_data_pb2.OpSharding.FromString(text)
    assignment, has_copies = expected_assignment(axes, shape.to_integer_list)
    devices = np.arange(shape.size).reshape(found.iota_reshape_dims)
    devices = devices.transpose(found.iota_transpose_perm)
    np.testing.assert_array_equal(devices.reshape(found.tile_assignment_dimensions), assignment)
    assert found.type == xla_data_pb2.OpSharding.OTHER
    assert found.replicate_on_last_tile_dim == has_copies


@pytest.mark.parametrize("axes, tiles", [
    (((0, 1), None), [[0], [1], [2], [3], [4], [5]]), (((1, 0), None), [[0], [3], [1], [4], [2], [5]]),
])  # fmt: skip
def test_a_dimension_that_several_mesh_axes_split(axes, tiles):
    from tensorflow.python.compiler.xla.experimental.xla_sharding import xla_data_pb2

    text = sharding_text(axes, mtf.convert_to_shape("a:2,b:3"))
    found = xla_data_pb2.OpSharding.FromString(text)
    devices = np.arange(6).reshape(found.iota_reshape_dims)
    devices = devices.transpose(found.iota_transpose_perm)
    np.testing.assert_array_equal(devices.reshape(found.tile_assignment_dimensions), tiles)
    assert not found.replicate_on_last_tile_dim


def test_what_is_not_split_is_on_all_devices():
    from tensorflow.python.compiler.xla.experimental.xla_sharding import xla_data_pb2

    mesh_shape = mtf.convert_to_shape("a:1,b:2")
    for axes in ([None, None], [0, None]):
        text = sharding_text(mtf.TensorLayout(axes), mesh_shape)
        assert text  # an empty one is no annotation
        assert xla_data_pb2.OpSharding.FromString(text).type == xla_data_pb2.OpSharding.REPLICATED


def training_step(make_impl):
    """Returns a function of a batch that trains two layers with dropout, and its VariableStore."""

    @mtf.function
    def step(data):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        batch, d_in, hidden = mtf.Dimension("batch", 8), mtf.Dimension("d", 4), ("hidden", 16)
        x = mtf.import_tf_tensor(mesh, data, mtf.Shape([batch, d_in]))
        h = mtf.layers.dense(x, [mtf.Dimension(*hidden)], activation=mtf.relu, name="first")
        h = mtf.dropout(h, keep_prob=0.75)
        y = mtf.layers.dense(h, [d_in], reduced_dims=h.shape[1:], name="second")
        loss = mtf.reduce_mean(mtf.square(y - x))
        variables = mesh.graph.trainable_variables
        grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
        updates = mtf.optimize.SgdOptimizer(0.5).apply_grads(grads, variables)
        lowering = mtf.Lowering(mesh.graph, {mesh: make_impl()})
        value = lowering.export_to_tf_tensor(loss)
        for update in updates:
            lowering.lowered_operation(update)
        return value

    return step


def losses(make_impl, jit=False):
    tf2.random.set_seed(3)
    step, data = training_step(make_impl), tf.constant(np.eye(8, 4, dtype="float32"))
    call = tf2.function(step.tf_function, jit_compile=True, autograph=False) if jit else step
    found = [float(call(data)) for _ in range(4)]
    assert found[-1] < found[0]
    return found


def test_trains_as_on_placed_devices():
    """Random values are equal to the bit: else, dropout would make other losses."""
    placed = losses(lambda: PlacementMeshImpl(MESH, LAYOUT, ["cpu:0"] * 4))
    np.testing.assert_allclose(losses(lambda: mtf.GspmdMeshImpl(MESH, LAYOUT)), placed, rtol=1e-6)


@pytest.mark.parametrize("tf_fn", [tf.random.uniform, tf.random.normal, tf.random.truncated_normal])
def test_random_values_are_equal_to_the_bit(tf_fn, tf_graph):
    impls = [
        mtf.GspmdMeshImpl(MESH, LAYOUT),
        PlacementMeshImpl(MESH, LAYOUT, [""] * 4, merge="none"),
    ]
    shape = mtf.Shape([("batch", 6), ("hidden", 50)])
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    name = mtf.Tensor(
        mtf.import_tf_tensor(mesh, tf.zeros([6, 50]), shape).operation, shape, tf.float32
    )
    key = tf.constant([1, 2, 3, 4], tf.uint32)
    found = [
        impl.export_to_tf_tensor(name, impl.random(shape, tf_fn, {"key": key})) for impl in impls
    ]
    with tf.Session() as session:
        ours, theirs = session.run(found)
    np.testing.assert_array_equal(ours, theirs)


def product(impl, jit):
    """Returns a product of annotated tensors, and its nodes that are annotations."""

    def program(data):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, data, mtf.Shape([("batch", 8), ("d", 4)]))
        w = mtf.import_tf_tensor(mesh, data, mtf.Shape([("hidden", 8), ("d", 4)]))
        y = mtf.einsum([x, w], mtf.Shape([("batch", 8), ("hidden", 8)]))
        twice = y * 2
        return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(twice)

    function = tf2.function(program, jit_compile=jit, autograph=False)
    data = tf.reshape(tf.range(32, dtype=tf.float32), [8, 4])
    concrete = function.get_concrete_function(data)
    nodes = [op for op in concrete.graph.get_operations() if op.type == "XlaSharding"]
    return concrete(data), nodes, 2 * data.numpy() @ data.numpy().T


def test_annotations_do_nothing_on_one_device():
    value, nodes, expected = product(mtf.GspmdMeshImpl(MESH, LAYOUT, annotate=True), jit=True)
    np.testing.assert_allclose(value, expected)
    assert len(nodes) == 4  # x, w, the product, and twice that
    assert {node.get_attr("sharding") for node in nodes[:1]} == {
        sharding_text(mtf.TensorLayout([0, None]), mtf.convert_to_shape(MESH))
    }


def test_annotates_where_xla_compiles():
    assert not product(mtf.GspmdMeshImpl(MESH, LAYOUT), jit=False)[1]
    with annotating():
        assert len(product(mtf.GspmdMeshImpl(MESH, LAYOUT), jit=True)[1]) == 4
        assert not product(mtf.GspmdMeshImpl(MESH, LAYOUT, annotate=False), jit=True)[1]


class Doubled(mtf.Operation):
    """An operation of another package."""

    def __init__(self, x):
        super().__init__([x])
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def lower(self, lowering):
        value = lowering.mesh_impl(self).slicewise(
            lambda t: t * 2, lowering.tensors[self.inputs[0]]
        )
        lowering.set_tensor_lowering(self.outputs[0], value)


def test_operations_of_other_packages(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, np.arange(8.0, dtype="float32"), "batch:8")
    y = Doubled(x).outputs[0]
    lowering = mtf.Lowering(mesh.graph, {mesh: mtf.GspmdMeshImpl(MESH, "batch:rows")})
    with tf.Session() as session:
        np.testing.assert_array_equal(
            session.run(lowering.export_to_tf_tensor(y)), np.arange(8) * 2
        )


def test_layouts_must_fit_the_mesh(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    mtf.import_tf_tensor(mesh, np.zeros(7, "float32"), "batch:7")
    with pytest.raises(ValueError, match=r"batch=7 .* cannot be split over mesh dimension rows=2"):
        mtf.Lowering(mesh.graph, {mesh: mtf.GspmdMeshImpl(MESH, "batch:rows")})


def test_repr():
    assert repr(mtf.GspmdMeshImpl(MESH, LAYOUT)).startswith("<GspmdMeshImpl rows=2, cols=2")

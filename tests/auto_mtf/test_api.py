"""layout and layout_and_mesh_shape, on programs that are then lowered with what they say."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.auto_mtf.program_graphs import two_products

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf import api


def perceptron(batch=8, layers=2):
    """Returns (graph, mesh, loss, update operations) of a training step."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, d, h = (mtf.Dimension(n, s) for n, s in [("batch", batch), ("d", 16), ("h", 64)])
    numbers = np.random.RandomState(0).normal(size=[batch.size, 16]).astype("float32")
    x = inputs = mtf.import_tf_tensor(mesh, tf.constant(numbers), [batch, d])
    constant = mtf.layers.VarianceScalingInitializer(scale=1.0)
    for i in range(layers):
        y = mtf.layers.dense(
            x, h, reduced_dims=[d], activation=mtf.relu, name=f"in{i}", kernel_initializer=constant
        )
        x += mtf.layers.dense(y, d, reduced_dims=[h], name=f"out{i}", kernel_initializer=constant)
    loss = mtf.reduce_mean(mtf.square(x - inputs))
    grads = mtf.gradients([loss], [v.value for v in graph.trainable_variables])
    updates = mtf.optimize.AdafactorOptimizer().apply_grads(grads, graph.trainable_variables)
    return graph, mesh, loss, updates


def step(mesh_shape, layout):
    """Returns the loss before and after an update."""
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        tf.train.get_or_create_global_step()
        graph, mesh, loss, updates = perceptron()
        mesh_shape = mtf.convert_to_shape(mesh_shape)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            mesh_shape, layout, ["cpu:0"] * mesh_shape.size
        )
        lowering = mtf.Lowering(graph, {mesh: impl})
        fetch = lowering.export_to_tf_tensor(loss)
        update = [lowering.lowered_operation(u) for u in updates]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            before = session.run(fetch)
            session.run(update)
            return before, session.run(fetch)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("mesh_shape", ["m:4", "m:2,n:2"])
def test_layouts_can_be_lowered(tf_graph, mesh_shape):
    tf.train.get_or_create_global_step()
    graph, _, loss, _ = perceptron()
    layout = mtf.auto_mtf.layout(graph, mesh_shape, [loss])
    assert isinstance(layout, mtf.LayoutRules) and layout._pairs
    np.testing.assert_allclose(step(mesh_shape, layout), step("m:1", ""), rtol=1e-5)


@pytest.mark.slow
def test_mesh_shape_can_be_lowered(tf_graph):
    tf.train.get_or_create_global_step()
    graph, _, loss, _ = perceptron()
    layout, mesh_shape = mtf.auto_mtf.layout_and_mesh_shape(graph, 4, [loss])
    assert mesh_shape.size == 4
    assert set(mesh_shape.dimension_names) <= {"mesh_0", "mesh_1"}
    np.testing.assert_allclose(step(mesh_shape, layout), step("m:1", ""), rtol=1e-5)


def test_of_two_products():
    graph, outputs = two_products()
    assert mtf.auto_mtf.layout(graph, "m:2", outputs)._pairs == {("b", "m")}
    layout, mesh_shape = mtf.auto_mtf.layout_and_mesh_shape(graph, 8, outputs)
    assert layout._pairs == {("b", "mesh_1"), ("c", "mesh_0")}
    assert mesh_shape == mtf.Shape([("mesh_0", 4), ("mesh_1", 2)])
    assert mtf.auto_mtf.layout_and_mesh_shape(graph, 1, outputs)[1].to_integer_list == [1]
    # Not only powers of two.
    layout, mesh_shape = mtf.auto_mtf.layout_and_mesh_shape(graph, 12, outputs)
    assert mesh_shape.to_integer_list == [4, 3] and len(layout._pairs) == 2
    layout, mesh_shape = mtf.auto_mtf.layout_and_mesh_shape(graph, 7, outputs)
    assert mesh_shape.to_integer_list == [7] and not layout._pairs


@pytest.mark.parametrize("name", ["my rows", "rows;1", "a.b", "rows:of"])
def test_names_in_which_strings_of_layouts_end(tf_graph, name):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.zeros(mesh, mtf.Shape([mtf.Dimension(name, 8), mtf.Dimension("d", 3)]))
    y = mtf.einsum([x, x], output_shape=[x.shape.dims[0]])
    assert str(mtf.auto_mtf.layout(graph, "all:2", [y])) == str(mtf.LayoutRules([(name, "all")]))


def test_empty_graph():
    assert not mtf.auto_mtf.layout(mtf.Graph(), "m:2")._pairs


def test_errors():
    graph = mtf.Graph()
    mtf.ones(mtf.Mesh(graph, "mesh"), [("a", 8)])
    with pytest.raises(ValueError, match=r"x=0 has no processors: Shape\[x=0\]. Sizes .* from 1"):
        mtf.auto_mtf.layout(graph, "x:0")
    for count, dims in [(0, 2), (4, 0)]:
        with pytest.raises(
            ValueError, match=f"num_machines={count} and max_mesh_shape_dimensions={dims}"
        ):
            mtf.auto_mtf.layout_and_mesh_shape(mtf.Graph(), count, (), dims)


@pytest.mark.parametrize(
    "count, dims, shapes",
    [
        (1, 2, [[1]]),
        (8, 1, [[8]]),
        (8, 2, [[8], [4, 2]]),
        (64, 2, [[64], [32, 2], [16, 4], [8, 8]]),
        (64, 3, [[64], [32, 2], [16, 4], [16, 2, 2], [8, 8], [8, 4, 2], [4, 4, 4]]),
        (12, None, [[12], [6, 2], [4, 3], [3, 2, 2]]),
        (7, 2, [[7]]),
        (8, 0, []),
    ],
)
def test_mesh_shapes(count, dims, shapes):
    assert list(api._mesh_shape_iterator(count, dims)) == shapes

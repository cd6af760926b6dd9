"""Losses at large numbers, weights of what counts, and vectors of ids."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import dims
from helpers.layers.layer_graph import LayerGraph
from helpers.world import A, B, World

import mesh_tensorflow as mtf

layers = mtf.layers
V, D = dims("v:6,d:4")


def test_sigmoid_cross_entropy_of_large_logits(tf_graph):
    run = LayerGraph("x:2", "b:x")
    logits = run.tensor([[-1e4, 1e4], [-100.0, 100.0]], "b:2,c:2")
    targets = run.tensor([[0.0, 1.0], [1.0, 0.25]], "b:2,c:2")
    loss = layers.sigmoid_cross_entropy_with_logits(logits, targets)
    loss, gradient = run.values([loss, *mtf.gradients([loss], [logits])])
    np.testing.assert_allclose(loss, [[0.0, 0.0], [100.0, 75.0]], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.0, 0.0], [-1.0, 0.75]], rtol=1e-6)


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_softmax_cross_entropy_of_large_logits(z_loss, tf_graph):
    run = LayerGraph("x:2", "v:x")
    logits = run.tensor([[1e4, 0.0, 0.0, 0.0, 0.0, -1e4]] * 2, "b:2,v:6")
    loss = layers.softmax_cross_entropy_with_logits(logits, run.tensor([0, 5], "b:2"), V, z_loss)
    loss, gradient = run.values([loss, *mtf.gradients([loss], [logits])])
    np.testing.assert_allclose(loss, np.array([0.0, 2e4]) + z_loss * 1e8, rtol=1e-6)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("layout", ["", "v:x"])
def test_logarithms_of_sums_of_infinite_logits(layout, tf_graph):
    run = LayerGraph("x:2", layout)
    rows = [[-np.inf] * 6, [np.inf] * 6, [0.0, -np.inf] * 3, [0.0, np.inf] * 3, [0.0, np.nan] * 3]
    logits = run.tensor(rows, "b:5,v:6")
    more = mtf.reduce_logsumexp(logits, V, extra_logit=0.0)
    found, more = run.values([mtf.reduce_logsumexp(logits, V), more])
    np.testing.assert_allclose(found, [-np.inf, np.inf, np.log(3.0), np.inf, np.nan], rtol=1e-6)
    np.testing.assert_allclose(more, [0.0, np.inf, np.log(4.0), np.inf, np.nan], rtol=1e-6)


def test_z_loss_is_its_definition(tf_graph):
    run = LayerGraph()
    x, ids = run.normal("b:3,v:6"), run.tensor([0, 2, 5], "b:3")
    plain = layers.softmax_cross_entropy_with_logits(x, ids, V)
    more = layers.softmax_cross_entropy_with_logits(x, ids, V, z_loss=0.5)
    x, plain, more = run.values([x, plain, more])
    z = np.log(np.exp(x).sum(1))
    np.testing.assert_allclose(plain, z - x[[0, 1, 2], [0, 2, 5]], rtol=1e-5)
    np.testing.assert_allclose(more - plain, 0.5 * z**2, rtol=1e-4)


@pytest.mark.parametrize("mesh_shape, layout", [("", ""), ("x:2", "v:x"), ("x:3,y:2", "b:x,v:y")])
def test_smoothed_labels(mesh_shape, layout, tf_graph):
    """As with the probabilities given, but no operation has one-hots of the ids."""
    from mesh_tensorflow.layers._norm_and_loss import smoothed_cross_entropy

    run = LayerGraph(mesh_shape, layout)
    x, ids = run.normal("b:3,v:6"), run.tensor([0, 2, 5], "b:3")
    targets = run.tensor(0.8 * np.eye(6)[[0, 2, 5]] + 0.2 / 6, "b:3,v:6")
    expected = layers.softmax_cross_entropy_with_logits(x, targets, V, z_loss=0.5)
    count = len(run.graph.operations)
    found = smoothed_cross_entropy(x, ids, V, z_loss=0.5, smoothing=0.2)
    gradients = [mtf.gradients([y], [x])[0] for y in (expected, found)]
    assert not any("one_hot" in op.name for op in run.graph.operations[count:])
    expected, found, *gradients = run.values([expected, found, *gradients])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-6)


def test_weights_nonzero(tf_graph):
    run = LayerGraph("x:2", "b:x")
    ids = run.tensor([[0, 3], [-1, 0]], "b:2,c:2")
    weights = layers.weights_nonzero(ids), layers.weights_nonzero(ids, dtype=tf.bfloat16)
    assert [w.dtype for w in weights] == [tf.float32, tf.bfloat16]
    assert weights[0].operation.name == "weights_nonzero"
    for w in run.values(weights):
        np.testing.assert_array_equal(w.astype("float32"), [[0, 1], [1, 0]])


@pytest.mark.parametrize("mesh_shape, layout", [("", ""), ("x:2,y:2", "b:x,v:y"), ("x:2", "d:x")])
def test_embedding(mesh_shape, layout, tf_graph):
    """Ids that the vocabulary lacks have no vector, and give none a gradient."""
    run = LayerGraph(mesh_shape, layout)
    ids = run.tensor([[0, 5], [-1, 6], [2, 2], [0, 0]], "b:4,l:2")
    y = layers.embedding(ids, V, D, mtf.VariableDType(tf.float32))
    [w] = run.graph.trainable_variables
    assert (w.name, w.shape, y.shape) == ("embedding", mtf.Shape([V, D]), ids.shape + D)
    y, w, dw = run.values([y, w.value, *mtf.gradients([y], [w.value])])
    np.testing.assert_allclose(y[0], w[[0, 5]], rtol=1e-6)
    np.testing.assert_array_equal(y[1], 0)
    np.testing.assert_array_equal(dw, np.array([3, 0, 2, 0, 0, 1])[:, None] * np.ones([6, 4]))


def test_initial_vectors_are_standard_normal(tf_graph):
    tf.set_random_seed(0)
    run = LayerGraph()
    ensemble = mtf.Dimension("ensemble", 2)
    many, few = mtf.Dimension("v", 500), mtf.Dimension("few", 2)
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
    w = layers.embedding_weights(run.mesh, many, D, dtype, "w", ensemble_dim=ensemble)
    ones = layers.embedding_weights(
        run.mesh, few, D, dtype, "ones", [ensemble], initializer=tf.ones_initializer()
    )
    assert w.dtype == tf.bfloat16 and w.shape == mtf.Shape([ensemble, many, D])
    assert ones.shape == mtf.Shape([ensemble, few, D])
    w, ones = run.values([mtf.to_float(w), mtf.to_float(ones)])
    assert abs(w.mean()) < 0.06 and abs(w.std() - 1.0) < 0.05
    np.testing.assert_array_equal(ones, 1.0)


def embed(ids):
    return lambda w: layers.embedding(getattr(w, ids), A, D, mtf.VariableDType())


ERRORS = {
    "sigmoid_shapes": (
        lambda w: layers.sigmoid_cross_entropy_with_logits(w.x, w.y),
        r"targets .*Shape\[b=16, c=24\].* must have the shape.*Shape\[a=8, b=16\].*mtf.transpose",
    ),
    "sigmoid_dtypes": (
        lambda w: layers.sigmoid_cross_entropy_with_logits(w.x, mtf.to_int32(w.x)),
        "int32 must have.*dtype of logits.*float32; use mtf.transpose or mtf.cast",
    ),
    "softmax_vocab": (
        lambda w: layers.softmax_cross_entropy_with_logits(w.x, w.i, V),
        r"vocab_dim v=6 must be in logits .*Shape\[a=8, b=16\]",
    ),
    "softmax_hard": (
        lambda w: layers.softmax_cross_entropy_with_logits(w.x, w.i, A),
        r"integer targets .*Shape\[a=8\] must have.*without a=8",
    ),
    "softmax_soft": (
        lambda w: layers.softmax_cross_entropy_with_logits(w.x, w.y, B),
        r"floating targets .*Shape\[b=16, c=24\] must have.*Shape\[a=8, b=16\]",
    ),
    "embedding_float": (embed("x"), r"indices .*float32 must be integers.*mtf.to_int32"),
    "embedding_vocab": (
        embed("i"),
        r"must be integers without the dimension a=8.*rename_dimension",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, tf_graph):
    call, text = ERRORS[name]
    with pytest.raises(ValueError, match=text):
        call(World())


@pytest.mark.parametrize("layout", ["", "b:x,v:y"])
def test_second_gradients_of_the_cross_entropy_of_ids(layout, tf_graph):
    """Equal to those of the cross entropy of one-hots, also where ids are out of range."""
    run = LayerGraph("x:2,y:2", layout)
    x, direction = run.normal("b:4,v:6"), run.normal("b:4,v:6")
    ids = run.tensor([0, 5, 2, 9], "b:4")
    found = []
    for targets in (ids, mtf.one_hot(ids, V)):
        loss = layers.softmax_cross_entropy_with_logits(x, targets, V, z_loss=0.3)
        [first] = mtf.gradients([mtf.reduce_sum(mtf.square(loss))], [x])
        found += mtf.gradients([mtf.reduce_sum(first * direction)], [x])
    values = run.values(found)
    np.testing.assert_allclose(values[0], values[1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_are_added_in_the_memory_of_the_table_in_a_session_only(tf_graph):
    """The operation that does so is unknown to XLA, which may compile any function."""

    def program(*_):
        run = LayerGraph()
        table, ids = run.normal("v:6,d:4"), run.tensor([1, 1], "b:2")
        rows = mtf.GatherGradientOperation(run.normal("b:2,d:4"), ids, V, table.shape).outputs[0]
        total = table * 2.0 + rows
        return mtf.Lowering(run.graph, {run.mesh: run.impl}).export_to_tf_tensor(total)

    def kinds(graph):
        return {op.type for op in graph.get_operations()}

    program()
    assert "ScatterNdNonAliasingAdd" in kinds(tf.get_default_graph())
    made = tf.function(program).get_concrete_function().graph
    assert "TensorScatterAdd" in kinds(made)
    assert "ScatterNdNonAliasingAdd" not in kinds(made)

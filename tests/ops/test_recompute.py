"""Values computed again for a gradient: none are kept, and gradients are the same."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.memory import peak_bytes

import mesh_tensorflow as mtf

BATCH, D, H = mtf.Dimension("batch", 256), mtf.Dimension("d", 16), mtf.Dimension("h", 512)


def run(recompute, num_blocks, mesh_shape="", layout="", budget=None):
    """Returns (gradients of a chain of blocks, bytes at the peak, counters)."""
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        value = np.random.RandomState(0).normal(size=[BATCH.size, D.size]).astype("float32")
        x = mtf.import_tf_tensor(mesh, tf.constant(value), mtf.Shape([BATCH, D]))
        for i in range(num_blocks):

            def block(x, i=i):
                y = mtf.layers.dense(x, H, reduced_dims=[D], activation=mtf.tanh, name=f"in{i}")
                return x + mtf.layers.dense(y, D, reduced_dims=[H], name=f"out{i}")

            x = mtf.recompute_grad(block, [x], budget=budget) if recompute else block(x)
        loss = mtf.reduce_mean(mtf.square(x))
        grads = mtf.gradients([loss], [v.value for v in graph.trainable_variables])
        size = mtf.convert_to_shape(mesh_shape).size
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            mesh_shape, layout, [""] * size, merge="none"
        )
        lowering = mtf.Lowering(graph, {mesh: impl})
        fetches = [tf.reduce_sum(tf.abs(lowering.export_to_tf_tensor(g))) for g in grads]
        metadata = tf.RunMetadata()
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        with tf.Session(config=tf.ConfigProto(inter_op_parallelism_threads=1)) as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            values = session.run(fetches, options=options, run_metadata=metadata)
        return values, peak_bytes(metadata), lowering.counters


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    "mesh_shape, layout", [("", ""), ("x:2", "h:x"), ("x:2,y:2", "batch:x,h:y")]
)
def test_same_gradients(mesh_shape, layout):
    plain, _, communicated = run(False, 3, mesh_shape, layout)
    found, _, again = run(True, 3, mesh_shape, layout)
    np.testing.assert_allclose(found, plain, rtol=1e-5)
    sums = [
        sum(n for name, n in counters if name.startswith("allreduce"))
        for counters in (communicated, again)
    ]
    # The first block has a gradient for its input, too. The sums of results are not made again,
    # since no gradient reads them; those of weights are summed as they would be anyway.
    one = BATCH.size * D.size * (2 if layout else 0)
    assert sums[1] == sums[0] + one


@pytest.mark.slow
def test_inner_values_are_not_kept():
    """Not even for the gradients of weights, which no other gradient needs."""
    inner = BATCH.size * H.size * 4
    growth = {recompute: run(recompute, 8)[1] - run(recompute, 2)[1] for recompute in (False, True)}
    assert growth[False] > 6 * inner
    assert growth[True] < 6 * 0.5 * inner


def test_gradients_go_through_what_does_not_need_the_arguments():
    """Which is computed once, such as a function of weights."""

    def gradient(recompute):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        w = mtf.import_tf_tensor(mesh, tf.constant([0.5, -1.5, 2.0]), mtf.Shape([("d", 3)]))
        x = mtf.ones(mesh, w.shape)

        def fn(x):
            return x * mtf.sin(w)

        [dw] = mtf.gradients([mtf.recompute_grad(fn, [x]) if recompute else fn(x)], [w])
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
        return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(dw).numpy()

    np.testing.assert_allclose(gradient(True), np.cos([0.5, -1.5, 2.0]), rtol=1e-6)
    np.testing.assert_allclose(gradient(False), gradient(True), rtol=1e-6)


def test_a_gradient_function_walks_the_copies():
    """As those of reversible layers do: the copies lead to weights that an operation changes."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w = mtf.import_tf_tensor(mesh, tf.constant([0.5, -1.5, 2.0]), mtf.Shape([("d", 3)]))
    x = mtf.ones(mesh, w.shape)

    def by_hand(explicit_inputs, all_inputs, forward_operations, outputs, output_grads):
        again = [mtf.identity(y) for y in explicit_inputs]
        copies, mapping = mesh.graph.clone_operations(
            forward_operations, dict(zip(explicit_inputs, again))
        )
        return mtf.gradients(
            [mapping[y] for y in outputs],
            [mapping.get(y, y) for y in all_inputs],
            output_grads,
            operations=copies,
        )

    y = mtf.custom_gradient(lambda x: x * mtf.sin(w), by_hand, [x])
    dw, dx = mtf.gradients([y], [w, x])
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    np.testing.assert_allclose(
        lowering.export_to_tf_tensor(dw), np.cos([0.5, -1.5, 2.0]), rtol=1e-6
    )
    np.testing.assert_allclose(
        lowering.export_to_tf_tensor(dx), np.sin([0.5, -1.5, 2.0]), rtol=1e-6
    )


STORED = 4 * BATCH.size * H.size  # the output of tanh, the only value of a block that is read


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh_shape, layout, parts", [("", "", 1), ("x:2", "h:x", 2), ("x:2,y:2", "batch:x,h:y", 4)]
)
def test_a_budget_stores_as_many_as_fit(mesh_shape, layout, parts):
    plain = run(False, 4, mesh_shape, layout)[0]
    for bytes, stored in ((0, 0), (STORED // parts, 1), (4 * STORED // parts - 1, 3), (1e9, 4)):
        budget = mtf.RecomputeBudget(bytes, layout, mesh_shape)
        found, _, _ = run(True, 4, mesh_shape, layout, budget)
        np.testing.assert_allclose(found, plain, rtol=1e-5)
        assert (budget.num_stored, budget.num_recomputed) == (stored, 4 - stored)
        assert budget.left == bytes - stored * STORED // parts


class Unordered(mtf.placement_mesh_impl.PlacementMeshImpl):
    """A mesh like a TPU's, where data alone order operations."""

    supports_control_dependencies = False


@pytest.mark.parametrize("weight", [1.0, np.inf, np.nan])
def test_waiting_by_data_changes_no_value(weight):
    """A value of 0 stays 0, where the slope of relu is 0; Inf and NaN stay where they are."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh", mesh_impl=Unordered("all:1", "", ["cpu:0"]))
    x = mtf.constant(mesh, [-1.0, 0.0, 1.0, 2.0], "d:4")
    y = mtf.recompute_grad(mtf.relu, [x]) * mtf.constant(mesh, [weight, 1.0, 1.0, 1.0], "d:4")
    [dx] = mtf.gradients([y], [x])
    assert dx.numpy()[1:].tolist() == [0.0, 1.0, 1.0]


def test_memory_follows_the_budget():
    """Four more blocks that are stored need four more times what each stores."""
    peaks = [run(True, 8, budget=mtf.RecomputeBudget(n * STORED))[1] for n in (2, 6)]
    # Threads of TensorFlow's may free some small values, of [batch, d], a moment later.
    assert abs(peaks[1] - peaks[0] - 4 * STORED) < 0.5 * STORED


def test_a_refused_gradient_leaves_nothing():
    """Names and operations are those of a program that always recomputes."""

    def names(budget):
        graph = mtf.Graph()
        x = y = mtf.ones(mtf.Mesh(graph, "mesh"), mtf.Shape([D]))
        for _ in range(2):
            y = mtf.recompute_grad(lambda x: mtf.sin(mtf.sin(x)), [y], budget=budget)
        mtf.gradients([y], [x])
        return [op.name for op in graph.operations]

    assert names(mtf.RecomputeBudget(0)) == names(None)


@pytest.mark.parametrize("room, layout, left, taped", [
    (100_000, "", 100_000 - 4 * 5 * (D.size + 1), [2]),
    (100_000, "d:x", 100_000 - 4 * 5 * (D.size // 2 + 1), [2]),
    (4 * 5 * D.size, "", 4 * 5 * D.size, [0, 2]),
])  # fmt: skip
def test_what_a_loop_keeps_counts(room, layout, left, taped):
    """Two loop variables of each of five iterations; the loop that is recomputed keeps none."""
    graph = mtf.Graph()
    budget = mtf.RecomputeBudget(room, layout, "x:2")

    def loop(x):
        start = [mtf.constant(x.mesh, 0, dtype=tf.int32), x]
        body = lambda i, y: [i + 1, mtf.sin(y)]  # noqa: E731
        return mtf.while_loop(lambda i, y: mtf.less(i, 5), body, start, maximum_iterations=5)[1]

    x = mtf.ones(mtf.Mesh(graph, "mesh"), mtf.Shape([D]))
    y = mtf.recompute_grad(loop, [x], budget=budget)
    mtf.gradients([y], [x])
    assert budget.left == left
    loops = [op.loop for op in graph.operations if op.loop is not None]
    assert [len(loop.tape) for loop in loops if loop.tape_of is None] == taped


@pytest.mark.parametrize("make, text", [
    (lambda: mtf.RecomputeBudget(-1), "RecomputeBudget: bytes must be 0 or more, not -1"),
    (lambda: mtf.RecomputeBudget(1, layout="h:x"), "layout=h:x and mesh_shape=None must both be given"),
    (
        lambda: run(True, 1, budget=mtf.RecomputeBudget(1e9, "h:x", "x:3")),
        "h=512 of .* is split over x=3, which does not divide it",
    ),
])  # fmt: skip
def test_bad_budgets(make, text):
    with pytest.raises(ValueError, match=text):
        make()

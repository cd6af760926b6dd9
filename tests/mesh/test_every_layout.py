"""Operations in layouts that split what they cannot work on parts of: what moves, and to where."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._core.placement import walk
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import WHOLE, Placing

X = np.random.RandomState(0).randn(4, 8, 6).astype(np.float32)


def run(build, placings, shape="batch:4,length:8,d:6", data=X):
    """Returns, for each placing, the values that a function of a Tensor makes, and its Lowering."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    targets = build(mtf.import_tf_tensor(mesh, tf.constant(data), shape))
    lowered = [harness.lower(mesh.graph, mesh, p, targets) for p in placings]
    with harness.session() as session:
        return [(session.run(one.exports), one) for one in lowered]


def moved(lowered):
    """Returns (operation class, collective, its elements) of what moved, in order."""
    return [(kind, c.kind, c.elements) for kind, _, c in lowered.lowering.collectives]


KINDS = [
    {},
    {"apart": True},
    {"simd": True},
    {"apart": True, "pairs": True},
    {"merge": "memory"},
]


def joined(x):
    y = mtf.concat([x, 2.0 * x], "length")
    z = mtf.slice(y, 4, 8, "length")
    return [y, z, *mtf.gradients([mtf.reduce_sum(mtf.square(z))], [x])]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_programs_are_the_same(kind, tf_graph):
    layouts = ["length:rows", "length:rows+cols", "length:cols,batch:rows", "length:rows,d:cols"]
    placings = [Placing("rows:2,cols:2", layout, **KINDS[kind]) for layout in layouts]
    (expected, _), *rest = run(joined, [WHOLE, *placings])
    for values, lowered in rest:
        for value, e in zip(values, expected):
            np.testing.assert_allclose(value, e, rtol=1e-6)
        assert lowered.counted == lowered.predicted


def test_parts_are_exchanged_where_another_dimension_can_be_split(tf_graph):
    [(_, lowered)] = run(lambda x: [mtf.concat([x, x], "length")], [Placing("all:2", "length:all")])
    # The input counts once, and the result is twice as large.
    assert moved(lowered) == [
        ("ConcatOperation", "alltoall", 192),
        ("ConcatOperation", "alltoall", 384),
    ]
    assert [c for c in lowered.lowering.counters if c[0].startswith("alltoall")] == [
        ("alltoall/0/relayout", 192),
        ("alltoall/0/relayout", 384),
    ]


def test_all_is_gathered_where_none_can_be(tf_graph):
    """Of nothing but the dimension, each processor makes the whole and keeps its part."""
    values = run(
        lambda x: [mtf.concat([x, x], "d")], [WHOLE, Placing("all:2", "d:all")], "d:6", X[0, 0]
    )
    np.testing.assert_array_equal(values[0][0], values[1][0])
    assert moved(values[1][1]) == [("ConcatOperation", "allconcat", 12)]


def test_what_is_split_already_is_split_further(tf_graph):
    """By the mesh dimension that is free within, as the inner one."""
    [(_, lowered)] = run(
        lambda x: [mtf.concat([x, x], "length")],
        [Placing("rows:2,cols:2", "length:cols,batch:rows")],
        "batch:4,length:8",
        X[..., 0],
    )
    assert moved(lowered) == [
        ("ConcatOperation", "alltoall", 32),
        ("ConcatOperation", "alltoall", 64),
    ]


ROWS = [
    # layout, function, elements that are shifted for it and its gradient; a row has 2 * 4 * 6 of them
    ("length:all", lambda x: mtf.slice(x, 1, 6, "length"), [48, 48]),
    ("length:all", lambda x: mtf.pad(x, [2, 0], "length"), [2 * 48, 48]),
    ("length:all?", lambda x: mtf.slice(x, 1, 7, "length"), [48, 48]),
    ("length:all?", lambda x: mtf.slice(x, 0, 7, "length"), []),
    ("length:all?", lambda x: mtf.pad(x, [0, 1], "length"), [2 * 48, 48]),
    ("length:all?", lambda x: mtf.shift(mtf.slice(x, 0, 7, "length"), 1, SEVEN, False), [48] * 2),
]
SEVEN = mtf.Dimension("length", 7)


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_rows_that_move_come_from_neighbors(row, tf_graph):
    """A slice, a padding, and a shift of padded slices send the rows that move, and no others."""
    layout, fn, elements = ROWS[row]

    def build(x):
        y = fn(x)
        return [y, *mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x])]

    placings = [Placing("all:2", layout, **kind) for kind in KINDS]
    (expected, _), *rest = run(build, [WHOLE, *placings])
    for values, lowered in rest:
        for value, e in zip(values, expected):
            np.testing.assert_allclose(value, e, rtol=1e-6)
        assert lowered.counted == lowered.predicted
        sums = ("ReduceOperation", "allreduce")
        shifts = [m for m in moved(lowered) if m[:2] != sums and m[1] != "allreduce"]
        assert [n for _, _, n in shifts] == elements
        assert {kind for _, kind, _ in shifts} <= {"shift"}


def test_partial_sums_are_summed_before_they_move(tf_graph):
    def build(x):
        w = mtf.ones(x.mesh, "d:6,e:2")
        y = mtf.einsum([x, w], reduced_dims=[x.shape.dims[2]])
        return [mtf.concat([y, y], "length")]

    placing = Placing("rows:2,cols:2", "length:rows,d:cols")
    (expected, _), (found, lowered) = run(build, [WHOLE, placing])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert moved(lowered)[0][:2] == ("ConcatOperation", "allreduce")
    assert lowered.counted == lowered.predicted


def test_a_sum_that_begins_within(tf_graph):
    """A convolution whose image is split by rows may sum over channels instead, and is summed."""
    data = np.random.RandomState(1).randn(1, 4, 3, 2).astype(np.float32)

    def build(x):
        window = mtf.ones(x.mesh, "fh:1,fw:3,i:2,o:3")
        return [mtf.Conv2dOperation(x, window, (1, 1, 1, 1), "SAME").outputs[0]]

    (expected, _), (found, lowered) = run(
        build, [WHOLE, Placing("all:2", "h:all")], "b:1,h:4,w:3,i:2", data
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert lowered.counted == lowered.predicted


def test_costs_of_an_estimate_are_those_of_the_lowering(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, tf.constant(X), "batch:4,length:8,d:6")
    mtf.concat([x, x], "length")
    impl = Placing("all:2", "length:all").impl()
    costs = dict(walk(mesh.graph.operations, impl).costs)
    [cost] = [cost for op, cost in costs.items() if type(op) is mtf.ConcatOperation]
    assert [c.elements for c in cost.collectives] == [192, 384]
    # Half of the work of each processor, as it has half of the batch.
    assert cost.flops == 4 * 16 * 6
    table = mtf.visualize.communication(mesh.graph, impl)
    assert "alltoall" in str(table)


def test_other_operations_find_their_inputs_as_they_are(tf_graph):
    """What is gathered for one operation is not gathered for those that follow."""

    def build(x):
        return [mtf.concat([x, x], "length"), mtf.square(x), mtf.concat([x, x], "length")]

    [(_, lowered)] = run(build, [Placing("all:2", "length:all", apart=True)])
    impl = lowered.lowering.mesh_impl(lowered.lowering.graph.operations[0])
    for x, value in lowered.lowering.tensors.items():
        assert value.slice_shape == impl.slice_shape(x.shape)


@pytest.mark.parametrize("merge", ["none", "memory"])
def test_sums_of_a_loop_over_microbatches(merge, tf_graph):
    """The mesh that was asked for decides what is summed in an iteration, also where it is merged.

    The gradient of the kernel is a sum over the length, which is split as the window is, which the
    convolution needs whole: it is summed before it moves.
    """
    batch, length, d = mtf.convert_to_shape("batch:4,length:8,d:6").dims
    window = mtf.convert_to_shape("fh:1,fw:2,d:6,o:3")

    def build(x):
        kernel = mtf.get_variable(x.mesh, "kernel", window, initializer=tf.ones_initializer())

        def loss_fn(xs):
            [x] = xs
            image = mtf.reshape(x, x.shape[:1] + [mtf.Dimension("h", 1), length, d])
            y = mtf.Conv2dOperation(image, kernel, [1, 1, 1, 1], "SAME").outputs[0]
            return mtf.reduce_mean(mtf.square(y))

        found = mtf.optimize.accumulate_gradients(loss_fn, [x], batch, 2)
        return [found.loss, *found.grads]

    placings = [WHOLE, Placing("x:2", "length:x,fw:x", merge=merge)]
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    targets = build(mtf.import_tf_tensor(mesh, tf.constant(X), [batch, length, d]))
    lowered = [harness.lower(mesh.graph, mesh, p, targets) for p in placings]
    with harness.session() as session:
        session.run(tf.global_variables_initializer())
        for one in lowered:
            session.run(one.lowering.copy_masters_to_slices())
        whole, parts = (session.run(one.exports) for one in lowered)
    for value, expected in zip(parts, whole):
        np.testing.assert_allclose(value, expected, 1e-5)
    assert lowered[1].counted == lowered[1].predicted

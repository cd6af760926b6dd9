"""Layouts that split what the mesh does not divide: the last parts are shorter."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import auto_mtf
from mesh_tensorflow.auto_mtf.step_time import StepEstimator
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import WHOLE, Placing

A, B = mtf.Dimension("a", 10), mtf.Dimension("b", 6)
X = np.random.RandomState(0).randn(10, 6).astype(np.float32)


def placed(layout, mesh="x:4", **options):
    size = mtf.convert_to_shape(mesh).size
    return PlacementMeshImpl(mesh, layout, [""] * size, merge="none", **options)


def test_rules():
    rules = mtf.convert_to_layout_rules("a:x+y?,b:z")
    assert str(rules) == "LayoutRules{a:x+y?, b:z}"
    assert rules.pairs == [("a", "x+y"), ("b", "z")]  # what splits what, as ever
    assert rules.uneven == {"a"}
    assert str(rules.allowing_uneven()) == "LayoutRules{a:x+y?, b:z?}"
    assert str(rules.of_pairs([("a", "x"), ("c", "y")])) == "LayoutRules{a:x?, c:y}"


def test_slices():
    impl = placed("a:x?")
    shape = mtf.Shape([A, B])
    assert impl.slice_shape(shape) == [3, 6]
    assert [impl.slice_begin(shape, p) for p in range(4)] == [[0, 0], [3, 0], [6, 0], [9, 0]]
    assert impl.laid_out_size(shape) == 72
    assert (impl.padding(A), impl.padding(B)) == (2, 0)
    assert placed("a:x", uneven=True).slice_shape(shape) == [3, 6]
    # An image of one row on eight processors: seven have nothing of it.
    assert placed("a:x?", "x:8").slice_shape(mtf.Shape([mtf.Dimension("a", 1)])) == [1]


def test_it_has_to_be_allowed():
    with pytest.raises(
        ValueError, match=r"a=10 of .* allow a last part that is shorter by a:x\? \(uneven=True"
    ):
        placed("a:x").slice_shape(mtf.Shape([A]))
    with pytest.raises(ValueError, match="b=6"):
        placed("a:x?,b:x").slice_shape(mtf.Shape([B]))


@pytest.mark.parametrize("eager", [True, False])
def test_whole_values(eager):
    """What is imported is exported, whatever lies beyond the end of the last slice."""

    def run():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, tf.constant(X), [A, B])
        return mtf.Lowering(mesh.graph, {mesh: placed("a:x?,b:y?", "x:4,y:4")}).export_to_tf_tensor(
            x
        )

    np.testing.assert_array_equal((run() if eager else mtf.function(run)()).numpy(), X)


def results(build, placings, dtype=np.float32, data=X):
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        targets = build(mtf.import_tf_tensor(mesh, tf.constant(data.astype(dtype)), [A, B]))
        lowered = [harness.lower(mesh.graph, mesh, p, targets) for p in placings]
        with harness.session() as session:
            session.run(tf.global_variables_initializer())
            for one in lowered:
                session.run(one.lowering.copy_masters_to_slices())
            return [(session.run(one.exports), one) for one in lowered]


def along_a(x):
    """What mixes elements along the dimension: none of it may see the padding."""
    return [
        mtf.reduce_sum(x, reduced_dim=A),
        mtf.reduce_mean(x),
        mtf.reduce_max(x, reduced_dim=A),
        mtf.reduce_min(x, reduced_dim=A),
        mtf.reduce_sum(mtf.log(x * x), reduced_dim=A),
        mtf.softmax(x, A),
        mtf.log_softmax(x, A),
        mtf.reduce_logsumexp(x, A),
        mtf.layers.layer_norm(x, A),
        mtf.cumsum(x, A),
        mtf.cumsum(x, A, exclusive=True),
        mtf.shift(x, 4, A, wrap=True),
        mtf.shift(x, 2, A, wrap=False),
        mtf.shift(x, -1, A, wrap=False),
        mtf.shift(x, 4, A, wrap=False),
        mtf.argmax(x, A),
        mtf.top_k(x, A, mtf.Dimension("k", 3))[0],
        mtf.einsum([x, mtf.rename_dimension(x, "b", "c")], reduced_dims=[A]),
        mtf.reshape(x, mtf.Shape([mtf.Dimension("all", 60)])),
        mtf.concat([x, x], "a"),
        mtf.slice(x, 1, 7, "a"),
        mtf.slice(x, 0, 9, "a"),
        mtf.pad(x, [1, 0], "a"),
        mtf.pad(x, [0, 2], "a"),
        mtf.transpose(x, mtf.Shape([B, A])),
        mtf.random_uniform(x.mesh, x.shape, seed=3, dtype=tf.float32),
        mtf.gather(x, mtf.constant(x.mesh, [9, 10, 0, -1], "i:4", tf.int32), A),
        mtf.reduce_sum(mtf.one_hot(mtf.argmax(x, A), A), reduced_dim=B),
    ]


KINDS = [{}, {"apart": True}, {"simd": True}, {"apart": True, "pairs": True}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_attention_of_seven_heads(kind):
    """Blocks are those of each processor's heads; a bias that all examples share sums over them."""
    heads, length, memory = (mtf.Dimension(n, s) for n, s in [("h", 7), ("l", 5), ("m", 5)])
    key = mtf.Dimension("k", 4)

    def build(x):
        ones = mtf.ones(x.mesh, [heads, length, key])
        q = mtf.einsum([x, ones], [A, heads, length, key], reduced_dims=[B])
        q = q * mtf.cast(mtf.range(x.mesh, heads, tf.int32), tf.float32)
        k = mtf.rename_dimension(mtf.sin(q), "l", "m")
        bias = mtf.sin(mtf.cast(mtf.range(x.mesh, length, tf.int32), tf.float32))
        bias = mtf.broadcast(bias, [heads, length, memory])
        y = mtf.layers.blocked_attention(q, k, k * 2.0, memory, key, key, bias, block_sizes=(2, 3))
        return [y, *mtf.gradients([mtf.reduce_sum(mtf.square(y))], [q, k, bias])]

    placings = [Placing("x:4,y:2", t, **KINDS[kind]) for t in ("h:x?", "a:x?,h:y?", "h:y+x?")]
    (expected, _), *rest = results(build, [WHOLE, *placings])
    for values, lowered in rest:
        for value, e in zip(values, expected):
            np.testing.assert_allclose(value, e, 1e-4, 1e-5)
        assert lowered.counted == lowered.predicted
        moved = {(k, c.kind) for k, _, c in lowered.lowering.collectives if "Attention" in k}
        assert moved <= {("BlockedAttentionGradOperation", "allreduce")}


RESHAPES = [
    # layout, new shape, what moves
    ("a:x?", "a:10,one:1,c:2,d:3", set()),
    ("a:x?,b:y", "new:10,b:6", {"allconcat"}),
    ("a:x?,new:x?", "new:10,b:6", set()),
    ("a:x?,new:y?", "new:10,b:6", {"allconcat"}),
    ("a:x?", "c:5,a:2,b:6", {"allconcat"}),  # another dimension of the name
    ("b:x?", "a:10,one:1,b:6,two:1", set()),
]


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("row", range(len(RESHAPES)))
def test_a_reshape_moves_nothing_of_what_it_keeps(row, kind):
    layout, shape, kinds = RESHAPES[row]

    def build(x):
        y = mtf.reshape(x, mtf.convert_to_shape(shape))
        return [y, *mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x])]

    placing = Placing("x:4,y:2", layout, **KINDS[kind])
    (expected, _), (values, lowered) = results(build, [WHOLE, placing])
    for value, e in zip(values, expected):
        np.testing.assert_allclose(value, e, 1e-6)
    assert lowered.counted == lowered.predicted
    moved = {c.kind for k, _, c in lowered.lowering.collectives if k == "ReshapeOperation"}
    assert moved == kinds


LAYOUTS = ["a:x?", "a:x?,b:y?", "a:y+x?", "a:y?,b:x?,all:x?", "a:x?,k:y?,c:y?"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_what_mixes_elements(kind):
    placings = [Placing("x:4,y:2", layout, **KINDS[kind]) for layout in LAYOUTS]
    (expected, _), *rest = results(along_a, [WHOLE, *placings])
    for values, lowered in rest:
        for i, (value, e) in enumerate(zip(values, expected)):
            np.testing.assert_allclose(value, e, 1e-5, 1e-5, err_msg=f"{lowered.placing} {i}")
        assert lowered.counted == lowered.predicted


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_what_is_past_the_end_is_no_fault(kind):
    """Not of the program: integers are divided by no 0, and checks see no NaN there."""

    def whole_numbers(x):
        return [mtf.floordiv(mtf.constant(x.mesh, 60, dtype=tf.int32), x)]

    def reciprocals(x):
        return [1.0 / x, mtf.log(x), mtf.reduce_sum(mtf.exp(mtf.log(x)))]

    data = 1 + np.arange(60).reshape(10, 6)
    placing = Placing("x:4,y:2", "a:x?,b:y?", **KINDS[kind])
    (expected, _), (found, _) = results(whole_numbers, [WHOLE, placing], np.int32, data)
    np.testing.assert_array_equal(found[0], expected[0])
    with mtf.debug.nan_checks():
        (expected, _), (found, _) = results(reciprocals, [WHOLE, placing], np.float32, data)
    for value, e in zip(found, expected):
        np.testing.assert_allclose(value, e, 1e-6)


class Largest(mtf.Operation):
    """One of the user's own, which says nothing of padding, and does not work with it."""

    def __init__(self, x):
        super().__init__([x])
        self._outputs = [mtf.Tensor(self, x.shape - A, x.dtype)]

    def lower(self, lowering):
        mesh_impl, x = lowering.mesh_impl(self), self.inputs[0]
        assert mesh_impl.padding(A) == 0
        value = mesh_impl.slicewise(lambda t: tf.reduce_max(t, 0), lowering.tensors[x])
        lowering.set_tensor_lowering(self.outputs[0], value)


def test_operations_that_say_nothing_of_padding_get_whole_tensors():
    [(found, lowered)] = results(
        lambda x: [Largest(x).outputs[0]], [Placing("x:4", "a:x?", merge="none")]
    )
    np.testing.assert_array_equal(found[0], X.max(0))
    # By another dimension it would be split alike, but of 6, none is a multiple of 4.
    assert [c.kind for _, _, c in lowered.lowering.collectives] == ["allconcat"]


# -- variables


def trained(placing, path=None, restored=None):
    """Returns the losses of two steps, from a checkpoint if one is given; saves another."""
    with tf.Graph().as_default(), placing.around():
        made = []

        def step():
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            table = mtf.get_variable(mesh, "table", [A, B], initializer=tf.constant_initializer(X))
            ids = mtf.constant(mesh, [0, 9, 9, 4, 7], "i:5", tf.int32)
            logits = mtf.einsum([mtf.gather(table, ids, A), table], reduced_dims=[B])
            loss = mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, ids, A))
            updates = mtf.optimize.AdamWeightDecayOptimizer(0.01).apply_grads(
                mtf.gradients([loss], [table]), mesh.graph.trainable_variables
            )
            lowering = mtf.Lowering(mesh.graph, {mesh: placing.impl()})
            made.append(lowering)
            value = lowering.export_to_tf_tensor(loss)
            with tf.control_dependencies([lowering.lowered_operation(u) for u in updates]):
                return [tf.identity(value)]

        [loss] = placing.run(step)
        saver = tf.train.Saver()
        with harness.session() as session:
            if restored is None:
                session.run(tf.global_variables_initializer())
            else:  # without an initializer: a slice that is all padding has a value, too
                saver.restore(session, restored)
            session.run(made[0].copy_masters_to_slices())
            losses = [session.run(loss) for _ in range(2)]
            session.run(made[0].copy_slices_to_masters())
            if path is not None:
                saver.save(session, path)
            return losses


@pytest.mark.slow_but(2)
@pytest.mark.usefixtures("eight_devices_for_pjrt")
@pytest.mark.parametrize(
    "kind",
    [{}, {"apart": True}, {"simd": True}, {"pjrt": True}, {"zero": 3, "zero_axis": "y"}],
    ids=str,
)
@pytest.mark.parametrize("mesh", ["x:4,y:2", "x:8,y:1"])
def test_checkpoints_have_whole_variables(kind, mesh, tmp_path):
    """On eight processors, slices of two rows: the last three have nothing."""
    if kind.get("zero") and mesh == "x:8,y:1":
        mesh = "x:4,y:2"
    first = trained(WHOLE, str(tmp_path / "whole"))
    after = trained(WHOLE, restored=str(tmp_path / "whole"))
    placing = Placing(mesh, "a:x?", **kind)
    for found, expected in [
        (trained(placing, str(tmp_path / "parts")), first),
        (trained(placing, restored=str(tmp_path / "whole")), after),
        (trained(WHOLE, restored=str(tmp_path / "parts")), after),
    ]:
        np.testing.assert_allclose(found, expected, 1e-5, 1e-6)
    reader = tf.train.load_checkpoint(str(tmp_path / "parts"))
    assert reader.get_variable_to_shape_map()["table"] == [10, 6]


def test_variables_of_eager_code(tmp_path):
    store = mtf.VariableStore()
    for layout in ("a:x?", "", "b:x?"):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        with store.scope():
            v = mtf.get_variable(mesh, "v", [A, B], initializer=tf.constant_initializer(X))
            mtf.assign_add(v, mtf.ones_like(v))
        mtf.Lowering(mesh.graph, {mesh: placed(layout)})
    np.testing.assert_allclose(store.value("v"), X + 3)
    store.assign("v", X)
    checkpoint = tf2.train.Checkpoint(store=store)
    path = checkpoint.write(str(tmp_path / "v"))
    store.assign("v", X + 1)
    checkpoint.read(path).assert_consumed()
    np.testing.assert_array_equal(store.value("v"), X)


# -- estimates and trainings


def test_estimates_count_the_padding():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    y = mtf.exp(mtf.import_tf_tensor(mesh, tf2.constant(X), [A, B]))
    estimator = StepEstimator(mesh.graph, "x:4", [y])
    found = estimator.estimate("a:x?")
    assert found.layout == {"a": "x?"}
    # Of 3 of the 10 rows.
    whole = estimator.estimate("").seconds.total
    assert 0.25 * whole < found.seconds.total < whole
    assert estimator.estimate("").peak_bytes == 2 * 4 * 10 * 6
    assert found.peak_bytes == 2 * 4 * 3 * 6
    with pytest.raises(ValueError, match=r"x=4 does not divide all sizes of dimension 'a'; a:x\?"):
        estimator.estimate("a:x")
    # A search tries no layout of this kind.
    assert str(auto_mtf.layout(mesh.graph, "x:4", [y])) == "LayoutRules{}"


def test_estimates_of_what_operations_need_whole():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, tf2.constant(X[:8]), "a:8,b:6")
    y = mtf.concat([x, x], "a")
    estimator = StepEstimator(mesh.graph, "x:2", [y])
    found = estimator.estimate("a:x")
    assert (found.layout, found.seconds.communication > 0) == ({"a": "x"}, True)
    # Beside half of 8 rows and of 16, it has as many elements in the layout in which they are joined.
    assert found.peak_bytes == 2 * (4 * 4 * 6 + 4 * 8 * 6)
    held = mtf.visualize.memory(mesh.graph, placed("a:x", "x:2"), [y]).at_peak
    assert held == {"activations": 4 * 12 * 6, "gathered": 4 * 12 * 6}
    assert str(auto_mtf.layout(mesh.graph, "x:2", [y], objective="time")) == "LayoutRules{b:x}"
    assert "alltoall" in str(mtf.visualize.communication(mesh.graph, placed("a:x", "x:2")))


ROWS = np.random.RandomState(1).randn(20, 6).astype(np.float32)


@pytest.mark.slow_but(1)
@pytest.mark.usefixtures("eight_devices_for_pjrt")
@pytest.mark.parametrize("how", [{}, {"simd": True}, {"mesh_impl": "pjrt"}], ids=str)
def test_fit_with_batches_that_the_mesh_does_not_divide(how):
    def model_fn(mesh, x):
        y = mtf.layers.dense(x, [mtf.Dimension("c", 5)], reduced_dims=[B], name="dense")
        return mtf.reduce_sum(mtf.square(y), output_shape=y.shape[:1])

    def fit(**options):
        return mtf.train.fit(
            model_fn,
            ROWS,
            steps=4,
            dims=[A, B],
            optimizer=mtf.optimize.SgdOptimizer(0.01),
            eval_data=ROWS[:17],
            eval_every=2,
            log_every=1,
            progress=False,
            **options,
        )

    whole, parts = fit(), fit(mesh_shape="x:4,y:2", layout="a:x,c:y", uneven=True, **how)
    np.testing.assert_allclose(parts.losses, whole.losses, 1e-5)
    for found, expected in zip(parts.evaluations, whole.evaluations):
        np.testing.assert_allclose(found["loss"], expected["loss"], 1e-5)

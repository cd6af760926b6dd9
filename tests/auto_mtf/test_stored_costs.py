"""Stored layouts in estimates: as the Lowering counts, as brute force finds, as formulas say."""

from collections import Counter

import pytest
import tensorflow.compat.v1 as tf
from auto_mtf.test_step_time import SLOW, TINY, all_layouts

import mesh_tensorflow as mtf
from mesh_tensorflow._core.layout import stored_layout
from mesh_tensorflow.auto_mtf import models
from mesh_tensorflow.auto_mtf._space import stored_layouts
from mesh_tensorflow.auto_mtf.step_time import MemoryLimitError, ProgramParts, StepEstimator
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

MESHES = [
    ("all:4", "batch:all", "all"),
    ("a:2,b:2", "batch:a;d_ff:b;heads:b;vocab:b", "a"),
    ("a:2,b:2", "batch:a;d_ff:b;heads:b", "b"),
    ("a:4,b:2", "batch:a;d_model:b", "a"),
    ("a:2,b:4", "batch:a;length:b", "b"),
]


def estimator(mesh, zero, axis=None, optimizer="adam", recompute=False, **sizes):
    program = models.language_model(**{**TINY, **sizes}, optimizer=optimizer, recompute=recompute)
    shape = mtf.convert_to_shape(mesh)
    stored = stored_layout(shape, zero=zero, zero_axis=axis) if zero else None
    return program, StepEstimator(program.graph, shape, program.outputs, SLOW, stored_layout=stored)


def predicted(estimated, layout):
    """Elements of collectives by kind and mesh axes, as they are estimated."""
    found = Counter()
    for sent in estimated.times.sent(estimated.estimate(layout).layout):
        key = sent.collective.kind, sent.collective.mesh_axes
        found[key] += round(sent.times * sent.collective.elements)
    return found


def counted(program, mesh, layout, **stored):
    """The same, as a Lowering counts them."""
    shape = mtf.convert_to_shape(mesh)
    impl = PlacementMeshImpl(shape, layout, [""] * shape.size, **stored)
    lowering = mtf.Lowering(program.graph, {program.mesh: impl}, autostack=False)
    for x in program.outputs:
        lowering.export_to_tf_tensor(x)
    found = Counter()
    for _, _, collective in lowering.collectives:
        found[collective.kind, collective.mesh_axes] += collective.elements
    return found, lowering


@pytest.mark.slow_but(2)
@pytest.mark.slow("adafactor*")
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("mesh, layout, axis", MESHES)
@pytest.mark.parametrize("optimizer, recompute", [("sgd", False), ("adafactor", True)])
def test_predicted_is_counted(tf_graph, optimizer, recompute, mesh, layout, axis, zero):
    """What is sent, by kind and mesh axes; and what is stored on each processor."""
    program, estimated = estimator(mesh, zero, axis, optimizer, recompute)
    found = predicted(estimated, layout)
    peak = estimated.peak_by_kind(layout)
    expected, lowering = counted(program, mesh, layout, zero=zero, zero_axis=axis)
    assert found == expected
    summary = mtf.summary(lowering)
    for kind in ("weights", "slots"):
        assert peak.get(kind, 0) == summary.bytes_per_processor(kind)


def in_microbatches(clip, rows=16):
    """A program of two layers in four microbatches, the first of which is used twice."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, model, hidden = mtf.convert_to_shape(f"batch:{rows},d_model:8,d_ff:16").dims

    def loss_fn(x):
        for name in ("layer", "other", "layer"):
            with tf.variable_scope(name, reuse=tf.AUTO_REUSE):
                h = mtf.layers.dense(x, [hidden], [model], activation=mtf.tanh, name="wi")
                x = x + mtf.layers.dense(h, [model], [hidden], use_bias=False, name="wo")
        return mtf.reduce_sum(mtf.square(x)), mtf.reduce_sum(mtf.ones_like(x))

    loss, grads, variables = mtf.optimize.accumulate_gradients(
        loss_fn, mtf.zeros(mesh, [batch, model]), batch, 4
    )
    if clip:
        grads, _ = mtf.optimize.clip_by_global_norm(grads, 1.0)
    updates = mtf.optimize.AdamWeightDecayOptimizer(0.01).apply_grads(grads, variables)
    return models.Program(graph, mesh, [loss], updates)


def test_rows_of_microbatches_that_are_split_again(tf_graph):
    """As those of a pipeline in microbatches: what divides the whole batch does not divide theirs."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    batch, halves, d = mtf.convert_to_shape("batch:12,halves:2,d:8").dims

    def loss_fn(x):
        w = mtf.get_variable(mesh, "w", [d], dtype=tf.float32)
        rows = mtf.reshape(x, [mtf.Dimension("batch", 3), halves, d])
        return mtf.reduce_sum(rows * w), mtf.reduce_sum(mtf.ones_like(x))

    x = mtf.zeros(mesh, [batch, d])
    loss, grads, variables = mtf.optimize.accumulate_gradients(loss_fn, x, batch, 2)
    updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, variables)
    program = models.Program(mesh.graph, mesh, [loss], updates)
    shape = mtf.convert_to_shape("data:3")
    stored = stored_layout(shape, zero=2, zero_axis="data")
    estimated = StepEstimator(program.graph, shape, program.outputs, SLOW, stored_layout=stored)
    expected, _ = counted(program, shape, "batch:data", zero=2, zero_axis="data")
    assert set(predicted(estimated, "batch:data")) == set(expected)


@pytest.mark.slow("True-*", "*-mesh[124]-*")
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "mesh, layout, axis",
    [
        ("all:4", "batch:all", "all"),
        ("a:2,b:2", "batch:a;d_ff:b", "a"),
        ("a:2,b:2", "batch:a", "b"),
        ("a:2,b:2", "batch:a;d_ff:b", "a+b"),
        ("a:2,b:2", "batch:b+a", "a"),
    ],
    ids=[f"mesh{i}" for i in range(5)],
)
@pytest.mark.parametrize("clip", [False, True])
def test_microbatches(tf_graph, monkeypatch, clip, mesh, layout, axis, zero):
    """From stage 2 on each of them gathers weights and scatters gradients, of which parts stay."""
    program = in_microbatches(clip)
    shape = mtf.convert_to_shape(mesh)
    stored = stored_layout(shape, zero=zero, zero_axis=axis)
    estimated = StepEstimator(program.graph, shape, program.outputs, SLOW, stored_layout=stored)
    found, peak = predicted(estimated, layout), estimated.peak_by_kind(layout)
    bounds = []
    lower = mtf.WhileLoopOperation.lower

    def noting(loop, lowering):
        begin = len(lowering.collectives)
        lower(loop, lowering)
        bounds.append((begin, len(lowering.collectives)))

    monkeypatch.setattr(mtf.WhileLoopOperation, "lower", noting)
    _, lowering = counted(program, mesh, layout, zero=zero, zero_axis=axis)
    [(begin, end)] = bounds
    expected = Counter()
    for i, (_, _, collective) in enumerate(lowering.collectives):
        times = 4 if begin <= i < end else 1
        expected[collective.kind, collective.mesh_axes] += times * collective.elements
    assert found == expected
    within = {collective.kind for _, _, collective in lowering.collectives[begin:end]}
    assert ("allconcat" in within) == (zero == 3)
    # Over what splits the batch a gradient is a partial sum; else each processor cuts its part.
    assert ("reduce_scatter" in within) == (zero > 1 and axis != "b")
    assert peak["weights"] == mtf.summary(lowering).bytes_per_processor("weights")


def test_memory_of_microbatches(tf_graph):
    """Slots are in parts from stage 1 on, sums of gradients from 2, and weights from 3."""
    program = in_microbatches(clip=False)
    shape = mtf.convert_to_shape("all:4")
    peaks = []
    for zero in range(4):
        stored = stored_layout(shape, zero=zero) if zero else None
        one = StepEstimator(program.graph, shape, program.outputs, SLOW, stored_layout=stored)
        peaks.append(one.estimate("batch:all").peak_bytes)
    gone = 4 * sum(v.size for v in program.graph.trainable_variables) * 3 // 4
    assert peaks[0] - peaks[1] == 2 * gone
    assert peaks[1] - peaks[2] == gone
    # The layer that is computed has its weights whole.
    assert gone // 2 < peaks[2] - peaks[3] < gone


def test_a_limit_chooses_the_stage(tf_graph):
    """In microbatches, stage 1 sends the least, and is taken where whole gradients fit."""
    program = in_microbatches(clip=False, rows=1024)
    shape, limit, stages = mtf.convert_to_shape("all:4"), None, []
    for _ in range(3):
        _, stored = mtf.auto_mtf.layout_and_stored_layout(
            program.graph, shape, program.outputs, limit, SLOW
        )
        one = StepEstimator(program.graph, shape, program.outputs, SLOW, stored_layout=stored)
        stages.append(stored.stage if stored else 0)
        limit = one.estimate("batch:all").peak_bytes - 1
    assert stages == [1, 2, 3]
    with tf.Graph().as_default():
        other = models.language_model(**TINY)
    found = [ProgramParts(p.graph, p.outputs).stages([0, 1, 2, 3]) for p in (program, other)]
    assert found == [[0, 1, 2, 3], [0, 2, 3]]
    assert ProgramParts(other.graph).stages([0, 1]) == [0, 1]


@pytest.mark.slow
def test_volumes_of_the_paper(tf_graph):
    """1, 1 and 1.5 times what data parallelism sends: weights are gathered twice."""
    sent = {"allreduce": 2, "reduce_scatter": 1, "allconcat": 1}
    volume = {}
    for zero in (0, 2, 3):
        with tf.Graph().as_default():
            program, estimated = estimator("all:4", zero, recompute=True, layers=4, vocab=4)
            found = predicted(estimated, "batch:all")
            volume[zero] = sum(sent[kind] * n for (kind, _), n in found.items())
    size = sum(v.size for v in program.graph.trainable_variables)
    assert volume[2] == pytest.approx(volume[0], rel=0.01)
    assert volume[0] == pytest.approx(4 * 2 * size, rel=0.01)
    assert volume[3] - volume[0] == pytest.approx(4 * size, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer, recompute", [("adam", False), ("adafactor", True)])
def test_brute_force(tf_graph, optimizer, recompute):
    """The choice is the best of all pairs of a stored layout and a layout."""
    program = models.language_model(**{**TINY, "layers": 1}, optimizer=optimizer,
                                    recompute=recompute)  # fmt: skip
    shape = mtf.convert_to_shape("m:2,n:2")
    every = []
    axes = ["m", "n", "m+n"]
    for zero, axis in [(0, None), *((stage, axis) for stage in (2, 3) for axis in axes)]:
        stored = stored_layout(shape, zero=zero, zero_axis=axis)
        one = StepEstimator(
            program.graph, shape, program.outputs, SLOW, stored_layout=stored, joint=True
        )
        every += [one.estimate(layout) for layout in all_layouts(one)]
    peaks = sorted(e.peak_bytes for e in every)
    for limit in (None, peaks[len(peaks) // 10], peaks[0]):
        rules, stored = mtf.auto_mtf.layout_and_stored_layout(
            program.graph, shape, program.outputs, limit, SLOW, joint=True
        )
        one = StepEstimator(program.graph, shape, program.outputs, SLOW, stored_layout=stored)
        found = one.estimate(rules)
        assert limit is None or found.peak_bytes <= limit
        fits = [e.seconds.total for e in every if limit is None or e.peak_bytes <= limit]
        assert found.seconds.total <= min(fits) * (1 + 4e-6)
    with pytest.raises(MemoryLimitError, match=r"no layout fits in .* which needs the least"):
        mtf.auto_mtf.layout_and_stored_layout(
            program.graph, shape, program.outputs, peaks[0] - 1, SLOW, joint=True
        )


@pytest.mark.slow
def test_a_limit_pushes_to_higher_stages(tf_graph):
    """Data parallelism in less and less memory: in the order of the formulas of ZeRO."""
    peaks = {}
    for zero in (0, 2, 3):
        with tf.Graph().as_default():
            _, one = estimator("all:4", zero, vocab=32, d_ff=512, length=4, recompute=True)
            peaks[zero] = one.estimate("batch:all").peak_bytes
    assert peaks[0] > peaks[2] > peaks[3]


def test_unknown_stages(tf_graph):
    program = models.language_model(**TINY)
    with pytest.raises(ValueError, match="zero=4: the stage of ZeRO is 1 or 2"):
        mtf.auto_mtf.layout_and_stored_layout(program.graph, "m:2", zero=[4])


@pytest.mark.slow
def test_explains_it(tf_graph):
    program, estimated = estimator("all:4", 3, "all")
    explained = mtf.auto_mtf.explain(
        program.graph, "all:4", program.outputs, "batch:all", hardware=SLOW,
        stored_layout=estimated.stored_layout,
    )  # fmt: skip
    assert explained.chosen == estimated.estimate("batch:all")
    lines = str(explained).splitlines()
    assert lines[:2] == ["layout  batch:all", "stored  zero=3 over all"]


@pytest.mark.slow
def test_what_estimates_share(tf_graph):
    """Estimates that share what they evaluate are those that share nothing."""
    program = models.language_model(**TINY)
    parts = ProgramParts(program.graph, program.outputs)
    shape = mtf.convert_to_shape("m:2,n:2")
    for stored in stored_layouts(shape, (0, 2, 3)):
        alone, beside = (
            StepEstimator(program.graph, shape, program.outputs, SLOW, stored, some)
            for some in (None, parts)
        )
        for layout in ("", "batch:m", "batch:m;d_ff:n;heads:n", "d_model:n"):
            assert alone.estimate(layout) == beside.estimate(layout)

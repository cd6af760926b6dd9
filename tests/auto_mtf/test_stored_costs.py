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

"""Plans: what is predicted is counted, the best is that of brute force, errors say what misses."""

import pathlib
import sys

import pytest
import tensorflow.compat.v1 as tf
from auto_mtf.test_step_time import SLOW, all_layouts
from auto_mtf.test_stored_costs import counted, predicted

import mesh_tensorflow as mtf
from mesh_tensorflow._core.layout import stored_layout
from mesh_tensorflow.auto_mtf import Choice
from mesh_tensorflow.auto_mtf.hardware import Link
from mesh_tensorflow.auto_mtf.models import Program
from mesh_tensorflow.auto_mtf.step_time import MemoryLimitError, StepEstimator

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "examples"))

from planned_language_model import planned_language_model

SIZES = {"batch": 8, "length": 8, "vocab": 16, "d_model": 8, "layers": 2, "heads": 4, "d_kv": 4,
         "d_ff": 16}  # fmt: skip
FAST = SLOW.replace(link=Link(1e9, 1e-7))
PIPELINE = Choice(stages=2, microbatches=4)
PROGRAMS = [
    (PIPELINE, "a:2,b:2", "stages:a;batch:b", "b"),
    (PIPELINE._replace(recompute=True), "a:2,b:2", "stages:b;d_ff:a;heads:a", "a"),
    (PIPELINE._replace(repeats=2, microbatches=2), "a:2,b:2", "stages:a;batch:b", "b"),
    (Choice(attention="ring"), "a:4,b:2", "length:a;memory_length:a;batch:b", "a"),
    (Choice(recompute=True, attention="ring"), "a:4", "length:a;memory_length:a", "a"),
    (Choice(attention="all_to_all"), "a:4", "length:a;attention_heads:a", "a"),
    (Choice(sequence_parallel=True), "a:2,b:2", "batch:b;heads:a;d_ff:a;residual_length:a", "b"),
]


def built(choice, **sizes):
    layers = {"layers": 2 * choice.repeats, "optimizer": "adam"}
    return planned_language_model(choice, **{**SIZES, **layers, **sizes})


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("choice, mesh, layout, axis", PROGRAMS, ids=str)
def test_predicted_is_counted(tf_graph, choice, mesh, layout, axis, zero):
    program = built(choice)
    shape = mtf.convert_to_shape(mesh)
    options = {"zero": zero, "zero_axis": axis} if zero else {}
    estimated = StepEstimator(
        program.graph, shape, program.outputs, SLOW, stored_layout(shape, **options), exchanges=True
    )
    assert estimated.space.is_legal(estimated.estimate(layout).layout)
    found = predicted(estimated, layout)
    assert found == counted(program, mesh, layout, **options)[0]


@pytest.mark.slow
def test_brute_force(tf_graph):
    """The best plan is that of all pairs of meshes, stored layouts and layouts, of each candidate."""
    sizes = {**SIZES, "heads": 2, "d_kv": 3, "vocab": 7, "length": 3, "batch": 4}
    candidates = [Choice(), PIPELINE, Choice(recompute=True)]

    def build(choice):
        return built(choice, **sizes)

    every = []
    for choice in candidates:
        with tf.Graph().as_default():
            program = build(choice)
        for mesh, names in [("mesh_0:4", ["mesh_0"]), ("mesh_0:2,mesh_1:2", ["mesh_0", "mesh_1"])]:
            if choice.stages > 1 and len(names) == 1:
                continue  # four processors do not divide two stages
            shape = mtf.convert_to_shape(mesh)
            for options in [{}, *({"zero": 3, "zero_axis": name} for name in names)]:
                one = StepEstimator(program.graph, shape, program.outputs, SLOW,
                                    stored_layout(shape, **options), exchanges=True)  # fmt: skip
                every += [(choice, one.estimate(layout)) for layout in all_layouts(one)]
    peaks = sorted(e.peak_bytes for _, e in every)
    for limit in (None, peaks[len(peaks) // 50], peaks[0]):
        found = mtf.auto_mtf.plan(build, 4, candidates, (0, 3), limit, SLOW)
        fits = [e.seconds.total for _, e in every if limit is None or e.peak_bytes <= limit]
        assert found.best.seconds.total <= min(fits) * (1 + 4e-6)
        assert limit is None or found.best.estimate.peak_bytes <= limit
        assert len(found.lost) == 5
        soon = mtf.auto_mtf.plan(build, 4, candidates, (0, 3), limit, SLOW, within=1)
        assert soon.best.rules == found.best.rules


def test_joined_mesh_dimensions(tf_graph):
    """On a mesh of two dimensions, the batch over both is what it is over one of the same size."""
    sizes = {**SIZES, "heads": 1, "d_ff": 5, "d_model": 5, "d_kv": 5, "vocab": 5, "length": 5}

    def best(mesh, **options):
        plans = mtf.auto_mtf.plan(
            lambda choice: built(choice, **sizes),
            4,
            [Choice()],
            (0, 3),
            hardware=SLOW,
            mesh_shapes=[mesh],
            **options,
        )
        return plans.best

    joined, apart = best("a:2,b:2", joint=True), best("a:2,b:2")
    assert "batch:a+b" in joined.rules
    assert joined.seconds.total < apart.seconds.total
    one = best("all:4")
    assert joined.seconds.compute == pytest.approx(one.seconds.compute)
    assert joined.estimate.peak_bytes == one.estimate.peak_bytes


@pytest.mark.slow
def test_a_limit_pushes_to_recomputation(tf_graph):
    """Less memory takes more time: first what is stored in parts, then what is recomputed."""
    sizes = {"batch": 81, "length": 7, "vocab": 9, "d_model": 9, "heads": 1, "d_kv": 5, "d_ff": 7}
    limit, picks = None, []
    for _ in range(4):
        best = mtf.auto_mtf.plan(
            lambda choice: built(choice, **sizes), 3, memory_limit_bytes=limit, hardware=FAST
        ).best
        picks.append((best.seconds.total, best.choice.recompute, best.memory))
        limit = best.estimate.peak_bytes - 1
    assert [p[0] for p in picks] == sorted(p[0] for p in picks)
    assert [p[1] for p in picks] == [False, False, True, True]
    assert picks[2][2]["activations"] < picks[1][2]["activations"] / 4
    with pytest.raises(MemoryLimitError, match=r"no plan fits in .* of each of 3 processors") as e:
        mtf.auto_mtf.plan(
            lambda choice: built(choice, **sizes), 3, memory_limit_bytes=limit, hardware=FAST
        )
    assert e.value.missing_bytes == 1
    assert "The nearest is: layers recomputed; batch:mesh_0; zero=3 over mesh_0, on" in str(e.value)
    assert "1 B too many. Of these are:\n" in str(e.value) and " activations" in str(e.value)


@pytest.mark.slow
def test_a_limit_pushes_to_pipelines(tf_graph):
    """Where no size but that of the batch can be halved, stages halve the weights."""
    sizes = {"batch": 4, "length": 3, "vocab": 5, "d_model": 5, "heads": 1, "d_kv": 3, "d_ff": 501}
    candidates = [Choice(), PIPELINE]
    first = mtf.auto_mtf.plan(lambda c: built(c, **sizes), 2, candidates[:1], (0,), None, FAST).best
    assert first.choice == Choice() and not first.bubble
    limit = first.estimate.peak_bytes - 1
    plans = mtf.auto_mtf.plan(lambda c: built(c, **sizes), 2, candidates, (0,), limit, FAST)
    assert plans.best.choice == PIPELINE and plans.best.estimate.layout["stages"] == "mesh_0"
    assert plans.best.memory["weights"] < 0.6 * first.memory["weights"]
    assert plans.best.bubble == 1 / 5
    assert 0 < plans.best.bubble_seconds < plans.best.seconds.compute / 5
    assert "shift over mesh_0" in plans.best.communication
    [lost] = plans.lost
    assert lost.choice == Choice() and lost.best is None and lost.missing_bytes > 0
    assert lost.why.startswith("does not fit: ") and lost.why in str(plans)
    assert "2 stages, 4 microbatches" in str(plans) and "0.200 of the ticks" in str(plans)
    total = sum(plans.best.communication.values())
    assert total == pytest.approx(plans.best.seconds.communication)
    assert sum(plans.best.memory.values()) == plans.best.estimate.peak_bytes


@pytest.mark.slow
def test_what_cannot_be_built(tf_graph):
    candidates = mtf.auto_mtf.choices(stages=[1, 2, 3], microbatches=[3, 4], recompute=[False])
    plans = mtf.auto_mtf.plan(built, 2, candidates, (0,), hardware=SLOW)
    why = {lost.choice: lost.why for lost in plans.lost}
    assert why[Choice(2, 3)].startswith(
        "cannot be built: pipeline: 3 microbatches do not divide the batch batch=8; choose"
    )
    assert why[Choice(3, 4)] == "no mesh dimension, of sizes 2, divides 3 stages"
    with pytest.raises(ValueError, match="none of the candidates can be built:\n  3 stages, 4 mic"):
        mtf.auto_mtf.plan(built, 2, [Choice(3, 4)], hardware=SLOW)
    with pytest.raises(ValueError, match="2 layers cannot be 4 stages, 1 times: the number of lay"):
        built(Choice(4, 4), layers=2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"processors": 0}, "num_machines=0 and max_mesh_shape_dimensions=2 must be 1 or more"),
        ({"mesh_shapes": ["a:4,b:2"]}, "mesh shape a=4, b=2 has 8 processors, but there are 2"),
        ({"memory_limit_bytes": 0}, "memory_limit_bytes=0 must be a number of bytes, more than 0"),
        ({"within": 0.5}, "within=0.5 must be 1 or more"),
        (
            {"candidates": [Choice(attention="wide")]},
            "Choice: attention='wide' is none of 'whole', 'ring'",
        ),
        ({"candidates": [Choice(stages=0)]}, "Choice: stages=0 must be an integer of at least 1"),
        ({"candidates": [Choice(2, 1, 2)]}, "needs a microbatch for each stage: microbatches=1"),
        ({"zero": [5]}, "zero=5: the stage of ZeRO is 1 or 2"),
    ],
)
def test_bad_arguments(tf_graph, arguments, message):
    with pytest.raises(ValueError, match="^[^~]*" + message.replace("(", "[(]")):
        mtf.auto_mtf.plan(built, **{"processors": 2, **arguments})


def test_sums_over_microbatches_are_in_memory_once(tf_graph):
    """A gradient of a microbatch is added to the sum when it is made, not after all of them."""
    batch, d = mtf.convert_to_shape("batch:8,d:64").dims
    other = mtf.Dimension("other", 64)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 64]), [batch, d])

    def loss_fn(x):
        for i in range(8):
            dims = ([other], [d]) if i % 2 == 0 else ([d], [other])
            x = mtf.layers.dense(x, *dims, use_bias=False, name=f"layer_{i}")
        return mtf.reduce_mean(x)

    found = mtf.optimize.accumulate_gradients(loss_fn, x, batch, num_microbatches=4)
    mtf.optimize.SgdOptimizer(0.1).apply_grads(found.grads, found.variables)
    held = StepEstimator(mesh.graph, "a:1", [found.loss], SLOW).peak_by_kind("")
    assert held["weights"] == 8 * 64 * 64 * 4
    assert held["weights"] <= held["activations"] < 1.5 * held["weights"]


def test_gradients_of_a_microbatch_are_added_one_by_one(tf_graph):
    """Those in bfloat16, which are summed in float32, do not wait for the end of the microbatch."""
    batch, d = mtf.convert_to_shape("batch:8,d:64").dims
    other = mtf.Dimension("other", 64)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 64], tf.bfloat16), [batch, d])
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)

    def loss_fn(x):
        def layer(x, i):
            dims = ([other], [d]) if i % 2 == 0 else ([d], [other])
            return mtf.layers.dense(
                x, *dims, use_bias=False, variable_dtype=dtype, name=f"layer_{i}"
            )

        for i in range(8):
            [x] = mtf.recompute_grad(lambda x, i=i: [layer(x, i)], [x])
        return mtf.reduce_mean(x)

    found = mtf.optimize.accumulate_gradients(loss_fn, x, batch, num_microbatches=4)
    mtf.optimize.SgdOptimizer(0.1).apply_grads(found.grads, found.variables)
    estimator = StepEstimator(mesh.graph, "a:1", [found.loss], SLOW)
    weight = 64 * 64 * 4
    held = [h.bytes for h in estimator.peak_contents("")]
    assert held.count(weight) <= 8 + 8 + 1  # weights, sums of gradients, and one to be added
    # Each weight is read in bfloat16, besides at most one gradient and what it was made of.
    assert held.count(weight // 2) <= 8 + 2


def test_by_the_times_of_operations(tf_graph, tmp_path):
    """Plans of what was timed: by the same times in each run, and of this machine."""
    asked = mtf.auto_mtf.Profile(60, str(tmp_path / "p.json"), ["cpu:0", "cpu:1"], show=False)

    def build(choice):
        """A layer, for which few operations are timed."""
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.ones(mesh, "batch:8,i:8")

        def layer(x):
            return mtf.layers.dense(x, [mtf.Dimension("h", 8)], x.shape.dims[1:], name="a")

        y = mtf.recompute_grad(lambda x: [layer(x)], [x])[0] if choice.recompute else layer(x)
        loss = mtf.reduce_sum(mtf.square(y))
        variables = mesh.graph.trainable_variables
        gradients = mtf.gradients([loss], [v.value for v in variables])
        updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, variables)
        return Program(mesh.graph, mesh, [loss], updates)

    def planned():
        candidates = [Choice(), Choice(recompute=True)]
        return mtf.auto_mtf.plan(build, 2, candidates, (0,), profile=asked)

    first = planned()
    kept = (tmp_path / "p.json").read_text()
    again = planned()
    assert again.best == first.best and (tmp_path / "p.json").read_text() == kept
    assert "on processors of logical CPUs" in str(first)
    assert len(first.lost) == 1 and first.best.seconds.total > 0

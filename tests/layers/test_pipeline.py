"""Pipelines: values, gradients, communication, schedules, error texts."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.errors import After, check_building

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness

STAGES, REPEATS, BATCH, D, F = mtf.convert_to_shape("stages:4,repeats:2,batch:8,d:4,f:6").dims
RNG = np.random.default_rng(0)
X = RNG.normal(size=[8, 4]).astype(np.float32)
SIDE = RNG.normal(size=[8]).astype(np.float32)
WI = RNG.normal(size=[2, 4, 4, 6]).astype(np.float32) / 2
WO = RNG.normal(size=[2, 4, 6, 4]).astype(np.float32) / 2

PLACINGS = {
    "whole": ("", "", False),
    "two": ("p:2", "stages:p", False),
    "four": ("p:4", "stages:p", False),
    "two_simd": ("p:2", "stages:p", True),
    "four_simd": ("p:4", "stages:p", True),
    "with_batch": ("p:2,q:2", "stages:p,batch:q", False),
    "with_batch_simd": ("p:2,q:2", "stages:p,batch:q", True),
    "with_tensor_of_eight": ("p:2,q:4", "stages:q,f:p", False),
    "with_batch_of_eight_simd": ("p:2,q:4", "stages:q,batch:p", True),
}


def block(x, wi, wo, *side):
    """A residual block; its slope is infinite at 0."""
    h = mtf.sqrt(mtf.relu(mtf.einsum([x, wi], reduced_dims=[D])) + 1e-3)
    y = x + mtf.einsum([h, wo], output_shape=x.shape)
    for s in side:
        y += mtf.einsum([s, x], output_shape=x.shape)
    return y


class Program:
    """The stages in a row or as a pipeline, with the gradients of all that goes in."""

    def __init__(self, circular=False, pipelined=True, microbatches=4, side=True, recompute=False):
        self.mesh = mtf.Mesh(mtf.Graph(), "mesh")
        lead = [REPEATS, STAGES] if circular else [STAGES]
        values = [WI, WO] if circular else [WI[0], WO[0]]
        shapes = [[*lead, D, F], [*lead, F, D]]
        weights = [self.given(v, s) for v, s in zip(values, shapes)]
        x = self.given(X, [BATCH, D])
        sides = [self.given(SIDE, [BATCH])] if side else []
        if pipelined:
            repeats = REPEATS if circular else None
            y = mtf.layers.pipeline(
                block, x, weights, STAGES, BATCH, microbatches, repeats, sides, recompute
            )
        else:
            y = self.in_a_row(x, weights, sides, circular)
        loss = mtf.reduce_sum(mtf.square(y))
        self.targets = [y, *mtf.gradients([loss], [x, *weights, *sides])]

    def given(self, value, shape):
        return mtf.import_tf_tensor(self.mesh, tf.constant(value), mtf.Shape(shape))

    def in_a_row(self, x, weights, sides, circular):
        passes = [mtf.unstack(w, REPEATS) if circular else [w] for w in weights]
        for of_pass in zip(*passes):
            for of_stage in zip(*(mtf.unstack(w, STAGES) for w in of_pass)):
                x = block(x, *of_stage, *sides)
        return x

    def run(self, mesh="", layout="", simd=False):
        placing = harness.Placing(mesh, layout, simd=simd)
        lowered = harness.lower(self.mesh.graph, self.mesh, placing, self.targets)
        with harness.session() as session:
            return session.run(lowered.exports), lowered


@pytest.mark.slow_but(1)
@pytest.mark.slow("circular-with_*_of_eight*")
@pytest.mark.parametrize("name", PLACINGS)
@pytest.mark.parametrize("circular", [False, True], ids=["once", "circular"])
def test_equals_stages_in_a_row(circular, name, tf_graph):
    """Values and all gradients; communication is counted as it is predicted."""
    expected, _ = Program(circular, pipelined=False).run()
    found, lowered = Program(circular).run(*PLACINGS[name])
    for e, f in zip(expected, found):
        np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-5 * np.abs(e).max())
    assert lowered.counted == lowered.predicted


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_number_of_microbatches(microbatches, tf_graph):
    expected, _ = Program(pipelined=False).run()
    found, _ = Program(microbatches=microbatches, recompute=True).run("p:4", "stages:p")
    for e, f in zip(expected, found):
        np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-5 * np.abs(e).max())


@pytest.mark.slow
def test_more_microbatches_than_stages_wait(tf_graph):
    """In a circular pipeline, activations wait for the first stage."""
    expected, _ = Program(True, pipelined=False).run()
    found, _ = Program(True, microbatches=8).run("p:2", "stages:p")
    for e, f in zip(expected, found):
        np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-5 * np.abs(e).max())


@pytest.mark.slow
def test_communication(tf_graph):
    """A shift of a microbatch per tick and direction, and one sum of the batch each."""
    _, lowered = Program(side=False).run("p:4", "stages:p")
    found = [(c.kind, c.elements) for _, _, c in lowered.lowering.collectives]
    shifts = [elements for kind, elements in found if kind == "shift"]
    ticks = 4 + 4 - 1
    assert shifts == [4 * 2 * D.size] * 2 * (ticks - 1)
    others = sorted(c for c in found if c[0] != "shift")
    assert others == [("allreduce", 4 * BATCH.size * D.size)] * 2


def test_schedule():
    """Each stage is in each pass with each microbatch once, and waits in bubbles."""
    for stages, microbatches, repeats in [(1, 1, 1), (4, 8, 1), (3, 5, 2), (2, 2, 3)]:
        schedule = mtf.layers.PipelineSchedule(stages, microbatches, repeats)
        for stage in range(stages):
            places = [schedule.at(t, stage) for t in range(schedule.ticks)]
            busy = [p for p in places if p is not None]
            assert busy == [(r, m) for r in range(repeats) for m in range(microbatches)]
            assert places.count(None) == stages - 1
            assert schedule.bubble == places.count(None) / schedule.ticks
    assert mtf.layers.PipelineSchedule(4, 8).bubble == 3 / 11
    assert "1.0" in schedule.table()


def call(x="batch:8,d:4", w="stages:4,d:4", microbatches=4, repeats=None, side=(), fn=None):
    """Returns a call of pipeline, which is prepared by its inputs."""
    fn = fn or (lambda x, w, *_: x * w)

    def inputs(world):
        return [mtf.zeros(world.mesh, shape) for shape in (x, w, *side)]

    def made(world, given):
        return mtf.layers.pipeline(
            fn, given[0], given[1:2], STAGES, BATCH, microbatches, repeats, given[2:]
        )

    return After(inputs, made)


def _counts(x):
    seen = mtf.get_variable(x.mesh, "seen", [], trainable=False)
    mtf.assign(seen, seen + 1.0)


def _once(fn, x):
    """Returns what a function makes of a Tensor, in a loop of one iteration."""
    return mtf.while_loop(
        lambda i, _: mtf.less(i, 1.0), lambda i, x: [i + 1.0, fn(x)], [mtf.zeros(x.mesh, []), x]
    )[1]


ERRORS = {
    "microbatches": (
        call(microbatches=3),
        r"pipeline: 3 microbatches do not divide the batch batch=8; choose num_microbatches from "
        r"1, 2, 4, 8, or another size of the batch",
    ),
    "no_microbatches": (call(microbatches=0), r"0 microbatches do not divide the batch"),
    "batch": (
        call(x="batch:6,d:4"),
        r"pipeline: x .* lacks the batch batch=8; pass a Dimension of it as batch_dim",
    ),
    "side": (call(side=["d:4"]), r"pipeline: a side input .* lacks the batch batch=8"),
    "stages_of_input": (
        call(x="stages:4,batch:8,d:4"),
        r"pipeline: x .* has the dimension stages of the stages; .* give the stages another name",
    ),
    "stages_of_weight": (
        call(w="stages:3,d:4"),
        r"pipeline: the weight .* has stages=3, but there are 4 stages; stack those of 4",
    ),
    "repeats_of_weight": (
        call(repeats=REPEATS),
        r"pipeline: the weight .* lacks repeats=2; in a circular pipeline weights have both "
        r"repeats and stages, or neither",
    ),
    "few_for_circle": (
        call(repeats=REPEATS, microbatches=2),
        r"num_microbatches=2 is less than stages=4; use at least 4 microbatches, or "
        r"repeats_dim=None",
    ),
    "result": (
        call(fn=lambda x, w: mtf.reduce_sum(x, reduced_dim=D)),
        r"pipeline: stage_fn got activations .* and returned .*; .* return the same dimensions",
    ),
    "assigns": (
        call(fn=lambda x, w: (_counts(x), x * w)[1]),
        r"pipeline: stage_fn assigns to seen, but it is called for each tick, .*as a loss, which",
    ),
    "assigns_in_a_loop": (
        call(fn=lambda x, w: _once(lambda y: (_counts(y), y * w)[1], x)),
        r"pipeline: stage_fn assigns to seen, but it is called for each tick",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    """Each says what does not fit and what to do, and leaves nothing in the graph."""
    make, text = ERRORS[name]
    check_building(make, ValueError, text)


RULES = {
    "axis_that_is_not_there": ("stages:nowhere", "stages:nowhere splits nothing: 'nowhere' is not"),
    "axis_that_does_not_divide": ("stages:p", "Make stages a multiple of 3"),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_stages(name):
    """Layout rules that cannot put stages on processors."""
    layout, text = RULES[name]
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    with mtf.strict():
        mtf.layers.pipeline(
            lambda x, w: x * w,
            mtf.zeros(mesh, mtf.Shape([BATCH, D])),
            [mtf.zeros(mesh, mtf.Shape([STAGES, D]))],
            STAGES,
            BATCH,
            num_microbatches=4,
        )
        with pytest.raises(ValueError, match=text):
            mtf.Lowering(graph, {mesh: harness.Placing("p:3", layout).impl()})

"""Stages that wait: what they compute is part of no value and of no gradient, not even NaN."""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import WHOLE, Placing

STAGES, REPEATS, BATCH, D = mtf.convert_to_shape("stages:3,repeats:2,batch:6,d:2").dims
X = np.array([[9, 8], [7, 9], [8, 8], [9, 7], [8, 9], [7, 7]], "f") * 10
SPLIT = Placing("x:3", "stages:x")


def _centered(x):
    return x - mtf.reduce_mean(x, output_shape=x.shape - D)


# A function of activations and a weight of each stage, and these weights: each stage works on what
# it gets of the one before, and not on what enters the first.
FUNCTIONS = {
    "exp": (lambda x, w: mtf.exp(x * w), [0.001, 0.5, 0.7]),
    "sqrt": (lambda x, w: mtf.sqrt(x * w), [1.0, 2.0, 3.0]),
    "sqrt_of_other_sign": (lambda x, w: mtf.sqrt(x - w) * -1.0, [0.0, -100.0, -100.0]),
    "log": (lambda x, w: mtf.log(x - w), [0.0, -1.0, -2.0]),
    "log_of_less": (lambda x, w: mtf.log(w - x) - 300.0, [200.0, 0.0, 0.0]),
    "reciprocal": (lambda x, w: mtf.reciprocal(x - w), [0.0, 80.0, 90.0]),
    "norm": (lambda x, w: mtf.rsqrt(mtf.square(x) - w) + 1.0, [0.0, 0.5, 0.5]),
    "overflow": (lambda x, w: mtf.exp(mtf.square(x * w) - 20.0), [0.005, 1.0, 1.0]),
}


def program(mesh, name, kind="once", pipelined=True, recompute=False, loss=True):
    """Returns the result, the loss of stages, and gradients of inputs, weights and sides."""
    fn, weights = FUNCTIONS[name]
    circular = kind == "circular"
    if circular:
        weights = [weights, [0.1, 0.5, 0.7]]
    shape = mtf.Shape([REPEATS, STAGES] if circular else [STAGES])

    def given(x, dims):
        return mtf.import_tf_tensor(mesh, tf.constant(np.array(x, "f")), dims)

    x, w = given(X, mtf.Shape([BATCH, D])), given(weights, shape)
    common = given([1.0, 1.0], mtf.Shape([D]))
    side = given(np.ones([6]), mtf.Shape([BATCH]))

    def stage(x, w, common, side):
        y = fn(x, w) * common
        y = mtf.multiply(y, side, output_shape=y.shape)
        if not loss:
            return y
        left = [d for d in x.shape if d == STAGES]
        return [y, mtf.reduce_mean(mtf.square(y), output_shape=mtf.Shape(left))]

    xs = [x, w, common, side]
    if pipelined:
        found = mtf.layers.pipeline(
            stage,
            x,
            [w, common],
            STAGES,
            BATCH,
            3,
            REPEATS if circular else None,
            [side],
            recompute,
        )
        y, *losses = found if loss else [found]
    else:
        y, losses = x, []
        for of_pass in mtf.unstack(w, REPEATS) if circular else [w]:
            for of_stage in mtf.unstack(of_pass, STAGES):
                y = stage(y, of_stage, common, side)
                if loss:
                    y, more = y
                    losses.append(more)
        losses = [mtf.add_n(losses)] if losses else []
    total = mtf.add_n([mtf.reduce_sum(y), *losses])
    return [y, *losses, *mtf.gradients([total], xs)]


def run(build, placing=WHOLE):
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        targets = build(mesh)
        lowered = harness.lower(mesh.graph, mesh, placing, targets)
        with harness.session() as session:
            return session.run(lowered.exports)


slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("placing, options", [
    (WHOLE, {}),
    (SPLIT, {}),
    (WHOLE, {"recompute": True}),
    (SPLIT._replace(simd=True), {"loss": False}),
    pytest.param(SPLIT._replace(simd=True), {"recompute": True}, marks=slow),
    pytest.param(SPLIT._replace(apart=True, merge="device"), {}, marks=slow),
    pytest.param(SPLIT, {"loss": False}, marks=slow),
], ids=str)  # fmt: skip
def test_equals_stages_in_a_row(placing, options):
    """In one graph, for all functions."""
    rows = in_a_row(options.get("loss", True))
    values = run(
        lambda mesh: [x for name in FUNCTIONS for x in program(mesh, name, **options)], placing
    )
    n = len(values) // len(FUNCTIONS)
    for i, (x, expected) in enumerate(zip(values, rows, strict=True)):
        what = f"{list(FUNCTIONS)[i // n]} {i % n}"
        assert np.isfinite(expected).all(), f"{what}: the test is about stages that wait"
        harness.assert_close(x, expected, 1e-4, what)


@functools.cache
def in_a_row(loss):
    return run(
        lambda mesh: [
            x for name in FUNCTIONS for x in program(mesh, name, pipelined=False, loss=loss)
        ]
    )


def test_circular():
    """What leaves the last stage enters the first again."""
    values = run(
        lambda mesh: [
            x for pipelined in (True, False) for x in program(mesh, "exp", "circular", pipelined)
        ]
    )
    half = len(values) // 2
    for a, b in zip(values[:half], values[half:]):
        assert np.isfinite(b).all()
        harness.assert_close(a, b, 1e-4)


def test_within_what_is_computed_again():
    """And gradients of gradients."""

    def build(mesh):
        found = []
        for pipelined in (True, False):
            x = mtf.import_tf_tensor(mesh, tf.constant(X), mtf.Shape([BATCH, D]))
            w = mtf.import_tf_tensor(mesh, tf.constant([0.001, 0.5, 0.7]), mtf.Shape([STAGES]))

            fns = [FUNCTIONS["exp"][0]]

            def model(x, w, pipelined=pipelined, fns=fns):
                fn = fns[0]
                if pipelined:
                    return mtf.layers.pipeline(fn, x, [w], STAGES, BATCH, 3)
                for of_stage in mtf.unstack(w, STAGES):
                    x = fn(x, of_stage)
                return x

            y = mtf.recompute_grad(model, [x, w])
            first = mtf.gradients([mtf.reduce_sum(y)], [x, w])
            norm = mtf.add_n([mtf.reduce_sum(mtf.square(dx)) for dx in first])
            found += [y, *first]
            fns[0] = lambda x, w: mtf.sin(x * w)
            y = model(x, w)
            first = mtf.gradients([mtf.reduce_sum(y)], [x, w])
            norm = mtf.add_n([mtf.reduce_sum(mtf.square(dx)) for dx in first])
            found += mtf.gradients([norm], [x, w])
        return found

    values = run(build)
    half = len(values) // 2
    for i, (a, b) in enumerate(zip(values[:half], values[half:])):
        assert np.isfinite(b).all(), i
        harness.assert_close(a, b, 1e-4, str(i))

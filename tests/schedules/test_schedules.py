"""Schedules: the same numbers for Python steps, tf steps and mtf steps; gin; errors."""

import math

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import learning_rate_schedules

schedules = mtf.schedules
STEPS = (0, 1, 3, 4, 5, 9, 10, 25)


def cosine(step):
    part = min(max((step - 4) / 6, 0), 1)
    return min(step / 4, 1) * (0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2)


CASES = {
    "constant": (lambda: schedules.constant(0.5), lambda k: 0.5),
    "warmup": (lambda: schedules.linear_warmup(0.2, 4), lambda k: 0.2 * min(k / 4, 1)),
    "no_warmup": (lambda: schedules.linear_warmup(0.2, 0), lambda k: 0.2),
    "linear": (
        lambda: schedules.linear_decay(2.0, 10, 4, 1.0),
        lambda k: min(k / 4, 1) * (1 + 1 - min(max((k - 4) / 6, 0), 1)),
    ),
    "cosine": (lambda: schedules.cosine(1.0, 10, 4, 0.1), cosine),
    "rsqrt": (
        lambda: schedules.rsqrt(0.1, 4),
        lambda k: 0.1 * min(k / 4, 1) * (4 / max(k, 4)) ** 0.5,
    ),
    "t5": (
        lambda: schedules.rsqrt(4**-0.5, 4, constant_start=True),
        lambda k: max(k, 4) ** -0.5,
    ),
    "noam": (
        lambda: schedules.noam(64, 4, 2.0),
        lambda k: 2 * 64**-0.5 * min((k + 1) ** -0.5, (k + 1) * 4**-1.5),
    ),
    "piecewise": (
        lambda: schedules.piecewise([4, 10], [0.3, 0.2, 0.1]),
        lambda k: 0.3 if k < 4 else 0.2 if k < 10 else 0.1,
    ),
    "join": (
        lambda: schedules.join([schedules.linear_warmup(0.3, 4), lambda k: 0.3 / (1 + k)], [4]),
        lambda k: 0.3 * k / 4 if k < 4 else 0.3 / (1 + k - 4),
    ),
}


def test_values():
    """A float of a number; a float32 scalar of a tf step, whatever its dtype, and of an mtf step."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    in_mesh, expected = [], []
    for name, (make, formula) in CASES.items():
        schedule = make()
        for k in STEPS:
            assert type(schedule(k)) is float and schedule(np.int64(k)) == schedule(k)
            np.testing.assert_allclose(schedule(k), formula(k), rtol=1e-12, err_msg=name)
            for step in (tf.constant(k, tf.int64), tf.Variable(k), tf.constant(float(k))):
                value = schedule(step)
                assert value.dtype == tf.float32
                np.testing.assert_allclose(value, formula(k), rtol=2e-6, atol=1e-7, err_msg=name)
            in_mesh.append(schedule(mtf.constant(mesh, k, dtype=tf.int32)))
            expected.append(formula(k))
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "", ["", ""])
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    found = [float(lowering.export_to_tf_tensor(y)) for y in in_mesh]
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)


def test_as_factors(tf_graph):
    """A schedule is a factor of a product, and T5's schedule is that of transformers."""
    t5 = schedules.rsqrt(0.01, 10_000, constant_start=True)
    rate = mtf.optimize.product_learning_rate(tf.constant(40_000), 100_000, [2.0, t5])
    other = learning_rate_schedules.truncated_rsqrt(tf.constant(40_000), 100_000)
    with tf.Session() as session:
        rate, other = session.run([rate, other])
    np.testing.assert_allclose([rate / 2, other], t5(40_000), rtol=1e-6)


def test_gin():
    """Names of their own: the short names of transformers' schedules stay unambiguous."""
    gin.parse_config("""
        mesh_tensorflow.optimize.AdamWOptimizer.learning_rate = @cosine_schedule()
        cosine_schedule.peak = 0.5
        cosine_schedule.total_steps = 10
        linear_warmup.steps_or_fraction = 7
        learning_rate_schedules.constant.value = 3.0
    """)
    optimizer = mtf.optimize.AdamWOptimizer()
    assert repr(optimizer.learning_rate).startswith("cosine(peak=0.5, total_steps=10")
    assert learning_rate_schedules.constant(0, 1) == 3.0
    assert schedules.constant(1.0)(0) == 1.0
    with tf.Session(graph=tf.Graph()) as session, session.graph.as_default():
        ramp = learning_rate_schedules.linear_warmup(tf.constant(1), 100)
        np.testing.assert_allclose(session.run(ramp), 1 / 7, rtol=1e-6)


def test_lists_may_be_changed_afterwards():
    boundaries, values = [2], [1.0, 3.0]
    pieces = [schedules.constant(1.0), schedules.constant(3.0)]
    made = schedules.piecewise(boundaries, values), schedules.join(pieces, boundaries)
    boundaries[0], values[1], pieces[1] = 5, 7.0, schedules.constant(7.0)
    assert [schedule(step) for schedule in made for step in (1, 3)] == [1.0, 3.0, 1.0, 3.0]


ERRORS = {
    "warmup": (
        lambda: schedules.cosine(1.0, 10, 10),
        "warmup_steps=10 must be less than total_steps=10, which includes the warmup",
    ),
    "floor": (
        lambda: schedules.linear_decay(0.1, 10, floor=0.5),
        "floor=0.5 must not be above peak=0.1; both are learning rates",
    ),
    "negative": (
        lambda: schedules.linear_warmup(1.0, -1),
        "warmup_steps must be at least 0, not -1",
    ),
    "text": (lambda: schedules.constant("0.1"), "constant: value must be a number, not '0.1'"),
    "noam": (lambda: schedules.noam(0), "noam: d_model must be at least 1, not 0"),
    "pieces": (
        lambda: schedules.piecewise([10], [0.1]),
        r"1 values need 0 boundaries between them, but there are 1: \[10\]",
    ),
    "order": (
        lambda: schedules.piecewise([10, 5], [1.0, 2.0, 3.0]),
        r"boundaries must increase, unlike \[10, 5\]",
    ),
    "list": (lambda: schedules.piecewise(10, [1.0]), "boundaries must be a list, not 10"),
    "number": (
        lambda: schedules.join([0.1, schedules.constant(0.2)], [5]),
        "0.1 is no schedule; mtf.schedules.constant makes one of a number",
    ),
    "step": (
        lambda: schedules.constant(0.1)("first"),
        "constant: the step must be a number, a tf scalar or variable, .* not 'first'",
    ),
    "vector": (
        lambda: schedules.constant(0.1)(tf.zeros([2])),
        r"constant: the step must be a scalar, not of shape \(2,\)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, text = ERRORS[name]
    with pytest.raises(ValueError, match=text):
        call()

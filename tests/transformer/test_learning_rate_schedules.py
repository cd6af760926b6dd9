"""Learning rate schedules against the classic, and against each other."""

import functools
import json
import pathlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from mesh_tensorflow.transformer import learning_rate_schedules as schedules

FIXTURE = pathlib.Path(__file__).parents[1] / "oracle" / "fixtures" / "schedules.json"
RECORDED = json.loads(FIXTURE.read_text())


def rates(steps, rate_fn, dtype=tf.int32):
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.placeholder(dtype, [])
        rate = rate_fn(step)
        if not tf.is_tensor(rate):
            return [rate] * len(steps)
        assert rate.dtype == tf.float32
        return [session.run(rate, {step: s}) for s in steps]


@pytest.mark.parametrize("name", sorted({name for name, *_ in RECORDED["rates"]}))
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_equals_the_classic(name, dtype):
    for recorded_name, total, kwargs, expected in RECORDED["rates"]:
        if recorded_name == name:
            rate_fn = getattr(schedules, name)
            bound = functools.partial(rate_fn, total_train_steps=total, **kwargs)
            actual = rates(RECORDED["steps"], bound, dtype)
            np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-9, err_msg=str(kwargs))


def test_product_of_numbers_and_schedules():
    factors = [
        2.0,
        schedules.linear_warmup,
        lambda step, total: schedules.linear_decay(step, total, 40),
    ]
    actual = rates(
        [10, 20, 80], lambda s: schedules.product_learning_rate(s, 110, factors=factors, offset=10)
    )
    np.testing.assert_allclose(actual, 2.0 * np.array([0, 10 / 1e4, 70 / 1e4 * 30 / 40]), rtol=1e-6)


def test_without_a_decay_or_a_warmup_the_value_is_one():
    """The classic divides by zero."""
    assert rates([0, 50, 100, 130], lambda s: schedules.linear_decay(s, 100, 0)) == [1.0] * 4
    assert rates([0, 50], lambda s: schedules.linear_warmup(s, None, 0)) == [1.0] * 2
    np.testing.assert_allclose(
        rates([0, 1, 4], lambda s: schedules.truncated_rsqrt(s, None, 0)), [1, 1, 0.5]
    )


@pytest.mark.parametrize(
    "name",
    [
        "linear_decay",
        "linear_decay_learning_rate",
        "learning_rate_schedule_noam",
        "slanted_triangular",
    ],
)
def test_what_needs_a_last_step_says_so(name):
    with pytest.raises(ValueError, match=f"{name}: total_train_steps is None.*train_steps"):
        getattr(schedules, name)(5, None)


def test_impossible_arguments():
    with pytest.raises(ValueError, match=r"cut_fraction=0.001 of total_train_steps=100 must be"):
        schedules.slanted_triangular(5, 100, cut_fraction=0.001)
    with pytest.raises(ValueError, match="linear_warmup: -1 is neither a number of steps"):
        schedules.linear_warmup(5, 100, -1)
    with pytest.raises(ValueError, match="factors must be a list"):
        schedules.product_learning_rate(5, 100, factors=3)

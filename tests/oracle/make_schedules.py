"""Writes fixtures/schedules.json: learning rates of the classic at many steps.

Run with the oracle's Python (see README.md):  python -m oracle.make_schedules
"""

import json
import os
import sys
from unittest import mock

import classic_shim  # noqa: F401  (first: makes the classic importable)
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
sys.modules["tensorflow_datasets"] = mock.MagicMock()  # which the classic's transformer imports

from mesh_tensorflow.transformer import learning_rate_schedules  # noqa: E402

STEPS = [0, 1, 2, 3, 7, 9, 10, 11, 25, 49, 50, 51, 75, 89, 90, 91, 95, 99, 100, 101, 130]
TOTALS = [100, 105]
CALLS = {
    "constant": [{}, {"value": 3.0}],
    "constant_learning_rate": [{"learning_rate": 0.5}],
    "learning_rate_schedule_noam": [
        {}, {"warmup_steps": 10}, {"warmup_steps": 10, "linear_decay_fraction": 0.0},
        {"warmup_steps": 10, "linear_decay_fraction": 0.5, "multiplier": 2.0, "offset": 11},
    ],
    "linear_decay": [
        {}, {"steps_or_fraction": 20}, {"steps_or_fraction": 1}, {"steps_or_fraction": 0.25},
    ],
    "linear_decay_learning_rate": [{}, {"initial_lr": 0.5, "offset": 20}],
    "linear_warmup": [
        {}, {"steps_or_fraction": 20}, {"steps_or_fraction": 1}, {"steps_or_fraction": 0.25},
    ],
    "slanted_triangular": [
        {},
        {"cut_fraction": 0.3, "ratio": 10, "max_learning_rate": 1.0, "start_step": 20},
        {"cut_fraction": 0.25, "ratio": 4, "max_learning_rate": 2.0},
    ],
    "truncated_rsqrt": [{}, {"warmup_steps": 10}],
}  # fmt: skip


def rates(name, total, kwargs):
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.placeholder(tf.int32, [])
        rate = getattr(learning_rate_schedules, name)(step, total, **kwargs)
        rate = rate * tf.ones([])
        return [float(session.run(rate, {step: s})) for s in STEPS]


def main():
    recorded = [
        [name, total, kwargs, rates(name, total, kwargs)]
        for name, calls in CALLS.items()
        for kwargs in calls
        for total in TOTALS
    ]
    fixtures = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures")
    with open(os.path.join(fixtures, "schedules.json"), "w") as f:
        json.dump({"steps": STEPS, "rates": recorded}, f, separators=(",", ":"))


if __name__ == "__main__":
    main()

"""Rows of the table: small models that use a feature each."""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.crossings.feature import STEPS, WIDTH, Feature, Outcome

__all__ = ["FEATURES"]

HIDDEN = mtf.Dimension("hidden", 6)


def _weight(mesh, name, shape, scale=0.5):
    """Returns a weight with initial values that depend on its name and shape only."""
    shape = mtf.convert_to_shape(shape)
    rng = np.random.RandomState(len(name) + shape.size)
    value = (scale * rng.randn(*shape.to_integer_list)).astype(np.float32)
    return mtf.get_variable(mesh, name, shape, initializer=tf.constant_initializer(value))


def _error(x, between=lambda h: h):
    """Returns the squared errors of an autoencoder."""
    h = between(
        mtf.tanh(mtf.einsum([x, _weight(x.mesh, "encode", [WIDTH, HIDDEN])], reduced_dims=[WIDTH]))
    )
    y = mtf.einsum([h, _weight(x.mesh, "decode", [HIDDEN, WIDTH])], reduced_dims=[HIDDEN])
    return mtf.square(y - x)


def _plain(mesh, x):
    return mtf.reduce_mean(_error(x))


def _counter(mesh, x):
    seen = mtf.get_variable(mesh, "seen", [], initializer=tf.zeros_initializer(), trainable=False)
    return _plain(mesh, x), [mtf.assign(seen, seen + 1.0)]


def _counts_steps(outcome: Outcome) -> None:
    assert outcome.variables["seen"] == STEPS


def _batch_norm(mesh, x):
    updates = []

    def between(h):
        y, more = mtf.layers.batch_norm(h, is_training=True, momentum=0.5)
        updates.extend(more)
        return y

    return mtf.reduce_mean(_error(x, between)), updates


def _dropout(mesh, x):
    return mtf.reduce_mean(_error(x, lambda h: mtf.dropout(h, True, keep_prob=0.6)))


FEATURES = {
    feature.name: feature
    for feature in (
        Feature("counter", _counter, check=_counts_steps),
        Feature("batch norm", _batch_norm),
        Feature("dropout", _dropout, random=True),
    )
}

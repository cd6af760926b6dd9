"""Columns of the table: how a program is trained."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.crossings.feature import BATCH, DATA, RATE, STEPS, WIDTH, Feature, Outcome, built
from helpers.crossings.meshes import Place
from mesh_tensorflow.testing import harness

__all__ = ["FRONT_ENDS"]

SEED = 7


def _batches() -> list[np.ndarray]:
    return np.split(DATA, STEPS)


def session(feature: Feature, place: Place) -> Outcome:
    """A session of TensorFlow 1, as the classic's programs."""
    with tf.Graph().as_default(), place.around():
        tf.set_random_seed(SEED)
        step = tf.train.get_or_create_global_step()
        data = tf.placeholder(tf.float32, [BATCH.size, WIDTH.size])
        lowerings = []

        def program(data: tf.Tensor) -> dict:
            results, lowering = built(
                feature, lambda: place.impl(feature.layout, **feature.stored()), data, step
            )
            lowerings.append(lowering)
            return results

        results = place.run(program, [data])
        with tf.control_dependencies([results["done"]]):
            counted = step.assign_add(1)
        lowering = lowerings[-1]
        fetches = [results["loss"], results["done"], counted]
        to_slices, to_masters = lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()
        with harness.session() as sess:
            sess.run(tf.global_variables_initializer())
            sess.run(to_slices)
            losses = [float(sess.run(fetches, {data: x})[0]) for x in _batches()]
            sess.run(to_masters)
            values = sess.run({v.op.name: v for v in tf.global_variables() if v is not step})
    return Outcome(losses, values)


def function(feature: Feature, place: Place) -> Outcome:
    """An @mtf.function."""
    tf.random.set_random_seed(SEED)
    counted = tf.Variable(0, dtype=tf.int64, name="global_step")

    @mtf.function
    def step(data):
        results, _ = built(
            feature, lambda: place.impl(feature.layout, **feature.stored()), data, counted
        )
        with tf.control_dependencies([results["done"]]):
            counted.assign_add(1)
            return tf.identity(results["loss"])

    losses = [float(step(tf.constant(x))) for x in _batches()]
    return Outcome(losses, {name: step.store.value(name).numpy() for name in step.store.names})


def fit(feature: Feature, place: Place) -> Outcome:
    """mtf.train.fit with a model function."""
    options = {"learning_rate": RATE, **feature.options}
    result = mtf.train.fit(
        feature.loss,
        DATA,
        STEPS,
        dims=[BATCH, WIDTH],
        optimizer=feature.optimizer,
        mesh_shape=place.mesh_shape or "all:1",
        layout=feature.layout if place.mesh_shape else "",
        mesh_impl=place.kind,
        seed=SEED,
        log_every=1,
        progress=False,
        **options,
    )
    values = {n: v for n, v in result.variables.items() if n != "global_step"}
    return Outcome(list(result.losses), values)


FRONT_ENDS: dict[str, Callable[[Feature, Place], Outcome]] = {
    "session": session,
    "function": function,
    "fit": fit,
}

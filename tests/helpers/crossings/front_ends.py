"""Columns of the table: how a program is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Optional

import gin
import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.crossings.feature import BATCH, DATA, RATE, STEPS, WIDTH, Feature, Outcome, built
from helpers.estimator.estimator_models import Losses, events
from helpers.oracle import utils_runs
from mesh_tensorflow import estimator
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import Placing
from mesh_tensorflow.transformer import dataset, transformer, utils

__all__ = ["FRONT_ENDS"]

SEED = 7
SUMMARIES = mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY


def _batches(first: int, steps: int) -> list[np.ndarray]:
    return np.split(DATA, STEPS)[first:steps]


def _last(directory: str) -> Optional[str]:
    return tf.train.latest_checkpoint(directory)


def session(feature: Feature, placing: Placing, directory: str, steps: int) -> Outcome:
    """A session of TensorFlow 1, as in the classic's programs."""
    placing, recorded = feature.placed(placing), {}
    with tf.Graph().as_default(), placing.around():
        tf.set_random_seed(SEED)
        counted = tf.train.get_or_create_global_step()
        data = tf.placeholder(tf.float32, [BATCH.size, WIDTH.size])
        lowerings = []

        def program(data: tf.Tensor) -> dict:
            results, lowering = built(feature, placing, data, counted)
            lowerings.append(lowering)
            return {**results, **dict(tf.get_collection_ref(SUMMARIES))}

        results = placing.run(program, [data])
        with tf.control_dependencies([results["done"]]):
            results["step"] = counted.assign_add(1)
        to_slices = lowerings[-1].copy_masters_to_slices()
        to_masters = lowerings[-1].copy_slices_to_masters()
        saver, path = mtf.checkpoint.Saver(), _last(directory)
        with harness.session() as sess:
            sess.run(tf.global_variables_initializer())
            if path is not None:
                saver.restore(sess, path)
            sess.run(to_slices)
            losses = []
            for x in _batches(sess.run(counted), steps):
                recorded = sess.run(results, {data: x})
                losses.append(float(recorded["loss"]))
            sess.run(to_masters)
            saver.save(sess, f"{directory}/model", global_step=counted)
            values = sess.run({v.op.name: v for v in tf.global_variables() if v is not counted})
    summaries = {n: float(v) for n, v in recorded.items() if n not in ("loss", "done", "step")}
    return Outcome(losses, values, summaries=summaries)


@contextlib.contextmanager
def _counting() -> Iterator[tf.Variable]:
    """Context with a global step of its own."""
    tf2.random.set_seed(SEED)
    counted = tf.train.get_or_create_global_step()
    counted.assign(0)
    try:
        yield counted
    finally:
        counted.assign(0)


def eager(feature: Feature, placing: Placing, directory: str, steps: int) -> Outcome:
    """Eager code that builds and lowers each step."""
    placing, store, losses = feature.placed(placing), mtf.VariableStore(), []
    path, collected = _last(directory), tf.get_collection_ref(SUMMARIES)
    del collected[:]

    def step(data: tf.Tensor) -> float:
        with store.scope():
            results, _ = placing.run(lambda x: built(feature, placing, x, counted), [data])
            return float(results["loss"])

    with _counting() as counted, placing.around():
        store.track(counted)
        if path is not None:
            step(tf.constant(DATA[: BATCH.size]))  # makes the variables
            mtf.checkpoint.Saver(store.masters).restore(None, path)
        for x in _batches(int(counted), steps):
            losses.append(step(tf.constant(x)))
            counted.assign_add(1)
        mtf.checkpoint.Saver(store.masters).save(None, f"{directory}/model", global_step=steps)
    values = {name: store.value(name).numpy() for name in store.names}
    return Outcome(losses, values, summaries={name: float(x) for name, x in collected})


def _step_of(feature: Feature, placing: Placing, counted: tf.Variable) -> Callable:
    """Returns a step of a program, as a function of a batch."""

    def step(data: tf.Tensor) -> tf.Tensor:
        results, _ = placing.run(lambda x: built(feature, placing, x, counted), [data])
        with tf.control_dependencies([results["done"]]):
            counted.assign_add(1)
            return tf.identity(results["loss"])

    return step


def function(feature: Feature, placing: Placing, directory: str, steps: int) -> Outcome:
    """An @mtf.function."""
    placing, path = feature.placed(placing), _last(directory)
    with _counting() as counted, placing.around():
        step = mtf.function(_step_of(feature, placing, counted))
        step.store.track(counted)
        losses = []
        if path is not None:
            step.tf_function.get_concrete_function(tf.constant(DATA[: BATCH.size]))
            mtf.checkpoint.Saver(step.store.masters).restore(None, path)
        for x in _batches(int(counted), steps):
            losses.append(float(step(tf.constant(x))))
        mtf.checkpoint.Saver(step.store.masters).save(None, f"{directory}/model", global_step=steps)
    return Outcome(losses, {name: step.store.value(name).numpy() for name in step.store.names})


def pjrt_function(feature: Feature, placing: Placing, directory: str, steps: int) -> Outcome:
    """An @mtf.pjrt.function; unsplit, it is that of one device."""
    placing = feature.placed(placing)
    with _counting() as counted:

        def program(data: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
            results, _ = built(feature, placing, data, done)
            with tf.control_dependencies([results["done"]]):
                return tf.identity(results["loss"])

        step = mtf.pjrt.function(
            program,
            mesh_shape=placing.mesh or "all:1",
            layout=placing.layout,
            zero=placing.zero,
            zero_axis=placing.zero_axis,
        )
        given = placing
        placing = _OfPjrt(given)
        path, losses = _last(directory), []
        if path is not None:
            step.make_variables(DATA[: BATCH.size], np.int64(0))
            mtf.pjrt.restore(step.store, path)
            counted.assign(1)
        for i, x in enumerate(_batches(int(counted), steps), int(counted)):
            losses.append(float(step(x, np.int64(i))))
        mtf.pjrt.save(step.store, f"{directory}/model", steps)
    return Outcome(losses, {name: step.store.value(name).numpy() for name in step.store.names})


class _OfPjrt:
    """The mesh implementation that mtf.pjrt.function has made."""

    def __init__(self, placing: Placing):
        self.placing = placing

    def impl(self) -> mtf.MeshImpl:
        return mtf.pjrt.mesh_impl()


def _fit(directory: str, **arguments: Any) -> Outcome:
    result = mtf.train.fit(
        data=DATA,
        dims=[BATCH, WIDTH],
        seed=SEED,
        log_every=1,
        progress=False,
        directory=directory,
        **arguments,
    )
    values = {n: v for n, v in result.variables.items() if n != "global_step"}
    last = {n: v for n, v in result.history[-1].items() if isinstance(v, float)}
    return Outcome(list(result.losses), values, summaries=last)


def fit(feature: Feature, placing: Placing, directory: str, steps: int) -> Outcome:
    """mtf.train.fit with a model function."""
    options = {"learning_rate": RATE, **feature.options}
    placing = feature.placed(placing)
    if placing.simd or placing.pjrt or placing == harness.WHOLE:
        kind = "simd" if placing.simd else "pjrt" if placing.pjrt else "placement"
        place = {
            "mesh_shape": placing.mesh or "all:1",
            "layout": placing.layout,
            "mesh_impl": kind,
        }
    else:
        place = {"mesh_impl": placing.impl()}
        options = {n: v for n, v in options.items() if n not in ("zero", "zero_axis")}
    with placing.around():
        return _fit(
            directory,
            model_fn=lambda mesh, x: feature.model(mesh, x)[0],
            steps=steps,
            optimizer=feature.optimizer,
            **options,
            **place,
        )


def fit_step(feature: Feature, placing: Placing, directory: str, steps: int) -> Outcome:
    """mtf.train.fit with a step function."""
    placing = feature.placed(placing)
    with placing.around():
        counted = tf.train.get_or_create_global_step()

        @mtf.function
        def step(data: tf.Tensor) -> tf.Tensor:
            results, _ = placing.run(lambda x: built(feature, placing, x, counted), [data])
            with tf.control_dependencies([results["done"]]):
                return tf.identity(results["loss"])

        return _fit(directory, model_fn=step, steps=steps)


def _settings() -> dict[str, Any]:
    """Returns arguments of a RunConfig."""
    return {
        "tf_random_seed": SEED,
        "save_checkpoints_steps": 1,
        "save_summary_steps": 1,
        "log_step_count_steps": None,
        "session_config": tf.ConfigProto(device_count={"CPU": harness.CPUS}),
    }


def _trained(made: estimator.Estimator, placing: Placing, directory: str, steps: int) -> Outcome:
    """Returns what an estimator trains until a step."""

    def input_fn():
        first = 0 if _last(directory) is None else 1
        rows = DATA[first * BATCH.size :]
        return tf.data.Dataset.from_tensor_slices(rows).batch(BATCH.size, drop_remainder=True)

    losses = Losses()
    with placing.around():
        made.train(input_fn, hooks=[losses], max_steps=steps)
    names = [n for n in made.get_variable_names() if n != "global_step"]
    values = {name: made.get_variable_value(name) for name in names}
    return Outcome(
        losses.losses, values, summaries={tag: value for _, tag, value in events(directory)}
    )


def in_estimator(feature: Feature, placing: Placing, directory: str, steps: int) -> Outcome:
    """An estimator."""
    placing = feature.placed(placing)

    def model_fn(features, labels, mode):
        del labels
        counted, lowerings = tf.train.get_global_step(), []

        def program(data: tf.Tensor) -> dict:
            results, lowering = built(feature, placing, data, counted)
            lowerings.append(lowering)
            return {**results, **dict(tf.get_collection_ref(SUMMARIES))}

        results = placing.run(program, [features])
        for name in results.keys() - {"loss", "done"}:
            tf.summary.scalar(name, results[name])
        with tf.control_dependencies([results["done"]]):
            train_op = tf.assign_add(counted, 1)
        return estimator.EstimatorSpec(
            mode,
            loss=results["loss"],
            train_op=train_op,
            training_hooks=[mtf.MtfRestoreHook(lowerings[-1])],
            scaffold=tf.train.Scaffold(saver=mtf.checkpoint.Saver()),
        )

    config = estimator.RunConfig(**_settings())
    return _trained(estimator.Estimator(model_fn, directory, config), placing, directory, steps)


def tpu_estimator(feature: Feature, placing: Placing, directory: str, steps: int) -> Outcome:
    """A TPUEstimator, whose model function is the program of all processors."""
    placing = feature.placed(placing)

    def model_fn(features, labels, mode, params):
        del labels, params
        counted = tf.train.get_global_step()
        results, lowering = built(feature, placing, features, counted)
        with tf.control_dependencies([results["done"]]):
            train_op = tf.assign_add(counted, 1)
        with mtf.utils.outside_all_rewrites():
            restore = mtf.MtfRestoreHook(lowering)
        return estimator.tpu.TPUEstimatorSpec(
            mode,
            loss=results["loss"],
            train_op=train_op,
            host_call=mtf.utils.create_host_call(directory),
            scaffold_fn=lambda: tf.train.Scaffold(saver=mtf.checkpoint.Saver()),
            training_hooks=[restore],
        )

    of_mesh = {"num_shards": len(placing.cpus)} if placing.simd else {}
    kind = estimator.tpu.TPUConfig(mesh_impl="pjrt" if placing.pjrt else "simd", **of_mesh)
    config = estimator.tpu.RunConfig(tpu_config=kind, **_settings())
    one_program = placing.simd or placing.pjrt
    made = estimator.tpu.TPUEstimator(model_fn, directory, config, use_tpu=one_program)
    return _trained(made, placing, directory, steps)


class UserLayer(transformer.TransformerLayer):
    """A layer of a user that applies what a feature does between layers."""

    feature: Optional[Feature] = None

    def call(self, context, x, losses=None):
        assert UserLayer.feature is not None
        found = UserLayer.feature.between(x)
        return found[0] if isinstance(found, tuple) else found


gin.external_configurable(UserLayer, module="crossings")
_USER = (
    "make_layer_stack.layers = [@transformer_layers.SelfAttention, @crossings.UserLayer, "
    "@transformer_layers.DenseReluDense]\n"
)


def utils_run(feature: Feature, placing: Placing, directory: str, steps: int) -> Outcome:
    """mesh_tensorflow.transformer.utils.run, which trains a language model."""
    utils_runs.register(dataset)
    if not tf.flags.FLAGS.is_parsed():
        tf.flags.FLAGS(["test"])
    kind = "simd" if placing.simd else "pjrt" if placing.pjrt else "placement"
    further = _USER if feature.gin is None else feature.gin
    further += f"run.train_steps = {steps}\nrun.save_checkpoints_steps = 1\n"
    further += "tpu_estimator_model_fn.tpu_summaries = True\n"
    if feature.optimizer is mtf.optimize.SgdOptimizer:
        # Adafactor makes a whole step of a gradient that is zero but for rounding, such as that of
        # a scale before batch_norm.
        further += "run.optimizer = @optimize.SgdOptimizer\n"
        further += f"constant_learning_rate.learning_rate = {RATE}\n"
    if placing.mesh:
        further += f'run.mesh_shape = "{placing.mesh}"\nrun.mesh_impl = "{kind}"\n'
        further += f'run.layout_rules = "{feature.gin_layout}"\n'
        if kind == "placement":
            further += f"run.mesh_devices = {placing.devices}\n"
    UserLayer.feature = feature
    try:
        with placing.around():
            utils_runs.call(utils.run, directory, "lm", "train", further)
    finally:
        UserLayer.feature = None
        gin.clear_config()
    reader = tf.train.load_checkpoint(directory)
    values = {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}
    values.pop("global_step")
    summaries = utils_runs.summaries(directory)
    return Outcome([summaries["loss"]], values, summaries=summaries)


FRONT_ENDS: dict[str, Callable[[Feature, Placing, str, int], Outcome]] = {
    "session": session,
    "eager": eager,
    "mtf.function": function,
    "fit": fit,
    "fit of a step": fit_step,
    "estimator": in_estimator,
    "utils.run": utils_run,
    "pjrt.function": pjrt_function,
    "TPUEstimator": tpu_estimator,
}

"""Columns of the table: how a program is trained."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

import gin
import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.crossings.feature import (
    BATCH,
    DATA,
    EVALUATED,
    RATE,
    STEPS,
    WIDTH,
    Feature,
    Outcome,
    built,
    computed,
    pieces,
)
from helpers.estimator.estimator_models import Losses, events
from helpers.oracle import utils_runs
from mesh_tensorflow import estimator, launch
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


def _evaluate(outcome: Outcome, compute: Callable[[np.ndarray], Any]) -> None:
    """Sets what a user's own program finds of EVALUATED, by a function of a batch."""
    found = np.concatenate([np.asarray(compute(x)) for x in pieces()])[: len(EVALUATED)]
    outcome.predictions = found
    outcome.evaluation = float(np.mean(np.square(found - EVALUATED)))


def _evaluate_in_session(
    outcome: Outcome, feature: Feature, placing: Placing, directory: str
) -> None:
    """Evaluates the last checkpoint, in a graph of its own."""
    with tf.Graph().as_default(), placing.around():
        data, lowerings = tf.placeholder(tf.float32, [BATCH.size, WIDTH.size]), []

        def program(data: tf.Tensor) -> tf.Tensor:
            y, lowering = computed(feature, placing, data)
            lowerings.append(lowering)
            return y

        y = placing.run(program, [data])
        end = "/ExponentialMovingAverage" if "average" in feature.options else ""
        saver = mtf.checkpoint.Saver({v.op.name + end: v for v in tf.global_variables()})
        with harness.session() as sess:
            saver.restore(sess, _last(directory))
            sess.run(lowerings[-1].copy_masters_to_slices())
            _evaluate(outcome, lambda x: sess.run(y, {data: x}))


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
    outcome = Outcome(losses, values, summaries=summaries)
    if feature.evaluates:
        _evaluate_in_session(outcome, feature, placing, directory)
    return outcome


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


def function(
    feature: Feature, placing: Placing, directory: str, steps: int, **options: bool
) -> Outcome:
    """An @mtf.function, with arguments of tf.function."""
    placing, path = feature.placed(placing), _last(directory)
    with _counting() as counted, placing.around():
        step = mtf.function(_step_of(feature, placing, counted), **options)
        step.store.track(counted)
        losses = []
        if path is not None:
            step.tf_function.get_concrete_function(tf.constant(DATA[: BATCH.size]))
            mtf.checkpoint.Saver(step.store.masters).restore(None, path)
        evaluated = mtf.function(
            lambda x: placing.run(lambda x: computed(feature, placing, x)[0], [x]),
            store=step.store,
            **options,
        )
        outcome = Outcome(losses, {})
        for x in _batches(int(counted), steps):
            losses.append(float(step(tf.constant(x))))
            if feature.evaluates == "between" or (feature.evaluates and len(losses) == steps):
                _evaluate(outcome, lambda x: evaluated(tf.constant(x)))
        mtf.checkpoint.Saver(step.store.masters).save(None, f"{directory}/model", global_step=steps)
    outcome.variables = {name: step.store.value(name).numpy() for name in step.store.names}
    return outcome


def pjrt_function(feature: Feature, placing: Placing, directory: str, steps: int) -> Outcome:
    """An @mtf.pjrt.function; unsplit, it is that of one device."""
    placing = feature.placed(placing)
    with _counting() as counted:

        def program(data: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
            results, _ = built(feature, placing, data, done)
            with tf.control_dependencies([results["done"]]):
                return tf.identity(results["loss"])

        place = {
            "mesh_shape": placing.mesh or "all:1",
            "layout": placing.layout,
            "zero": placing.zero,
            "zero_axis": placing.zero_axis,
        }
        step = mtf.pjrt.function(program, **place)
        given = placing
        placing = _OfPjrt(given)
        path, losses = _last(directory), []
        outcome = Outcome(losses, {})
        evaluated = mtf.pjrt.function(
            lambda x: computed(feature, placing, x)[0], store=step.store, **place
        )
        if path is not None:
            step.make_variables(DATA[: BATCH.size], np.int64(0))
            mtf.pjrt.restore(step.store, path)
            counted.assign(1)
        for i, x in enumerate(_batches(int(counted), steps), int(counted)):
            losses.append(float(step(x, np.int64(i))))
            if feature.evaluates == "between" or (feature.evaluates and i + 1 == steps):
                _evaluate(outcome, evaluated)
        mtf.pjrt.save(step.store, f"{directory}/model", steps)
    outcome.variables = {name: step.store.value(name).numpy() for name in step.store.names}
    return outcome


class _OfPjrt:
    """The mesh implementation that mtf.pjrt.function has made."""

    def __init__(self, placing: Placing):
        self.placing = placing

    def impl(self) -> mtf.MeshImpl:
        return mtf.pjrt.mesh_impl()


@dataclasses.dataclass
class _OutcomeOfFit(Outcome):
    best: Optional[str] = None
    evaluations: list[dict[str, float]] = dataclasses.field(default_factory=list)


def _fit(directory: str, **arguments: Any) -> _OutcomeOfFit:
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
    outcome = _OutcomeOfFit(list(result.losses), values, summaries=last)
    outcome.best, outcome.evaluations = result.best, list(result.evaluations)
    return outcome


def fit(
    feature: Feature, placing: Placing, directory: str, steps: int, jit_compile: bool = False
) -> Outcome:
    """mtf.train.fit with a model function."""
    options = {"learning_rate": RATE, **feature.options}
    placing = feature.placed(placing)
    if placing.simd or placing.pjrt or placing == harness.WHOLE or feature.evaluates:
        kind = "simd" if placing.simd else "pjrt" if placing.pjrt else "placement"
        place = {
            "mesh_shape": placing.mesh or "all:1",
            "layout": placing.layout,
            "mesh_impl": kind,
        }
        if kind == "placement" and placing.mesh:
            place["devices"] = placing.devices
    else:
        place = {"mesh_impl": placing.impl()}
        options = {n: v for n, v in options.items() if n not in ("zero", "zero_axis")}
    if feature.evaluates:
        place.update(eval_data=EVALUATED, keep_best="loss")
        place.update({"eval_every": 1} if feature.evaluates == "between" else {})
    with placing.around():
        outcome = _fit(
            directory,
            model_fn=lambda mesh, x: feature.model(mesh, x)[0],
            steps=steps,
            optimizer=feature.optimizer,
            jit_compile=jit_compile,
            **options,
            **place,
        )
        if feature.evaluates:
            outcome.evaluation = outcome.evaluations[-1]["loss"]
            if launch.processes().count == 1:  # evaluate and predict refuse several
                _check_use(outcome, feature, directory, {**options, **place})
    return outcome


def _check_use(outcome: _OutcomeOfFit, feature: Feature, directory: str, options: dict) -> None:
    """Predicts by the last checkpoint, and evaluates it again, and the best one."""
    of_run = ("average", "precision", "mesh_shape", "layout", "mesh_impl", "devices")
    given = {n: v for n, v in options.items() if n in (*of_run, "zero", "zero_axis")}
    given.update(data=EVALUATED, dims=[BATCH, WIDTH], seed=SEED)
    best, evaluations = outcome.best, outcome.evaluations
    outcome.predictions = mtf.train.predict(
        lambda mesh, x: feature.outputs(mesh, x)[0], directory=directory, **given
    )
    least = min(evaluations, key=lambda e: e["loss"])
    for path, known in ((directory, evaluations[-1]), (best, least)):
        found = mtf.train.evaluate(
            lambda mesh, x: feature.model(mesh, x)[0], directory=path, **given
        )
        np.testing.assert_allclose(found["loss"], known["loss"], 1e-5)


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

        @functools.partial(mtf.function, store=step.store)
        def mean_loss(x: tf.Tensor) -> tf.Tensor:
            # A step function is given batches of any size: a user's program fills them up.
            rows = tf.shape(x)[0]
            x = tf.pad(x, [[0, BATCH.size - rows], [0, 0]])
            x = tf.ensure_shape(x, [BATCH.size, WIDTH.size])
            y = placing.run(lambda x: computed(feature, placing, x)[0], [x])
            return tf.reduce_mean(tf.square(y - x)[:rows])

        evaluating: dict[str, Any] = {}
        if feature.evaluates:
            evaluating = {"eval_data": EVALUATED, "eval_fn": mean_loss}
            evaluating.update({"eval_every": 1} if feature.evaluates == "between" else {})
        outcome = _fit(directory, model_fn=step, steps=steps, **evaluating)
        if feature.evaluates:
            outcome.evaluation = outcome.evaluations[-1]["loss"]
        return outcome


def _settings() -> dict[str, Any]:
    """Returns arguments of a RunConfig."""
    return {
        "tf_random_seed": SEED,
        "save_checkpoints_steps": 1,
        "save_summary_steps": 1,
        "log_step_count_steps": None,
        "session_config": tf.ConfigProto(device_count={"CPU": harness.CPUS}),
    }


def _labelled() -> tf.data.Dataset:
    """Returns batches of EVALUATED, with the weight of each row, 0 for those that fill up."""
    weights = np.arange(pieces().size // WIDTH.size) < len(EVALUATED)
    weights = np.float32(weights).reshape(-1, BATCH.size)
    return tf.data.Dataset.from_tensor_slices((pieces(), weights))


def _trained(
    made: estimator.Estimator, feature: Feature, placing: Placing, directory: str, steps: int
) -> Outcome:
    """Returns what an estimator trains until a step, and what it says of EVALUATED then."""

    def from_step():
        path = _last(directory)
        first = 0 if path is None else int(path.rpartition("-")[2])
        rows = DATA[first * BATCH.size :]
        return tf.data.Dataset.from_tensor_slices(rows).batch(BATCH.size, drop_remainder=True)

    losses = Losses()
    with placing.around():
        stops = range(1, steps) if feature.evaluates == "between" else []
        for step in stops:
            made.train(from_step, hooks=[losses], max_steps=step)
            made.evaluate(_labelled)
        made.train(from_step, hooks=[losses], max_steps=steps)
        found: dict[str, Any] = {}
        if feature.evaluates:
            found["evaluation"] = float(made.evaluate(_labelled)["mean_loss"])
            predicted = [row["y"] for row in made.predict(_labelled)]
            found["predictions"] = np.stack(predicted)[: len(EVALUATED)]
    names = [n for n in made.get_variable_names() if n != "global_step"]
    values = {name: made.get_variable_value(name) for name in names}
    return Outcome(
        losses.losses,
        values,
        summaries={tag: value for _, tag, value in events(directory)},
        **found,
    )


def _evaluating(
    feature: Feature, placing: Placing, features: tf.Tensor, weights: tf.Tensor, mode: str
) -> dict[str, Any]:
    """Returns arguments of the spec of an evaluation or a prediction."""
    lowerings = []

    def program(data: tf.Tensor) -> tf.Tensor:
        y, lowering = computed(feature, placing, data)
        lowerings.append(lowering)
        return y

    y = placing.run(program, [features])
    hook = mtf.MtfRestoreHook(lowerings[-1])
    if mode == estimator.ModeKeys.PREDICT:
        return {"mode": mode, "predictions": {"y": y}, "prediction_hooks": [hook]}
    errors = tf.reduce_mean(tf.square(y - features), axis=-1)
    metrics = {"mean_loss": tf.metrics.mean(errors, weights)}
    loss = tf.reduce_mean(errors)
    return {"mode": mode, "loss": loss, "eval_metric_ops": metrics, "evaluation_hooks": [hook]}


def in_estimator(feature: Feature, placing: Placing, directory: str, steps: int) -> Outcome:
    """An estimator."""
    placing = feature.placed(placing)

    def model_fn(features, labels, mode):
        if mode != estimator.ModeKeys.TRAIN:
            return estimator.EstimatorSpec(**_evaluating(feature, placing, features, labels, mode))
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
    made = estimator.Estimator(model_fn, directory, config)
    return _trained(made, feature, placing, directory, steps)


def _evaluating_of_tpu(
    feature: Feature, placing: Placing, features: tf.Tensor, weights: tf.Tensor, mode: str
) -> estimator.tpu.TPUEstimatorSpec:
    """Returns the spec of an evaluation or a prediction, whose metrics the host computes."""
    y, lowering = computed(feature, placing, features)
    with mtf.utils.outside_all_rewrites():
        hooks = [mtf.MtfRestoreHook(lowering)]
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.tpu.TPUEstimatorSpec(mode, predictions={"y": y}, prediction_hooks=hooks)
    errors = tf.reduce_mean(tf.square(y - features), axis=-1)

    def metrics(errors: tf.Tensor, weights: tf.Tensor) -> dict[str, Any]:
        return {"mean_loss": tf.metrics.mean(errors, weights)}

    return estimator.tpu.TPUEstimatorSpec(
        mode,
        loss=tf.reduce_mean(errors),
        eval_metrics=(metrics, [errors, weights]),
        evaluation_hooks=hooks,
    )


def tpu_estimator(feature: Feature, placing: Placing, directory: str, steps: int) -> Outcome:
    """A TPUEstimator, whose model function is the program of all processors."""
    placing = feature.placed(placing)

    def model_fn(features, labels, mode, params):
        del params
        if mode != estimator.ModeKeys.TRAIN:
            return _evaluating_of_tpu(feature, placing, features, labels, mode)
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
    return _trained(made, feature, placing, directory, steps)


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


def _gin_of(options: Mapping[str, Any]) -> str:
    """Returns what gin binds for options of `fit` that transformer.utils.run has, too."""
    bound = ""
    if "zero" in options:
        bound += f"stored_layout.zero = {options['zero']}\n"
        bound += f'stored_layout.zero_axis = "{options["zero_axis"]}"\n'
    if "microbatches" in options:
        bound += utils_runs.MICROBATCHES
    if "precision" in options:
        bound += 'get_variable_dtype.activation_dtype = "bfloat16"\n'
    return bound


def utils_run(feature: Feature, placing: Placing, directory: str, steps: int) -> Outcome:
    """mesh_tensorflow.transformer.utils.run, which trains a language model."""
    utils_runs.register(dataset)
    if not tf.flags.FLAGS.is_parsed():
        tf.flags.FLAGS(["test"])
    kind = "simd" if placing.simd else "pjrt" if placing.pjrt else "placement"
    further = _USER if feature.gin is None else feature.gin
    further += _gin_of(feature.options)
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
            if feature.evaluates:
                utils_runs.call(utils.run, directory, "lm", "perplexity_eval", further)
    finally:
        UserLayer.feature = None
        gin.clear_config()
    reader = tf.train.load_checkpoint(directory)
    values = {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}
    values.pop("global_step")
    summaries = utils_runs.summaries(directory)
    outcome = Outcome([summaries["loss"]], values, summaries=summaries)
    if feature.evaluates:
        [folder] = tf.gfile.Glob(f"{directory}/eval_*")
        outcome.evaluation = utils_runs.summaries(folder)["loss"]
    return outcome


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
    "compiled mtf.function": functools.partial(function, jit_compile=True),
    "compiled fit": functools.partial(fit, jit_compile=True),
}

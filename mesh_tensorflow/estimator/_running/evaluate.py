"""Evaluations and predictions of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._progress import duration
from mesh_tensorflow._watching import told_to_user
from mesh_tensorflow.estimator._modes import ModeKeys
from mesh_tensorflow.estimator._running.checkpoints import find_checkpoint
from mesh_tensorflow.estimator._running.hooks import StopAfterBatches, SummaryWritersHook
from mesh_tensorflow.estimator._running.model import Model, make_global_step, session_creator

if TYPE_CHECKING:
    from mesh_tensorflow.estimator._spec import EstimatorSpec


LOSS = "loss"


def run_evaluation(
    model: Model,
    input_fn: Callable[..., Any],
    steps: Optional[int],
    hooks: Sequence[tf.train.SessionRunHook],
    checkpoint_path: Optional[str],
    directory: str,
) -> dict[str, Any]:
    """Evaluates a model, and writes the metrics as summaries.

    Args:
      model: the model.
      input_fn: returns features and labels.
      steps: the number of batches, or None for all.
      hooks: hooks.
      checkpoint_path: a checkpoint, or None for the latest one.
      directory: the directory of the summaries.

    Returns:
      metrics by name, with "loss" and "global_step".

    Raises:
      ValueError: there is no checkpoint or no data, or a metric has a reserved name.
    """
    find_checkpoint(model.model_dir, checkpoint_path, "evaluate")  # before a model is built
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(model.config.effective_seed)
        global_step = make_global_step(graph)
        inputs = model.inputs(input_fn, ModeKeys.EVAL)
        if steps is None and not inputs.may_end:
            tf.logging.warning(
                "evaluate: input_fn returns tensors that never end, and steps is None: give steps="
            )
        spec = model.spec(inputs, ModeKeys.EVAL)
        values, update = _metrics(spec, global_step)
        creator = session_creator(model, spec, checkpoint_path, "evaluate")
        counter = StopAfterBatches(steps, bool(model.config.log_step_count_steps))
        final = tf.train.FinalOpsHook(values)
        all_hooks = [
            # First, so that the hooks after it may read the first element of the data.
            *inputs.hooks,
            *hooks,
            *spec.evaluation_hooks,
            SummaryWritersHook(),
            counter,
            final,
        ]
        started = time.monotonic()
        session = tf.train.MonitoredSession(session_creator=creator, hooks=all_hooks)
        with told_to_user(), session:
            try:
                while not session.should_stop():
                    session.run(update)
            finally:
                counter.close()
        if not counter.done:
            raise ValueError("evaluate: input_fn gave no batch, so there are no metrics")
        seconds = duration(time.monotonic() - started)
        tf.logging.info("Evaluated %d batches in %s", counter.done, seconds)
        results = final.final_ops_values
        write_results(results, directory, creator.path)
    return results


def _metrics(spec: EstimatorSpec, global_step: tf.Variable) -> tuple[dict[str, Any], tf.Operation]:
    metrics = dict(spec.eval_metric_ops)
    for name in (LOSS, tf.GraphKeys.GLOBAL_STEP):
        if name in metrics:
            raise ValueError(
                f"evaluate: eval_metric_ops has a metric {name!r}, the name of a result that is "
                "always there: call it something else"
            )
    metrics[LOSS] = tf.metrics.mean(spec.loss)
    values = {name: value for name, (value, _) in metrics.items()}
    values[tf.GraphKeys.GLOBAL_STEP] = tf.identity(global_step.read_value())
    return values, tf.group(*(update for _, update in metrics.values()))


def write_results(
    results: Mapping[str, Any], directory: str, checkpoint_path: Optional[str]
) -> None:
    """Writes metrics as summaries for TensorBoard.

    Args:
      results: values by name, with "global_step".
      directory: the directory of the summaries.
      checkpoint_path: the checkpoint that was evaluated.
    """
    step = int(results[tf.GraphKeys.GLOBAL_STEP])
    text = ", ".join(f"{name} = {results[name]}" for name in sorted(results))
    tf.logging.info("Saving dict for global step %d: %s", step, text)
    summary = tf.Summary()
    for name in sorted(results):
        if name != tf.GraphKeys.GLOBAL_STEP:
            _add_value(summary, name, results[name])
    with tf.Graph().as_default():  # eager code has no writers
        writer = tf.summary.FileWriterCache.get(directory)
    writer.add_summary(summary, step)
    if checkpoint_path:
        tensor = tf.make_tensor_proto(checkpoint_path, dtype=tf.string)
        writer.add_summary(
            tf.Summary(
                value=[
                    tf.Summary.Value(
                        tag="checkpoint_path",
                        tensor=tensor,
                        metadata=tf.SummaryMetadata(
                            plugin_data=tf.SummaryMetadata.PluginData(plugin_name="text")
                        ),
                    )
                ]
            ),
            step,
        )
    writer.flush()


def _add_value(summary: tf.Summary, name: str, value: Any) -> None:
    if isinstance(value, bytes):
        # A metric may be a serialized Summary, of an image for example.
        read = tf.Summary.FromString(value)
        for i, part in enumerate(read.value):
            part.tag = f"{name}/{i}"
        summary.value.extend(read.value)
    elif np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number):
        summary.value.add(tag=name, simple_value=float(value))
    elif isinstance(value, np.ndarray):
        summary.value.add(tag=name, tensor=tf.make_tensor_proto(value))
    else:
        tf.logging.warning("No summary of %s, which is of type %s.", name, type(value).__name__)


def run_prediction(
    model: Model,
    input_fn: Callable[..., Any],
    predict_keys: Union[str, Sequence[str], None],
    hooks: Sequence[tf.train.SessionRunHook],
    checkpoint_path: Optional[str],
    yield_single_examples: bool,
) -> Iterator[Any]:
    """Yields predictions until the data ends.

    Args:
      model: the model.
      input_fn: returns features.
      predict_keys: names of predictions, or None for all.
      hooks: hooks.
      checkpoint_path: a checkpoint, or None for the latest one.
      yield_single_examples: whether to split batches into examples.

    Yields:
      a dict of arrays, or an array if the model's prediction is a tensor.

    Raises:
      ValueError: there is no checkpoint, a name is unknown, or batches cannot be split.
    """
    find_checkpoint(model.model_dir, checkpoint_path, "predict")  # before a model is built
    graph = tf.Graph()
    with graph.as_default():
        tf.set_random_seed(model.config.effective_seed)
        make_global_step(graph)
        inputs = model.inputs(input_fn, ModeKeys.PREDICT, features_only=True)
        if not inputs.may_end:
            tf.logging.warning(
                "predict: input_fn returns tensors that never end, so predictions do not either"
            )
        spec = model.spec(inputs, ModeKeys.PREDICT)
        predictions = _chosen(spec.predictions, predict_keys)
        session = tf.train.MonitoredSession(
            session_creator=session_creator(model, spec, checkpoint_path, "predict"),
            hooks=[*inputs.hooks, *hooks, *spec.prediction_hooks],
        )
    with session:
        while not session.should_stop():
            # Not around a yield: the consumer of predictions may create its own graphs.
            with graph.as_default(), told_to_user():
                batch = session.run(predictions)
            if yield_single_examples:
                yield from _examples(batch)
            else:
                yield batch


def _chosen(
    predictions: Union[tf.Tensor, Mapping[str, tf.Tensor]], keys: Union[str, Sequence[str], None]
) -> Any:
    if not keys:
        return predictions
    if not isinstance(predictions, Mapping):
        raise ValueError(
            f"predict: predict_keys is {keys!r}, but the model's prediction is one tensor: leave "
            "predict_keys out"
        )
    keys = [keys] if isinstance(keys, str) else list(keys)
    unknown = [key for key in keys if key not in predictions]
    if unknown:
        raise ValueError(
            f"predict: predict_keys has {', '.join(map(repr, unknown))}, but the model predicts "
            f"{', '.join(map(repr, predictions))}"
        )
    return {key: predictions[key] for key in keys}


def _examples(batch: Union[np.ndarray, Mapping[str, np.ndarray]]) -> Iterator[Any]:
    if not isinstance(batch, Mapping):
        yield from batch
        return
    sizes = {name: len(value) if value.ndim else None for name, value in batch.items()}
    if None in sizes.values() or len(set(sizes.values())) > 1:
        shapes = ", ".join(f"{name}: {list(value.shape)}" for name, value in batch.items())
        raise ValueError(
            f"predict: predictions differ in their first dimension, so they cannot be taken apart "
            f"into examples ({shapes}): pass yield_single_examples=False, or choose some by "
            "predict_keys"
        )
    for i in range(next(iter(sizes.values())) or 0):
        yield {name: value[i] for name, value in batch.items()}

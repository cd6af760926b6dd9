"""Prediction: outputs of each batch or of each example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._watching import told_to_user
from mesh_tensorflow.estimator._modes import ModeKeys
from mesh_tensorflow.estimator._running.checkpoints import find_checkpoint
from mesh_tensorflow.estimator._running.model import Model, make_global_step, session_creator

__all__ = ["run_prediction"]


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
    checkpoint_path = find_checkpoint(model.model_dir, checkpoint_path, "predict")
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

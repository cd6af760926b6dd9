"""Evaluation metrics, kept in local variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

import tensorflow.compat.v1 as tf

__all__ = ["metric_max", "metric_sum", "token_metrics"]

Metric = tuple[Any, tf.Tensor]


def _accumulated(
    values: tf.Tensor,
    name: Optional[str],
    default_name: str,
    kind: str,
    combine: Callable[[Any, tf.Tensor], tf.Tensor],
    start: float,
) -> Metric:
    with tf.variable_scope(name, default_name):
        total = tf.get_variable(
            "accum",
            shape=[],
            dtype=tf.float32,
            trainable=False,
            initializer=tf.constant_initializer(start),
            use_resource=True,
            collections=[tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES],
        )
        values = tf.cast(values, tf.float32)
        reduced = {"sum": tf.reduce_sum, "max": tf.reduce_max}[kind](values)
        update = total.assign(combine(total, reduced), read_value=False)
        with tf.control_dependencies([update]):
            updated = total.read_value()
    return total.read_value(), updated


def metric_sum(values: tf.Tensor, name: Optional[str] = None, **kwargs: object) -> Metric:
    """Sums values over all batches, in the style of `tf.metrics`.

    Args:
      values: a tf Tensor of numbers.
      name: a name for its variable scope.
      **kwargs: ignored.

    Returns:
      (the value, the operation that adds a batch), both float32 scalars.
    """
    del kwargs
    return _accumulated(values, name, "metric_sum", "sum", tf.add, 0.0)


def metric_max(values: tf.Tensor, name: Optional[str] = None, **kwargs: object) -> Metric:
    """Returns the maximum of values over all batches, at least 0, in the style of `tf.metrics`.

    Args:
      values: a tf Tensor of numbers.
      name: a name for its variable scope.
      **kwargs: ignored.

    Returns:
      (the value, the operation that adds a batch), both float32 scalars.
    """
    del kwargs
    return _accumulated(values, name, "metric_max", "max", tf.maximum, 0.0)


def token_metrics(tensors: Mapping[str, tf.Tensor]) -> dict[str, Metric]:
    """Returns metrics of a model's predictions of given targets.

    Args:
      tensors: "targets", "weights" (1 where a target counts), "predicted" and "negative_log_prob",
        all [rows, length].

    Returns:
      A dictionary of metrics.
    """
    weights = tf.cast(tensors["weights"], tf.float32)
    right = tf.cast(tf.equal(tensors["predicted"], tensors["targets"]), tf.float32)
    wrong = tf.reduce_sum((1.0 - right) * weights, axis=-1)
    lengths = tf.reduce_sum(weights, axis=-1)
    there = tf.cast(tf.greater(lengths, 0), tf.float32)
    return {
        "token_accuracy": tf.metrics.mean(right, weights),
        "sequence_accuracy": tf.metrics.mean(tf.cast(tf.equal(wrong, 0), tf.float32), there),
        "mean_label": tf.metrics.mean(tf.cast(tensors["targets"], tf.float32), weights),
        "num_eval_tokens": metric_sum(weights, name="num_eval_tokens"),
        "max_targets_length": metric_max(lengths, name="max_targets_length"),
        "neg_log_perplexity": tf.metrics.mean(-tensors["negative_log_prob"], weights),
    }

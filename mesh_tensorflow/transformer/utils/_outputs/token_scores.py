"""Log likelihoods of targets, for evaluation and scoring."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.transformer import transformer

__all__ = ["evaluated", "negative_log_prob", "target_weights"]


def target_weights(targets: mtf.Tensor, model_type: str) -> mtf.Tensor:
    """Returns 1 at targets to predict, and 0 at padding and given ids.

    Args:
      targets: an integer Tensor [..., length]; negative ids are given.
      model_type: such as "lm"; for "delimited_lm" the inputs are given.

    Returns:
      A float32 Tensor of the same shape.
    """
    weights = mtf.cast(mtf.greater(targets, 0), tf.float32)
    if model_type == "delimited_lm":
        inputs = transformer.delimited_lm_inputs_mask(targets)
        weights *= mtf.cast(mtf.logical_not(inputs), tf.float32)
    return weights


def negative_log_prob(logits: mtf.Tensor, targets: mtf.Tensor) -> mtf.Tensor:
    """Returns the negative log likelihood of each target.

    Args:
      logits: a Tensor [..., length, vocab].
      targets: an integer Tensor [..., length].

    Returns:
      A float32 Tensor [..., length].
    """
    vocab = logits.shape.dims[-1]
    logits = mtf.cast(logits, tf.float32)
    labels = mtf.one_hot(mtf.maximum(targets, 0), vocab, dtype=tf.float32)
    return layers.softmax_cross_entropy_with_logits(logits, labels, vocab)


def evaluated(
    logits: mtf.Tensor, features: Mapping[str, mtf.Tensor], model_type: str
) -> dict[str, mtf.Tensor]:
    """Returns the per-target values that metrics are computed from.

    Args:
      logits: a Tensor [..., length, vocab].
      features: Tensors by name, "targets" [..., length] among them.
      model_type: such as "lm".

    Returns:
      A dictionary of Tensors [..., length].
    """
    targets = features["targets"]
    return {
        "targets": targets,
        "weights": target_weights(targets, model_type),
        "predicted": mtf.argmax(logits, logits.shape.dims[-1]),
        "negative_log_prob": negative_log_prob(logits, targets),
    }

"""Ensembles: reductions of the logits of their members."""

from __future__ import annotations

from collections.abc import Callable

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text, slip

__all__ = [
    "reduce_ensemble_logits",
    "reduce_ensemble_logits_mean_logit",
    "reduce_ensemble_logits_mean_prob",
    "reduce_ensemble_logits_select",
]

# Smaller probabilities are clipped to this one before the logarithm is taken.
_SMALLEST_PROBABILITY = 1e-20


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
def reduce_ensemble_logits_select(
    logits: mtf.Tensor, ensemble_dim: mtf.Dimension, vocab_dim: mtf.Dimension, model_id: int = 0
) -> mtf.Tensor:
    """Returns the logits of one member of an ensemble.

    Args:
      logits: a Tensor with dimensions [ensemble_dim, ..., vocab_dim].
      ensemble_dim: a Dimension.
      vocab_dim: the Dimension of ids, of the size of the vocabulary.
      model_id: an integer, the index of the member. If out of range, it is taken modulo the
        ensemble's size, with a warning.

    Returns:
      A Tensor without `ensemble_dim`.
    """
    del vocab_dim
    if not 0 <= model_id < ensemble_dim.size:
        slip(
            f"reduce_ensemble_logits_select: model_id={model_id} of {dims_text([ensemble_dim])} is "
            f"taken as {model_id % ensemble_dim.size}; it should be between 0 and "
            f"{ensemble_dim.size - 1}",
            key="reduce_ensemble_logits_select",
        )
        model_id %= ensemble_dim.size
    return mtf.gather(logits, mtf.constant(logits.mesh, model_id, dtype=tf.int32), ensemble_dim)


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
def reduce_ensemble_logits_mean_prob(
    logits: mtf.Tensor, ensemble_dim: mtf.Dimension, vocab_dim: mtf.Dimension
) -> mtf.Tensor:
    """Returns the logarithm of the mean of the members' probabilities.

    Args:
      logits: a Tensor with dimensions [ensemble_dim, ..., vocab_dim].
      ensemble_dim: a Dimension.
      vocab_dim: the Dimension of ids, of the size of the vocabulary.

    Returns:
      A Tensor without `ensemble_dim`.
    """
    probs = mtf.softmax(logits, vocab_dim)
    mean = mtf.reduce_mean(probs, reduced_dim=ensemble_dim)
    return mtf.log(mtf.maximum(mean, _SMALLEST_PROBABILITY))


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
def reduce_ensemble_logits_mean_logit(
    logits: mtf.Tensor, ensemble_dim: mtf.Dimension, vocab_dim: mtf.Dimension
) -> mtf.Tensor:
    """Returns the mean of the members' logits.

    Args:
      logits: a Tensor with dimensions [ensemble_dim, ..., vocab_dim].
      ensemble_dim: a Dimension.
      vocab_dim: the Dimension of ids, of the size of the vocabulary.

    Returns:
      A Tensor without `ensemble_dim`.
    """
    del vocab_dim
    return mtf.reduce_mean(logits, reduced_dim=ensemble_dim)


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
def reduce_ensemble_logits(
    logits: mtf.Tensor,
    ensemble_dim: mtf.Dimension,
    vocab_dim: mtf.Dimension,
    reduce_fn: Callable[
        [mtf.Tensor, mtf.Dimension, mtf.Dimension], mtf.Tensor
    ] = reduce_ensemble_logits_mean_prob,
) -> mtf.Tensor:
    """Returns the logits of an ensemble, reduced by a function that gin may set.

    Args:
      logits: a Tensor with dimensions [ensemble_dim, ..., vocab_dim].
      ensemble_dim: a Dimension.
      vocab_dim: the Dimension of ids, of the size of the vocabulary.
      reduce_fn: a function of the three arguments above.

    Returns:
      A Tensor without `ensemble_dim`.
    """
    return reduce_fn(logits, ensemble_dim, vocab_dim)

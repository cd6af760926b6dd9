"""Losses."""

from __future__ import annotations

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text

__all__ = ["softmax_cross_entropy_with_logits"]


def softmax_cross_entropy_with_logits(
    logits: mtf.Tensor, targets: mtf.Tensor, vocab_dim: mtf.Dimension, z_loss: float = 0.0
) -> mtf.Tensor:
    """Returns the cross entropy of targets and the softmax of logits, per example.

    Args:
      logits: a Tensor with dimensions [..., vocab_dim].
      targets: integer ids without `vocab_dim`, or floating probabilities of the shape of
        `logits`.
      vocab_dim: a Dimension.
      z_loss: a factor of log(z) ** 2, z being the softmax's denominator; keeps logits near 0.

    Returns:
      A Tensor without `vocab_dim`.

    Raises:
      ValueError: the dimensions do not fit.
    """
    if vocab_dim not in logits.shape:
        raise ValueError(
            f"softmax_cross_entropy_with_logits: vocab_dim {dims_text([vocab_dim])} must be in "
            f"logits {logits.name} {logits.shape}"
        )
    if targets.dtype.is_integer:
        expected = set(logits.shape) - {vocab_dim}
        if set(targets.shape) != expected:
            raise ValueError(
                f"softmax_cross_entropy_with_logits: integer targets {targets.name} "
                f"{targets.shape} must have the dimensions of logits {logits.shape} without "
                f"{dims_text([vocab_dim])}"
            )
        targets = mtf.one_hot(targets, vocab_dim, dtype=logits.dtype)
    elif set(targets.shape) != set(logits.shape):
        raise ValueError(
            f"softmax_cross_entropy_with_logits: floating targets {targets.name} {targets.shape} "
            f"must have the dimensions of logits {logits.name} {logits.shape}"
        )
    shape = logits.shape - vocab_dim
    if z_loss == 0.0:
        log_probs = mtf.log_softmax(logits, vocab_dim)
        return mtf.negative(mtf.reduce_sum(log_probs * targets, output_shape=shape))
    log_z = mtf.reduce_logsumexp(logits, vocab_dim)
    loss = mtf.negative(mtf.reduce_sum((logits - log_z) * targets, output_shape=shape))
    return loss + z_loss * mtf.square(log_z)

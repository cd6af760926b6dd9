"""The loss of a model's logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.layers._loss import smoothed_cross_entropy
from mesh_tensorflow.transformer.transformer._inputs import check_ids, delimited_lm_inputs_mask

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context
    from mesh_tensorflow.transformer.transformer._models.unitransformer import Unitransformer

__all__ = ["loss_from_logits"]


def loss_from_logits(
    model: Unitransformer,
    context: Context,
    logits: mtf.Tensor,
    targets: mtf.Tensor,
    vocab_dim: mtf.Dimension,
) -> mtf.Tensor:
    """Returns the cross entropy of the targets, divided by the model's loss denominator.

    Targets of 0 or below have no loss. Label smoothing is over the whole vocabulary, including the
    ids that only pad its size. The z loss is added in training only.

    Args:
      model: a Unitransformer; its label_smoothing, z_loss and loss_on_targets_only are used.
      context: a Context.
      logits: a Tensor with dimensions [batch..., length, vocab_dim].
      targets: an integer Tensor with dimensions [batch..., length].
      vocab_dim: a Dimension.

    Returns:
      A scalar Tensor.
    """
    check_ids(f"{model.name}: targets", targets, vocab_dim)
    labels = mtf.maximum(targets, 0)
    z_loss = model.z_loss if context.train else 0.0
    loss = smoothed_cross_entropy(logits, labels, vocab_dim, z_loss, model.label_smoothing)
    weights = mtf.cast(mtf.greater(targets, 0), loss.dtype)
    if model.loss_on_targets_only:
        weights *= mtf.cast(mtf.logical_not(delimited_lm_inputs_mask(targets)), loss.dtype)
    denominator = model.loss_denominator(targets, context.num_microbatches)
    return mtf.reduce_sum(loss * weights) / denominator

"""The loss of a model's logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.layers._loss import smoothed_cross_entropy
from mesh_tensorflow.ops._contractions.reduce_broadcast import divided_sum
from mesh_tensorflow.transformer.transformer._inputs import check_ids, delimited_lm_inputs_mask

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context
    from mesh_tensorflow.transformer.transformer._models.unitransformer import Unitransformer

__all__ = ["divided_loss", "loss_from_logits"]


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
      context: the Context of this call of the model: its mode, positions, states and losses.
      logits: a Tensor with dimensions [batch..., length, vocab_dim].
      targets: an integer Tensor with dimensions [batch..., length].
      vocab_dim: the Dimension of ids, of the size of the vocabulary.

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
    return divided_loss(mtf.reduce_sum(loss * weights), model, targets, context.num_microbatches)


def divided_loss(
    total: mtf.Tensor, model: Any, targets: mtf.Tensor, num_microbatches: int
) -> mtf.Tensor:
    """Returns a sum of losses divided by the denominator of the loss.

    Args:
      total: a Tensor.
      model: a Unitransformer or another model with a `loss_denominator`.
      targets: a Tensor with dimensions [batch..., length].
      num_microbatches: an integer, the number of microbatches.
    """
    number = model.loss_denominator(targets, num_microbatches)
    if not isinstance(number, (int, float)):
        return total / number
    given = getattr(getattr(model, "decoder", model), "_loss_denominator", None)
    return divided_sum(total, number, is_mean=given is None)

"""A call of a model: from ids to logits and losses.

Calls for all positions at once, sampling and beam search share it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.layers._loss import smoothed_cross_entropy
from mesh_tensorflow.ops._contractions.reduce_broadcast import divided_sum
from mesh_tensorflow.transformer.transformer._context import Context
from mesh_tensorflow.transformer.transformer._inputs import (
    check_ids,
    delimited_lm_inputs_mask,
    embedding_of_positions,
    get_vocab_embedding_cls,
    positional_embedding_weights,
)
from mesh_tensorflow.transformer.transformer._models.ensemble import reduce_ensemble_logits

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._inputs import VocabEmbedding
    from mesh_tensorflow.transformer.transformer._models.unitransformer import Unitransformer


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
    # Targets below 0 are read but not predicted: their label may be any id, as its weight is 0.
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
    # A denominator that was given is the same for every batch, so that this is no mean.
    return divided_sum(total, number, is_mean=given is None)


def call_model(
    model: Unitransformer,
    context: Context,
    inputs: mtf.Tensor,
    targets: Optional[mtf.Tensor] = None,
) -> mtf.Tensor:
    """Embeds the ids, calls the layer stack and computes the logits, in the model's scope.

    Args:
      model: a Unitransformer.
      context: a Context. If it has a list of losses, the loss of the targets is appended to it.
      inputs: an integer Tensor of ids with dimensions [batch..., length], or [batch...] in mode
        "incremental".
      targets: a Tensor of the same shape, or None.

    Returns:
      The logits, reduced over the ensemble: a Tensor with the dimensions of `inputs` and the
      vocabulary, or `d_model` instead if the model has no output vocabulary.

    Raises:
      ValueError: the ids are not integers, or exceed the vocabulary.
    """
    check_ids(f"{model.name}: inputs", inputs, model.input_vocab_dim)
    with tf.variable_scope(model.name):
        embedding = _embedding(model, context, inputs.mesh)
        # Only for the embedding: masks and targets are made of the ids that were given.
        ids = _with_token_dropout(model, context, _for_ensemble(model, inputs))
        x = embedding.ids_to_embedding(ids, context=context)
        context.input_embeddings = x
        if model.max_length_dim is not None:
            positions = model.max_length_dim
            weights = _position_weights(model, positions, context, ids.mesh)
            x += embedding_of_positions(model, positions, context, weights)
        x = model.layer_stack.call(context, x)
        vocab_dim = model.output_vocab_dim
        if vocab_dim is None:
            return x
        logits = _logits(model, vocab_dim, context, embedding, x)
        if targets is not None and context.losses is not None:
            loss_fn = model._loss_fn or loss_from_logits
            targets = _for_ensemble(model, targets)
            loss = loss_fn(model, context, logits, targets, vocab_dim)
            context.losses.append(loss)
        # After the loss, which is that of each member by itself.
        if model.ensemble_dim is not None:
            logits = reduce_ensemble_logits(logits, model.ensemble_dim, vocab_dim)
        return logits


def _for_ensemble(model: Unitransformer, ids: mtf.Tensor) -> mtf.Tensor:
    """Returns the ids with the ensemble dimension, broadcast over it if they do not have it."""
    if model.ensemble_dim is None or model.ensemble_dim in ids.shape:
        return ids
    return mtf.broadcast(ids, mtf.Shape([model.ensemble_dim, *ids.shape.dims]))


def _embedding(model: Unitransformer, context: Context, mesh: mtf.Mesh) -> VocabEmbedding:
    shared = context.shared_params
    if "embedding" not in shared:
        made = get_vocab_embedding_cls()(
            mesh,
            model.input_vocab_dim,
            model.model_dim,
            context.variable_dtype,
            name="embedding",
            ensemble_dim=model.ensemble_dim,
        )
        # Loss functions read it from the Context. The caller's dictionary must not change.
        context.shared_params = {**shared, "embedding": made}
    return context.shared_params["embedding"]


def _position_weights(
    model: Unitransformer, max_length_dim: mtf.Dimension, context: Context, mesh: mtf.Mesh
) -> mtf.Tensor:
    shared = context.shared_params.get("positional_embedding")
    if shared is None or model.sinusoid_positional_embedding:
        return positional_embedding_weights(model, max_length_dim, mesh, context.variable_dtype)
    return shared


def _with_token_dropout(model: Unitransformer, context: Context, ids: mtf.Tensor) -> mtf.Tensor:
    if not context.train or not model.token_dropout_rate:
        return ids
    noise = mtf.random_uniform(ids.mesh, ids.shape)
    # A dropped id is that of padding, but layers tell padding by sequence_id.
    return ids * mtf.cast(mtf.greater_equal(noise, model.token_dropout_rate), ids.dtype)


def _logits(
    model: Unitransformer,
    vocab_dim: mtf.Dimension,
    context: Context,
    embedding: VocabEmbedding,
    x: mtf.Tensor,
) -> mtf.Tensor:
    if model.shared_embedding_and_softmax_weights:
        return embedding.hidden_to_logits(x, context=context)
    return layers.dense(
        x,
        vocab_dim,
        reduced_dims=[model.model_dim],
        use_bias=False,
        variable_dtype=context.variable_dtype,
        name="logits",
    )


def visibility_priority(
    model: Unitransformer, positions: mtf.Tensor, inputs: mtf.Tensor, targets: Optional[mtf.Tensor]
) -> Optional[mtf.Tensor]:
    """Returns the read and write priority of all positions; see Context.

    Args:
      model: a Unitransformer.
      positions: an integer Tensor with the dimension `length`: 0, 1, 2, ...
      inputs: an integer Tensor with dimensions [batch..., length], ids.
      targets: a Tensor of the same shape, or None.

    Returns:
      `positions` if each position sees those up to itself, with 0 at the inputs if they all see
      each other; None if all positions see each other.
    """
    if not model.autoregressive:
        return None
    if not model.input_full_attention:
        return positions
    if targets is None:
        visible = delimited_lm_inputs_mask(inputs)
    else:
        # As an input, the end of the inputs comes one position later than as a target.
        ends = delimited_lm_inputs_mask(targets)
        length_dim = targets.shape.dims[-1]
        visible = mtf.logical_or(ends, mtf.shift(ends, 1, length_dim, wrap=False))
    # Position i sees j if read[i] >= write[j]: inputs, at 0, see each other, and all see them.
    return positions * mtf.cast(mtf.logical_not(visible), positions.dtype)

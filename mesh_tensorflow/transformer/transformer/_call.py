"""One call of a stack of layers: from ids to logits, or to vectors.

Calls of all positions at once, sampling and beam search have this in common.
"""

from __future__ import annotations

from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.transformer.transformer._context import Context
from mesh_tensorflow.transformer.transformer._embedding import get_vocab_embedding_cls
from mesh_tensorflow.transformer.transformer._inputs import check_ids, delimited_lm_inputs_mask
from mesh_tensorflow.transformer.transformer._loss import loss_from_logits
from mesh_tensorflow.transformer.transformer._models.ensemble import reduce_ensemble_logits
from mesh_tensorflow.transformer.transformer._positions import (
    embedding_of_positions,
    positional_embedding_weights,
)

__all__ = ["call_model", "visibility_priority"]


def call_model(
    model: Any, context: Context, inputs: mtf.Tensor, targets: Optional[mtf.Tensor] = None
) -> mtf.Tensor:
    """Embeds ids, calls the layers and takes logits, in the variable scope of the model.

    Args:
      model: a Unitransformer.
      context: a Context. If it has a list of losses, that of the targets is appended.
      inputs: an integer Tensor, ids: with dimensions [batch..., length], without the length in
        mode "incremental".
      targets: a Tensor of the same shape, or None.

    Returns:
      A Tensor with the dimensions of `inputs` and the vocabulary: the logits, of an ensemble as
      a whole. With `d_model` in place of it if the model has no output vocabulary.
    """
    check_ids(f"{model.name}: inputs", inputs, model.input_vocab_dim)
    with tf.variable_scope(model.name):
        embedding = _embedding(model, context, inputs.mesh)
        ids = _with_token_dropout(model, context, _for_ensemble(model, inputs))
        x = embedding.ids_to_embedding(ids, context=context)
        context.input_embeddings = x
        if model.max_length_dim is not None:
            weights = _position_weights(model, context, ids.mesh)
            x += embedding_of_positions(model, context, weights)
        x = model.layer_stack.call(context, x)
        if model.output_vocab_dim is None:
            return x
        logits = _logits(model, context, embedding, x)
        if targets is not None and context.losses is not None:
            loss_fn = model._loss_fn or loss_from_logits
            targets = _for_ensemble(model, targets)
            loss = loss_fn(model, context, logits, targets, model.output_vocab_dim)
            context.losses.append(loss)
        if model.ensemble_dim is not None:
            logits = reduce_ensemble_logits(logits, model.ensemble_dim, model.output_vocab_dim)
        return logits


def _for_ensemble(model: Any, ids: mtf.Tensor) -> mtf.Tensor:
    """Returns ids for each member of an ensemble, the same for all if they are not given so."""
    if model.ensemble_dim is None or model.ensemble_dim in ids.shape:
        return ids
    return mtf.broadcast(ids, mtf.Shape([model.ensemble_dim, *ids.shape.dims]))


def _embedding(model: Any, context: Context, mesh: mtf.Mesh) -> Any:
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
        # Loss functions look for it there; but it must not get into the caller's dictionary.
        context.shared_params = {**shared, "embedding": made}
    return context.shared_params["embedding"]


def _position_weights(model: Any, context: Context, mesh: mtf.Mesh) -> mtf.Tensor:
    shared = context.shared_params.get("positional_embedding")
    if shared is None or model.sinusoid_positional_embedding:
        return positional_embedding_weights(model, mesh, context.variable_dtype)
    return shared


def _with_token_dropout(model: Any, context: Context, ids: mtf.Tensor) -> mtf.Tensor:
    if not context.train or not model.token_dropout_rate:
        return ids
    noise = mtf.random_uniform(ids.mesh, ids.shape)
    return ids * mtf.cast(mtf.greater_equal(noise, model.token_dropout_rate), ids.dtype)


def _logits(model: Any, context: Context, embedding: Any, x: mtf.Tensor) -> mtf.Tensor:
    if model.shared_embedding_and_softmax_weights:
        return embedding.hidden_to_logits(x, context=context)
    return layers.dense(
        x,
        model.output_vocab_dim,
        reduced_dims=[model.model_dim],
        use_bias=False,
        variable_dtype=context.variable_dtype,
        name="logits",
    )


def visibility_priority(
    model: Any, positions: mtf.Tensor, inputs: mtf.Tensor, targets: Optional[mtf.Tensor]
) -> Optional[mtf.Tensor]:
    """Returns the read priority of positions, which is their write priority too; see Context.

    Args:
      model: a Unitransformer.
      positions: an integer Tensor with the dimension `length`: 0, 1, 2, ...
      inputs: an integer Tensor with dimensions [batch..., length], ids.
      targets: a Tensor of the same shape, or None.

    Returns:
      `positions` if each position sees the ones up to itself; with 0 for the inputs if they
      see each other; None if all see all.
    """
    if not model.autoregressive:
        return None
    if not model.input_full_attention:
        return positions
    if targets is None:
        visible = delimited_lm_inputs_mask(inputs)
    else:
        # The end of the inputs comes in one position after it is a target.
        ends = delimited_lm_inputs_mask(targets)
        length_dim = targets.shape.dims[-1]
        visible = mtf.logical_or(ends, mtf.shift(ends, 1, length_dim, wrap=False))
    return positions * mtf.cast(mtf.logical_not(visible), positions.dtype)

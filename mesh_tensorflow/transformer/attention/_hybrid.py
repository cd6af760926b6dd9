"""Hybrid attention: a mix of softmax attention and doubly normalized attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.layers._attention import masks
from mesh_tensorflow.transformer.attention._dot_product import check_operands, with_dropout

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["hybrid_attention"]


def _log_add(x: mtf.Tensor, y: Union[mtf.Tensor, float]) -> mtf.Tensor:
    """Returns log(exp(x) + exp(y))."""
    largest = mtf.maximum(x, y)
    return largest + mtf.log(mtf.exp(x - largest) + mtf.exp(y - largest))


def _before_decoding(context: Context, logits: mtf.Tensor) -> mtf.Tensor:
    """Masks the logits of queries at and after the position where decoding begins."""
    if context.initial_position is None:
        return logits
    positions = mtf.range(context.mesh, context.length_dim, tf.int32)
    outside = mtf.greater_equal(positions, context.initial_position)
    return masks.hide(logits, masks.hidden_where(outside, logits.dtype))


def _log_sums_over_queries(
    context: Context, logits: mtf.Tensor, extra_logit: Union[mtf.Tensor, float, None]
) -> mtf.Tensor:
    """Returns the log of the sum of exp(logits) over queries, for each memory position.

    In decoding, the sum is over the queries up to the current position.
    """
    if context.mode == "incremental":
        [sums] = context.get_states(1)
        sums = _log_add(sums, logits)
        context.record_new_states([sums])
    else:
        if context.mode == "first_part":
            logits = _before_decoding(context, logits)
        sums = mtf.reduce_logsumexp(logits, context.length_dim)
        if context.mode == "first_part":
            context.record_new_states([sums])
    return sums if extra_logit is None else _log_add(sums, extra_logit)


@leaves_no_node
def hybrid_attention(
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    context: Context,
    memory_length_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
    bias: Optional[mtf.Tensor] = None,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]] = None,
    extra_logit: Union[mtf.Tensor, float, None] = None,
) -> mtf.Tensor:
    """Attention with a learned mix of softmax weights and doubly normalized weights.

    Ding et al., "Attention that does not explain away" (2020): doubly normalized weights are
    normalized over queries first, then over the memory. So each weight depends on all queries of a
    sequence, later ones included; in decoding, on those up to the current one.

    Args:
      q: queries, a Tensor with dimensions [batch..., length, heads..., key_dim].
      k: keys, a Tensor with dimensions [batch..., memory_length, heads..., key_dim].
      v: values, a Tensor with dimensions [batch..., memory_length, heads..., value_dim].
      context: the Context of this call of the model: its mode, positions, states and losses.
      memory_length_dim: the Dimension of positions that are attended to.
      key_dim: the Dimension of channels of queries and keys.
      value_dim: the Dimension of channels of values.
      bias: a Tensor that is added to the logits, or None.
      dropout_rate: the dropout rate of the attention weights.
      dropout_broadcast_dims: Dimensions along which the dropout mask is the same, or None.
      extra_logit: a number or a Tensor, one more logit in each denominator; or None.

    Returns:
      A Tensor with dimensions [dims of q without key_dim..., value_dim].

    Raises:
      ValueError: a dimension is missing.
    """
    tensors = {"q": q, "k": k, "v": v}
    check_operands("hybrid_attention", tensors, memory_length_dim, key_dim, value_dim)
    logits = layers.us_einsum([q, k], output_shape=q.shape - key_dim + memory_length_dim)
    if bias is not None:
        logits = masks.hide(logits + bias, bias)
    mix = mtf.get_variable(
        context.mesh,
        "doubly_coeff",
        mtf.Shape([]),
        initializer=tf.constant_initializer(0.5),
        dtype=context.variable_dtype,
    )
    mix = mtf.maximum(mtf.minimum(mix, 1.0), 0.0)
    usual = mtf.softmax(logits, memory_length_dim, extra_logit=extra_logit)
    twice = logits - _log_sums_over_queries(context, logits, extra_logit)
    # A memory position that is masked for all queries has a sum as low as its logits.
    twice = masks.hide(twice, bias)
    twice = mtf.softmax(twice, memory_length_dim, extra_logit=extra_logit)
    weights = usual + (twice - usual) * mix
    weights = with_dropout(weights, dropout_rate, dropout_broadcast_dims, context)
    return mtf.einsum([weights, v], output_shape=q.shape - key_dim + value_dim)

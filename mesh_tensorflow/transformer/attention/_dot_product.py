"""Dot-product attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.layers._attention import masks
from mesh_tensorflow.transformer.attention import _blocked, _sharding

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["attend", "attention", "check_operands", "with_dropout"]


def check_operands(
    what: str,
    tensors: Mapping[str, Optional[mtf.Tensor]],
    memory_length_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
) -> None:
    """Checks that queries, keys and values have the dimensions that attention needs.

    Args:
      what: the name of the function.
      tensors: a dictionary with q, k and v, some of which may be None.
      memory_length_dim: the Dimension of positions that are attended to.
      key_dim: the Dimension of channels of queries and keys.
      value_dim: the Dimension of channels of values.

    Raises:
      ValueError: one is missing, or queries have the memory's dimension.
    """
    needed = {
        "q": {"key_dim": key_dim},
        "k": {"key_dim": key_dim, "memory_length_dim": memory_length_dim},
        "v": {"value_dim": value_dim, "memory_length_dim": memory_length_dim},
    }
    for name, dims in needed.items():
        x = tensors[name]
        for argument, dim in dims.items():
            if x is not None and dim not in x.shape:
                raise ValueError(
                    f"{what}: {name} {x.name} {x.shape} has no {argument} {dims_text([dim])}; "
                    "rename or reshape it, for instance by mtf.rename_dimension"
                )
    q = tensors["q"]
    if q is not None and memory_length_dim in q.shape:
        raise ValueError(
            f"{what}: q {q.name} {q.shape} has the dimension of the memory, "
            f"{dims_text([memory_length_dim])}, with which it is crossed; rename it in k and v by "
            "mtf.layers.rename_length_to_memory_length"
        )


def with_dropout(
    weights: mtf.Tensor,
    dropout_rate: float,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]],
    context: Context,
) -> mtf.Tensor:
    """Applies dropout to attention weights, in training or without a Context."""
    if dropout_rate == 0.0:
        return weights
    training = context is None or context.train
    noise_shape = weights.shape - list(dropout_broadcast_dims or [])
    return mtf.dropout(weights, training, keep_prob=1.0 - dropout_rate, noise_shape=noise_shape)


def _add_z_loss(
    log_z: mtf.Tensor,
    rows_shape: mtf.Shape,
    coefficient: float,
    context: Context,
    dtype: tf.DType,
) -> None:
    """Appends the z-loss to the losses: the mean square of the softmax's log denominators.

    Args:
      log_z: the log denominators, a Tensor.
      rows_shape: their Shape, in case the logits have been reshaped.
      coefficient: a number.
      context: the Context of this call of the model: its mode, positions, states and losses.
      dtype: the dtype of the loss.
    """
    # Of queries that see nothing, which padding usually has.
    log_z = mtf.maximum(log_z, masks.MASKED_LOGIT)
    squares = mtf.square(mtf.reshape(log_z, rows_shape))
    nonpadding = context.nonpadding
    if isinstance(nonpadding, mtf.Tensor):
        mask = mtf.cast(nonpadding, squares.dtype)
        # Padding counts as 0 and is still counted: a mean over all places.
        squares = mtf.multiply(squares, mask, output_shape=squares.shape)
    mean = mtf.reduce_mean(squares)
    mtf.scalar_summary("attention_z_loss", mean)
    context.losses.append(mtf.cast(mean * coefficient, dtype))  # type: ignore[union-attr]


def attend(
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    memory_length_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
    bias: Optional[mtf.Tensor] = None,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]] = None,
    extra_logit: Union[mtf.Tensor, float, None] = None,
    context: Context = None,  # type: ignore[assignment]
    float32_logits: bool = True,
    z_loss_coeff: Optional[float] = None,
    blocked: Optional[bool] = None,
    ring: Union[bool, str] = False,
) -> mtf.Tensor:
    """Computes `attention` without checking its operands."""
    output_shape = q.shape - key_dim + value_dim
    rows_shape = q.shape - key_dim
    split = _sharding.find_split(context, [q, k, v], [key_dim, value_dim])
    q, k, v, bias = (_sharding.split_again(x, split) for x in (q, k, v, bias))  # type: ignore
    has_z_loss = z_loss_coeff is not None and context.train and context.losses is not None
    parts, dims = (q, k, v), (memory_length_dim, key_dim, value_dim)
    joint = has_z_loss and extra_logit is not None
    if getattr(context, "mode", None) == "incremental":
        # One position has nothing that could go around, or be cut.
        blocked, ring = False, False
    if _blocked.takes_blocks(blocked, parts, dims, bias, dropout_rate, joint, ring):
        outputs, log_z = _blocked.blocked_attend(
            parts, dims, bias, dropout_rate, dropout_broadcast_dims, extra_logit, context, ring
        )
        if has_z_loss:
            _add_z_loss(log_z, rows_shape, z_loss_coeff, context, v.dtype)  # type: ignore[arg-type]
        return outputs if outputs.shape == output_shape else mtf.reshape(outputs, output_shape)
    bias = masks.whole(bias)
    dtype = tf.float32 if float32_logits else q.dtype
    logits = layers.us_einsum(
        [mtf.cast(q, dtype), mtf.cast(k, dtype)],
        output_shape=q.shape - key_dim + [d for d in [memory_length_dim] if d in k.shape],
    )
    if bias is not None:
        logits = masks.hide(logits + mtf.cast(bias, dtype), bias)
    if has_z_loss:
        log_z = mtf.reduce_logsumexp(logits, memory_length_dim)
        _add_z_loss(log_z, rows_shape, z_loss_coeff, context, v.dtype)  # type: ignore[arg-type]
    weights = mtf.softmax(logits, memory_length_dim, extra_logit=extra_logit)
    # After the softmax, whose sums bfloat16 would round.
    weights = mtf.cast(weights, v.dtype)
    weights = with_dropout(weights, dropout_rate, dropout_broadcast_dims, context)
    outputs = mtf.einsum([weights, v], output_shape=q.shape - key_dim + value_dim)
    return outputs if outputs.shape == output_shape else mtf.reshape(outputs, output_shape)


@leaves_no_node
def attention(
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    memory_length_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
    bias: Optional[mtf.Tensor] = None,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]] = None,
    extra_logit: Union[mtf.Tensor, float, None] = None,
    context: Context = None,  # type: ignore[assignment]
    float32_logits: bool = True,
    z_loss_coeff: Optional[float] = None,
    blocked: Optional[bool] = None,
    ring: Union[bool, str] = False,
) -> mtf.Tensor:
    """Dot-product attention: means of values, weighted by the softmax of queries times keys.

    Vaswani et al., "Attention is all you need" (2017), but the logits are not scaled: the scale is
    folded into the initializer of the query weights, see `AttentionParams`.

    Dimensions that queries and keys share, such as batch and heads, are batch dimensions; every
    query attends along the others.

    Args:
      q: queries, a Tensor with dimensions [batch..., length, heads..., key_dim].
      k: keys, a Tensor with dimensions [batch..., memory_length, heads..., key_dim].
      v: values, a Tensor with dimensions [batch..., memory_length, heads..., value_dim].
      memory_length_dim: the Dimension of positions that are attended to.
      key_dim: the Dimension of channels of queries and keys.
      value_dim: the Dimension of channels of values.
      bias: a Tensor that is added to the logits, or None. Where it is below -5e8, memory is hidden;
        a query from which all of it is hidden has the mean of all values.
      dropout_rate: the dropout rate of the attention weights.
      dropout_broadcast_dims: Dimensions along which the dropout mask is the same, or None.
      extra_logit: a number or a Tensor, one more logit in the softmax's denominator; or None.
      context: a Context, which tells whether the model is training; without one, dropout is applied
        if its rate is not 0.
      float32_logits: whether logits and softmax are computed in float32.
      z_loss_coeff: the coefficient of a loss that keeps the log of the softmax's denominator near
        0, in training; or None.
      blocked: whether logits are computed by blocks, see `mtf.layers.blocked_attention`; if None,
        they are for lengths from 1,024 on where that is possible. The logits and the softmax of
        blocks are in float32. Steps of decoding take no notice of it.
      ring: whether to use blocks wherever that is possible and, in layouts that split the length of
        queries and of the memory over one mesh dimension, to pass keys and values around its
        processors instead of gathering them; see `mtf.layers.blocked_attention`. Steps of decoding
        take no notice of it.

    Returns:
      A Tensor with dimensions [dims of q without key_dim..., value_dim].

    Raises:
      ValueError: a dimension is missing, dropout is out of range, there is a z-loss and no Context
        to add it to, or blocks are asked for and not possible.
    """
    tensors = {"q": q, "k": k, "v": v}
    check_operands("attention", tensors, memory_length_dim, key_dim, value_dim)
    if isinstance(dropout_rate, (int, float)) and not 0.0 <= dropout_rate < 1.0:
        raise ValueError(
            "attention: dropout_rate is the rate of what is dropped, from 0 to less than 1, not "
            f"{dropout_rate}"
        )
    if z_loss_coeff is not None and context is None:
        raise ValueError(
            "attention: z_loss_coeff adds to context.losses; give the Context of the model, or "
            "no z_loss_coeff"
        )
    return attend(
        q,
        k,
        v,
        memory_length_dim,
        key_dim,
        value_dim,
        bias=bias,
        dropout_rate=dropout_rate,
        dropout_broadcast_dims=dropout_broadcast_dims,
        extra_logit=extra_logit,
        context=context,
        float32_logits=float32_logits,
        z_loss_coeff=z_loss_coeff,
        blocked=blocked,
        ring=ring,
    )

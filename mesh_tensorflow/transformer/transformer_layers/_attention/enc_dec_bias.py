"""Masks and relative position biases of encoder-decoder attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.layers._attention import masks
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.transformer_layers._attention import relative as _relative

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context
    from mesh_tensorflow.transformer.transformer_layers._attention.self_attention import (
        SelfAttention,
    )

__all__ = ["enc_dec_attention_bias", "relative_position_spans"]

_KINDS = (None, "bias", "bias_shared")
_NOT_SPLIT = {"bias": "None", "bias_shared": "None"}


def _encoder_inputs(context: Context) -> mtf.Tensor:
    """Returns the encoder's ids, with the length dimension renamed to memory_length."""
    ids = context.encoder_inputs
    if ids is None or context.inputs is None:
        raise ValueError(
            "relative_position_spans finds sentinels in the ids of encoder and decoder, which the "
            "Context does not have; call the models with ids, or set relative_attention_type=None"
        )
    names = ids.shape.dimension_names
    if context.encoder_length_dim.name in names:
        return ids
    return mtf.rename_dimension(ids, context.length_dim.name, context.encoder_length_dim.name)


def _sentinels_so_far(context: Context, is_sentinel: mtf.Tensor) -> mtf.Tensor:
    """Returns how many sentinels the decoder's inputs have up to each position.

    In decoding, the count up to the current position is kept as a state.
    """
    if context.mode == "incremental":
        [count] = context.get_states(1)
        count = count + mtf.cast(is_sentinel, count.dtype)
        context.record_new_states([count])
        return mtf.to_int32(count)
    count = mtf.to_int32(is_sentinel)
    if context.mode == "first_part":
        before = count
        if context.initial_position is not None:
            positions = mtf.range(context.mesh, context.length_dim, tf.int32)
            known = mtf.less(positions, context.initial_position)
            before = mtf.multiply(count, mtf.to_int32(known), output_shape=count.shape)
        total = mtf.reduce_sum(before, reduced_dim=context.length_dim)
        # Floating point, since beam search selects states by a matrix product.
        context.record_new_states([mtf.to_float(total)])
    return mtf.cumsum(count, context.length_dim)


def _numbered(
    count: mtf.Tensor, sequence_id: Union[mtf.Tensor, int, None], length: int
) -> mtf.Tensor:
    """Returns counts offset by sequence id, so that packed examples do not share counts."""
    return count if sequence_id is None else count + sequence_id * length


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
def relative_position_spans(context: Context, num_sentinels: int = gin.REQUIRED) -> mtf.Tensor:
    """Returns each encoder position relative to the one that the decoder position is aligned with.

    For models trained on span corruption: encoder inputs have a sentinel in place of each span, and
    the decoder repeats it before the span. A decoder position is aligned with the last sentinel
    before it. Sentinels are the last ids of the vocabulary.

    Args:
      context: a Context of a decoder, with ids of encoder and decoder.
      num_sentinels: how many of the last ids are sentinels.

    Returns:
      An int32 Tensor with dimensions [batch..., length, memory_length].

    Raises:
      ValueError: the Context has no ids.
    """
    encoder_ids = _encoder_inputs(context)
    memory = context.encoder_length_dim
    first = context.model.input_vocab_size_unpadded - num_sentinels
    there = mtf.cumsum(mtf.to_int32(mtf.greater_equal(encoder_ids, first)), memory)
    here = _sentinels_so_far(context, mtf.greater_equal(context.inputs, first))
    length = context.length_dim.size
    if context.sequence_id is not None and context.encoder_sequence_id is not None:
        there = _numbered(there, context.encoder_sequence_id, length)
        here = _numbered(here, context.sequence_id, length)
    shape = mtf.Shape([*here.shape, memory])
    place = mtf.reduce_sum(
        mtf.to_int32(mtf.less(there, here, output_shape=shape)), reduced_dim=memory
    )
    return mtf.sub(place, mtf.range(context.mesh, memory, tf.int32), output_shape=shape)


def _visible(context: Context) -> Optional[mtf.Tensor]:
    """Returns whether two positions belong to the same example; None without sequence ids."""
    ids = (context.sequence_id, context.encoder_sequence_id)
    if any(x is None for x in ids) or not any(isinstance(x, mtf.Tensor) for x in ids):
        return None
    decoder, encoder = ids
    return mtf.equal(decoder, encoder)


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
def enc_dec_attention_bias(
    layer: SelfAttention,
    context: Context,
    heads_dims: list[mtf.Dimension],
    relative_position_fn: Callable[[Any], mtf.Tensor] = relative_position_spans,
) -> Optional[mtf.Tensor]:
    """Returns the bias of attention over an encoder's output.

    Args:
      layer: a layer with `relative_attention_type` and `relative_attention_num_buckets`.
      context: a Context of a decoder.
      heads_dims: a list of Dimensions; each head has its own relative position bias.
      relative_position_fn: a function of a Context; returns an int32 Tensor with dimensions
        [batch..., length, memory_length].

    Returns:
      A Tensor, or None if nothing is masked and there is no relative attention.

    Raises:
      ValueError: the layer's relative_attention_type is not None, "bias" or "bias_shared".
    """
    kind = layer.relative_attention_type
    _relative.check_type("enc_dec_attention_bias", kind, _KINDS)
    ids: Any = ("equal", context.sequence_id, context.encoder_sequence_id)
    of_positions = all(isinstance(x, mtf.Tensor) for x in ids[1:])
    dtype = context.activation_dtype
    if _relative.in_ring(layer, context, _NOT_SPLIT) and (of_positions or None in ids):
        return masks.stand_in(context.mesh, [ids], dtype) if of_positions else None
    visible = _visible(context)
    hidden = None
    if visible is not None:
        hidden = attention.visibility_mask_to_attention_bias(visible, dtype)
        if of_positions:
            hidden = masks.made_of(hidden, [ids])
    if kind is None:
        return hidden
    buckets_dim = mtf.Dimension("buckets", layer.relative_attention_num_buckets)
    values = _relative.shared_bias_values(
        context,
        "enc_dec_relative_attention_bias",
        heads_dims,
        buckets_dim,
        ("enc_dec_relative_attention_bias", tuple(heads_dims)) if kind == "bias_shared" else None,
    )
    buckets = _relative.relative_position_bucket(
        relative_position_fn(context), num_buckets=buckets_dim.size
    )
    bias = _relative.bucket_values(values, buckets, buckets_dim, context.encoder_length_dim)
    if hidden is None:
        return bias
    both = bias + hidden
    return masks.made_of(both, hidden.made_of.visible, bias) if hidden.made_of else both

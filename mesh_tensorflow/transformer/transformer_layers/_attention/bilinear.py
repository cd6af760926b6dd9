"""Attention by a general bilinear form for each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional

import gin

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.layers._attention import masks
from mesh_tensorflow.transformer.attention import _dot_product
from mesh_tensorflow.transformer.transformer_layers._attention import relative as _relative
from mesh_tensorflow.transformer.transformer_layers._attention import states as _states
from mesh_tensorflow.transformer.transformer_layers._attention.enc_dec_attention import EncDecMixin
from mesh_tensorflow.transformer.transformer_layers._attention.enc_dec_bias import (
    enc_dec_attention_bias,
)
from mesh_tensorflow.transformer.transformer_layers._attention.self_attention import SelfAttention
from mesh_tensorflow.transformer.transformer_layers._attention.talking_heads import (
    WITHOUT_OPTIONS,
    as_dims,
    projection,
)

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["GeneralBilinearEncDecAttention", "GeneralBilinearSelfAttention"]

_KINDS = (None, "bias", "bias_shared")


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class GeneralBilinearSelfAttention(SelfAttention):
    """Attention of a sequence to itself, without projections of keys and values.

    Shazeer et al., "Talking-heads attention" (2020), section 6: queries have as many channels as
    the model, and keys and values are the memory itself.

    Attributes:
      heads_dims: a list of Dimensions.
      dropout_rate: the share of elements that are dropped in training, from 0 to less than 1.
      relative_attention_type: a string or None.
      relative_attention_num_buckets: an integer.
    """

    def __init__(
        self,
        heads_dims: Sequence[tuple[str, int]] = (("heads", 12),),
        dropout_rate: float = 0.0,
        relative_attention_type: Optional[str] = None,
        relative_attention_num_buckets: int = 32,
    ) -> None:
        """Creates the layer.

        Args:
          heads_dims: (name, size) pairs.
          dropout_rate: the dropout rate of the attention weights; all queries share one dropout
            mask.
          relative_attention_type: None, "bias" or "bias_shared".
          relative_attention_num_buckets: an integer.

        Raises:
          ValueError: `relative_attention_type` is unknown.
        """
        _relative.check_type(type(self).__name__, relative_attention_type, _KINDS)
        self.heads_dims = as_dims(heads_dims)
        # Options of SelfAttention that the layer does not have are given, or gin would bind them.
        super().__init__(
            num_heads=mtf.list_product(d.size for d in self.heads_dims),
            key_value_size=0,  # that of the model, which is not known here
            shared_kv=True,
            dropout_rate=dropout_rate,
            relative_attention_type=relative_attention_type,
            relative_attention_num_buckets=relative_attention_num_buckets,
            **WITHOUT_OPTIONS,
        )

    def compute_q(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Returns queries, [batch..., length, heads..., d_model].

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model].
        """
        channels = x.shape.dims[-1]
        return projection(
            context, x, [*self.heads_dims, channels], [channels], "q", scale=1.0 / channels.size
        )

    def compute_y(self, context: Context, u: mtf.Tensor) -> mtf.Tensor:
        """Returns the output.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          u: a Tensor with dimensions [batch..., length, heads..., d_model].
        """
        channels = context.model.model_dim
        return projection(context, u, [channels], [*self.heads_dims, channels], "y")

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the self-attention output of each position.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model].
          losses: a list or None.

        Returns:
          A Tensor of the shape of `x`.
        """
        memory_length = self.memory_length(context)
        q = self.compute_q(context, x)
        if context.mode == "incremental":
            [m] = _states.updated_states(context, [x], memory_length)
        else:
            m = self.rename_length_to_memory_length(x, context)
            if context.mode == "first_part":
                context.record_new_states([m])
        bias = self.compute_bias(context, self._memory_position(context), x, self.heads_dims, q)
        return self.attention_internal(context, q, m, memory_length, bias)

    def attention_internal(
        self,
        context: Context,
        q: mtf.Tensor,
        m: mtf.Tensor,
        memory_length: mtf.Dimension,
        bias: Optional[mtf.Tensor],
    ) -> mtf.Tensor:
        """Returns the output of attention.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          q: queries, as `compute_q` returns.
          m: the memory, a Tensor with dimensions [batch..., memory_length, d_model].
          memory_length: a Dimension.
          bias: a Tensor that is added to the logits, or None.

        Returns:
          A Tensor with dimensions [batch..., length, d_model].
        """
        channels = m.shape.dims[-1]
        logits = layers.us_einsum([q, m], output_shape=q.shape - channels + memory_length)
        if bias is not None:
            logits = masks.hide(logits + bias, bias)
        weights = mtf.softmax(logits, memory_length)
        weights = _dot_product.with_dropout(
            weights, self.dropout_rate, [context.length_dim], context
        )
        return self.compute_y(context, mtf.einsum([weights, m], output_shape=q.shape))


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class GeneralBilinearEncDecAttention(EncDecMixin, GeneralBilinearSelfAttention):
    """Attention to the output of an encoder, without projections of keys and values."""

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Attends to the encoder's output by a bilinear form for each head."""
        q = self.compute_q(context, x)
        m, memory_length = _states.constant_states(
            context, self._get_memory_antecedent, lambda m: [m]
        )
        bias = enc_dec_attention_bias(self, context, self.heads_dims)
        return self.attention_internal(context, q, m, memory_length, bias)

"""Attention of a decoder to the output of an encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import gin

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.attention import _all_to_all
from mesh_tensorflow.transformer.transformer_layers._attention import states as _states
from mesh_tensorflow.transformer.transformer_layers._attention.enc_dec_bias import (
    enc_dec_attention_bias,
)
from mesh_tensorflow.transformer.transformer_layers._attention.self_attention import SelfAttention

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["EncDecAttention", "EncDecMixin", "enc_dec_attention"]


def _exchanging(layer: SelfAttention, context: Context, heads_dim: mtf.Dimension) -> Context:
    """Returns the Context in which queries attend: another one if positions become heads."""
    function = getattr(layer, "attention_func", None)  # a user's layer may lack it
    if function != _all_to_all.ALL_TO_ALL or context.mode == "incremental":
        return context
    what = type(layer).__name__
    if layer.relative_attention_type is not None:
        raise ValueError(
            f"{what}: relative_attention_type={layer.relative_attention_type!r} makes a bias of "
            f"{context.length_dim.name} times memory_length, which attention_func={function!r} "
            "does not exchange. Set relative_attention_type=None, or attention_func=None"
        )
    _all_to_all.check_layout(what, context, heads_dim)
    return _all_to_all.of_heads(context)


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
def enc_dec_attention(
    self_attention_layer: SelfAttention,
    memory_antecedent: mtf.Tensor,
    context: Context,
    x: mtf.Tensor,
    losses: Optional[list[mtf.Tensor]],
    attention_fn: Callable[..., mtf.Tensor] = attention.attention,
    z_loss_coeff: Optional[float] = None,
) -> mtf.Tensor:
    """Returns the cross-attention output of each decoder position.

    In decoding, the keys and values of the memory are computed once.

    Args:
      self_attention_layer: a SelfAttention, whose options and weights are used.
      memory_antecedent: a Tensor with dimensions [batch..., memory_length, d_model].
      context: the Context of this call of the model: its mode, positions, states and losses.
      x: a Tensor with dimensions [batch..., length, d_model]; without `length` in mode
        "incremental".
      losses: a list or None.
      attention_fn: a function with the arguments of `attention`.
      z_loss_coeff: the factor of a loss on the logits, see `attention`; or None.

    Returns:
      A Tensor of the shape of `x`.
    """
    layer = self_attention_layer
    params = layer.make_params(context)
    q = params.compute_q(x)

    def keys_and_values(memory: mtf.Tensor) -> list[mtf.Tensor]:
        if params.shared_kv:
            return [params.compute_kv(memory)] * 2
        return [params.compute_k(memory), params.compute_v(memory)]

    k, v, memory_length = _states.constant_states(
        context,
        lambda _: memory_antecedent,
        keys_and_values,
        keep=_states.next_to_channels,
    )
    seen = _exchanging(layer, context, params.query_heads_dims[0])
    if seen is not context:
        k, v = (_all_to_all.by_heads(x, memory_length.name) for x in (k, v))
        memory_length = mtf.Dimension(_all_to_all.memory_name(seen), memory_length.size)
    o = attention_fn(
        _all_to_all.matched(q, seen),
        k,
        v,
        memory_length,
        layer.kv_dim,
        layer.kv_dim,
        bias=enc_dec_attention_bias(layer, seen, params.query_heads_dims),
        context=seen,
        z_loss_coeff=z_loss_coeff,
        **layer.attention_kwargs_from_context(seen),
    )
    if seen is not context:
        o = _all_to_all.by_positions(o, context)
    output_shape = layer.expected_attention_output_shape(x, params)
    y = params.compute_output(o, output_shape=output_shape)
    return layer.layer_output_from_attention_output(context, y, losses)


class EncDecMixin(SelfAttention):
    """Mixin that turns a self-attention layer into encoder-decoder attention.

    List it before the self-attention class among the bases. Layers that do not attend by
    `enc_dec_attention` override `call`.
    """

    def __init__(self, relative_attention_type: Optional[str] = None, **kwargs: Any) -> None:
        """Creates the layer.

        Args:
          relative_attention_type: None, "bias" or "bias_shared", see `relative_position_spans`.
          **kwargs: further arguments of the self-attention layer.
        """
        super().__init__(relative_attention_type=relative_attention_type, **kwargs)

    def _get_memory_antecedent(self, context: Context) -> mtf.Tensor:
        """Returns the attention memory, a Tensor [batch..., memory_length, d_model].

        Raises:
          ValueError: there is no encoder output.
        """
        if context.encoder_output is None:
            raise ValueError(
                "attention over an encoder's output: the Context has no encoder_output; use the "
                "layer in the decoder of a Bitransformer, or call the model with encoder_output"
            )
        return context.encoder_output

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the cross-attention output of each position.

        Args:
          context: a Context of a decoder.
          x: a Tensor with dimensions [batch..., length, d_model].
          losses: a list or None.

        Returns:
          A Tensor of the shape of `x`.
        """
        return enc_dec_attention(
            self,
            self._get_memory_antecedent(context),
            context,
            x,
            losses,
            z_loss_coeff=self.z_loss_coeff,
        )


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class EncDecAttention(EncDecMixin):
    """Attention of a decoder to the output of an encoder.

    Vaswani et al., "Attention is all you need" (2017).

    For long sequences, `attention_kwargs={"ring": True}` passes parts of keys and values around,
    and `attention_func="all_to_all"` exchanges positions of both sequences for heads, as in
    `SelfAttention`.
    """

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Attends to the encoder's output."""
        return enc_dec_attention(
            self,
            self._get_memory_antecedent(context),
            context,
            x,
            losses,
            attention_fn=self.attention_fn,
            z_loss_coeff=self.z_loss_coeff,
        )

    @property
    def attention_fn(self) -> Callable[..., mtf.Tensor]:
        """The attention function."""
        return attention.attention

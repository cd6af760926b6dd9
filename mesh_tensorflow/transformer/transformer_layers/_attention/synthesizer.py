"""Synthesizer attention: weights that are not products of queries and keys alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import gin

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.attention import _synthetic
from mesh_tensorflow.transformer.transformer_layers._attention.params import attention_params
from mesh_tensorflow.transformer.transformer_layers._attention.self_attention import SelfAttention

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["Synthesizer"]


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class Synthesizer(SelfAttention):
    """Self-attention with weights that are learned directly or computed from the queries alone.

    Tay et al., "Synthesizer: rethinking self-attention in transformer models" (2020).

    Attributes:
      synthesize_mode: a string, see `synthetic_attention`.
      no_query: whether there are no queries.
    """

    def __init__(
        self,
        num_heads: int = 8,
        num_memory_heads: int = 0,
        key_value_size: int = 128,
        shared_kv: bool = False,
        dropout_rate: float = 0.0,
        attention_kwargs: Optional[dict[str, Any]] = None,
        relative_attention_type: Optional[str] = None,
        relative_attention_num_buckets: int = 32,
        attention_func: Optional[str] = None,
        combine_dims: bool = True,
        keep_query_heads_dims: bool = False,
        synthesize_mode: str = "random_plus_alpha",
        fold_scaling_into_initializer: bool = True,
        **kwargs: Any,
    ) -> None:
        """Creates the layer.

        Args:
          num_heads: this and the following arguments are those of `SelfAttention`.
          num_memory_heads: an integer.
          key_value_size: an integer.
          shared_kv: a bool; True in the modes "random", "factorized" and "dense_minus".
          dropout_rate: the share of elements that are dropped in training, from 0 to less than 1.
          attention_kwargs: a dictionary of further arguments of `synthetic_attention`, or None.
          relative_attention_type: a string or None.
          relative_attention_num_buckets: an integer.
          attention_func: ignored.
          combine_dims: a bool.
          keep_query_heads_dims: a bool.
          synthesize_mode: "random", "random_plus", "random_plus_alpha", "dense_minus",
            "dense_plus", "dense_plus_alpha" or "factorized"; see `synthetic_attention`.
          fold_scaling_into_initializer: a bool.
          **kwargs: further arguments of `SelfAttention`.

        Raises:
          ValueError: `synthesize_mode` is unknown.
        """
        products = _synthetic.uses_products(synthesize_mode)
        super().__init__(
            num_heads=num_heads,
            num_memory_heads=num_memory_heads,
            key_value_size=key_value_size,
            shared_kv=shared_kv or not products,
            dropout_rate=dropout_rate,
            attention_kwargs=attention_kwargs,
            relative_attention_type=relative_attention_type,
            relative_attention_num_buckets=relative_attention_num_buckets,
            attention_func=attention_func,
            combine_dims=combine_dims,
            keep_query_heads_dims=keep_query_heads_dims,
            fold_scaling_into_initializer=fold_scaling_into_initializer,
            **kwargs,
        )
        self.synthesize_mode = synthesize_mode
        self.no_query = not _synthetic.uses_queries(synthesize_mode)

    def _check_function(self) -> None:
        # attention_func is accepted for compatibility; there is only one attention function.
        return

    def make_params(self, context: Context) -> attention.AttentionParams:
        """Returns the weights; creates their variables if they do not exist.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
        """
        return attention_params(
            context=context,
            kv_dim=self.kv_dim,
            num_heads=self.num_heads,
            num_memory_heads=self.num_memory_heads,
            shared_kv=self.shared_kv,
            no_query=self.no_query,
            combine_dims=self.combine_dims,
            keep_query_heads_dims=self.keep_query_heads_dims,
            fold_scaling_into_initializer=self.fold_scaling_into_initializer,
        )

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
        params = self.make_params(context)
        memory_length = self.memory_length(context)
        k, v = self._keys_and_values(context, x, params, memory_length)
        q = None if self.no_query else params.compute_q(x)
        bias = self.compute_bias(
            context, self._memory_position(context), x, params.query_heads_dims, q
        )
        o = attention.synthetic_attention(
            q,
            k,
            v,
            memory_length,
            self.kv_dim,
            self.kv_dim,
            bias=bias,
            synthesize=True,
            synthesize_mode=self.synthesize_mode,
            context=context,
            **self.attention_kwargs_from_context(context),
        )
        output_shape = self.expected_attention_output_shape(x, params)
        y = params.compute_output(o, output_shape=output_shape)
        return self.layer_output_from_attention_output(context, y, losses)

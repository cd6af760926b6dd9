"""Attention in branches: each head passes through a feed-forward layer by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer.transformer_layers._attention.enc_dec_attention import EncDecMixin
from mesh_tensorflow.transformer.transformer_layers._attention.self_attention import SelfAttention
from mesh_tensorflow.transformer.transformer_layers._feed_forward import DenseReluDense

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["BranchedEncDecAttention", "BranchedSelfAttention"]


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class BranchedSelfAttention(SelfAttention):
    """Self-attention as a weighted sum of branches, one per head.

    Ahmed et al., "Weighted transformer network for machine translation" (2017). Each head is
    projected to the model's dimension separately, scaled, passed through a feed-forward layer that
    all branches share, and scaled again.

    Attributes:
      dense_layer: a DenseReluDense.
      kappa_init: a TensorFlow initializer of the first scales.
      alpha_init: a TensorFlow initializer of the second scales.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Creates the layer.

        Args:
          **kwargs: arguments of `SelfAttention`; except num_memory_heads, combine_dims and
            keep_query_heads_dims, which branches determine.

        Raises:
          ValueError: `num_memory_heads` is given.
        """
        super().__init__(**{**kwargs, "combine_dims": False, "keep_query_heads_dims": True})
        if self.num_memory_heads:
            raise ValueError(
                f"{type(self).__name__}: num_memory_heads={self.num_memory_heads}, but each head "
                "is a branch with keys and values of its own. Set num_memory_heads to 0"
            )
        self.dense_layer = DenseReluDense()
        self.kappa_init = tf.random_uniform_initializer(minval=0.0, maxval=1.0)
        self.alpha_init = tf.random_uniform_initializer(minval=0.0, maxval=1.0)

    def layer_output_from_attention_output(
        self, context: Context, attention_output: mtf.Tensor, losses: Optional[list[mtf.Tensor]]
    ) -> mtf.Tensor:
        """Returns the sum of the branches.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          attention_output: a Tensor with dimensions [batch..., length, heads, d_model].
          losses: a list or None.

        Returns:
          A Tensor with dimensions [batch..., length, d_model].
        """
        heads_dim = mtf.Dimension("heads", self.num_heads)
        kappa, alpha = (
            mtf.get_variable(
                context.mesh,
                name,
                mtf.Shape([heads_dim]),
                initializer=initializer,
                dtype=context.variable_dtype,
            )
            for name, initializer in (("kappa", self.kappa_init), ("alpha", self.alpha_init))
        )
        branches = mtf.multiply(attention_output, kappa, output_shape=attention_output.shape)
        branches = self.dense_layer.call(context, branches, losses)
        return mtf.einsum([branches, alpha], reduced_dims=[heads_dim])


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class BranchedEncDecAttention(EncDecMixin, BranchedSelfAttention):
    """Encoder-decoder attention as a weighted sum of branches, one per head."""

"""The feed-forward layer, and layers side by side."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.transformer.transformer import TransformerLayer
from mesh_tensorflow.transformer.transformer_layers._attention.self_attention import SelfAttention

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class DenseReluDense(TransformerLayer):
    """Two dense layers with a hidden dimension `d_ff` and an activation between them.

    Variables are `wi/kernel` and `wo/kernel`; `wi_0/kernel`, `wi_1/kernel`, ... for gated units.
    """

    def __init__(
        self,
        hidden_size: int = 4096,
        dropout_rate: float = 0.0,
        activation: Union[str, list] = "relu",
        use_bias: bool = False,
    ) -> None:
        """Creates the layer.

        Args:
          hidden_size: an integer.
          dropout_rate: the dropout rate of the hidden units; all positions share one dropout mask.
          activation: the name of a function of mtf, or a list of names for the product of as many
            dense layers, such as ["gelu", "linear"]; Shazeer, "GLU variants improve transformer"
            (2020).
          use_bias: a bool.
        """
        self.hidden_size = hidden_size
        self.dropout_rate = dropout_rate
        self.activation = activation
        self.use_bias = use_bias

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the output of the layer.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` when decoding.
          losses: not used.

        Returns:
          A Tensor of the same shape.
        """
        del losses
        io = x.shape.dims[-1]
        hidden = mtf.Dimension("d_ff", self.hidden_size)
        options = {
            "use_bias": self.use_bias,
            "variable_dtype": context.variable_dtype,
            "expert_dims": context.model.ensemble_dims,
        }
        h = layers.dense_product(
            x,
            reduced_dims=[io],
            new_dims=hidden,
            activation_functions=self.activation,
            name="wi",
            **options,
        )
        if context.train and self.dropout_rate:
            noise_shape = mtf.Shape([d for d in h.shape if d != context.length_dim])
            h = mtf.dropout(h, True, rate=self.dropout_rate, noise_shape=noise_shape)
        return layers.dense(h, io, reduced_dims=[hidden], name="wo", **options)


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class ParallelLayer(TransformerLayer):
    """The sum of n layers of the same input, divided by sqrt(n).

    Variables are in the scopes `parallel_layer_0`, `parallel_layer_1`, ...
    """

    def __init__(
        self,
        layer_classes: Sequence[Any] = (DenseReluDense, SelfAttention),
        use_scope: bool = True,
    ) -> None:
        """Creates the layers.

        Args:
          layer_classes: a list of layer classes, or of other callables without arguments.
          use_scope: whether each layer has its own variable scope; if not, variables of the same
            name are shared.
        """
        self.layer_classes = [cls() for cls in layer_classes]
        self.use_scope = use_scope

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the output of the layer.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` when decoding.
          losses: not used.

        Returns:
          A Tensor of the same shape.
        """
        del losses
        outputs = []
        for i, layer in enumerate(self.layer_classes):
            scope: Any = contextlib.nullcontext()
            if self.use_scope:
                scope = tf.variable_scope(f"parallel_layer_{i}")
            with scope:
                outputs.append(layer.call(context, x))
        # The sum of n independent outputs of variance 1 has the variance n.
        return mtf.add_n(outputs) * (1.0 / math.sqrt(len(outputs)))

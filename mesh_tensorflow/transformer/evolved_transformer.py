"""Layers of the Evolved Transformer.

See So, Liang and Le, "The evolved transformer" (2019). A block of its encoder is
GatedLinearUnitLayer, EncoderConvolutionalLayer, SelfAttention and DenseReluDense; one of its
decoder is DecoderAttentionLayer, DecoderConvolutionalLayer, SelfAttention, EncDecAttention and
DenseReluDense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.transformer import transformer, transformer_layers
from mesh_tensorflow.transformer.transformer._context import dropout_of

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = [
    "DecoderAttentionLayer",
    "DecoderConvolutionalLayer",
    "EncoderConvolutionalLayer",
    "GatedLinearUnitLayer",
]

_MODULE = "mesh_tensorflow.transformer.evolved_transformer"


def _renamed(x: mtf.Tensor, name: str) -> mtf.Tensor:
    return mtf.rename_dimension(x, x.shape.dims[-1].name, name)


def _unsplit(x: mtf.Tensor) -> mtf.Tensor:
    """Renames the last dimension of `x` so that no layout splits it."""
    return _renamed(x, f"_{x.shape.dims[-1].name}_unsplit")


def _pad_channels(x: mtf.Tensor, size: int) -> mtf.Tensor:
    """Pads the last dimension of `x` with zeros to `size`."""
    whole, dim = _unsplit(x), x.shape.dims[-1]
    # No layout may split what is padded, hence the other name.
    padded = mtf.pad(whole, [0, size - dim.size], whole.shape.dims[-1].name)
    return _renamed(padded, dim.name)


def _call_separable(
    layer: transformer_layers.SeparableConv1DLayer,
    context: Context,
    x: mtf.Tensor,
    losses: Optional[list[mtf.Tensor]],
) -> mtf.Tensor:
    """Calls a separable convolution, whose kernel dimensions are both named like the channels."""
    return _renamed(layer.call(context, _unsplit(x), losses), x.shape.dims[-1].name)


def _separable_convolution(
    first: int, last: int, output_size: int, scale: float, activation: str = "linear"
) -> transformer_layers.SeparableConv1DLayer:
    return transformer_layers.SeparableConv1DLayer(
        min_relative_pos=first,
        max_relative_pos=last,
        output_size=output_size,
        depthwise_filter_initializer_scale=scale,
        pointwise_filter_initializer_scale=scale,
        activation=activation,
    )


@gin.configurable(module=_MODULE)
class GatedLinearUnitLayer(transformer.TransformerLayer):
    """Gated linear unit: the product of a dense layer and the sigmoid of another."""

    def call(self, context: Context, x: mtf.Tensor, losses: Optional[list] = None) -> mtf.Tensor:
        """Returns the output of the layer; see TransformerLayer.call."""
        del losses
        return layers.dense_product(
            x,
            reduced_dims=x.shape.dims[-1:],
            new_dims=x.shape.dims[-1:],
            activation_functions=["linear", "sigmoid"],
            variable_dtype=context.variable_dtype,
            name="glu",
            expert_dims=context.model.ensemble_dims,
        )


@gin.configurable(module=_MODULE)
class EncoderConvolutionalLayer(transformer.TransformerLayer):
    """A dense and a convolutional branch, and a separable convolution of their sum."""

    def __init__(
        self,
        d_model: int,
        dropout_rate: float,
        initializer_scale: float = 1.0,
        norm_epsilon: float = 1e-6,
    ):
        """Creates the layer.

        Args:
          d_model: an integer; the output size of the convolutions is half of it.
          dropout_rate: the share of elements that are dropped in training, from 0 to less than 1.
          initializer_scale: the variance scale of the separable convolution's initializers.
          norm_epsilon: a number, the epsilon of the layer norm.
        """
        self._dropout_rate = dropout_rate
        self._norm_epsilon = norm_epsilon
        self._conv3x1 = transformer_layers.Conv1DLayer(
            filter_size=3, output_size=d_model // 2, activation="relu"
        )
        # From 4 positions before to 4 after: unlike a decoder, an encoder may look ahead.
        self._sep_conv9x1 = _separable_convolution(-4, 4, d_model // 2, initializer_scale)

    def call(self, context: Context, x: mtf.Tensor, losses: Optional[list] = None) -> mtf.Tensor:
        """Returns the output of the layer; see TransformerLayer.call."""
        model_dim = x.shape.dims[-1]
        # By the name that the convolution beside it gives its output, as both are added.
        hidden_dim = mtf.Dimension(model_dim.name, 4 * model_dim.size)
        with tf.variable_scope("conv1x1"):
            inner = _renamed(x, f"_{model_dim.name}")  # a layout must not split both sides
            wide = layers.dense(
                inner,
                hidden_dim,
                reduced_dims=inner.shape.dims[-1:],
                activation=mtf.relu,
                use_bias=False,
                variable_dtype=context.variable_dtype,
                expert_dims=context.model.ensemble_dims,
            )
            wide = dropout_of(wide, context, self._dropout_rate)
        with tf.variable_scope("conv3x1"):
            narrow = self._conv3x1.call(context, x, losses)
            narrow = dropout_of(narrow, context, self._dropout_rate)
            # Branches of different sizes are added: zeros fill the smaller one up.
            narrow = _pad_channels(narrow, hidden_dim.size)
        y = layers.layer_norm(wide + narrow, hidden_dim, self._norm_epsilon)
        with tf.variable_scope("sep_conv9x1"):
            y = _call_separable(self._sep_conv9x1, context, y, losses)
            y = dropout_of(y, context, self._dropout_rate)
            return _pad_channels(y, model_dim.size)


@gin.configurable(module=_MODULE)
class DecoderAttentionLayer(transformer.TransformerLayer):
    """The sum of self-attention and encoder-decoder attention."""

    def __init__(self, base_num_heads: int):
        """Creates the layer.

        Args:
          base_num_heads: an integer, the number of heads of encoder-decoder attention;
            self-attention has twice as many.
        """
        self._self_attention = transformer_layers.SelfAttention(num_heads=2 * base_num_heads)
        self._enc_dec_attention = transformer_layers.EncDecAttention(num_heads=base_num_heads)

    def call(self, context: Context, x: mtf.Tensor, losses: Optional[list] = None) -> mtf.Tensor:
        """Returns the output of the layer; see TransformerLayer.call."""
        with tf.variable_scope("self_attention"):
            # In this order in every mode, as states of decoding are told apart by it.
            own = self._self_attention.call(context, x, losses)
        with tf.variable_scope("enc_dec_attention"):
            return own + self._enc_dec_attention.call(context, x, losses)


@gin.configurable(module=_MODULE)
class DecoderConvolutionalLayer(transformer.TransformerLayer):
    """Two causal separable convolutions, and a third one of their sum."""

    def __init__(
        self,
        d_model: int,
        dropout_rate: float,
        initializer_scale: float = 1.0,
        norm_epsilon: float = 1e-6,
    ):
        """Creates the layer.

        Args:
          d_model: an integer, the size of the output.
          dropout_rate: the share of elements that are dropped in training, from 0 to less than 1.
          initializer_scale: the variance scale of the convolutions' initializers.
          norm_epsilon: a number, the epsilon of the layer norm.
        """
        self._d_model = d_model
        self._dropout_rate = dropout_rate
        self._norm_epsilon = norm_epsilon
        scale = initializer_scale
        # Filters end at the current position, so that no position sees a later one.
        self._sep_conv11x1 = _separable_convolution(-10, 0, 2 * d_model, scale, "relu")
        self._sep_conv7x1_1 = _separable_convolution(-6, 0, d_model // 2, scale)
        self._sep_conv7x1_2 = _separable_convolution(-6, 0, d_model, scale)

    def call(self, context: Context, x: mtf.Tensor, losses: Optional[list] = None) -> mtf.Tensor:
        """Returns the output of the layer; see TransformerLayer.call."""

        def convolution(
            name: str, layer: transformer_layers.SeparableConv1DLayer, inputs: mtf.Tensor
        ) -> mtf.Tensor:
            with tf.variable_scope(name):
                y = _call_separable(layer, context, inputs, losses)
                return dropout_of(y, context, self._dropout_rate)

        wide = convolution("sep_conv11x1", self._sep_conv11x1, x)
        narrow = convolution("sep_conv7x1_1", self._sep_conv7x1_1, x)
        # As in the encoder, a sum of branches whose sizes differ.
        y = wide + _pad_channels(narrow, 2 * self._d_model)
        y = layers.layer_norm(y, y.shape.dims[-1], self._norm_epsilon)
        return convolution("sep_conv7x1_2", self._sep_conv7x1_2, y)

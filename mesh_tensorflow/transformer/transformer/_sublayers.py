"""Sublayers, which a stack applies around its layers: normalization, residuals, dropout, masks.

Megatron's sequence parallelism (Korthikanti et al., "Reducing activation recomputation in large
transformer models", 2022) splits by position what tensor parallelism repeats on each processor:
residuals, normalization and dropout between layers. A tensor cannot have its length split where
layers need it whole, so the stream has the name `residual_length`, which a rule of its own splits.

A sublayer takes a Tensor, the layer stack and the Context, and returns a Tensor of the same shape.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.ops._variables.variable import widened
from mesh_tensorflow.transformer.transformer._context import Context, nonpadding_of

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import TransformerLayer
    from mesh_tensorflow.transformer.transformer._stack import LayerStack


RESIDUAL_LENGTH = "residual_length"


def has_residual_length(x: mtf.Tensor) -> bool:
    """Returns whether `x` is a residual stream under the name of its own."""
    return RESIDUAL_LENGTH in x.shape.dimension_names


def to_length(x: mtf.Tensor, length_name: str) -> mtf.Tensor:
    """Gives positions the name that layers know; gathers them if `residual_length` is split."""
    if not has_residual_length(x):
        return x
    return mtf.rename_dimension(x, RESIDUAL_LENGTH, length_name)


def to_residual_length(x: mtf.Tensor, length_name: str) -> mtf.Tensor:
    """Gives positions the name of the residual stream; a partial sum is reduce-scattered.

    Steps of decoding, which have no length, stay as they are.
    """
    if length_name not in x.shape.dimension_names:
        return x
    return mtf.rename_dimension(x, length_name, RESIDUAL_LENGTH)


_MODULE = "mesh_tensorflow.transformer.transformer"


@gin.configurable(module=_MODULE)
def sublayer_call_layer(
    x: mtf.Tensor, layer_stack: TransformerLayer, context: Context
) -> mtf.Tensor:
    """Sets padding to zero, then calls the layer in the variable scope of its class name.

    Args:
      x: a Tensor with dimensions [batch..., length, d_model]; of a stack with `sequence_parallel`,
        [batch..., residual_length, d_model], which the layer sees as its length.
      layer_stack: a LayerStack.
      context: the Context of this call of the model: its mode, positions, states and losses.
    """
    x = sublayer_mask_padding(x, layer_stack, context)
    layer = context.current_layer
    with tf.variable_scope(type(layer).__name__):
        if not has_residual_length(x):
            return layer.call(context, x)
        length_name = context.length_dim.name
        # The layer gets all positions; what it returns may be a partial sum, which is
        # reduce-scattered.
        return to_residual_length(layer.call(context, to_length(x, length_name)), length_name)


@gin.configurable(module=_MODULE)
def sublayer_mask_padding(
    x: mtf.Tensor, layer_stack: TransformerLayer, context: Context
) -> mtf.Tensor:
    """Sets padding to zero; returns `x` itself if the Context has no padding.

    Args:
      x: a Tensor with dimensions [batch..., length, d_model].
      layer_stack: a LayerStack.
      context: a Context; its `sequence_id` is 0 at padding.
    """
    del layer_stack
    nonpadding = nonpadding_of(context)
    if not isinstance(nonpadding, mtf.Tensor):
        return x
    if has_residual_length(x):
        # Under the other name, the product would have the length twice.
        nonpadding = to_residual_length(nonpadding, context.length_dim.name)
    return x * nonpadding


def _scale(context: Context, dims: list[mtf.Dimension]) -> mtf.Tensor:
    """Returns a variable `scale`, initialized to ones, for each member of the ensemble."""
    return mtf.get_variable(
        context.mesh,
        "scale",
        mtf.Shape([*context.model.ensemble_dims, *dims]),
        initializer=tf.ones_initializer(),
        dtype=context.variable_dtype,
    )


def _scaled_by_rms(
    x: mtf.Tensor,
    context: Context,
    epsilon: float,
    name: str,
    scale_dims: Optional[list[mtf.Dimension]] = None,
    channels: Optional[int] = None,
) -> mtf.Tensor:
    """Divides by the root mean square along d_model, and multiplies by a variable.

    Args:
      x: a Tensor with dimensions [..., d_model].
      context: the Context of this call of the model: its mode, positions, states and losses.
      epsilon: a number that is added to the mean square.
      name: a string, the variable scope.
      scale_dims: the dimensions of the variable; d_model if None.
      channels: the number of channels in the mean, counted from the first; all if None.
    """
    model_dim = context.model.model_dim
    # In a mixed precision, a mean over d_model in bfloat16 would lose most of its digits.
    wide = widened(x)
    with tf.variable_scope(name):
        scale = _scale(context, [model_dim] if scale_dims is None else scale_dims)
        some = wide if channels is None else mtf.slice(wide, 0, channels, model_dim.name)
        reduced = some.shape.get_dim_by_name(model_dim.name)
        mean_square = mtf.reduce_mean(mtf.square(some), reduced_dim=reduced)
    return mtf.cast(wide * mtf.rsqrt(mean_square + epsilon), x.dtype) * scale


@gin.configurable(module=_MODULE)
def sublayer_rms_norm(
    x: mtf.Tensor,
    layer_stack: TransformerLayer,
    context: Context,
    epsilon: float = 1e-6,
    name: str = "rms_norm",
) -> mtf.Tensor:
    """Applies RMS normalization: without subtracting the mean, and without a bias.

    Zhang and Sennrich, "Root mean square layer normalization" (2019). The variable is
    `name/scale`.

    Args:
      x: a Tensor with dimensions [..., d_model].
      layer_stack: a LayerStack.
      context: the Context of this call of the model: its mode, positions, states and losses.
      epsilon: a number that is added to the mean square.
      name: a string, the variable scope.
    """
    del layer_stack
    return _scaled_by_rms(x, context, epsilon, name)


@gin.configurable(module=_MODULE)
def sublayer_scale_norm(
    x: mtf.Tensor,
    layer_stack: TransformerLayer,
    context: Context,
    epsilon: float = 1e-6,
    name: str = "scale_norm",
) -> mtf.Tensor:
    """Applies RMS normalization with one scale for all channels.

    Nguyen and Salazar, "Transformers without tears" (2019). The variable is `name/scale`.

    Args:
      x: a Tensor with dimensions [..., d_model].
      layer_stack: a LayerStack.
      context: the Context of this call of the model: its mode, positions, states and losses.
      epsilon: a number that is added to the mean square.
      name: a string, the variable scope.
    """
    del layer_stack
    return _scaled_by_rms(x, context, epsilon, name, scale_dims=[])


@gin.configurable(module=_MODULE)
def sublayer_rms_norm_subsampled(
    x: mtf.Tensor,
    layer_stack: TransformerLayer,
    context: Context,
    percentage: float = 100.0,
    epsilon: float = 1e-6,
) -> mtf.Tensor:
    """Applies RMS normalization with the root mean square of the first channels only.

    Zhang and Sennrich, "Root mean square layer normalization" (2019), section 3.1. The variable
    is `layer_norm_subsampled/scale`.

    Args:
      x: a Tensor with dimensions [..., d_model].
      layer_stack: a LayerStack.
      context: the Context of this call of the model: its mode, positions, states and losses.
      percentage: the percentage of the channels in the mean, above 0 and at most 100.
      epsilon: a number that is added to the mean square.

    Raises:
      ValueError: `percentage` is out of range.
    """
    del layer_stack
    if not 0.0 < percentage <= 100.0:
        raise ValueError(
            "sublayer_rms_norm_subsampled: percentage must be above 0 and at most 100, got "
            f"{percentage}"
        )
    channels = math.ceil(context.model.model_dim.size * percentage / 100.0)
    return _scaled_by_rms(x, context, epsilon, "layer_norm_subsampled", channels=channels)


@gin.configurable(module=_MODULE)
def sublayer_true_layer_norm(
    x: mtf.Tensor, layer_stack: TransformerLayer, context: Context, epsilon: float = 1e-6
) -> mtf.Tensor:
    """Applies `mtf.layers.layer_norm`, with mean and bias, in the scope `true_layer_norm`.

    Args:
      x: a Tensor with dimensions [..., d_model].
      layer_stack: a LayerStack.
      context: the Context of this call of the model: its mode, positions, states and losses.
      epsilon: a number that is added to the variance.
    """
    del layer_stack
    with tf.variable_scope("true_layer_norm"):
        return layers.layer_norm(x, context.model.model_dim, epsilon)


@gin.configurable(module=_MODULE)
def sublayer_residual(x: mtf.Tensor, layer_stack: TransformerLayer, context: Context) -> mtf.Tensor:
    """Adds the residual: the input of the layer before its sublayers.

    Args:
      x: a Tensor with dimensions [..., d_model].
      layer_stack: a LayerStack.
      context: the Context of this call of the model: its mode, positions, states and losses.
    """
    del layer_stack
    return x + context.current_layer_input


@gin.configurable(module=_MODULE)
def sublayer_rezero(
    x: mtf.Tensor, layer_stack: TransformerLayer, context: Context, initial_value: float = 0.0
) -> mtf.Tensor:
    """Multiplies by a scalar variable `rezero_weight`.

    Bachlechner et al., "ReZero is all you need: fast convergence at large depth" (2020).

    Args:
      x: a Tensor.
      layer_stack: a LayerStack.
      context: the Context of this call of the model: its mode, positions, states and losses.
      initial_value: the initial value of the variable.
    """
    del layer_stack
    weight = mtf.get_variable(
        context.mesh,
        "rezero_weight",
        mtf.Shape(context.model.ensemble_dims),
        initializer=tf.constant_initializer(initial_value),
        dtype=context.variable_dtype,
    )
    return x * weight


def _noise_shape(context: Context) -> mtf.Shape:
    """Returns the noise shape of dropout, which broadcasts along the length."""
    return mtf.Shape([*context.batch_dims, context.model.model_dim])


@gin.configurable(module=_MODULE)
def sublayer_dropout(
    x: mtf.Tensor, layer_stack: TransformerLayer, context: Context, dropout_rate: float = 0.0
) -> mtf.Tensor:
    """Applies dropout in training, with the same noise at all positions.

    Args:
      x: a Tensor with dimensions [batch..., length, d_model].
      layer_stack: a LayerStack.
      context: the Context of this call of the model: its mode, positions, states and losses.
      dropout_rate: a number, at least 0 and below 1.
    """
    del layer_stack
    if not context.train or dropout_rate == 0.0:
        return x
    return mtf.dropout(x, context.train, rate=dropout_rate, noise_shape=_noise_shape(context))


@gin.configurable(module=_MODULE)
def sublayer_annealed_dropout(
    x: mtf.Tensor,
    layer_stack: TransformerLayer,
    context: Context,
    init_dropout_rate: float = 0.0,
    start_step: Optional[int] = None,
    end_step: Optional[int] = None,
) -> mtf.Tensor:
    """Applies dropout in training, at a rate that decreases to 0 between two steps.

    Args:
      x: a Tensor with dimensions [batch..., length, d_model].
      layer_stack: a LayerStack.
      context: the Context of this call of the model: its mode, positions, states and losses.
      init_dropout_rate: a number, the rate until `start_step`.
      start_step: an integer.
      end_step: an integer, the first step without dropout.

    Raises:
      ValueError: `start_step` or `end_step` is None.
    """
    del layer_stack
    if start_step is None or end_step is None:
        raise ValueError(
            "sublayer_annealed_dropout: start_step and end_step must be set, got "
            f"start_step={start_step}, end_step={end_step}; bind them with gin"
        )
    if not context.train:
        return x
    return layers.annealed_dropout(
        x,
        context.train,
        start_step,
        end_step,
        init_rate=init_dropout_rate,
        noise_shape=_noise_shape(context),
    )


@gin.configurable(module=_MODULE)
def sublayer_clip_activation_gradient(
    x: mtf.Tensor, layer_stack: TransformerLayer, context: Context, rms_norm: float = 1.0
) -> mtf.Tensor:
    """Clips the root mean square of the gradient of `x`.

    Args:
      x: a Tensor.
      layer_stack: a LayerStack.
      context: the Context of this call of the model: its mode, positions, states and losses.
      rms_norm: the maximum root mean square of the gradient.
    """
    del layer_stack, context
    return layers.clip_activation_gradient(x, rms_norm)


@gin.configurable(module=_MODULE)
def sublayer_legacy_rms_norm(
    x: mtf.Tensor, layer_stack: TransformerLayer, context: Context
) -> mtf.Tensor:
    """Applies `sublayer_rms_norm` in the scope `layer_norm`, the name in T5's checkpoints.

    The epsilon is that of `sublayer_rms_norm`, which gin may bind, not the stack's `norm_epsilon`.

    Args:
      x: a Tensor with dimensions [..., d_model].
      layer_stack: a LayerStack.
      context: the Context of this call of the model: its mode, positions, states and losses.
    """
    return sublayer_rms_norm(x, layer_stack, context, name="layer_norm")


@gin.configurable(module=_MODULE)
def sublayer_legacy_final_rms_norm(
    x: mtf.Tensor, layer_stack: TransformerLayer, context: Context
) -> mtf.Tensor:
    """Applies `sublayer_rms_norm` in the scope `final_layer_norm`.

    Args:
      x: a Tensor with dimensions [..., d_model].
      layer_stack: a LayerStack.
      context: the Context of this call of the model: its mode, positions, states and losses.
    """
    return sublayer_rms_norm(x, layer_stack, context, name="final_layer_norm")


@gin.configurable(module=_MODULE)
def sublayer_legacy_dropout(x: mtf.Tensor, layer_stack: LayerStack, context: Context) -> mtf.Tensor:
    """Applies `sublayer_dropout` at the stack's `dropout_rate`.

    Args:
      x: a Tensor with dimensions [batch..., length, d_model].
      layer_stack: a LayerStack.
      context: the Context of this call of the model: its mode, positions, states and losses.
    """
    return sublayer_dropout(x, layer_stack, context, dropout_rate=layer_stack.dropout_rate)

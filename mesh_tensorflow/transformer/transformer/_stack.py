"""Stacks of layers, and the sublayers around each layer: normalization, residuals, dropout, masks.

Megatron's sequence parallelism (Korthikanti et al., "Reducing activation recomputation in large
transformer models", 2022) splits by position what tensor parallelism repeats on each processor:
residuals, normalization and dropout between layers. A tensor cannot have its length split where
layers need it whole, so the stream has the name `residual_length`, which a rule of its own splits.

A sublayer takes a Tensor, the layer stack and the Context, and returns a Tensor of the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.ops._random import drops
from mesh_tensorflow.ops._variable import widened
from mesh_tensorflow.transformer.transformer._context import (
    Context,
    TransformerLayer,
    nonpadding_of,
)

# -- sublayers


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


def concat_channels(xs: Sequence[mtf.Tensor]) -> mtf.Tensor:
    """Concatenates Tensors along their last dimension, under a name that no layout splits."""
    # Parts of what is joined are not where those of the whole are.
    name = f"_{xs[0].shape.dims[-1].name.lstrip('_')}_concat"
    whole = [mtf.rename_dimension(x, x.shape.dims[-1].name, name) for x in xs]
    return mtf.concat(whole, name)


def joined_channels(xs: Sequence[mtf.Tensor]) -> mtf.Tensor:
    """Concatenates Tensors along their last dimension, which a layout may split."""
    joined = concat_channels(xs)
    return mtf.rename_dimension(joined, joined.shape.dims[-1].name, xs[0].shape.dims[-1].name)


# The public path, by which gin files may name these functions, whichever file they are in.
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


def _scale(context: Context, dims: list[mtf.Dimension], unit_offset: bool = False) -> mtf.Tensor:
    """Returns ones at first, of a variable `scale` for each member of the ensemble.

    With `unit_offset` the variable begins as zeros, to which 1 is added: weight decay then pulls
    the scale to 1, not to 0.
    """
    scale = mtf.get_variable(
        context.mesh,
        "scale",
        mtf.Shape([*context.model.ensemble_dims, *dims]),
        initializer=tf.zeros_initializer() if unit_offset else tf.ones_initializer(),
        dtype=context.variable_dtype,
    )
    return scale + 1.0 if unit_offset else scale


def _scaled_by_rms(
    x: mtf.Tensor,
    context: Context,
    epsilon: float,
    name: str,
    scale_dims: Optional[list[mtf.Dimension]] = None,
    channels: Optional[int] = None,
    unit_offset: bool = False,
) -> mtf.Tensor:
    """Divides by the root mean square along d_model, and multiplies by a variable.

    Args:
      x: a Tensor with dimensions [..., d_model].
      context: the Context of this call of the model: its mode, positions, states and losses.
      epsilon: a number that is added to the mean square.
      name: a string, the variable scope.
      scale_dims: the dimensions of the variable; d_model if None.
      channels: the number of channels in the mean, counted from the first; all if None.
      unit_offset: whether the variable is what is added to a scale of 1.
    """
    model_dim = context.model.model_dim
    # In a mixed precision, a mean over d_model in bfloat16 would lose most of its digits.
    wide = widened(x)
    with tf.variable_scope(name):
        scale = _scale(context, [model_dim] if scale_dims is None else scale_dims, unit_offset)
        some, reduced = wide, model_dim.name
        if channels is not None:
            # Under a name without a rule, since the first channels may all be on one processor.
            reduced = f"_{model_dim.name}_whole"
            # The scale below is still for all channels; only the mean is of the first ones.
            some = mtf.slice(
                mtf.rename_dimension(wide, model_dim.name, reduced), 0, channels, reduced
            )
        mean_square = mtf.reduce_mean(
            mtf.square(some), reduced_dim=some.shape.get_dim_by_name(reduced)
        )
    # y = x / sqrt(mean(x^2) + epsilon) * scale, with the mean over d_model.
    return mtf.cast(wide * mtf.rsqrt(mean_square + epsilon), x.dtype) * scale


@gin.configurable(module=_MODULE)
def sublayer_rms_norm(
    x: mtf.Tensor,
    layer_stack: TransformerLayer,
    context: Context,
    epsilon: float = 1e-6,
    name: str = "rms_norm",
    unit_offset: bool = False,
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
      unit_offset: whether vectors are multiplied by 1 plus the variable, which begins as zeros, as
        in Gemma.
    """
    del layer_stack
    return _scaled_by_rms(x, context, epsilon, name, unit_offset=unit_offset)


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
    # At 0, and with a residual after it, a layer begins as the identity (Bachlechner et al., 2020).
    return x * weight


def _noise_shape(context: Context) -> mtf.Shape:
    """Returns the noise shape of dropout, which broadcasts along the length."""
    # The length may have either of its two names here; a mask without it fits both.
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
    if not context.train or not drops(dropout_rate):
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


# -- stacks


# Sublayers of a stack that has a dropout_rate and a norm_epsilon.
_LEGACY_INITIAL = (sublayer_legacy_dropout,)
_LEGACY_PER_LAYER = (
    sublayer_legacy_rms_norm,
    sublayer_call_layer,
    sublayer_legacy_dropout,
    sublayer_residual,
)
_LEGACY_FINAL = (sublayer_legacy_final_rms_norm, sublayer_legacy_dropout)


@gin.configurable(module=_MODULE)
class LayerStack(TransformerLayer):
    """A sequence of layers, with sublayers around each of them.

    A layer's variables are in the scope of its name and, within it, of its class name.

    Attributes:
      recompute_grads: whether activations inside a layer are recomputed for its gradient.
    """

    def __init__(
        self,
        layers: Sequence[TransformerLayer],
        sublayers_initial: Optional[Sequence[Callable]] = None,
        sublayers_per_layer: Optional[Sequence[Callable]] = None,
        sublayers_final: Optional[Sequence[Callable]] = None,
        dropout_rate: Optional[float] = None,
        norm_epsilon: Optional[float] = None,
        recompute_grads: bool = False,
        sequence_parallel: bool = False,
        recompute_budget: Optional[float] = None,
    ) -> None:
        """Creates the stack; gin usually binds all arguments but the layers.

        Args:
          layers: a list of TransformerLayers.
          sublayers_initial: a list of sublayers, such as `sublayer_dropout`, that are applied to
            the input of the stack.
          sublayers_per_layer: a list of sublayers for each layer; `sublayer_call_layer` among
            them calls the layer.
          sublayers_final: a list of sublayers that are applied to the output of the last layer.
          dropout_rate: a number. If given with `norm_epsilon`, the sublayers and variable names
            are those of T5's public checkpoints, whatever the arguments above.
          norm_epsilon: a number.
          recompute_grads: whether the activations inside a layer are recomputed for its gradient
            instead of stored.
          sequence_parallel: whether the length has the name `residual_length` between layers, so
            that the rule `residual_length:axis` splits normalization, dropout and residuals by
            position over the axis that splits heads and d_ff, as Megatron-LM does. Sublayers, and
            `context.layer_outputs` but for the last, then have this name.
          recompute_budget: how many bytes of activations a processor may store for gradients, with
            the model's layout: as many of the last layers as fit store theirs, and the others are
            recomputed. If None, `recompute_grads` is for all of them. See `mtf.RecomputeBudget`.

        Raises:
          ValueError: only one of `dropout_rate` and `norm_epsilon` is given.
        """
        if (dropout_rate is None) != (norm_epsilon is None):
            raise ValueError(
                f"{type(self).__name__}: dropout_rate={dropout_rate} and norm_epsilon="
                f"{norm_epsilon} must both be given, for sublayers under the legacy names, or "
                "both be None, for sublayers_initial, sublayers_per_layer and sublayers_final"
            )
        self._layers = list(layers)
        self._recompute_grads = recompute_grads
        self._recompute_budget = recompute_budget
        self.sequence_parallel = sequence_parallel
        self.dropout_rate = dropout_rate
        self.norm_epsilon = norm_epsilon
        if dropout_rate is not None:
            sublayers_initial = _LEGACY_INITIAL
            sublayers_per_layer = _LEGACY_PER_LAYER
            sublayers_final = _LEGACY_FINAL
        self._sublayers_initial = sublayers_initial
        self._sublayers_per_layer = sublayers_per_layer
        self._sublayers_final = sublayers_final

    def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Calls the layers, and appends their outputs to `context.layer_outputs`.

        These are the input after its sublayers, the output of each layer but the last, and the
        output of the stack.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model].

        Returns:
          A Tensor of the same shape, zero at padding.

        Raises:
          ValueError: the sublayers are not set.
        """
        x = self._begin(context, x)
        budget = self._budget_of(context)
        for i, layer in enumerate(self._layers):
            x = self._call_layer(context, layer, x, budget)
            # The last output counts with the final sublayers, so it is appended after these.
            if i < self.num_layers - 1:
                context.layer_outputs.append(x)
            context.layer_index += 1
        return self._finish(context, x)

    @property
    def recompute_grads(self) -> bool:
        """Whether activations inside a layer are recomputed for its gradient; may be set."""
        return self._recompute_grads

    @recompute_grads.setter
    def recompute_grads(self, value: bool) -> None:
        self._recompute_grads = value

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self._layers)

    @property
    def layers(self) -> list[TransformerLayer]:
        """The layers."""
        return self._layers

    def _begin(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        if self.sequence_parallel:
            # First, so that the sublayers work on each processor's part of the stream.
            x = to_residual_length(x, context.length_dim.name)
        x = self._call_sublayers(self._sublayers_of("sublayers_initial"), x, context)
        context.layer_outputs.append(x)
        return x

    def _finish(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        x = self._call_sublayers(self._sublayers_of("sublayers_final"), x, context)
        # While the stream still has the name of its own, so that each processor masks its part.
        x = sublayer_mask_padding(x, self, context)
        if self.sequence_parallel:
            x = to_length(x, context.length_dim.name)
        context.layer_outputs.append(x)
        return x

    def _sublayers_of(self, which: str) -> Sequence[Callable]:
        sublayers = getattr(self, f"_{which}")
        if sublayers is None:
            raise ValueError(
                f"{type(self).__name__}: {which} is None; give a list (an empty one for none), "
                f"for instance with gin ({type(self).__name__}.{which} = [...])"
            )
        return sublayers

    # The next two have the names and arguments of the classic, whose users override them.

    def _call_sublayers(
        self, sublayers: Sequence[Callable], x: mtf.Tensor, context: Context
    ) -> mtf.Tensor:
        """Calls sublayers, one after another."""
        for sublayer in sublayers:
            x = sublayer(x, self, context)
        return x

    def _layer_fn(self, x: mtf.Tensor, layer: TransformerLayer, context: Context) -> mtf.Tensor:
        """Calls a layer with its sublayers."""
        context.current_layer = layer
        # Before the sublayers, of which a norm is usually the first: the residual goes past it.
        context.current_layer_input = x
        y = self._call_sublayers(self._sublayers_of("sublayers_per_layer"), x, context)
        if y.shape != x.shape:
            raise ValueError(
                f"{type(self).__name__}: layer {layer.name} ({type(layer).__name__}), with its "
                f"sublayers, returned {y.name} {y.shape} for an input {x.name} {x.shape}; a layer "
                "must return the dimensions that it is given, in their order (mtf.transpose)"
            )
        return y

    def _recomputes(self, context: Context) -> bool:
        return self.recompute_grads and context.train

    def _budget_of(self, context: Context) -> Optional[mtf.RecomputeBudget]:
        if self._recompute_budget is None or not context.train:
            return None
        layout, mesh_shape = context.model.layout, context.model.mesh_shape
        # Without both the budget is that of one processor with all of the activations.
        is_known = layout is not None and mesh_shape is not None
        where = (layout, mesh_shape) if is_known else (None, None)
        return mtf.RecomputeBudget(self._recompute_budget, *where)

    def _check_no_budget(self) -> None:
        if self._recompute_budget is not None:
            raise ValueError(
                f"{type(self).__name__}: recompute_budget is for LayerStack alone; set "
                "recompute_grads, or leave recompute_budget out"
            )

    def _call_layer(
        self,
        context: Context,
        layer: TransformerLayer,
        x: mtf.Tensor,
        budget: Optional[mtf.RecomputeBudget],
    ) -> mtf.Tensor:
        with tf.variable_scope(layer.name or ""):
            if budget is None and not self._recomputes(context):
                return self._layer_fn(x, layer, context)
            shared = _Shared(context)
            # What a layer adds to the Context is recomputed, too, so it has to be an output.
            # The layer comes before `found` in the list: what it finds is what the layer has added.
            outputs = mtf.recompute_grad(
                lambda x: [self._layer_fn(x, layer, context), *shared.found()],
                [x],
                budget=budget,
            )
            shared.replace(outputs[1:])
            return outputs[0]


class _Shared:
    """Tensors that a layer adds to the Context, inside a function that is to be recomputed.

    They must be outputs of the function, or else their later uses would keep the layer's
    activations alive.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        # A user's context may have none of them.
        lists = [getattr(context, name, None) for name in ("losses", "routings")]
        self._lists = [values for values in lists if values is not None]
        self._cache = getattr(context, "cache", {})
        self._mixes = self._mixes_now()
        self._lengths = [len(values) for values in self._lists]
        # Copies and numbers, as layers change the lists and dictionaries of the Context in place.
        self._cached = dict(self._cache)
        self._known = set(context.mesh.graph.operations)

    def found(self) -> list[mtf.Tensor]:
        """Returns the Tensors added since this object was created."""
        return [t for t in self._values() if self._is_new(t)]

    def replace(self, tensors: Sequence[mtf.Tensor]) -> None:
        """Replaces the added Tensors by outputs of the function."""
        # In the order in which the function has returned them, as nothing was added since.
        mapping = dict(zip(self.found(), tensors))

        def replaced(values: Any) -> Any:
            return tf.nest.map_structure(
                lambda v: mapping.get(v, v) if isinstance(v, mtf.Tensor) else v, values
            )

        for key in self._new_keys():
            self._cache[key] = replaced(self._cache[key])
        if self._mixes_now() is not self._mixes:
            self._context.decoder_layers_per_module = replaced(self._mixes_now())
        for values, length in zip(self._lists, self._lengths):
            # In place, as the model reads the lists that it has given to the Context.
            values[length:] = replaced(values[length:])

    def _mixes_now(self) -> Optional[list[mtf.Tensor]]:
        """Returns what the first TransparentEncDecAttention makes for all of them."""
        return getattr(self._context, "decoder_layers_per_module", None)

    def _new_keys(self) -> list:
        return [k for k, v in self._cache.items() if self._cached.get(k) is not v]

    def _values(self) -> list:
        added = [values[length:] for values, length in zip(self._lists, self._lengths)]
        cached = [self._cache[key] for key in self._new_keys()]
        mixes = self._mixes_now()
        return tf.nest.flatten([added, cached, [] if mixes is self._mixes else mixes])

    def _is_new(self, value: object) -> bool:
        # A Tensor from before the layer is none of its outputs, even where the layer puts it into
        # the Context.
        return isinstance(value, mtf.Tensor) and value.operation not in self._known


@gin.configurable(module=_MODULE)
class ReversibleLayerStack(LayerStack):
    """Reversible layers on two streams: inputs of a layer are recomputed from its outputs.

    Gomez et al., "The reversible residual network: backpropagation without storing activations"
    (2017). With `recompute_grads`, the memory used in training does not grow with the number of
    layers; without it, activations are stored as usual.
    """

    def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Calls the layers, and appends to `context.layer_outputs` as LayerStack does.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model].

        Returns:
          A Tensor of the same shape, the sum of the two streams, zero at padding.

        Raises:
          ValueError: the sublayers are not set; or, with `recompute_grads`, a layer adds
            Tensors to the Context, which cannot be recomputed.
        """
        self._check_no_budget()
        x = self._begin(context, x)
        # Both streams begin as the input; a first step has no Tensors of a step before it.
        streams: Any = [x, None, x, None]
        for i, layer in enumerate(self._layers):
            with tf.variable_scope(layer.name or ""):
                # (a, b) becomes (b, a + f(b)), from which a can be computed again (Gomez et al.,
                # 2017).
                streams = layers.reversible_half_residual_and_swap(
                    *streams,
                    f=lambda x, layer=layer: self._branch(context, layer, x),
                    recompute_grads=self._recomputes(context),
                )
            if i < self.num_layers - 1:
                # The swap has put what this layer changed into the second stream.
                context.layer_outputs.append(streams[2])
            context.layer_index += 1
        return self._finish(context, streams[0] + streams[2])

    def _branch(self, context: Context, layer: TransformerLayer, x: mtf.Tensor) -> mtf.Tensor:
        shared = _Shared(context)
        y = self._layer_fn(x, layer, context)
        if self._recomputes(context) and shared.found():
            raise ValueError(
                f"ReversibleLayerStack: the layer {layer.name} ({type(layer).__name__}) leaves "
                f"{shared.found()} in context.losses or context.cache, which cannot be computed "
                "again from the streams; use recompute_grads=False, or a LayerStack"
            )
        return y

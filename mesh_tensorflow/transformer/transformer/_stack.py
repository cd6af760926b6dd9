"""Stacks of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers as mtf_layers
from mesh_tensorflow.transformer.transformer._context import TransformerLayer
from mesh_tensorflow.transformer.transformer._sublayers import (
    sublayer_call_layer,
    sublayer_legacy_dropout,
    sublayer_legacy_final_rms_norm,
    sublayer_legacy_rms_norm,
    sublayer_mask_padding,
    sublayer_residual,
    to_length,
    to_residual_length,
)

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["LayerStack", "ReversibleLayerStack"]

_MODULE = "mesh_tensorflow.transformer.transformer"

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
        self._sequence_parallel = sequence_parallel
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
            if i < self.num_layers - 1:
                context.layer_outputs.append(x)
            context.layer_index += 1
        return self._finish(context, x)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self._layers)

    @property
    def layers(self) -> list[TransformerLayer]:
        """The layers."""
        return self._layers

    def _begin(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        if self._sequence_parallel:
            x = to_residual_length(x, context.length_dim.name)
        x = self._with_sublayers("sublayers_initial", context, x)
        context.layer_outputs.append(x)
        return x

    def _finish(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        x = self._with_sublayers("sublayers_final", context, x)
        # While the stream still has the name of its own, so that each processor masks its part.
        x = sublayer_mask_padding(x, self, context)
        if self._sequence_parallel:
            x = to_length(x, context.length_dim.name)
        context.layer_outputs.append(x)
        return x

    def _with_sublayers(self, which: str, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        sublayers = getattr(self, f"_{which}")
        if sublayers is None:
            raise ValueError(
                f"{type(self).__name__}: {which} is None; give a list (an empty one for none), "
                f"for instance with gin ({type(self).__name__}.{which} = [...])"
            )
        for sublayer in sublayers:
            x = sublayer(x, self, context)
        return x

    def _layer_with_sublayers(
        self, context: Context, layer: TransformerLayer, x: mtf.Tensor
    ) -> mtf.Tensor:
        context.current_layer = layer
        # Before the sublayers, of which a norm is usually the first: the residual goes past it.
        context.current_layer_input = x
        y = self._with_sublayers("sublayers_per_layer", context, x)
        if y.shape != x.shape:
            raise ValueError(
                f"{type(self).__name__}: layer {layer.name} ({type(layer).__name__}), with its "
                f"sublayers, returned {y.name} {y.shape} for an input {x.name} {x.shape}; a layer "
                "must return the dimensions that it is given, in their order (mtf.transpose)"
            )
        return y

    def _recomputes(self, context: Context) -> bool:
        return self._recompute_grads and context.train

    def _budget_of(self, context: Context) -> Optional[mtf.RecomputeBudget]:
        if self._recompute_budget is None or not context.train:
            return None
        layout, mesh_shape = context.model.layout, context.model.mesh_shape
        known = layout is not None and mesh_shape is not None
        where = (layout, mesh_shape) if known else (None, None)
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
                return self._layer_with_sublayers(context, layer, x)
            shared = _Shared(context)
            outputs = mtf.recompute_grad(
                lambda x: [self._layer_with_sublayers(context, layer, x), *shared.found()],
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
        # A user's context may have neither.
        self._losses = getattr(context, "losses", None)
        self._cache = getattr(context, "cache", {})
        self._num_losses = len(self._losses or [])
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
        if self._losses is not None:
            self._losses[self._num_losses :] = replaced(self._losses[self._num_losses :])

    def _new_keys(self) -> list:
        return [k for k, v in self._cache.items() if self._cached.get(k) is not v]

    def _values(self) -> list:
        losses = (self._losses or [])[self._num_losses :]
        cached = [self._cache[key] for key in self._new_keys()]
        return tf.nest.flatten([losses, cached])

    def _is_new(self, value: object) -> bool:
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
                streams = mtf_layers.reversible_half_residual_and_swap(
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
        y = self._layer_with_sublayers(context, layer, x)
        if self._recomputes(context) and shared.found():
            raise ValueError(
                f"ReversibleLayerStack: the layer {layer.name} ({type(layer).__name__}) leaves "
                f"{shared.found()} in context.losses or context.cache, which cannot be computed "
                "again from the streams; use recompute_grads=False, or a LayerStack"
            )
        return y

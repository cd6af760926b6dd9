"""Parallel layers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer.transformer import TransformerLayer
from mesh_tensorflow.transformer.transformer_layers._attention.self_attention import SelfAttention
from mesh_tensorflow.transformer.transformer_layers._feed_forward import DenseReluDense

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["ParallelLayer"]


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
        return mtf.add_n(outputs) * (1.0 / math.sqrt(len(outputs)))

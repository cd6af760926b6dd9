"""Gates between a state and layer outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.transformer.universal_transformer._timing import concat_channels

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["Gates"]


class Gates:
    """The methods of `UTLayerStack` that compute gates."""

    gate_ffn_layer: str
    gating_type: str
    _norm_epsilon: float

    def _masked_norm(self, x: mtf.Tensor, mask: Union[mtf.Tensor, float]) -> mtf.Tensor:
        """Returns the layer norm of `x` with padding masked; its variables are shared."""
        return layers.layer_norm(x * mask, x.shape.dims[-1], self._norm_epsilon)

    def ffn_layer_multi_inputs(
        self,
        context: Context,
        mask: Union[mtf.Tensor, float],
        inputs_list: list[mtf.Tensor],
        ffn_layer_type: str = "dense",
        kernel_initializer: Optional[Callable[..., tf.Tensor]] = None,
        activation: Optional[Callable[[mtf.Tensor], mtf.Tensor]] = None,
        preprocess: bool = False,
        postprocess: bool = False,
    ) -> mtf.Tensor:
        """Applies a feed-forward layer to several inputs, concatenated.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          mask: a Tensor or a number, 0 at padding.
          inputs_list: a list of Tensors with dimensions [..., d_model].
          ffn_layer_type: "dense", or "dense_relu_dense" for one with a hidden layer of the
            concatenated size.
          kernel_initializer: a TensorFlow initializer, a DenseInitializer, or None.
          activation: a function of a Tensor, or None.
          preprocess: whether inputs are normalized.
          postprocess: whether the output is normalized.

        Returns:
          A Tensor with dimensions [..., d_model].

        Raises:
          ValueError: there are no inputs, or the type is unknown.
        """
        if not inputs_list:
            raise ValueError(
                "UTLayerStack: a gate has no inputs; gates_inputs must have some of 's', 't', 'i'"
            )
        if ffn_layer_type not in ("dense", "dense_relu_dense"):
            raise ValueError(
                f"UTLayerStack: gate_ffn_layer={ffn_layer_type!r} is none of 'dense', "
                "'dense_relu_dense'"
            )
        output_dim = inputs_list[0].shape.dims[-1]
        if preprocess:
            inputs_list = [self._masked_norm(x, mask) for x in inputs_list]
        x = inputs_list[0] if len(inputs_list) == 1 else concat_channels(inputs_list)
        arguments: dict[str, Any] = {
            "variable_dtype": context.variable_dtype,
            "kernel_initializer": kernel_initializer,
        }
        if ffn_layer_type == "dense_relu_dense":
            hidden_dim = mtf.Dimension("d_ff", x.shape.dims[-1].size)
            x = layers.dense(x, [hidden_dim], x.shape.dims[-1:], activation=mtf.relu, **arguments)
        y = layers.dense(x, [output_dim], x.shape.dims[-1:], activation=activation, **arguments)
        return self._masked_norm(y, mask) if postprocess else y

    def _gate(
        self, context: Context, mask: Union[mtf.Tensor, float], inputs_list: list[mtf.Tensor]
    ) -> mtf.Tensor:
        return self.ffn_layer_multi_inputs(
            context,
            mask,
            inputs_list,
            ffn_layer_type=self.gate_ffn_layer,
            activation=mtf.sigmoid,
            preprocess=True,
        )

    def gating(
        self,
        context: Context,
        x: mtf.Tensor,
        transformed_x: mtf.Tensor,
        mask: Union[mtf.Tensor, float],
    ) -> mtf.Tensor:
        """Mixes a layer's input and output by gates computed from both.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [..., d_model], the input.
          transformed_x: a Tensor of the same shape, the output.
          mask: a Tensor or a number, 0 at padding.

        Raises:
          ValueError: the stack's `gating_type` is unknown.
        """
        kinds = {"highway": self._highway_gating, "gru": self._gru_gating}
        if self.gating_type not in kinds:
            raise ValueError(
                f"UTLayerStack: gating_type={self.gating_type!r} is none of "
                f"{', '.join(map(repr, kinds))}"
            )
        return kinds[self.gating_type](context, x, transformed_x, mask)

    def _highway_gating(
        self,
        context: Context,
        x: mtf.Tensor,
        transformed_x: mtf.Tensor,
        mask: Union[mtf.Tensor, float],
    ) -> mtf.Tensor:
        transform, carry = self._two_gates(context, mask, [x])
        return x * carry + transformed_x * transform

    def _gru_gating(
        self,
        context: Context,
        x: mtf.Tensor,
        transformed_x: mtf.Tensor,
        mask: Union[mtf.Tensor, float],
    ) -> mtf.Tensor:
        update, reset = self._two_gates(context, mask, [x, transformed_x])
        candidate = self._gate(context, mask, [reset * x, transformed_x])
        return (1.0 - update) * transformed_x + update * candidate

    def _two_gates(
        self, context: Context, mask: Union[mtf.Tensor, float], inputs_list: list[mtf.Tensor]
    ) -> tuple[mtf.Tensor, mtf.Tensor]:
        """Returns two gates; the second reads the normalized output of the first."""
        first = self._gate(context, mask, inputs_list)
        normalized = [self._masked_norm(x, mask) for x in inputs_list]
        return first, self._gate(context, mask, normalized)

    def _transform_and_carry(
        self,
        context: Context,
        mask: Union[mtf.Tensor, float],
        inputs_list: list[mtf.Tensor],
        coupled: bool,
    ) -> tuple[mtf.Tensor, mtf.Tensor]:
        """Returns the transform and carry gates of a highway; coupled gates sum to 1."""
        if not coupled:
            return self._two_gates(context, mask, inputs_list)
        transform = self._gate(context, mask, inputs_list)
        return transform, 1.0 - transform

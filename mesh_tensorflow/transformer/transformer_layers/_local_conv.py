"""Lightweight and dynamic convolutions, in place of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.transformer.transformer import TransformerLayer
from mesh_tensorflow.transformer.transformer_layers._separable_conv1d import SeparableConv1DLayer

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = [
    "Conv1DLocalAttn",
    "DynamicConv1DLocalAttn",
    "LightweightConv1DLocalAttn",
    "LocalConvAttnBlock",
]


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class Conv1DLocalAttn(SeparableConv1DLayer):
    """A separable convolution whose kernels are softmaxed over their width.

    Wu et al., "Pay less attention with lightweight and dynamic convolutions" (2019). Subclasses
    define `get_kernel_wt`.
    """

    def __init__(
        self,
        min_relative_pos: int,
        max_relative_pos: int,
        output_size: int,
        depthwise_filter_initializer_scale: float = 1.0,
        pointwise_filter_initializer_scale: float = 1.0,
        activation: str = "linear",
        num_unique_depth_filters: int = 1,
    ) -> None:
        """Creates the layer.

        Args:
          min_relative_pos: an integer, the first position of the filter, relative to the current
            one.
          max_relative_pos: an integer, the last one.
          output_size: an integer, the number of output channels.
          depthwise_filter_initializer_scale: the variance scale of the depthwise kernels'
            initializer.
          pointwise_filter_initializer_scale: the variance scale of the pointwise kernel's
            initializer.
          activation: the name of a function of mtf, or "linear".
          num_unique_depth_filters: an integer, the number of channels that share a kernel: channels
            c, c + d_model / num_unique_depth_filters, ...
        """
        super().__init__(
            min_relative_pos,
            max_relative_pos,
            output_size,
            depthwise_filter_initializer_scale,
            pointwise_filter_initializer_scale,
            activation,
        )
        self._num_unique_depth_filters = num_unique_depth_filters

    def get_kernel_wt(
        self,
        x: mtf.Tensor,
        repeated_kernel_dim: Union[mtf.Dimension, Sequence[mtf.Dimension]],
        kernel_initializer: Callable[..., tf.Tensor],
        i: int,
        context: Context,
        variable_dtype: Optional[mtf.VariableDType],
        master_dtype: tf.DType = tf.float32,
        slice_dtype: tf.DType = tf.float32,
    ) -> mtf.Tensor:
        """Returns the kernel at one position, before the softmax.

        Args:
          x: a Tensor with dimensions [batch..., length, d_model].
          repeated_kernel_dim: a Dimension, the channels that have their own kernels; or a list of
            it.
          kernel_initializer: an initializer.
          i: an integer, the position in the filter.
          context: the Context of this call of the model: its mode, positions, states and losses.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          master_dtype: used if `variable_dtype` is None.
          slice_dtype: used if `variable_dtype` is None.

        Returns:
          A Tensor with dimensions [..., repeated_kernel_dim].
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no get_kernel_wt; use LightweightConv1DLocalAttn or "
            "DynamicConv1DLocalAttn"
        )

    # The classic's signature: kernels are not given, as in the base class, but computed here.
    def call(  # type: ignore[override]
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the output of the layer.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` when decoding.
          losses: not used.

        Returns:
          A Tensor with `output_size` channels.

        Raises:
          ValueError: `num_unique_depth_filters` does not divide the channels.
        """
        return super().call(context, x, losses, all_kernel_wts=self._kernels(context, x))

    def _kernels(self, context: Context, x: mtf.Tensor) -> Sequence[mtf.Tensor]:
        channels, shared_by = x.shape.dims[-1], self._num_unique_depth_filters
        if channels.size % shared_by:
            raise ValueError(
                f"{type(self).__name__}: num_unique_depth_filters={shared_by} must divide the "
                f"channels {channels}, which share kernels"
            )
        repeated = mtf.Dimension("repeated_kernel_dim", channels.size // shared_by)
        initializer = layers.VarianceScalingInitializer(
            scale=self._depthwise_filter_initializer_scale / self.filter_size
        )
        width = mtf.Dimension("conv_window", self.filter_size)
        logits = mtf.stack(
            [
                self.get_kernel_wt(x, repeated, initializer, i, context, context.variable_dtype)
                for i in range(self.filter_size)
            ],
            width.name,
        )
        kernels = mtf.unstack(mtf.softmax(logits, width), width)
        return [self._tiled(kernel, channels) for kernel in kernels]

    def _tiled(self, kernel: mtf.Tensor, channels: mtf.Dimension) -> mtf.Tensor:
        """Repeats the kernels that channels share, so that each channel has one."""
        *others, repeated = kernel.shape.dims
        copies = mtf.Dimension("copies_of_kernel", self._num_unique_depth_filters)
        kernel = mtf.broadcast(kernel, mtf.Shape([*others, copies, repeated]))
        return mtf.reshape(kernel, mtf.Shape([*others, channels]))


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class LightweightConv1DLocalAttn(Conv1DLocalAttn):
    """Lightweight convolution, with variables `lightwt_depthwise_dense_<i>/kernel`."""

    def get_kernel_wt(
        self,
        x: mtf.Tensor,
        repeated_kernel_dim: Union[mtf.Dimension, Sequence[mtf.Dimension]],
        kernel_initializer: Callable[..., tf.Tensor],
        i: int,
        context: Context,
        variable_dtype: Optional[mtf.VariableDType],
        master_dtype: tf.DType = tf.float32,
        slice_dtype: tf.DType = tf.float32,
    ) -> mtf.Tensor:
        """Returns a variable; see `Conv1DLocalAttn.get_kernel_wt`."""
        return layers.get_dense_kernel_weights(
            x,
            new_dims=mtf.Shape(_as_list(repeated_kernel_dim)).dims,
            reduced_dims=[],
            expert_dims=[],
            kernel_initializer=kernel_initializer,
            name=f"lightwt_depthwise_dense_{i}",
            variable_dtype=variable_dtype,
            master_dtype=master_dtype,
            slice_dtype=slice_dtype,
        )


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class DynamicConv1DLocalAttn(Conv1DLocalAttn):
    """Dynamic convolution: predicts a kernel at each position by `dyn_conv_depthwise_dense_<i>`."""

    def get_kernel_wt(
        self,
        x: mtf.Tensor,
        repeated_kernel_dim: Union[mtf.Dimension, Sequence[mtf.Dimension]],
        kernel_initializer: Callable[..., tf.Tensor],
        i: int,
        context: Context,
        variable_dtype: Optional[mtf.VariableDType],
        master_dtype: tf.DType = tf.float32,
        slice_dtype: tf.DType = tf.float32,
    ) -> mtf.Tensor:
        """Returns a dense layer of `x`; see `Conv1DLocalAttn.get_kernel_wt`."""
        return layers.dense(
            x,
            _as_list(repeated_kernel_dim),
            reduced_dims=x.shape.dims[-1:],
            kernel_initializer=kernel_initializer,
            name=f"dyn_conv_depthwise_dense_{i}",
            variable_dtype=variable_dtype,
            master_dtype=master_dtype,
            slice_dtype=slice_dtype,
        )


def _as_list(dims: Union[mtf.Dimension, Sequence[mtf.Dimension]]) -> list[mtf.Dimension]:
    return [dims] if isinstance(dims, mtf.Dimension) else list(dims)


_ATTENTION_TYPES = {
    "lightweight_conv": LightweightConv1DLocalAttn,
    "dynamic_conv": DynamicConv1DLocalAttn,
}


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class LocalConvAttnBlock(TransformerLayer):
    """A gated linear unit, a lightweight or dynamic convolution, and a dense layer.

    Wu et al., "Pay less attention with lightweight and dynamic convolutions" (2019), figure 2.
    """

    def __init__(
        self,
        min_relative_pos: int,
        max_relative_pos: int,
        output_size: int,
        depthwise_filter_initializer_scale: float = 1.0,
        pointwise_filter_initializer_scale: float = 1.0,
        activation: str = "linear",
        num_unique_depth_filters: int = 1,
        attention_type: str = "lightweight_conv",
    ) -> None:
        """Creates the layer.

        Args:
          min_relative_pos: as for `Conv1DLocalAttn`.
          max_relative_pos: as for `Conv1DLocalAttn`.
          output_size: as for `Conv1DLocalAttn`.
          depthwise_filter_initializer_scale: as for `Conv1DLocalAttn`.
          pointwise_filter_initializer_scale: as for `Conv1DLocalAttn`.
          activation: as for `Conv1DLocalAttn`.
          num_unique_depth_filters: ignored, for compatibility with checkpoints of earlier releases:
            each channel has its own kernel.
          attention_type: "lightweight_conv" or "dynamic_conv".

        Raises:
          NotImplementedError: `attention_type` is unknown.
        """
        if attention_type not in _ATTENTION_TYPES:
            raise NotImplementedError(
                f"LocalConvAttnBlock: attention_type={attention_type!r} is none of "
                f"{', '.join(_ATTENTION_TYPES)}"
            )
        self.conv_local_attn_layer = _ATTENTION_TYPES[attention_type](
            min_relative_pos,
            max_relative_pos,
            output_size,
            depthwise_filter_initializer_scale,
            pointwise_filter_initializer_scale,
            activation,
        )

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
        channels = x.shape.dims[-1]
        y = layers.dense_product(
            x,
            reduced_dims=[channels],
            new_dims=channels,
            activation_functions=["linear", "sigmoid"],
            variable_dtype=context.variable_dtype,
            name="local_conv_inp",
        )
        y = self.conv_local_attn_layer.call(context, y)
        return layers.dense(
            y,
            channels,
            reduced_dims=y.shape.dims[-1:],
            variable_dtype=context.variable_dtype,
            name="local_conv_attn_op_projection",
        )

"""Separable convolutions along the length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional

import gin

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.transformer.transformer_layers._conv1d import Conv1D, activated

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["SeparableConv1DLayer"]


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class SeparableConv1DLayer(Conv1D):
    """A depthwise convolution along the length, then a pointwise one across channels.

    The filter covers the positions from `min_relative_pos` to `max_relative_pos`, relative to the
    current one; in a decoder the latter should be 0. See `mtf.layers.separable_conv1d`.
    """

    def __init__(
        self,
        min_relative_pos: int,
        max_relative_pos: int,
        output_size: int,
        depthwise_filter_initializer_scale: float = 1.0,
        pointwise_filter_initializer_scale: float = 1.0,
        activation: str = "linear",
    ) -> None:
        """Creates the layer.

        Args:
          min_relative_pos: an integer, the first position of the filter, relative to the current
            one.
          max_relative_pos: an integer, the last one.
          output_size: an integer, the number of output channels.
          depthwise_filter_initializer_scale: the variance scale of the depthwise kernel's
            initializer.
          pointwise_filter_initializer_scale: the variance scale of the pointwise kernel's
            initializer.
          activation: the name of a function of mtf, or "linear".
        """
        self._min_relative_pos = min_relative_pos
        self._max_relative_pos = max_relative_pos
        self._output_size = output_size
        self._depthwise_filter_initializer_scale = depthwise_filter_initializer_scale
        self._pointwise_filter_initializer_scale = pointwise_filter_initializer_scale
        self._activation = activation

    @property
    def filter_size(self) -> int:
        """The number of positions that the filter covers."""
        return self._max_relative_pos - self._min_relative_pos + 1

    def call(
        self,
        context: Context,
        x: mtf.Tensor,
        losses: Optional[list[mtf.Tensor]] = None,
        all_kernel_wts: Optional[Sequence[mtf.Tensor]] = None,
    ) -> mtf.Tensor:
        """Returns the output of the layer.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` when decoding.
          losses: not used.
          all_kernel_wts: a list with a Tensor for each position of the filter, with dimensions
            [d_model] or [batch..., length, d_model], instead of variables.

        Returns:
          A Tensor with as many channels as `output_size`.
        """
        del losses
        x = self.inputs_of_conv(context, x, self.filter_size)
        channels = x.shape.dims[-1]
        y = layers.separable_conv1d(
            x,
            mtf.Dimension(channels.name, self._output_size),
            min_relative_pos=self._min_relative_pos,
            max_relative_pos=self._max_relative_pos,
            depthwise_filter_initializer_scale=self._depthwise_filter_initializer_scale,
            pointwise_filter_initializer_scale=self._pointwise_filter_initializer_scale,
            use_bias=True,
            kernel_depth_weights=all_kernel_wts,
        )
        if context.mode == "incremental":
            window = y.shape.dims[-2]
            y = mtf.gather(y, window.size - 1, window)
        return activated(self._activation, y)

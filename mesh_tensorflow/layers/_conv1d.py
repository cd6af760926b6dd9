"""1-D convolution layers, ordinary and depthwise separable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.layers._conv import conv2d
from mesh_tensorflow.layers._dense import VarianceScalingInitializer, dense

__all__ = ["conv1d", "separable_conv1d"]


def _sequence_dims(
    what: str, x: mtf.Tensor
) -> tuple[list[mtf.Dimension], mtf.Dimension, mtf.Dimension]:
    """Returns (batch dimensions, length, channels)."""
    if x.shape.ndims < 2:
        raise ValueError(f"{what}: {x.name} must be [batch..., length, channels], not {x.shape}")
    *batch, length, channels = x.shape.dims
    return batch, length, channels


def conv1d(
    x: mtf.Tensor,
    output_dim: mtf.Dimension,
    filter_size: int = 3,
    stride: int = 1,
    **kw_args: Any,
) -> mtf.Tensor:
    """Applies a 1-D convolution to sequences, without a bias.

    Implemented as a `conv2d` of images of height 1; the variable is named accordingly.

    >>> x = mtf.ones(mesh, "batch:2,length:6,d:4")
    >>> print(mtf.layers.conv1d(x, mtf.Dimension("out", 8), filter_size=3).shape)
    Shape[batch=2, length=6, out=8]

    Args:
      x: a Tensor with dimensions [batch..., length, in_channels].
      output_dim: a Dimension, the output channels.
      filter_size: the number of positions that the filter covers.
      stride: the stride along the length.
      **kw_args: further arguments of `conv2d`: padding, filter_initializer, variable_dtype
        and name.

    Returns:
      A Tensor with dimensions [batch..., length, output_dim].

    Raises:
      ValueError: `x` has no length dimension.
    """
    batch, length, channels = _sequence_dims("conv1d", x)
    height = mtf.Dimension("fake_height", 1)
    image = mtf.reshape(x, mtf.Shape([*batch, height, length, channels]))
    y = conv2d(image, output_dim, filter_size=(1, filter_size), strides=(1, stride), **kw_args)
    return mtf.reshape(y, y.shape - height)


def separable_conv1d(
    x: mtf.Tensor,
    output_dim: mtf.Dimension,
    min_relative_pos: int = -1,
    max_relative_pos: int = 1,
    depthwise_filter_initializer_scale: float = 1.0,
    pointwise_filter_initializer_scale: float = 1.0,
    name: Optional[str] = None,
    use_bias: bool = True,
    kernel_depth_weights: Optional[Sequence[mtf.Tensor]] = None,
) -> mtf.Tensor:
    """Applies a depthwise separable 1-D convolution: per-channel sums, then a channel mix.

    Chollet, "Xception: deep learning with depthwise separable convolutions" (2016). A layout may
    split the length: neighboring positions are fetched by shifts. Positions beyond the ends are
    zeros.

    >>> x = mtf.ones(mesh, "batch:2,length:6,d:4")
    >>> print(mtf.layers.separable_conv1d(x, mtf.Dimension("out", 8)).shape)
    Shape[batch=2, length=6, out=8]

    Args:
      x: a Tensor with dimensions [batch..., length, in_channels].
      output_dim: a Dimension, the output channels.
      min_relative_pos: the first position of the filter, relative to the output position.
      max_relative_pos: the last position of the filter.
      depthwise_filter_initializer_scale: the initial variance of a sum over positions.
      pointwise_filter_initializer_scale: the initial variance of a sum over channels.
      name: a string, the variable scope; "separable_conv1d" if None.
      use_bias: whether to add a bias to both convolutions.
      kernel_depth_weights: a Tensor with dimensions [in_channels] for each position, to use
        instead of variables; or None.

    Returns:
      A Tensor with dimensions [batch..., length, output_dim].

    Raises:
      ValueError: the filter covers no position, `kernel_depth_weights` does not have one Tensor
        per position, or `x` has no length dimension.
    """
    _, length, channels = _sequence_dims("separable_conv1d", x)
    positions = range(min_relative_pos, max_relative_pos + 1)
    weights: Sequence[Any] = kernel_depth_weights or [None] * len(positions)
    if not positions or len(weights) != len(positions):
        raise ValueError(
            f"separable_conv1d: from {min_relative_pos} to {max_relative_pos} there are "
            f"{len(positions)} positions, with {len(weights)} kernel_depth_weights; there must be "
            "at least one, and a weight for each"
        )
    depthwise = VarianceScalingInitializer(
        scale=depthwise_filter_initializer_scale / len(positions)
    )
    pointwise = VarianceScalingInitializer(scale=pointwise_filter_initializer_scale)
    with tf.variable_scope(name, default_name="separable_conv1d"):
        with tf.variable_scope("depthwise_conv_hack"):
            summed = mtf.add_n(
                [
                    dense(
                        mtf.shift(x, -position, length, wrap=False),
                        [channels],
                        reduced_dims=[],
                        use_bias=use_bias and i == 0,
                        kernel_initializer=depthwise,
                        kernel_weights=weight,
                        name=f"depthwise_dense_{i}",
                    )
                    for i, (position, weight) in enumerate(zip(positions, weights))
                ]
            )
        return dense(
            summed,
            [output_dim],
            reduced_dims=[channels],
            use_bias=use_bias,
            kernel_initializer=pointwise,
            name="pointwise_dense",
        )

"""Convolutions of images and volumes in blocks, with normalization, activation and dropout."""

from __future__ import annotations

from typing import Any

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers

__all__ = ["conv_with_spatial_partition", "deconv_with_spatial_partition"]

_MOMENTUM = 0.9  # of batch normalization
_EPSILON = 1e-6
_SLOPE = 0.1  # of leaky ReLU for negative inputs
# By whether images are slices: the layer, and the number of its spatial dimensions.
_CONVOLUTIONS: dict[bool, tuple[Any, int]] = {
    True: (layers.conv2d_with_blocks, 2),
    False: (layers.conv3d_with_blocks, 3),
}
_TRANSPOSED: dict[bool, tuple[Any, int]] = {
    True: (layers.conv2d_transpose_with_blocks, 2),
    False: (layers.conv3d_transpose_with_blocks, 3),
}


def conv_with_spatial_partition(
    x: mtf.Tensor,
    sampled_2d_slices: bool,
    image_nx_dim: mtf.Dimension,
    image_ny_dim: mtf.Dimension,
    n_filters: int,
    keep_p: float,
    with_batch_norm: bool,
    is_training: bool,
    odim_name: str,
    variable_dtype: mtf.VariableDType,
    name: str,
) -> tuple[mtf.Tensor, list[mtf.Operation]]:
    """Applies a convolution with windows of 3, batch normalization, leaky ReLU and dropout.

    Args:
      x: a Tensor with dimensions [batch, image_nx_dim, image_ny_dim, x, y, z, channels], without z
        for slices.
      sampled_2d_slices: whether images are slices, and the convolution is two-dimensional.
      image_nx_dim: the Dimension of the blocks along x.
      image_ny_dim: the Dimension of the blocks along y.
      n_filters: the number of channels of the result.
      keep_p: the probability that dropout keeps a value.
      with_batch_norm: whether to normalize over the batch.
      is_training: whether dropout applies, and normalization uses the statistics of the batch.
      odim_name: the name of the channel dimension of the result.
      variable_dtype: the VariableDType of the kernel.
      name: the name of the variable scope.

    Returns:
      (a Tensor with the shape of `x` but for the channels, operations that update the moving
      averages of batch normalization and have to run with the training step).
    """
    conv, size = _CONVOLUTIONS[bool(sampled_2d_slices)]
    x = conv(
        x,
        mtf.Dimension(odim_name, n_filters),
        (3,) * size,
        (1,) * size,
        "SAME",
        image_nx_dim,
        image_ny_dim,
        variable_dtype=variable_dtype,
        name=name,
    )
    updates: list[mtf.Operation] = []
    if with_batch_norm:
        x, updates = layers.batch_norm(x, is_training, _MOMENTUM, epsilon=_EPSILON, name=name)
    x = mtf.leaky_relu(x, _SLOPE)
    return mtf.dropout(x, is_training, keep_p), updates


def deconv_with_spatial_partition(
    x: mtf.Tensor,
    sampled_2d_slices: bool,
    image_nx_dim: mtf.Dimension,
    image_ny_dim: mtf.Dimension,
    n_filters: int,
    keep_p: float,
    is_training: bool,
    odim_name: str,
    variable_dtype: mtf.VariableDType,
    name: str,
) -> mtf.Tensor:
    """Doubles the resolution by a transposed convolution with windows of 2; applies dropout.

    Args:
      x: a Tensor as for `conv_with_spatial_partition`.
      sampled_2d_slices: whether images are slices, and the convolution is two-dimensional.
      image_nx_dim: the Dimension of the blocks along x.
      image_ny_dim: the Dimension of the blocks along y.
      n_filters: the number of channels of the result.
      keep_p: the probability that dropout keeps a value.
      is_training: whether dropout applies.
      odim_name: the name of the channel dimension of the result.
      variable_dtype: the VariableDType of the kernel.
      name: the name of the variable scope.

    Returns:
      A Tensor with the dimensions of `x`, with x, y and z twice as large and the new channels.
    """
    deconv, size = _TRANSPOSED[bool(sampled_2d_slices)]
    x = deconv(
        x,
        mtf.Dimension(odim_name, n_filters),
        (2,) * size,
        (2,) * size,
        "SAME",
        image_nx_dim,
        image_ny_dim,
        variable_dtype=variable_dtype,
        name=name,
    )
    return mtf.dropout(x, is_training, keep_p)

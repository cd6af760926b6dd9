"""Transposed convolution layers, including spatially partitioned ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.layers._conv import check_blocks, convolution, with_margins

__all__ = [
    "conv2d_transpose",
    "conv2d_transpose_with_blocks",
    "conv3d_transpose",
    "conv3d_transpose_with_blocks",
]


def conv2d_transpose(
    x: mtf.Tensor,
    output_dim: mtf.Dimension,
    filter_size: Sequence[int] = (2, 2),
    strides: Sequence[int] = (2, 2),
    padding: str = "SAME",
    filter_initializer: Optional[Callable] = None,
    variable_dtype: Optional[mtf.VariableDType] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Upsamples images by a 2-D transposed convolution, without a bias.

    A transposed convolution is the gradient of a convolution with these strides (Zeiler et al.,
    "Deconvolutional networks", 2010).

    >>> images = mtf.ones(mesh, "batch:2,h:4,w:4,channels:3")
    >>> print(mtf.layers.conv2d_transpose(images, mtf.Dimension("out", 8)).shape)
    Shape[batch=2, h=8, w=8, out=8]

    Args:
      x: a Tensor with dimensions [batch..., h, w, in_channels].
      output_dim: a Dimension, the output channels.
      filter_size: [height, width] of the filter.
      strides: [vertical, horizontal], the upsampling factors with padding "SAME".
      padding: "SAME" or "VALID".
      filter_initializer: a TensorFlow initializer or None.
      variable_dtype: a VariableDType or None.
      name: a string, the variable scope; "conv2d_transpose" if None.

    Returns:
      A Tensor with dimensions [batch..., h, w, output_dim], where h and w have their new sizes.
    """
    how = (filter_size, strides, padding, filter_initializer, variable_dtype, name)
    return convolution("conv2d_transpose", x, output_dim, *how)


def conv3d_transpose(
    x: mtf.Tensor,
    output_dim: mtf.Dimension,
    filter_size: Sequence[int] = (2, 2, 2),
    strides: Sequence[int] = (2, 2, 2),
    padding: str = "SAME",
    filter_initializer: Optional[Callable] = None,
    variable_dtype: Optional[mtf.VariableDType] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Upsamples volumes by a 3-D transposed convolution; see `conv2d_transpose`.

    >>> volumes = mtf.ones(mesh, "batch:2,d:4,h:4,w:4,channels:3")
    >>> print(mtf.layers.conv3d_transpose(volumes, mtf.Dimension("out", 8)).shape)
    Shape[batch=2, d=8, h=8, w=8, out=8]

    Args:
      x: a Tensor with dimensions [batch..., d, h, w, in_channels].
      output_dim: a Dimension, the output channels.
      filter_size: [depth, height, width] of the filter.
      strides: [depth, vertical, horizontal], the upsampling factors.
      padding: "SAME" or "VALID".
      filter_initializer: a TensorFlow initializer or None.
      variable_dtype: a VariableDType or None.
      name: a string, the variable scope; "conv3d_transpose" if None.

    Returns:
      A Tensor with dimensions [batch..., d, h, w, output_dim], where d, h and w have their new
      sizes.
    """
    how = (filter_size, strides, padding, filter_initializer, variable_dtype, name)
    return convolution("conv3d_transpose", x, output_dim, *how)


class _Reach(NamedTuple):
    """The margins that the upsampled pixels of a block depend on, along one dimension.

    Attributes:
      before, after: the number of pixels needed from the neighbor on either side.
      cut: the number of pixels of the upsampled result that precede the upsampled block.
    """

    before: int
    after: int
    cut: int


def _reach(size: int, stride: int) -> _Reach:
    """Returns the _Reach of a window.

    Pixel i contributes to `size` pixels starting at i * stride - skipped, where skipped is the
    number of pixels that "SAME" padding cuts off at the beginning.
    """
    skipped = max(size - stride, 0) // 2
    before = max(size - 1 - skipped, 0) // stride
    after = (stride - 1 + skipped) // stride
    return _Reach(before, after, skipped + before * stride)


def _transpose_with_blocks(
    x: mtf.Tensor,
    blocks_dims: Sequence[Optional[mtf.Dimension]],
    filter_size: Sequence[int],
    strides: Sequence[int],
    padding: str,
    conv: Callable[[mtf.Tensor, str], mtf.Tensor],
) -> mtf.Tensor:
    """Upsamples blocks together with margins from their neighbors, then cuts the margins off."""
    reaches = [_reach(size, stride) for size, stride in zip(filter_size, strides)]
    if padding == "VALID" or not any(r.before or r.after for r in reaches):
        return conv(x, padding)
    blocks = x.shape.dims[-len(strides) - 1 : -1]
    for blocks_dim, block, reach in zip(blocks_dims, blocks, reaches):
        x = with_margins(x, blocks_dim, block, reach.before, reach.after)
    y = conv(x, "VALID")
    for block, stride, reach in zip(blocks, strides, reaches):
        enlarged = block.size * stride
        if y.shape.get_dim_by_name(block.name).size != enlarged:
            y = mtf.slice(y, reach.cut, enlarged, block.name)
    return y


def conv2d_transpose_with_blocks(
    x: mtf.Tensor,
    output_dim: mtf.Dimension,
    filter_size: Sequence[int] = (2, 2),
    strides: Sequence[int] = (2, 2),
    padding: str = "SAME",
    h_blocks_dim: Optional[mtf.Dimension] = None,
    w_blocks_dim: Optional[mtf.Dimension] = None,
    filter_initializer: Optional[Callable] = None,
    variable_dtype: Optional[mtf.VariableDType] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Upsamples images cut into blocks, which a layout may split over a mesh.

    Where the filter is larger than the strides, each block receives a margin (halo) from its
    neighbors, so the result equals that of `conv2d_transpose` on the whole image.

    >>> images = mtf.ones(mesh, "batch:2,h_blocks:2,w_blocks:2,h:4,w:4,channels:3")
    >>> _, h_blocks, w_blocks, *_ = images.shape.dims
    >>> y = mtf.layers.conv2d_transpose_with_blocks(
    ...     images, mtf.Dimension("out", 8), h_blocks_dim=h_blocks, w_blocks_dim=w_blocks
    ... )
    >>> print(y.shape)
    Shape[batch=2, h_blocks=2, w_blocks=2, h=8, w=8, out=8]

    Args:
      x: a Tensor with dimensions [batch..., h_blocks, w_blocks, h, w, in_channels].
      output_dim: a Dimension, the output channels.
      filter_size: [height, width] of the filter.
      strides: [vertical, horizontal], the upsampling factors.
      padding: "SAME"; or "VALID", with one block only.
      h_blocks_dim: the Dimension of blocks along the height, or None for one block.
      w_blocks_dim: the Dimension of blocks along the width, or None for one block.
      filter_initializer: a TensorFlow initializer or None.
      variable_dtype: a VariableDType or None.
      name: a string, the variable scope; "conv2d_transpose" if None.

    Returns:
      A Tensor with dimensions [batch..., h_blocks, w_blocks, h, w, output_dim].

    Raises:
      ValueError: padding is "VALID" with several blocks, or the filter or strides do not fit.
    """

    def conv(y: mtf.Tensor, pad: str) -> mtf.Tensor:
        how = (filter_size, strides, pad, filter_initializer, variable_dtype, name)
        return conv2d_transpose(y, output_dim, *how)

    blocks = (h_blocks_dim, w_blocks_dim)
    check_blocks("conv2d_transpose", blocks, filter_size, strides, padding)
    return _transpose_with_blocks(x, blocks, filter_size, strides, padding, conv)


def conv3d_transpose_with_blocks(
    x: mtf.Tensor,
    output_dim: mtf.Dimension,
    filter_size: Sequence[int] = (2, 2, 2),
    strides: Sequence[int] = (2, 2, 2),
    padding: str = "SAME",
    d_blocks_dim: Optional[mtf.Dimension] = None,
    h_blocks_dim: Optional[mtf.Dimension] = None,
    filter_initializer: Optional[Callable] = None,
    variable_dtype: Optional[mtf.VariableDType] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Upsamples volumes cut into blocks along depth and height.

    See `conv2d_transpose_with_blocks`.

    >>> volumes = mtf.ones(mesh, "batch:2,d_blocks:2,h_blocks:2,d:4,h:4,w:4,channels:3")
    >>> _, d_blocks, h_blocks, *_ = volumes.shape.dims
    >>> y = mtf.layers.conv3d_transpose_with_blocks(
    ...     volumes, mtf.Dimension("out", 8), d_blocks_dim=d_blocks, h_blocks_dim=h_blocks
    ... )
    >>> print(y.shape)
    Shape[batch=2, d_blocks=2, h_blocks=2, d=8, h=8, w=8, out=8]

    Args:
      x: a Tensor with dimensions [batch..., d_blocks, h_blocks, d, h, w, in_channels].
      output_dim: a Dimension, the output channels.
      filter_size: [depth, height, width] of the filter.
      strides: [depth, vertical, horizontal], the upsampling factors.
      padding: "SAME"; or "VALID", with one block only.
      d_blocks_dim: the Dimension of blocks along the depth, or None for one block.
      h_blocks_dim: the Dimension of blocks along the height, or None for one block.
      filter_initializer: a TensorFlow initializer or None.
      variable_dtype: a VariableDType or None.
      name: a string, the variable scope; "conv3d_transpose" if None.

    Returns:
      A Tensor with dimensions [batch..., d_blocks, h_blocks, d, h, w, output_dim].

    Raises:
      ValueError: padding is "VALID" with several blocks, or the filter or strides do not fit.
    """

    def conv(y: mtf.Tensor, pad: str) -> mtf.Tensor:
        how = (filter_size, strides, pad, filter_initializer, variable_dtype, name)
        return conv3d_transpose(y, output_dim, *how)

    blocks = (d_blocks_dim, h_blocks_dim, None)
    check_blocks("conv3d_transpose", blocks, filter_size, strides, padding)
    return _transpose_with_blocks(x, blocks, filter_size, strides, padding, conv)

"""Transposed convolution layers, also of images in blocks that may be split over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

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
    filter_initializer: Any = None,
    variable_dtype: Optional[mtf.VariableDType] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Enlarges images by a transposed convolution with a kernel variable; no bias.

    It is the gradient of a convolution with these strides (Zeiler et al., "Deconvolutional
    networks", 2010).

    Args:
      x: a Tensor with dimensions [batch..., h, w, in_channels].
      output_dim: a Dimension, the output channels.
      filter_size: [height, width] of the filter.
      strides: how many times as high and as wide the result is, with padding "SAME".
      padding: "SAME" or "VALID".
      filter_initializer: a TensorFlow initializer or None.
      variable_dtype: a VariableDType or None.
      name: a string, the variable scope; "conv2d_transpose" if None.

    Returns:
      A Tensor with dimensions [batch..., h, w, output_dim], h and w of their new sizes.
    """
    how = (filter_size, strides, padding, filter_initializer, variable_dtype, name)
    return convolution("conv2d_transpose", x, output_dim, *how)


def conv3d_transpose(
    x: mtf.Tensor,
    output_dim: mtf.Dimension,
    filter_size: Sequence[int] = (2, 2, 2),
    strides: Sequence[int] = (2, 2, 2),
    padding: str = "SAME",
    filter_initializer: Any = None,
    variable_dtype: Optional[mtf.VariableDType] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Enlarges volumes by a transposed convolution; see `conv2d_transpose`.

    Args:
      x: a Tensor with dimensions [batch..., d, h, w, in_channels].
      output_dim: a Dimension, the output channels.
      filter_size: [depth, height, width] of the filter.
      strides: the strides along these.
      padding: "SAME" or "VALID".
      filter_initializer: a TensorFlow initializer or None.
      variable_dtype: a VariableDType or None.
      name: a string, the variable scope; "conv3d_transpose" if None.

    Returns:
      A Tensor with dimensions [batch..., d, h, w, output_dim], d, h and w of their new sizes.
    """
    how = (filter_size, strides, padding, filter_initializer, variable_dtype, name)
    return convolution("conv3d_transpose", x, output_dim, *how)


class _Reach(NamedTuple):
    """What one side of a block's enlarged pixels depends on.

    Attributes:
      before, after: how many pixels of the neighbours, on either side.
      cut: how many pixels of the enlarged margin and block come before the enlarged block.
    """

    before: int
    after: int
    cut: int


def _reach(size: int, stride: int) -> _Reach:
    """Returns the _Reach of a window.

    Pixel i is spread over size pixels from i * stride - skipped on, where skipped is what "SAME"
    cuts off at the beginning.
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
    """Enlarges blocks with margins of their neighbours, and cuts the blocks out."""
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
    filter_initializer: Any = None,
    variable_dtype: Optional[mtf.VariableDType] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Enlarges images cut into blocks, which a layout may split over a mesh.

    Where the filter is larger than the strides each block gets a margin of its neighbours, and
    the result is that of the whole image.

    Args:
      x: a Tensor with dimensions [batch..., h_blocks, w_blocks, h, w, in_channels].
      output_dim: a Dimension, the output channels.
      filter_size: [height, width] of the filter.
      strides: how many times as high and as wide the result is.
      padding: "SAME"; "VALID" only for one block.
      h_blocks_dim: the Dimension of blocks in a column, or None for one block.
      w_blocks_dim: the Dimension of blocks in a row, or None for one block.
      filter_initializer: a TensorFlow initializer or None.
      variable_dtype: a VariableDType or None.
      name: a string, the variable scope; "conv2d_transpose" if None.

    Returns:
      A Tensor with dimensions [batch..., h_blocks, w_blocks, h, w, output_dim].

    Raises:
      ValueError: "VALID" with several blocks, or the filter or the strides do not fit.
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
    filter_initializer: Any = None,
    variable_dtype: Optional[mtf.VariableDType] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Enlarges volumes cut into blocks along depth and height.

    See `conv2d_transpose_with_blocks`.

    Args:
      x: a Tensor with dimensions [batch..., d_blocks, h_blocks, d, h, w, in_channels].
      output_dim: a Dimension, the output channels.
      filter_size: [depth, height, width] of the filter.
      strides: the strides along these.
      padding: "SAME"; "VALID" only for one block.
      d_blocks_dim: the Dimension of blocks along the depth, or None for one block.
      h_blocks_dim: the Dimension of blocks along the height, or None for one block.
      filter_initializer: a TensorFlow initializer or None.
      variable_dtype: a VariableDType or None.
      name: a string, the variable scope; "conv3d_transpose" if None.

    Returns:
      A Tensor with dimensions [batch..., d_blocks, h_blocks, d, h, w, output_dim].

    Raises:
      ValueError: "VALID" with several blocks, or the filter or the strides do not fit.
    """

    def conv(y: mtf.Tensor, pad: str) -> mtf.Tensor:
        how = (filter_size, strides, pad, filter_initializer, variable_dtype, name)
        return conv3d_transpose(y, output_dim, *how)

    blocks = (d_blocks_dim, h_blocks_dim, None)
    check_blocks("conv3d_transpose", blocks, filter_size, strides, padding)
    return _transpose_with_blocks(x, blocks, filter_size, strides, padding, conv)

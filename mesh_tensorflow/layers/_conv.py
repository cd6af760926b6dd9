"""Convolution layers, including spatially partitioned ones whose blocks a mesh may split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow.ops._variables.precision import InputDType

__all__ = ["conv2d", "conv2d_with_blocks", "conv3d", "conv3d_with_blocks"]

_FILTER_DIMS = {2: ("fh", "fw"), 3: ("fd", "fh", "fw")}
# By layer name: number of spatial dimensions, whether transposed, operation.
_KINDS: dict[str, tuple[int, bool, Callable]] = {
    "conv2d": (2, False, mtf.Conv2dOperation),
    "conv3d": (3, False, mtf.Conv3dOperation),
    "conv2d_transpose": (2, True, mtf.Conv2dTransposeOperation),
    "conv3d_transpose": (3, True, mtf.Conv3dTransposeOperation),
}


def check_window(kind: str, filter_size: Sequence[int], strides: Sequence[int]) -> None:
    """Checks that there is one positive filter size and one positive stride per spatial dimension.

    Raises:
      ValueError: the number of values is wrong, or a value is not positive.
    """
    rank = _KINDS[kind][0]
    if len(filter_size) != rank or len(strides) != rank or min(*filter_size, *strides) < 1:
        raise ValueError(
            f"{kind}: filter_size and strides must have {rank} positive numbers each, got "
            f"{tuple(filter_size)} and {tuple(strides)}"
        )


def convolution(
    kind: str,
    x: mtf.Tensor,
    output_dim: mtf.Dimension,
    filter_size: Sequence[int],
    strides: Sequence[int],
    padding: str,
    filter_initializer: Optional[Callable],
    variable_dtype: Optional[mtf.VariableDType],
    name: Optional[str],
) -> mtf.Tensor:
    """Creates the kernel variable and applies the convolution; `kind` is the layer name.

    The kernel is [window..., in, out], or [window..., out, in] for a transposed convolution.
    """
    check_window(kind, filter_size, strides)
    rank, transposed, operation = _KINDS[kind]
    if variable_dtype is None:
        variable_dtype = InputDType(activation_dtype=x.dtype)
    filter_dims = [mtf.Dimension(n, s) for n, s in zip(_FILTER_DIMS[rank], filter_size)]
    channels = [output_dim, x.shape[-1]] if transposed else [x.shape[-1], output_dim]
    with tf.variable_scope(name, default_name=kind):
        kernel = mtf.get_variable(
            x.mesh,
            "kernel",
            mtf.Shape([*filter_dims, *channels]),
            initializer=filter_initializer,
            dtype=variable_dtype,
        )
        return operation(x, kernel, [1, *strides, 1], padding).outputs[0]


def conv2d(
    x: mtf.Tensor,
    output_dim: mtf.Dimension,
    filter_size: Sequence[int] = (3, 3),
    strides: Sequence[int] = (1, 1),
    padding: str = "SAME",
    filter_initializer: Optional[Callable] = None,
    variable_dtype: Optional[mtf.VariableDType] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Applies a 2-D convolution to images, without a bias.

    >>> images = mtf.ones(mesh, "batch:2,h:4,w:4,channels:3")
    >>> print(mtf.layers.conv2d(images, mtf.Dimension("out", 8), strides=(2, 2)).shape)
    Shape[batch=2, h=2, w=2, out=8]

    Args:
      x: a Tensor with dimensions [batch..., h, w, in_channels].
      output_dim: a Dimension, the output channels.
      filter_size: [height, width] of the filter.
      strides: [vertical, horizontal].
      padding: "SAME" or "VALID".
      filter_initializer: a TensorFlow initializer or None.
      variable_dtype: a VariableDType or None.
      name: a string, the variable scope; "conv2d" if None.

    Returns:
      A Tensor with dimensions [batch..., h, w, output_dim].
    """
    how = (filter_size, strides, padding, filter_initializer, variable_dtype, name)
    return convolution("conv2d", x, output_dim, *how)


def conv3d(
    x: mtf.Tensor,
    output_dim: mtf.Dimension,
    filter_size: Sequence[int] = (3, 3, 3),
    strides: Sequence[int] = (1, 1, 1),
    padding: str = "SAME",
    filter_initializer: Optional[Callable] = None,
    variable_dtype: Optional[mtf.VariableDType] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Applies a 3-D convolution to volumes, without a bias; see `conv2d`.

    >>> volumes = mtf.ones(mesh, "batch:2,d:4,h:4,w:4,channels:3")
    >>> print(mtf.layers.conv3d(volumes, mtf.Dimension("out", 8)).shape)
    Shape[batch=2, d=4, h=4, w=4, out=8]

    Args:
      x: a Tensor with dimensions [batch..., d, h, w, in_channels].
      output_dim: a Dimension, the output channels.
      filter_size: [depth, height, width] of the filter.
      strides: [depth, vertical, horizontal].
      padding: "SAME" or "VALID".
      filter_initializer: a TensorFlow initializer or None.
      variable_dtype: a VariableDType or None.
      name: a string, the variable scope; "conv3d" if None.
    """
    how = (filter_size, strides, padding, filter_initializer, variable_dtype, name)
    return convolution("conv3d", x, output_dim, *how)


def check_blocks(
    kind: str,
    blocks_dims: Sequence[Optional[mtf.Dimension]],
    filter_size: Sequence[int],
    strides: Sequence[int],
    padding: str,
) -> None:
    """Checks the arguments of a convolution on blocks.

    Raises:
      ValueError: the padding is unknown, or "VALID" with several blocks; or `check_window` fails.
    """
    what = f"{kind}_with_blocks"
    check_window(kind, filter_size, strides)
    if padding not in ("SAME", "VALID"):
        raise ValueError(f'{what}: padding must be "SAME" or "VALID", not {padding!r}')
    blocks = [d for d in blocks_dims if d is not None]
    if padding == "VALID" and any(d.size > 1 for d in blocks):
        raise ValueError(
            f'{what}: with blocks {dims_text(blocks)} the padding must be "SAME"; "VALID" would '
            "make blocks of different sizes"
        )


def _same_margins(block: mtf.Dimension, size: int, stride: int) -> tuple[int, int]:
    """Returns the margins that "SAME" padding needs before and after each block."""
    if block.size % stride:
        raise ValueError(
            f"the block size {dims_text([block])} must be a multiple of the stride {stride}, so "
            "that each block makes a whole number of outputs"
        )
    total = max(size - stride, 0)
    return total // 2, total - total // 2


def with_margins(
    x: mtf.Tensor,
    blocks_dim: Optional[mtf.Dimension],
    block: mtf.Dimension,
    before: int,
    after: int,
) -> mtf.Tensor:
    """Extends each block by margins from its neighbors, with zeros at the border."""
    widest = max(before, after)
    x = mtf.halo_exchange(x, blocks_dim, block, widest)
    if before == after:
        return x
    return mtf.slice(x, widest - before, before + block.size + after, block.name)


def _conv_with_blocks(
    rank: int,
    x: mtf.Tensor,
    blocks_dims: Sequence[Optional[mtf.Dimension]],
    filter_size: Sequence[int],
    strides: Sequence[int],
    padding: str,
    conv: Callable[[mtf.Tensor, str], mtf.Tensor],
) -> mtf.Tensor:
    """Exchanges halos along the blocked dimensions, then convolves each block on its own."""
    check_blocks(f"conv{rank}d", blocks_dims, filter_size, strides, padding)
    if padding == "VALID":
        return conv(x, "VALID")
    spatial = x.shape.dims[-rank - 1 : -1]
    for blocks_dim, block, size, stride in zip(blocks_dims, spatial, filter_size, strides):
        x = with_margins(x, blocks_dim, block, *_same_margins(block, size, stride))
    return conv(x, "VALID")


def conv2d_with_blocks(
    x: mtf.Tensor,
    output_dim: mtf.Dimension,
    filter_size: Sequence[int] = (3, 3),
    strides: Sequence[int] = (1, 1),
    padding: str = "SAME",
    h_blocks_dim: Optional[mtf.Dimension] = None,
    w_blocks_dim: Optional[mtf.Dimension] = None,
    filter_initializer: Optional[Callable] = None,
    variable_dtype: Optional[mtf.VariableDType] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Applies a 2-D convolution to images cut into blocks, which a layout may split over a mesh.

    Each block receives a margin (halo) from its neighbors, so the result equals that of `conv2d`
    on the whole image.

    >>> images = mtf.ones(mesh, "batch:2,h_blocks:2,w_blocks:2,h:4,w:4,channels:3")
    >>> _, h_blocks, w_blocks, *_ = images.shape.dims
    >>> y = mtf.layers.conv2d_with_blocks(
    ...     images, mtf.Dimension("out", 8), h_blocks_dim=h_blocks, w_blocks_dim=w_blocks
    ... )
    >>> print(y.shape)
    Shape[batch=2, h_blocks=2, w_blocks=2, h=4, w=4, out=8]

    Args:
      x: a Tensor with dimensions [batch..., h_blocks, w_blocks, h, w, in_channels].
      output_dim: a Dimension, the output channels.
      filter_size: [height, width] of the filter.
      strides: [vertical, horizontal]; must divide the height and width of a block.
      padding: "SAME"; or "VALID", with one block only.
      h_blocks_dim: the Dimension of blocks along the height, or None for one block.
      w_blocks_dim: the Dimension of blocks along the width, or None for one block.
      filter_initializer: a TensorFlow initializer or None.
      variable_dtype: a VariableDType or None.
      name: a string, the variable scope; "conv2d" if None.
    """

    def conv(y: mtf.Tensor, pad: str) -> mtf.Tensor:
        return conv2d(
            y, output_dim, filter_size, strides, pad, filter_initializer, variable_dtype, name
        )

    blocks = (h_blocks_dim, w_blocks_dim)
    return _conv_with_blocks(2, x, blocks, filter_size, strides, padding, conv)


def conv3d_with_blocks(
    x: mtf.Tensor,
    output_dim: mtf.Dimension,
    filter_size: Sequence[int] = (3, 3, 3),
    strides: Sequence[int] = (1, 1, 1),
    padding: str = "SAME",
    d_blocks_dim: Optional[mtf.Dimension] = None,
    h_blocks_dim: Optional[mtf.Dimension] = None,
    filter_initializer: Optional[Callable] = None,
    variable_dtype: Optional[mtf.VariableDType] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Applies a 3-D convolution to volumes cut into blocks along depth and height.

    See `conv2d_with_blocks`.

    >>> volumes = mtf.ones(mesh, "batch:2,d_blocks:2,h_blocks:2,d:4,h:4,w:4,channels:3")
    >>> _, d_blocks, h_blocks, *_ = volumes.shape.dims
    >>> y = mtf.layers.conv3d_with_blocks(
    ...     volumes, mtf.Dimension("out", 8), d_blocks_dim=d_blocks, h_blocks_dim=h_blocks
    ... )
    >>> print(y.shape)
    Shape[batch=2, d_blocks=2, h_blocks=2, d=4, h=4, w=4, out=8]

    Args:
      x: a Tensor with dimensions [batch..., d_blocks, h_blocks, d, h, w, in_channels].
      output_dim: a Dimension, the output channels.
      filter_size: [depth, height, width] of the filter.
      strides: [depth, vertical, horizontal].
      padding: "SAME"; or "VALID", with one block only.
      d_blocks_dim: the Dimension of blocks along the depth, or None for one block.
      h_blocks_dim: the Dimension of blocks along the height, or None for one block.
      filter_initializer: a TensorFlow initializer or None.
      variable_dtype: a VariableDType or None.
      name: a string, the variable scope; "conv3d" if None.
    """

    def conv(y: mtf.Tensor, pad: str) -> mtf.Tensor:
        return conv3d(
            y, output_dim, filter_size, strides, pad, filter_initializer, variable_dtype, name
        )

    blocks = (d_blocks_dim, h_blocks_dim, None)
    return _conv_with_blocks(3, x, blocks, filter_size, strides, padding, conv)

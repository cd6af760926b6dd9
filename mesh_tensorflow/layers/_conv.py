"""Convolutions and pooling as layers: of one to three dimensions, transposed, and by blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.layers._dense import VarianceScalingInitializer, dense
from mesh_tensorflow.ops._contractions.conv import Blocks, check_blocks
from mesh_tensorflow.ops._variable import InputDType

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
    dilations: Optional[Sequence[int]] = None,
    blocks: Blocks = (),
) -> mtf.Tensor:
    """Creates the kernel variable and applies the convolution; `kind` is the layer name.

    The kernel is [window..., in, out], or [window..., out, in] for a transposed convolution.
    """
    check_window(kind, filter_size, strides)
    rank, transposed, operation = _KINDS[kind]
    rates = (1,) * rank if dilations is None else tuple(dilations)
    if len(rates) != rank or min(rates) < 1:
        raise ValueError(f"{kind}: dilations must be {rank} positive numbers, got {dilations!r}")
    if variable_dtype is None:
        variable_dtype = InputDType(activation_dtype=x.dtype)
    filter_dims = [mtf.Dimension(n, s) for n, s in zip(_FILTER_DIMS[rank], filter_size)]
    # As TensorFlow has it: a transposed convolution is the gradient of a convolution, and takes the
    # filter of that one.
    channels = [output_dim, x.shape[-1]] if transposed else [x.shape[-1], output_dim]
    with tf.variable_scope(name, default_name=kind):
        kernel = mtf.get_variable(
            x.mesh,
            "kernel",
            mtf.Shape([*filter_dims, *channels]),
            initializer=filter_initializer,
            dtype=variable_dtype,
        )
        kernel = _dilated(kernel, rates)
        # TensorFlow's strides have one for the batch and one for the channels, too.
        return operation(x, kernel, [1, *strides, 1], padding, blocks=blocks).outputs[0]


def _dilated(kernel: mtf.Tensor, rates: Sequence[int]) -> mtf.Tensor:
    """Returns a filter with zeros between its entries: of rate n, an entry at each n-th place.

    With its zeros it is a filter as any other, so that images are split, and their gradients are
    computed, as with any other: TensorFlow has no gradient of dilated convolutions on CPUs.
    """
    for axis, rate in enumerate(rates):
        if rate == 1:
            continue
        dim = kernel.shape[axis]
        spread = mtf.Dimension(f"{dim.name}_dilated", (dim.size - 1) * rate + 1)
        places = np.zeros([dim.size, spread.size])
        places[np.arange(dim.size), rate * np.arange(dim.size)] = 1.0
        # spread[j] = sum over i of kernel[i] [j = rate * i].
        at = mtf.constant(kernel.mesh, places, [dim, spread], kernel.dtype)
        shape = mtf.replace_dimensions(kernel.shape, dim, spread)
        kernel = mtf.einsum([kernel, at], output_shape=shape)
    return kernel


def conv2d(
    x: mtf.Tensor,
    output_dim: mtf.Dimension,
    filter_size: Sequence[int] = (3, 3),
    strides: Sequence[int] = (1, 1),
    padding: str = "SAME",
    filter_initializer: Optional[Callable] = None,
    variable_dtype: Optional[mtf.VariableDType] = None,
    name: Optional[str] = None,
    dilations: Optional[Sequence[int]] = None,
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
      dilations: [vertical, horizontal], how far apart the positions are that the filter covers;
        1 if None. Zeros between them are multiplied, too. Yu and Koltun, "Multi-scale context
        aggregation by dilated convolutions" (2016).

    Returns:
      A Tensor with dimensions [batch..., h, w, output_dim].
    """
    # By position: in the order of the last parameters of `convolution`.
    how = (filter_size, strides, padding, filter_initializer, variable_dtype, name, dilations)
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
    dilations: Optional[Sequence[int]] = None,
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
      dilations: [depth, vertical, horizontal], as those of `conv2d`.
    """
    how = (filter_size, strides, padding, filter_initializer, variable_dtype, name, dilations)
    return convolution("conv3d", x, output_dim, *how)


def _with_blocks(
    kind: str,
    x: mtf.Tensor,
    output_dim: mtf.Dimension,
    blocks_dims: Sequence[Optional[mtf.Dimension]],
    filter_size: Sequence[int],
    strides: Sequence[int],
    padding: str,
    *others: Any,
) -> mtf.Tensor:
    """Applies the `convolution` of a kind to images in blocks.

    `others` are its further arguments.
    """
    what = f"{kind}_with_blocks"
    check_window(kind, filter_size, strides)
    if padding not in ("SAME", "VALID"):
        raise ValueError(f'{what}: padding must be "SAME" or "VALID", not {padding!r}')
    # Before the kernel is made, so that what fails leaves no variable.
    transposed = _KINDS[kind][1]
    blocks = check_blocks(what, blocks_dims, x.shape, filter_size, strides, padding, transposed)
    how = (filter_size, strides, padding, *others)
    return convolution(kind, x, output_dim, *how, blocks=blocks)


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
    how = (filter_size, strides, padding, filter_initializer, variable_dtype, name)
    return _with_blocks("conv2d", x, output_dim, (h_blocks_dim, w_blocks_dim), *how)


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
    how = (filter_size, strides, padding, filter_initializer, variable_dtype, name)
    # Volumes are not cut along their width: one block, whose margins are zeros.
    return _with_blocks("conv3d", x, output_dim, (d_blocks_dim, h_blocks_dim, None), *how)


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
    *,
    dilation: int = 1,
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
      dilation: how far apart the positions are that the filter covers.
      **kw_args: further arguments of `conv2d`: padding, filter_initializer, variable_dtype
        and name.

    Returns:
      A Tensor with dimensions [batch..., length, output_dim].

    Raises:
      ValueError: `x` has no length dimension.
    """
    batch, length, channels = _sequence_dims("conv1d", x)
    # Next to the length, as the last dimensions but the channels are the spatial ones.
    height = mtf.Dimension("fake_height", 1)
    image = mtf.reshape(x, mtf.Shape([*batch, height, length, channels]))
    y = conv2d(
        image,
        output_dim,
        filter_size=(1, filter_size),
        strides=(1, stride),
        dilations=(1, dilation),
        **kw_args,
    )
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
    dilation: int = 1,
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
      dilation: how far apart the positions of the filter are.

    Returns:
      A Tensor with dimensions [batch..., length, output_dim].

    Raises:
      ValueError: the filter covers no position, `kernel_depth_weights` does not have one Tensor
        per position, or `x` has no length dimension.
    """
    _, length, channels = _sequence_dims("separable_conv1d", x)
    if dilation < 1:
        raise ValueError(f"separable_conv1d: dilation={dilation} must be 1 or more")
    positions = range(min_relative_pos, max_relative_pos + 1)
    weights: Sequence[Any] = kernel_depth_weights or [None] * len(positions)
    if not positions or len(weights) != len(positions):
        raise ValueError(
            f"separable_conv1d: from {min_relative_pos} to {max_relative_pos} there are "
            f"{len(positions)} positions, with {len(weights)} kernel_depth_weights; there must be "
            "at least one, and a weight for each"
        )
    # A layer that reduces nothing has fan-in 1, while the sum has a term for each position.
    depthwise = VarianceScalingInitializer(
        scale=depthwise_filter_initializer_scale / len(positions)
    )
    pointwise = VarianceScalingInitializer(scale=pointwise_filter_initializer_scale)
    with tf.variable_scope(name, default_name="separable_conv1d"):
        # The scope of the depthwise part in checkpoints of the classic.
        with tf.variable_scope("depthwise_conv_hack"):
            summed = mtf.add_n(
                [
                    dense(
                        # Position i of the result has what is at i + position * dilation.
                        mtf.shift(x, -position * dilation, length, wrap=False),
                        [channels],
                        # Channels that are new and not reduced are multiplied one by one, each by
                        # its weight.
                        reduced_dims=[],
                        # One bias, as those of several positions would be added up.
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
    how = (filter_size, strides, padding, filter_initializer, variable_dtype, name)
    return _with_blocks("conv2d_transpose", x, output_dim, (h_blocks_dim, w_blocks_dim), *how)


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
    how = (filter_size, strides, padding, filter_initializer, variable_dtype, name)
    return _with_blocks("conv3d_transpose", x, output_dim, (d_blocks_dim, h_blocks_dim, None), *how)


def _pool(x: mtf.Tensor, ksize: Sequence[int], kind: str, name: str) -> mtf.Tensor:
    if all(k == 1 for k in ksize):
        return x
    return mtf.PoolOperation(x, ksize, strides=ksize, pool_fn_string=kind, name=name).outputs[0]


def max_pool2d(
    x: mtf.Tensor, ksize: Sequence[int] = (2, 2), name: str = "max_pool2d"
) -> mtf.Tensor:
    """Applies 2-D max pooling over windows that do not overlap.

    >>> images = mtf.ones(mesh, "batch:2,h:4,w:4,channels:3")
    >>> print(mtf.layers.max_pool2d(images, ksize=(2, 2)).shape)
    Shape[batch=2, h=2, w=2, channels=3]

    Args:
      x: a Tensor with dimensions [batch..., h, w, channels].
      ksize: [height, width] of a window; (1, 1) returns `x`.
      name: a string.
    """
    return _pool(x, ksize, "MAX_2D", name)


def max_pool3d(
    x: mtf.Tensor, ksize: Sequence[int] = (2, 2, 2), name: str = "max_pool3d"
) -> mtf.Tensor:
    """Applies 3-D max pooling to [batch..., d, h, w, channels]; see `max_pool2d`.

    >>> volumes = mtf.ones(mesh, "batch:2,d:4,h:4,w:4,channels:3")
    >>> print(mtf.layers.max_pool3d(volumes, ksize=(2, 2, 2)).shape)
    Shape[batch=2, d=2, h=2, w=2, channels=3]
    """
    return _pool(x, ksize, "MAX_3D", name)


def avg_pool2d(
    x: mtf.Tensor, ksize: Sequence[int] = (2, 2), name: str = "avg_pool2d"
) -> mtf.Tensor:
    """Applies 2-D average pooling to [batch..., h, w, channels]; see `max_pool2d`.

    >>> images = mtf.ones(mesh, "batch:2,h:4,w:4,channels:3")
    >>> print(mtf.layers.avg_pool2d(images, ksize=(2, 2)).shape)
    Shape[batch=2, h=2, w=2, channels=3]
    """
    return _pool(x, ksize, "AVG_2D", name)


def avg_pool3d(
    x: mtf.Tensor, ksize: Sequence[int] = (2, 2, 2), name: str = "avg_pool3d"
) -> mtf.Tensor:
    """Applies 3-D average pooling to [batch..., d, h, w, channels]; see `max_pool2d`.

    >>> volumes = mtf.ones(mesh, "batch:2,d:4,h:4,w:4,channels:3")
    >>> print(mtf.layers.avg_pool3d(volumes, ksize=(2, 2, 2)).shape)
    Shape[batch=2, d=2, h=2, w=2, channels=3]
    """
    return _pool(x, ksize, "AVG_3D", name)

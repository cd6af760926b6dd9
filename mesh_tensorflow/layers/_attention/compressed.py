"""Attention to a memory that is compressed by averaging neighboring positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.layers._attention.attention import (
    attend,
    check_dropout,
    multihead_attention_vars,
)
from mesh_tensorflow.layers._attention.masks import hidden_where
from mesh_tensorflow.layers._early_forms import trains_if_not_told

__all__ = ["compress_mean", "multihead_self_attention_memory_compressed"]


def _check_factor(what: str, x: mtf.Tensor, dim: mtf.Dimension, factor: int) -> None:
    if dim not in x.shape:
        raise ValueError(f"{what}: {x.name} {x.shape} has no dimension {dims_text([dim])}")
    if factor < 1 or dim.size % factor:
        raise ValueError(
            f"{what}: the compression factor {factor} must divide {dims_text([dim])} of {x.name} "
            f"{x.shape}; pad that dimension, or use another factor"
        )


@leaves_no_node
def compress_mean(x: mtf.Tensor, dim: mtf.Dimension, compression_factor: int) -> mtf.Tensor:
    """Averages groups of neighboring positions along a dimension.

    >>> x = mtf.constant(mesh, [1.0, 3.0, 5.0, 7.0], "length:4")
    >>> print(mtf.layers.compress_mean(x, x.shape.dims[0], 2).numpy())
    [2. 6.]

    Args:
      x: a Tensor.
      dim: a Dimension of `x`.
      compression_factor: the number of positions per group.

    Returns:
      A Tensor in which `dim` is shorter by that factor.

    Raises:
      ValueError: the factor does not divide the size of `dim`.
    """
    _check_factor("compress_mean", x, dim, compression_factor)
    groups = mtf.Dimension(dim.name, dim.size // compression_factor)
    group = mtf.Dimension("compression_factor", compression_factor)
    x = mtf.reshape(x, mtf.replace_dimensions(x.shape, dim, [groups, group]))
    return mtf.reduce_mean(x, reduced_dim=group)


@trains_if_not_told
@leaves_no_node
def multihead_self_attention_memory_compressed(
    x: mtf.Tensor,
    mask_right: bool,
    compression_factor: int,
    kv_channels: mtf.Dimension,
    heads: mtf.Dimension,
    is_training: bool,
    dropout: float = 0.0,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]] = None,
    master_dtype: tf.DType = tf.float32,
    slice_dtype: tf.DType = tf.float32,
    name: Optional[str] = "multihead_attention",
) -> mtf.Tensor:
    """Attends to means of groups of positions, and to one extra position with key and value 0.

    Memory-compressed attention of Liu et al., "Generating Wikipedia by summarizing long
    sequences" (2018), with means instead of strided convolutions.

    >>> x = mtf.ones(mesh, "batch:2,length:4,d_model:8")
    >>> kv, heads = mtf.Dimension("kv", 4), mtf.Dimension("heads", 2)
    >>> y = mtf.layers.multihead_self_attention_memory_compressed(
    ...     x, mask_right=True, compression_factor=2, kv_channels=kv, heads=heads, is_training=False
    ... )
    >>> print(y.shape)
    Shape[batch=2, length=4, d_model=8]

    Args:
      x: a Tensor with dimensions [batch..., length, io].
      mask_right: whether a position attends only to groups that end at or before it.
      compression_factor: the number of positions per group.
      kv_channels: a Dimension, the channels of queries, keys and values.
      heads: the Dimension of attention heads.
      is_training: whether dropout is applied; if it is left out, as before 0.1.19, it is.
      dropout: the dropout rate of the attention weights.
      dropout_broadcast_dims: Dimensions along which dropout is shared, or None.
      master_dtype: a dtype.
      slice_dtype: a dtype.
      name: a string, the variable scope; "compressed_attention" if None.

    Returns:
      A Tensor of the shape of `x`.

    Raises:
      ValueError: the factor does not divide the length, or dropout is out of range.
    """
    what = "multihead_self_attention_memory_compressed"
    if len(x.shape) < 2:
        raise ValueError(f"{what}: {x.name} {x.shape} must be [batch..., length, io]")
    length, io = x.shape.dims[-2:]
    _check_factor(what, x, length, compression_factor)
    check_dropout(what, dropout)
    if "memory_length" in x.shape.dimension_names:
        raise ValueError(
            f"{what}: the length of {x.name} {x.shape} is renamed to memory_length, and it has a "
            "dimension of that name. Rename it"
        )
    with tf.variable_scope(name, default_name="compressed_attention"):
        weights = multihead_attention_vars(
            x.mesh, heads, io, kv_channels, master_dtype, slice_dtype, x.dtype
        )
        memory = compress_mean(x, length, compression_factor)
        memory = mtf.rename_dimension(memory, length.name, "memory_length")
        mask = None
        if mask_right:
            first = mtf.range(x.mesh, memory.shape.dims[-2], tf.int32) * compression_factor
            query_pos = mtf.range(x.mesh, length, tf.int32)
            # A group is the mean of all its positions, so a query before its end would see later
            # ones.
            mask = hidden_where(mtf.less(query_pos, first + (compression_factor - 1)), x.dtype)
        return attend(
            x,
            memory,
            mask,
            weights,
            kv_channels,
            heads,
            is_training=is_training,
            dropout=dropout,
            dropout_broadcast_dims=dropout_broadcast_dims,
            # The position with key 0 has the logit 0; its value 0 adds nothing to the mean. It lets
            # early positions attend, which see no group at all.
            extra_logit=0.0,
        )

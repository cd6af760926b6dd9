"""Masks for attention: 0 where a query may look, a large negative number elsewhere."""

from __future__ import annotations

from typing import Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import leaves_no_node

__all__ = [
    "attention_bias_local_2d_block",
    "attention_bias_local_block",
    "attention_mask_autoregressive",
    "attention_mask_ignore_padding",
    "attention_mask_same_segment",
    "rename_length_to_memory_length",
]

# Added to a logit, it makes the weight exactly 0, and fits into bfloat16.
MASKED_LOGIT = -1e9


def hidden_where(condition: mtf.Tensor, dtype: tf.DType) -> mtf.Tensor:
    """Returns an attention mask of the positions where `condition` is true."""
    return mtf.cast(condition, dtype) * MASKED_LOGIT


@leaves_no_node
def rename_length_to_memory_length(
    x: mtf.Tensor, length_name: str = "length", memory_length_name: str = "memory_length"
) -> mtf.Tensor:
    """Returns `x` with its length called otherwise, so that queries and memory can be told apart.

    Args:
      x: a Tensor with a dimension `length_name`.
      length_name: a string.
      memory_length_name: a string.

    Raises:
      ValueError: there is no dimension `length_name`.
    """
    return mtf.rename_dimension(x, length_name, memory_length_name)


@leaves_no_node
def attention_mask_ignore_padding(inputs: mtf.Tensor, dtype: tf.DType = tf.float32) -> mtf.Tensor:
    """Returns an attention mask of padding, id 0.

    Args:
      inputs: ids, a Tensor with dimensions [..., length].
      dtype: of the mask.

    Returns:
      A Tensor with dimensions [..., memory_length].
    """
    return hidden_where(mtf.equal(rename_length_to_memory_length(inputs), 0), dtype)


@leaves_no_node
def attention_mask_autoregressive(
    query_pos: mtf.Tensor, dtype: tf.DType = tf.float32
) -> mtf.Tensor:
    """Returns a mask that hides later positions.

    Args:
      query_pos: positions, an integer Tensor with dimensions [..., length].
      dtype: of the mask.

    Returns:
      A Tensor with dimensions [..., length, memory_length].
    """
    memory_pos = rename_length_to_memory_length(query_pos)
    return hidden_where(mtf.less(query_pos, memory_pos), dtype)


@leaves_no_node
def attention_mask_same_segment(
    query_segment: mtf.Tensor,
    memory_segment: Optional[mtf.Tensor] = None,
    dtype: tf.DType = tf.float32,
) -> mtf.Tensor:
    """Returns a mask that hides other segments, as of several examples packed into one.

    Args:
      query_segment: numbers of segments, an integer Tensor with dimensions [..., length].
      memory_segment: the same for the memory, with a dimension length or memory_length;
        `query_segment` if None.
      dtype: of the mask.

    Returns:
      A Tensor with dimensions [..., length, memory_length].
    """
    if memory_segment is None:
        memory_segment = query_segment
    if "memory_length" not in memory_segment.shape.dimension_names:
        memory_segment = rename_length_to_memory_length(memory_segment)
    return hidden_where(mtf.not_equal(query_segment, memory_segment), dtype)


def _check_names(what: str, query_dims: list, memory_dims: list) -> None:
    names = [d.name for d in query_dims + memory_dims]
    if len(set(names)) < len(names):
        raise ValueError(
            f"{what}: dimensions of queries ({dims_text(query_dims)}) and of the memory "
            f"({dims_text(memory_dims)}) must have different names"
        )


@leaves_no_node
def attention_bias_local_block(
    mesh: mtf.Mesh,
    block_length: mtf.Dimension,
    memory_length: mtf.Dimension,
    dtype: tf.DType = tf.int32,
) -> mtf.Tensor:
    """Returns a mask for blocks that see the block before them and themselves up to each position.

    Args:
      mesh: a Mesh.
      block_length: the Dimension of a block of queries.
      memory_length: a Dimension that gives the memory its name; its size does not matter.
      dtype: of the positions that are compared.

    Returns:
      A float32 Tensor with dimensions [block_length, memory_length], of which the latter is
      twice as long as the block.

    Raises:
      ValueError: both dimensions have one name.
    """
    _check_names("attention_bias_local_block", [block_length], [memory_length])
    memory_length = mtf.Dimension(memory_length.name, 2 * block_length.size)
    query_pos = mtf.range(mesh, block_length, dtype) + block_length.size
    memory_pos = mtf.range(mesh, memory_length, dtype)
    return hidden_where(mtf.less(query_pos, memory_pos), tf.float32)


@leaves_no_node
def attention_bias_local_2d_block(
    mesh: mtf.Mesh,
    h_dim: mtf.Dimension,
    w_dim: mtf.Dimension,
    memory_h_dim: mtf.Dimension,
    memory_w_dim: mtf.Dimension,
    dtype: tf.DType = tf.int32,
) -> mtf.Tensor:
    """Returns a mask for blocks of an image that see those before them and part of themselves.

    The memory of a block is itself and the blocks above, to the left, and above to the left, all
    of which come before it. In the block itself rows come one after the other.

    Args:
      mesh: a Mesh.
      h_dim: the Dimension of rows of a block.
      w_dim: the Dimension of columns of a block.
      memory_h_dim: a Dimension that gives rows of the memory a name; its size does not matter.
      memory_w_dim: the same for columns.
      dtype: of the positions that are compared.

    Returns:
      A float32 Tensor with dimensions [h_dim, w_dim, memory_h_dim, memory_w_dim], of which the
      last two are twice as large as the block's.

    Raises:
      ValueError: two of the dimensions have one name.
    """
    _check_names("attention_bias_local_2d_block", [h_dim, w_dim], [memory_h_dim, memory_w_dim])
    memory_h = mtf.Dimension(memory_h_dim.name, 2 * h_dim.size)
    memory_w = mtf.Dimension(memory_w_dim.name, 2 * w_dim.size)

    def positions(dim: mtf.Dimension, begin: int) -> mtf.Tensor:
        return mtf.range(mesh, dim, dtype) - begin

    query_pos = positions(h_dim, 0) * w_dim.size + positions(w_dim, 0)
    row, column = positions(memory_h, h_dim.size), positions(memory_w, w_dim.size)
    within = mtf.logical_and(mtf.greater_equal(row, 0), mtf.greater_equal(column, 0))
    later = mtf.less(query_pos, row * w_dim.size + column)
    return hidden_where(mtf.logical_and(later, within, output_shape=later.shape), tf.float32)

"""Attention masks: 0 where a query may attend, a large negative number elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.layers import _visibility
from mesh_tensorflow.layers._visibility import Buckets, bucket_of
from mesh_tensorflow.ops._elementwise.compare import select


class Distances(NamedTuple):
    """A bias of distances between positions.

    In place of the Tensors there may be their slices, or what else stands for them.

    Attributes:
      buckets: how distances are put into buckets.
      values: a Tensor with dimensions [heads..., buckets_dim]; of slices, 1 for what it lacks.
      buckets_dim: a Dimension.
      here: the positions of queries, an int32 Tensor.
      there: those of the memory.
    """

    buckets: Buckets
    values: mtf.Tensor
    buckets_dim: mtf.Dimension
    here: mtf.Tensor
    there: mtf.Tensor


def bucketed(relative_position: mtf.Tensor, buckets: Buckets) -> mtf.Tensor:
    """Returns the buckets of positions of the memory relative to queries."""
    return mtf.cwise(
        lambda relative: bucket_of(relative, buckets),
        [relative_position],
        output_dtype=tf.int32,
        name="relative_position_bucket",
    )


def of_buckets(
    values: mtf.Tensor, buckets: mtf.Tensor, buckets_dim: mtf.Dimension, memory_dim: mtf.Dimension
) -> mtf.Tensor:
    """Returns the values of buckets, with the dimensions of both and `memory_dim` last."""
    rest = [d for d in values.shape if d != buckets_dim]
    # What both have, such as the length of a bias by query, is matched and stays once: in `rest`.
    front = [d for d in buckets.shape if d != memory_dim and d not in rest]
    return mtf.gather(values, buckets, buckets_dim, mtf.Shape([*front, *rest, memory_dim]))


def distance_bias(of: Distances) -> mtf.Tensor:
    """Returns a bias of distances as one Tensor, of queries times memory."""
    # Distances are memory minus query: those of earlier positions are negative.
    memory = of.there.shape.dims[-1]
    return of_buckets(of.values, bucketed(of.there - of.here, of.buckets), of.buckets_dim, memory)


class MadeOf(NamedTuple):
    """What an attention bias was made of.

    Attributes:
      rest: the bias without the mask, a Tensor or None.
      visible: comparisons of ids, all of which are true where nothing is masked; as for
        `mtf.layers.blocked_attention`.
      distances: biases of distances, besides these.
      stands_in: whether the bias itself is only a scalar in its place, because no layout that
        splits queries and memory alike has room for all of it.
    """

    rest: Optional[mtf.Tensor]
    visible: Sequence[tuple[str, mtf.Tensor, mtf.Tensor]]
    distances: Sequence[Distances] = ()
    stands_in: bool = False


def made_of(
    bias: mtf.Tensor,
    visible: Sequence[tuple[str, mtf.Tensor, mtf.Tensor]],
    rest: Optional[mtf.Tensor] = None,
    distances: Sequence[Distances] = (),
) -> mtf.Tensor:
    """Returns `bias`, for which attention by blocks uses what it was made of instead.

    Then the whole mask is not needed, and TensorFlow does not compute it.
    """
    bias.made_of = MadeOf(rest, tuple(visible), tuple(distances))
    return bias


def stand_in(
    mesh: mtf.Mesh,
    visible: Sequence[tuple[str, mtf.Tensor, mtf.Tensor]],
    dtype: tf.DType,
    distances: Sequence[Distances] = (),
) -> mtf.Tensor:
    """Returns a scalar in place of a bias, which `whole` makes of it where one is needed."""
    # A 0, as `whole` adds the parts to it.
    bias = mtf.zeros(mesh, [], dtype)
    bias.made_of = MadeOf(None, tuple(visible), tuple(distances), stands_in=True)
    return bias


def whole(bias: Optional[mtf.Tensor]) -> Optional[mtf.Tensor]:
    """Returns a bias, or the one that it stands for."""
    made: Optional[MadeOf] = None if bias is None else bias.made_of
    if bias is None or made is None or not made.stands_in:
        return bias
    parts = [distance_bias(d) for d in made.distances]
    hidden = unseen(made.visible)
    if hidden is not None:
        parts.append(hidden_where(hidden, bias.dtype))
    # By name: a bias by distance has heads, a mask may have the batch, and the sum has both.
    for part in parts:
        bias = bias + part
    return bias


# Those of `_visibility.COMPARISONS`, as operations on Tensors: a mask and a block must agree.
COMPARISONS = {
    "equal": mtf.equal,
    "less_equal": mtf.less_equal,
    "greater_equal": mtf.greater_equal,
}


def unseen(visible: Sequence[tuple[str, mtf.Tensor, mtf.Tensor]]) -> Optional[mtf.Tensor]:
    """Returns where one of the comparisons is false, or None if there are none."""
    hidden = None
    for name, x, y in visible:
        # not (a and b) = (not a) or (not b): one comparison that is false hides the pair.
        different = mtf.logical_not(COMPARISONS[name](x, y))
        hidden = different if hidden is None else mtf.logical_or(hidden, different)
    return hidden


def hidden_where(condition: mtf.Tensor, dtype: tf.DType) -> mtf.Tensor:
    """Returns an attention mask that hides the positions where `condition` is true."""
    # float16 does not have MASKED_LOGIT: it would be infinite, and NaN times 0.
    return mtf.cast(condition, dtype) * _visibility.masked_logit(dtype)


def hide(logits: mtf.Tensor, bias: Optional[mtf.Tensor]) -> mtf.Tensor:
    """Returns logits in which those of pairs that a bias hides are replaced; see `_visibility`.

    Args:
      logits: a Tensor, with the bias if there is one.
      bias: a Tensor whose dimensions are some of the logits', or None.
    """
    if bias is None:
        return logits
    # Of hidden pairs no gradient flows, not to the bias either.
    hidden = mtf.less(bias, _visibility.masked_logit(bias.dtype) / 2)
    bias = mtf.stop_gradient(mtf.cast(bias, logits.dtype))
    # Of the size of the bias, which often lacks dimensions of the logits.
    level = mtf.cwise(_visibility.hidden_logits, [bias], name="hidden_logits")
    return select(hidden, level, logits, logits.shape)


@leaves_no_node
def rename_length_to_memory_length(
    x: mtf.Tensor, length_name: str = "length", memory_length_name: str = "memory_length"
) -> mtf.Tensor:
    """Renames the length dimension of `x`, to tell memory positions from query positions.

    >>> x = mtf.ones(mesh, "batch:2,length:3")
    >>> print(mtf.layers.rename_length_to_memory_length(x).shape)
    Shape[batch=2, memory_length=3]

    Args:
      x: a Tensor with a dimension `length_name`.
      length_name: a string.
      memory_length_name: a string.

    Raises:
      ValueError: `x` has no dimension `length_name`.
    """
    return mtf.rename_dimension(x, length_name, memory_length_name)


@leaves_no_node
def attention_mask_ignore_padding(inputs: mtf.Tensor, dtype: tf.DType = tf.float32) -> mtf.Tensor:
    """Returns an attention mask that hides padding, which has id 0.

    >>> ids = mtf.constant(mesh, [5, 2, 0], "length:3", tf.int32)
    >>> mask = mtf.layers.attention_mask_ignore_padding(ids)
    >>> print(mask.shape, mask.numpy() < 0)
    Shape[memory_length=3] [False False  True]

    Args:
      inputs: ids, a Tensor with dimensions [..., length].
      dtype: the dtype of the mask.

    Returns:
      A Tensor with dimensions [..., memory_length].
    """
    # Without `made_of`: this mask lacks the length of queries, and is small as it is.
    return hidden_where(mtf.equal(rename_length_to_memory_length(inputs), 0), dtype)


@leaves_no_node
def attention_mask_autoregressive(
    query_pos: mtf.Tensor, dtype: tf.DType = tf.float32
) -> mtf.Tensor:
    """Returns an attention mask that hides later positions.

    >>> positions = mtf.range(mesh, mtf.Dimension("length", 3), tf.int32)
    >>> print(mtf.layers.attention_mask_autoregressive(positions).numpy() < 0)
    [[False  True  True]
     [False False  True]
     [False False False]]

    Args:
      query_pos: positions, an integer Tensor with dimensions [..., length].
      dtype: the dtype of the mask.

    Returns:
      A Tensor with dimensions [..., length, memory_length].
    """
    memory_pos = rename_length_to_memory_length(query_pos)
    hidden = hidden_where(mtf.less(query_pos, memory_pos), dtype)
    # Blocks use this comparison alone, and all other forms use `hidden`: the two have to change
    # together.
    return made_of(hidden, [("greater_equal", query_pos, memory_pos)])


@leaves_no_node
def attention_mask_same_segment(
    query_segment: mtf.Tensor,
    memory_segment: Optional[mtf.Tensor] = None,
    dtype: tf.DType = tf.float32,
) -> mtf.Tensor:
    """Returns an attention mask that hides other segments, for examples packed into one sequence.

    >>> segments = mtf.constant(mesh, [1, 1, 2], "length:3", tf.int32)
    >>> print(mtf.layers.attention_mask_same_segment(segments).numpy() < 0)
    [[False False  True]
     [False False  True]
     [ True  True False]]

    Args:
      query_segment: segment ids, an integer Tensor with dimensions [..., length].
      memory_segment: segment ids of the memory, with a dimension length or memory_length;
        `query_segment` if None.
      dtype: the dtype of the mask.

    Returns:
      A Tensor with dimensions [..., length, memory_length].
    """
    if memory_segment is None:
        memory_segment = query_segment
    if "memory_length" not in memory_segment.shape.dimension_names:
        memory_segment = rename_length_to_memory_length(memory_segment)
    # Padding, whose segment is 0, sees padding: in self-attention no query sees nothing.
    hidden = hidden_where(mtf.not_equal(query_segment, memory_segment), dtype)
    return made_of(hidden, [("equal", query_segment, memory_segment)])


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
    """Returns a causal mask for blocks that attend to themselves and to the previous block.

    >>> block, memory = mtf.Dimension("length", 2), mtf.Dimension("memory_length", 4)
    >>> print(mtf.layers.attention_bias_local_block(mesh, block, memory).numpy())
    [[-0.e+00 -0.e+00 -0.e+00 -1.e+09]
     [-0.e+00 -0.e+00 -0.e+00 -0.e+00]]

    Args:
      mesh: a Mesh.
      block_length: a Dimension, the positions of a block of queries.
      memory_length: a Dimension whose name is that of the memory positions; its size is ignored.
      dtype: the dtype of the positions that are compared.

    Returns:
      A float32 Tensor with dimensions [block_length, memory_length], where memory_length is twice
      as long as the block.

    Raises:
      ValueError: both dimensions have the same name.
    """
    _check_names("attention_bias_local_block", [block_length], [memory_length])
    memory_length = mtf.Dimension(memory_length.name, 2 * block_length.size)
    # The block before comes first in the memory, so queries are its second half.
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
    """Returns a causal mask for blocks of an image.

    The memory of a block is the block itself, where a position may attend to itself and to earlier
    positions in row-major order, and the blocks above, to the left, and above to the left, which
    are visible as a whole.

    >>> h, w, mh, mw = mtf.convert_to_shape("h:2,w:2,memory_h:6,memory_w:6").dims
    >>> print(mtf.layers.attention_bias_local_2d_block(mesh, h, w, mh, mw).shape)
    Shape[h=2, w=2, memory_h=4, memory_w=4]

    Args:
      mesh: a Mesh.
      h_dim: a Dimension, the rows of a block.
      w_dim: a Dimension, the columns of a block.
      memory_h_dim: a Dimension whose name is that of the memory rows; its size is ignored.
      memory_w_dim: a Dimension whose name is that of the memory columns; its size is ignored.
      dtype: the dtype of the positions that are compared.

    Returns:
      A float32 Tensor with dimensions [h_dim, w_dim, memory_h_dim, memory_w_dim], where the last
      two are twice as large as those of the block.

    Raises:
      ValueError: two of the dimensions have the same name.
    """
    _check_names("attention_bias_local_2d_block", [h_dim, w_dim], [memory_h_dim, memory_w_dim])
    memory_h = mtf.Dimension(memory_h_dim.name, 2 * h_dim.size)
    memory_w = mtf.Dimension(memory_w_dim.name, 2 * w_dim.size)

    def positions(dim: mtf.Dimension, begin: int) -> mtf.Tensor:
        return mtf.range(mesh, dim, dtype) - begin

    # Numbers in row-major order, so that one comparison tells which of two positions is later.
    query_pos = positions(h_dim, 0) * w_dim.size + positions(w_dim, 0)
    row, column = positions(memory_h, h_dim.size), positions(memory_w, w_dim.size)
    # Negative rows or columns are those of the blocks above and to the left.
    within = mtf.logical_and(mtf.greater_equal(row, 0), mtf.greater_equal(column, 0))
    later = mtf.less(query_pos, row * w_dim.size + column)
    return hidden_where(mtf.logical_and(later, within, output_shape=later.shape), tf.float32)

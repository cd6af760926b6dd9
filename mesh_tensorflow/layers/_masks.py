"""What the queries of an attention see, and its biases by distance: of slices, and as masks.

A mask is a Tensor, 0 where a query may attend and a large negative number elsewhere.

A pair is hidden if its ids compare otherwise than they should, or if what is added to its logit is
less than half of MASKED_LOGIT. The logit of a hidden pair is HIDDEN_LOGIT, whatever its query and
its key are, and no gradient flows through it. So

- where a query sees something, weights of what is hidden from it are exactly 0;
- a query that sees nothing has the mean of all values, or 0 if the softmax has an extra logit. The
  values get their part of the gradient; queries, keys and biases get 0.

Logits are selected and not summed, so that this depends on no rounding: it is the same in blocks,
in rings and with all logits at once, in each layout and for logits of any size. Memory that is only
room at the border, such as that beyond the ends in local attention, has ABSENT_LOGIT: it is no part
of the mean either.

Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer"
(2020), section 2.1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.ops._elementwise.binary import select

# -- slices of one processor

# (comparison, ids of queries, ids of the memory), arranged as [*front, length, memory] with 1 for
# dimensions that they lack.
Compared = tuple[str, tf.Tensor, tf.Tensor]

# How an id of a query and one of the memory compare if the one sees the other.
COMPARISONS: dict[str, Callable] = {
    "equal": tf.equal,
    "less_equal": tf.less_equal,
    "greater_equal": tf.greater_equal,
}

# What masks add to logits; representable in bfloat16.
MASKED_LOGIT = -1e9
# The logits of hidden pairs: less than those of any products, far apart, and finite in bfloat16.
HIDDEN_LOGIT, ABSENT_LOGIT = -1e30, -1e35


def masked_logit(dtype: tf.DType) -> float:
    """Returns what masks of a dtype add to logits: MASKED_LOGIT, or the least that float16 has."""
    return max(MASKED_LOGIT, float(dtype.min)) if dtype.is_floating else MASKED_LOGIT


def hidden_logits(bias: tf.Tensor) -> tf.Tensor:
    """Returns the logits that pairs have if a bias hides them."""
    # float16 has neither number: the least that it has stands for both.
    hidden, absent = (
        tf.constant(max(x, float(bias.dtype.min)), bias.dtype) for x in (HIDDEN_LOGIT, ABSENT_LOGIT)
    )
    return tf.where_v2(bias < absent / 2, absent, hidden)


def with_hidden(logits: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Returns logits in which those of pairs that a bias hides are replaced; for any shapes.

    Args:
      logits: a tf.Tensor, with the bias in it.
      bias: a tf.Tensor in the dtype that it was made in, which tells what hides.
    """
    hidden = bias < masked_logit(bias.dtype) / 2
    return tf.where_v2(hidden, hidden_logits(tf.cast(bias, logits.dtype)), logits)


def _all_greater(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns whether the ids of all queries are greater than those of all the memory."""
    return tf.greater(tf.reduce_min(x, -2, keepdims=True), tf.reduce_max(y, -1, keepdims=True))


def _all_less(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.less(tf.reduce_max(x, -2, keepdims=True), tf.reduce_min(y, -1, keepdims=True))


# When no query of a block sees anything, by the smallest and the largest ids.
_NEVER: dict[str, Callable] = {
    # Where ranges overlap a block is computed, though no ids may be equal.
    "equal": lambda x, y: tf.logical_or(_all_less(x, y), _all_greater(x, y)),
    "less_equal": _all_greater,
    "greater_equal": _all_less,
}


def sees_nothing(visible: Sequence[Compared]) -> tf.Tensor:
    """Returns a scalar: true only if no query of a block sees any of its memory."""
    never = (_NEVER[comparison](rows, columns) for comparison, rows, columns in visible)
    return tf.reduce_all(functools.reduce(tf.logical_or, never))


def sees_own_position(
    visible: Sequence[Compared],
    biases: Sequence[tf.Tensor],
    length: int,
    start: Union[int, tf.Tensor],
) -> tf.Tensor:
    """Returns a scalar: whether each query sees the position of the memory that has its number.

    Then weights of what is hidden from it are exactly 0, and blocks of them may be left out. A
    query that sees nothing has the mean of everything, for which all blocks are needed.

    Args:
      visible: comparisons, whose ids have the length or the memory, none of them both.
      biases: tensors that are added to logits, arranged in the same way, none with both either. A
        bias may hide a position too.
      length: the number of queries.
      start: which position of the memory has the number of the first query.
    """

    def own(x: tf.Tensor) -> tf.Tensor:
        """Returns what each pair of a query and its own position has, [*front, length or 1]."""
        *front, rows, columns = x.shape.as_list()
        if columns == 1:
            return tf.reshape(x, [*front, rows])
        x = tf.reshape(x, [*front, columns])
        if columns == length:
            return x
        return tf.slice(x, [0] * len(front) + [start], [*front, length])

    seen = [COMPARISONS[name](own(x), own(y)) for name, x, y in visible]
    if biases:
        # The sum of the least values is at most the bias of any own position; one scalar of each.
        total = tf.add_n([_wide(tf.reduce_min(own(x))) for x in biases])
        seen.append(tf.greater(total, MASKED_LOGIT / 2))
    return tf.reduce_all(tf.stack([tf.reduce_all(x) for x in seen]))


def _wide(bias: tf.Tensor) -> tf.Tensor:
    """Returns a bias in float32, in which what hides in its own dtype hides, too."""
    level = masked_logit(bias.dtype)
    wide = tf.cast(bias, tf.float32)
    return wide if level == MASKED_LOGIT else tf.where_v2(bias < level / 2, MASKED_LOGIT, wide)


class Buckets(NamedTuple):
    """How distances are put into buckets.

    Half of the buckets hold one distance each; the sizes of the others grow logarithmically.

    Attributes:
      number: the number of buckets.
      bidirectional: whether each direction has half of them; if not, positions of the memory after
        the query share the bucket of distance 0.
      max_distance: all larger distances share one bucket.
    """

    number: int
    bidirectional: bool
    max_distance: int


def bucket_of(relative: tf.Tensor, buckets: Buckets) -> tf.Tensor:
    """Returns the buckets of int32 positions of the memory relative to queries."""
    number, bidirectional, max_distance = buckets
    side = number // 2 if bidirectional else number
    exact = side // 2
    # Later positions get the distance 0 in one direction; in both, `side` is added to them below.
    distance = tf.abs(relative) if bidirectional else tf.maximum(-relative, 0)
    # Nothing is left for distances of several to a bucket, or there are too few buckets: all that
    # have no bucket of their own share the last one.
    bucket = tf.minimum(distance, max(side - 1, 0))
    if max_distance > exact > 0:
        bucket = _by_logarithm(distance, exact, side, max_distance)
    return bucket + side * tf.cast(relative > 0, tf.int32) if bidirectional else bucket


def _by_logarithm(distance: tf.Tensor, exact: int, side: int, max_distance: int) -> tf.Tensor:
    """Returns buckets of distances: those below `exact` have their own, longer ones share."""
    # At least `exact`, so that small distances, which are not selected below, give no logarithm of
    # 0.
    far = tf.cast(tf.maximum(distance, exact), tf.float32)
    # log(distance / exact) / log(max_distance / exact), which is 1 at max_distance.
    steps = tf.log(far * (1.0 / exact)) * (1.0 / math.log(max_distance / exact))
    far = tf.minimum(exact + tf.cast(steps * (side - exact), tf.int32), side - 1)
    return tf.where_v2(distance < exact, distance, far)


def _in_one_table(
    index: tf.Tensor, heads: list[int], count: int
) -> tuple[tf.Tensor, list[int], list[int]]:
    """Returns indices for one table, where values and indices have dimensions in common.

    Returns:
      (the indices; the axes that both have, whose tables follow each other in it; the others).
    """
    front = index.shape.as_list()[:-2]
    common = [i for i, (a, b) in enumerate(zip(heads, front, strict=True)) if a > 1 and b > 1]
    # bucket + count * (position along the common axes), the last of them running fastest.
    for i in reversed(common):
        shape = [n if axis == i else 1 for axis, n in enumerate([*front, 1, 1])]
        index += tf.reshape(tf.range(front[i], dtype=index.dtype) * count, shape)
        count *= front[i]
    return index, common, [i for i in range(len(front)) if i not in common]


def looked_up(values: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Returns the values of buckets.

    Args:
      values: [*heads, buckets]; its dimensions but the last are those of `index` but the last two,
        or have size 1 in one of the two.
      index: an integer tensor, [*front, rows, columns].

    Returns:
      A tensor [*(heads or front), rows, columns].
    """
    *heads, count = values.shape.as_list()
    *front, rows, columns = index.shape.as_list()
    index, common, alone = _in_one_table(index, heads, count)
    if common:
        values = tf.transpose(values, [*alone, *common, len(heads)])
    joined = [max(a, b) for a, b in zip(heads, front)]
    heads = [1 if i in common else n for i, n in enumerate(heads)]
    table = tf.reshape(values, [math.prod(heads), -1])
    y = tf.gather(table, tf.reshape(index, [-1]), axis=1)
    if max(front, default=1) > 1:  # side by side, and in order
        y = tf.reshape(y, [*heads, *front, rows, columns])
        n = len(heads)
        pairs = [axis for i in range(n) for axis in (i, n + i)]
        y = tf.transpose(y, [*pairs, 2 * n, 2 * n + 1])
    return tf.reshape(y, [*joined, rows, columns])


def sums_by_bucket(x: tf.Tensor, index: tf.Tensor, heads: list[int], count: int) -> tf.Tensor:
    """Returns the sums of what is in each bucket, the transpose of `looked_up`.

    Args:
      x: [*sizes, rows, columns], of which `looked_up` may have had fewer dimensions.
      index: as for `looked_up`.
      heads: the sizes of values but for the buckets.
      count: the number of buckets.

    Returns:
      A tensor [*heads, count].
    """
    *front, rows, columns = index.shape.as_list()
    n = len(front)
    alone = [i for i in range(n) if heads[i] == 1 == front[i]]
    if any(x.shape.as_list()[i] > 1 for i in alone):
        x = tf.reduce_sum(x, alone, keepdims=True)
    index, common, _ = _in_one_table(index, heads, count)
    of_heads = [i for i in range(n) if heads[i] > 1 and i not in common]
    others = [i for i in range(n) if i not in of_heads]
    # A row for each index, with all heads that share it, as segments are rows.
    x = tf.transpose(x, [*others, n, n + 1, *of_heads])
    flat = tf.reshape(x, [math.prod(front) * rows * columns, math.prod(heads[i] for i in of_heads)])
    segments = math.prod(heads[i] for i in common) * count
    sums = tf.transpose(tf.math.unsorted_segment_sum(flat, tf.reshape(index, [-1]), segments))
    if common:
        order = [*of_heads, *common]
        sums = tf.reshape(sums, [*(heads[i] for i in order), count])
        sums = tf.transpose(sums, [*(order.index(i) for i in sorted(order)), len(order)])
    return tf.reshape(sums, [*heads, count])


# -- Tensors


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
    values: Any
    buckets_dim: mtf.Dimension
    here: Any
    there: Any


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


def unseen(visible: Sequence[tuple[str, mtf.Tensor, mtf.Tensor]]) -> Optional[mtf.Tensor]:
    """Returns where one of the comparisons is false, or None if there are none."""
    # not (a and b) = (not a) or (not b): one comparison that is false hides the pair.
    # Functions of mtf and of TensorFlow have these names: a mask and a block agree.
    hidden = (mtf.logical_not(getattr(mtf, name)(x, y)) for name, x, y in visible)
    return functools.reduce(mtf.logical_or, hidden) if visible else None


def hidden_where(condition: mtf.Tensor, dtype: tf.DType) -> mtf.Tensor:
    """Returns an attention mask that hides the positions where `condition` is true."""
    # float16 does not have MASKED_LOGIT: it would be infinite, and NaN times 0.
    return mtf.cast(condition, dtype) * masked_logit(dtype)


def biased(logits: mtf.Tensor, bias: Optional[mtf.Tensor]) -> mtf.Tensor:
    """Returns logits with a bias added, or a mask; those of pairs that it hides are replaced.

    Args:
      logits: a Tensor.
      bias: a Tensor of any floating dtype, or None.
    """
    if bias is None:
        return logits
    # After the addition: what a mask hides must have one value, whatever the logit was.
    return hide(logits + mtf.cast(bias, logits.dtype), bias)


def hide(logits: mtf.Tensor, bias: Optional[mtf.Tensor]) -> mtf.Tensor:
    """Returns logits in which those of pairs that a bias hides are replaced; see above.

    Args:
      logits: a Tensor, with the bias if there is one.
      bias: a Tensor whose dimensions are some of the logits', or None.
    """
    return logits if bias is None else replaced(logits, *hiding(bias, logits.dtype))


def hiding(bias: mtf.Tensor, dtype: tf.DType) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns which pairs a bias hides, and the logits that these have.

    Args:
      bias: a Tensor.
      dtype: that of the logits.
    """
    # Of hidden pairs no gradient flows, not to the bias either.
    hidden = mtf.less(bias, masked_logit(bias.dtype) / 2)
    bias = mtf.stop_gradient(mtf.cast(bias, dtype))
    # Of the size of the bias, which often lacks dimensions of the logits.
    return hidden, mtf.cwise(hidden_logits, [bias], name="hidden_logits")


def replaced(logits: mtf.Tensor, hidden: mtf.Tensor, level: mtf.Tensor) -> mtf.Tensor:
    """Returns logits in which those of hidden pairs are replaced by a level; see `hiding`."""
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

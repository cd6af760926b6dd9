"""What the queries of an attention see, and its biases by distance, as functions of positions.

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

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Union

import numpy as np
import tensorflow.compat.v1 as tf

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
    never: Any = None
    for comparison, rows, columns in visible:
        found = _NEVER[comparison](rows, columns)
        never = found if never is None else tf.logical_or(never, found)
    return tf.reduce_all(never)


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
    found = tf.minimum(distance, max(side - 1, 0))
    if max_distance > exact > 0:
        found = _by_logarithm(distance, exact, side, max_distance)
    return found + side * tf.cast(relative > 0, tf.int32) if bidirectional else found


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
    table = tf.reshape(values, [int(np.prod(heads, dtype=int)), -1])
    found = tf.gather(table, tf.reshape(index, [-1]), axis=1)
    if max(front, default=1) > 1:  # side by side, and in order
        found = tf.reshape(found, [*heads, *front, rows, columns])
        n = len(heads)
        pairs = [axis for i in range(n) for axis in (i, n + i)]
        found = tf.transpose(found, [*pairs, 2 * n, 2 * n + 1])
    return tf.reshape(found, [*joined, rows, columns])


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
    total = int(np.prod([heads[i] for i in of_heads], dtype=int))
    tables = [heads[i] for i in common]
    number = int(np.prod(front, dtype=int)) * rows * columns
    flat = tf.reshape(x, [number, total])
    rows_of_tables = int(np.prod(tables, dtype=int)) * count
    sums = tf.transpose(tf.math.unsorted_segment_sum(flat, tf.reshape(index, [-1]), rows_of_tables))
    if common:
        order = [*of_heads, *common]
        sums = tf.reshape(sums, [*(heads[i] for i in order), count])
        sums = tf.transpose(sums, [*(order.index(i) for i in sorted(order)), len(order)])
    return tf.reshape(sums, [*heads, count])

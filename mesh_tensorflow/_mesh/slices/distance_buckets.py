"""Buckets of distances between positions, and what is looked up for them.

Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer"
(2020), section 2.1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["Buckets", "bucket_of", "looked_up", "sums_by_bucket"]


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
    distance = tf.abs(relative) if bidirectional else tf.maximum(-relative, 0)
    # At least `exact`, so that small distances, which are not selected below, give no logarithm of
    # 0.
    far = tf.cast(tf.maximum(distance, exact), tf.float32)
    steps = tf.log(far * (1.0 / exact)) * (1.0 / math.log(max_distance / exact))
    far = tf.minimum(exact + tf.cast(steps * (side - exact), tf.int32), side - 1)
    found = tf.where_v2(distance < exact, distance, far)
    return found + side * tf.cast(relative > 0, tf.int32) if bidirectional else found


def _in_one_table(
    index: tf.Tensor, heads: list[int], count: int
) -> tuple[tf.Tensor, list[int], list[int]]:
    """Returns indices for one table, where values and indices have dimensions in common.

    Returns:
      (the indices; the axes that both have, whose tables follow each other in it; the others).
    """
    front = index.shape.as_list()[:-2]
    common = [i for i, (a, b) in enumerate(zip(heads, front, strict=True)) if a > 1 and b > 1]
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

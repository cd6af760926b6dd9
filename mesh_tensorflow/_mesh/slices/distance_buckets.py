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
    far = tf.cast(tf.maximum(distance, exact), tf.float32)
    steps = tf.log(far * (1.0 / exact)) * (1.0 / math.log(max_distance / exact))
    far = tf.minimum(exact + tf.cast(steps * (side - exact), tf.int32), side - 1)
    found = tf.where_v2(distance < exact, distance, far)
    return found + side * tf.cast(relative > 0, tf.int32) if bidirectional else found


def looked_up(values: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Returns the values of buckets.

    Args:
      values: [*heads, buckets]; its dimensions but the last are those of `index` but the last two,
        and one of two that belong together has size 1.
      index: an integer tensor, [*front, rows, columns].

    Returns:
      A tensor [*(heads or front), rows, columns].
    """
    *heads, count = values.shape.as_list()
    *front, rows, columns = index.shape.as_list()
    table = tf.reshape(values, [int(np.prod(heads, dtype=int)), count])
    found = tf.gather(table, tf.reshape(index, [-1]), axis=1)
    joined = [max(a, b) for a, b in zip(heads, front, strict=True)]
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
    of_heads = [i for i in range(n) if heads[i] > 1]
    others = [i for i in range(n) if i not in of_heads]
    x = tf.transpose(x, [*others, n, n + 1, *of_heads])
    total = int(np.prod(heads, dtype=int))
    number = int(np.prod(front, dtype=int)) * rows * columns
    flat = tf.reshape(x, [number, total])
    sums = tf.math.unsorted_segment_sum(flat, tf.reshape(index, [-1]), count)
    return tf.reshape(tf.transpose(sums), [*heads, count])

"""Which pairs of queries and memory attention may see, and what hidden pairs mean.

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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Union

import tensorflow.compat.v1 as tf

__all__ = [
    "ABSENT_LOGIT",
    "COMPARISONS",
    "HIDDEN_LOGIT",
    "MASKED_LOGIT",
    "Compared",
    "hidden_logits",
    "sees_nothing",
    "sees_own_position",
    "with_hidden",
]

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


def hidden_logits(bias: tf.Tensor) -> tf.Tensor:
    """Returns the logits that pairs have if a bias hides them."""
    hidden, absent = (
        tf.constant(max(x, float(bias.dtype.min)), bias.dtype) for x in (HIDDEN_LOGIT, ABSENT_LOGIT)
    )
    return tf.where_v2(bias < absent / 2, absent, hidden)


def with_hidden(logits: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Returns logits in which those of pairs that a bias hides are replaced; for any shapes."""
    return tf.where_v2(bias < MASKED_LOGIT / 2, hidden_logits(bias), logits)


def _all_greater(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns whether the ids of all queries are greater than those of all the memory."""
    return tf.greater(tf.reduce_min(x, -2, keepdims=True), tf.reduce_max(y, -1, keepdims=True))


def _all_less(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.less(tf.reduce_max(x, -2, keepdims=True), tf.reduce_min(y, -1, keepdims=True))


# When no query of a block sees anything, by the smallest and the largest ids.
_NEVER: dict[str, Callable] = {
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
        total = tf.add_n([tf.cast(tf.reduce_min(own(x)), tf.float32) for x in biases])
        seen.append(tf.greater(total, MASKED_LOGIT / 2))
    return tf.reduce_all(tf.stack([tf.reduce_all(x) for x in seen]))

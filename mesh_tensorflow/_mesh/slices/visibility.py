"""Which pairs of queries and memory attention may see, from comparisons of their ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Union

import tensorflow.compat.v1 as tf

__all__ = ["COMPARISONS", "MASKED_LOGIT", "Compared", "sees_nothing", "sees_own_position"]

# (comparison, ids of queries, ids of the memory), arranged as [*front, length, memory] with 1 for
# dimensions that they lack.
Compared = tuple[str, tf.Tensor, tf.Tensor]

# How an id of a query and one of the memory compare if the one sees the other.
COMPARISONS: dict[str, Callable] = {
    "equal": tf.equal,
    "less_equal": tf.less_equal,
    "greater_equal": tf.greater_equal,
}

# Added to a logit, it makes the attention weight exactly 0; representable in bfloat16.
MASKED_LOGIT = -1e9


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
    query that sees nothing has a mean of everything, for which all blocks are needed.

    Args:
      visible: comparisons.
      biases: tensors that are added to logits, arranged in the same way, none with both the length
        and the memory. A bias may hide a position too.
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

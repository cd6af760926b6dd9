"""Loops over the blocks of a length, whose results are summed, joined or passed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

__all__ = ["Start", "Sum", "fold", "over_blocks"]

Start = Union[int, tf.Tensor]


class Sum(NamedTuple):
    """A result of blocks: the sum of theirs, or these joined along an axis."""

    shape: list[int]
    axis: Optional[int]

    def of_block(self, size: int) -> list[int]:
        """Returns the shape of the result of a block of a size, or of so many positions."""
        if self.axis is None:
            return self.shape
        return [*self.shape[: self.axis], size, *self.shape[self.axis + 1 :]]


def over_blocks(
    length: int,
    block: int,
    fn: Callable[[Start, int], list],
    results: Sequence[Sum],
    dtype: tf.DType,
) -> list:
    """Calls a function for each block of a length; returns the sums or the joined results.

    Args:
      length: an integer.
      block: the length of a block; the last one may be shorter.
      fn: takes the start and the length of a block; returns a list of tensors.
      results: the shape of each result, and how it is made of those of blocks.
      dtype: their dtype.
    """
    full, rest = divmod(length, block)
    parts = [fn(0, block)] if full == 1 else []
    if full > 1:
        parts.append(_looped(full, block, fn, results, dtype))
    if rest:
        parts.append(fn(full * block, rest))
    if len(parts) == 1:
        return parts[0]
    return [
        tf.add_n(xs) if result.axis is None else tf.concat(xs, result.axis)
        for result, *xs in zip(results, *parts)
    ]


def _looped(
    count: int, block: int, fn: Callable, results: Sequence[Sum], dtype: tf.DType
) -> list[tf.Tensor]:
    def body(i: tf.Tensor, *state: Any) -> tuple:
        found = fn(i * block, block)
        return i + 1, *(
            old + new if result.axis is None else old.write(i, new)
            for result, old, new in zip(results, state, found)
        )

    start = [
        tf.zeros(result.shape, dtype)
        if result.axis is None
        else tf.TensorArray(dtype, count, element_shape=result.of_block(block))
        for result in results
    ]
    # One block at a time: iterations in parallel would have several blocks of logits in memory.
    state = tf.while_loop(
        lambda i, *_: i < count, body, [tf.constant(0), *start], parallel_iterations=1
    )[1:]
    return [
        x if result.axis is None else _joined(x.stack(), count, result, block)
        for result, x in zip(results, state)
    ]


def _joined(x: tf.Tensor, count: int, result: Sum, block: int) -> tf.Tensor:
    axis = result.axis
    assert axis is not None
    x = tf.reshape(x, [count, *result.of_block(block)])
    order = [*range(1, axis + 1), 0, *range(axis + 1, len(result.shape) + 1)]
    return tf.reshape(tf.transpose(x, order), result.of_block(count * block))


def fold(length: int, block: int, step: Callable, state: list) -> list:
    """Passes a state through the blocks of a length."""
    full, rest = divmod(length, block)
    if full == 1:
        state = step(0, block, *state)
    elif full > 1:
        _, *state = tf.while_loop(
            lambda i, *_: i < full,
            lambda i, *state: (i + 1, *step(i * block, block, *state)),
            [tf.constant(0), *state],
            parallel_iterations=1,
        )
    return step(full * block, rest, *state) if rest else state

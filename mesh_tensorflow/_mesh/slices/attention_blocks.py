"""Attention of one processor by blocks of queries and memory, without a tensor of all logits.

The softmax is computed "online": a running maximum and sum are corrected with each block of the
memory (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The gradient
recomputes each block from the logarithm of the sums (Rabe and Staats, "Self-attention does not need
O(n^2) memory", 2021; Dao et al., "FlashAttention", 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.slices.attention_operands import (
    Block,
    Distances,
    Operands,
    product_minus,
)
from mesh_tensorflow._mesh.slices.block_loops import Start, Sum, fold, over_blocks
from mesh_tensorflow._mesh.slices.distance_buckets import sums_by_bucket
from mesh_tensorflow._mesh.slices.visibility import HIDDEN_LOGIT

__all__ = ["block_gradients", "block_sums", "finished"]


def block_sums(operands: Operands) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns sums of values, largest logits and sums of exponentials, relative to these.

    They are [shared, others, length, value], and [shared, others, length, 1] twice.
    """
    of = operands
    shared, others, length, memory = of.sizes
    channels = of.v.shape.as_list()[2]

    def rows(start: Start, size: int) -> list:
        q = Block(of, (start, 0), (size, memory)).queries(of.q)
        # Finite, so that a block that is hidden by -inf does not make NaNs.
        state = [
            tf.zeros([shared, others * size, channels], of.dtype),
            tf.fill([shared, others * size, 1], tf.constant(of.dtype.min, of.dtype)),
            tf.zeros([shared, others * size, 1], of.dtype),
        ]

        def step(at: Start, columns: int, *state: tf.Tensor) -> list:
            block = Block(of, (start, at), (size, columns))
            return _unless_left_out(block, lambda: _with_block(block, of, q, *state), state)

        state = fold(memory, of.blocks[1], step, state)
        return [tf.reshape(x, [shared, others, size, x.shape.as_list()[2]]) for x in state]

    results = [Sum([shared, others, length, n], 2) for n in (channels, 1, 1)]
    total, largest, weight = over_blocks(length, of.blocks[0], rows, results, of.dtype)
    return total, largest, weight


def _unless_left_out(
    block: Block, compute: Callable[[], list], otherwise: Sequence[tf.Tensor]
) -> list:
    hidden = block.left_out()
    if hidden is None:
        return compute()
    return list(tf.cond(hidden, lambda: [tf.identity(x) for x in otherwise], compute, strict=True))


def _with_block(
    block: Block,
    of: Operands,
    q: tf.Tensor,
    total: tf.Tensor,
    largest: tf.Tensor,
    weight: tf.Tensor,
) -> list:
    s = block.logits(q)
    new = tf.maximum(largest, tf.reduce_max(s, -1, keepdims=True))
    p = tf.exp(s - new)
    old = tf.exp(largest - new)
    # What was summed relative to the old maximum is scaled to the new one (Milakov and Gimelshein,
    # 2018, algorithm 3).
    weight = weight * old + tf.reduce_sum(p, -1, keepdims=True)
    total = total * old + tf.matmul(block.dropped(p, of.noise), block.memories(of.v))
    return [total, new, weight]


def finished(
    total: tf.Tensor, largest: tf.Tensor, weight: tf.Tensor, extra: Optional[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns means of values, logarithms of denominators, and the two parts of the latter.

    Of a row that sees nothing, the logarithm has lost the sum to rounding.

    Args:
      total: from `block_sums`; this and the following have the same dimensions.
      largest: the same.
      weight: the same.
      extra: one more logit of each denominator, or None.
    """
    if extra is not None:
        extra = tf.cast(extra, weight.dtype)
        new = tf.maximum(largest, extra)
        old = tf.exp(largest - new)
        total, largest, weight = total * old, new, weight * old + tf.exp(extra - new)
    return total / weight, largest + tf.log(weight), largest, weight


def block_gradients(
    operands: Operands,
    largest: tf.Tensor,
    shift: tf.Tensor,
    dy: tf.Tensor,
    qkv: bool,
    biases: Sequence[int],
    distances: Sequence[int] = (),
) -> list[tf.Tensor]:
    """Returns gradients, with the arrangement of the operands.

    Args:
      operands: an Operands.
      largest: the largest logit of each row, [shared, others, length, 1].
      shift: the sum of dy times the output for each row, minus the gradient of the logarithm of its
        denominator; divided by the sum of exponentials.
      dy: the gradient of the output, [shared, others, length, value], divided by the same.
      qkv: whether to return the gradients of queries, keys and values.
      biases: the indices of the biases whose gradients follow.
      distances: the indices of the biases of distances, the gradients of whose values follow.
    """
    of = operands
    _, _, length, memory = of.sizes
    # Only values have a gradient of a row that sees nothing; see `visibility`.
    blind = largest < HIDDEN_LOGIT / 2
    seen, shift = (tf.where_v2(blind, tf.zeros_like(x), x) for x in (dy, shift))
    bias_shapes = [of.biases[i].shape.as_list() for i in biases]
    chosen = [of.distances[i] for i in distances]

    def results(columns: int) -> tuple[list[Sum], list[Sum]]:
        """Over blocks of queries, and over blocks of the memory."""
        inner, outer = [], []
        if qkv:
            q, k, v = (x.shape.as_list() for x in (of.q, of.k, of.v))
            inner = [Sum(q, 2), Sum([k[0], columns, k[2]], None),
                     Sum([v[0], columns, v[2]], None)]  # fmt: skip
            outer = [Sum(q, None), Sum(k, 1), Sum(v, 1)]
        for *front, rows, across in bias_shapes:
            n = len(front)
            wide = across if across == 1 != memory else columns
            inner.append(Sum([*front, rows, wide], None if rows == 1 != length else n))
            outer.append(Sum([*front, rows, across], None if across == 1 != memory else n + 1))
        for d in chosen:
            inner.append(Sum(d.values.shape.as_list(), None))
            outer.append(inner[-1])
        return inner, outer

    def of_memory(at: Start, columns: int) -> list:
        def of_queries(start: Start, rows: int) -> list:
            block = Block(of, (start, at), (rows, columns))
            return _unless_left_out(
                block,
                lambda: _gradients_of_block(
                    block, of, (largest, shift, seen, dy), qkv, bias_shapes, chosen
                ),
                [tf.zeros(result.of_block(rows), of.dtype) for result in inner],
            )

        inner = results(columns)[0]
        return over_blocks(length, of.blocks[0], of_queries, inner, of.dtype)

    return over_blocks(memory, of.blocks[1], of_memory, results(0)[1], of.dtype)


def _gradients_of_block(
    block: Block,
    of: Operands,
    rows: tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor],
    qkv: bool,
    bias_shapes: Sequence[list[int]],
    distances: Sequence[Distances],
) -> list[tf.Tensor]:
    q = block.queries(of.q)
    largest, shift, seen, dy = (block.queries(x) for x in rows)
    # Not normalized: `dy` and `shift` are divided by the sums already, which takes a division for
    # each row instead of one for each pair.
    p = tf.exp(block.logits(q, largest))
    v = block.memories(of.v)
    if of.noise is None:
        dp = product_minus(seen, v, shift)
    else:
        dp = block.dropped(tf.matmul(seen, v, transpose_b=True), of.noise) - shift
    # The gradient of a softmax, p * (dp - sum(p * dp)); the sum over the memory is that of dy times
    # the output of the row, which needs no logits (Dao et al., 2022, appendix B.2).
    ds = p * dp
    found = []
    if qkv:
        shared, others, _, channels = of.q.shape.as_list()
        dq = tf.matmul(ds, block.memories(of.k))
        found = [
            tf.reshape(dq, [shared, others, q.shape.as_list()[1] // others, channels]),
            tf.matmul(ds, q, transpose_a=True),
            tf.matmul(block.dropped(p, of.noise), dy, transpose_a=True),
        ]
    for shape in bias_shapes:
        whole = tf.reshape(ds, block.shape)
        axes = [i for i, (a, b) in enumerate(zip(shape, block.shape)) if a == 1 != b]
        found.append(tf.reduce_sum(whole, axes, keepdims=True) if axes else whole)
    for d in distances:
        *heads, count = d.values.shape.as_list()
        whole = tf.reshape(ds, block.shape)
        found.append(sums_by_bucket(whole, block.buckets(d), heads, count))
    return found

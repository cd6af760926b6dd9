"""Attention of one processor's slices, block by block: loops, operands, and the block itself.

The softmax is computed "online": a running maximum and sum are corrected with each block of the
memory (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The gradient
recomputes each block from the logarithm of the sums (Rabe and Staats, "Self-attention does not need
O(n^2) memory", 2021; Dao et al., "FlashAttention", 2022).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh import random_values
from mesh_tensorflow.layers._masks import (
    COMPARISONS,
    HIDDEN_LOGIT,
    Compared,
    Distances,
    bucket_of,
    looked_up,
    sees_nothing,
    sums_by_bucket,
    with_hidden,
)

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
        # Outside of the loop, in which all blocks have one static shape.
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
    # Joined results are written once each: a concatenation would copy all of them in each turn.
    def body(i: tf.Tensor, *state: Any) -> tuple:
        of_block = fn(i * block, block)
        return i + 1, *(
            old + new if result.axis is None else old.write(i, new)
            for result, old, new in zip(results, state, of_block)
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
    # The numbers of blocks go to just before the positions within a block, so that both make
    # one axis of positions in order.
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
            # As in `_looped`: in parallel, iterations would have several blocks of logits in
            # memory.
            parallel_iterations=1,
        )
    return step(full * block, rest, *state) if rest else state


# About how many logits a block has, and how many positions at most along each side. Measured by
# benchmarks/attention.py: larger blocks do not fit into caches, smaller ones are not worth their
# overhead.
_BLOCK_ELEMENTS = 2**21
_LONGEST_BLOCK = 512
_SHORTEST_BLOCK = 64


class Noise(NamedTuple):
    """Dropout: the keys of its random numbers, and the indices that they are a function of.

    A key for each row, so that there may be more than 2**32 weights.

    Attributes:
      key0: an int32 tensor, arranged like a bias, with one number for each row.
      key1: another one.
      columns: the same with one index for each position of the memory.
      keep_prob: a number.
    """

    key0: tf.Tensor
    key1: tf.Tensor
    columns: tf.Tensor
    keep_prob: float


@dataclasses.dataclass(frozen=True)
class Operands:
    """The slices of one processor, arranged.

    Attributes:
      front: sizes of the dimensions of logits before the length and the memory: those that queries
        share with keys, then the others.
      q: queries, [*shared, others, length, key].
      k: keys, [*shared, memory, key].
      v: values, [*shared, memory, value].
      biases: tensors of the shape [*front, length, memory], with 1 for dimensions that they lack.
      visible: triples (a comparison, ids of queries, ids of the memory), arranged in the same way.
      skips: a scalar bool tensor, whether blocks of which nothing is seen may be left out; None if
        never.
      distances: biases of distances, arranged in the same way.
      noise: a Noise or None.
      blocks: the number of positions of queries and of the memory in a block.
      soft_cap: the number that products of queries and keys are capped by, or None.
    """

    front: Sequence[int]
    q: tf.Tensor
    k: tf.Tensor
    v: tf.Tensor
    biases: Sequence[tf.Tensor]
    visible: Sequence[Compared]
    skips: Optional[tf.Tensor]
    distances: Sequence[Distances]
    noise: Optional[Noise]
    blocks: tuple[int, int]
    soft_cap: Optional[float] = None

    @property
    def dtype(self) -> tf.DType:
        """In which logits and sums are computed."""
        return computed_in(self.q.dtype)

    @property
    def sizes(self) -> tuple[list[int], int, int, int]:
        """The sizes of shared dimensions, the number of others, the length, and the memory's."""
        *shared, others, length, _ = self.q.shape.as_list()
        return shared, others, length, self.k.shape.as_list()[-2]


def computed_in(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which logits of queries of a dtype are computed."""
    return tf.float64 if dtype == tf.float64 else tf.float32


def divided_alike(block: int, length: int) -> int:
    """Returns the size of blocks of a length that are as few as those of a size, and alike."""
    return -(-length // -(-length // block))


def default_block_sizes(rows: int, length: int, memory: int) -> tuple[int, int]:
    """Returns the number of positions of queries and of the memory in a block.

    Args:
      rows: how many logits there are for each pair of positions.
      length: the number of positions of queries.
      memory: that of the memory.
    """
    columns = min(memory, _LONGEST_BLOCK)
    # As if blocks were square, so that many rows shorten both sides and not queries alone.
    while columns > _SHORTEST_BLOCK and rows * columns * columns > _BLOCK_ELEMENTS:
        columns //= 2
    columns_that_fit = _BLOCK_ELEMENTS // max(1, rows * columns)
    return min(length, max(_SHORTEST_BLOCK, min(columns_that_fit, _LONGEST_BLOCK))), columns


# -- arranging


def arranged(x: tf.Tensor, names: Sequence[str], order: Sequence[str]) -> tf.Tensor:
    """Returns a slice with its dimensions in another order, and 1 for those that it lacks.

    Args:
      x: a tf.Tensor.
      names: the names of its dimensions.
      order: names that include them.
    """
    present = [name for name in order if name in names]
    if present != list(names):
        x = tf.transpose(x, [list(names).index(name) for name in present])
    if len(present) == len(order):
        return x
    sizes = iter(x.shape.as_list())
    return tf.reshape(x, [next(sizes) if name in present else 1 for name in order])


def restored(x: tf.Tensor, order: Sequence[str], names: Sequence[str]) -> tf.Tensor:
    """Returns a slice with its dimensions as they were before `arranged`.

    Args:
      x: a tf.Tensor.
      order: the names of its dimensions, of which those that are not in `names` have size 1.
      names: the names of the dimensions of the result.
    """
    present = [name for name in order if name in names]
    if len(present) < len(order):
        x = tf.reshape(x, [n for n, name in zip(x.shape.as_list(), order) if name in names])
    return x if present == list(names) else tf.transpose(x, [present.index(name) for name in names])


class Block:
    """One block of logits."""

    def __init__(self, operands: Operands, start: tuple[Start, Start], size: tuple[int, int]):
        self._of = operands
        self._start, self._size = start, size
        self.capped: Optional[tf.Tensor] = None  # products, if they are capped

    def queries(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the queries of the block, or what there is for each: [*shared, rows, ...]."""
        *shared, others, length, channels = x.shape.as_list()
        if self._size[0] != length:
            begin = [*[0] * len(shared), 0, self._start[0], 0]
            x = tf.slice(x, begin, [*shared, others, self._size[0], channels])
        # Cast after the cut, so that no float32 copy of all queries is made.
        return tf.cast(tf.reshape(x, [*shared, others * self._size[0], channels]), self._of.dtype)

    def memories(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the keys or values of the block."""
        *shared, memory, channels = x.shape.as_list()
        if self._size[1] != memory:
            begin = [*[0] * len(shared), self._start[1], 0]
            x = tf.slice(x, begin, [*shared, self._size[1], channels])
        return tf.cast(x, self._of.dtype)

    def term(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the part of a tensor that is arranged like a bias."""
        whole = self._of.sizes[2:]
        *front, rows, columns = x.shape.as_list()
        # A term has each dimension whole or with size 1, and 1 stands for all positions alike.
        lengths = (rows, columns)
        cut = [n == full != size for n, full, size in zip(lengths, whole, self._size)]
        if not any(cut):
            return x
        starts = [start if c else 0 for c, start in zip(cut, self._start)]
        sizes = [size if c else n for c, size, n in zip(cut, self._size, lengths)]
        return tf.slice(x, [0] * len(front) + starts, front + sizes)

    def left_out(self) -> Optional[tf.Tensor]:
        """Returns whether the block may be left out, a scalar; None if it never is."""
        of = self._of
        if of.skips is None:
            return None
        seen = [(name, self.term(rows), self.term(columns)) for name, rows, columns in of.visible]
        return tf.logical_and(of.skips, sees_nothing(seen))

    @property
    def shape(self) -> list[int]:
        """The sizes of its logits, with all dimensions."""
        return [*self._of.front, *self._size]

    def flat(self, x: tf.Tensor) -> tf.Tensor:
        """Returns logits as matrices."""
        shared, others, _, _ = self._of.sizes
        return tf.reshape(x, [*shared, others * self._size[0], self._size[1]])

    def logits(self, q: tf.Tensor, shift: Optional[tf.Tensor] = None) -> tf.Tensor:
        """Returns queries times keys, with biases and masks, minus a number for each row."""
        of = self._of
        terms = bool(of.biases or of.visible or of.distances)
        # Terms select among logits, which has to be before the subtraction; without terms, one
        # product does both.
        if not terms and of.soft_cap is None and shift is not None:
            return product_minus(q, self.memories(of.k), shift)
        s = tf.matmul(q, self.memories(of.k), transpose_b=True)
        if of.soft_cap is not None:
            # Before the terms: a bias is not capped, and a mask has to stay as large as it is.
            s = of.soft_cap * tf.tanh(s / of.soft_cap)
            self.capped = s
        if terms:
            s = self._with_terms(s)
        return s if shift is None else s - shift

    def uncapped(self, ds: tf.Tensor) -> tf.Tensor:
        """Returns the gradient of products of queries and keys, of that of the logits made of them.

        `logits` has to be called before.
        """
        if self.capped is None:
            return ds
        # The derivative of y = c tanh(x / c) is 1 - (y / c)^2.
        return ds * (1.0 - tf.square(self.capped / self._of.soft_cap))

    def _with_terms(self, s: tf.Tensor) -> tf.Tensor:
        of = self._of
        s = tf.reshape(s, self.shape)
        for d in of.distances:
            s = s + tf.cast(looked_up(d.values, self.buckets(d)), s.dtype)
        if of.visible:
            seen = (COMPARISONS[name](self.term(x), self.term(y)) for name, x, y in of.visible)
            visible = functools.reduce(tf.logical_and, seen)
            # Selected, not added: a sum with a large negative number would depend on rounding.
            s = tf.where_v2(visible, s, tf.constant(HIDDEN_LOGIT, s.dtype))
        # Beside -1e30 a bias is lost to rounding: pairs that ids hide keep one logit.
        for x in of.biases:
            bias = self.term(x)
            s = with_hidden(s + tf.cast(bias, s.dtype), bias)
        return self.flat(s)

    def buckets(self, of: Distances) -> tf.Tensor:
        """Returns the bucket of each pair of positions, [*front, rows, columns]."""
        return bucket_of(self.term(of.there) - self.term(of.here), of.buckets)

    def dropped(self, x: tf.Tensor, noise: Optional[Noise]) -> tf.Tensor:
        """Returns weights, or their gradients, with dropout."""
        if noise is None:
            return x
        key0, key1, columns = (self.term(x) for x in noise[:-1])
        part = Noise(key0, key1, columns, noise.keep_prob)
        return self.flat(tf.reshape(x, self.shape) * noise_mask(part, x.dtype))


def product_minus(x: tf.Tensor, y: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
    """Returns the products of the rows of two matrices, minus a number for each row of the first.

    One more channel takes less time than reading and writing the products again.
    """
    # [x, -shift] [y, 1]^T = x y^T - shift, in one product.
    ones = tf.ones([*y.shape.as_list()[:-1], 1], y.dtype)
    return tf.matmul(tf.concat([x, -shift], -1), tf.concat([y, ones], -1), transpose_b=True)


def noise_mask(noise: Noise, dtype: tf.DType) -> tf.Tensor:
    """Returns 1 / keep_prob with probability keep_prob, else 0, for rows and columns."""
    # Any int32 is a key, negative ones as well: the hash takes their bits.
    *keys, columns = (tf.bitcast(x, tf.uint32) for x in noise[:-1])
    bits = random_values.hash_bits(columns, *keys)
    return random_values.keep_where(bits, dtype, noise.keep_prob)


def block_sums(operands: Operands) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns sums of values, largest logits and sums of exponentials, relative to these.

    They are [*shared, others, length, value], and [*shared, others, length, 1] twice.
    """
    of = operands
    shared, others, length, memory = of.sizes
    channels = of.v.shape.as_list()[-1]

    def rows(start: Start, size: int) -> list:
        # Once for all blocks of the memory, not in the loop over them.
        q = Block(of, (start, 0), (size, memory)).queries(of.q)
        # Finite, so that a block that is hidden by -inf does not make NaNs.
        state = [
            tf.zeros([*shared, others * size, channels], of.dtype),
            tf.fill([*shared, others * size, 1], tf.constant(of.dtype.min, of.dtype)),
            tf.zeros([*shared, others * size, 1], of.dtype),
        ]

        def step(at: Start, columns: int, *state: tf.Tensor) -> list:
            block = Block(of, (start, at), (size, columns))
            total, largest, weight = state

            def with_block() -> list:
                s = block.logits(q)
                new = tf.maximum(largest, tf.reduce_max(s, -1, keepdims=True))
                p = tf.exp(s - new)
                # 0 at first: the largest so far is then the least number of the dtype, and there is
                # no sum yet.
                old = tf.exp(largest - new)
                # What was summed relative to the old maximum is scaled to the new one (Milakov and
                # Gimelshein, 2018, algorithm 3).
                sums = weight * old + tf.reduce_sum(p, -1, keepdims=True)
                # Dropout is of normalized weights: the sum above has those that are dropped, too.
                values = total * old + tf.matmul(block.dropped(p, of.noise), block.memories(of.v))
                return [values, new, sums]

            return _unless_left_out(block, with_block, state)

        state = fold(memory, of.blocks[1], step, state)
        return [tf.reshape(x, [*shared, others, size, x.shape.as_list()[-1]]) for x in state]

    axis = len(shared) + 1
    results = [Sum([*shared, others, length, n], axis) for n in (channels, 1, 1)]
    total, largest, weight = over_blocks(length, of.blocks[0], rows, results, of.dtype)
    return total, largest, weight


def _unless_left_out(
    block: Block, compute: Callable[[], list], otherwise: Sequence[tf.Tensor]
) -> list:
    hidden = block.left_out()
    if hidden is None:
        return compute()
    # strict: else a list of one gradient would come back without its list.
    return list(tf.cond(hidden, lambda: [tf.identity(x) for x in otherwise], compute, strict=True))


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
        # As one more block, of a single position whose values are 0.
        new = tf.maximum(largest, extra)
        old = tf.exp(largest - new)
        total, largest, weight = total * old, new, weight * old + tf.exp(extra - new)
    return total / weight, largest + tf.log(weight), largest, weight


def _sums_of_gradients(
    of: Operands,
    columns: int,
    qkv: bool,
    bias_shapes: Sequence[list[int]],
    distances: Sequence[Distances],
) -> tuple[list[Sum], list[Sum]]:
    """Returns how gradients add up over blocks of queries, and over blocks of the memory."""
    _, _, length, memory = of.sizes
    inner, outer = [], []
    if qkv:
        q, k, v = (x.shape.as_list() for x in (of.q, of.k, of.v))
        blocks = ([*n[:-2], columns, n[-1]] for n in (k, v))
        inner = [Sum(q, len(q) - 2), *(Sum(n, None) for n in blocks)]
        outer = [Sum(q, None), Sum(k, len(k) - 2), Sum(v, len(v) - 2)]
    for *front, rows, across in bias_shapes:
        n = len(front)
        # Gradients of blocks are summed where a bias lacks the dimension, and joined elsewhere.
        wide = across if across == 1 != memory else columns
        inner.append(Sum([*front, rows, wide], None if rows == 1 != length else n))
        outer.append(Sum([*front, rows, across], None if across == 1 != memory else n + 1))
    for d in distances:
        inner.append(Sum(d.values.shape.as_list(), None))
        outer.append(inner[-1])
    return inner, outer


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
      largest: the largest logit of each row, [*shared, others, length, 1].
      shift: the sum of dy times the output for each row, minus the gradient of the logarithm of its
        denominator; divided by the sum of exponentials.
      dy: the gradient of the output, [*shared, others, length, value], divided by the same.
      qkv: whether to return the gradients of queries, keys and values.
      biases: the indices of the biases whose gradients follow.
      distances: the indices of the biases of distances, the gradients of whose values follow.
    """
    of = operands
    _, _, length, memory = of.sizes
    # Only values have a gradient of a row that sees nothing; see `_masks`.
    blind = largest < HIDDEN_LOGIT / 2
    seen, shift = (tf.where_v2(blind, tf.zeros_like(x), x) for x in (dy, shift))
    bias_shapes = [of.biases[i].shape.as_list() for i in biases]
    chosen = [of.distances[i] for i in distances]

    def of_block(block: Block) -> list[tf.Tensor]:
        q = block.queries(of.q)
        rows = (largest, shift, seen, dy)
        block_largest, block_shift, block_seen, block_dy = (block.queries(x) for x in rows)
        # Not normalized: `dy` and `shift` are divided by the sums already, which takes a division
        # for each row instead of one for each pair.
        p = tf.exp(block.logits(q, block_largest))
        v = block.memories(of.v)
        if of.noise is None:
            dp = product_minus(block_seen, v, block_shift)
        else:
            dp = block.dropped(tf.matmul(block_seen, v, transpose_b=True), of.noise) - block_shift
        # The gradient of a softmax, p * (dp - sum(p * dp)); the sum over the memory is that of dy
        # times the output of the row, which needs no logits (Dao et al., 2022, appendix B.2).
        ds = p * dp
        gradients = []
        if qkv:
            *shared, others, _, channels = of.q.shape.as_list()
            # dq = ds k, dk = ds^T q and dv = dropped(p)^T dy. Queries of `others` are rows here, so
            # the latter two are summed over them as well.
            products = block.uncapped(ds)
            dq = tf.matmul(products, block.memories(of.k))
            gradients = [
                tf.reshape(dq, [*shared, others, q.shape.as_list()[-2] // others, channels]),
                tf.matmul(products, q, transpose_a=True),
                tf.matmul(block.dropped(p, of.noise), block_dy, transpose_a=True),
            ]
        for shape in bias_shapes:
            whole = tf.reshape(ds, block.shape)
            # A bias was repeated along the dimensions that it lacks, so its gradient is the sum
            # over them.
            axes = [i for i, (a, b) in enumerate(zip(shape, block.shape)) if a == 1 != b]
            gradients.append(tf.reduce_sum(whole, axes, keepdims=True) if axes else whole)
        for d in chosen:
            *heads, count = d.values.shape.as_list()
            whole = tf.reshape(ds, block.shape)
            gradients.append(sums_by_bucket(whole, block.buckets(d), heads, count))
        return gradients

    def of_memory(at: Start, columns: int) -> list:
        def of_queries(start: Start, rows: int) -> list:
            block = Block(of, (start, at), (rows, columns))
            return _unless_left_out(
                block,
                lambda: of_block(block),
                [tf.zeros(result.of_block(rows), of.dtype) for result in inner],
            )

        # Over queries within a block of the memory: its keys and values get one sum each, and only
        # the gradient of queries is added up as a whole for every block.
        inner = _sums_of_gradients(of, columns, qkv, bias_shapes, chosen)[0]
        return over_blocks(length, of.blocks[0], of_queries, inner, of.dtype)

    # Those over the memory are the same for any size of a block.
    _, sums = _sums_of_gradients(of, 0, qkv, bias_shapes, chosen)
    return over_blocks(memory, of.blocks[1], of_memory, sums, of.dtype)

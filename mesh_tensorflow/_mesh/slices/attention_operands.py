"""The operands of attention on one processor, and the blocks of its logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.slices import random_values
from mesh_tensorflow._mesh.slices.block_loops import Start
from mesh_tensorflow._mesh.slices.distance_buckets import Buckets, bucket_of, looked_up
from mesh_tensorflow._mesh.slices.visibility import (
    COMPARISONS,
    HIDDEN_LOGIT,
    Compared,
    sees_nothing,
    with_hidden,
)

__all__ = [
    "Block",
    "Distances",
    "Noise",
    "Operands",
    "arranged",
    "computed_in",
    "default_block_sizes",
    "divided_alike",
    "noise_mask",
    "product_minus",
    "restored",
]

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


class Distances(NamedTuple):
    """A bias of distances between positions.

    Attributes:
      buckets: how distances are put into buckets.
      values: a value for each bucket, [*front, buckets], with 1 for dimensions that it lacks.
      rows: positions of queries, arranged like a bias.
      columns: those of the memory.
    """

    buckets: Buckets
    values: tf.Tensor
    rows: tf.Tensor
    columns: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Operands:
    """The slices of one processor, arranged.

    Attributes:
      front: sizes of the dimensions of logits before the length and the memory: those that queries
        share with keys, then the others.
      q: queries, [shared, others, length, key].
      k: keys, [shared, memory, key].
      v: values, [shared, memory, value].
      biases: tensors of the shape [*front, length, memory], with 1 for dimensions that they lack.
      visible: triples (a comparison, ids of queries, ids of the memory), arranged in the same way.
      skips: a scalar bool tensor, whether blocks of which nothing is seen may be left out; None if
        never.
      distances: biases of distances.
      noise: a Noise or None.
      blocks: the number of positions of queries and of the memory in a block.
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

    @property
    def dtype(self) -> tf.DType:
        """In which logits and sums are computed."""
        return computed_in(self.q.dtype)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The numbers of shared and of other positions, the length, and that of the memory."""
        shared, others, length, _ = self.q.shape.as_list()
        return shared, others, length, self.k.shape.as_list()[1]


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
    while columns > _SHORTEST_BLOCK and rows * columns * columns > _BLOCK_ELEMENTS:
        columns //= 2
    wanted = _BLOCK_ELEMENTS // max(1, rows * columns)
    return min(length, max(_SHORTEST_BLOCK, min(wanted, _LONGEST_BLOCK))), columns


# -- arranging


def arranged(x: tf.Tensor, names: Sequence[str], order: Sequence[str]) -> tf.Tensor:
    """Returns a slice with its dimensions in another order, and 1 for those that it lacks.

    Args:
      x: a tf.Tensor.
      names: the names of its dimensions.
      order: names that include them.
    """
    held = [name for name in order if name in names]
    if held != list(names):
        x = tf.transpose(x, [list(names).index(name) for name in held])
    if len(held) == len(order):
        return x
    sizes = iter(x.shape.as_list())
    return tf.reshape(x, [next(sizes) if name in held else 1 for name in order])


def restored(x: tf.Tensor, order: Sequence[str], names: Sequence[str]) -> tf.Tensor:
    """Returns a slice with its dimensions as they were before `arranged`.

    Args:
      x: a tf.Tensor.
      order: the names of its dimensions, of which those that are not in `names` have size 1.
      names: the names of the dimensions of the result.
    """
    kept = [name for name in order if name in names]
    if len(kept) < len(order):
        x = tf.reshape(x, [n for n, name in zip(x.shape.as_list(), order) if name in names])
    return x if kept == list(names) else tf.transpose(x, [kept.index(name) for name in names])


def _part(x: tf.Tensor, starts: Sequence[Optional[Start]], sizes: Sequence[int]) -> tf.Tensor:
    """Slices the axes for which there is a start."""
    if all(start is None for start in starts):
        return x
    return tf.slice(x, [0 if start is None else start for start in starts], sizes)


class Block:
    """One block of logits."""

    def __init__(self, operands: Operands, start: tuple[Start, Start], size: tuple[int, int]):
        self._of = operands
        self._start, self._size = start, size

    def queries(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the queries of the block, or what there is for each: [shared, rows, ...]."""
        shared, others, length, channels = x.shape.as_list()
        if self._size[0] != length:
            starts = [None, None, self._start[0], None]
            x = _part(x, starts, [shared, others, self._size[0], channels])
        return tf.cast(tf.reshape(x, [shared, others * self._size[0], channels]), self._of.dtype)

    def memories(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the keys or values of the block."""
        shared, memory, channels = x.shape.as_list()
        if self._size[1] != memory:
            x = _part(x, [None, self._start[1], None], [shared, self._size[1], channels])
        return tf.cast(x, self._of.dtype)

    def term(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the part of a tensor that is arranged like a bias."""
        whole = self._of.sizes[2:]
        *front, rows, columns = x.shape.as_list()
        starts: list[Optional[Start]] = [None] * len(front)
        sizes = list(front)
        for found, n, start, size in zip((rows, columns), whole, self._start, self._size):
            cut = found == n != size
            starts.append(start if cut else None)
            sizes.append(size if cut else found)
        return _part(x, starts, sizes)

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
        return tf.reshape(x, [shared, others * self._size[0], self._size[1]])

    def logits(self, q: tf.Tensor, shift: Optional[tf.Tensor] = None) -> tf.Tensor:
        """Returns queries times keys, with biases and masks, minus a number for each row."""
        of = self._of
        terms = bool(of.biases or of.visible or of.distances)
        if not terms and shift is not None:
            return product_minus(q, self.memories(of.k), shift)
        s = tf.matmul(q, self.memories(of.k), transpose_b=True)
        if terms:
            s = self._with_terms(s)
        return s if shift is None else s - shift

    def _with_terms(self, s: tf.Tensor) -> tf.Tensor:
        of = self._of
        s = tf.reshape(s, self.shape)
        for d in of.distances:
            s = s + tf.cast(looked_up(d.values, self.buckets(d)), s.dtype)
        visible: Any = None
        for comparison, rows, columns in of.visible:
            seen = COMPARISONS[comparison](self.term(rows), self.term(columns))
            visible = seen if visible is None else tf.logical_and(visible, seen)
        if visible is not None:
            # Selected, not added: a sum with a large negative number would depend on rounding.
            s = tf.where_v2(visible, s, tf.constant(HIDDEN_LOGIT, s.dtype))
        for x in of.biases:
            bias = tf.cast(self.term(x), s.dtype)
            s = with_hidden(s + bias, bias)
        return self.flat(s)

    def buckets(self, of: Distances) -> tf.Tensor:
        """Returns the bucket of each pair of positions, [*front, rows, columns]."""
        return bucket_of(self.term(of.columns) - self.term(of.rows), of.buckets)

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
    ones = tf.ones([*y.shape.as_list()[:-1], 1], y.dtype)
    return tf.matmul(tf.concat([x, -shift], -1), tf.concat([y, ones], -1), transpose_b=True)


def noise_mask(noise: Noise, dtype: tf.DType) -> tf.Tensor:
    """Returns 1 / keep_prob with probability keep_prob, else 0, for rows and columns."""
    *keys, columns = (tf.bitcast(x, tf.uint32) for x in noise[:-1])
    bits = random_values.hash_bits(columns, *keys)
    return random_values.keep_where(bits, dtype, noise.keep_prob)

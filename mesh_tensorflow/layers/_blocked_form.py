"""Describes the inputs of attention by blocks: which dimensions, biases, masks and dropout.

Operations on Tensors (`_blocked_operation.py`) have named dimensions in any order. The functions on
one processor's slices (`_blocked_slices.py`) want arrays in one arrangement. A Form translates
between the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.layers._blocked_slices import (
    Noise,
    Operands,
    arranged,
    default_block_sizes,
    divided_alike,
)
from mesh_tensorflow.layers._masks import Distances, sees_own_position

# -- the form of operands


class Dims(NamedTuple):
    """The dimensions of logits.

    Attributes:
      shared: those that queries and keys have.
      others: those that only queries have, without the length.
      length: that of queries which is cut into blocks.
      memory: that of keys and values which is cut into blocks.
      key: the channels of queries and keys.
      value: the channels of values.
    """

    shared: tuple[mtf.Dimension, ...]
    others: tuple[mtf.Dimension, ...]
    length: mtf.Dimension
    memory: mtf.Dimension
    key: mtf.Dimension
    value: mtf.Dimension

    @property
    def front(self) -> list[mtf.Dimension]:
        """The dimensions of logits before the last two."""
        return [*self.shared, *self.others]

    @property
    def logits(self) -> mtf.Shape:
        """The Shape of the logits."""
        return mtf.Shape([*self.front, self.length, self.memory])


@dataclasses.dataclass(frozen=True)
class Terms:
    """What besides products of queries and keys makes weights; Tensors that lack dimensions.

    Attributes:
      biases: Tensors that are added to logits.
      visible: triples of a comparison and two Tensors, ids of queries and of the memory.
      distances: biases of distances, whose dimension of buckets is none of the logits'.
      noise: two keys of dropout for each row, and the indices of the memory; or an empty tuple.
      keep_prob: a number.
      extra: one more logit of each row, a Tensor or a number; or None.
      soft_cap: the number that products of queries and keys are capped by, or None.
    """

    biases: Sequence[mtf.Tensor] = ()
    visible: Sequence[tuple[str, mtf.Tensor, mtf.Tensor]] = ()
    distances: Sequence[Distances] = ()
    noise: Sequence[mtf.Tensor] = ()
    keep_prob: float = 1.0
    extra: Union[mtf.Tensor, float, None] = None
    soft_cap: Optional[float] = None

    @property
    def tensors(self) -> list[mtf.Tensor]:
        """All Tensors, in the order in which operations have them as inputs."""
        ids = [x for _, rows, columns in self.visible for x in (rows, columns)]
        distances = [x for d in self.distances for x in (d.values, d.here, d.there)]
        return [
            *self.biases,
            *ids,
            *distances,
            *self.noise,
            *([self.extra] if isinstance(self.extra, mtf.Tensor) else []),
        ]

    def with_tensors(self, xs: Sequence[mtf.Tensor]) -> Terms:
        """Returns the same with other Tensors, in the order of `tensors`."""
        # Arguments are evaluated as they are written, so their order has to be that of `tensors`.
        # Slices may stand for the Tensors.
        left = iter(xs)
        return dataclasses.replace(
            self,
            biases=[next(left) for _ in self.biases],
            visible=[(name, next(left), next(left)) for name, _, _ in self.visible],
            distances=[
                d._replace(values=next(left), here=next(left), there=next(left))
                for d in self.distances
            ],
            noise=[next(left) for _ in self.noise],
            extra=next(left) if isinstance(self.extra, mtf.Tensor) else self.extra,
        )

    @property
    def weighted(self) -> tuple[range, range]:
        """The indices in `tensors` of biases, and of the values of distances."""
        # Of distances the values alone: positions are integers, and have no gradient.
        first = len(self.biases) + 2 * len(self.visible)
        return range(len(self.biases)), range(first, first + 3 * len(self.distances), 3)


class Form(NamedTuple):
    """What the slices of an operation mean.

    Attributes:
      dims: Dims.
      q: queries, a Tensor.
      k: keys.
      v: values.
      terms: the Terms.
      block_sizes: the numbers of positions of queries and of the memory in a block, or None.
    """

    dims: Dims
    q: mtf.Tensor
    k: mtf.Tensor
    v: mtf.Tensor
    terms: Terms
    block_sizes: Optional[tuple[int, int]]

    @property
    def row(self) -> list[str]:
        """The names of the dimensions of rows of logits, in order."""
        return self.dims.logits.dimension_names[:-1]

    @property
    def column(self) -> list[str]:
        """The names of the dimensions of keys without the channels, in order."""
        return [d.name for d in (*self.dims.shared, self.dims.memory)]

    def rows(self, x: tf.Tensor, of: mtf.Tensor, channel: mtf.Dimension) -> tf.Tensor:
        """Returns what there is for each row as [shared, others, length, channels]."""
        x = arranged(x, of.shape.dimension_names, [*self.row, channel.name])
        sizes = x.shape.as_list()
        n = len(self.dims.shared)
        # Queries of `others` have the same keys, and so are further rows of one matrix product.
        joined = [mtf.list_product(sizes[:n]), mtf.list_product(sizes[n:-2])]
        return tf.reshape(x, [*joined, *sizes[-2:]])

    def columns(self, x: tf.Tensor, of: mtf.Tensor, channel: mtf.Dimension) -> tf.Tensor:
        """Returns keys or values as [shared, memory, channels]."""
        x = arranged(x, of.shape.dimension_names, [*self.column, channel.name])
        sizes = x.shape.as_list()
        return tf.reshape(x, [mtf.list_product(sizes[:-2]), *sizes[-2:]])

    def arrangement(self, of: mtf.Tensor) -> list[str]:
        """Returns the order of a term's dimensions: that of logits, or buckets after the front."""
        order = self.dims.logits.dimension_names
        buckets = [name for name in of.shape.dimension_names if name not in order]
        return [*order[:-2], *buckets] if buckets else order

    def laid(self, x: tf.Tensor, of: mtf.Tensor) -> tf.Tensor:
        """Returns a slice of one of the Terms' Tensors in its arrangement."""
        return arranged(x, of.shape.dimension_names, self.arrangement(of))

    def _laid_terms(self, terms: Terms, rest: Sequence[tf.Tensor]) -> Terms:
        """Returns the first of the Terms with slices in place of Tensors."""
        return terms.with_tensors([self.laid(x, of) for x, of in zip(rest, terms.tensors)])

    @property
    def may_skip(self) -> bool:
        """Whether some blocks may be known to be left out: if each query has a position of its own.

        Biases and ids of both queries and memory say nothing about it. See `sees_own_position`.
        """
        dims, terms = self.dims, self.terms
        both = {dims.length.name, dims.memory.name}
        ids = [x for _, *pair in terms.visible for x in pair]
        # Without ids no block is known to be hidden; without a position of its own, a query may see
        # nothing.
        whole = any(both <= set(x.shape.dimension_names) for x in [*terms.biases, *ids])
        # With equal sizes each query has a position of its number. Ids of pairs cannot be compared
        # at that position alone, hence not `whole`.
        return bool(terms.visible) and dims.length.size == dims.memory.size and not whole

    @property
    def order(self) -> Optional[str]:
        """The comparison by which blocks are left out, as in causal attention; None if none are.

        Then queries see only what is before them, or only what is after; of both "greater_equal".
        """
        # Of a window, which is bounded on both sides, costs count the blocks that one side hides.
        names = [name for name, _, _ in self.terms.visible] if self.may_skip else []
        return next((name for name in ("greater_equal", "less_equal") if name in names), None)

    def skips(
        self, rest: Sequence[tf.Tensor], length: int, start: Union[int, tf.Tensor]
    ) -> tf.Tensor:
        """Returns whether blocks may be left out, a scalar, from slices; see `may_skip`.

        Args:
          rest: slices of the Tensors of the Terms.
          length: how many queries there are.
          start: which position of the slices of the memory is that of the first query.
        """
        terms = dataclasses.replace(self.terms, distances=(), noise=(), extra=None)
        laid = self._laid_terms(terms, rest)
        return sees_own_position(laid.visible, laid.biases, length, start)

    def blocks(self, rows: int, length: int, memory: int, parts: int) -> tuple[int, int]:
        """Returns block sizes such that few blocks, or none, are in two of several parts.

        Args:
          rows: how many logits there are for each pair of positions.
          length: the number of positions of queries.
          memory: that of the memory.
          parts: how many parts each of them consists of.
        """
        found = self.block_sizes or default_block_sizes(rows, length, memory)
        if parts == 1:
            return found
        # Halves that were exchanged are far apart; a block of both would seldom be hidden whole.
        block, columns = (
            divided_alike(size, n // parts) for size, n in zip(found, (length, memory))
        )
        return block, columns

    def operands(
        self,
        q: tf.Tensor,
        k: tf.Tensor,
        v: tf.Tensor,
        rest: Sequence[tf.Tensor],
        skips: Optional[tf.Tensor] = None,
        parts: int = 1,
    ) -> Operands:
        """Returns the Operands made of slices.

        Args:
          q: queries.
          k: keys.
          v: values.
          rest: the Tensors of the Terms.
          skips: whether blocks may be left out, a scalar; or None.
          parts: how many parts slices consist of that are not next to each other.
        """
        # By the order of q's dimensions, so before q is arranged.
        sizes = dict(zip(self.q.shape.dimension_names, q.shape.as_list()))
        terms = dataclasses.replace(self.terms, noise=(), extra=None)
        noise = None
        if self.terms.noise:
            # Dropout is a function of the position and not of the block, so that the gradient,
            # whose blocks come in another order, has the same mask.
            of_noise = zip(rest[len(terms.tensors) :], self.terms.noise)
            key0, key1, columns = (self.laid(x, of) for x, of in of_noise)
            noise = Noise(key0, key1, columns, terms.keep_prob)
        q = self.rows(q, self.q, self.dims.key)
        k = self.columns(k, self.k, self.dims.key)
        shared, others, length, _ = q.shape.as_list()
        # A pair of positions has a logit for each index of `shared` and `others`, and a block has
        # them all.
        blocks = self.blocks(shared * others, length, k.shape.as_list()[1], parts)
        if blocks[1] >= self.dims.memory.size:
            skips = None  # each block has the positions that queries see
        v = self.columns(v, self.v, self.dims.value)
        laid = self._laid_terms(terms, rest)
        front = [sizes[name] for name in self.row[:-1]]
        return Operands(
            front,
            q,
            k,
            v,
            laid.biases,
            laid.visible,
            skips,
            laid.distances,
            noise,
            blocks,
            terms.soft_cap,
        )

"""Describes the inputs of attention by blocks: which dimensions, biases, masks and dropout.

Operations on Tensors (`_blocked_operation.py`) have named dimensions in any order. The functions on
one processor's slices (`_blocked_slices.py`) want arrays in one arrangement. A Form translates
between the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.layers import _blocked_slices
from mesh_tensorflow.layers._visibility import Buckets, Compared, sees_own_position

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
      distances: tuples of Buckets and of three Tensors: values with a dimension of buckets, which
        is none of the logits', and positions of queries and of the memory.
      noise: two keys of dropout for each row, and the indices of the memory; or an empty tuple.
      keep_prob: a number.
      extra: a Tensor, one more logit of each row, or None.
      extra_value: the same as a number, or None.
      soft_cap: the number that products of queries and keys are capped by, or None.
    """

    biases: Sequence[mtf.Tensor] = ()
    visible: Sequence[tuple[str, mtf.Tensor, mtf.Tensor]] = ()
    distances: Sequence[tuple[Buckets, mtf.Tensor, mtf.Tensor, mtf.Tensor]] = ()
    noise: Sequence[mtf.Tensor] = ()
    keep_prob: float = 1.0
    extra: Optional[mtf.Tensor] = None
    extra_value: Optional[float] = None
    soft_cap: Optional[float] = None

    @property
    def tensors(self) -> list[mtf.Tensor]:
        """All Tensors, in the order in which operations have them as inputs."""
        ids = [x for _, rows, columns in self.visible for x in (rows, columns)]
        distances = [x for _, *xs in self.distances for x in xs]
        return [
            *self.biases,
            *ids,
            *distances,
            *self.noise,
            *([] if self.extra is None else [self.extra]),
        ]

    def with_tensors(self, xs: Sequence[mtf.Tensor]) -> Terms:
        """Returns the same with other Tensors, in the order of `tensors`."""
        # Arguments are evaluated as they are written, so their order has to be that of `tensors`.
        # Any values may stand for the Tensors, such as their indices in a Form.
        left = iter(xs)
        return dataclasses.replace(
            self,
            biases=[next(left) for _ in self.biases],
            visible=[(name, next(left), next(left)) for name, _, _ in self.visible],
            distances=[(b, next(left), next(left), next(left)) for b, *_ in self.distances],
            noise=[next(left) for _ in self.noise],
            extra=None if self.extra is None else next(left),
        )


class Form(NamedTuple):
    """What the slices of an operation mean.

    Attributes:
      dims: Dims.
      q: the names of the dimensions of queries.
      k: those of keys.
      v: those of values.
      rest: those of each Tensor of the Terms.
      terms: the Terms, with the index of each Tensor in place of it.
      block_sizes: the numbers of positions of queries and of the memory in a block, or None.
    """

    dims: Dims
    q: tuple[str, ...]
    k: tuple[str, ...]
    v: tuple[str, ...]
    rest: tuple[tuple[str, ...], ...]
    terms: Terms
    block_sizes: Optional[tuple[int, int]]

    @classmethod
    def of(
        cls,
        q: mtf.Tensor,
        k: mtf.Tensor,
        v: mtf.Tensor,
        dims: Dims,
        terms: Terms,
        block_sizes: Optional[tuple[int, int]],
    ) -> Form:
        """Returns the form of an operation with the inputs q, k, v and those of `terms`."""
        rest = terms.tensors
        q_names, k_names, v_names, *others = (
            tuple(x.shape.dimension_names) for x in (q, k, v, *rest)
        )
        # Indices instead of Tensors, since one Form describes Tensors as well as their slices.
        indices: Any = range(len(rest))
        indexed = terms.with_tensors(indices)
        return cls(dims, q_names, k_names, v_names, tuple(others), indexed, block_sizes)

    @property
    def weighted(self) -> list[int]:
        """The indices of the Tensors of the Terms that are added to logits."""
        # Of distances the values alone: positions are integers, and have no gradient.
        return [*range(len(self.terms.biases)), *(i for _, i, *_ in self.terms.distances)]

    @property
    def row(self) -> list[str]:
        """The names of the dimensions of rows of logits, in order."""
        return self.dims.logits.dimension_names[:-1]

    @property
    def column(self) -> list[str]:
        """The names of the dimensions of keys without the channels, in order."""
        return [d.name for d in (*self.dims.shared, self.dims.memory)]

    def rows(self, x: tf.Tensor, names: Sequence[str], channel: str) -> tf.Tensor:
        """Returns what there is for each row as [shared, others, length, channels]."""
        order = [*self.row, channel]
        x = _blocked_slices.arranged(x, names, order)
        sizes = x.shape.as_list()
        n = len(self.dims.shared)
        # Queries of `others` have the same keys, and so are further rows of one matrix product.
        joined = [mtf.list_product(sizes[:n]), mtf.list_product(sizes[n:-2])]
        return tf.reshape(x, [*joined, *sizes[-2:]])

    def columns(self, x: tf.Tensor, names: Sequence[str], channel: str) -> tf.Tensor:
        """Returns keys or values as [shared, memory, channels]."""
        x = _blocked_slices.arranged(x, names, [*self.column, channel])
        sizes = x.shape.as_list()
        return tf.reshape(x, [mtf.list_product(sizes[:-2]), *sizes[-2:]])

    def of_buckets(self, i: Any) -> list[str]:
        """Returns the order of values of distances: dimensions of rows, then that of buckets."""
        return [*self.row[:-1], *(name for name in self.rest[i] if name not in self.row)]

    def front(self, q: tf.Tensor) -> list[int]:
        """Returns the sizes of the dimensions of logits before the length, from a slice of q."""
        sizes = dict(zip(self.q, q.shape.as_list()))
        return [sizes[name] for name in self.row[:-1]]

    @property
    def may_skip(self) -> bool:
        """Whether some blocks may be known to be left out: if each query has a position of its own.

        Biases and ids of both queries and memory say nothing about it. See
        `_visibility.sees_own_position`.
        """
        dims, terms = self.dims, self.terms
        both = {dims.length.name, dims.memory.name}
        ids: list[Any] = [i for _, *pair in terms.visible for i in pair]
        # Without ids no block is known to be hidden; without a position of its own, a query may see
        # nothing.
        whole = any(both <= set(self.rest[i]) for i in [*range(len(terms.biases)), *ids])
        # With equal sizes each query has a position of its number. Ids of pairs cannot be compared
        # at that position alone, hence not `whole`.
        return bool(terms.visible) and dims.length.size == dims.memory.size and not whole

    @property
    def is_ordered(self) -> bool:
        """Whether queries see only what is before them, or only what is after."""
        return self.order is not None

    @property
    def order(self) -> Optional[str]:
        """The comparison of an order, as in causal attention, or None; of two, "greater_equal"."""
        # Of a window, which is bounded on both sides, costs count the blocks that one side hides.
        names = [name for name, _, _ in self.terms.visible]
        return next((name for name in ("greater_equal", "less_equal") if name in names), None)

    def _laid(self, rest: Sequence[tf.Tensor], i: Any) -> tf.Tensor:
        return _blocked_slices.arranged(rest[i], self.rest[i], [*self.row, self.dims.memory.name])

    def _compared(self, rest: Sequence[tf.Tensor]) -> list[Compared]:
        return [
            (name, self._laid(rest, i), self._laid(rest, j)) for name, i, j in self.terms.visible
        ]

    def skips(
        self, rest: Sequence[tf.Tensor], length: int, start: Union[int, tf.Tensor]
    ) -> tf.Tensor:
        """Returns whether blocks may be left out, a scalar, from slices; see `may_skip`.

        Args:
          rest: slices of the Tensors of the Terms.
          length: how many queries there are.
          start: which position of the slices of the memory is that of the first query.
        """
        biases = [self._laid(rest, i) for i, _ in enumerate(self.terms.biases)]
        return sees_own_position(self._compared(rest), biases, length, start)

    def blocks(self, rows: int, length: int, memory: int, parts: int) -> tuple[int, int]:
        """Returns block sizes such that few blocks, or none, are in two of several parts.

        Args:
          rows: how many logits there are for each pair of positions.
          length: the number of positions of queries.
          memory: that of the memory.
          parts: how many parts each of them consists of.
        """
        found = self.block_sizes or _blocked_slices.default_block_sizes(rows, length, memory)
        if parts == 1:
            return found
        # Halves that were exchanged are far apart; a block of both would seldom be hidden whole.
        block, columns = (
            _blocked_slices.divided_alike(size, n // parts)
            for size, n in zip(found, (length, memory))
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
    ) -> _blocked_slices.Operands:
        """Returns the Operands made of slices.

        Args:
          q: queries.
          k: keys.
          v: values.
          rest: the Tensors of the Terms.
          skips: whether blocks may be left out, a scalar; or None.
          parts: how many parts slices consist of that are not next to each other.
        """

        def values(i: Any) -> tf.Tensor:
            return _blocked_slices.arranged(rest[i], self.rest[i], self.of_buckets(i))

        # By the names of q, so before q is arranged.
        front, terms = self.front(q), self.terms
        noise = None
        if terms.noise:
            indices: Any = terms.noise
            # Dropout is a function of the position and not of the block, so that the gradient,
            # whose blocks come in another order, has the same mask.
            key0, key1, columns = (self._laid(rest, i) for i in indices)
            noise = _blocked_slices.Noise(key0, key1, columns, terms.keep_prob)
        q = self.rows(q, self.q, self.dims.key.name)
        k = self.columns(k, self.k, self.dims.key.name)
        shared, others, length, _ = q.shape.as_list()
        # A pair of positions has a logit for each index of `shared` and `others`, and a block has
        # them all.
        blocks = self.blocks(shared * others, length, k.shape.as_list()[1], parts)
        if blocks[1] >= self.dims.memory.size:
            skips = None  # each block has the positions that queries see
        return _blocked_slices.Operands(
            front,
            q,
            k,
            self.columns(v, self.v, self.dims.value.name),
            [self._laid(rest, i) for i, _ in enumerate(terms.biases)],
            self._compared(rest),
            skips,
            [
                _blocked_slices.Distances(b, values(i), self._laid(rest, j), self._laid(rest, m))
                for b, i, j, m in terms.distances
            ],
            noise,
            blocks,
            terms.soft_cap,
        )

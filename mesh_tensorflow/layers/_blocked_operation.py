"""BlockedAttentionOperation and its gradients: attention that holds only one block of its weights.

`Blocked`, the base of both, decides from the layout how a processor gets the keys and values that
its queries need: it has them, gathers them, or has them passed around in a ring; and it adds up
what that costs. The busiest processor decides about the time of a step, so costs are of its blocks.

Operations have named dimensions in any order, and the functions on one processor's slices
(`_blocked_slices.py`) want arrays in one arrangement. A Form translates between the two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.layout import padded_dims, parts_along
from mesh_tensorflow._core.operation import (
    Collective,
    Cost,
    LaidOutLike,
    is_differentiable,
)
from mesh_tensorflow._core.shape import single_axes
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.layers import _blocked_slices, _ring_attention
from mesh_tensorflow.layers._blocked_slices import (
    Noise,
    Operands,
    arranged,
    computed_in,
    default_block_sizes,
    divided_alike,
    restored,
)
from mesh_tensorflow.layers._masks import Distances, sees_own_position
from mesh_tensorflow.ops._source import or_zeros

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
        """Returns what there is for each row as [*shared, others, length, channels]."""
        x = arranged(x, of.shape.dimension_names, [*self.row, channel.name])
        sizes = x.shape.as_list()
        n = len(self.dims.shared)
        # Queries of `others` have the same keys, and so are further rows of one matrix product.
        # Shared dimensions stay apart: each of several may be split, and XLA's partitioner gathers
        # what is split and becomes one with a dimension before it.
        return tf.reshape(x, [*sizes[:n], mtf.list_product(sizes[n:-2]), *sizes[-2:]])

    def columns(self, x: tf.Tensor, of: mtf.Tensor, channel: mtf.Dimension) -> tf.Tensor:
        """Returns keys or values as [*shared, memory, channels]."""
        return arranged(x, of.shape.dimension_names, [*self.column, channel.name])

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
        sizes = self.block_sizes or default_block_sizes(rows, length, memory)
        if parts == 1:
            return sizes
        # Halves that were exchanged are far apart; a block of both would seldom be hidden whole.
        block, columns = (
            divided_alike(size, n // parts) for size, n in zip(sizes, (length, memory))
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
        *front, length, _ = q.shape.as_list()
        # A pair of positions has a logit for each index of shared and other dimensions, and a block
        # has them all.
        blocks = self.blocks(mtf.list_product(front), length, k.shape.as_list()[-2], parts)
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


# -- the operations


def _positions(part: int, parts: int, size: int, halves: bool) -> list[tuple[int, int]]:
    """Returns where the runs of positions of a part begin and end."""
    if not halves:
        return [(part * size, (part + 1) * size)]
    # As `exchanged` leaves them: part p has the halves 2 p and 2 n - 1 - 2 p of 2 n.
    half = size // 2
    return [(i * half, (i + 1) * half) for i in (2 * part, 2 * parts - 1 - 2 * part)]


def _blocks(runs: list[tuple[int, int]], block: int) -> np.ndarray:
    """Returns the first positions, the ends and the sizes of the blocks of a part, [blocks, 3]."""
    # Runs stand one after the other, and a block of the end of one may have the begin of the next.
    at = np.concatenate([np.arange(begin, end) for begin, end in runs])
    begins = np.arange(0, len(at), block)
    first, last = (f.reduceat(at, begins) for f in (np.minimum, np.maximum))
    return np.stack([first, last + 1, np.diff(np.append(begins, len(at)))], 1)


@functools.lru_cache(1024)
def most_pairs(
    length: int,
    processors: int,
    part: int,
    blocks: tuple[int, int],
    halves: bool,
    earlier: bool,
) -> int:
    """Returns how many pairs of a query and a position the busiest processor computes.

    Blocks are computed whole, unless each of their queries is before all their positions of the
    memory, or after them. Ids are taken to be the positions.

    Args:
      length: how many queries there are, and positions of the memory.
      processors: how many parts the queries are split into.
      part: how many positions of the memory a processor has at a time.
      blocks: the numbers of positions of queries and of the memory in a block, none of which are of
        two parts; those of two halves are, where the number does not divide these.
      halves: whether parts have exchanged their second halves, as in a zigzag.
      earlier: whether queries see what is before them, instead of what is after.
    """
    size = length // processors
    # In turns of a ring, each processor has the blocks of every part once.
    turns = length // part
    begins, ends, widths = np.concatenate(
        [_blocks(_positions(p, turns, part, halves), blocks[1]) for p in range(turns)]
    ).T

    def up_to(bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Widths of all blocks before a bound, so that each block of queries takes one look-up.
        order = np.argsort(bounds)
        return bounds[order], np.concatenate([[0], np.cumsum(widths[order])])

    begins, begun = up_to(begins)
    ends, ended = up_to(ends)
    most = 0
    for p in range(processors):
        first, last, rows = _blocks(_positions(p, processors, size, halves), blocks[0]).T
        if earlier:
            # Left out if all of its positions are after all queries: begin >= last.
            columns = begun[np.searchsorted(begins, last)]
        else:
            # Left out if all of its positions are before all queries: end <= first.
            columns = length - ended[np.searchsorted(ends, first, side="right")]
        most = max(most, int((rows * columns).sum()))
    return most


_FLOPS_PER_LOGIT = 8  # besides those of matrix products


class Blocked(mtf.Operation):
    """What attention by blocks and its gradient have in common."""

    takes_padding = True

    _form: Form  # what its inputs mean
    # Whether the memory's parts are passed around instead of gathered, and how: one of RINGS.
    _ring: Union[bool, str]

    def _unsplittable(self) -> Collection[str]:
        """Channels are summed within a block; values of buckets belong together."""
        dims = self._form.dims
        buckets = [d.buckets_dim for d in self._form.terms.distances]
        return [d.name for d in (dims.key, dims.value, *buckets)]

    def needs_whole(self, mesh_impl: MeshImpl) -> Collection[str]:
        """Returns channels, buckets, and the length and the memory if they are padded."""
        dims = self._form.dims
        padded = padded_dims(mesh_impl, [dims.length, dims.memory])
        return {*super().needs_whole(mesh_impl), *(d.name for d in padded)}

    # -- where the memory is

    def _gathered_axis(self, mesh_impl: MeshImpl) -> Optional[int]:
        """Returns the mesh axis that splits the memory as well as the rows of logits, or None.

        Then each processor needs the whole memory.
        """
        memory = self._form.dims.memory
        return mesh_impl.splitting_axis(memory) if self._meets_rows(mesh_impl) else None

    def _meets_rows(self, mesh_impl: MeshImpl) -> bool:
        """Returns whether an axis, also one of one processor, splits memory and rows of logits."""
        *rows, memory = self._form.dims.logits
        return not {*mesh_impl.splitting_axes([memory])}.isdisjoint(mesh_impl.splitting_axes(rows))

    def _kept_part(self, mesh_impl: MeshImpl) -> list[tuple[str, int]]:
        """Returns how a gradient of the gathered memory becomes that of a processor's part of it.

        Returns:
          Pairs of a method of mesh implementations and a mesh axis.
        """
        axis, rows = self._gathered_axis(mesh_impl), self._form.dims.logits[:-1]
        if axis is None:
            return []
        of_rows = {*mesh_impl.splitting_axes(rows)}
        if of_rows.issuperset(single_axes([axis])):
            return [("reduce_scatter", axis)]
        # Where all processors have the same rows, they have the same gradient, which is no summand.
        return [("reduce_scatter" if a in of_rows else "allsplit", a) for a in single_axes([axis])]

    def _ring_axis(self, mesh_impl: MeshImpl) -> Optional[int]:
        """Returns the mesh axis around which the memory is passed, or None."""
        dims = self._form.dims
        axis = mesh_impl.splitting_axis(dims.memory)
        # One that splits both: else a processor's queries see parts that do not come by.
        return axis if self._ring and axis == mesh_impl.splitting_axis(dims.length) else None

    def _exchanged_axis(self, mesh_impl: MeshImpl) -> Optional[int]:
        """Returns the mesh axis along which halves are exchanged so that work is even, or None."""
        axis = self._ring_axis(mesh_impl)
        if axis is None or not _ring_attention.has_halves(mesh_impl, self._form.dims):
            return None
        # Where no order hides blocks, work is even already, and an exchange would be for nothing.
        needs_exchange = self._ring == _ring_attention.ZIGZAG or self._form.order is not None
        return axis if needs_exchange and self._ring != _ring_attention.CONTIGUOUS else None

    @property
    def ring_dims(self) -> tuple[mtf.Dimension, ...]:
        """The length and the memory if a layout makes a ring that splits both alike, else none."""
        dims = self._form.dims
        return (dims.length, dims.memory) if self._ring else ()

    @property
    def parts_in_ring(self) -> int:
        """Into how many parts each processor of a ring cuts its part, at least."""
        return 2 if self._ring == _ring_attention.ZIGZAG else 1

    def _logits(self, mesh_impl: MeshImpl) -> mtf.Shape:
        """Returns the Shape of the logits; if the memory is gathered, no layout splits it."""
        *rows, memory = self._form.dims.logits
        # Also on the executed mesh, whose axes may be of one processor: it has the same sums.
        if self._meets_rows(mesh_impl):
            # Under a name that no rule splits, as the rows are split by that mesh axis already.
            memory = mtf.Dimension("_blocked_memory", memory.size)
        return mtf.Shape([*rows, memory])

    def _memory_axis(self, x: mtf.Tensor) -> Optional[int]:
        memory = self._form.dims.memory
        return x.shape.dims.index(memory) if memory in x.shape else None

    def _position_axis(self, x: mtf.Tensor) -> Optional[int]:
        """Returns the axis of positions, of queries or of the memory, or None."""
        length = self._form.dims.length
        return x.shape.dims.index(length) if length in x.shape else self._memory_axis(x)

    # -- laid-out operands

    def _operands(self, lowering: mtf.Lowering) -> list[LaidOutLike]:
        """Returns the laid-out inputs with the memory that is computed with at first.

        One more says whether blocks may be left out, if some may.
        """
        mesh_impl = lowering.mesh_impl(self)
        if self._ring:
            # Processors may be merged where it runs, but the layout is what the user thinks of.
            requested = lowering.requested_impl(self)
            _ring_attention.tell(self.name, self._ring, requested, self._form.dims)
        values = [lowering.tensors[x] for x in self.inputs]
        # Of the operands as they lie in the layout: a gathered or an exchanged memory is in another
        # place.
        skips = self._skips(mesh_impl, values)
        values = self._exchanged(mesh_impl, self.inputs, values)
        gathered = self._gathered_axis(mesh_impl)
        if gathered is not None and self._ring_axis(mesh_impl) is None:
            at = [self._memory_axis(x) for x in self.inputs]
            values = [
                v if i is None else mesh_impl.allconcat(v.to_laid_out_tensor(), gathered, i)
                for v, i in zip(values, at)
            ]
        return values + skips

    def _skips(self, mesh_impl: MeshImpl, values: Sequence[LaidOutLike]) -> list[LaidOutLike]:
        """Returns [whether blocks of which nothing is seen may be left out], or an empty list."""
        form = self._form
        length, memory = (mesh_impl.splitting_axis(d) for d in (form.dims.length, form.dims.memory))
        # If another axis splits the memory, a query's own position may be on another processor.
        if not form.may_skip or memory not in (None, length):
            return []
        [size] = mesh_impl.slice_shape(mtf.Shape([form.dims.length]))
        # Some of the queries and the whole memory: their own positions begin somewhere in it.
        begins = (
            [mesh_impl.laid_out_pcoord(length)] if length is not None and memory is None else []
        )

        def skips(*slices: Any) -> tf.Tensor:
            *rest, part = slices if begins else (*slices, 0)
            return form.skips(rest, size, part * size)

        return [mesh_impl.slicewise(skips, *values[3 : 3 + len(form.terms.tensors)], *begins)]

    def _exchanged(
        self, mesh_impl: MeshImpl, tensors: Sequence[mtf.Tensor], values: Sequence[Any]
    ) -> list[Any]:
        """Returns values of Tensors with their halves exchanged, or exchanged back, if they are."""
        axis = self._exchanged_axis(mesh_impl)
        if axis is None:
            return list(values)
        # All that has positions, also ids and biases: these go with the queries or the memory.
        at = [self._position_axis(x) for x in tensors]
        return [
            v if i is None else _ring_attention.exchanged(mesh_impl, axis, v, i)
            for v, i in zip(values, at)
        ]

    def _computed(
        self, lowering: mtf.Lowering, compute: Callable, join: Callable[[Any, Any], Any]
    ) -> tuple[list[LaidOutLike], Sequence[Any]]:
        """Returns the laid-out inputs, and what is computed of them, in a ring of all turns.

        Args:
          lowering: a Lowering.
          compute: takes Operands and slices of the inputs; returns results.
          join: takes laid-out results of two turns; returns both together.
        """
        mesh_impl = lowering.mesh_impl(self)
        values = self._operands(lowering)
        num_halves = 1 if self._exchanged_axis(mesh_impl) is None else 2
        count = 3 + len(self._form.terms.tensors)

        def of_slices(*slices: tf.Tensor) -> tuple:
            # The gradient has inputs after those of the Form; only `compute` knows what they mean.
            inputs, [*skips] = slices[: len(self.inputs)], slices[len(self.inputs) :]
            q, k, v, *rest = inputs[:count]
            [may_skip] = skips or [None]
            return compute(self._form.operands(q, k, v, rest, may_skip, num_halves), *inputs)

        axis = self._ring_axis(mesh_impl)
        if axis is None:
            results = mesh_impl.slicewise(of_slices, *values)
        else:
            # What says whether blocks may be left out comes last, and belongs to no part.
            moving = [*(self._memory_axis(x) is not None for x in self.inputs), False]
            returned = [self._memory_axis(y) is not None for y in self.outputs]
            results = _ring_attention.in_turns(
                mesh_impl, axis, of_slices, values, moving, join, returned
            )
        lowering.count_collectives(self, "blocked_attention_op")
        return values, results

    # -- costs

    def _moved(self, mesh_impl: MeshImpl) -> list[Collective]:
        """Returns the collectives that gather the memory, and scatter gradients along it."""
        axis = self._gathered_axis(mesh_impl)
        if axis is None:
            return []
        inputs, outputs = (
            [x for x in xs if self._memory_axis(x) is not None]
            for xs in (self.inputs, self.outputs)
        )
        if self._ring_axis(mesh_impl) is not None:
            # Outputs take the same way back.
            exchanged = [] if self._exchanged_axis(mesh_impl) is None else [
                x for x in (*self.inputs, *self.outputs) if self._position_axis(x) is not None
            ]  # fmt: skip
            return _ring_attention.collectives(mesh_impl, axis, exchanged, inputs, outputs)
        collectives = []
        for xs, steps in ((inputs, [("allconcat", axis)]), (outputs, self._kept_part(mesh_impl))):
            for x in xs:
                # The whole memory on each processor: a gather's output, and a scatter's input.
                n = mesh_impl.laid_out_size(x.shape) * mesh_impl.shape[axis].size
                for kind, along in steps:
                    if kind != "allsplit":
                        collectives.append(Collective(kind, (along,), n, n * x.dtype.size))
                    n //= mesh_impl.shape[along].size
        return collectives

    def _flops(self, mesh_impl: MeshImpl, products: int) -> int:
        """Returns what is computed if all processors do as much as the busiest one.

        Blocks that an order hides are left out; those of other segments are not known.
        """
        dims = self._form.dims
        logits = mesh_impl.laid_out_size(self._logits(mesh_impl))
        pairs = self._computed_pairs(mesh_impl)
        if pairs is not None:
            [length] = mesh_impl.slice_shape(mtf.Shape([dims.length]))
            # All processors' logits, with the pairs of the busiest one in place of all pairs.
            logits = logits // (length * dims.memory.size) * pairs
        # A product takes 2 * channels for a logit. Half of them have channels of keys and half of
        # values: exactly so of two products, and nearly of five.
        return logits * (products * (dims.key.size + dims.value.size) + _FLOPS_PER_LOGIT)

    def _computed_pairs(self, mesh_impl: MeshImpl) -> Optional[int]:
        """Returns how many pairs of positions the busiest processor computes; None if all."""
        form, dims = self._form, self._form.dims
        axis, split_memory = (mesh_impl.splitting_axis(d) for d in (dims.length, dims.memory))
        # Of a memory that another axis splits, no blocks are left out: see `_skips`.
        if form.order is None or split_memory not in (None, axis):
            return None
        [length] = mesh_impl.slice_shape(mtf.Shape([dims.length]))
        front = mtf.list_product(mesh_impl.slice_shape(mtf.Shape(dims.front)))
        halves = self._exchanged_axis(mesh_impl) is not None
        memory = length if self._ring_axis(mesh_impl) is not None else dims.memory.size
        blocks = form.blocks(front, length, memory, 2 if halves else 1)
        # As in `Form.operands`: a block of the whole memory is never left out.
        if blocks[1] >= dims.memory.size:
            return None
        count = parts_along(axis, mesh_impl.shape)
        within = min(blocks[0], length), min(blocks[1], memory)
        return most_pairs(
            dims.length.size, count, memory, within, halves, form.order == "greater_equal"
        )

    def cost_key(self) -> Hashable:
        """The dimensions that are contracted, and which blocks are computed where."""
        form = self._form
        # All that `_flops` and `_moved` read: operations with equal keys share one cost.
        return form.dims, self._ring, form.block_sizes, form.order


# Matrix products of a block, with the gradients of queries, keys and values, and without.
_QKV_GRADIENT_PRODUCTS = 5
_FURTHER_GRADIENT_PRODUCTS = 2


class BlockedAttentionGradOperation(Blocked):
    """Gradients of attention by blocks, which are computed again."""

    def __init__(
        self,
        forward_op: BlockedAttentionOperation,
        dy: mtf.Tensor,
        dz: mtf.Tensor,
        wanted: Sequence[int],
    ):
        """Creates the operation.

        Args:
          forward_op: the operation whose gradients it computes.
          dy: the gradient of its first output.
          dz: that of the second.
          wanted: the indices of the inputs whose gradients are its outputs: those of q, k and v, or
            none of these; then those of biases.
        """
        inputs = forward_op.inputs
        # Not the logarithm, which in a row that sees nothing has lost the sum to rounding.
        y, _, *parts = forward_op.outputs
        super().__init__([*inputs, y, *parts, dy, dz], name="blocked_attention_grad")
        self._form = forward_op._form
        self._ring = forward_op._ring
        self._plain = forward_op.plain
        self._wanted = list(wanted)
        self._outputs = [
            mtf.Tensor(self, inputs[i].shape, inputs[i].dtype, index=n)
            for n, i in enumerate(wanted)
        ]

    def filling(self, x: mtf.Tensor) -> tuple[Collection[mtf.Dimension], float]:
        """Returns batch and heads that an output lacks: it sums over them, and 0 adds nothing."""
        front = self._form.dims.front
        summed = [d for d in front if any(d not in y.shape for y in self._outputs)]
        # In all inputs: what is past the end of the others may be infinite. Weights are divided by.
        return summed, 1 if x is self._inputs[-3] else 0

    def gradient(self, grad_ys: Sequence[Optional[mtf.Tensor]]) -> list[Optional[mtf.Tensor]]:
        """Differentiates the gradients of the plain form."""
        *inputs, _, _, _, dy, dz = self.inputs
        q, k, v, *rest = inputs
        form = self._form
        wanted = [inputs[i] for i in self._wanted]

        start = len(self.graph.operations)
        # The plain form is made of operations that have gradients of any order; it needs all
        # logits.
        ys = self._plain(q, k, v, form.dims, form.terms.with_tensors(rest))
        first = mtf.gradients(ys, wanted, [dy, dz], self.graph.operations[start:])
        operations = self.graph.operations[start:]
        pairs = [(x, d) for x, d in zip(first, grad_ys) if x is not None and d is not None]
        xs = [*inputs, dy, dz]
        second = mtf.gradients([x for x, _ in pairs], xs, [d for _, d in pairs], operations)
        # None for the results of the forward operation: the plain form makes them of q, k and v
        # itself, whose gradients have that part already.
        return [*second[:-2], None, None, None, *second[-2:]]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Computes gradients block by block; sums over processors are pending."""
        mesh_impl = lowering.mesh_impl(self)
        _, values = self._computed(
            lowering,
            self._gradients,
            lambda old, new: [mesh_impl.slicewise(tf.add, x, y) for x, y in zip(old, new)],
        )
        for y, value in zip(self.outputs, self._exchanged(mesh_impl, self.outputs, values)):
            at = self._memory_axis(y)
            if at is not None and self._ring_axis(mesh_impl) is None:
                # Each processor has a gradient of the whole memory, of its own queries; of the sum
                # it keeps its part.
                for kind, axis in self._kept_part(mesh_impl):
                    value = getattr(mesh_impl, kind)(value, axis, at)
            # Pending: what later operations add to the sum takes part in one allreduce.
            axes = self._summed_axes(mesh_impl, y)
            lowering.set_partial_sum(y, value, axes, "blocked_attention_op")

    def _summed_axes(self, mesh_impl: MeshImpl, x: mtf.Tensor) -> list[int]:
        """Returns the mesh axes to sum over: those that split logits but not `x`."""
        over = set(mesh_impl.splitting_axes(self._logits(mesh_impl)))
        return sorted(over - set(mesh_impl.splitting_axes(x.shape)))

    def _gradients(self, of: Operands, *inputs: tf.Tensor) -> tuple:
        form = self._form
        *_, y, largest, weight, dy, dz = inputs
        # dy has the dimensions of y, and dz those of whatever there is once for each row.
        of_y, of_row = self.inputs[-2:]
        y, dy = (tf.cast(form.rows(x, of_y, form.dims.value), of.dtype) for x in (y, dy))
        largest, weight, dz = (form.rows(x, of_row, form.dims.value) for x in (largest, weight, dz))
        # The sum over the memory of weight times its gradient is that of y * dy over channels (Dao
        # et al., 2022, appendix B.2); dz is the gradient of log(weight) + largest.
        shift = (tf.reduce_sum(y * dy, -1, keepdims=True) - dz) / weight
        dy = dy / weight
        _, values = form.terms.weighted
        # Inputs 0 to 2 are q, k and v; those that follow are the Tensors of the Terms, in their
        # order.
        more = [i - 3 for i in self._wanted if i >= 3]
        gradients = _blocked_slices.block_gradients(
            of,
            largest,
            shift,
            dy,
            0 in self._wanted,
            [i for i in more if i not in values],
            [values.index(i) for i in more if i in values],
        )
        front, key = list(of.front), form.dims.key.name
        shared = front[: len(form.dims.shared)]
        orders = {0: (front, [*form.row, key]), 1: (shared, [*form.column, key]),
                  2: (shared, [*form.column, form.dims.value.name])}  # fmt: skip
        results = []
        for i, x, output in zip(self._wanted, gradients, self.outputs):
            before, order = orders.get(i, (None, form.arrangement(output)))
            if before is not None:
                x = tf.reshape(x, [*before, *x.shape.as_list()[-2:]])
            results.append(tf.cast(restored(x, order, output.shape.dimension_names), output.dtype))
        return tuple(results)

    def begun_sums(self, mesh_impl: MeshImpl) -> dict[mtf.Tensor, list[int]]:
        """Gradients of inputs that are replicated where logits are split are partial."""
        return {y: self._summed_axes(mesh_impl, y) for y in self._outputs}

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """The logits again, and a matrix product for each factor; the gathering of a memory."""
        products = _QKV_GRADIENT_PRODUCTS if 0 in self._wanted else _FURTHER_GRADIENT_PRODUCTS
        flops = self._flops(mesh_impl, products)
        return Cost(flops, super().cost(mesh_impl).bytes, tuple(self._moved(mesh_impl)))

    def cost_key(self) -> Hashable:
        """The dimensions that are contracted, which blocks are computed where, and what of them."""
        return super().cost_key(), tuple(self._wanted)


_PRODUCTS = 2  # matrix products of a block


class BlockedAttentionOperation(Blocked):
    """Means of values, and the logarithms of the denominators of their weights.

    Two more outputs are what gradients are computed with: the largest logit of each row, and the
    sum of exponentials relative to it.

    Each processor computes its part of the logits block by block. If the memory is split, the parts
    of a row are joined by three allreduces; if the same mesh dimension splits the rows too, the
    memory is gathered, or passed around.
    """

    def __init__(
        self,
        q: mtf.Tensor,
        k: mtf.Tensor,
        v: mtf.Tensor,
        dims: Dims,
        terms: Terms,
        plain: Callable,
        block_sizes: Optional[tuple[int, int]] = None,
        name: Optional[str] = None,
        in_ring: Union[bool, str] = False,
    ):
        """Creates the operation.

        Args:
          q: queries, a Tensor.
          k: keys, a Tensor.
          v: values, a Tensor.
          dims: a Dims.
          terms: a Terms.
          plain: the same function of (q, k, v, dims, terms), made of other operations, which gives
            gradients of gradients.
          block_sizes: the numbers of positions of queries and of the memory in a block, or None.
          name: a string or None.
          in_ring: whether parts of the memory are passed around instead of gathered, and how: see
            `blocked_attention`.
        """
        super().__init__([q, k, v, *terms.tensors], name=name or "blocked_attention")
        self._ring = in_ring
        self._form = Form(dims, q, k, v, terms, block_sizes)
        self.plain = plain
        rows = q.shape - dims.key
        self._outputs = [
            mtf.Tensor(self, rows + dims.value, v.dtype, index=0),
            *(mtf.Tensor(self, rows, computed_in(q.dtype), index=i) for i in (1, 2, 3)),
        ]

    def gradient(self, grad_ys: Sequence[Optional[mtf.Tensor]]) -> list[Optional[mtf.Tensor]]:
        """Recomputes blocks; in a second operation for masks, whose gradient is hardly needed."""
        dy, dz = or_zeros(grad_ys[:2], self.outputs[:2])
        biases = [3 + i for indices in self._form.terms.weighted for i in indices]
        learned = [i for i in biases if is_learned(self.inputs[i])]
        gradients: dict[int, mtf.Tensor] = {}
        # Two operations: TensorFlow leaves out the second, with its work, if nothing fetches it.
        for some in ([0, 1, 2, *learned], [i for i in biases if i not in learned]):
            if some:
                op = BlockedAttentionGradOperation(self, dy, dz, some)
                gradients.update(zip(some, op.outputs))
        return [gradients.get(i) for i in range(len(self.inputs))]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Computes sums of blocks, joins those of a row, and divides."""
        mesh_impl = lowering.mesh_impl(self)
        values, sums = self._computed(
            lowering,
            self._sums,
            lambda old, new: mesh_impl.slicewise(_ring_attention.joined_sums, *old, *new),
        )
        axis = self._joined_axis(mesh_impl)
        if axis is not None:

            def relative_to_most(x: tf.Tensor, largest: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
                return x * tf.exp(largest - most)

            total, largest, weight = sums
            # Sums of different processors are relative to different maxima and have to be scaled to
            # one before they are added, as blocks are.
            most = mesh_impl.allreduce(largest, [axis], "MAX")
            total, weight = (
                mesh_impl.allreduce(
                    mesh_impl.slicewise(relative_to_most, x, largest, most), [axis], "SUM"
                )
                for x in (total, weight)
            )
            sums = total, most, weight
        # The extra logit is the last of the Terms' Tensors.
        last = len(self.inputs) - 1
        extra = [values[last]] if isinstance(self._form.terms.extra, mtf.Tensor) else []
        results = mesh_impl.slicewise(self._finished, *sums, *extra)
        for y, value in zip(self.outputs, self._exchanged(mesh_impl, self.outputs, results)):
            lowering.set_tensor_lowering(y, value)

    def _joined_axis(self, mesh_impl: MeshImpl) -> Optional[int]:
        """Returns the mesh axis over which the parts of a row are, or None."""
        if self._gathered_axis(mesh_impl) is not None:
            return None
        return mesh_impl.splitting_axis(self._form.dims.memory)

    def _sums(self, operands: Operands, *inputs: tf.Tensor) -> tuple:
        sums = _blocked_slices.block_sums(operands)
        return tuple(tf.reshape(x, [*operands.front, *x.shape.as_list()[-2:]]) for x in sums)

    def _finished(
        self, total: tf.Tensor, largest: tf.Tensor, weight: tf.Tensor, *extra: tf.Tensor
    ) -> tuple:
        form, (y, z) = self._form, self.outputs[:2]
        more: Any = form.terms.extra
        if extra:
            more = form.laid(extra[0], more)
        mean, *rows = _blocked_slices.finished(total, largest, weight, more)
        order = [*form.row, form.dims.value.name]
        return (
            tf.cast(restored(mean, order, y.shape.dimension_names), y.dtype),
            *(restored(x, order, z.shape.dimension_names) for x in rows),
        )

    cost_key = Blocked.cost_key  # also of the costs of this class

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Two matrix products; three allreduces if the memory is split, or the gathering of it."""
        collectives = self._moved(mesh_impl)
        axis = self._joined_axis(mesh_impl)
        if axis is not None:
            # Of the largest logits, of the sums of values, and of those of exponentials.
            y, z = (mesh_impl.laid_out_size(x.shape) for x in self.outputs[:2])
            size = self.outputs[1].dtype.size
            collectives += [Collective("allreduce", (axis,), n, n * size) for n in (z, y, z)]
        flops = self._flops(mesh_impl, _PRODUCTS)
        return Cost(flops, super().cost(mesh_impl).bytes, tuple(collectives))


def is_learned(x: mtf.Tensor) -> bool:
    """Returns whether gradients may flow from `x` to values that are not computed from integers."""
    seen = {x}
    left = [x]
    while left:
        op = left.pop().operation
        # Of a variable, imported data or a constant nothing says that it is made of integers.
        if not op.inputs:
            return True
        if op.has_gradient:
            new = [y for y in op.inputs if is_differentiable(y.dtype) and y not in seen]
            seen.update(new)
            left += new
    return False

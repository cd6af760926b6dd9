"""Halos: what a processor needs of its neighbors' slices, for windows that reach beyond its own.

An example: an image of 8 rows on 2 processors, and windows of 3 rows at a stride of 1, padded to as
many results ("SAME"). Result j sums rows j - 1 to j + 1:

    processor   its rows    its results    rows that it needs
    0           0 .. 3      0 .. 3         -1 .. 4
    1           4 .. 7      4 .. 7         3 .. 8

So each gets one row from either neighbor, and zeros where there is none, which is the padding.
Without padding ("VALID") there are 6 results, 3 for each. Processor 0 needs rows 0 to 4, and
processor 1 rows 3 to 7: both get one row from either side, all the same, as one program serves
both, and each cuts out the 5 that it needs.

A slice or a padding along the dimension is the same, with windows of one row: the first begins
where the slice does, or before the first row by as much as is padded. Where slices end in padding,
rows past the end of the whole are what the caller has filled them with.

A shift moves all elements along a dimension, and a halo exchange copies edges of blocks, which are
a dimension of the tensor, whether processors split it or not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import WrongTypeError, check_whole, dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.layout import padded_dims, parts_along
from mesh_tensorflow._core.operation import Collective, Cost, Operation, Tensor, gradient_of_output
from mesh_tensorflow._core.shape import Dimension, DimensionLike, Shape, list_product
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slice_functions import cut
from mesh_tensorflow.ops._source import check_dimension

__all__ = ["ShiftOperation", "dynamic_shift", "halo_exchange", "left_halo_exchange", "shift"]


class _Edge(NamedTuple):
    """What a processor gets of another one's slice."""

    offset: int  # how far the slice is shifted; to the right if positive
    at: int  # where it begins in the other slice
    begin: int  # where it begins in the slice with its halo
    size: int


@dataclasses.dataclass(frozen=True)
class Halo:
    """What windows along one dimension of a tensor need of it.

    Attributes:
      tensor_axis: the axis of the dimension.
      mesh_axis: the mesh axis that splits it; None if none does, and the halo is padding.
      size: the size of a slice along it.
      left: how many elements before the slice are gathered.
      right: how many elements after it.
      width: how many of all these the windows of a processor reach over.
      begin: where these begin, on the first processor.
      step: how much earlier they begin on each further one.
      wrap: whether the neighbor of the last processor is the first one; otherwise there are zeros.
      last: the last processor that has results; what those after it have is padding.
    """

    tensor_axis: int
    mesh_axis: Optional[int]
    size: int
    left: int
    right: int
    width: int
    begin: int
    step: int
    wrap: bool = False
    last: Optional[int] = None

    @property
    def is_local(self) -> bool:
        """Whether a slice is what its windows reach over."""
        return (self.left, self.right, self.begin, self.step) == (0, 0, 0, 0) and (
            self.width == self.size
        )

    @property
    def reaches_neighbors_alone(self) -> bool:
        """Whether no more is gathered from either side than a neighbor has."""
        if self.mesh_axis is None:
            return True
        return self.width > 0 and max(self.left, self.right) <= self.size

    @property
    def total(self) -> int:
        """The size of a slice with its halo."""
        return self.left + self.size + self.right

    @property
    def offsets(self) -> list[int]:
        """How far slices move that are gathered, to the right if positive, in their order."""
        return [] if self.mesh_axis is None else [edge.offset for edge in self._edges()]

    def gathered(self, mesh_impl: MeshImpl, x: Any) -> Any:
        """Returns a laid-out value with slices of what the windows of each processor reach over.

        Args:
          mesh_impl: a MeshImpl.
          x: a LaidOutTensor of slices.
        """
        if self.mesh_axis is None:
            return mesh_impl.slicewise(
                lambda t: self._cut(self._padded(t, self.left, self.right), self.begin, self.width),
                x,
            )
        pieces = [(self.left, x)]
        for offset, at, begin, n in self._edges():
            edge = mesh_impl.slicewise(lambda t, at=at, n=n: self._cut(t, at, n), x)
            moved = mesh_impl.shift_by_n_processors(edge, self.mesh_axis, offset, self.wrap)
            pieces.append((begin, moved))
        # As they lie in the whole; edges are listed by their side.
        pieces.sort(key=lambda piece: piece[0])

        def joined(*parts: tf.Tensor) -> tf.Tensor:
            return parts[0] if len(parts) == 1 else tf.concat(parts, self.tensor_axis)

        return self._at_begin(
            mesh_impl,
            lambda begin, *parts: self._cut(joined(*parts), begin, self.width),
            *(piece for _, piece in pieces),
        )

    def scattered(self, mesh_impl: MeshImpl, x: Any) -> Any:
        """Returns the transpose of `gathered`: what windows have made is added up where it belongs.

        Args:
          mesh_impl: a MeshImpl.
          x: a LaidOutTensor of slices as `gathered` returns them.
        """
        beyond = self.total - self.width
        whole = x
        if beyond:
            # Padded on both sides by as much as it may be moved, of which the rest is cut off: so
            # the sizes are known before the processor is.
            whole = self._at_begin(
                mesh_impl,
                lambda begin, t: self._cut(
                    self._padded(t, beyond, beyond), beyond - begin, self.total
                ),
                x,
            )
        own = mesh_impl.slicewise(lambda t: self._cut(t, self.left, self.size), whole)
        if self.mesh_axis is None:
            return own
        for offset, at, begin, n in self._edges():
            edge = mesh_impl.slicewise(lambda t, b=begin, n=n: self._cut(t, b, n), whole)
            back = mesh_impl.shift_by_n_processors(edge, self.mesh_axis, -offset, self.wrap)
            own = mesh_impl.slicewise(
                lambda t, e, at=at, n=n: t + self._padded(e, at, self.size - at - n), own, back
            )
        return own

    def _edges(self) -> list[_Edge]:
        """Returns what is gathered from neighbors: of the left ones, then of the right ones."""
        edges = []
        # Merged processors have slices that divide a dimension otherwise, and so may reach further
        # than those of the requested mesh do.
        step = max(1, self.size)
        for hop, before in enumerate(range(0, self.left, step), 1):
            n = min(self.size, self.left - before)
            edges.append(_Edge(hop, self.size - n, self.left - before - n, n))
        for hop, before in enumerate(range(0, self.right, step), 1):
            n = min(self.size, self.right - before)
            edges.append(_Edge(-hop, 0, self.left + self.size + before, n))
        return edges

    def _at_begin(self, mesh_impl: MeshImpl, fn: Any, *values: Any) -> Any:
        """Applies a function of where windows begin, and of slices."""
        if self.step == 0 or self.mesh_axis is None:
            return mesh_impl.slicewise(lambda *slices: fn(self.begin, *slices), *values)

        def apply(c: tf.Tensor, *slices: tf.Tensor) -> Any:
            c = tf.cast(c, tf.int32)
            # Those without results would begin outside of what they have.
            c = c if self.last is None else tf.minimum(c, self.last)
            return fn(self.begin - self.step * c, *slices)

        return mesh_impl.slicewise(apply, mesh_impl.laid_out_pcoord(self.mesh_axis), *values)

    def _cut(self, t: tf.Tensor, begin: Any, size: int) -> tf.Tensor:
        return cut(t, self.tensor_axis, begin, size)

    def _padded(self, t: tf.Tensor, before: int, after: int) -> tf.Tensor:
        paddings = paddings_along(len(t.shape), self.tensor_axis, before, after)
        return tf.pad(t, paddings) if before or after else t


def paddings_along(rank: int, axis: int, before: int, after: int) -> list[list[int]]:
    """Returns the argument of tf.pad that pads one axis of a tensor."""
    return [[before, after] if i == axis else [0, 0] for i in range(rank)]


def gathered_along_all(halos: Sequence[Halo], mesh_impl: MeshImpl, x: Any) -> Any:
    """Returns what windows reach over along several dimensions; see `Halo.gathered`.

    Args:
      halos: Halos along different dimensions.
      mesh_impl: a MeshImpl.
      x: a LaidOutTensor of slices.
    """
    for h in halos:
        if h.mesh_axis is not None:
            # One after another, so that corners come with the edges of the second one.
            x = h.gathered(mesh_impl, x)
    alone = [h for h in halos if h.mesh_axis is None]
    if not alone:
        return x

    def padded(t: tf.Tensor) -> tf.Tensor:
        paddings = [[0, 0] for _ in t.shape]
        for h in alone:
            paddings[h.tensor_axis] = [h.left, h.right]
        # All at once: oneDNN's optimizer (of TensorFlow 2.21) makes one operation of a padding and
        # a convolution of volumes, and leaves out another padding before it.
        if any(map(any, paddings)):
            t = tf.pad(t, paddings)
        for h in alone:
            t = h._cut(t, h.begin, h.width)
        return t

    return mesh_impl.slicewise(padded, x)


def halos_too_far(mesh_impl: MeshImpl, halos: Iterable[Halo]) -> list[Halo]:
    """Returns the Halos whose dimension an operation needs whole, as neighbors do not have them.

    Args:
      mesh_impl: a MeshImpl. Where XLA splits tensors, slices have no neighbors.
      halos: Halos of it.
    """
    compiled = getattr(mesh_impl, "is_split_by_compiler", False)  # one from elsewhere lacks it
    return [h for h in halos if not h.is_local and (compiled or not h.reaches_neighbors_alone)]


def halo_collectives(
    halos: Iterable[Halo], mesh_impl: MeshImpl, shape: Shape, dtype: tf.DType
) -> tuple[Collective, ...]:
    """Returns the collectives of `gathered` of halos in turn, which are also those of `scattered`.

    Args:
      halos: Halos along different dimensions.
      mesh_impl: a MeshImpl.
      shape: the Shape of the tensor whose slices have halos.
      dtype: its dtype.
    """
    sizes, moved = mesh_impl.slice_shape(shape), []
    for h in halos:
        sizes[h.tensor_axis] = 1
        rows = list_product(sizes) * mesh_impl.size
        if h.mesh_axis is not None:
            moved += [
                Collective("shift", (h.mesh_axis,), rows * edge.size, rows * edge.size * dtype.size)
                for edge in h._edges()
            ]
        # The next one sends corners, too.
        sizes[h.tensor_axis] = h.width
    return tuple(moved)


def halo(
    mesh_impl: MeshImpl,
    tensor_axis: int,
    wide: Dimension,
    narrow: Dimension,
    window: int = 1,
    stride: int = 1,
    before: int = 0,
    wrap: bool = False,
) -> Halo:
    """Returns the Halo of windows over a dimension.

    Result j reaches over the elements from j * stride - before, as many as the window has.

    Args:
      mesh_impl: a MeshImpl, whose layout splits both dimensions alike.
      tensor_axis: the axis of the dimension.
      wide: the Dimension of the elements.
      narrow: the Dimension of the results.
      window: the size of a window.
      stride: how much later the next window begins.
      before: how many elements the first window begins before the first one.
      wrap: whether what is before the first element are the last ones, and not zeros.
    """
    mesh_axis = mesh_impl.splitting_axis(wide)
    num_parts = parts_along(mesh_axis, mesh_impl.shape)
    size, results = -(-wide.size // num_parts), -(-narrow.size // num_parts)
    width = (results - 1) * stride + window
    # The slice of processor c begins at c * size, and what its windows reach over at
    # c * results * stride - before: `step` more elements before the slice for each c.
    step = size - results * stride
    last = -(-narrow.size // max(1, results)) - 1
    beyond = last * step
    left = max(0, before, before + beyond)
    right = max(0, width - before - size + max(0, -beyond))
    return Halo(
        tensor_axis,
        mesh_axis,
        size,
        left,
        right,
        width,
        left - before,
        step,
        wrap,
        last if last < num_parts - 1 else None,
    )


# -- shifts along a dimension, and halos between blocks


class _Piece(NamedTuple):
    """A range of a slice that moves by a number of processors."""

    begin: int
    size: int
    processors: int


class ShiftOperation(Operation):
    """A Tensor shifted by a constant along a dimension, across processors if it is split."""

    takes_padding = True
    costs_by = ("_offset", "_dim", "_wrap")

    def __init__(
        self, x: Tensor, offset: int, dim: DimensionLike, wrap: bool, name: Optional[str] = None
    ):
        """Creates the operation; see `shift`."""
        dim = check_dimension(name or "shift", x, dim)
        if not isinstance(offset, (int, np.integer)):
            raise WrongTypeError(
                f"{name or 'shift'}: the offset {offset!r} along {dims_text([dim])} of {x.name} "
                f"{x.shape} is a {type(offset).__name__}, not an int. mtf.dynamic_shift takes an "
                "int32 Tensor"
            )
        super().__init__([x], name=name or "shift")
        self._dim = dim
        self._axis = x.shape.dims.index(dim)
        self._offset = int(offset)
        self._wrap = wrap
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    def needs_whole(self, mesh_impl: MeshImpl) -> Collection[str]:
        """Returns the dimension if padding would come between, or it is shifted by many slices."""
        if not padded_dims(mesh_impl, [self._dim]):
            return super().needs_whole(mesh_impl)
        far = self._wrap or halos_too_far(mesh_impl, [self._halo(mesh_impl)])
        return [self._dim.name] if far else ()

    def filling(self, x: Tensor) -> tuple[Collection[Dimension], float]:
        """Returns the dimension: what is shifted in from past its end are zeros."""
        return [self._dim], 0

    def _halo(self, mesh_impl: MeshImpl) -> Halo:
        return halo(mesh_impl, self._axis, self._dim, self._dim, before=self._offset)

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Shifts dy by the opposite offset."""
        # y[i] = x[i - offset], so dx[j] = dy[j + offset]; what is shifted out gets 0.
        return [shift(gradient_of_output(grad_ys), -self._offset, self._dim, self._wrap)]

    def _pieces(self, mesh_impl: MeshImpl) -> list[_Piece]:
        """Returns the pieces that a shifted slice consists of, in order."""
        size = mesh_impl.slice_shape(self._outputs[0].shape)[self._axis]
        # divmod cannot divide by the size of an empty slice.
        if size == 0:
            return [_Piece(0, 0, 0)]
        # Python's divmod rounds down, so one rule serves for negative offsets: `within` is never
        # negative.
        # For offset = q * size + r, a slice becomes the last r elements of the slice q + 1 before
        # it, then the first ones of the slice q before it.
        processors, within = divmod(self._offset, size)
        pieces = [_Piece(0, size - within, processors)]
        if within:
            pieces.insert(0, _Piece(size - within, within, processors + 1))
        return pieces

    def _kept_pieces(self, mesh_impl: MeshImpl, mesh_axis: int) -> list[tuple[int, int]]:
        """Returns (processors, elements) of the pieces that are not shifted out."""
        shape = self._outputs[0].shape
        # All elements but those along the dimension; a slice may be empty along it.
        rows = mesh_impl.laid_out_size(shape) // max(1, mesh_impl.slice_shape(shape)[self._axis])
        processors = mesh_impl.shape[mesh_axis].size
        return [
            (piece.processors, rows * piece.size)
            for piece in self._pieces(mesh_impl)
            # Without wrapping, what would go past the last processor is shifted out, and not sent.
            if self._wrap or abs(piece.processors) < processors
        ]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Shifts each slice; where the dimension is split, exchanges pieces between neighbors."""
        mesh_impl = lowering.mesh_impl(self)
        self._count(lowering)
        mesh_axis = mesh_impl.splitting_axis(self._dim)
        if mesh_axis is None:
            return self._lower_slices(lowering, self._shift_whole)
        value = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        if padded_dims(lowering.requested_impl(self), [self._dim]):
            value = self._halo(mesh_impl).gathered(mesh_impl, value)
            return lowering.set_tensor_lowering(self.outputs[0], value)
        parts = []
        for piece in self._pieces(mesh_impl):
            # Cut before it is sent, so that only the elements that move are communicated.
            part = mesh_impl.slicewise(
                lambda t, p=piece: cut(t, self._axis, p.begin, p.size), value
            )
            if piece.processors:
                part = mesh_impl.shift_by_n_processors(
                    part, mesh_axis, piece.processors, self._wrap
                )
            parts.append(part)
        if len(parts) > 1:
            parts = [mesh_impl.slicewise(lambda *ts: tf.concat(ts, self._axis), *parts)]
        lowering.set_tensor_lowering(self.outputs[0], parts[0])

    def _count(self, lowering: mtf.Lowering) -> None:
        requested = lowering.requested_impl(self)
        mesh_axis = requested.mesh_axis(self._dim)
        if mesh_axis is None:
            return
        if padded_dims(requested, [self._dim]):
            lowering.count_collectives(self, "halo")
            return
        for processors, elements in self._kept_pieces(requested, mesh_axis):
            # As in the classic, also for the piece that stays where it is, which is no collective.
            lowering.add_counter(f"shift[{processors}]", elements)
        lowering.count_collectives(self, None)

    def _shift_whole(self, t: tf.Tensor) -> tf.Tensor:
        size = self._dim.size
        # TensorFlow has a kernel for shifts that wrap around, and none for those that do not.
        if self._wrap and size and 2 * self._offset % (2 * size) == size:
            # By a half: two pieces change places, for which that kernel takes longer.
            return tf.concat(tf.split(t, 2, self._axis)[::-1], self._axis)
        if self._wrap:
            return tf.roll(t, self._offset, self._axis)
        # An offset beyond the size shifts out all, and no more than that.
        out = min(abs(self._offset), size)
        if out == size:
            return tf.zeros_like(t)
        before, after = (out, 0) if self._offset > 0 else (0, out)
        inside = cut(t, self._axis, after, size - out)
        return tf.pad(inside, paddings_along(len(t.shape), self._axis, before, after))

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Bytes moved, and the pieces that go to other processors."""
        moved = super().cost(mesh_impl).bytes
        mesh_axis = mesh_impl.mesh_axis(self._dim)
        if mesh_axis is None:
            return Cost(0, moved)
        y = self._outputs[0]
        if padded_dims(mesh_impl, [self._dim]):
            edges = halo_collectives([self._halo(mesh_impl)], mesh_impl, y.shape, y.dtype)
            return Cost(0, moved, edges)
        shifts = [
            Collective("shift", (mesh_axis,), elements, elements * y.dtype.size)
            for processors, elements in self._kept_pieces(mesh_impl, mesh_axis)
            # All the way around the mesh axis, a piece stays where it is.
            if processors % mesh_impl.shape[mesh_axis].size
        ]
        return Cost(0, moved, tuple(shifts))


def shift(
    x: Tensor, offset: int, dim: DimensionLike, wrap: bool, name: Optional[str] = None
) -> Tensor:
    """Returns a Tensor shifted by a constant along a dimension.

    >>> d = mtf.Dimension("d", 4)
    >>> x = mtf.range(mesh, d, tf.int32)
    >>> print(mtf.shift(x, 1, d, wrap=False).numpy(), mtf.shift(x, 1, d, wrap=True).numpy())
    [0 0 1 2] [3 0 1 2]

    Args:
      x: a Tensor.
      offset: an int; positive shifts toward higher indices.
      dim: a Dimension of it, or its name.
      wrap: whether to wrap around; otherwise zeros are shifted in.
      name: a string or None.
    """
    return ShiftOperation(x, offset, dim, wrap, name=name).outputs[0]


@leaves_no_node
def dynamic_shift(x: Tensor, offset: Tensor, dim: DimensionLike, wrap: bool) -> Tensor:
    """Returns a Tensor shifted along a dimension by the values of another Tensor.

    It is an einsum with a permutation matrix, so `x` must be finite everywhere.

    >>> d = mtf.Dimension("d", 4)
    >>> x = mtf.range(mesh, d, tf.float32)
    >>> offset = mtf.constant(mesh, 2, dtype=tf.int32)
    >>> print(mtf.dynamic_shift(x, offset, d, wrap=False).numpy())
    [0. 0. 0. 1.]

    Args:
      x: a Tensor.
      offset: an int, or an int32 Tensor, which may share dimensions with `x`.
      dim: a Dimension of `x`.
      wrap: whether to wrap around; otherwise zeros are shifted in.
    """
    dim = check_dimension("dynamic_shift", x, dim)
    if not isinstance(offset, Tensor):
        return shift(x, offset, dim, wrap)
    # Products and sums are of numbers.
    if x.dtype.is_bool:
        return mtf.cast(dynamic_shift(mtf.to_int32(x), offset, dim, wrap), tf.bool)
    if dim in offset.shape:
        raise ValueError(
            f"dynamic_shift: the offset {offset.name} {offset.shape} must not have the shifted "
            f"dimension {dims_text([dim])}"
        )
    # Another name, so that an element's place before and after are two dimensions of one einsum.
    source_dim = Dimension("dynamic_shift_tmp", dim.size)
    source = mtf.rename_dimension(x, dim.name, source_dim.name)
    place = mtf.mtf_range(x.mesh, dim, dtype=tf.int32)
    # result[p] = sum over s of x[s] [s + offset = p].
    sources = mtf.mtf_range(x.mesh, source_dim, dtype=tf.int32) + offset
    if wrap:
        sources = mtf.mod(sources, dim.size)
    # A product with a matrix of 0 and 1, since which processor has an element is not known before
    # the program runs; an einsum works in every layout.
    permutation = mtf.cast(mtf.equal(sources, place), x.dtype)
    return mtf.einsum([source, permutation], output_shape=x.shape)


def _with_margins(
    what: str,
    x: Tensor,
    blocks_dim: Optional[Dimension],
    block_size_dim: Dimension,
    halo_size: int,
    wrap: bool,
    both: bool,
) -> Tensor:
    """Returns each block with what is next to it, on its left or on both sides."""
    check_dimension(what, x, block_size_dim)
    if blocks_dim is not None:
        check_dimension(what, x, blocks_dim)
    check_whole(what, "halo_size", halo_size, least=0)
    if halo_size == 0:
        return x
    block = block_size_dim.size

    def margins(from_left: bool) -> list[Tensor]:
        """Returns the pieces of one margin, from the nearest block outward."""
        pieces = []
        # A halo that is wider than a block reaches into blocks further away.
        for blocks, before in enumerate(range(0, halo_size, max(1, block)), 1):
            width = min(halo_size - before, block)
            edge = x
            if width < block:
                begin = block - width if from_left else 0
                edge = mtf.mtf_slice(x, begin, width, block_size_dim.name)
            if blocks_dim is not None:
                # A left halo is the right edge of a block before: edges move to higher indices.
                edge = shift(edge, blocks if from_left else -blocks, blocks_dim, wrap)
            # If it wraps around, a single block is its own neighbor, and its edge stays as it is.
            elif not wrap:
                edge = mtf.zeros_like(edge)
            pieces.append(edge)
        return pieces

    left = margins(from_left=True)[::-1]
    right = margins(from_left=False) if both else []
    return mtf.concat([*left, x, *right], block_size_dim.name)


@leaves_no_node
def halo_exchange(
    x: Tensor,
    blocks_dim: Optional[Dimension],
    block_size_dim: Dimension,
    halo_size: int,
    wrap: bool = False,
) -> Tensor:
    """Returns each block concatenated with margins of both adjacent blocks.

    >>> x = mtf.constant(mesh, [[1, 2], [3, 4]], "blocks:2,d:2", tf.int32)
    >>> blocks, d = x.shape.dims
    >>> print(mtf.halo_exchange(x, blocks, d, halo_size=1).numpy())
    [[0 1 2 3]
     [2 3 4 0]]

    Args:
      x: a Tensor with dimensions [..., blocks_dim, ..., block_size_dim, ...].
      blocks_dim: a Dimension, or None for one block.
      block_size_dim: a Dimension; it grows by twice `halo_size`.
      halo_size: the size of each margin; it may exceed that of a block.
      wrap: whether the first and the last block are adjacent; otherwise their outer margins are
        zeros.
    """
    return _with_margins("halo_exchange", x, blocks_dim, block_size_dim, halo_size, wrap, both=True)


@leaves_no_node
def left_halo_exchange(
    x: Tensor,
    blocks_dim: Optional[Dimension],
    block_size_dim: Dimension,
    halo_size: int,
    wrap: bool = False,
) -> Tensor:
    """Returns each block concatenated with a margin of the block to its left.

    >>> x = mtf.constant(mesh, [[1, 2], [3, 4]], "blocks:2,d:2", tf.int32)
    >>> blocks, d = x.shape.dims
    >>> print(mtf.left_halo_exchange(x, blocks, d, halo_size=1).numpy())
    [[0 1 2]
     [2 3 4]]
    """
    what = "left_halo_exchange"
    return _with_margins(what, x, blocks_dim, block_size_dim, halo_size, wrap, both=False)

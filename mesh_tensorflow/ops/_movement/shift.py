"""Shifts along a dimension, and halo exchange between adjacent blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.layout import padded_dims
from mesh_tensorflow._core.operation import Collective, Cost, Operation, gradient_of_output
from mesh_tensorflow._core.shape import Dimension
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slice_functions import cut
from mesh_tensorflow.ops._movement.halo import (
    Halo,
    halo,
    halo_collectives,
    halos_too_far,
    paddings_along,
)
from mesh_tensorflow.ops._source import check_dimension

__all__ = [
    "ShiftOperation",
    "dynamic_shift",
    "halo_exchange",
    "left_halo_exchange",
    "shift",
]


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
        self, x: Tensor, offset: int, dim: Dimension, wrap: bool, name: Optional[str] = None
    ):
        """Creates the operation; see `shift`."""
        check_dimension(name or "shift", x, dim)
        super().__init__([x], name=name or "shift")
        self._dim = dim
        self._axis = x.shape.dims.index(dim)
        self._offset = offset
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
            return lowering.count_collectives(self, "halo")
        for processors, elements in self._kept_pieces(requested, mesh_axis):
            # As in the classic, also for the piece that stays where it is, which is no collective.
            lowering.add_counter(f"shift[{processors}]", elements)
        lowering.count_collectives(self, None)

    def _shift_whole(self, t: tf.Tensor) -> tf.Tensor:
        size = self._dim.size
        # TensorFlow has a kernel for shifts that wrap around, and none for those that do not.
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


def shift(x: Tensor, offset: int, dim: Dimension, wrap: bool, name: Optional[str] = None) -> Tensor:
    """Returns a Tensor shifted by a constant along a dimension.

    >>> d = mtf.Dimension("d", 4)
    >>> x = mtf.range(mesh, d, tf.int32)
    >>> print(mtf.shift(x, 1, d, wrap=False).numpy(), mtf.shift(x, 1, d, wrap=True).numpy())
    [0 0 1 2] [3 0 1 2]

    Args:
      x: a Tensor.
      offset: an int; positive shifts toward higher indices.
      dim: a Dimension of it.
      wrap: whether to wrap around; otherwise zeros are shifted in.
      name: a string or None.
    """
    return ShiftOperation(x, offset, dim, wrap, name=name).outputs[0]


@leaves_no_node
def dynamic_shift(x: Tensor, offset: Tensor, dim: Dimension, wrap: bool) -> Tensor:
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
    check_dimension("dynamic_shift", x, dim)
    if not isinstance(offset, Tensor):
        return shift(x, offset, dim, wrap)
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
    wanted = mtf.mtf_range(x.mesh, source_dim, dtype=tf.int32) + offset
    if wrap:
        wanted = mtf.mod(wanted, dim.size)
    # A product with a matrix of 0 and 1, since which processor has an element is not known before
    # the program runs; an einsum works in every layout.
    permutation = mtf.cast(mtf.equal(wanted, place), x.dtype)
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
    if halo_size < 0:
        raise ValueError(f"{what}: halo_size must be 0 or more, got {halo_size}")
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

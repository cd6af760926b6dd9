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
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.operation import Collective
from mesh_tensorflow._core.shape import Dimension, Shape, list_product
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slice_functions import cut


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
    parts = 1 if mesh_axis is None else mesh_impl.shape[mesh_axis].size
    size, results = -(-wide.size // parts), -(-narrow.size // parts)
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
        last if last < parts - 1 else None,
    )

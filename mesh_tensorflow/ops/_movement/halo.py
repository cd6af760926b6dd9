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
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.operation import Collective
from mesh_tensorflow._core.shape import Dimension
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slice_functions import cut

__all__ = ["Halo", "halo"]


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
    """

    tensor_axis: int
    mesh_axis: Optional[int]
    size: int
    left: int
    right: int
    width: int
    begin: int
    step: int

    @property
    def reaches_neighbors_alone(self) -> bool:
        """Whether no more is gathered from either side than a neighbor has."""
        return self.mesh_axis is None or max(self.left, self.right) <= self.size

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
        pieces = [x]
        if self.left:
            edge = mesh_impl.slicewise(lambda t: self._cut(t, self.size - self.left, self.left), x)
            pieces.insert(0, mesh_impl.shift_by_n_processors(edge, self.mesh_axis, 1, False))
        if self.right:
            edge = mesh_impl.slicewise(lambda t: self._cut(t, 0, self.right), x)
            pieces.append(mesh_impl.shift_by_n_processors(edge, self.mesh_axis, -1, False))

        def joined(*parts: tf.Tensor) -> tf.Tensor:
            return parts[0] if len(parts) == 1 else tf.concat(parts, self.tensor_axis)

        return self._at_begin(
            mesh_impl, lambda begin, *parts: self._cut(joined(*parts), begin, self.width), *pieces
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
        if self.left:
            edge = mesh_impl.slicewise(lambda t: self._cut(t, 0, self.left), whole)
            back = mesh_impl.shift_by_n_processors(edge, self.mesh_axis, -1, False)
            rest = self.size - self.left
            own = mesh_impl.slicewise(lambda t, e: t + self._padded(e, rest, 0), own, back)
        if self.right:
            begin = self.left + self.size
            edge = mesh_impl.slicewise(lambda t: self._cut(t, begin, self.right), whole)
            back = mesh_impl.shift_by_n_processors(edge, self.mesh_axis, 1, False)
            after = self.size - self.right
            own = mesh_impl.slicewise(lambda t, e: t + self._padded(e, 0, after), own, back)
        return own

    def collectives(self, rows: int, itemsize: int) -> list[Collective]:
        """Returns the collectives of `gathered`, which are also those of `scattered`.

        Args:
          rows: the number of elements of all slices at one place along the dimension.
          itemsize: the size of an element in bytes.
        """
        if self.mesh_axis is None:
            return []
        return [
            Collective("shift", (self.mesh_axis,), rows * n, rows * n * itemsize)
            for n in (self.left, self.right)
            if n
        ]

    def _at_begin(self, mesh_impl: MeshImpl, fn: Any, *values: Any) -> Any:
        """Applies a function of where windows begin, and of slices."""
        if self.step == 0 or self.mesh_axis is None:
            return mesh_impl.slicewise(lambda *slices: fn(self.begin, *slices), *values)
        coordinate = mesh_impl.laid_out_pcoord(self.mesh_axis)
        return mesh_impl.slicewise(
            lambda c, *slices: fn(self.begin - self.step * tf.cast(c, tf.int32), *slices),
            coordinate,
            *values,
        )

    def _cut(self, t: tf.Tensor, begin: Any, size: int) -> tf.Tensor:
        return cut(t, self.tensor_axis, begin, size)

    def _padded(self, t: tf.Tensor, before: int, after: int) -> tf.Tensor:
        paddings = [[0, 0] for _ in t.shape.as_list()]
        paddings[self.tensor_axis] = [before, after]
        return tf.pad(t, paddings) if before or after else t


def halo(
    mesh_impl: MeshImpl,
    tensor_axis: int,
    wide: Dimension,
    narrow: Dimension,
    window: int,
    stride: int,
    before: int,
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
    """
    mesh_axis = mesh_impl.splitting_axis(wide)
    parts = 1 if mesh_axis is None else mesh_impl.shape[mesh_axis].size
    size, results = wide.size // parts, narrow.size // parts
    width = (results - 1) * stride + window
    # The slice of processor c begins at c * size, and what its windows reach over at
    # c * results * stride - before: `step` more elements before the slice for each c.
    step = size - results * stride
    last = (parts - 1) * step
    left = max(0, before, before + last)
    right = max(0, width - before - size + max(0, -last))
    return Halo(tensor_axis, mesh_axis, size, left, right, width, left - before, step)

"""Loop state: laid-out tensors as flat lists of tf.Tensors, and tapes of past values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.graph import Mesh
from mesh_tensorflow._core.interfaces import LoweringLike
from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.laid_out import LazyAllreduceSum
from mesh_tensorflow._mesh.mesh_impl import MeshImpl

__all__: list[str] = []


class LoopValueOperation(Operation):
    """A placeholder for a value inside a loop; the loop sets its lowered value."""

    def __init__(self, mesh: Mesh, shape: Shape, dtype: tf.DType, name: str):
        super().__init__([], mesh=mesh, name=name)
        self._outputs = [Tensor(self, shape, dtype)]

    def lower(self, lowering: LoweringLike) -> None:
        """Raises an error: the loop gives the value when it is lowered."""
        raise ValueError(f"{self.name} has a value only inside its loop")


def loop_values(xs: Sequence[Tensor], name: str) -> list[Tensor]:
    """Returns a placeholder for each of `xs`; their operations are not added to the graph."""
    if not xs:
        return []
    values, _ = xs[0].graph.take_operations(
        lambda: [LoopValueOperation(x.mesh, x.shape, x.dtype, name).outputs[0] for x in xs]
    )
    return values


class LoopState:
    """Converts laid-out tensors to a flat list of tf.Tensors, and back."""

    def __init__(self, mesh_impl: MeshImpl, shapes: Sequence[Shape], summands: Sequence[bool]):
        """Creates a LoopState.

        Args:
          mesh_impl: a MeshImpl.
          shapes: the Shape of each value.
          summands: for each value, whether it has the summands of a partial sum, which differ even
            between processors with the same slice.
        """
        self._mesh_impl = mesh_impl
        self._shapes = list(shapes)
        self._summands = list(summands)
        self._counts: list[int] = []

    @property
    def count(self) -> int:
        """Number of tf.Tensors."""
        return sum(self._counts)

    def flatten(self, values: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the tf.Tensors of laid-out values."""
        parts = []
        for value, shape, summands in zip(values, self._shapes, self._summands, strict=True):
            value = value.to_laid_out_tensor()
            if summands:
                # Summands differ even between processors that would hold the same slice of a sum.
                parts.append(list(value.all_slices))
            else:
                parts.append(self._mesh_impl.loop_slices(value, shape))
        self._counts = [len(part) for part in parts]
        return [t for part in parts for t in part]

    def unflatten(self, flat: Sequence[tf.Tensor]) -> list[Any]:
        """Returns the laid-out values of tf.Tensors."""
        values, at = [], 0
        for count, shape, summands in zip(self._counts, self._shapes, self._summands):
            part = list(flat[at : at + count])
            at += count
            if summands:
                values.append(self._mesh_impl.LaidOutTensor.from_tensor_list(part))
            else:
                values.append(self._mesh_impl.from_loop_slices(part, shape))
        return values


def zero_state(mesh_impl: MeshImpl, y: Tensor, summands: bool) -> Any:
    """Returns laid-out zeros to accumulate into."""
    sizes = mesh_impl.slice_shape(y.shape)
    if not summands:
        return mesh_impl.slicewise(lambda: tf.zeros(sizes, y.dtype))
    # The processor's number is an argument only so that each gets zeros of its own: equal slices
    # would be one tensor, into which summands that differ could not be accumulated.
    return mesh_impl.slicewise(lambda _: tf.zeros(sizes, y.dtype), mesh_impl.laid_out_pnum())


def accumulate(
    mesh_impl: MeshImpl,
    totals: Sequence[Any],
    results: Sequence[Any],
    summands: Sequence[bool],
    counters: dict[int, Any],
) -> list[Any]:
    """Adds results to totals; partial sums are allreduced after the loop.

    Args:
      mesh_impl: a MeshImpl.
      totals: laid-out tensors.
      results: lowered values, which may be partial sums.
      summands: for each result, whether it is a partial sum.
      counters: receives the mesh axes and the counter function of each partial sum, by index.
    """
    new = []
    for i, (total, result, pending) in enumerate(zip(totals, results, summands, strict=True)):
        if pending:
            assert isinstance(result, LazyAllreduceSum) and not result.is_summed
            counters[i] = (result.mesh_axes, result.add_counter_fn)
            result = result.laid_out_input
        new.append(mesh_impl.slicewise(tf.add, total, result.to_laid_out_tensor()))
    return new


def after_loop(mesh_impl: MeshImpl, values: Sequence[Any], counters: dict[int, Any]) -> list[Any]:
    """Returns accumulated values, with summands turned into partial sums."""
    out = []
    for i, value in enumerate(values):
        if i in counters:
            axes, count = counters[i]
            value = LazyAllreduceSum(mesh_impl, value, axes, count)
        out.append(value)
    return out


class Tape:
    """Past values of Tensors, one entry for each iteration, in tf.TensorArrays."""

    def __init__(self, mesh_impl: MeshImpl, tensors: Sequence[Tensor]):
        self._mesh_impl = mesh_impl
        self._tensors = list(tensors)
        self._state = LoopState(mesh_impl, [x.shape for x in tensors], [False] * len(tensors))

    def new_arrays(self, most: Optional[int] = None) -> list[tf.TensorArray]:
        """Returns empty arrays, one for each saved tf.Tensor.

        Args:
          most: their size; arrays that grow if None.
        """
        arrays = []
        for x in self._tensors:
            sizes = self._mesh_impl.slice_shape(x.shape)
            slices = self._mesh_impl.loop_slices(zero_state(self._mesh_impl, x, False), x.shape)
            arrays += [
                tf.TensorArray(
                    x.dtype,
                    size=most or 0,
                    dynamic_size=most is None,
                    # A gradient that is computed again reads the tape a second time.
                    clear_after_read=False,
                    element_shape=sizes,
                )
                for _ in slices
            ]
        return arrays

    def write(
        self, lowering: LoweringLike, arrays: Sequence[tf.TensorArray], index: tf.Tensor
    ) -> list[tf.TensorArray]:
        """Returns the arrays with the current values of the Tensors written at `index`."""
        flat = self._state.flatten([lowering.tensors[x] for x in self._tensors])
        return [array.write(index, t) for array, t in zip(arrays, flat, strict=True)]

    def read(
        self, lowering: LoweringLike, arrays: Sequence[tf.TensorArray], index: tf.Tensor
    ) -> None:
        """Sets the lowered values of the Tensors to those saved at `index`."""
        flat = [array.read(index) for array in arrays]
        for t, x in zip(flat, self._flat_tensors(), strict=True):
            t.set_shape(self._mesh_impl.slice_shape(x.shape))
        for x, value in zip(self._tensors, self._state.unflatten(flat)):
            lowering.set_tensor_lowering(x, value)

    def _flat_tensors(self) -> list[Tensor]:
        return [x for x, n in zip(self._tensors, self._state._counts) for _ in range(n)]

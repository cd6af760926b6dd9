"""Gathers from large tables, without a one-hot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.cost import Cost
from mesh_tensorflow._core.interfaces import LoweringLike
from mesh_tensorflow._core.operation import Operation, PendingSums, gradient_of_output
from mesh_tensorflow._core.shape import Dimension, Shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.constants import constant
from mesh_tensorflow._mesh.mesh_impl import MeshImpl

__all__ = ["GatherOperation"]

# With fewer elements, a product with a one-hot is as fast.
_LARGE = 2**14


def is_worthwhile(weights: Tensor, indices: Tensor, dim: Dimension, output_shape: Shape) -> bool:
    """Returns whether `GatherOperation` supports a gather and is faster than a contraction."""
    rest = weights.shape - [dim]
    dims = [*indices.shape.dims, *rest.dims]
    apart = dim in weights.shape.dims and len(set(dims)) == len(dims)
    apart = apart and set(dims) == set(output_shape.dims)
    names = [d.name for d in [dim, *dims]]
    known = weights.dtype.is_floating and indices.dtype in (tf.int32, tf.int64)
    return known and apart and len(set(names)) == len(names) and weights.shape.size >= _LARGE


class GatherOperation(Operation):
    """The entries of a table at indices along a dimension; zeros for indices out of range."""

    def __init__(
        self,
        weights: Tensor,
        indices: Tensor,
        dim: Dimension,
        output_shape: Shape,
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          weights: a Tensor with the dimension `dim`.
          indices: an int32 or int64 Tensor that shares no dimension with `weights`.
          dim: a Dimension.
          output_shape: a Shape with the dimensions of both except `dim`, in any order.
          name: a string or None.
        """
        super().__init__([weights, indices], name=name or "gather")
        self._dim = dim
        self._outputs = [Tensor(self, output_shape, weights.dtype)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Adds the rows of dy to the entries that they come from; indices have no gradient."""
        (weights, indices), dy = self.inputs, gradient_of_output(grad_ys)
        sums = mtf.GatherGradientOperation(dy, indices, self._dim, weights.shape)
        return [sums.outputs[0], None]

    def _split_over(self, mesh_impl: MeshImpl) -> Optional[int]:
        """Returns the mesh axis that splits the indexed dimension of the table, or None."""
        _, indices = self._inputs
        # Raises if the indices are split over the same axis.
        mesh_impl.tensor_layout(indices.shape + self._dim)
        return mesh_impl.tensor_dimension_to_mesh_axis(self._dim)

    def lower(self, lowering: LoweringLike) -> None:
        """Looks up what is in each slice; leaves a partial sum if the table's rows are split."""
        mesh_impl = lowering.mesh_impl(self)
        self._split_over(mesh_impl)
        weights, indices = self.inputs
        output = self.outputs[0]
        axis = weights.shape.dims.index(self._dim)
        part = mesh_impl.slice_shape(weights.shape)[axis]
        found = weights.shape.dims
        found[axis : axis + 1] = indices.shape.dims
        order = [found.index(d) for d in output.shape]
        sizes_out = mesh_impl.slice_shape(output.shape)

        def take(w: tf.Tensor, i: tf.Tensor, *coordinate: tf.Tensor) -> tf.Tensor:
            if part == 0:  # every index is out of range
                return tf.zeros(sizes_out, w.dtype)
            for c in coordinate:
                i = i - tf.cast(c * part, i.dtype)
            # Kernels on CPUs raise an error for an index out of range, and on GPUs give 0: it is
            # clipped, and what is found there is multiplied by 0.
            inside = tf.clip_by_value(i, constant(0, i.dtype), constant(part - 1, i.dtype))
            mask = tf.cast(tf.equal(i, inside), w.dtype)
            if i.shape.ndims:
                sizes = [1] * len(found)
                sizes[axis : axis + i.shape.ndims] = i.shape.as_list()
                mask = tf.reshape(mask, constant(sizes))
            y = tf.gather(w, inside, axis=axis) * mask
            return y if order == sorted(order) else tf.transpose(y, order)

        values = [lowering.tensors[x] for x in self.inputs]
        splitting_axis = mesh_impl.splitting_axis(self._dim)
        if splitting_axis is not None:
            values.append(mesh_impl.laid_out_pcoord(splitting_axis))
        result = mesh_impl.slicewise(take, *values)
        mesh_axis = mesh_impl.tensor_dimension_to_mesh_axis(self._dim)
        axes = [] if mesh_axis is None else [mesh_axis]
        # Each index is in the slice of one processor along the axis, and 0 on the others. The
        # counter is that of the product with a one-hot, which the classic has.
        lowering.set_partial_sum(output, result, axes, "einsum_op")

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Bytes of indices and of found rows, and one flop for each element found."""
        indices, output = self._inputs[1], self._outputs[0]
        written = mesh_impl.laid_out_size(output.shape)
        read = mesh_impl.laid_out_size(indices.shape) * indices.dtype.size
        return Cost(written, 2 * written * output.dtype.size + read)

    def cost_key(self) -> Dimension:
        """The dimension that is looked up."""
        return self._dim

    def pending_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> dict:
        """The output is pending over the mesh axis that splits the looked-up dimension."""
        split = self._split_over(mesh_impl)
        return {} if split is None else {self.outputs[0]: (split,)}

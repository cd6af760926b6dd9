"""gather looks rows up by index; its gradient adds to rows, and `write_at` replaces some."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Optional

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import WrongTypeError, dims_text, tensors_text
from mesh_tensorflow._core.layout import uneven_names
from mesh_tensorflow._core.operation import (
    Cost,
    LaidOutLike,
    Operation,
    Tensor,
    check_numbers,
    check_tensors,
    gradient_of_output,
)
from mesh_tensorflow._core.shape import Dimension, Shape, list_product, single_axes
from mesh_tensorflow._mesh.mesh_impl import LaidOutTensor, LazyAllreduceSum, MeshImpl
from mesh_tensorflow._mesh.slice_functions import (
    add_entries,
    constant,
    remembered,
    set_entries,
    within_part,
)
from mesh_tensorflow.ops._source import check_dimension, coordinate_along

if TYPE_CHECKING:
    from mesh_tensorflow._lowering.lowering import Lowering

__all__ = ["GatherGradientOperation", "GatherOperation"]


# With fewer elements, a product with a one-hot is as fast.
_LARGE = 2**14


def is_worthwhile(weights: Tensor, indices: Tensor, dim: Dimension, output_shape: Shape) -> bool:
    """Returns whether `GatherOperation` supports a gather and is faster than a contraction."""
    rest = weights.shape - [dim]
    dims = [*indices.shape.dims, *rest.dims]
    # tf.gather combines every index with every row; it matches no dimension that both have.
    apart = dim in weights.shape.dims and len(set(dims)) == len(dims)
    apart = apart and set(dims) == set(output_shape.dims)
    # Layouts go by names, and could not split two dimensions of one name apart.
    names = [d.name for d in [dim, *dims]]
    has_form = weights.dtype.is_floating and indices.dtype in (tf.int32, tf.int64)
    return has_form and apart and len(set(names)) == len(names) and weights.shape.size >= _LARGE


def _check_lookup(
    what: str, weights: Tensor, indices: Tensor, dim: Dimension, output_shape: Shape
) -> None:
    """Checks the arguments of a GatherOperation, which takes less than `mtf.gather`."""
    check_numbers(what, [weights])
    check_tensors(what, [indices])
    if indices.dtype not in (tf.int32, tf.int64):
        raise WrongTypeError(
            f"{what}: indices are int32 or int64, and not {tensors_text([indices])}. Write "
            "mtf.to_int32(indices)"
        )
    check_dimension(what, weights, dim)
    rest = weights.shape - dim
    if sorted([*indices.shape, *rest]) != sorted(output_shape):
        raise ValueError(
            f"{what}: output_shape {output_shape} must have each dimension of the indices "
            f"{indices.shape} and each of the table but {dims_text([dim])}, {rest}, once. "
            "mtf.gather takes indices that share dimensions with the table"
        )


class _AlongTable(Operation):
    """What a lookup and its gradient have in common."""

    _dim: Dimension
    takes_padding = True

    def filling(self, x: Tensor) -> tuple[Collection[Dimension], float]:
        """Returns what is looked up or summed: ids past the end of a table find zeros there."""
        return [d for d in x.shape if d not in self._outputs[0].shape and x.dtype.is_floating], 0

    def _part(self, mesh_impl: MeshImpl, table: Shape) -> int:
        """Returns the number of rows in a slice of the table."""
        return mesh_impl.slice_shape(table)[table.dims.index(self._dim)]

    def _values(self, lowering: Lowering) -> list:
        """Returns the slices of inputs, and the coordinate on the mesh axis that splits rows."""
        coordinate = coordinate_along(lowering.mesh_impl(self), self._dim)
        return [*(lowering.tensors[x] for x in self.inputs), *coordinate]


class GatherOperation(_AlongTable):
    """The entries of a table at indices along a dimension; zeros for indices out of range."""

    costs_by = ("_dim",)

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
        _check_lookup(name or "gather", weights, indices, dim, output_shape)
        super().__init__([weights, indices], name=name or "gather")
        self._dim = dim
        self._outputs = [Tensor(self, output_shape, weights.dtype)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Adds the rows of dy to the entries that they come from; indices have no gradient."""
        (weights, indices), dy = self.inputs, gradient_of_output(grad_ys)
        sums = GatherGradientOperation(dy, indices, self._dim, weights.shape)
        return [sums.outputs[0], None]

    def _summed_axes(self, mesh_impl: MeshImpl) -> list[int]:
        """Returns the mesh axes that split the indexed dimension of the table."""
        # Raises if the indices are split over one of them.
        return single_axes(mesh_impl.tensor_layout(self._inputs[1].shape + self._dim)[-1:])

    def lower(self, lowering: Lowering) -> None:
        """Looks up what is in each slice; leaves a partial sum if the table's rows are split."""
        mesh_impl = lowering.mesh_impl(self)
        summed = self._summed_axes(mesh_impl)
        weights, indices = self.inputs
        output = self.outputs[0]
        axis = weights.shape.dims.index(self._dim)
        part = self._part(mesh_impl, weights.shape)
        # tf.gather puts the dimensions of the indices in the place of the one that is looked up.
        looked_up = weights.shape.dims
        looked_up[axis : axis + 1] = indices.shape.dims
        order = [looked_up.index(d) for d in output.shape]
        sizes_out = mesh_impl.slice_shape(output.shape)

        def take(w: tf.Tensor, i: tf.Tensor, *coordinate: tf.Tensor) -> tf.Tensor:
            if part == 0:  # every index is out of range
                return tf.zeros(sizes_out, w.dtype)
            inside, is_here = within_part(i, part, coordinate)
            if i.shape.ndims:
                # One choice for each index, which is the same for all of a row.
                sizes = [1] * len(looked_up)
                sizes[axis : axis + i.shape.ndims] = i.shape.as_list()
                is_here = tf.reshape(is_here, constant(sizes))
            # What an index out of range finds is left out: a product with 0 would keep its Inf.
            y = tf.where_v2(is_here, tf.gather(w, inside, axis=axis), constant(0, w.dtype))
            return y if order == sorted(order) else tf.transpose(y, order)

        result = mesh_impl.slicewise(take, *self._values(lowering))
        # Each index is in the slice of one processor along the axis, and 0 on the others. The
        # counter is that of the product with a one-hot, which the classic has.
        lowering.set_partial_sum(output, result, summed, "einsum_op")

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Bytes of indices and of found rows, and one flop for each element found."""
        indices, output = self._inputs[1], self._outputs[0]
        written = mesh_impl.laid_out_size(output.shape)
        read = mesh_impl.laid_out_size(indices.shape) * indices.dtype.size
        return Cost(written, 2 * written * output.dtype.size + read)

    def begun_sums(self, mesh_impl: MeshImpl) -> dict[Tensor, list[int]]:
        """The output is partial over the mesh axis that splits the looked-up dimension."""
        return {self.outputs[0]: self._summed_axes(mesh_impl)}


# Types whose sums would lose small terms; a product with a one-hot sums them in float32 too.
_SUMMED_IN_FLOAT32 = (tf.bfloat16, tf.float16)


class GatherGradientOperation(_AlongTable):
    """A table of sums: each entry is the sum of the rows of dy that were gathered from it.

    Equal to `einsum([one_hot(indices, dim), dy], table_shape)`, but its time and memory grow with
    the size of dy and of the table instead of with the number of indices times the table's size.
    """

    costs_by = ("_dim",)

    def __init__(
        self,
        dy: Tensor,
        indices: Tensor,
        dim: Dimension,
        table_shape: Shape,
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          dy: a floating Tensor with the dimensions of `indices` and those of `table_shape`
            except `dim`.
          indices: an int32 or int64 Tensor; those out of range count for no entry.
          dim: the Dimension of `table_shape` that is indexed.
          table_shape: a Shape, that of the result.
          name: a string or None.
        """
        super().__init__([dy, indices], name=name or "gather_gradient")
        self._dim = dim
        self._outputs = [Tensor(self, table_shape, dy.dtype)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Gathers from the gradient of the table; indices have no gradient."""
        dy, indices = self.inputs
        # Linear in dy: the transpose of adding up rows is looking them up.
        gathered = GatherOperation(gradient_of_output(grad_ys), indices, self._dim, dy.shape)
        return [gathered.outputs[0], None]

    def _summed_axes(self, mesh_impl: MeshImpl) -> list[int]:
        """Returns the mesh axes that split the indices, over which parts are summed."""
        indices = self.inputs[1]
        # Raises if the table's indexed dimension is split over one of them.
        layout = mesh_impl.tensor_layout(indices.shape + self._dim)
        return sorted(single_axes(layout[:-1]))

    def lower(self, lowering: Lowering) -> None:
        """Adds the rows of each slice; leaves a partial sum if the indices are split."""
        mesh_impl = lowering.mesh_impl(self)
        summed = self._summed_axes(mesh_impl)
        part = self._part(mesh_impl, self.outputs[0].shape)
        # Segment sums put the indexed dimension first, wherever the table has it.
        back = [([self._dim, *self._rest.dims]).index(d) for d in self.outputs[0].shape]

        def add_rows(rows: tf.Tensor, i: tf.Tensor, *coordinate: tf.Tensor) -> tf.Tensor:
            for c in coordinate:
                i = i - tf.cast(c * part, i.dtype)
            # Negative numbers are left out of a segment sum; others out of range are not allowed.
            # What belongs to another processor's rows is out of range here, and must not be added.
            i = tf.where(i < part, i, constant(-1, i.dtype) * tf.ones_like(i))
            rows = self._rows(rows)
            narrow = rows.dtype in _SUMMED_IN_FLOAT32
            sums = tf.math.unsorted_segment_sum(
                tf.cast(rows, tf.float32) if narrow else rows, i, part
            )
            sums = tf.cast(sums, rows.dtype)
            return sums if back == sorted(back) else tf.transpose(sums, back)

        result = mesh_impl.slicewise(add_rows, *self._values(lowering))
        lowering.set_partial_sum(self.outputs[0], result, summed, "einsum_op")

    def _added_to(self, value: LaidOutLike, lowering: Lowering) -> Optional[LaidOutLike]:
        """Returns slices with the rows added, or None for some dtypes and orders of dimensions.

        So the gradients of a table that is read several times are summed in one memory, that of
        `value` if nothing else reads it.
        """
        if not isinstance(value, LazyAllreduceSum):
            return self._with_rows(value.to_laid_out_tensor(), lowering)
        total = self._with_rows(value.laid_out_input, lowering)
        return None if total is None else value.with_summands(total)

    def _with_rows(self, table: LaidOutTensor, lowering: Lowering) -> Optional[LaidOutTensor]:
        output = self.outputs[0]
        mesh_impl = lowering.mesh_impl(self)
        part = self._part(mesh_impl, output.shape)
        first = output.shape.dims[0] == self._dim
        # Narrow dtypes are summed in float32, for which the table would have to be copied and cast.
        if not first or not part or output.dtype not in (tf.float32, tf.float64):
            return None

        def add_rows(
            t: tf.Tensor, rows: tf.Tensor, i: tf.Tensor, *coordinate: tf.Tensor
        ) -> tf.Tensor:
            inside, is_here = within_part(i, part, coordinate)
            rows = self._rows(rows)
            is_here = tf.reshape(is_here, constant([*i.shape.as_list(), *[1] * len(self._rest)]))
            # What was clipped into this slice from elsewhere adds 0 there.
            rows = tf.where_v2(is_here, rows, constant(0, rows.dtype))
            return add_entries(t, inside[..., None], rows)

        rows, *more = self._values(lowering)
        if uneven_names(mesh_impl):
            # As where it is lowered by itself: there, the Lowering fills what is past the end.
            dims, number = self.filling(self.inputs[0])
            rows = mesh_impl.filled(rows, self.inputs[0].shape, dims, number)
        return mesh_impl.slicewise(add_rows, table, rows, *more)

    @property
    def _rest(self) -> Shape:
        """The dimensions of a row."""
        return self.outputs[0].shape - [self._dim]

    def _rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns a slice of dy with the dimensions of the indices, then those of a row."""
        dy, indices = self.inputs
        order = [dy.shape.dims.index(d) for d in [*indices.shape.dims, *self._rest.dims]]
        return rows if order == sorted(order) else tf.transpose(rows, order)

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """One flop for each element of dy; reads dy and the indices, writes the table."""
        rows = mesh_impl.laid_out_size(self._inputs[0].shape)
        return Cost(rows, super().cost(mesh_impl).bytes)

    def begun_sums(self, mesh_impl: MeshImpl) -> dict[Tensor, list[int]]:
        """The output is partial over the mesh axes that split the indices."""
        return {self.outputs[0]: self._summed_axes(mesh_impl)}


class WriteAtOperation(Operation):
    """Writes one position of a state, or several, in place where TensorFlow allows it."""

    def __init__(
        self,
        state: Tensor,
        new: Tensor,
        position: Tensor,
        dim: Dimension,
    ) -> None:
        """Creates the operation; arguments are those of `write_at`."""
        at = state.shape.dims.index(dim) if dim in state.shape else -1
        # Several positions: a dimension that only the new values and their positions have.
        several = [d for d in new.shape if d in position.shape and d not in state.shape]
        expected = {*state.shape, *several} - {dim}
        if at < 0 or len(several) > 1 or set(new.shape) != expected or new.dtype != state.dtype:
            raise ValueError(
                f"write_at: {new.name} {new.shape} {new.dtype.name} must have the dimensions of "
                f"the state {state.name} {state.shape} {state.dtype.name} without "
                f"{dims_text([dim])}, and its dtype"
            )
        unknown = [d for d in position.shape if d not in [*state.shape.dims[:at], *several]]
        if unknown:
            raise ValueError(
                f"write_at: the position {position.name} {position.shape} has "
                f"{dims_text(unknown)}, which the state {state.shape} does not have before "
                f"{dims_text([dim])}"
            )
        super().__init__([state, new, position], name="write_at")
        self._dim = dim
        self._several = several
        self._outputs = [Tensor(self, state.shape, state.dtype)]

    def _unsplittable(self) -> list[str]:
        # Each processor writes what is in its part of the state, so it needs all of the new values.
        return [d.name for d in self._several]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Returns the gradients of the state, zero where written, and of the new values."""
        [dy] = grad_ys
        if dy is None:
            return [None, None, None]
        state, new, position = self.inputs
        # Where a position is out of range the one-hot is 0, as nothing is written there.
        places = mtf.one_hot(position, self._dim, dtype=state.dtype)
        written = mtf.reduce_sum(places, output_shape=places.shape - self._several)
        # What was overwritten has no part in the result, and so no gradient.
        dstate = mtf.multiply(dy, 1.0 - written, output_shape=state.shape)
        return [dstate, mtf.einsum([dy, places], output_shape=new.shape), None]

    def lower(self, lowering: Lowering) -> None:
        """Writes the new values to one position of each slice."""
        mesh_impl = lowering.mesh_impl(self)
        state, new, position = self.inputs
        at = state.shape.dims.index(self._dim)
        front = state.shape.dims[:at]
        sizes = mesh_impl.slice_shape(state.shape)
        rows, length = list_product(sizes[:at]), sizes[at]
        count = Shape(self._several).size
        # New values and positions in the order of the state, several positions in place of one.
        order = [d for d in state.shape if d != self._dim]
        to_order = [new.shape.dims.index(d) for d in order[:at] + self._several + order[at:]]
        turn = [position.shape.dims.index(d) for d in front + self._several if d in position.shape]
        aligned = [n if d in position.shape else 1 for n, d in zip(sizes, front)]
        # The first entry of each row, once the state is flattened to [rows * length, rest].
        begins = np.repeat(np.arange(0, rows * length, length), count)

        def row_numbers(position: tf.Tensor) -> tf.Tensor:
            """Returns the positions of each row, or a scalar if there is one for all rows."""
            if not turn:
                return position
            if turn != sorted(turn):
                position = tf.transpose(position, turn)
            # A position that lacks dimensions of the rows is the same for all of them.
            if aligned != sizes[:at]:
                several = [count] * len(self._several)
                position = tf.reshape(position, aligned + several)
                position = tf.broadcast_to(position, sizes[:at] + several)
            return tf.reshape(position, [rows * count])

        def entries(position: tf.Tensor, *coordinate: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            """Returns the numbers of the entries, and which of them are in this slice."""
            # What another processor has to write is written nowhere here.
            inside, is_inside = within_part(position, length, coordinate)
            return row_numbers(inside) + tf.constant(begins, position.dtype), row_numbers(is_inside)

        def write(
            state: tf.Tensor, new: tf.Tensor, position: tf.Tensor, *coordinate: tf.Tensor
        ) -> tf.Tensor:
            # All layers write to the same entries of their states.
            index, is_inside = remembered(
                "entries",
                [position, *coordinate],
                (tuple(sizes[: at + 1]), tuple(turn), tuple(aligned), count),
                lambda: entries(position, *coordinate),
            )
            flat = tf.reshape(state, [rows * length, -1])
            if to_order != sorted(to_order):
                new = tf.transpose(new, to_order)
            new = tf.reshape(new, [rows * count, -1])
            # Several positions may be clipped to one entry, of which at most one is `there`.
            written = set_entries(flat, index, new, is_inside, distinct=not self._several)
            return tf.reshape(written, sizes)

        # Where the dimension is whole, each processor has all positions, and its slice begins at 0.
        self._lower_slices(lowering, write, *coordinate_along(mesh_impl, self._dim))


def write_at(state: Tensor, new: Tensor, position: Tensor, dim: Dimension) -> Tensor:
    """Returns a state with `new` written at a position; unchanged if the position is out of range.

    Args:
      state: a Tensor with dimensions [batch..., dim, ...].
      new: a Tensor with the dimensions of `state` except `dim`; and one more, if several positions
        are written.
      position: an integer Tensor with some of the dimensions [batch...], and that one more, along
        which no position may be twice.
      dim: a Dimension.

    Raises:
      ValueError: the dimensions do not fit.
    """
    return WriteAtOperation(state, new, position, dim).outputs[0]

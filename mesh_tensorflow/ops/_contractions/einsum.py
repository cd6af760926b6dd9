"""Contraction by dimension name: einsum and matmul.

Also transposes and products are einsums. A contraction over a split dimension leaves a partial sum,
from which most communication of a program comes.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import did_you_mean, dims_text, slip
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.layout import parts_along
from mesh_tensorflow._core.operation import (
    Collective,
    Cost,
    Operation,
    Tensor,
    check_numbers,
    check_tensors,
    gradient_of_output,
    with_stages,
)
from mesh_tensorflow._core.shape import (
    Dimension,
    Shape,
    ShapeLike,
    check_sizes_of_names,
    convert_to_dimension,
    convert_to_shape,
    list_product,
    single_axes,
)
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slice_functions import cut_to, einsum_slice
from mesh_tensorflow.ops._elementwise.binary import check_dtypes

__all__ = ["EinsumOperation", "einsum", "matmul"]


def einsum_output_shape(
    input_shapes: Sequence[Shape],
    output_shape: Optional[Shape],
    reduced_dims: Optional[Sequence[Dimension]],
) -> Shape:
    """Returns the output shape of an einsum.

    With neither `output_shape` nor `reduced_dims`, dimensions of two or more inputs are reduced.
    The other dimensions are in order of first appearance.

    Raises:
      ValueError: both are given and disagree, or a reduced dimension is in no input.
    """
    # Its order is that of first appearance, which the result has.
    counts = collections.Counter(d for shape in input_shapes for d in shape)
    if reduced_dims is not None:
        missing = [d for d in reduced_dims if d not in counts]
        if missing:
            raise ValueError(
                f"einsum: reduced_dims {dims_text(missing)} are in none of the inputs "
                f"{', '.join(map(str, input_shapes))}"
            )
    if output_shape is None:
        if reduced_dims is None:
            reduced_dims = [d for d, count in counts.items() if count > 1]
        return Shape([d for d in counts if d not in reduced_dims])
    if reduced_dims is not None:
        implied = [d for d in counts if d not in output_shape]
        if set(implied) != set(reduced_dims):
            raise ValueError(
                f"einsum: reduced_dims {dims_text(reduced_dims)} do not agree with the output "
                f"shape {output_shape}, which reduces {dims_text(implied) or 'nothing'} of the "
                f"inputs {', '.join(map(str, input_shapes))}. Give one of the two"
            )
    return output_shape


class EinsumOperation(Operation):
    """Multiplies Tensors and sums over the dimensions that the output lacks."""

    works_by_name = True
    takes_padding = True
    costs_by = ()

    def __init__(
        self, inputs: Sequence[Tensor], output_shape: ShapeLike, name: Optional[str] = None
    ):
        """Creates the operation.

        Args:
          inputs: Tensors of one dtype.
          output_shape: a Shape, each of whose dimensions is in an input.
          name: a string or None.

        Raises:
          ValueError: there are no inputs, their dtypes differ, or the output has a dimension
            that no input has.
        """
        if not inputs:
            raise ValueError("einsum needs at least one input tensor")
        check_dtypes(name or "einsum", inputs)
        output_shape = convert_to_shape(output_shape)
        mtf.verify_no_new_dims([x.shape for x in inputs], output_shape)
        # Booleans may be transposed.
        if len(inputs) > 1 or set(inputs[0].shape) != set(output_shape):
            check_numbers(name or "einsum", inputs)
        super().__init__(inputs, name=name or "einsum")
        self._outputs = [Tensor(self, output_shape, inputs[0].dtype)]

    def filling(self, x: Tensor) -> tuple[Collection[Dimension], float]:
        """Returns the dimensions that are summed over, which 0 adds nothing to."""
        # In all factors: what is past the end of the others may be infinite.
        return [d for d in x.shape if d not in self._outputs[0].shape], 0

    def _all_dims(self) -> list[Dimension]:
        return list(dict.fromkeys(d for x in self._inputs for d in x.shape))

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Returns, for each input, the einsum of dy with the other inputs, conjugate if complex."""
        dy = gradient_of_output(grad_ys)
        xs = self.inputs

        def others(i: int) -> list[Tensor]:
            rest = [*xs[:i], *xs[i + 1 :]]
            return [mtf.conj(x) if x.dtype.is_complex else x for x in rest]

        # y = sum(x_1 x_2 x_3) has dx_1 = sum(dy conj(x_2) conj(x_3)) over all that x_1 lacks.
        # A dimension that only this input has is summed over: `product` repeats dy along it.
        return [product([dy, *others(i)], x.shape) for i, x in enumerate(xs)]

    def _plan(self, mesh_impl: MeshImpl) -> tuple[dict[Dimension, int], list[int]]:
        """Returns the dimensions to gather first, with their mesh axes, and the axes to sum.

        Two dimensions that do not occur in one tensor may be split over the same mesh axis; if both
        are in this contraction, one of them must be gathered.
        """
        kept_dims = set(self._outputs[0].shape)
        gathered: dict[Dimension, int] = {}
        used: set[int] = set()
        summed: list[int] = []
        # A dimension of the output stays split. If a summed one did in its place, the output would
        # be a partial sum of whole slices, and lack its own split.
        for d in sorted(self._all_dims(), key=lambda d: d not in kept_dims):
            axis = mesh_impl.mesh_axis(d)
            if axis is None:
                continue
            axes = single_axes([axis])
            if used.intersection(axes):
                gathered[d] = axis
                continue
            used.update(axes)
            summed += [] if d in kept_dims else axes
        # In the order of the axes: pending sums are added as they are only if these are equal.
        return gathered, sorted(summed)

    def _as_counted(self, mesh_impl: MeshImpl, axes: list[int]) -> list[int]:
        """Returns mesh axes in the order of the name of the sum's counter.

        It is the order of the dimensions of an input that has all of them, or of their names.
        """
        if len(axes) < 2:
            return axes
        dims = self._all_dims()
        complete = [x.shape.dims for x in self._inputs if len(x.shape) == len(dims)]
        order = mesh_impl.splitting_axes(complete[0] if complete else sorted(dims))
        return sorted(axes, key=order.index)

    def lower(self, lowering: mtf.Lowering) -> None:
        """Gathers dimensions that would clash, multiplies slices, and leaves a partial sum."""
        mesh_impl = lowering.mesh_impl(self)
        gathered, summed = self._plan(mesh_impl)
        values = []
        for x in self.inputs:
            value = lowering.tensors[x]
            for axis_of_x, d in enumerate(x.shape):
                if d in gathered:
                    # A partial sum is summed first: a gather of its summands would move as much.
                    value = mesh_impl.allconcat(value.to_laid_out_tensor(), gathered[d], axis_of_x)
                    if mesh_impl.padding(d):
                        sizes = value.slice_shape
                        sizes[axis_of_x] = d.size
                        value = mesh_impl.slicewise(lambda t, n=sizes: cut_to(t, n), value)
            values.append(value)
        lowering.count_collectives(self, "einsum_op")
        # Of the requested mesh: in the executed one, processors that share a device may be one.
        lowering.add_counter("einsum", self._computed_elements(lowering.requested_impl(self)))
        # Without repetitions: the two differ where processors compute the same products.
        lowering.add_counter("einsum_unique", list_product(d.size for d in self._all_dims()))
        shapes = [x.shape for x in self.inputs]
        output = self.outputs[0]
        result = mesh_impl.slicewise(
            lambda *slices: einsum_slice(
                slices, shapes, output.shape, mesh_impl.einsum_by_shape, mesh_impl.merges
            ),
            *values,
        )
        # A sum along a split dimension is the sum, over processors, of those along their parts.
        axes = self._as_counted(mesh_impl, summed)
        lowering.set_partial_sum(output, result, axes, "einsum_op")

    def collectives(self, mesh_impl: MeshImpl) -> tuple[Collective, ...]:
        """The gathers of dimensions that would clash."""
        gathered, _ = self._plan(mesh_impl)
        gathers = []
        for x in self.inputs:
            elements = mesh_impl.laid_out_size(x.shape)
            for d in x.shape:
                if d in gathered:
                    axis = gathered[d]
                    # What is gathered along one axis is gathered along the next one as a whole.
                    elements *= mesh_impl.shape[axis].size
                    gathers.append(
                        Collective("allconcat", (axis,), elements, elements * x.dtype.size)
                    )
        return tuple(gathers)

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Two flops for each multiply-add, and the gathers of dimensions that would clash."""
        computed = self._computed_elements(mesh_impl)
        # n factors take n - 1 multiply-adds of two flops each; a sum of one factor, an addition.
        flops = computed * max(1, 2 * (len(self._inputs) - 1))
        moved = Operation.cost(self, mesh_impl).bytes
        return Cost(flops, moved, self.collectives(mesh_impl))

    def _computed_elements(self, mesh_impl: MeshImpl) -> int:
        gathered, _ = self._plan(mesh_impl)
        elements = mesh_impl.size
        for d in self._all_dims():
            # What is gathered is computed whole on each processor along its axis.
            axis = None if d in gathered else mesh_impl.mesh_axis(d)
            elements *= -(-d.size // parts_along(axis, mesh_impl.shape))
        return elements

    def begun_sums(self, mesh_impl: MeshImpl) -> dict[Tensor, list[int]]:
        """The output is partial over the mesh axes that split summed dimensions."""
        return {self.outputs[0]: self._plan(mesh_impl)[1]}


def _einsum_helper(
    input_shapes: Sequence[Shape], output_shape: Shape, mesh_impl: MeshImpl
) -> tuple[Callable[..., tf.Tensor], list[int]]:
    """Returns how slices are contracted, for operations of users, by the name that the classic has.

    Args:
      input_shapes: the Shapes of the factors.
      output_shape: the Shape of the product; each of its dimensions is in a factor.
      mesh_impl: a MeshImpl.

    Returns:
      (a function from a slice of each factor to that of the product, the mesh axes over which the
      product is still to be summed).

    Raises:
      ValueError: two dimensions of the contraction are split over one mesh dimension.
    """
    mtf.verify_no_new_dims(input_shapes, output_shape)
    every = Shape(dict.fromkeys(d for shape in input_shapes for d in shape))
    mesh_impl.tensor_layout(every)  # checks that no two dimensions are split over one
    summed = mesh_impl.splitting_axes([d for d in every if d not in output_shape])

    def multiply(*slices: tf.Tensor) -> tf.Tensor:
        return einsum_slice(
            slices, input_shapes, output_shape, mesh_impl.einsum_by_shape, mesh_impl.merges
        )

    return multiply, summed


def product(xs: Sequence[Tensor], output_shape: Shape, name: Optional[str] = None) -> Tensor:
    """Returns the einsum of `xs`, broadcast along dimensions that only the output has."""
    # The product is computed without these dimensions and repeated afterwards, which is less work.
    of_inputs = {d for x in xs for d in x.shape}
    computed = Shape([d for d in output_shape if d in of_inputs])
    y = EinsumOperation(xs, computed, name=name).outputs[0]
    return mtf.broadcast(y, output_shape)


def _check_no_broadcast(what: str, shapes: Sequence[Shape], output_shape: Shape) -> None:
    """Reports a slip if an einsum broadcasts along dimensions that no input has."""
    dims = {d for shape in shapes for d in shape}
    # Size 1 repeats nothing: decoders add such a dimension for the current position.
    new = [d for d in output_shape if d not in dims and d.size != 1]
    if not new:
        return
    texts = [dims_text([d]) for d in dims]
    slip(
        f"{what}: the output has {dims_text(new)}, which none of the inputs "
        f"{', '.join(map(str, shapes))} has{did_you_mean(dims_text(new[:1]), texts)} The product "
        "is repeated along it. If that is meant, leave it out of output_shape and call "
        "mtf.broadcast on the result",
        key=f"einsum broadcast/{dims_text(new)}",
    )


@leaves_no_node
def einsum(
    xs: Sequence[Tensor],
    output_shape: Optional[ShapeLike] = None,
    reduced_dims: Optional[Sequence[Dimension]] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Multiplies Tensors and sums over dimensions, which are matched by name and size.

    With neither `output_shape` nor `reduced_dims`, dimensions of two or more inputs are summed
    over. The other dimensions are in order of first appearance.

    >>> batch, d_in, d_out = mtf.convert_to_shape("batch:2,d_in:3,d_out:4").dims
    >>> x = mtf.ones(mesh, [batch, d_in])
    >>> w = mtf.ones(mesh, [d_in, d_out])
    >>> print(mtf.einsum([x, w], output_shape=[batch, d_out]).numpy())
    [[3. 3. 3. 3.]
     [3. 3. 3. 3.]]
    >>> print(mtf.einsum([x, w], reduced_dims=[d_in]).shape)
    Shape[batch=2, d_out=4]

    Args:
      xs: a list of Tensors of one dtype.
      output_shape: a Shape or None; the result is broadcast along dimensions that no input has.
      reduced_dims: a list of Dimensions to sum over, or None.
      name: a string or None.

    Returns:
      A Tensor.

    Raises:
      ValueError: the dtypes differ, or `output_shape` and `reduced_dims` disagree.
    """
    check_tensors(name or "einsum", xs)
    output_shape = convert_to_shape(output_shape)
    if reduced_dims is not None:
        reduced_dims = [convert_to_dimension(d) for d in reduced_dims]
    shapes = [x.shape for x in xs]
    output_shape = with_stages(xs, einsum_output_shape(shapes, output_shape, reduced_dims))
    check_sizes_of_names(name or "einsum", shapes)
    # Not in `product`, by which gradients repeat dy along dimensions: there it is no slip.
    _check_no_broadcast(name or "einsum", shapes, output_shape)
    return product(xs, output_shape, name)


def matmul(
    a: Tensor,
    b: Tensor,
    output_shape: Optional[ShapeLike] = None,
    reduced_dims: Optional[Sequence[Dimension]] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the einsum of two Tensors; see `einsum`.

    >>> x = mtf.ones(mesh, "batch:2,d_in:3")
    >>> w = mtf.ones(mesh, "d_in:3,d_out:4")
    >>> print(mtf.matmul(x, w, reduced_dims=w.shape.dims[:1]).shape)
    Shape[batch=2, d_out=4]
    """
    return einsum([a, b], output_shape=output_shape, reduced_dims=reduced_dims, name=name)

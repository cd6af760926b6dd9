"""Reductions and broadcasts; sum and broadcast are each other's gradient."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import WrongTypeError, dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.operation import (
    Cost,
    Operation,
    Tensor,
    allreduces,
    check_fractions,
    check_numbers,
    check_real,
    check_tensors,
    gradient_of_output,
    with_stages,
)
from mesh_tensorflow._core.shape import (
    Dimension,
    DimensionLike,
    Shape,
    ShapeLike,
    convert_to_shape,
    list_product,
)
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slice_functions import constant, reduction_fn, transpose_slice
from mesh_tensorflow.ops._source import check_dimension, given_dimension, over_a_dimension

__all__ = [
    "BroadcastOperation",
    "ReduceOperation",
    "broadcast",
    "reduce_all",
    "reduce_any",
    "reduce_first",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_sum",
]


def _neutral(reduction: str, dtype: tf.DType) -> float:
    """Returns the number that changes no sum, maximum or minimum of others."""
    if reduction == "SUM":
        return 0
    if dtype.is_floating:
        return -math.inf if reduction == "MAX" else math.inf
    return dtype.min if reduction == "MAX" else dtype.max


class ReduceOperation(Operation):
    """The sum, maximum or minimum over the dimensions that the output lacks."""

    works_by_name = True
    takes_padding = True
    costs_by = ("_reduction_fn_string",)

    def __init__(
        self,
        x: Tensor,
        output_shape: ShapeLike,
        reduction_fn_string: str,
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          x: a Tensor.
          output_shape: a Shape, each of whose dimensions is in `x`.
          reduction_fn_string: "SUM", "MAX" or "MIN", in upper or lower case.
          name: a string or None.

        Raises:
          ValueError: the output has a dimension that `x` lacks, or the reduction is unknown.
        """
        output_shape = convert_to_shape(output_shape)
        mtf.verify_no_new_dims([x.shape], output_shape)
        reduction_fn_string = str(reduction_fn_string).upper()
        # For its error alone, which comes from the user's line here, and from the Lowering later.
        reduction_fn(reduction_fn_string)
        super().__init__([x], name=name or "reduce")
        self._reduction_fn_string = reduction_fn_string
        self._outputs = [Tensor(self, output_shape, x.dtype)]

    def filling(self, x: Tensor) -> tuple[Collection[Dimension], float]:
        """Returns the reduced dimensions, and what adds nothing, or is no extremum."""
        reduced = [d for d in x.shape if d not in self._outputs[0].shape]
        return reduced, _neutral(self._reduction_fn_string, x.dtype)

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Broadcasts dy; for extrema, gives it to the elements that equal the result."""
        x, y, dy = self.inputs[0], self.outputs[0], gradient_of_output(grad_ys)
        if self._reduction_fn_string == "SUM":
            return [broadcast(dy, x.shape)]
        # As in the classic, each of several equal extrema gets all of dy.
        return [mtf.cast(mtf.equal(x, y, output_shape=x.shape), dy.dtype) * dy]

    def _reduced_mesh_axes(self, mesh_impl: MeshImpl) -> list[int]:
        """Returns the mesh axes that split reduced dimensions, in the order of these."""
        remaining = self._outputs[0].shape
        return mesh_impl.splitting_axes(d for d in self._inputs[0].shape if d not in remaining)

    def _is_sum(self) -> bool:
        return self._reduction_fn_string == "SUM"

    def lower(self, lowering: mtf.Lowering) -> None:
        """Reduces each slice; sums stay partial, extrema are reduced over the mesh at once."""
        mesh_impl = lowering.mesh_impl(self)
        x, y = self.inputs[0], self.outputs[0]
        reduced = [axis for axis, d in enumerate(x.shape) if d not in y.shape]
        # A reduction keeps the order of x, and the output may have another one.
        remaining = Shape([d for d in x.shape if d in y.shape])
        fn = reduction_fn(self._reduction_fn_string)
        value = mesh_impl.slicewise(
            lambda t: transpose_slice(
                fn(t, constant(reduced)) if reduced else t, remaining, y.shape
            ),
            lowering.tensors[x],
        )
        axes = self._reduced_mesh_axes(mesh_impl)
        if self._is_sum():
            # Not summed before it is needed: until then, it may be added to other partial sums.
            lowering.set_partial_sum(y, value, axes, "reduce_op")
            return
        if axes:
            # An addition of maxima is no maximum of additions, so extrema cannot stay partial as
            # sums do.
            lowering.allreduce_counter(axes, y, "reduce_op")()
            value = mesh_impl.allreduce(value, sorted(axes), self._reduction_fn_string)
        lowering.set_tensor_lowering(y, value)

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """One flop for each element, and an allreduce unless the sum stays partial."""
        x, y = self._inputs[0], self._outputs[0]
        # A pending sum costs nothing here: what needs the total is charged for the allreduce.
        axes = [] if self._is_sum() else sorted(self._reduced_mesh_axes(mesh_impl))
        collectives = allreduces(mesh_impl, y.shape, y.dtype, axes)
        return Cost(mesh_impl.laid_out_size(x.shape), super().cost(mesh_impl).bytes, collectives)

    def begun_sums(self, mesh_impl: MeshImpl) -> dict[Tensor, list[int]]:
        """A sum is partial over the mesh axes that split reduced dimensions."""
        return {self._outputs[0]: self._reduced_mesh_axes(mesh_impl) if self._is_sum() else []}


class BroadcastOperation(Operation):
    """A Tensor repeated along further dimensions."""

    works_by_name = True
    takes_padding = True

    def __init__(self, x: Tensor, output_shape: ShapeLike, name: Optional[str] = None):
        """Creates the operation.

        Args:
          x: a Tensor.
          output_shape: a Shape that has all dimensions of `x`.
          name: a string or None.

        Raises:
          ValueError: the output lacks a dimension of `x`.
        """
        output_shape = convert_to_shape(output_shape)
        missing = [d for d in x.shape if d not in output_shape]
        if missing:
            raise ValueError(
                f"cannot broadcast {x.name} {x.shape} to {output_shape}, which lacks "
                f"{dims_text(missing)}; mtf.reduce_sum or mtf.reshape removes a dimension"
            )
        super().__init__([x], name=name or "broadcast")
        self._outputs = [Tensor(self, output_shape, x.dtype)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Sums dy over the new dimensions."""
        # y[a, b] = x[a] for each b, so dx[a] is the sum over b of dy[a, b].
        return [reduce_sum(gradient_of_output(grad_ys), output_shape=self.inputs[0].shape)]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Broadcasts slice by slice."""
        x, y = self.inputs[0], self.outputs[0]
        # A partial sum is summed here, while it is small: repeated, its allreduce would move more.
        value = lowering.mesh_impl(self).broadcast_impl(lowering.tensors[x], x.shape, y.shape)
        lowering.set_tensor_lowering(y, value)


def broadcast(x: Tensor, new_shape: ShapeLike) -> Tensor:
    """Returns `x` repeated along the dimensions that it lacks; `x` itself if the shapes are equal.

    >>> x = mtf.constant(mesh, [1.0, 2.0], "d:2")
    >>> print(mtf.broadcast(x, "batch:3,d:2").numpy())
    [[1. 2.]
     [1. 2.]
     [1. 2.]]

    Args:
      x: a Tensor.
      new_shape: a Shape that has all dimensions of `x`, in any order.

    Raises:
      ValueError: the new shape lacks a dimension of `x`.
    """
    new_shape = with_stages([x], convert_to_shape(new_shape))
    return x if new_shape == x.shape else BroadcastOperation(x, new_shape).outputs[0]


def _kept_shape(
    what: str,
    x: Tensor,
    disable_positional_args: object,
    output_shape: Optional[ShapeLike],
    reduced_dim: Optional[DimensionLike],
) -> Shape:
    """Returns the output shape of a reduction, from either of two arguments."""
    assert disable_positional_args is None, (
        f"{what} takes keyword arguments only after x: output_shape= or reduced_dim="
    )
    check_tensors(what, [x])
    output_shape = convert_to_shape(output_shape)
    if isinstance(reduced_dim, list):
        raise WrongTypeError(
            f"{what}: reduced_dim={reduced_dim!r} is a list; give output_shape, the dimensions "
            f"that the result has of {x.name} {x.shape}"
        )
    if output_shape is None:
        if reduced_dim is None:
            # Stages of a pipeline stay: a layer knows nothing of them, and means its own.
            return with_stages([x], Shape([]))
        return x.shape - check_dimension(what, x, reduced_dim)
    if reduced_dim is not None:
        reduced_dim = given_dimension(what, x, reduced_dim)
        implied = [d for d in x.shape if d not in output_shape]
        if implied != [reduced_dim]:
            raise ValueError(
                f"{what}: reduced_dim {dims_text([reduced_dim])} does not agree with output_shape "
                f"{output_shape} of {x.name} {x.shape}, which reduces "
                f"{dims_text(implied) or 'nothing'}. Give one of the two"
            )
    return with_stages([x], output_shape)


@over_a_dimension
@leaves_no_node
def reduce_sum(
    x: Tensor,
    disable_positional_args: None = None,
    output_shape: Optional[ShapeLike] = None,
    reduced_dim: Optional[DimensionLike] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the sum over one dimension, over those not in `output_shape`, or over all.

    >>> x = mtf.constant(mesh, [[1.0, 2.0], [3.0, 5.0]], "row:2,col:2")
    >>> print(mtf.reduce_sum(x).numpy())
    11.0
    >>> print(mtf.reduce_sum(x, reduced_dim=mtf.Dimension("col", 2)).numpy())
    [3. 8.]
    >>> print(mtf.reduce_sum(x, output_shape="col:2").numpy())
    [4. 7.]

    Args:
      x: a Tensor.
      disable_positional_args: None; the other arguments must be given by name.
      output_shape: a Shape or None.
      reduced_dim: a Dimension of it, or its name; or None.
      name: a string or None.

    Returns:
      A Tensor; `x` itself if it has the output's shape.
    """
    shape = _kept_shape("reduce_sum", x, disable_positional_args, output_shape, reduced_dim)
    if shape == x.shape:
        return x
    check_numbers("reduce_sum", [x])
    return ReduceOperation(x, shape, "SUM", name=name).outputs[0]


@over_a_dimension
@leaves_no_node
def reduce_mean(
    x: Tensor,
    disable_positional_args: None = None,
    output_shape: Optional[ShapeLike] = None,
    reduced_dim: Optional[DimensionLike] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the mean over dimensions; see `reduce_sum`.

    >>> x = mtf.constant(mesh, [[1.0, 2.0], [3.0, 5.0]], "row:2,col:2")
    >>> print(mtf.reduce_mean(x).numpy(), mtf.reduce_mean(x, output_shape="row:2").numpy())
    2.75 [1.5 4. ]
    """
    shape = _kept_shape("reduce_mean", x, disable_positional_args, output_shape, reduced_dim)
    with tf.variable_scope(name, default_name="reduce_mean"):
        if shape == x.shape:
            return x
        check_fractions("reduce_mean", [x], of_complex=True)
        # By sizes of the whole: a processor's slice may have only a part of what is summed.
        number = list_product(d.size for d in x.shape if d not in shape)
        # The mean of no elements is NaN, as in NumPy.
        return divided_sum(reduce_sum(x, output_shape=shape), number)


def divided_sum(total: Tensor, number: float, is_mean: bool = True) -> Tensor:
    """Returns a sum divided by a number.

    Args:
      total: a Tensor, a sum.
      number: a number.
      is_mean: whether it is the number of what is summed, so that it changes with the batch; else
        it is the same for all sizes.
    """
    op = mtf.ScalarMultiplyOperation(total, 1.0 / number if number else math.nan)
    # The factor, such as 1 / 32, does not tell whether it is one over the size of a batch.
    op.is_mean = is_mean
    return op.outputs[0]


def _extreme(x: Tensor, shape: Shape, reduction: str, name: Optional[str], default: str) -> Tensor:
    if shape == x.shape:
        return x
    check_real(default, [x])
    return ReduceOperation(x, shape, reduction, name=name or default).outputs[0]


@over_a_dimension
@leaves_no_node
def reduce_max(
    x: Tensor,
    disable_positional_args: None = None,
    output_shape: Optional[ShapeLike] = None,
    reduced_dim: Optional[DimensionLike] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the maximum over dimensions; all ties get the gradient; see `reduce_sum`.

    >>> x = mtf.constant(mesh, [[1.0, 2.0], [3.0, 5.0]], "row:2,col:2")
    >>> print(mtf.reduce_max(x).numpy(), mtf.reduce_max(x, output_shape="row:2").numpy())
    5.0 [2. 5.]
    """
    shape = _kept_shape("reduce_max", x, disable_positional_args, output_shape, reduced_dim)
    return _extreme(x, shape, "MAX", name, "reduce_max")


@over_a_dimension
@leaves_no_node
def reduce_min(
    x: Tensor,
    disable_positional_args: None = None,
    output_shape: Optional[ShapeLike] = None,
    reduced_dim: Optional[DimensionLike] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the minimum over dimensions; all ties get the gradient; see `reduce_sum`.

    >>> x = mtf.constant(mesh, [[1.0, 2.0], [3.0, 5.0]], "row:2,col:2")
    >>> print(mtf.reduce_min(x).numpy(), mtf.reduce_min(x, output_shape="row:2").numpy())
    1.0 [1. 3.]
    """
    shape = _kept_shape("reduce_min", x, disable_positional_args, output_shape, reduced_dim)
    return _extreme(x, shape, "MIN", name, "reduce_min")


@over_a_dimension
@leaves_no_node
def reduce_all(
    x: Tensor,
    disable_positional_args: None = None,
    output_shape: Optional[ShapeLike] = None,
    reduced_dim: Optional[DimensionLike] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the logical and of a boolean Tensor over dimensions; see `reduce_sum`.

    Of numbers, all but 0 count as true.

    >>> x = mtf.constant(mesh, [[True, False], [True, True]], "row:2,col:2", tf.bool)
    >>> print(mtf.reduce_all(x).numpy(), mtf.reduce_all(x, output_shape="row:2").numpy())
    False [False  True]
    """
    shape = _kept_shape("reduce_all", x, disable_positional_args, output_shape, reduced_dim)
    # Collectives reduce numbers, not booleans. The least of other numbers may be below 0, and true.
    y = _extreme(mtf.to_float(mtf.cast(x, tf.bool)), shape, "MIN", name, "reduce_all")
    return mtf.cast(y, tf.bool)


@over_a_dimension
@leaves_no_node
def reduce_any(
    x: Tensor,
    disable_positional_args: None = None,
    output_shape: Optional[ShapeLike] = None,
    reduced_dim: Optional[DimensionLike] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the logical or of a boolean Tensor over dimensions; see `reduce_sum`.

    Of numbers, all but 0 count as true.

    >>> x = mtf.constant(mesh, [[True, False], [True, True]], "row:2,col:2", tf.bool)
    >>> print(mtf.reduce_any(x).numpy(), mtf.reduce_any(x, output_shape="row:2").numpy())
    True [ True  True]
    """
    shape = _kept_shape("reduce_any", x, disable_positional_args, output_shape, reduced_dim)
    # The maximum of no numbers is -inf, which would be true; their minimum, inf, is right for all.
    if not x.size and shape.size:
        return mtf.cast(mtf.zeros(x.mesh, shape), tf.bool)
    y = _extreme(mtf.to_float(mtf.cast(x, tf.bool)), shape, "MAX", name, "reduce_any")
    return mtf.cast(y, tf.bool)


@leaves_no_node
def reduce_first(tensor: Tensor, reduced_dim: DimensionLike) -> Tensor:
    """Returns the first element along a dimension.

    >>> x = mtf.constant(mesh, [[1.0, 2.0], [3.0, 5.0]], "row:2,col:2")
    >>> print(mtf.reduce_first(x, mtf.Dimension("col", 2)).numpy())
    [1. 3.]

    Args:
      tensor: a Tensor.
      reduced_dim: a Dimension of it.
    """
    reduced_dim = check_dimension("reduce_first", tensor, reduced_dim)
    # The sum over processors is of numbers.
    if tensor.dtype.is_bool:
        return mtf.cast(reduce_first(mtf.to_int32(tensor), reduced_dim), tf.bool)
    is_first = mtf.equal(mtf.mtf_range(tensor.mesh, reduced_dim, dtype=tf.int32), 0)
    # No number for the dimension itself: if it is split, each processor has only its positions.
    sizes = [-1 if d == reduced_dim else 1 for d in tensor.shape]

    # A diagonal matrix of 0 and 1 is its own transpose, so its gradient is the same function.
    def alone(x: Tensor) -> Tensor:
        return mtf.slicewise(
            # A selection: a product with 0 would keep an Inf or NaN of the others.
            lambda t, i: tf.where_v2(tf.reshape(i, constant(sizes)), t, constant(0, t.dtype)),
            [x, is_first],
            output_shape=tensor.shape,
            output_dtype=x.dtype,
            splittable_dims=tensor.shape.dims,
            grad_function=lambda op, dy: [alone(dy), None],
            name="first",
        )

    # Not mtf.slice: that needs the whole dimension on each processor, and a sum does not.
    return reduce_sum(alone(tensor), reduced_dim=reduced_dim)

"""Changing dimensions: reshape, transpose, rename, replace, anonymize."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union, overload

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text, slip
from mesh_tensorflow._core.layout import padded_dims, uneven_names
from mesh_tensorflow._core.operation import (
    Collective,
    Cost,
    LaidOutLike,
    Operation,
    Partial,
    PartialSums,
    PendingSums,
    Tensor,
    check_tensors,
    gradient_of_output,
    with_stages,
)
from mesh_tensorflow._core.placement import (
    Factored,
    Move,
    collectives_of,
    counterparts,
    factored,
    moves_between,
)
from mesh_tensorflow._core.shape import (
    Dimension,
    Shape,
    ShapeLike,
    anonymous_shape,
    check_names_differ,
    convert_to_dimension,
    convert_to_shape,
    single_axes,
)
from mesh_tensorflow._mesh.mesh_impl import MeshImpl, is_pending
from mesh_tensorflow._mesh.slice_functions import constant, cut_to, padded
from mesh_tensorflow.ops._contractions.einsum import EinsumOperation

if TYPE_CHECKING:
    from mesh_tensorflow._lowering.lowering import Lowering

__all__ = [
    "ReshapeOperation",
    "anonymize",
    "rename_dimension",
    "replace_dimensions",
    "reshape",
    "transpose",
]


DimOrDims = Union[Dimension, Sequence[Dimension]]


def _resliced(mesh_impl: MeshImpl, value: Any, sizes: list[int]) -> Any:
    """Returns a laid-out value with the same elements in slices of other sizes."""
    if list(value.slice_shape) == sizes:
        return value
    # A reshape is linear, so a partial sum stays partial where nothing moves.
    return mesh_impl.slicewise_delay_allreduce(lambda t: tf.reshape(t, constant(sizes)), value)


def _padded_to(sizes: Sequence[int], t: tf.Tensor) -> tf.Tensor:
    for axis, size in enumerate(sizes):
        t = padded(t, axis, size - t.shape.as_list()[axis])
    return t


def _step(move: Move, mesh_impl: MeshImpl, value: LaidOutLike) -> LaidOutLike:
    # A mesh implementation from elsewhere may not have all that the base class builds.
    method = getattr(mesh_impl, move.kind, None)
    method = method or functools.partial(getattr(MeshImpl, move.kind), mesh_impl)
    return method(value.to_laid_out_tensor(), move.mesh_axis, *move.tensor_axes)


def redistributed(
    mesh_impl: MeshImpl,
    value: Any,
    moves: Sequence[Move],
    old: Factored,
    new: Factored,
    sizes: list[int],
) -> Any:
    """Returns a laid-out value in another layout.

    Args:
      mesh_impl: a MeshImpl, whose collectives move it.
      value: a laid-out value.
      moves: the Moves from `old` to `new`.
      old: the Factored shape that it has.
      new: the Factored shape that it is to have.
      sizes: the sizes of the slices of the result.
    """
    early = [move for move in moves if not move.late]
    late = [move for move in moves if move.late]
    if list(value.slice_shape) != old.padded:
        pad = functools.partial(_padded_to, old.padded)
        value = mesh_impl.slicewise_delay_allreduce(pad, value)
    if early:
        value = _resliced(mesh_impl, value, old.local)
    for move in early:
        value = _step(move, mesh_impl, value)
    if late:
        uncut = list(new.local)
        for move in late:
            # Not cut yet, slices still have the parts of all processors along this axis.
            uncut[move.tensor_axes[0]] *= mesh_impl.shape[move.mesh_axis].size
        value = _resliced(mesh_impl, value, uncut)
    for move in late:
        value = _step(move, mesh_impl, value)
    if new.padded == sizes:
        return _resliced(mesh_impl, value, sizes)
    value = _resliced(mesh_impl, value, new.padded)
    return mesh_impl.slicewise_delay_allreduce(lambda t: cut_to(t, sizes), value)


def _only_splits(moves: Sequence[Move]) -> bool:
    """Returns whether each processor keeps elements that it has: true also of no moves."""
    return all(move.kind == "allsplit" for move in moves)


def _scattering(moves: Sequence[Move], sum_axes: Sequence[int]) -> list[Move]:
    """Returns the moves of a partial sum, of which those along axes of the sum also sum it."""
    scattering = []
    for move in moves:
        axes = single_axes([move.mesh_axis])
        # Axes that split together do so one by one if some are of the sum and others are not: each
        # cuts the part that those before it have left.
        mixed = len({axis in sum_axes for axis in axes}) > 1
        for mesh_axis in axes if mixed else [move.mesh_axis]:
            # To keep a part of a sum, only that part of the summands has to be added up.
            summed = {*single_axes([mesh_axis])} <= {*sum_axes}
            kind = "reduce_scatter" if summed else move.kind
            scattering.append(move._replace(kind=kind, mesh_axis=mesh_axis))
    return scattering


def _axes_left(moves: Sequence[Move], sum_axes: Sequence[int]) -> tuple[int, ...]:
    """Returns the axes of a partial sum that moves do not sum over."""
    summed = single_axes(move.mesh_axis for move in moves if move.kind == "reduce_scatter")
    return tuple(axis for axis in sum_axes if axis not in summed)


def _check_order(what: str, x: Tensor, new_shape: Shape) -> None:
    """Reports a slip if a reshape changes the order of dimensions that it keeps.

    A reshape does not move elements, so their indices along these dimensions change.
    """
    # Dimensions of size 1 may stand anywhere: they change no element's place.
    common = [d for d in x.shape if d.size > 1 and d in new_shape]
    if common != [d for d in new_shape if d in common]:
        slip(
            f"{what}: {x.name} {x.shape} becomes {new_shape}, which has {dims_text(common)} in "
            "another order. A reshape leaves the elements as they lie, so that they get other "
            "places along these dimensions. mtf.transpose moves them; if mixing them is meant, "
            "give the dimensions other names",
            key=f"reshape/{x.shape}/{new_shape}",
        )


class ReshapeOperation(Operation):
    """The same elements in row-major order, under other dimensions."""

    takes_padding = True
    delays_sums = 1
    costs_by = ()

    def __init__(self, x: Tensor, new_shape: ShapeLike, name: Optional[str] = None):
        """Creates the operation.

        Args:
          x: a Tensor.
          new_shape: a Shape with the same number of elements.
          name: a string or None.

        Raises:
          ValueError: the numbers of elements differ.
        """
        check_tensors(name or "reshape", [x])
        new_shape = convert_to_shape(new_shape)
        if x.shape.size != new_shape.size:
            raise ValueError(
                f"cannot reshape {x.name} {x.shape} of {x.shape.size} elements to {new_shape} "
                f"of {new_shape.size}; the sizes must have one product"
            )
        super().__init__([x], name=name or "reshape")
        self._outputs = [Tensor(self, new_shape, x.dtype)]

    def needs_whole(self, mesh_impl: MeshImpl) -> Collection[str]:
        """Returns the dimensions that end in padding and have no counterpart of their size."""
        if not uneven_names(mesh_impl):
            return ()
        x, y = self._inputs[0].shape, self._outputs[0].shape
        # By place: of two dimensions of one name, one may have a counterpart, and the other none.
        x_axes, y_axes = set(range(len(x))), set(range(len(y)))
        for i, j in counterparts(x, y):
            axes = {mesh_impl.splitting_axis(d) for d in (x[i], y[j])}
            # Padded in the same way, or in one of the two layouts alone.
            if len(axes - {None}) < 2:
                x_axes.remove(i)
                y_axes.remove(j)
        others = [*(x[i] for i in x_axes), *(y[j] for j in y_axes)]
        return {d.name for d in padded_dims(mesh_impl, others)}

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Reshapes dy to the shape of the input."""
        # Not by `reshape`, which would report a slip of the user's a second time.
        return [ReshapeOperation(gradient_of_output(grad_ys), self.inputs[0].shape).outputs[0]]

    def _factored(self, mesh_impl: MeshImpl) -> tuple[Factored, Factored]:
        return factored(self._inputs[0].shape, mesh_impl, self._outputs[0].shape, mesh_impl)

    def _moves(self, mesh_impl: MeshImpl) -> list[Move]:
        return moves_between(*self._factored(mesh_impl), mesh_impl.shape)

    def lower(self, lowering: Lowering) -> None:
        """Gathers, exchanges or cuts as the two layouts ask, and reshapes each slice."""
        mesh_impl = lowering.mesh_impl(self)
        x, y = self.inputs[0], self.outputs[0]
        # Merged processors may have what the requested ones move, or the other way round.
        requested, moves = self._moves(lowering.requested_impl(self)), self._moves(mesh_impl)
        source = value = lowering.tensors[x]
        # A gather or an exchange of summands would move as much as one of sums, and be summed after
        # that.
        sums = value.mesh_axes if is_pending(value) and _only_splits(requested) else []
        if requested:
            lowering.count_collectives(self, "reshape_op", {x: tuple(sums)} if sums else None)
        if requested or moves:
            source = value.laid_out_input if sums else value.to_laid_out_tensor()
            moves = _scattering(moves, sums)
        sizes = mesh_impl.slice_shape(y.shape)
        moved = redistributed(mesh_impl, source, moves, *self._factored(mesh_impl), sizes)
        if sums and requested:
            left = _axes_left(_scattering(requested, sums), sums)
            lowering.set_partial_sum(y, moved, left, "reshape_op")
        else:
            # Where nothing moves on the requested mesh, it is counted as the sum that it is of.
            as_sum = sums and source is not value
            lowering.set_tensor_lowering(y, value.with_summands(moved) if as_sum else moved)

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Free where layouts agree; else the collectives between the two."""
        # As what renames a dimension: slices are the same, and have other names.
        if not self._moves(mesh_impl):
            return Cost()  # no element moves
        moved = super().cost(mesh_impl).bytes
        x = self._inputs[0]
        old, _ = self._factored(mesh_impl)
        elements, itemsize = old.slice_size * mesh_impl.size, x.dtype.size
        collectives = collectives_of(self._moves(mesh_impl), elements, itemsize, mesh_impl.shape)
        return Cost(0, moved, tuple(collectives))

    def passes_on(self, split: Collection[str]) -> dict[Tensor, Tensor]:
        """The output is the input if the same dimensions are split."""
        x, y = self._inputs[0], self._outputs[0]
        names = [[n for n in t.shape.dimension_names if n in split] for t in (x, y)]
        return {y: x} if names[0] == names[1] else {}

    def partial_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> PartialSums:
        """The output is partial as the input is, if no processor needs elements that others have.

        A sum over an axis that splits the output is a reduce-scatter.
        """
        moves, x = self._moves(mesh_impl), self._inputs[0]
        if x not in pending or not _only_splits(moves):
            return super().partial_sums(mesh_impl, pending)
        y = self._outputs[0]
        if not moves and mesh_impl.slice_shape(x.shape) == mesh_impl.slice_shape(y.shape):
            # Nothing is done: whichever of the two is summed first, both are.
            return {y: Partial(pending[x], same_as=x)}
        elements = self._factored(mesh_impl)[0].slice_size * mesh_impl.size
        scattering, scattered = _scattering(moves, pending[x]), []
        for move in scattering:
            if move.kind == "reduce_scatter":
                scattered.append(
                    Collective(move.kind, (move.mesh_axis,), elements, elements * x.dtype.size)
                )
            # What is cut off here is not summed by the steps that follow.
            elements //= mesh_impl.shape[move.mesh_axis].size
        return {y: Partial(_axes_left(scattering, pending[x]), scattered=tuple(scattered))}


def reshape(x: Tensor, new_shape: ShapeLike, name: str = "reshape") -> Tensor:
    """Returns the elements of `x`, in row-major order, under other dimensions.

    Reshaping to the same dimensions in another order relabels the elements without moving them;
    `transpose` moves them.

    >>> x = mtf.constant(mesh, [1.0, 2.0, 3.0, 4.0], "d:4")
    >>> print(mtf.reshape(x, "row:2,col:2").numpy())
    [[1. 2.]
     [3. 4.]]

    Args:
      x: a Tensor.
      new_shape: a Shape with the same number of elements.
      name: a string.

    Raises:
      ValueError: the numbers of elements differ.
    """
    check_tensors(name, [x])
    requested = convert_to_shape(new_shape)
    new_shape = with_stages([x], requested)
    if new_shape.ndims != requested.ndims:
        # Stages that are kept come first, so they do in what is reshaped.
        gone = [d for d in new_shape if d not in requested]
        x = transpose(x, Shape([*gone, *(d for d in x.shape if d not in gone)]))
    _check_order(name, x, new_shape)
    check_names_differ(name, new_shape, x.shape)
    return ReshapeOperation(x, new_shape, name=name).outputs[0]


def transpose(x: Tensor, new_shape: ShapeLike, name: str = "transpose") -> Tensor:
    """Returns `x` with its dimensions in another order.

    >>> x = mtf.constant(mesh, [[1.0, 2.0], [3.0, 5.0]], "row:2,col:2")
    >>> print(mtf.transpose(x, "col:2,row:2").numpy())
    [[1. 3.]
     [2. 5.]]

    Args:
      x: a Tensor.
      new_shape: a Shape with the same dimensions.
      name: a string.

    Raises:
      ValueError: the dimensions differ.
    """
    new_shape = convert_to_shape(new_shape)
    if set(x.shape) != set(new_shape):
        raise ValueError(
            f"transpose must keep the dimensions: {x.name} {x.shape} cannot become {new_shape}. "
            "mtf.reshape changes them, mtf.broadcast adds some"
        )
    # An einsum of one Tensor sums over nothing, and has its dimensions in any order.
    return EinsumOperation([x], new_shape, name=name).outputs[0]


def rename_dimension(x: Tensor, old_name: str, new_name: str) -> Tensor:
    """Returns `x` with a dimension renamed, so that other layout rules apply to it.

    >>> x = mtf.ones(mesh, "batch:2,d:3")
    >>> print(mtf.rename_dimension(x, "d", "d_out").shape)
    Shape[batch=2, d_out=3]

    Args:
      x: a Tensor.
      old_name: a string.
      new_name: a string.

    Raises:
      ValueError: there is no dimension `old_name`.
    """
    return reshape(x, x.shape.rename_dimension(old_name, new_name))


def _as_dims(dim_or_dims: DimOrDims) -> list[Dimension]:
    if isinstance(dim_or_dims, Dimension):
        return [dim_or_dims]
    return [convert_to_dimension(d) for d in dim_or_dims]


@overload
def replace_dimensions(
    tensor_or_shape: Tensor, old_dim_or_dims: DimOrDims, new_dim_or_dims: DimOrDims
) -> Tensor: ...
@overload
def replace_dimensions(
    tensor_or_shape: Shape, old_dim_or_dims: DimOrDims, new_dim_or_dims: DimOrDims
) -> Shape: ...
def replace_dimensions(
    tensor_or_shape: Union[Tensor, Shape], old_dim_or_dims: DimOrDims, new_dim_or_dims: DimOrDims
) -> Union[Tensor, Shape]:
    """Returns a Tensor or Shape with adjacent dimensions replaced by others.

    >>> x = mtf.ones(mesh, "batch:2,heads:3,kv:4")
    >>> both = mtf.Dimension("heads_kv", 12)
    >>> print(mtf.replace_dimensions(x, x.shape.dims[1:], both).shape)
    Shape[batch=2, heads_kv=12]

    Args:
      tensor_or_shape: a Tensor or a Shape.
      old_dim_or_dims: a Dimension, or a list of adjacent Dimensions.
      new_dim_or_dims: a Dimension, or a list of Dimensions, with the same product of sizes.

    Raises:
      ValueError: the old dimensions are not adjacent in this order.
    """
    if isinstance(tensor_or_shape, Tensor):
        new_shape = replace_dimensions(tensor_or_shape.shape, old_dim_or_dims, new_dim_or_dims)
        return reshape(tensor_or_shape, new_shape)
    if not isinstance(tensor_or_shape, Shape):
        raise ValueError(
            f"replace_dimensions takes a Tensor or a Shape, not {type(tensor_or_shape).__name__}"
        )
    dims = tensor_or_shape.dims
    old, new = _as_dims(old_dim_or_dims), _as_dims(new_dim_or_dims)
    for i in range(len(dims) - len(old) + 1):
        if old and dims[i : i + len(old)] == old:
            return Shape(dims[:i] + new + dims[i + len(old) :])
    raise ValueError(
        f"replace_dimensions: {dims_text(old) or 'no dimensions'} do not stand side by side, in "
        f"this order, in {tensor_or_shape}. mtf.transpose brings them together"
    )


def anonymize(x: Tensor) -> Tensor:
    """Returns `x` with dimension names that no layout rule splits; gathers it if it is split.

    >>> x = mtf.ones(mesh, "batch:2,d:3")
    >>> print(mtf.anonymize(x).shape)
    Shape[_anonymous_0=2, _anonymous_1=3]
    """
    return reshape(x, anonymous_shape(x.shape))

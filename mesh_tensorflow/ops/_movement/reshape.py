"""Changing dimensions: reshape, transpose, rename, replace, anonymize."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union, overload

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text, slip
from mesh_tensorflow._core.interfaces import LaidOutLike
from mesh_tensorflow._core.operation import (
    Collective,
    Cost,
    Operation,
    PendingSums,
    gradient_of_output,
)
from mesh_tensorflow._core.shape import (
    Dimension,
    JointAxis,
    Shape,
    ShapeLike,
    anonymous_shape,
    check_names_differ,
    convert_to_dimension,
    convert_to_shape,
    list_product,
    single_axes,
)
from mesh_tensorflow._core.tensor import Tensor, check_tensors, with_stages
from mesh_tensorflow._mesh.mesh_impl import LazyAllreduceSum, MeshImpl
from mesh_tensorflow._mesh.slice_functions import constant
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


class _Move(NamedTuple):
    """One communication step of a reshape."""

    kind: str  # "allsplit", "reduce_scatter", "alltoall" or "allconcat": methods of MeshImpl
    mesh_axis: int
    tensor_axes: tuple[Any, ...]  # the axis to split, then the one to concatenate
    late: bool = False  # whether it follows the local reshape

    def made(self, mesh_impl: MeshImpl, value: LaidOutLike) -> LaidOutLike:
        """Applies this step to a laid-out value."""
        # A mesh implementation from elsewhere may not have all that the base class builds.
        step = getattr(mesh_impl, self.kind, None)
        step = step or functools.partial(getattr(MeshImpl, self.kind), mesh_impl)
        return step(value.to_laid_out_tensor(), self.mesh_axis, *self.tensor_axes)


class _Factored:
    """A shape with a dimension for each mesh axis that splits one.

    A dimension d=24 that the axes (rows=2, cols=3) split is [2, 12]: rows splits the first, and
    cols, within each half, the second. Other dimensions stay as they are.

    Attributes:
      sizes: the sizes of the whole.
      local: those of a slice.
      axes: for each mesh axis that splits one, the axis that it splits.
      products: for each axis, the product of the sizes before it.
    """

    def __init__(self, shape: Shape, mesh_impl: MeshImpl, whole: Collection[int]):
        """Creates it from a Shape.

        Args:
          shape: a Shape, which the mesh can split.
          mesh_impl: a MeshImpl.
          whole: JointAxes that count as one mesh axis.
        """
        mesh_impl.slice_shape(shape)  # checks that it can
        self.sizes: list[int] = []
        self.local: list[int] = []
        self.axes: dict[int, int] = {}
        for d, of_dim in zip(shape, mesh_impl.tensor_layout(shape)):
            joint = of_dim is not None and of_dim in whole
            axes: list[Any] = [of_dim] if joint else single_axes([of_dim])
            left = d.size
            for mesh_axis in axes[:-1]:
                self._append(mesh_impl.shape[mesh_axis].size, mesh_axis, mesh_impl)
                left //= mesh_impl.shape[mesh_axis].size
            self._append(left, axes[-1] if axes else None, mesh_impl)
        self.products = [list_product(self.sizes[:axis]) for axis in range(len(self.sizes))]

    def _append(self, size: int, mesh_axis: Optional[int], mesh_impl: MeshImpl) -> None:
        parts = 1
        if mesh_axis is not None:
            self.axes[mesh_axis] = len(self.sizes)
            parts = mesh_impl.shape[mesh_axis].size
        self.sizes.append(size)
        self.local.append(size // parts)

    def product_before(self, mesh_axis: int) -> Optional[int]:
        """Returns the product of the sizes before the axis that a mesh axis splits, or None."""
        return self.products[self.axes[mesh_axis]] if mesh_axis in self.axes else None


def _factored(
    old_shape: Shape, new_shape: Shape, mesh_impl: MeshImpl
) -> tuple[_Factored, _Factored]:
    """Returns the two shapes of a reshape with a dimension for each mesh axis.

    Axes that split a dimension together stay together, and take one collective, unless the other
    layout has some of them elsewhere.
    """
    layouts = [mesh_impl.tensor_layout(shape) for shape in (old_shape, new_shape)]
    whole = {
        axis
        for one, other in (layouts, layouts[::-1])
        for axis in one
        if isinstance(axis, JointAxis)
        and (axis in other or not {*axis.axes}.intersection(single_axes(other)))
    }
    return _Factored(old_shape, mesh_impl, whole), _Factored(new_shape, mesh_impl, whole)


def reshape_moves(old: _Factored, new: _Factored, mesh_impl: MeshImpl) -> list[_Move]:
    """Returns the communication steps of a reshape, along axes of the factored shapes.

    The product of the sizes before a split axis determines which part of the tensor each processor
    along the mesh axis has: if it is the same before and after, nothing moves.
    """
    splits, alltoalls, concats, late = [], [], [], []
    # Each mesh axis splits a different tensor axis, until others have been gathered.
    sizes = old.local
    taken = {*old.axes.values()}
    # Single axes in their order, and then those that stay together.
    for mesh_axis in sorted({*old.axes, *new.axes}):
        old_product, new_product = old.product_before(mesh_axis), new.product_before(mesh_axis)
        # The parts of a processor begin at the same elements before and after: nothing moves.
        if old_product == new_product:
            continue
        parts = mesh_impl.shape[mesh_axis].size
        begins = None
        if new_product is not None:
            # The old axis that begins where the new one does: parts of it are those of the new.
            # Dimensions of size 1 repeat a product, and what is wanted is the axis behind them.
            same = [axis for axis, product in enumerate(old.products) if product == new_product]
            begins = same[-1] if same else None
            # An axis that is split by another mesh axis, or that does not divide, can only be cut
            # after the local reshape.
            if begins is not None and (begins in taken or sizes[begins] % parts):
                begins = None
        if old_product is None:
            if begins is None:
                late.append(_Move("allsplit", mesh_axis, (new.axes[mesh_axis],), late=True))
            else:
                taken.add(begins)
                splits.append(_Move("allsplit", mesh_axis, (begins,)))
        elif new_product is None:
            concats.append(_Move("allconcat", mesh_axis, (old.axes[mesh_axis],)))
        elif begins is None:
            # No axis to exchange parts along: all is gathered, and cut after the reshape.
            concats.append(_Move("allconcat", mesh_axis, (old.axes[mesh_axis],)))
            late.append(_Move("allsplit", mesh_axis, (new.axes[mesh_axis],), late=True))
        else:
            taken.add(begins)
            alltoalls.append(_Move("alltoall", mesh_axis, (begins, old.axes[mesh_axis])))
    # Splits first, as they are free and make smaller what follows; gathers last, since they make it
    # larger.
    return splits + alltoalls + concats + late


def _resliced(mesh_impl: MeshImpl, value: Any, sizes: list[int]) -> Any:
    """Returns a laid-out value with the same elements in slices of other sizes."""
    if list(value.slice_shape) == sizes:
        return value
    # A reshape is linear, so a partial sum stays partial where nothing moves.
    return mesh_impl.slicewise_delay_allreduce(lambda t: tf.reshape(t, constant(sizes)), value)


def _only_splits(moves: Sequence[_Move]) -> bool:
    """Returns whether each processor keeps elements that it has: true also of no moves."""
    return all(move.kind == "allsplit" for move in moves)


def _scattering(moves: Sequence[_Move], sum_axes: Sequence[int]) -> list[_Move]:
    """Returns the moves of a partial sum, of which those along axes of the sum also sum it."""
    found = []
    for move in moves:
        axes = single_axes([move.mesh_axis])
        # Axes that split together do so one by one if some are of the sum and others are not: each
        # cuts the part that those before it have left.
        mixed = len({axis in sum_axes for axis in axes}) > 1
        for mesh_axis in axes if mixed else [move.mesh_axis]:
            # To keep a part of a sum, only that part of the summands has to be added up.
            summed = {*single_axes([mesh_axis])} <= {*sum_axes}
            kind = "reduce_scatter" if summed else move.kind
            found.append(move._replace(kind=kind, mesh_axis=mesh_axis))
    return found


def _left(moves: Sequence[_Move], sum_axes: Sequence[int]) -> tuple[int, ...]:
    """Returns the axes of a partial sum that moves do not sum over."""
    summed = single_axes(move.mesh_axis for move in moves if move.kind == "reduce_scatter")
    return tuple(axis for axis in sum_axes if axis not in summed)


def _check_order(what: str, x: Tensor, new_shape: Shape) -> None:
    """Reports a slip if a reshape changes the order of dimensions that it keeps.

    A reshape does not move elements, so their indices along these dimensions change.
    """
    # Dimensions of size 1 may stand anywhere: they change no element's place.
    kept = [d for d in x.shape if d.size > 1 and d in new_shape]
    if kept != [d for d in new_shape if d in kept]:
        slip(
            f"{what}: {x.name} {x.shape} becomes {new_shape}, which has {dims_text(kept)} in "
            "another order. A reshape leaves the elements as they lie, so that they get other "
            "places along these dimensions. mtf.transpose moves them; if mixing them is meant, "
            "give the dimensions other names",
            key=f"reshape/{x.shape}/{new_shape}",
        )


class ReshapeOperation(Operation):
    """The same elements in row-major order, under other dimensions."""

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

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Reshapes dy to the shape of the input."""
        # Not by `reshape`, which would report a slip of the user's a second time.
        return [ReshapeOperation(gradient_of_output(grad_ys), self.inputs[0].shape).outputs[0]]

    def _factored(self, mesh_impl: MeshImpl) -> tuple[_Factored, _Factored]:
        return _factored(self._inputs[0].shape, self._outputs[0].shape, mesh_impl)

    def _moves(self, mesh_impl: MeshImpl) -> list[_Move]:
        return reshape_moves(*self._factored(mesh_impl), mesh_impl)

    def lower(self, lowering: Lowering) -> None:
        """Gathers, exchanges or cuts as the two layouts ask, and reshapes each slice."""
        mesh_impl = lowering.mesh_impl(self)
        x, y = self.inputs[0], self.outputs[0]
        moves = self._moves(mesh_impl)
        value = lowering.tensors[x]
        pending = isinstance(value, LazyAllreduceSum) and not value.is_summed
        # A gather or an exchange of summands would move as much as one of sums, and be summed after
        # that.
        sums = value.mesh_axes if pending and moves and _only_splits(moves) else []
        if moves:
            lowering.count_collectives(self, "reshape_op", {x: tuple(sums)} if sums else None)
        if sums:
            moves = _scattering(moves, sums)
            value = value.laid_out_input
        elif moves and isinstance(value, LazyAllreduceSum):
            value = value.to_laid_out_tensor()
        value = self._moved(mesh_impl, moves, value)
        if sums:
            lowering.set_partial_sum(y, value, _left(moves, sums), "reshape_op")
        else:
            lowering.set_tensor_lowering(y, value)

    def _moved(self, mesh_impl: MeshImpl, moves: Sequence[_Move], value: LaidOutLike) -> Any:
        """Returns the laid-out output, of a laid-out input."""
        old, new = self._factored(mesh_impl)
        early = [move for move in moves if not move.late]
        late = [move for move in moves if move.late]
        if early:
            value = _resliced(mesh_impl, value, old.local)
        for move in early:
            value = move.made(mesh_impl, value)
        if late:
            sizes = new.local
            for move in late:
                # Not cut yet, slices still have the parts of all processors along this axis.
                sizes[move.tensor_axes[0]] *= mesh_impl.shape[move.mesh_axis].size
            value = _resliced(mesh_impl, value, sizes)
        for move in late:
            value = move.made(mesh_impl, value)
        return _resliced(mesh_impl, value, mesh_impl.slice_shape(self.outputs[0].shape))

    def _collectives(self, mesh_impl: MeshImpl) -> list[Collective]:
        x = self._inputs[0]
        elements = mesh_impl.laid_out_size(x.shape)
        found = []
        # In the order of the moves: each changes how much the next ones move.
        for move in self._moves(mesh_impl):
            parts = mesh_impl.shape[move.mesh_axis].size
            if move.kind == "allsplit":  # each processor keeps a part of its slice
                elements //= parts
                continue
            if move.kind == "allconcat":
                elements *= parts
            found.append(
                Collective(move.kind, (move.mesh_axis,), elements, elements * x.dtype.size)
            )
        return found

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Free where layouts agree; else the collectives between the two."""
        # As what renames a dimension: slices are the same, and have other names.
        if not self._moves(mesh_impl):
            return Cost()  # no element moves
        moved = super().cost(mesh_impl).bytes
        return Cost(0, moved, tuple(self._collectives(mesh_impl)))

    def cost_key(self) -> None:
        """Costs depend on the shapes alone."""
        return None

    def passes_on(self, split: Collection[str]) -> dict[Tensor, Tensor]:
        """The output is the input if the same dimensions are split."""
        x, y = self._inputs[0], self._outputs[0]
        kept = [[n for n in t.shape.dimension_names if n in split] for t in (x, y)]
        return {y: x} if kept[0] == kept[1] else {}

    def may_begin_sum(self, split: Collection[str]) -> bool:
        """No sum begins here."""
        return False

    def delays_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> bool:
        """Whether the input is pending, and no processor needs elements that others have."""
        return self._inputs[0] in pending and _only_splits(self._moves(mesh_impl))

    def pending_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> dict:
        """The output is pending as the input is, but over axes that split it; or the same sum."""
        moves, x = self._moves(mesh_impl), self._inputs[0]
        if x not in pending or not _only_splits(moves):
            return {}
        y = self._outputs[0]
        if not moves and mesh_impl.slice_shape(x.shape) == mesh_impl.slice_shape(y.shape):
            return {y: x}  # nothing is done: whichever of the two is summed first, both are
        left = _left(_scattering(moves, pending[x]), pending[x])
        return {y: left} if left else {}

    def scatters(
        self, mesh_impl: MeshImpl, pending: PendingSums
    ) -> dict[Tensor, Sequence[Collective]]:
        """A sum over an axis that splits the output is a reduce-scatter."""
        moves, x = self._moves(mesh_impl), self._inputs[0]
        if x not in pending or not _only_splits(moves):
            return {}
        elements = mesh_impl.laid_out_size(x.shape)
        found = []
        for move in _scattering(moves, pending[x]):
            if move.kind == "reduce_scatter":
                found.append(
                    Collective(move.kind, (move.mesh_axis,), elements, elements * x.dtype.size)
                )
            # What is cut off here is not summed by the steps that follow.
            elements //= mesh_impl.shape[move.mesh_axis].size
        return {x: found}


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
    asked = convert_to_shape(new_shape)
    new_shape = with_stages([x], asked)
    if new_shape.ndims != asked.ndims:
        # Stages that are kept come first, so they do in what is reshaped.
        kept = [d for d in new_shape if d not in asked]
        x = transpose(x, Shape([*kept, *(d for d in x.shape if d not in kept)]))
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

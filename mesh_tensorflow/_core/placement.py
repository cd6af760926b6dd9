"""Where an operation has its tensors: what moves, in which layout it works, and what is summed.

Three questions are answered here, for lowering as for predictions:

- *What moves* if a tensor of one layout, or shape, is to be in another: a list of Moves, each a
  collective or a cut. A reshape is nothing else.
- *In which layout* an operation is computed that cannot work on parts of a dimension which the
  layout splits, such as a concatenation along it: `inner_mesh_impl`. Its inputs move there, and its
  outputs back.
- *Where partial sums are summed*, without lowering. `Operation.cost` cannot tell, as who pays for
  an allreduce depends on the operations before and after: a `Walk` visits them in order and keeps
  which Tensors are still to be summed, as a Lowering does with LazyAllreduceSums; tests compare
  the two.

An example: x [batch=4, length=8, d=6] on the mesh "all:2" in the layout "length:all", and
`concat([x, x], "length")`. Slices [4, 4, 6] cannot be joined by themselves. Two layouts would do:

    whole      all gather x: [4, 8, 6]. Each processor concatenates all of it, and keeps its half.
    batch:all  an all-to-all gives each processor half of the batch, [2, 8, 6]. It concatenates
               that, [2, 16, 6], and a second all-to-all splits the result by length again.

The second moves as much as the first, and computes half as much: it is the cheaper one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.layout import TensorLayout, padded_dims, uneven_names
from mesh_tensorflow._core.operation import Collective, Cost, Operation, Tensor, allreduces
from mesh_tensorflow._core.shape import (
    JOIN,
    Dimension,
    JointAxis,
    Shape,
    list_product,
    single_axes,
)

if TYPE_CHECKING:
    from mesh_tensorflow._core.graph import Mesh
    from mesh_tensorflow._mesh.mesh_impl import MeshImpl


# -- what moves between two layouts


class Move(NamedTuple):
    """One communication step between two layouts."""

    kind: str  # "allsplit", "reduce_scatter", "alltoall" or "allconcat": methods of MeshImpl
    mesh_axis: int
    tensor_axes: tuple[Any, ...]  # the axis to split, then the one to concatenate
    late: bool = False  # whether it follows the local reshape


class Factored:
    """A shape with a dimension for each mesh axis that splits one.

    A dimension d=24 that the axes (rows=2, cols=3) split is [2, 12]: rows splits the first, and
    cols, within each half, the second. Other dimensions stay as they are.

    Attributes:
      sizes: the sizes of the whole.
      local: those of a slice.
      padded: the sizes of a slice, with padding, before the mesh axes are told apart.
      axes: for each mesh axis that splits one, the axis that it splits.
      products: for each axis, the product of the sizes before it.
    """

    def __init__(
        self,
        shape: Shape,
        mesh_impl: MeshImpl,
        whole: Collection[int],
        paddings: Sequence[int],
        other: Optional[TensorLayout] = None,
    ):
        """Creates it from a Shape.

        Args:
          shape: a Shape, which the mesh can split.
          mesh_impl: a MeshImpl.
          whole: JointAxes that count as one mesh axis.
          paddings: for each dimension, how much is added to it.
          other: another layout of the same shape, which may split parts further: these parts are
            dimensions, too.
        """
        mesh_impl.slice_shape(shape)  # checks that it can
        self.sizes: list[int] = []
        self.local: list[int] = []
        self.padded: list[int] = []
        self.axes: dict[int, int] = {}

        def single(of_dim: Optional[int]) -> list[int]:
            joint = of_dim is not None and of_dim in whole
            return [of_dim] if joint else single_axes([of_dim])  # type: ignore[list-item]

        layout = mesh_impl.tensor_layout(shape)
        for d, padding, of_dim, of_other in zip(shape, paddings, layout, other or layout):
            axes, finer = single(of_dim), single(of_other)
            if finer[: len(axes)] != axes:
                finer = axes
            split_by: list[Optional[int]] = [*axes, *[None] * (len(finer) - len(axes))]
            left = d.size + padding
            num_parts = 1 if of_dim is None else mesh_impl.shape[of_dim].size
            self.padded.append(left // num_parts)
            for mesh_axis, factor in zip(split_by[:-1], finer):
                self._append(mesh_impl.shape[factor].size, mesh_axis, mesh_impl)
                left //= mesh_impl.shape[factor].size
            self._append(left, split_by[-1] if split_by else None, mesh_impl)
        self.products = [list_product(self.sizes[:axis]) for axis in range(len(self.sizes))]

    def _append(self, size: int, mesh_axis: Optional[int], mesh_impl: MeshImpl) -> None:
        num_parts = 1
        if mesh_axis is not None:
            self.axes[mesh_axis] = len(self.sizes)
            num_parts = mesh_impl.shape[mesh_axis].size
        self.sizes.append(size)
        self.local.append(size // num_parts)

    @property
    def slice_size(self) -> int:
        """The number of elements of a slice."""
        return list_product(self.local)

    def product_before(self, mesh_axis: int) -> Optional[int]:
        """Returns the product of the sizes before the axis that a mesh axis splits, or None."""
        return self.products[self.axes[mesh_axis]] if mesh_axis in self.axes else None


def counterparts(old_shape: Shape, new_shape: Shape) -> list[tuple[int, int]]:
    """Returns the axes of two shapes of the same elements along which an element has one place.

    An example: of [batch=10, d=6] and [batch=10, one=1, head=2, e=3], the axes (0, 0).

    Args:
      old_shape: a Shape.
      new_shape: a Shape of the same size.
    """
    pairs: list[tuple[int, int]] = []
    # An element's place is its number, by the size of what is behind, modulo the dimension's.
    old = zip(old_shape.cumprod, old_shape.to_integer_list)
    new = list(zip(new_shape.cumprod, new_shape.to_integer_list))
    first = 0
    for i, place in enumerate(old):
        if place in new[first:]:
            j = new.index(place, first)
            pairs.append((i, j))
            first = j + 1
    return pairs


def factored(
    old_shape: Shape, old_impl: MeshImpl, new_shape: Shape, new_impl: MeshImpl
) -> tuple[Factored, Factored]:
    """Returns two shapes of the same elements with a dimension for each mesh axis.

    Axes that split a dimension together stay together, and take one collective, unless the other
    layout has some of them elsewhere. A dimension that one of the layouts pads is padded in both.

    Args:
      old_shape: a Shape.
      old_impl: a MeshImpl, whose layout its slices have.
      new_shape: a Shape.
      new_impl: a MeshImpl of the same mesh, with the layout that slices are to have.

    Raises:
      ValueError: a dimension cannot be split in a layout, or is padded differently in the two.
    """
    layouts = [old_impl.tensor_layout(old_shape), new_impl.tensor_layout(new_shape)]
    whole = {
        axis
        for one, other in (layouts, layouts[::-1])
        for axis in one
        if isinstance(axis, JointAxis)
        and (axis in other or not {*axis.axes}.intersection(single_axes(other)))
    }
    paddings = [0] * len(old_shape), [0] * len(new_shape)
    may_pad = uneven_names(old_impl) | uneven_names(new_impl)
    for i, j in counterparts(old_shape, new_shape) if may_pad else ():
        d, e = old_shape[i], new_shape[j]
        padding = max(old_impl.padding(d), new_impl.padding(e))
        axes = {old_impl.splitting_axis(d), new_impl.splitting_axis(e)}
        if padding and len(axes - {None}) > 1:
            raise ValueError(f"{dims_text([d])} is padded otherwise than {dims_text([e])}")
        paddings[0][i] = paddings[1][j] = padding
    # Of the same sizes, whatever their names, parts that only one layout splits are dimensions in
    # both: parts of experts for parts of a batch over rows+cols are exchanged, and not gathered.
    same = old_shape.to_integer_list == new_shape.to_integer_list
    others: list[Any] = layouts[::-1] if same else [None, None]
    return (
        Factored(old_shape, old_impl, whole, paddings[0], others[0]),
        Factored(new_shape, new_impl, whole, paddings[1], others[1]),
    )


def moves_between(old: Factored, new: Factored, mesh_shape: Shape) -> list[Move]:
    """Returns the communication steps from one factored shape to another, along their axes.

    The product of the sizes before a split axis determines which part of the tensor each processor
    along the mesh axis has: if it is the same before and after, nothing moves.
    """
    splits, alltoalls, concats, late = [], [], [], []
    # Each mesh axis splits a different tensor axis, until others have been gathered.
    sizes = old.local
    used = {*old.axes.values()}
    # Single axes in their order, and then those that stay together.
    for mesh_axis in sorted({*old.axes, *new.axes}):
        old_product, new_product = old.product_before(mesh_axis), new.product_before(mesh_axis)
        # The parts of a processor begin at the same elements before and after: nothing moves.
        if old_product == new_product:
            continue
        num_parts = mesh_shape[mesh_axis].size
        begins = None
        if new_product is not None:
            # The old axis that begins where the new one does: parts of it are those of the new.
            # Dimensions of size 1 repeat a product, and what is wanted is the axis behind them.
            same = [axis for axis, product in enumerate(old.products) if product == new_product]
            begins = same[-1] if same else None
            # An axis that is split by another mesh axis, or that does not divide, can only be cut
            # after the local reshape.
            if begins is not None and (begins in used or sizes[begins] % num_parts):
                begins = None
        if old_product is None:
            if begins is None:
                late.append(Move("allsplit", mesh_axis, (new.axes[mesh_axis],), late=True))
            else:
                used.add(begins)
                splits.append(Move("allsplit", mesh_axis, (begins,)))
        elif new_product is None:
            concats.append(Move("allconcat", mesh_axis, (old.axes[mesh_axis],)))
        elif begins is None:
            # No axis to exchange parts along: all is gathered, and cut after the reshape.
            concats.append(Move("allconcat", mesh_axis, (old.axes[mesh_axis],)))
            late.append(Move("allsplit", mesh_axis, (new.axes[mesh_axis],), late=True))
        else:
            used.add(begins)
            alltoalls.append(Move("alltoall", mesh_axis, (begins, old.axes[mesh_axis])))
    # Splits first, as they are free and make smaller what follows; gathers last, since they make it
    # larger.
    return splits + alltoalls + concats + late


def collectives_of(
    moves: Sequence[Move], elements: int, itemsize: int, mesh_shape: Shape
) -> list[Collective]:
    """Returns the collectives of moves.

    Args:
      moves: Moves.
      elements: the number of elements of all slices, before they move.
      itemsize: the size of an element in bytes.
      mesh_shape: the Shape of the mesh.
    """
    collectives = []
    # In the order of the moves: each changes how much the next ones move.
    for move in moves:
        num_parts = mesh_shape[move.mesh_axis].size
        if move.kind == "allsplit":  # each processor keeps a part of its slice
            elements //= num_parts
            continue
        if move.kind == "allconcat":
            elements *= num_parts
        collectives.append(Collective(move.kind, (move.mesh_axis,), elements, elements * itemsize))
    return collectives


# -- the layout that an operation works in


def inner_mesh_impl(
    op: Operation, mesh_impl: MeshImpl, mesh: Optional[Mesh] = None
) -> Optional[MeshImpl]:
    """Returns the mesh implementation, in another layout, that an operation is computed on.

    It splits none of the dimensions that the operation needs whole. Instead, it may split others,
    for which less is moved and computed.

    Args:
      op: an Operation.
      mesh_impl: a MeshImpl, the requested one.
      mesh: the Mesh of these of its tensors, if they are on several; its own if None.

    Returns:
      A MeshImpl of the same mesh; None if the operation can work in the layout of `mesh_impl`.

    Raises:
      ValueError: the mesh implementation is of a class that has one layout only.
    """
    if not uneven_names(mesh_impl) and not op.needs_whole(mesh_impl):
        return None
    mesh = mesh or op.mesh
    tensors = op.inputs + op.outputs
    dims = dict.fromkeys(d for t in tensors if t.mesh is mesh for d in t.shape)
    needed = _whole(op, mesh_impl, dims)
    split = {d: mesh_impl.splitting_axis(d) for d in dims if d.name in needed}
    axes = list(dict.fromkeys(axis for axis in split.values() if axis is not None))
    if not axes:
        return None
    if not hasattr(mesh_impl, "with_layout"):
        d = next(d for d, axis in split.items() if axis == axes[0])
        raise ValueError(_one_layout_only(op, mesh_impl, d, mesh_impl.shape[axes[0]]))
    names = {d.name for d in split}
    pairs = [(d, m) for d, m in mesh_impl.layout_rules.pairs if d not in names]
    best = mesh_impl.with_layout(mesh_impl.layout_rules.of_pairs(pairs))
    if any(t.mesh is not mesh for t in tensors):
        return best  # what is split on one mesh alone would not fit what it has on the others
    least = _price(op, mesh_impl, best)
    # One after another, each to where it costs least, given where those before it are now: all
    # combinations would be more than are worth trying.
    for axis in axes:
        for candidate in _split_further(best, axis, dims, op.splittable_dims):
            whole = _whole(op, candidate, dims)  # parts may be too small for it
            if any(d.name in whole and candidate.splitting_axis(d) is not None for d in dims):
                continue
            price = _price(op, mesh_impl, candidate)
            if price is not None and (least is None or price < least):
                best, least = candidate, price
    return best


def _whole(op: Operation, mesh_impl: MeshImpl, dims: Iterable[Dimension]) -> set[str]:
    """Returns the names of dimensions that an operation needs whole, or without padding."""
    whole = set(op.needs_whole(mesh_impl))
    if not op.is_given_padding():
        whole.update(d.name for d in padded_dims(mesh_impl, dims))
    return whole


def _split_further(
    mesh_impl: MeshImpl, axis: int, dims: Iterable[Dimension], splittable: Collection[str]
) -> Iterator[MeshImpl]:
    """Yields mesh implementations in layouts that split another dimension over an axis, too."""
    free = mesh_impl.shape[axis].name
    for d in dims:
        if d.name in splittable:
            own = mesh_impl.splitting_axis(d)
            # What is split over another axis is split further, by the inner one.
            joined = free if own is None else JOIN.join([mesh_impl.shape[own].name, free])
            rules = mesh_impl.layout_rules
            others = [rule for rule in rules.pairs if rule[0] != d.name]
            with contextlib.suppress(ValueError):  # an axis joined with itself
                yield mesh_impl.with_layout(rules.of_pairs([*others, (d.name, joined)]))


def _one_layout_only(op: Operation, mesh_impl: MeshImpl, d: Dimension, mesh_dim: Dimension) -> str:
    return (
        f"dimension {dims_text([d])} of {op.name} is split over mesh dimension "
        f"{dims_text([mesh_dim])}, but {type(op).__name__} cannot work on parts of it, and "
        f"{type(mesh_impl).__name__} has no with_layout, by which its inputs would be gathered. "
        f"Derive it from mtf.MeshImpl, drop the layout rule {d.name}:{mesh_dim.name}, or rename "
        f'the dimension before this operation with mtf.rename_dimension(x, "{d.name}", '
        f'"{d.name}_unsplit")'
    )


def _price(op: Operation, outer: MeshImpl, inner: MeshImpl) -> Optional[int]:
    """Returns a number that is lower the less is moved and computed; None if it does not fit."""
    try:
        cost = _moved_cost(op, outer, inner)
    except ValueError:  # two dimensions of a tensor over one axis, or sizes that do not divide
        return None
    # A flop counts as a byte. Layouts to choose from differ by the number of processors, so that no
    # finer scale is needed, and the choice does not depend on the machine.
    return cost.flops + cost.bytes + sum(c.bytes for c in cost.collectives)


def moving(x: Tensor, old: MeshImpl, new: MeshImpl) -> tuple[list[Move], Factored, Factored]:
    """Returns the moves of a Tensor from one layout to another, and its factored shapes.

    Args:
      x: a Tensor.
      old: a MeshImpl with the layout that it has.
      new: a MeshImpl with the layout that it is to have.
    """
    before, after = factored(x.shape, old, x.shape, new)
    return moves_between(before, after, old.shape), before, after


def _moved(x: Tensor, old: MeshImpl, new: MeshImpl) -> list[Collective]:
    moves, before, _ = moving(x, old, new)
    return collectives_of(moves, before.slice_size * old.size, x.dtype.size, old.shape)


def _moved_cost(op: Operation, outer: MeshImpl, inner: MeshImpl) -> Cost:
    """Returns the cost of an operation in an inner layout, with its moves there and back."""
    to_inner = [_moved(x, outer, inner) for x in dict.fromkeys(op.inputs) if x.mesh is op.mesh]
    back = [_moved(y, inner, outer) for y in op.outputs if y.mesh is op.mesh]
    cost = op.cost(inner)
    sums = [
        # A sum that begins in the inner layout is summed there, and then moves.
        allreduces(inner, y.shape, y.dtype, partial.axes)
        for y, partial in (op.sums_as_lowered(inner, {}) or {}).items()
    ]
    collectives = itertools.chain(*to_inner, cost.collectives, *sums, *back)
    return Cost(cost.flops, cost.bytes, tuple(collectives))


def cost_of(op: Operation, mesh_impl: MeshImpl) -> Cost:
    """Returns the cost of an operation, with what has to move if it works in another layout.

    Args:
      op: an Operation.
      mesh_impl: a MeshImpl, the requested one.
    """
    inner = inner_mesh_impl(op, mesh_impl)
    return op.cost(mesh_impl) if inner is None else _moved_cost(op, mesh_impl, inner)


# -- partial sums, and costs of many operations


@dataclasses.dataclass(eq=False)
class _Pending:
    """A partial sum; several Tensors may be the same one."""

    axes: tuple[int, ...]
    summed: bool = False


class Walk:
    """The state of a walk over operations: their costs and partial sums so far.

    Attributes:
      costs: pairs (operation, its Cost).
      asked: pairs (Tensor, a Collective of its sum).
    """

    def __init__(self, mesh_impl: MeshImpl):
        self._mesh_impl = mesh_impl
        self._pending: dict[Tensor, _Pending] = {}
        self.costs: list[tuple[Operation, Cost]] = []
        self.asked: list[tuple[Tensor, Collective]] = []

    def pending_axes(self, x: Tensor) -> tuple[int, ...]:
        """Returns the mesh axes that a Tensor still has to be summed over."""
        p = self._pending.get(x)
        return () if p is None or p.summed else p.axes

    def need(self, x: Tensor) -> list[Collective]:
        """Records that the value of a Tensor is needed; returns the allreduce that computes it."""
        axes = self.pending_axes(x)
        if not axes:
            return []
        # A LazyAllreduceSum keeps its sum: only the first use of any of its Tensors pays.
        self._pending[x].summed = True
        return self._ask(x, allreduces(self._mesh_impl, x.shape, x.dtype, axes))

    def _ask(self, x: Tensor, collectives: Sequence[Collective]) -> list[Collective]:
        self.asked += [(x, collective) for collective in collectives]
        return list(collectives)

    def sum_inputs(self, op: Operation) -> list[Collective]:
        """Visits one operation; returns the collectives that sum its inputs where it needs that."""
        if inner_mesh_impl(op, self._mesh_impl) is not None:
            # What moves to another layout is summed before, and what begins there is summed there.
            return [c for x in op.inputs for c in self.need(x)]
        pending = {x: self.pending_axes(x) for x in op.inputs if self.pending_axes(x)}
        collectives: list[Collective] = []
        partials = op.sums_as_lowered(self._mesh_impl, pending)
        # All inputs or none: an addition can put off two sums over the same axes, but not one of
        # them.
        if partials is None:
            for x in op.inputs:
                collectives += self.need(x)
            partials = op.sums_as_lowered(self._mesh_impl, {}) or {}
        for y, partial in partials.items():
            # What is scattered is summed and split. It stays pending: each processor got its part
            # of the sum, and a later use that needs all of it pays for that.
            collectives += self._ask(next(iter(pending), y), partial.scattered)
            # The same object for a Tensor that is the same sum, so that the first use of either is
            # charged.
            same = partial.same_as
            self._pending[y] = self._pending[same] if same is not None else _Pending(partial.axes)
        return collectives

    def summed_over(self, x: Tensor, axes: Iterable[int]) -> None:
        """Records that a partial sum has been summed over some axes, such as by a scatter."""
        # A new object: other Tensors that were the same sum are still to be summed over all axes.
        left = tuple(axis for axis in self.pending_axes(x) if axis not in set(axes))
        self._pending[x] = _Pending(left, summed=not left)

    def same(self, y: Tensor, x: Tensor) -> None:
        """Records that `y` is the same partial sum as `x`, if that is one."""
        if x in self._pending:
            self._pending[y] = self._pending[x]

    def step(self, op: Operation) -> Cost:
        """Visits one operation; returns its cost, with the allreduces of inputs that it needs."""
        cost = cost_of(op, self._mesh_impl) + Cost(collectives=tuple(self.sum_inputs(op)))
        self.costs.append((op, cost))
        return cost


def sums_of(operations: Iterable[Operation], mesh_impl: MeshImpl) -> Walk:
    """Visits operations in order, without their costs; returns the Walk.

    Args:
      operations: operations.
      mesh_impl: a MeshImpl, the requested one: an executed one may move nothing.
    """
    state = Walk(mesh_impl)
    for op in operations:
        state.sum_inputs(op)
    return state


def walk(
    operations: Iterable[Operation], mesh_impl: MeshImpl, needed: Sequence[Tensor] = ()
) -> Walk:
    """Visits operations in order.

    Args:
      operations: operations.
      mesh_impl: a MeshImpl.
      needed: Tensors whose values are needed after the last operation.

    Returns:
      The Walk; its `costs` has a pair for each operation that is lowered. The last one includes the
      allreduces for `needed`.
    """
    operations, state = list(operations), Walk(mesh_impl)
    read = {*needed}.union(*(op.inputs for op in operations))
    for op in operations:
        # What is lowered on demand costs nothing as long as nobody asks for it.
        if not op.is_on_demand or not read.isdisjoint(op.outputs):
            state.step(op)
    # No operation needs these sums, so the last one pays for them.
    collectives = tuple(c for x in needed for c in state.need(x))
    if collectives and state.costs:
        op, cost = state.costs[-1]
        state.costs[-1] = (op, cost + Cost(collectives=collectives))
    return state

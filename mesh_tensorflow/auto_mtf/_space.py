"""The space of layouts: which are legal, their assignments to sets of dimensions, stored variables.

A layout says over which mesh dimension a dimension is split, a stored layout over which one a
variable is stored in parts, and which operations update it so.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Optional, TypeVar, Union

import numpy as np

from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.layout import (
    WEIGHTS_TOO,
    LayoutRules,
    StoredLayout,
    StoredName,
    joined_names,
    stored_layout,
)
from mesh_tensorflow._core.operation import Operation, Tensor, with_inner_operations
from mesh_tensorflow._core.shape import JOIN, Dimension, Shape
from mesh_tensorflow._lowering.rewrites import stored_names
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.auto_mtf.valid_layouts import LayoutValidator, MeshSizes
from mesh_tensorflow.layers._blocked_operation import Blocked
from mesh_tensorflow.ops._control.gradients import CustomGradientOperation, DelayOperation
from mesh_tensorflow.ops._control.while_loop import (
    WhileGradientOperation,
    WhileLoopOperation,
    is_of_microbatches,
)
from mesh_tensorflow.ops._movement.reshape import ReshapeOperation
from mesh_tensorflow.ops._variable import Assign, Variable
from mesh_tensorflow.signal._fft import FourierOperation

WHOLE = -1  # in place of a mesh axis


def maximal_sets(sets: Iterable[Iterable[str]]) -> list[tuple[str, ...]]:
    """Returns the sets that are not subsets of another one, sorted."""
    # Largest first: a set that contains another one is met before it.
    maximal: list[frozenset[str]] = []
    for one in sorted({frozenset(s) for s in sets}, key=lambda s: (-len(s), sorted(s))):
        if not any(one <= other for other in maximal):
            maximal.append(one)
    return sorted(tuple(sorted(s)) for s in maximal)


def _joined(groups: Iterable[Iterable[str]]) -> list[frozenset[str]]:
    """Returns groups, with those that have a name in common joined."""
    joined: list[frozenset[str]] = []
    for group in map(frozenset, groups):
        # Groups found so far have no name in common, and stay so: what meets a new one becomes part
        # of it.
        apart = [other for other in joined if not other & group]
        joined = [*apart, group.union(*(other for other in joined if other & group))]
    return joined


class LayoutSpace:
    """All layouts in which no two dimensions of one operation share a mesh dimension.

    Attributes:
      dims: sorted names of the dimensions that may be split.
      mesh_sizes: a dictionary from mesh dimension names to sizes.
      pairs: the pairs (dimension name, mesh dimension name) that may be in a layout, sorted.
      alike: sets of names of dimensions, of which a layout splits all over one mesh dimension, or
        none. All of a set are dimensions of one operation, so the assignments of its dimensions
        say so.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[str, str]],
        mesh_sizes: Mapping[str, int],
        operation_sets: Iterable[Iterable[str]],
        alike: Iterable[Iterable[str]] = (),
    ):
        """Creates a LayoutSpace.

        Args:
          pairs: the pairs (dimension name, mesh dimension name) that may be in a layout.
          mesh_sizes: a dictionary from mesh dimension names to sizes.
          operation_sets: for each operation, the names of its dimensions.
          alike: names of dimensions that are split over the same mesh dimension or not at all.
        """
        sets = {frozenset(s) for s in operation_sets}
        legal, groups = set(pairs), _joined(alike)
        # A group that meets itself in an operation cannot be split.
        apart = {name for group in groups for s in sets if len(s & group) > 1 for name in group}
        # A dimension of a group is split over a mesh dimension only if all of the group can be.
        self.pairs = sorted(
            (d, m)
            for d, m in legal
            if d not in apart and all((o, m) in legal for g in groups if d in g for o in g)
        )
        splittable = {d for d, _ in self.pairs}
        self.alike = [group for group in groups if group <= splittable]
        self._group = {d: group for group in self.alike for d in group}
        self.mesh_sizes = MeshSizes(mesh_sizes)
        self.dims = sorted({d for d, _ in self.pairs})
        # Joined ones last, so that the others have the numbers of their axes.
        self.mesh_dims = [*mesh_sizes, *sorted({m for _, m in self.pairs} - mesh_sizes.keys())]
        self.base = len(self.mesh_dims) + 1  # of codes
        self._axes: dict[str, list[int]] = {d: [WHOLE] for d in self.dims}
        for d, m in self.pairs:
            self._axes[d].append(self.mesh_dims.index(m))
        self._sharing = [
            {i for i, other in enumerate(self.mesh_dims) if self.share(m, other)}
            for m in self.mesh_dims
        ]
        self._meets: dict[str, set[str]] = {d: set() for d in self.dims}
        self.operation_sets = maximal_sets(s & splittable for s in sets)
        for names in self.operation_sets:
            for d in names:
                self._meets[d].update(names)
        # A cache of the instance: that of a decorated method would keep all spaces alive.
        self.assignments = functools.cache(self._assignments)

    def _rows(self, dims: Sequence[str]) -> Iterator[tuple[int, ...]]:
        if not dims:
            yield ()
            return
        *before, last = dims
        # Illegal beginnings are not gone on with: of all (axes + 1) ** dims assignments, most are
        # illegal.
        for row in self._rows(before):
            split = {axis for d, axis in zip(before, row) if d in self._meets[last]} - {WHOLE}
            shared: set[int] = set().union(*(self._sharing[axis] for axis in split))
            alike = {axis for d, axis in zip(before, row) if d in self.together(last)}
            for axis in self._axes[last]:
                # Those of a group that came before, if there are any, have this axis.
                if axis not in shared and alike <= {axis}:
                    yield (*row, axis)

    def count(self, dims: Sequence[str], most: int) -> int:
        """Returns the number of legal assignments of some dimensions, counting up to `most`.

        Args:
          dims: names of dimensions.
          most: an int.
        """
        # There may be too many to list, and `zip` stops at `most`.
        return sum(1 for _, _ in zip(range(most), self._rows(dims)))

    def _assignments(self, dims: tuple[str, ...]) -> np.ndarray:
        """Returns the legal assignments of some dimensions, [assignments, dims] of mesh axes."""
        rows = list(self._rows(dims))
        return np.array(rows, np.int64).reshape(len(rows), len(dims))

    def layout(self, dims: Sequence[str], row: Iterable[int]) -> dict[str, str]:
        """Returns a row of assignments as a dictionary to mesh dimension names."""
        return {d: self.mesh_dims[axis] for d, axis in zip(dims, row) if axis != WHOLE}

    def share(self, a: str, b: str) -> bool:
        """Returns whether two names of mesh dimensions, or names joined by "+", have one in common.

        What they split cannot be in one tensor.
        """
        return a == b or not {*joined_names(a, self.mesh_sizes)}.isdisjoint(
            joined_names(b, self.mesh_sizes)
        )

    def meet(self, a: str, b: str) -> bool:
        """Returns whether two dimensions occur in one operation."""
        return b in self._meets[a]

    def together(self, d: str) -> frozenset[str]:
        """Returns the names of the dimensions that are split as one is, with its own."""
        return self._group.get(d, frozenset([d]))

    def is_legal(self, layout: Mapping[str, str]) -> bool:
        """Returns whether a layout is legal."""
        pairs = set(layout.items())
        if any(len({layout.get(d) for d in group}) > 1 for group in self.alike):
            return False
        return pairs <= set(self.pairs) and not any(
            self.share(layout[a], layout[b])
            for a in layout
            for b in self._meets[a] & layout.keys()
            if a != b
        )

    def parts(self, dims: Sequence[str], rows: np.ndarray) -> np.ndarray:
        """Returns, for each assignment, the number of parts of a tensor with all dimensions."""
        # The last one is that of WHOLE.
        sizes = np.array([*(self.mesh_sizes[m] for m in self.mesh_dims), 1], np.int64)
        return sizes[rows].prod(axis=1) if dims else np.ones(len(rows), np.int64)

    def codes(self, dims: Sequence[str], inner: Sequence[str], rows: np.ndarray) -> np.ndarray:
        """Returns a code for each assignment of `dims`, equal for equal assignments of `inner`.

        Args:
          dims: names of dimensions.
          inner: some of them.
          rows: assignments of `dims`.
        """
        columns = [list(dims).index(d) for d in inner]
        # A row as a number whose digits are axis + 1, since WHOLE is -1.
        return (rows[:, columns] + 1) @ (self.base ** np.arange(len(inner), dtype=np.int64))


# -- the legal layouts of a program

_SEPARATORS = re.compile(r"[;,\s]+")
# Names that functions give to dimensions within: `cumsum` and `dynamic_shift` those of the classic.
_INTERNAL = re.compile(r"_.*|tmp_dim_cumsum|dynamic_shift_tmp")


class PartBoundary(ReshapeOperation):
    """A rename between parts of a program, on whose sides one mesh dimension may split names."""


# Operations that process each of their tensors independently, or move from one layout to another.
_TENSORS_APART = (
    Assign,
    CustomGradientOperation,
    DelayOperation,
    FourierOperation,
    PartBoundary,
    WhileLoopOperation,
    WhileGradientOperation,
)


# With exchanges, also what changes dimensions, or passes parts of a memory around.
_EXCHANGES = (*_TENSORS_APART, Blocked, ReshapeOperation)


def layout_space(
    operations: Iterable[Operation],
    validator: LayoutValidator,
    exchanges: bool = False,
    joint: bool = False,
    also: Iterable[tuple[str, str]] = (),
    over: Optional[Collection[str]] = None,
) -> LayoutSpace:
    """Returns the legal layouts of a program, without those that a search does not try.

    These are the ones that ring attention refuses, and those that split what operations need whole,
    what the mesh does not divide, or what has its name only within a function: a rule for
    "tmp_dim_cumsum" says nothing to the user whose program takes a cumulative sum. Variables show
    all of their names.

    Args:
      operations: the Operations of the program.
      validator: the LayoutValidator of the program.
      exchanges: whether one mesh dimension may split a dimension before a reshape and another one
        after it, and both the rows and the memory of attention by blocks.
      joint: whether several mesh dimensions may split one dimension together, in the order that
        they have in the mesh.
      also: further pairs (dimension name, mesh dimension name) that are among them.
      over: names of the mesh dimensions that split something; all if None.
    """
    apart = _EXCHANGES if exchanges else _TENSORS_APART
    every = list(with_inner_operations(operations))
    rings = [op for op in every if isinstance(op, Blocked) and op.ring_dims]
    alike = {frozenset(d.name for d in op.ring_dims) for op in rings}
    # A tensor that has a name twice cannot be split along it.
    repeated = {
        name
        for op in every
        for t in op.outputs
        for name in t.shape.dimension_names
        if t.shape.dimension_names.count(name) > 1
    }
    shown = {d for op in every if isinstance(op, Variable) for d in op.shape.dimension_names}
    candidates = {
        d
        for d in validator.splittable_mtf_dimension_names - repeated
        if d in shown or not _INTERNAL.fullmatch(d)
    }
    sizes = validator.mesh_dimension_name_to_size
    among = sizes if over is None else {name: sizes[name] for name in sizes if name in over}
    names = [*among, *(joint_names(among) if joint else ())]
    pairs = [
        (d, m)
        for d in candidates
        for m in names
        if validator.is_valid_assignment(d, m) and all(_has_parts(op, d, sizes[m]) for op in rings)
    ]
    # Loops' bodies are among these: their operations have the layout of all others.
    sets = {names for op in every for names in _together(op, apart, alike)}
    return LayoutSpace({*pairs, *also}, sizes, sets, alike)


def joint_names(mesh_sizes: Mapping[str, int]) -> Iterator[str]:
    """Yields the names, joined by "+", of all sets of mesh dimensions that have two or more."""
    # One processor splits nothing, whatever it is joined with.
    names = [name for name, size in mesh_sizes.items() if size > 1]
    for count in range(2, len(names) + 1):
        yield from map(JOIN.join, itertools.combinations(names, count))


def _has_parts(op: Blocked, name: str, processors: int) -> bool:
    """Returns whether processors of a ring can cut a dimension as they have to, if it is one's."""
    num_blocks = op.parts_in_ring * processors
    return all(d.size % num_blocks == 0 for d in op.ring_dims if d.name == name)


def _together(
    op: Operation, apart: tuple[type, ...], alike: Iterable[Set[str]]
) -> list[frozenset[str]]:
    """Returns sets of dimension names, no two of which may be split over one mesh dimension.

    Args:
      op: an Operation.
      apart: classes of those that process each of their tensors independently.
      alike: sets of names that layouts split alike, as what exchanges dimensions allows.
    """
    tensors = [frozenset(t.shape.dimension_names) for t in [*op.inputs, *op.outputs]]
    if isinstance(op, apart):
        return tensors
    sets = [frozenset().union(*tensors)]
    if isinstance(op, _EXCHANGES):
        for group in alike:
            # Names of a group may share a mesh dimension, so each set has only one of them at a
            # time.
            sets = [s - group | kept for s in sets for kept in _one_of(s & group)]
        # What exchanges dimensions may split two of them alike, but not two of one tensor.
        sets += tensors
    return sets


def _one_of(names: Set[str]) -> list[Set[str]]:
    return [{name} for name in names] or [names]


def layout_pairs(layout: Union[str, LayoutRules, Mapping[str, str]]) -> list[tuple[str, str]]:
    """Returns the pairs (dimension name, mesh dimension name) of a layout.

    Args:
      layout: a string such as "batch:rows;d_ff:cols", LayoutRules, or a dictionary.

    Raises:
      ValueError: a string is malformed.
    """
    if isinstance(layout, LayoutRules):
        return layout.written
    if isinstance(layout, Mapping):
        return sorted(layout.items())
    pairs = []
    for piece in filter(None, _SEPARATORS.split(layout)):
        d, colon, m = piece.partition(":")
        if not (d and m and colon) or ":" in m:
            raise ValueError(
                f"malformed layout {layout!r}: {piece!r} is not a pair left:right. Write "
                'it as "batch:rows;d_ff:cols"'
            )
        pairs.append((d, m))
    return pairs


def layout_text(layout: Mapping[str, str]) -> str:
    """Returns a layout as a string such as "batch:rows;d_ff:cols", in order of names.

    Args:
      layout: a dictionary from dimension names to mesh dimension names.
    """
    return ";".join(f"{d}:{m}" for d, m in sorted(layout.items()))


def stored_layouts(
    mesh_shape: Shape, zero: Iterable[int], joint: bool = False
) -> list[Optional[StoredLayout]]:
    """Returns how variables may be stored: at each stage, over each mesh dimension.

    Args:
      mesh_shape: a Shape.
      zero: stages of ZeRO.
      joint: whether also over several mesh dimensions together.

    Raises:
      ValueError: a stage is unknown.
    """
    layouts: list[Optional[StoredLayout]] = []
    for stage in zero:
        if stage == 0:
            layouts.append(None)
            continue
        # Dimensions of one processor store nothing in parts; a mesh of nothing else still gets each
        # stage.
        names = [d.name for d in mesh_shape if d.size > 1] or mesh_shape.dimension_names[:1]
        names += joint_names({d.name: d.size for d in mesh_shape}) if joint else ()
        layouts += [stored_layout(mesh_shape, zero=stage, zero_axis=name) for name in names]
    return layouts


class Storing:
    """A stored layout on a mesh.

    Attributes:
      mesh_sizes: the sizes of the mesh dimensions, by name.
      layout: a StoredLayout, or None.
      weights_too: whether weights are stored in parts, besides what optimizers keep.
      early: whether each gradient is split before the next one is computed; None without a layout.
    """

    def __init__(self, mesh_shape: Shape, layout: Optional[StoredLayout]):
        """Creates a Storing.

        Args:
          mesh_shape: a Shape.
          layout: a StoredLayout, or None.
        """
        self._mesh_shape, self.layout = mesh_shape, layout
        self.mesh_sizes = MeshSizes({d.name: d.size for d in mesh_shape})
        self.weights_too = layout is not None and layout.stage >= WEIGHTS_TOO
        self.early = None if layout is None else layout.is_early
        self._known: dict[tuple, dict[str, str]] = {}

    def rules(self, weight: Weight, layout: Mapping[str, str]) -> dict[str, str]:
        """Returns the mesh dimensions that split dimensions of a weight where it is stored.

        Args:
          weight: the dimensions of a weight.
          layout: a dictionary from dimension names to mesh dimension names.
        """
        if self.layout is None:
            return {}
        own = {d.name: layout[d.name] for d in weight if d.name in layout}
        # Asked once for each assignment of a table; only what splits the weight itself makes a
        # difference.
        key = (weight, tuple(sorted(own.items())))
        if key not in self._known:
            impl: MeshImpl = MeshImpl(self._mesh_shape, LayoutRules(own.items()))
            names = self.layout.names(Shape(weight), impl)
            self._known[key] = {d: name.mesh_dim for d, name in names.items()}
        return self._known[key]

    def parts(self, weight: Weight, dims: Iterable[str], layout: Mapping[str, str]) -> int:
        """Returns how often a tensor of an update is split, beyond what the layout splits.

        Args:
          weight: the dimensions of the weight.
          dims: names of the tensor's dimensions.
          layout: a dictionary from dimension names to mesh dimension names.
        """
        rules = self.rules(weight, layout)
        return math.prod(self.mesh_sizes[rules[d]] for d in set(dims) & rules.keys())


# -- updates

Weight = tuple[Dimension, ...]  # what tells weights apart is how they may be split
_DATA, _STORE = "data", "store"
_Named = TypeVar("_Named")


@dataclasses.dataclass(frozen=True)
class Updates:
    """The updates of a program, which stored layouts compute in parts.

    Attributes:
      weight_of: for each operation of an update, and each variable that may be stored in parts,
        the dimensions of the weight.
      gathers: for each weight's value, how often it is gathered if it is stored in parts: once,
        and once more if the backward pass needs it; in a loop over microbatches, in each of them.
      sums: the gradients that a loop over microbatches sums in parts, with the dimensions of the
        weight.
    """

    weight_of: Mapping[Operation, Weight]
    gathers: Mapping[Tensor, float]
    sums: Mapping[Tensor, Weight]


NO_UPDATES = Updates({}, {}, {})  # of variables that are stored as they are computed with


def find_updates(graph: Graph, early: bool) -> Updates:
    """Returns the Updates of a program.

    A gradient is added up before it is split, so what belongs to an update depends on which
    gradients are partial sums: here, those that are summed over a dimension of no weight, such as
    the batch.

    Args:
      graph: an mtf.Graph.
      early: whether each gradient is split before the next one is computed.
    """
    # A mesh of two dimensions: one splits the batch, so that gradients are partial sums as in
    # training, and over the other one anything may be stored.
    dim, parts = _batch_like(graph)
    rules = LayoutRules([(dim, _DATA)] if dim else [])
    impl: MeshImpl = MeshImpl(Shape([(_DATA, parts), (_STORE, 2)]), rules)
    impl.stored_layout = seen = _AnyStored(WEIGHTS_TOO, LayoutRules([]), _STORE)
    impls = {op.mesh: impl for op in graph.operations}
    stored = stored_names(graph, impls, early_on=impls if early else ())
    weight_of = seen.weights({**stored.variables, **stored.updates})
    updates = Updates(weight_of, {}, seen.weights(stored.sums))
    gathers = _gathers(graph.operations, updates, early)
    return dataclasses.replace(updates, gathers=gathers)


@dataclasses.dataclass(frozen=True, eq=False)
class _AnyStored(StoredLayout):
    """Stores variables in parts along any dimension, and remembers the shapes."""

    shapes: dict[str, Shape] = dataclasses.field(default_factory=dict)

    def names(self, shape: Shape, mesh_impl: MeshImpl) -> dict[str, StoredName]:
        """Returns a name that tells the shape, for each dimension."""
        name = StoredName("", str(shape))
        self.shapes[name] = shape
        return dict.fromkeys(shape.dimension_names, name)

    def weights(self, named: Mapping[_Named, Mapping[str, str]]) -> dict[_Named, Weight]:
        """Returns the dimensions of the weights that names were given for."""
        # All dimensions of a weight have one name here, which tells its shape.
        first = {x: next(iter(names.values())) for x, names in named.items() if names}
        return {x: tuple(self.shapes[name]) for x, name in first.items()}


def _batch_like(graph: Graph) -> tuple[str, int]:
    """Returns the dimension of no weight that most operations have, and a divisor of its sizes."""
    weights = {n for v in graph.trainable_variables for n in v.shape.dimension_names}
    unsplit = {n for op in graph.operations for n in op.unsplittable_dims}
    count: Counter[str] = Counter()
    sizes: dict[str, set[int]] = {}
    for op in graph.operations:
        for d in dict.fromkeys(d for y in op.outputs for d in y.shape):
            count[d.name] += 1
    # Also of microbatches, whose batch is smaller.
    for op in with_inner_operations(graph.operations):
        for d in (d for y in op.outputs for d in y.shape):
            sizes.setdefault(d.name, set()).add(d.size)
    # The batch is in most activations, and in no weight.
    for name, _ in count.most_common():
        if name in weights or name in unsplit:
            continue
        # Any divisor will do: what matters is which sums are partial, not over how many processors.
        for num_parts in (2, 3, 5, 7):
            if not any(size % num_parts for size in sizes[name]):
                return name, num_parts
    return "", 1


def takes_again(op: Operation) -> bool:
    """Returns whether an operation takes weights that are gathered a second time.

    So do those of the backward pass, and what is recomputed.

    Args:
      op: an Operation.
    """
    of = op.gradient_of
    if op.original is not None or (of is not None and of.original is not None):
        return True
    # A loop may share operations with its gradient, which then read one tensor.
    return of is not None and not op.inner_operations


def _gathers(operations: Iterable[Operation], updates: Updates, early: bool) -> dict[Tensor, float]:
    """Returns how often weights, and gradients in parts, are gathered."""
    weight_of = updates.weight_of
    trained = {op.value for op in weight_of if isinstance(op, Variable) and op.trainable}
    trained.update(updates.sums)
    # A set: one gather serves all readers of the forward pass, and one those of the backward pass.
    readers: dict[Tensor, set[tuple[Optional[Operation], bool]]] = {}

    def read(op: Operation, loop: Optional[Operation]) -> None:
        inner = with_inner_operations(op.inner_operations)
        for x in trained.intersection(op.inputs, *(each.inputs for each in inner)):
            readers.setdefault(x, set()).add((loop, takes_again(op)))

    for op in operations:
        if early and is_of_microbatches(op):
            for inner in op.body_operations:
                read(inner, op)
        # Updates work on the parts, and need no whole weight.
        elif not (op in weight_of or isinstance(op, Assign)):
            read(op, None)

    def times(loop: Optional[Operation]) -> float:
        return 1.0 if loop is None or loop.loop is None else loop.loop.iterations

    return {x: sum(times(loop) for loop, _ in each) for x, each in readers.items()}

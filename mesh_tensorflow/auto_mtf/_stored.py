"""Variables stored in parts: over which mesh dimension, and which operations update them so."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Optional

from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.layout import (
    WEIGHTS_TOO,
    LayoutRules,
    StoredLayout,
    StoredName,
    mesh_axis_of_name,
    stored_layout,
)
from mesh_tensorflow._core.operation import Operation, with_inner_operations
from mesh_tensorflow._core.shape import Dimension, Shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._lowering.rewrites import update_names
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.auto_mtf._space import joint_names
from mesh_tensorflow.ops._variables.assign import Assign
from mesh_tensorflow.ops._variables.variable import Variable


def stored_layouts(
    mesh_shape: Shape, zero: Iterable[int], joint: bool = False
) -> list[Optional[StoredLayout]]:
    """Returns how variables may be stored: at each stage, over each mesh dimension.

    Args:
      mesh_shape: a Shape.
      zero: stages of ZeRO; 1 and 2 are one.
      joint: whether also over several mesh dimensions together.

    Raises:
      ValueError: a stage is unknown.
    """
    found: list[Optional[StoredLayout]] = []
    for stage in zero:
        if stage == 0:
            found.append(None)
            continue
        # Dimensions of one processor store nothing in parts; a mesh of nothing else still gets each
        # stage.
        names = [d.name for d in mesh_shape if d.size > 1] or mesh_shape.dimension_names[:1]
        names += joint_names({d.name: d.size for d in mesh_shape}) if joint else ()
        found += [stored_layout(mesh_shape, zero=stage, zero_axis=name) for name in names]
    return found


class Storing:
    """A stored layout on a mesh.

    Attributes:
      layout: a StoredLayout, or None.
      weights_too: whether weights are stored in parts, besides what optimizers keep.
    """

    def __init__(self, mesh_shape: Shape, layout: Optional[StoredLayout]):
        """Creates a Storing.

        Args:
          mesh_shape: a Shape.
          layout: a StoredLayout, or None.
        """
        self._mesh_shape = mesh_shape
        self.layout = layout
        self.weights_too = layout is not None and layout.stage >= WEIGHTS_TOO
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
        rules, parts = self.rules(weight, layout), 1
        for d in set(dims) & rules.keys():
            axis = mesh_axis_of_name(rules[d], self._mesh_shape)
            assert axis is not None  # the stored layout is of this mesh
            parts *= self._mesh_shape[axis].size
        return parts


# -- updates

Weight = tuple[Dimension, ...]  # what tells weights apart is how they may be split
_DATA, _STORE = "data", "store"


@dataclasses.dataclass(frozen=True)
class Updates:
    """The updates of a program, which stored layouts compute in parts.

    Attributes:
      weight_of: for each operation of an update, and each variable that may be stored in parts,
        the dimensions of the weight.
      gathers: for each weight's value, how often it is gathered if it is stored in parts: once,
        and once more if the backward pass needs it.
    """

    weight_of: Mapping[Operation, Weight]
    gathers: Mapping[Tensor, int]


NO_UPDATES = Updates({}, {})  # of a program whose variables are stored as they are computed with


def find_updates(graph: Graph) -> Updates:
    """Returns the Updates of a program.

    A gradient is added up before it is split, so what belongs to an update depends on which
    gradients are partial sums: here, those that are summed over a dimension of no weight, such as
    the batch.

    Args:
      graph: an mtf.Graph.
    """
    impls, seen = {}, _AnyStored()
    for mesh in dict.fromkeys(op.mesh for op in graph.operations):
        # A mesh of two dimensions: one splits the batch, so that gradients are partial sums as in
        # training, and over the other one anything may be stored.
        dim, parts = _batch_like(graph)
        rules = LayoutRules([(dim, _DATA)] if dim else [])
        impl: MeshImpl = MeshImpl(Shape([(_DATA, parts), (_STORE, 2)]), rules)
        impl.stored_layout = seen
        impls[mesh] = impl
    stored, updates = update_names(graph, impls)
    weight_of: dict[Operation, Weight] = {}
    for op, names in [*stored.items(), *updates.items()]:
        # All dimensions of a weight have one name here, which tells its shape.
        for name in list(names.values())[:1]:
            weight_of[op] = tuple(seen.shapes[name])
    return Updates(weight_of, _gathers(graph.operations, weight_of))


class _AnyStored(StoredLayout):
    """Stores variables in parts along any dimension, and remembers the shapes."""

    def __init__(self) -> None:
        super().__init__(WEIGHTS_TOO, LayoutRules([]), _STORE)
        # The parent is a frozen dataclass.
        object.__setattr__(self, "shapes", {})

    shapes: dict[str, Shape]

    def names(self, shape: Shape, mesh_impl: MeshImpl) -> dict[str, StoredName]:
        """Returns a name that tells the shape, for each dimension."""
        name = StoredName("", str(shape))
        self.shapes[name] = shape
        return dict.fromkeys(shape.dimension_names, name)


def _batch_like(graph: Graph) -> tuple[str, int]:
    """Returns the dimension of no weight that most operations have, and a divisor of its sizes."""
    weights = {n for v in graph.trainable_variables for n in v.shape.dimension_names}
    unsplit = {n for op in graph.operations for n in op.unsplittable_dims}
    count: Counter[str] = Counter()
    sizes: dict[str, set[int]] = {}
    for op in graph.operations:
        for d in dict.fromkeys(d for y in op.outputs for d in y.shape):
            count[d.name] += 1
            sizes.setdefault(d.name, set()).add(d.size)
    # The batch is in most activations, and in no weight.
    for name, _ in count.most_common():
        if name in weights or name in unsplit:
            continue
        # Any divisor will do: what matters is which sums are partial, not over how many processors.
        for parts in (2, 3, 5, 7):
            if not any(size % parts for size in sizes[name]):
                return name, parts
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


def _gathers(
    operations: Iterable[Operation], weight_of: Mapping[Operation, Weight]
) -> dict[Tensor, int]:
    weights = {op.value: op for op in weight_of if isinstance(op, Variable) and op.trainable}
    found: dict[Tensor, set[bool]] = {}
    for op in operations:
        # Updates work on the parts, and need no whole weight.
        if op in weight_of or isinstance(op, Assign):
            continue
        inner = with_inner_operations(op.inner_operations)
        for x in {*op.inputs, *(x for each in inner for x in each.inputs)}:
            if x in weights:
                # A set: one gather serves all readers of the forward pass, and one of the backward.
                found.setdefault(x, set()).add(takes_again(op))
    return {x: len(kinds) for x, kinds in found.items()}

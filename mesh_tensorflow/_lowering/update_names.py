"""Finds the operations that update each weight, for variables that are stored in parts (ZeRO).

The rewrite in `stored_layouts.py` gives the dimensions of these operations the stored names, such
as `d_model@rows`, so that each processor updates its own part. Nothing marks an operation as part
of an update; they are found backward from the assignments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from mesh_tensorflow._core.cost import Collective
from mesh_tensorflow._core.graph import Graph, Mesh
from mesh_tensorflow._core.operation import Operation, is_of_package
from mesh_tensorflow._core.pending import Walk
from mesh_tensorflow._core.shape import Dimension, Shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.stored_layout import WEIGHTS_TOO
from mesh_tensorflow.ops._variables.assign import Assign
from mesh_tensorflow.ops._variables.variable import Variable

__all__ = ["Names", "renamed", "stored_shapes", "update_names"]

# From dimensions' own names to those that they are stored with.
Names: TypeAlias = Mapping[str, str]


def update_names(
    graph: Graph, impls: Mapping[Mesh, MeshImpl]
) -> tuple[dict[Variable, Names], dict[Operation, Names]]:
    """Returns the names of variables as they are stored, and of the operations that update them.

    An update consists of the operations between the gradient of a weight, the slots, and the
    assignments: those that have no other dimensions than the weight.

    Args:
      graph: a Graph.
      impls: from a Mesh to its MeshImpl, which has a `stored_layout`; not all meshes of the graph.
    """
    finder = _Finder(graph, impls)
    # Weights first: their slots, which are not trainable, are then found by way of the updates.
    for v in sorted(graph.all_variables, key=lambda v: not v.trainable):
        if v.mesh in impls and v not in finder.stored:
            finder.group(v)
    return finder.stored, finder.updates


def stored_shapes(graph: Graph, impls: Mapping[Mesh, MeshImpl]) -> dict[Variable, Shape]:
    """Returns the Shapes that variables are stored with, whether the graph is lowered or not.

    Args:
      graph: a Graph.
      impls: from each Mesh to its MeshImpl.
    """
    shapes = {part: part.stored_shape for v in graph.all_variables for part in v.parts}
    laid_out = {m: i for m, i in impls.items() if getattr(i, "stored_layout", None) is not None}
    if laid_out and graph.stored_layouts is None and not graph.is_stacked:
        for v, names in update_names(graph, laid_out)[0].items():
            shapes[v] = renamed(v.shape, names)
    return shapes


def renamed(shape: Shape, names: Names) -> Shape:
    """Returns a Shape with other names.

    Args:
      shape: a Shape.
      names: from some dimensions' names to others.
    """
    return Shape([Dimension(names.get(d.name, d.name), d.size) for d in shape])


class _Delays(Walk):
    """A walk that records which operations pass partial sums on."""

    def __init__(self, mesh_impl: MeshImpl):
        super().__init__(mesh_impl)
        self.delaying: set[Operation] = set()

    def ask(self, op: Operation) -> list[Collective]:
        """Visits one operation."""
        before = [x for x in op.inputs if self.pending_axes(x)]
        asked = super().ask(op)
        # Inputs that are still pending afterwards have not been summed for this operation.
        if before and all(self.pending_axes(x) for x in before):
            self.delaying.add(op)
        return asked


class _Finder:
    """Finds, from each weight, its update and its slots."""

    def __init__(self, graph: Graph, impls: Mapping[Mesh, MeshImpl]):
        self._impls = impls
        self.stored: dict[Variable, Names] = {}
        self.updates: dict[Operation, Names] = {}
        self._assigned: dict[Variable, list[Tensor]] = {}
        walks = {mesh: _Delays(impl) for mesh, impl in impls.items()}
        for op in graph.operations:
            if op.mesh in walks:
                walks[op.mesh].ask(op)
            if isinstance(op, Assign):
                for v, x in zip(op.variables, op.inputs):
                    self._assigned.setdefault(v, []).append(x)
        # Gradients of a weight are added up before they are split.
        self._outside = {op for walk in walks.values() for op in walk.delaying}

    def group(self, v: Variable) -> None:
        """Names the dimensions of a weight, of its update, and of its slots."""
        impl = self._impls[v.mesh]
        names = impl.stored_layout.names(v.shape, impl)  # type: ignore[union-attr]
        if not names:
            return
        whole = v.trainable and impl.stored_layout.stage < WEIGHTS_TOO  # type: ignore[union-attr]
        self.stored[v] = {} if whole else names
        found = [x.operation for x in self._assigned.get(v, ())]
        beyond: list[Operation] = []  # found through values without dimensions, such as norms
        seen: set[Operation] = set()
        while found or beyond:
            near = bool(found)
            op = (found or beyond).pop()
            if op in seen:
                continue
            seen.add(op)
            if isinstance(op, Variable):
                if not op.trainable and self._may_be_slot(op, v):
                    self.stored[op] = {n: names[n] for n in names if n in op.shape.dimension_names}
                    # A slot is updated by operations that the weight's own assignment need not
                    # depend on.
                    found += [x.operation for x in self._assigned[op]]
                continue
            dims = {d for t in op.inputs + op.outputs for d in t.shape}
            if not dims:
                # A scalar on the way, such as a clipping factor of the global norm, depends on all
                # gradients. So behind it, operations are of this update only if they have the
                # dimensions of this weight.
                beyond += [x.operation for x in op.inputs]
            elif self._is_update(op, v, names) and (near or dims == set(v.shape)):
                self.updates[op] = names
                (found if near else beyond).extend(x.operation for x in op.inputs)

    def _may_be_slot(self, op: Variable, v: Variable) -> bool:
        return op not in self.stored and op in self._assigned and set(op.shape) <= set(v.shape)

    def _is_update(self, op: Operation, v: Variable, names: Names) -> bool:
        """Returns whether an operation can do a part of an update under other names."""
        return (
            op.works_by_name
            and is_of_package(type(op))
            and op not in self.updates
            and op not in self._outside
            and all(set(t.shape) <= set(v.shape) for t in op.inputs + op.outputs)
            and names.keys().isdisjoint(op.unsplittable_dims)
        )

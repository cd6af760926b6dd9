"""What is described: a Graph with its mesh implementations, or a Lowering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

from mesh_tensorflow._core.errors import WrongTypeError, dims_text
from mesh_tensorflow._core.graph import Graph, Mesh
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._lowering.lowering import Lowering
from mesh_tensorflow._mesh.mesh_impl import MeshImpl

__all__ = ["Impls", "Program", "Subject", "devices_of", "layout_text", "mesh_text", "subject_of"]

# The mesh implementation of a graph, or that of each of its meshes; one processor if None.
Impls = Union[MeshImpl, Mapping[Mesh, MeshImpl], None]
Program = Union[Graph, Lowering]


class Subject(NamedTuple):
    """A program with the meshes that it is laid out on.

    Attributes:
      graph: the Graph.
      impls: the MeshImpl of each Mesh of the graph.
      lowering: the Lowering, if the program has been lowered.
    """

    graph: Graph
    impls: Mapping[Mesh, MeshImpl]
    lowering: Optional[Lowering]

    @property
    def impl(self) -> MeshImpl:
        """The MeshImpl of the first mesh."""
        return next(iter(self.impls.values()), MeshImpl("", ""))

    def impl_of(self, mesh: Mesh) -> MeshImpl:
        """Returns the MeshImpl of a Mesh."""
        return self.impls[mesh]


def _meshes(graph: Graph) -> list[Mesh]:
    return list(dict.fromkeys(op.mesh for op in graph.operations))


def subject_of(what: str, program: Program, mesh_impl: Impls = None) -> Subject:
    """Returns the graph and mesh implementations that a caller means.

    Args:
      what: the name of the function that was called, for errors.
      program: a Graph, or a Lowering.
      mesh_impl: for a Graph: a MeshImpl, a dictionary from Mesh to MeshImpl, or None for one
        processor. None for a Lowering, which has its own.

    Raises:
      WrongTypeError: `program` or `mesh_impl` is something else. It is a TypeError and a
        ValueError.
      ValueError: a Lowering is given with another `mesh_impl`, or a mesh has none.
    """
    if isinstance(program, Lowering):
        if mesh_impl is not None:
            raise ValueError(
                f"{what}: a Lowering has its own mesh implementation; leave out mesh_impl, or give "
                "the graph with it"
            )
        return Subject(program.graph, program.mesh_to_impl, program)
    if not isinstance(program, Graph):
        raise WrongTypeError(
            f"{what} describes a mtf.Graph or a mtf.Lowering, not {type(program).__name__}: "
            "give it mesh.graph, with a mesh implementation, or the Lowering"
        )
    meshes = _meshes(program)
    if isinstance(mesh_impl, Mapping):
        missing = [m.name for m in meshes if m not in mesh_impl]
        if missing:
            raise ValueError(f"{what}: no mesh implementation for mesh {', '.join(missing)}")
        return Subject(program, mesh_impl, None)
    if mesh_impl is not None and not isinstance(mesh_impl, MeshImpl):
        raise WrongTypeError(
            f"{what}: mesh_impl is a mesh implementation such as "
            f"mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout), not {mesh_impl!r}"
        )
    impl = MeshImpl("", "") if mesh_impl is None else mesh_impl
    return Subject(program, dict.fromkeys(meshes, impl), None)


def mesh_text(impl: MeshImpl) -> str:
    """Returns "rows=2, cols=2: 4 processors"."""
    count = f"{impl.size} processor{'s' if impl.size > 1 else ''}"
    return f"{dims_text(impl.shape)}: {count}" if impl.ndims else count


def layout_text(impl: MeshImpl) -> str:
    """Returns "batch:rows, d_ff:cols", or "no splits"; with how variables are stored."""
    rules = ", ".join(f"{t}:{m}" for t, m in impl.layout_rules.pairs) or "no splits"
    stored = getattr(impl, "stored_layout", None)
    return rules if stored is None else f"{rules}; stored with {stored}"


def devices_of(impl: MeshImpl) -> Sequence[str]:
    """Returns the names of the devices of the processors, in order; empty if there are none."""
    found: Any = getattr(impl, "devices", None) or ()
    return list(found)


def split_text(impl: MeshImpl, tensor: Tensor) -> str:
    """Returns "batch:rows, d_ff:cols" of the dimensions that are split, or "-"."""
    return ", ".join(f"{d.name}:{impl.shape[a].name}" for d, a in splits(impl, tensor)) or "-"


def splits(impl: MeshImpl, tensor: Tensor) -> list[tuple[Any, int]]:
    """Returns pairs (dimension, mesh axis of size above 1) of the dimensions that are split."""
    found = [(d, impl.splitting_axis(d)) for d in tensor.shape]
    return [(d, axis) for d, axis in found if axis is not None]

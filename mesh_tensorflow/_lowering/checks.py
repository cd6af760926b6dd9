"""Checks of the arguments of a Lowering, before it changes the graph or makes a tf operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mesh_tensorflow._core.graph import Mesh
from mesh_tensorflow._core.operation import Operation, is_of_package, with_inner_operations
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._watching.node_names import tell_lowering_error

__all__ = ["all_of_package", "check_impls", "check_layouts"]


def all_of_package(operations: Iterable[Operation]) -> bool:
    """Returns whether all operations, including inner ones, are of classes of this package.

    Other classes may rely on a slice for each processor, so processors are not merged then.
    """
    return all(is_of_package(type(op)) for op in with_inner_operations(operations))


def check_impls(mesh_to_impl: object) -> None:
    """Checks the argument `mesh_to_impl` of a Lowering; a slip if processors are missing.

    Raises:
      TypeError: it is not a dictionary, or a value in it is not a MeshImpl.
    """
    impls = mesh_to_impl.values() if isinstance(mesh_to_impl, Mapping) else [None]
    for impl in impls:
        if impl is None or isinstance(impl, str):
            found = repr(mesh_to_impl if impl is None else impl)
            raise TypeError(
                "Lowering: mesh_to_impl must be a dictionary from mtf.Mesh to a MeshImpl, as "
                '{mesh: mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", [""])}, and not '
                f"{found}"
            )
    for impl in impls:
        if isinstance(impl, MeshImpl):
            impl.check_processors()


def check_layouts(operations: Iterable[Operation], mesh_to_impl: Mapping[Mesh, MeshImpl]) -> None:
    """Checks that each operation, including inner ones, can be lowered in the layout of its mesh.

    Raises:
      ValueError: one cannot; the message names it.
    """
    for op in with_inner_operations(operations):
        try:
            op.check_layout(mesh_to_impl)
        except Exception as e:
            tell_lowering_error(e, op)
            raise

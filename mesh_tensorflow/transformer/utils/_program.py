"""One program of a mesh: on devices that are named, or the same on every processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate
from mesh_tensorflow.transformer.utils._settings import Settings

__all__ = ["MESH_IMPLS", "Outputs", "Results", "processor_devices", "run_on_mesh"]

MESH_IMPLS = ("placement", "simd")


class Outputs(NamedTuple):
    """What a program gives: Tensors by name, and operations that change variables."""

    tensors: Mapping[str, mtf.Tensor]
    updates: Sequence[mtf.Operation] = ()


class Results(NamedTuple):
    """The same in the tf graph."""

    tensors: dict[str, tf.Tensor]
    update: Optional[tf.Operation]
    lowering: mtf.Lowering


def processor_devices(
    mesh_impl: str, mesh_shape: mtf.Shape, mesh_devices: Optional[Sequence[str]] = None
) -> list[str]:
    """Returns a device for each processor of a mesh.

    Args:
      mesh_impl: "placement" or "simd".
      mesh_shape: the mesh.
      mesh_devices: the devices that a user named, or None.

    Returns:
      Those, or GPUs if there are as many, or on a placement mesh devices that TensorFlow chooses,
      and on a SIMD mesh as many logical CPUs.

    Raises:
      ValueError: there is no such implementation.
    """
    if mesh_impl not in MESH_IMPLS:
        raise ValueError(
            f"unknown mesh_impl {mesh_impl!r}; it should be one of "
            f"{', '.join(map(repr, MESH_IMPLS))}"
        )
    if mesh_devices is not None:
        return list(mesh_devices)
    size = mesh_shape.size
    if size > 1 and len(tf.config.list_physical_devices("GPU")) == size:
        return [f"/device:GPU:{i}" for i in range(size)]
    return [f"/device:CPU:{i}" if mesh_impl == "simd" else "" for i in range(size)]


def run_on_mesh(
    settings: Settings, build: Callable[[mtf.Mesh], Outputs], log_file: Optional[str] = None
) -> Results:
    """Builds a program for a mesh and lowers it.

    Args:
      settings: which mesh, layout and implementation.
      build: a function of a Mesh that makes the program.
      log_file: a path; the sizes of variables and counters are written there.

    Returns:
      Results.
    """
    devices = processor_devices(settings.mesh_impl, settings.mesh_shape, settings.mesh_devices)
    lowerings = []

    def program() -> tuple[dict[str, tf.Tensor], list[tf.Operation]]:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "my_mesh")
        outputs = build(mesh)
        impl: Any
        if settings.mesh_impl == "simd":
            impl = SimdMeshImpl(settings.mesh_shape, settings.layout_rules)
        else:
            impl = PlacementMeshImpl(settings.mesh_shape, settings.layout_rules, devices)
        lowering = mtf.Lowering(
            graph, {mesh: impl}, autostack=settings.autostack, log_file=log_file)
        lowerings.append(lowering)
        tensors = {
            name: lowering.export_to_tf_tensor(x) for name, x in outputs.tensors.items()}
        updates = [lowering.lowered_operation(op) for op in outputs.updates]
        return tensors, [tf.group(updates)] if updates else []

    made = replicate(program, devices=devices) if settings.mesh_impl == "simd" else program()
    tensors, updates = made
    return Results(tensors, updates[0] if updates else None, lowerings[-1])

"""Columns of the table: where a program runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.crossings.feature import MESH
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate
from mesh_tensorflow.testing import harness

__all__ = ["MESHES", "UNSPLIT", "Place"]


@dataclasses.dataclass(frozen=True)
class Place:
    """A mesh implementation and its devices.

    Attributes:
      name: its name in the table.
      kind: "placement", "simd" or "pjrt".
      logical: whether each processor is a logical CPU that counts as a memory of its own.
      merge: as for PlacementMeshImpl.
      share: as for replicate.
      mesh_shape: the shape of the mesh.
    """

    name: str
    kind: str
    logical: bool = False
    merge: str = "none"
    share: bool = True
    mesh_shape: str = MESH

    @property
    def size(self) -> int:
        return mtf.convert_to_shape(self.mesh_shape).size

    @property
    def devices(self) -> list[str]:
        if self.kind == "simd":
            return [f"/cpu:{i}" for i in range(self.size)]
        return [f"cpu:{i}" if self.logical else "cpu:0" for i in range(self.size)]

    def impl(self, layout: str, **stored: Any) -> mtf.MeshImpl:
        """Returns the mesh implementation; but for placement within a program.

        Args:
          layout: the layout rules.
          **stored: how variables are stored.
        """
        layout = layout if self.mesh_shape else ""
        if self.kind == "pjrt":
            return mtf.GspmdMeshImpl(self.mesh_shape, layout, **stored)
        if self.kind == "simd":
            return SimdMeshImpl(self.mesh_shape, layout, **stored)
        if not self.mesh_shape:
            stored = {}
        return PlacementMeshImpl(self.mesh_shape, layout, self.devices, merge=self.merge, **stored)

    def run(self, program: Callable[..., Any], inputs: Sequence[tf.Tensor]) -> Any:
        """Returns what a program makes of inputs, in the default tf graph."""
        if self.kind == "pjrt":
            return mtf.pjrt.in_session(program, inputs)
        if self.kind == "simd":
            return replicate(program, inputs, devices=self.devices, share_memory=self.share)
        return program(*inputs)

    def around(self) -> Any:
        """Returns the context in which programs are built."""
        return harness.separate_memories() if self.logical else contextlib.nullcontext()


UNSPLIT = Place("unsplit", "placement", mesh_shape="")
MESHES = {
    place.name: place
    for place in (
        Place("one device", "placement"),
        Place("logical CPUs", "placement", logical=True),
        Place("merged", "placement", merge="device"),
        Place("SIMD", "simd"),
        Place("SIMD apart", "simd", share=False),
        Place("pjrt", "pjrt"),
    )
}

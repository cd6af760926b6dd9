"""MeshContext: which processors a mesh has, and how programs run on them."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._mesh.devices import default_devices
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, auto_logical_to_physical_tpu

__all__ = ["MeshContext", "processors"]


def processors(count: int) -> list[str]:
    """Returns a device for each processor: GPUs if there are enough, else logical CPUs.

    Args:
      count: how many.
    """
    found = default_devices()
    kind = "GPU" if "GPU" in found[0] and len(found) >= count else "CPU"
    return [f"/device:{kind}:{i}" for i in range(count)]


class MeshContext:
    """What a mesh is made of, in one session."""

    def __init__(self, sess: tf.Session, use_tpu: bool, mesh_shape: Any, layout_rules: Any):
        """Creates a MeshContext; initializes the TPU if the session has one.

        Args:
          sess: a tf.Session.
          use_tpu: whether all processors run one program, on a TPU or, without one, on CPUs or
            GPUs. Else operations are placed on CPUs or GPUs.
          mesh_shape: the mesh shape.
          layout_rules: the layout rules.
        """
        self._use_tpu = use_tpu
        self._shape: Any = mtf.convert_to_shape(mesh_shape)
        self._rules = mtf.convert_to_layout_rules(layout_rules)
        self._mesh_impl: Any = None
        self._device_assignment: Any = None
        self._topology: Any = None
        if use_tpu and any(d.device_type == "TPU_SYSTEM" for d in sess.list_devices()):
            self._join_tpu(sess.run(tf.tpu.initialize_system()))

    def _join_tpu(self, topology: bytes) -> None:
        """Assigns a core to each processor."""
        self._topology = tf.tpu.experimental.Topology(serialized=topology)
        self._device_assignment = tf.tpu.experimental.DeviceAssignment.build(
            self._topology, num_replicas=self._shape.size
        )

    @property
    def device_assignment(self) -> Any:
        """The tf DeviceAssignment of a TPU, or None."""
        return self._device_assignment

    @property
    def num_hosts(self) -> int:
        """The number of hosts of a TPU; else 1."""
        return 1 if self._topology is None else self._topology.num_tasks

    @property
    def num_cores(self) -> int:
        """The number of processors of the mesh."""
        return self._shape.size

    @property
    def num_cores_per_host(self) -> int:
        """The number of processors that a host has on average, rounded down."""
        return self.num_cores // self.num_hosts

    @property
    def mesh_impl(self) -> Optional[mtf.MeshImpl]:
        """The mesh implementation that was made last, or None."""
        return self._mesh_impl

    def create_graph_mesh_and_mesh_impl(self) -> tuple[mtf.Graph, mtf.Mesh, Any]:
        """Returns a new (Graph, Mesh, MeshImpl).

        With `use_tpu` and no TPU, it is called within the function that
        `mtf.simd_mesh_impl.replicate` gets.

        Raises:
          ValueError: it was called elsewhere.
        """
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "my_mesh")
        self._mesh_impl = self._make_impl()
        return graph, mesh, self._mesh_impl

    def _make_impl(self) -> Any:
        if not self._use_tpu:
            devices = default_devices()
            if len(devices) < self.num_cores:
                devices = devices[:1] * self.num_cores
            return PlacementMeshImpl(self._shape, self._rules, devices[: self.num_cores])
        if self._device_assignment is None:
            return SimdMeshImpl(self._shape, self._rules)
        order = auto_logical_to_physical_tpu(
            self._shape.to_integer_list,
            list(self._topology.mesh_shape),
            device_assignment=self._device_assignment,
        )
        return SimdMeshImpl(
            self._shape,
            self._rules,
            device_assignment=self._device_assignment,
            logical_to_physical=order,
        )

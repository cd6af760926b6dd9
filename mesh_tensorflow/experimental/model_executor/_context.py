"""MeshContext: the processors of a mesh, and how programs run on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.shape import ShapeLike
from mesh_tensorflow._mesh.devices import default_devices
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, auto_logical_to_physical_tpu

__all__ = ["MeshContext", "processors"]


def processors(count: int) -> list[str]:
    """Returns a device for each processor: GPUs if there are enough, else logical CPUs.

    Args:
      count: the number of processors.
    """
    found = default_devices()
    kind = "GPU" if "GPU" in found[0] and len(found) >= count else "CPU"
    return [f"/device:{kind}:{i}" for i in range(count)]


class MeshContext:
    """The processors and the mesh implementation of a mesh, in one session."""

    def __init__(
        self,
        sess: tf.Session,
        use_tpu: bool,
        mesh_shape: ShapeLike,
        layout_rules: Union[mtf.LayoutRules, str, Iterable[tuple[str, str]]],
    ):
        """Creates a MeshContext; initializes the TPU if the session has one.

        Args:
          sess: a tf.Session.
          use_tpu: whether all processors run one program, on a TPU or, without one, on CPUs or
            GPUs; otherwise operations are placed on CPUs or GPUs.
          mesh_shape: the mesh shape; a Shape, or what converts to one.
          layout_rules: the layout rules; LayoutRules, or what converts to them.
        """
        self._use_tpu = use_tpu
        self._shape = mtf.convert_to_shape(mesh_shape)
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
        """The number of hosts of the TPU; 1 without a TPU."""
        return 1 if self._topology is None else self._topology.num_tasks

    @property
    def num_cores(self) -> int:
        """The number of processors of the mesh."""
        return self._shape.size

    @property
    def num_cores_per_host(self) -> int:
        """The mean number of processors of a host, rounded down."""
        return self.num_cores // self.num_hosts

    @property
    def mesh_impl(self) -> Optional[mtf.MeshImpl]:
        """The most recent mesh implementation, or None."""
        return self._mesh_impl

    def create_graph_mesh_and_mesh_impl(self) -> tuple[mtf.Graph, mtf.Mesh, Any]:
        """Returns a new (Graph, Mesh, MeshImpl).

        With `use_tpu` and no TPU, call it within the function that is passed to
        `mtf.simd_mesh_impl.replicate`.

        Raises:
          ValueError: it is called elsewhere.
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

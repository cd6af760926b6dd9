"""TpuProgram: the replicated computation of a TPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.program import Program
from mesh_tensorflow._mesh.slices import random_values
from mesh_tensorflow._mesh.tpu.collectives import TpuCollectives
from mesh_tensorflow._mesh.tpu.context import outside_tpu_context, tpu_context

if TYPE_CHECKING:
    from tensorflow.tpu.experimental import DeviceAssignment

__all__ = ["TpuProgram"]


class TpuProgram(Program):
    """The program of all cores of a TPU, which tpu.rewrite, tpu.replicate or tpu.shard builds.

    It may be created before the computation is built; its methods are called while it is.

    Attributes:
      devices: the device of each core, by physical number; replica i is the core of number i.
      local: all processors: one process builds the computation for all cores.
      binds_masters: whether the value of a variable may be stored in its slices only.
    """

    # Masters are stored on the host, and variables on TPU devices are only read and assigned as a
    # whole. So initializing and restoring need no TPU, and reinitializing a TPU loses nothing that
    # the host does not have.
    binds_masters = False
    orders_operations = False
    has_infeed = True

    def __init__(
        self,
        mesh_shape: Shape,
        device_assignment: Optional[DeviceAssignment],
        logical_to_physical: Sequence[int],
        make_variable: Callable[[str, Sequence[Any]], Any],
        allreduce_in_bfloat16_max_group_size: int,
    ):
        """Creates a TpuProgram.

        Args:
          mesh_shape: the logical mesh.
          device_assignment: a tf DeviceAssignment with a replica for each processor.
          logical_to_physical: the physical number of each logical processor.
          make_variable: takes a name and the variables of all replicas; returns one variable.
          allreduce_in_bfloat16_max_group_size: larger groups sum bfloat16 in float32.

        Raises:
          ValueError: there is no device assignment, or its number of replicas is wrong.
        """
        if device_assignment is None:
            raise ValueError(
                f"SimdMeshImpl of the mesh {dims_text(mesh_shape)} within a TPU computation has no "
                "device_assignment, which says where slices of variables are. Give it the one that "
                "tpu.replicate gets"
            )
        replicas = getattr(device_assignment, "num_replicas", mesh_shape.size)
        if replicas != mesh_shape.size:
            raise ValueError(
                f"the mesh {dims_text(mesh_shape)} has {mesh_shape.size} processors, the device "
                f"assignment has {replicas} replicas. Make it with num_replicas={mesh_shape.size}"
            )
        self.devices = [device_assignment.tpu_device(replica=n) for n in range(mesh_shape.size)]
        self.local = list(range(mesh_shape.size))
        self.collectives = TpuCollectives(
            mesh_shape, logical_to_physical, allreduce_in_bfloat16_max_group_size
        )
        self._axes = range(len(mesh_shape))
        self._make_variable = make_variable

    # -- places of operations

    def outside(self) -> contextlib.AbstractContextManager:
        """Creates operations on the host."""
        return contextlib.nullcontext() if tpu_context()[0] is None else outside_tpu_context()

    def at_beginning(self) -> contextlib.AbstractContextManager:
        """Creates operations where the program is lowered, which may be a loop of many steps."""
        return contextlib.nullcontext()

    # -- variables

    def make_slice(
        self, name: str, sizes: Sequence[int], dtype: tf.DType, trainable: bool, host: str
    ) -> Any:
        """Creates the tf variable of one slice, on the current device, with initial zeros.

        It is named under the name scope; in a variable scope with reuse=tf.AUTO_REUSE, it is the
        variable of that name in the variable scope.

        Args:
          name: a string.
          sizes: its sizes.
          dtype: its dtype.
          trainable: whether it is among the trainable variables.
          host: the device of the zeros.
        """
        options = {"trainable": trainable, "collections": ["TPU_VAR"], "use_resource": True}
        with tf.device(host):
            zeros = tf.zeros(sizes, dtype)
        if tf.get_variable_scope().reuse == tf.AUTO_REUSE:
            return tf.get_variable(name, initializer=zeros, **options)
        return tf.Variable(zeros, name=name, dtype=dtype, **options)

    def own_variable(self, name: str, slices: Sequence[Any], parts: Mapping[int, Any]) -> Any:
        """Returns a variable that is each core's own slice within the computation.

        Args:
          name: a string.
          slices: tf variables by physical number.
          parts: ignored; the part of the whole that each slice is.
        """
        del parts
        return self._make_variable(name, slices)

    # -- random values

    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a new key for random numbers, the same on all cores."""
        if random_values.key_is_of_step(seed):
            return random_values.new_key(seed)
        return self.same_everywhere(lambda: random_values.new_key(seed))

    def same_everywhere(self, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns a new random value, the same on all cores.

        It is computed on the host, which respects seeds. In a loop of the computation that would be
        one value for all iterations, so there the first processor computes it for all.

        Args:
          make: a function that returns a random tf.Tensor.
        """
        context, graph = tpu_context()
        here = tf.get_default_graph()
        is_in_loop = here._get_control_flow_context() is not context or here is not graph
        if context is None or not is_in_loop:
            with self.outside():
                return make()
        value = make()
        is_first = tf.equal(self.collectives.pnum(), 0)
        # Selected and summed: a broadcast with the operations that TPUs have.
        value = tf.where(is_first, value, tf.zeros_like(value))
        return self.collectives.allreduce(value, self._axes, "SUM")

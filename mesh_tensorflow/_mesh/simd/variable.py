"""SimdVariable: the slices of one Variable on a SimdMeshImpl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.simd.private_attributes import device_functions
from mesh_tensorflow._mesh.variables.slice_variables import SliceVariables

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.simd.tensor import SimdTensor
    from mesh_tensorflow.ops import Variable
    from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl

__all__ = ["SimdVariable"]


class SimdVariable(SliceVariables):
    """The slice variables of a Variable; the program sees that of the processor that runs it.

    Slice variables are numbered by physical processor; which part of the variable each one holds
    follows from the logical number.
    """

    mesh_impl: SimdMeshImpl

    def __init__(self, variable: Variable, mesh_impl: SimdMeshImpl):
        """Creates the slice variables, outside of the program.

        Args:
          variable: a Variable operation.
          mesh_impl: a SimdMeshImpl.
        """
        self.mesh_impl = mesh_impl
        self.owner = list(range(mesh_impl.size))
        program = mesh_impl.program
        with program.outside():
            made = self._make_slices(variable)
            self.slices = {pnum: made[mesh_impl.l2p(pnum)] for pnum in self.owner}
            parts = [
                tuple(mesh_impl.slice_begin(variable.stored_shape, mesh_impl.p2l(physical)))
                for physical in self.owner
            ]
            self._own = program.own_variable(variable.name, made, parts)
        if not program.binds_masters:
            for master in variable.masters:
                master.keep()
        super().__init__(variable)
        self._value: Optional[SimdTensor] = None

    def _make_slices(self, variable: Variable) -> list[tf.Variable]:
        """Returns new slice variables, by physical number."""
        impl = self.mesh_impl
        sizes = impl.slice_shape(variable.stored_shape)
        impl.graph_device_function_stacks.append(device_functions(tf.get_default_graph()))
        made = []
        for physical in range(impl.size):
            with tf.device(impl.devices[impl.p2l(physical)]):
                made.append(
                    impl.program.make_slice(
                        f"{variable.name}_slice_{physical}",
                        sizes,
                        variable.slice_dtype,
                        variable.trainable,
                        variable.master_device,
                    )
                )
        return made

    @property
    def laid_out_tensor(self) -> SimdTensor:
        """The value at the beginning of the step, a SimdTensor."""
        if self._value is None:
            with self.mesh_impl.program.at_beginning():
                self._value = self.read()
        return self._value

    def read(self) -> SimdTensor:
        """Reads the value at the point of the program where it is called."""
        return self.mesh_impl.LaidOutTensor([self._own.read_value()])

    def assign_to_slices(
        self,
        assign_fn: Callable,
        values: Sequence[tf.Tensor],
        assign_to_tensor_list: Optional[Sequence[tf.Variable]] = None,
    ) -> tf.Operation:
        """Assigns to the slice of the processor that runs the program.

        Args:
          assign_fn: takes the Variable, a slice variable and a value; returns a tf operation.
          values: a list of one tf.Tensor.
          assign_to_tensor_list: a list of one variable to assign to in place of the slice variable.

        Returns:
          A tf.Operation.
        """
        [value] = values
        [target] = assign_to_tensor_list or [self._own]
        with tf.control_dependencies([self.laid_out_tensor.one_slice]):
            made = assign_fn(self._variable, target, value)
        return tf.no_op() if made is None else tf.group(made)

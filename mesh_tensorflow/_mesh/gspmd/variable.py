"""GspmdVariable: the whole value of one Variable on a GspmdMeshImpl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.gspmd.sharding import current_compilation
from mesh_tensorflow._mesh.variables.slice_variables import SliceVariables

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.gspmd.mesh_impl import GspmdMeshImpl
    from mesh_tensorflow.ops._variables.variable import Variable

__all__ = ["GspmdVariable"]


class GspmdVariable(SliceVariables):
    """The only slice of a Variable, which is its whole value.

    It is the master itself, if that has the dtype of the slices, or what a store has.
    """

    def __init__(self, variable: Variable, mesh_impl: GspmdMeshImpl):
        """Creates the slice, or finds it.

        Args:
          variable: a Variable operation.
          mesh_impl: a GspmdMeshImpl.
        """
        self._variable = variable
        self.mesh_impl = mesh_impl
        self.owner = [0]
        compilation = current_compilation()
        own = None if compilation is None else compilation.slice_of(variable, mesh_impl)
        self._is_master = own is None and self._can_be_master()
        if own is not None:
            self.slices = {0: own}
        elif variable.store is not None:
            self.slices = variable.store.slices(variable, mesh_impl, self.owner)
        elif self.slice_is_master:
            self.slices = {0: variable.tf_master}
        else:
            self.slices = {0: self._make_slice()}
        super().__init__(variable)
        self._value = self.slices[0].read_value() if own is None else own.first

    @property
    def slice_is_master(self) -> bool:
        """Whether the slice is the master itself."""
        return self._is_master

    def _can_be_master(self) -> bool:
        variable = self._variable
        return (
            variable.store is None
            and not variable.is_stacked
            and variable.slice_dtype == variable.master_dtype
            and not any(master.is_bound for master in variable.masters)
        )

    def _make_slice(self) -> tf.Variable:
        variable = self._variable
        return tf.get_variable(
            f"{variable.name}_slice_0",
            variable.stored_shape.to_integer_list,
            dtype=variable.slice_dtype,
            initializer=tf.zeros_initializer(),
            collections=[],
            use_resource=True,
        )

    @property
    def laid_out_tensor(self) -> Any:
        """A LaidOutTensor of the value at the beginning of the step."""
        return self.mesh_impl.LaidOutTensor([self._value])

    def read(self) -> Any:
        """Returns a LaidOutTensor of the value at this point of the program."""
        return self.mesh_impl.LaidOutTensor([self.slices[0].read_value()])

    def assign_to_slices(self, assign_fn: Callable, values: Sequence[tf.Tensor]) -> tf.Operation:
        """Assigns to the slice, after its value has been read.

        Args:
          assign_fn: takes the Variable, a slice variable and a value; returns a tf operation.
          values: the whole value, as the only one.

        Returns:
          A tf.Operation.
        """
        [value] = values
        # As on other meshes: an assignment waits for the one read of the step.
        with tf.control_dependencies([self._value]):
            made = assign_fn(self._variable, self.slices[0], value)
        return tf.no_op() if made is None else made

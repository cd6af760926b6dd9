"""PlacedVariable: the slices of one Variable on a PlacementMeshImpl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables.slice_variables import SliceVariables

if TYPE_CHECKING:
    from mesh_tensorflow.ops._variables.variable import Variable
    from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

__all__ = ["PlacedVariable"]


class PlacedVariable(SliceVariables):
    """The slice variables of a Variable, and copies to and from its master.

    Equal slices in one memory domain are one tf variable. Each is read once, before any assignment
    to it. If a variable has only one slice, with the master's memory domain and dtype, the slice is
    the master.
    """

    def __init__(self, variable: Variable, mesh_impl: PlacementMeshImpl):
        """Creates the slice variables.

        Args:
          variable: a Variable operation.
          mesh_impl: a PlacementMeshImpl.
        """
        self._variable = variable
        self.mesh_impl = mesh_impl
        self.owner = mesh_impl.owners(variable.stored_shape)
        if variable.store is not None:
            self.slices = variable.store.slices(variable, mesh_impl, self.owner)
        elif self.slice_is_master:
            self.slices = dict.fromkeys(self.owner, variable.tf_master)
        else:
            self.slices = self._make_slices()
        super().__init__(variable)
        self._reads: dict[int, tf.Tensor] = {}
        for pnum, slice_var in self.slices.items():
            self._reads[pnum] = _read_once(slice_var)

    @property
    def slice_is_master(self) -> bool:
        """Whether the only slice is the master itself."""
        variable = self._variable
        return (
            variable.store is None
            and len(set(self.owner)) == 1
            and not variable.is_stacked
            and variable.slice_dtype == variable.master_dtype
            and not any(master.is_bound for master in variable.masters)
            and self.mesh_impl.same_memory(
                variable.master_device, self.mesh_impl.devices[self.owner[0]]
            )
        )

    def _make_slices(self) -> dict[int, Any]:
        impl, variable = self.mesh_impl, self._variable
        sizes = impl.slice_shape(variable.stored_shape)
        slices = {}
        for pnum in sorted(set(self.owner)):
            with tf.device(impl.devices[pnum]):
                slices[pnum] = tf.get_variable(
                    f"{variable.name}_slice_{pnum}",
                    sizes,
                    dtype=variable.slice_dtype,
                    initializer=tf.zeros_initializer(),
                    collections=[],
                    use_resource=True,
                )
        return slices

    def _spread(self, values: dict[int, Any]) -> Any:
        return self.mesh_impl.LaidOutTensor([values[owner] for owner in self.owner])

    @property
    def laid_out_tensor(self) -> Any:
        """A LaidOutTensor of the values at the beginning of the step."""
        return self._spread(self._reads)

    def read(self) -> Any:
        """Returns a LaidOutTensor of the values at this point of the program."""
        values = {}
        for pnum, v in self.slices.items():
            with tf.device(v.device):
                values[pnum] = v.read_value()
        return self._spread(values)

    def assign_to_slices(self, assign_fn: Callable, values: Sequence[tf.Tensor]) -> tf.Operation:
        """Assigns to the slices, after their values have been read.

        Args:
          assign_fn: takes the Variable, a slice variable and a value; returns a tf operation.
          values: a tf.Tensor for each processor.

        Returns:
          A tf.Operation.
        """
        assignments = []
        for pnum, v in self.slices.items():
            # Otherwise gradients of one step could be of a mixture of old and new weights.
            with tf.device(v.device), tf.control_dependencies([self._reads[pnum]]):
                assignments.append(assign_fn(self._variable, v, values[pnum]))
        made = [a for a in assignments if a is not None]
        return made[0] if len(made) == 1 else tf.group(made)


def _read_once(slice_var: tf.Variable) -> tf.Tensor:
    """Returns the tensor by which a graph reads a variable; in a function, a new read."""
    if tf.executing_eagerly_outside_functions():
        with tf.device(slice_var.device):
            return slice_var.value()
    # In a graph of TensorFlow 1 that is the read which was made with the variable, so all parts of
    # a step have the value of one moment.
    return slice_var.graph.as_graph_element(slice_var)

"""PlacedVariable: the slices of one Variable on a PlacementMeshImpl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

__all__ = ["PlacedVariable"]


class PlacedVariable:
    """The slice variables of an mtf Variable, and how they go to and from its master.

    Slices that are equal and in one memory are one tf variable. Each is read once, before any
    assignment to it. A variable of one slice in the master's memory and dtype is its master.
    """

    def __init__(self, variable: Any, mesh_impl: Any):
        """Makes the slice variables.

        Args:
          variable: a Variable operation.
          mesh_impl: a PlacementMeshImpl.
        """
        self._variable = variable
        self._mesh_impl = mesh_impl
        self._owner = mesh_impl.owners(variable.shape)
        if variable.store is not None:
            self._slices = variable.store.slices(variable, mesh_impl, self._owner)
        elif self.slice_is_master:
            self._slices = dict.fromkeys(self._owner, variable.get_master())
        else:
            self._slices = self._make_slices()
        self._reads: dict[int, tf.Tensor] = {}
        for pnum, slice_var in self._slices.items():
            self._reads[pnum] = _read_once(slice_var)
        self._copies: dict[str, tf.Operation] = {}

    @property
    def slice_is_master(self) -> bool:
        """Whether there is one slice, and it is the master itself."""
        variable = self._variable
        return (
            variable.store is None
            and len(set(self._owner)) == 1
            and not variable.is_stacked
            and variable.slice_dtype == variable.master_dtype
            and self._mesh_impl.same_memory(
                variable.master_device, self._mesh_impl.devices[self._owner[0]]
            )
        )

    def _make_slices(self) -> dict[int, Any]:
        impl, variable = self._mesh_impl, self._variable
        sizes = impl.slice_shape(variable.shape)
        slices = {}
        for pnum in sorted(set(self._owner)):
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

    def _master_to_slices_op(self) -> tf.Operation:
        with tf.device(self._variable.master_device):
            master = tf.cast(self._variable.get_master(), self._variable.slice_dtype)
            pieces = self._mesh_impl.make_slices(master, self._variable.shape)
        return tf.group(
            [v.assign(pieces[pnum], read_value=False) for pnum, v in self._slices.items()]
        )

    def _slices_to_master_op(self) -> tf.Operation:
        impl, variable = self._mesh_impl, self._variable
        values = {}
        for pnum, v in self._slices.items():
            with tf.device(v.device):
                values[pnum] = v.read_value()
        with tf.device(variable.master_device):
            whole = impl.combine_slices(
                [values[owner] for owner in self._owner], variable.shape, variable.master_device
            )
            return variable.assign_to_master(tf.cast(whole, variable.master_dtype))

    def _spread(self, values: dict[int, Any]) -> Any:
        return self._mesh_impl.LaidOutTensor([values[owner] for owner in self._owner])

    @property
    def laid_out_tensor(self) -> Any:
        """A LaidOutTensor of the values at the beginning of the step."""
        return self._spread(self._reads)

    def read(self) -> Any:
        """Returns a LaidOutTensor of the values at the place where it is called."""
        values = {}
        for pnum, v in self._slices.items():
            with tf.device(v.device):
                values[pnum] = v.read_value()
        return self._spread(values)

    @property
    def slice_variables(self) -> list[Any]:
        """The tf variables, one for each slice that is stored."""
        return list(self._slices.values())

    def assign_to_slices(self, assign_fn: Callable, values: Sequence[tf.Tensor]) -> tf.Operation:
        """Assigns to the slices, after their values have been read.

        Args:
          assign_fn: takes the Variable, a slice variable and a value; returns a tf operation.
          values: a tf.Tensor for each processor.

        Returns:
          A tf.Operation.
        """
        assignments = []
        for pnum, v in self._slices.items():
            with tf.device(v.device), tf.control_dependencies([self._reads[pnum]]):
                assignments.append(assign_fn(self._variable, v, values[pnum]))
        made = [a for a in assignments if a is not None]
        return made[0] if len(made) == 1 else tf.group(made)

    @property
    def needs_copies(self) -> bool:
        """Whether there are slices beside the master."""
        return self._variable.store is None and not self.slice_is_master

    def _copy(self, direction: str, make: Callable[[], tf.Operation]) -> tf.Operation:
        """Makes a copying operation when it is first asked for."""
        if not self.needs_copies:
            return tf.no_op()
        if direction not in self._copies:
            with tf.name_scope(f"{direction}/{self._variable.name}"):
                self._copies[direction] = make()
            if direction == "copy_master_to_slices":
                self._mesh_impl.copy_master_to_slice_ops.append(self._copies[direction])
        return self._copies[direction]

    @property
    def copy_master_to_slices(self) -> tf.Operation:
        """A tf.Operation that sets the slices to what the master holds."""
        return self._copy("copy_master_to_slices", self._master_to_slices_op)

    @property
    def copy_slices_to_master(self) -> tf.Operation:
        """A tf.Operation that sets the master to what the slices hold."""
        return self._copy("copy_slices_to_master", self._slices_to_master_op)


def _read_once(slice_var: Any) -> tf.Tensor:
    """Returns the tensor that a graph reads a variable by; in a function, a new read."""
    if tf.executing_eagerly_outside_functions():
        with tf.device(slice_var.device):
            return slice_var.read_value()
    return slice_var.graph.as_graph_element(slice_var)

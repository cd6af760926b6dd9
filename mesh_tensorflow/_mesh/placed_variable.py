"""PlacedVariable: the slices of one Variable on a PlacementMeshImpl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.placed_storage import bind_masters

__all__ = ["PlacedVariable"]


class PlacedVariable:
    """The slice variables of an mtf Variable, and how they go to and from its master.

    Slices that are equal and in one memory are one tf variable. Each is read once, before any
    assignment to it. A variable of one slice in the master's memory and dtype is its master.
    Otherwise the slices are the only place of the value, unless the master is in use.

    Attributes:
      mesh_impl: the PlacementMeshImpl.
      owner: for each processor, the one whose slice it shares.
      slices: tf variables, by the number of the processor that owns them.
    """

    def __init__(self, variable: Any, mesh_impl: Any):
        """Makes the slice variables.

        Args:
          variable: a Variable operation.
          mesh_impl: a PlacementMeshImpl.
        """
        self._variable = variable
        self.mesh_impl = mesh_impl
        self.owner = mesh_impl.owners(variable.shape)
        if variable.store is not None:
            self.slices: dict[int, Any] = variable.store.slices(variable, mesh_impl, self.owner)
        elif self.slice_is_master:
            self.slices = dict.fromkeys(self.owner, variable.tf_master)
        else:
            self.slices = self._make_slices()
        self._is_bound = not self.slice_is_master and bind_masters(self, variable)
        self._room: dict[int, tf.Operation] = {}
        self._stack_initializers: dict[tuple[int, ...], tf.Operation] = {}
        self._reads: dict[int, tf.Tensor] = {}
        for pnum, slice_var in self.slices.items():
            self._reads[pnum] = _read_once(slice_var)
        self._copies: dict[str, tf.Operation] = {}

    @property
    def slice_is_master(self) -> bool:
        """Whether there is one slice, and it is the master itself."""
        variable = self._variable
        return (
            variable.store is None
            and len(set(self.owner)) == 1
            and not variable.is_stacked
            and variable.slice_dtype == variable.master_dtype
            and self.mesh_impl.same_memory(
                variable.master_device, self.mesh_impl.devices[self.owner[0]]
            )
        )

    def _make_slices(self) -> dict[int, Any]:
        impl, variable = self.mesh_impl, self._variable
        sizes = impl.slice_shape(variable.shape)
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

    def has_room(self, pnum: int) -> tf.Operation:
        """Returns a tf.Operation that sets a slice to zeros if it has no value yet."""
        if pnum not in self._room:
            v = self.slices[pnum]
            with tf.device(v.device), tf.control_dependencies(None):
                self._room[pnum] = tf.cond(
                    v.is_initialized(),
                    tf.no_op,
                    lambda: v.assign(tf.zeros(v.shape, v.dtype), read_value=False),
                ).op
        return self._room[pnum]

    def stack_initializer(self) -> tf.Operation:
        """Returns a tf.Operation that gives all parts of a stack their initial values."""
        values = [master.initial_value for master in self._variable.masters]
        key = tuple(map(id, values))
        if key not in self._stack_initializers:
            name = f"init/{self._variable.name}"
            with tf.control_dependencies(None), tf.name_scope(name):
                self._stack_initializers[key] = self._set_slices(tf.stack(values))
        return self._stack_initializers[key]

    def _set_slices(self, whole: tf.Tensor) -> tf.Operation:
        """Returns a tf.Operation that sets all slices from a whole value."""
        with tf.device(self._variable.master_device):
            whole = tf.cast(whole, self._variable.slice_dtype)
            pieces = self.mesh_impl.make_slices(whole, self._variable.shape)
        return tf.group(
            [v.assign(pieces[pnum], read_value=False) for pnum, v in self.slices.items()]
        )

    def _master_to_slices_op(self) -> tf.Operation:
        return self._set_slices(self._variable.read_master())

    def _slices_to_master_op(self) -> tf.Operation:
        impl, variable = self.mesh_impl, self._variable
        values = {}
        for pnum, v in self.slices.items():
            with tf.device(v.device):
                values[pnum] = v.read_value()
        with tf.device(variable.master_device):
            whole = impl.combine_slices(
                [values[owner] for owner in self.owner], variable.shape, variable.master_device
            )
            return variable.assign_to_master(tf.cast(whole, variable.master_dtype))

    def _spread(self, values: dict[int, Any]) -> Any:
        return self.mesh_impl.LaidOutTensor([values[owner] for owner in self.owner])

    @property
    def laid_out_tensor(self) -> Any:
        """A LaidOutTensor of the values at the beginning of the step."""
        return self._spread(self._reads)

    def read(self) -> Any:
        """Returns a LaidOutTensor of the values at the place where it is called."""
        values = {}
        for pnum, v in self.slices.items():
            with tf.device(v.device):
                values[pnum] = v.read_value()
        return self._spread(values)

    @property
    def slice_variables(self) -> list[Any]:
        """The tf variables, one for each slice that is stored."""
        return list(self.slices.values())

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
            with tf.device(v.device), tf.control_dependencies([self._reads[pnum]]):
                assignments.append(assign_fn(self._variable, v, values[pnum]))
        made = [a for a in assignments if a is not None]
        return made[0] if len(made) == 1 else tf.group(made)

    @property
    def needs_copies(self) -> bool:
        """Whether the value is in slices and in a master beside them."""
        return self._variable.store is None and not self.slice_is_master and not self._is_bound

    def _copy(self, direction: str, make: Callable[[], tf.Operation]) -> tf.Operation:
        """Makes a copying operation when it is first asked for."""
        if not self.needs_copies:
            return tf.no_op()
        if direction not in self._copies:
            with tf.name_scope(f"{direction}/{self._variable.name}"):
                self._copies[direction] = make()
            if direction == "copy_master_to_slices":
                self.mesh_impl.copy_master_to_slice_ops.append(self._copies[direction])
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

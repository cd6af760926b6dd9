"""SliceVariables: the slice variables of a Variable, and copies to and from its master."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.laid_out import LaidOutVariable
from mesh_tensorflow._mesh.slices.cutting import in_own_memory
from mesh_tensorflow._mesh.variables.slice_storage import bind_masters

if TYPE_CHECKING:
    from mesh_tensorflow.ops._variables.variable import Variable

__all__ = ["SliceVariables"]


class SliceVariables(LaidOutVariable):
    """The slice variables of an mtf Variable.

    Only they store the value, unless the master is in use.

    Attributes:
      mesh_impl: a MeshImpl with a device for each processor.
      owner: for each processor, the number of the processor that stores its slice.
      slices: the slice variables, by the number of the processor that stores them.
    """

    mesh_impl: Any
    owner: list[int]
    slices: Mapping[int, tf.Variable]

    def __init__(self, variable: Variable):
        """Binds the master to the slices, if nothing uses the master yet.

        Subclasses create `slices` before they call this.

        Args:
          variable: the Variable.
        """
        self._variable = variable
        self._room: dict[int, tf.Operation] = {}
        # With the values, so that their ids are not reused.
        self._stack_initializers: dict[tuple[int, ...], tuple[list, tf.Operation]] = {}
        self._copies: dict[str, tf.Operation] = {}
        self._is_bound = not self.slice_is_master and bind_masters(self, variable)

    @property
    def slice_is_master(self) -> bool:
        """Whether there is only one slice, which is the master itself."""
        return False

    @property
    def slice_variables(self) -> list[tf.Variable]:
        """The tf variables, one for each slice that is stored."""
        return list(self.slices.values())

    # -- stacked variables

    def has_room(self, pnum: int) -> tf.Operation:
        """Returns a tf.Operation that sets a slice to zeros if it is not initialized."""
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
        """Returns a tf.Operation that initializes all parts of a stacked variable."""
        values = [master.initial_value for master in self._variable.masters]
        key = tuple(map(id, values))
        if key not in self._stack_initializers:
            name = f"init/{self._variable.name}"
            with tf.control_dependencies(None), tf.name_scope(name):
                self._stack_initializers[key] = values, self._set_slices(tf.stack(values))
        return self._stack_initializers[key][1]

    # -- copies between slices and a separate master

    def _set_slices(self, whole: tf.Tensor) -> tf.Operation:
        """Returns a tf.Operation that assigns a whole value to the slices."""
        with tf.device(self._variable.master_device):
            whole = tf.cast(whole, self._variable.slice_dtype)
            pieces = self.mesh_impl.make_slices(whole, self._variable.stored_shape)
            # A piece is a view of the whole, which a variable would hold in memory as long as it
            # has it.
            kept = {pnum: in_own_memory(pieces[pnum], whole) for pnum in self.slices}
        return tf.group([v.assign(kept[pnum], read_value=False) for pnum, v in self.slices.items()])

    def _master_to_slices_op(self) -> tf.Operation:
        return self._set_slices(self._variable.read_master())

    def _slices_to_master_op(self) -> tf.Operation:
        variable = self._variable
        values = {}
        for pnum, v in self.slices.items():
            with tf.device(v.device):
                values[pnum] = v.read_value()
        with tf.device(variable.master_device):
            whole = self.mesh_impl.combine_slices(
                [values[owner] for owner in self.owner],
                variable.stored_shape,
                variable.master_device,
            )
            return variable.assign_to_master(tf.cast(whole, variable.master_dtype))

    @property
    def needs_copies(self) -> bool:
        """Whether the slices and a separate master both store the value."""
        return self._variable.store is None and not self.slice_is_master and not self._is_bound

    def _copy(self, direction: str, make: Callable[[], tf.Operation]) -> tf.Operation:
        """Returns a copying operation, which the first call creates."""
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
        """A tf.Operation that copies the master to the slices."""
        return self._copy("copy_master_to_slices", self._master_to_slices_op)

    @property
    def copy_slices_to_master(self) -> tf.Operation:
        """A tf.Operation that copies the slices to the master."""
        return self._copy("copy_slices_to_master", self._slices_to_master_op)

"""SliceStorage: stores the value of a variable only in its slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.slices.cutting import in_own_memory
from mesh_tensorflow._mesh.variables.apart import Apart
from mesh_tensorflow._mesh.variables.storage import Piece, VariableStorage

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.variables.slice_variables import SliceVariables
    from mesh_tensorflow.ops._variables.variable import Variable

__all__ = ["SliceStorage", "bind_masters"]


class SliceStorage(VariableStorage):
    """The slices of one variable, or of one part of a stacked variable."""

    def __init__(self, placed: SliceVariables, variable: Variable, index: Optional[int] = None):
        """Creates a SliceStorage.

        Args:
          placed: the slices.
          variable: the Variable whose value is stored.
          index: the index of the variable in a stacked variable; None if it is not stacked.
        """
        self._placed = placed
        self._variable = variable
        self._index = index
        # With the values, so that their ids are not reused.
        self._initializers: dict[int, tuple[tf.Tensor, tf.Operation]] = {}

    def pieces(self) -> list[Piece]:
        """Returns one piece for each distinct slice, with all its copies."""
        impl, shape = self._placed.mesh_impl, self._variable.stored_shape
        holders: dict[tuple[int, ...], list[int]] = {}
        for pnum in self._placed.slices:
            # Copies of a slice on several devices begin at the same position; one of them is saved.
            holders.setdefault(tuple(impl.slice_begin(shape, pnum)), []).append(pnum)
        sizes = tuple(impl.slice_shape(shape))
        return [
            Piece(
                begin,
                sizes,
                impl.devices[pnums[0]],
                lambda first=pnums[0]: self._read(first),
                lambda value, pnums=tuple(pnums): tf.group(
                    [self._assign(pnum, value) for pnum in pnums]
                ),
                self._apart(pnums[0]),
            )
            for begin, pnums in holders.items()
        ]

    def _apart(self, pnum: int) -> Optional[Apart]:
        """Returns how several processes save a slice; None if it is a variable of TensorFlow."""
        if self._index is not None:
            return None
        apart = getattr(self._placed.slices[pnum], "apart", None)
        return None if apart is None else apart(self._variable.master_dtype)

    def _read(self, pnum: int) -> tf.Tensor:
        v = self._placed.slices[pnum]
        with tf.device(v.device):
            value = v.read_value() if self._index is None else v[self._index]
            return tf.cast(value, self._variable.master_dtype)

    def _assign(self, pnum: int, value: tf.Tensor) -> tf.Operation:
        v = self._placed.slices[pnum]
        with tf.device(v.device):
            # Files have the dtype of masters, whatever the slices are kept in.
            value = tf.cast(value, self._variable.slice_dtype)
            if self._index is None:
                return v.assign(value, read_value=False)
            # A scatter into a stack that has no value yet would fail: restoring may come before
            # initializing.
            with tf.control_dependencies([self._placed.has_room(pnum)]):
                return tf.raw_ops.ResourceScatterUpdate(
                    resource=v.handle, indices=self._index, updates=value
                )

    def read(self) -> tf.Tensor:
        """Returns the whole value, put together from one copy of each slice."""
        placed, variable = self._placed, self._variable
        values = {pnum: self._read(pnum) for pnum in placed.slices}
        return placed.mesh_impl.combine_slices(
            [values[owner] for owner in placed.owner], variable.stored_shape, variable.master_device
        )

    def assign(self, value: tf.Tensor) -> tf.Operation:
        """Cuts a whole value and assigns each piece to all copies of its slice."""
        with tf.device(self._variable.master_device):
            pieces = self._placed.mesh_impl.make_slices(value, self._variable.stored_shape)
            kept = {pnum: in_own_memory(pieces[pnum], value) for pnum in self._placed.slices}
        return tf.group([self._assign(pnum, piece) for pnum, piece in kept.items()])

    def initializer(self, value: tf.Tensor) -> tf.Operation:
        """Returns the operation that assigns an initial value; one for each value."""
        if self._index is not None:
            return self._placed.stack_initializer()
        if id(value) not in self._initializers:
            with tf.control_dependencies(None), tf.name_scope(f"init/{self._variable.name}"):
                self._initializers[id(value)] = value, self.assign(value)
        return self._initializers[id(value)][1]

    def is_initialized(self) -> tf.Tensor:
        """Returns whether every slice variable has a value."""
        return tf.reduce_all([v.is_initialized() for v in self._placed.slices.values()])


def bind_masters(placed: SliceVariables, variable: Variable) -> bool:
    """Makes slices the only storage of a variable's value, if nothing uses its masters yet.

    Args:
      placed: the slices.
      variable: the Variable.

    Returns:
      Whether the masters were bound.
    """
    masters = variable.masters
    if not masters or any(m.in_use or m.is_bound for m in masters):
        return False
    for i, (part, master) in enumerate(zip(variable.parts, masters)):
        index = i if variable.is_stacked else None
        master.bind(SliceStorage(placed, part, index))
    return True

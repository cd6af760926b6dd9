"""The slices of a variable: how they are stored, and read and assigned as one."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.mesh_impl import LaidOutTensor, MeshImpl
from mesh_tensorflow._mesh.slice_functions import in_own_memory
from mesh_tensorflow._mesh.variables.checkpoint_files import ShardedVariable
from mesh_tensorflow._mesh.variables.master import Piece, VariableStorage

if TYPE_CHECKING:
    from mesh_tensorflow.ops._variables.variable import Variable


class LaidOutVariable(abc.ABC):
    """The slices of one Variable on a mesh; `MeshImpl.LaidOutVariable` is the class of a mesh.

    A Lowering makes one for each Variable, reads its value from it, and assigns to it. It calls
    the members below and checks no types: a class that has them need not derive from this one.
    """

    @abc.abstractmethod
    def __init__(self, variable: Variable, mesh_impl: MeshImpl):
        """Creates the slices, or finds those that exist.

        Args:
          variable: the Variable.
          mesh_impl: the MeshImpl that lowers it.
        """

    @property
    @abc.abstractmethod
    def laid_out_tensor(self) -> LaidOutTensor:
        """The value at the beginning of the step, of the slice dtype of the Variable."""

    @abc.abstractmethod
    def read(self) -> LaidOutTensor:
        """Reads the value at the point of the program where it is called.

        Returns:
          A LaidOutTensor of the slice dtype of the Variable.
        """

    @abc.abstractmethod
    def assign_to_slices(
        self, assign_fn: Callable[..., Any], values: Sequence[tf.Tensor]
    ) -> tf.Operation:
        """Assigns to the slices, after `laid_out_tensor` has been read.

        Args:
          assign_fn: takes the Variable, a tf variable and a tf.Tensor for it; returns a
            tf.Operation.
          values: the slices of a LaidOutTensor of the Variable's shape.

        Returns:
          A tf.Operation that does all assignments.
        """

    @property
    def needs_copies(self) -> bool:
        """Whether the slices and the master both store the value, so that it must be copied."""
        return True

    @property
    def copy_master_to_slices(self) -> tf.Operation:
        """A tf.Operation that copies the master to the slices; used if `needs_copies`."""
        raise NotImplementedError(f"{type(self).__name__} has no copy_master_to_slices")

    @property
    def copy_slices_to_master(self) -> tf.Operation:
        """A tf.Operation that copies the slices to the master; used if `needs_copies`."""
        raise NotImplementedError(f"{type(self).__name__} has no copy_slices_to_master")


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
        sizes, whole = tuple(impl.slice_shape(shape)), shape.to_integer_list
        # What is past the end has no place in files, and gets what the first slice does.
        empty = [
            pnum
            for begin, pnums in holders.items()
            if any(b >= n > 0 for b, n in zip(begin, whole))
            for pnum in pnums
        ]
        origin, *_ = holders
        slices = [
            Piece(
                begin,
                sizes,
                impl.devices[pnums[0]],
                # Bound as defaults: closures would all find the processors of the last piece.
                lambda first=pnums[0]: self._read(first),
                lambda value, pnums=tuple(pnums), rest=tuple(empty if begin == origin else ()): (
                    tf.group([self._assign(pnum, value) for pnum in (*pnums, *rest)])
                ),
                self._apart(pnums[0]),
            )
            for begin, pnums in holders.items()
        ]
        pieces = [piece.without_padding(whole) for piece in slices]
        return [piece for piece in pieces if piece is not None]

    def _apart(self, pnum: int) -> Optional[ShardedVariable]:
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
        # By the value, since tf.train.init_from_checkpoint sets another one later.
        if id(value) not in self._initializers:
            # Whoever asks first may be in a loop, or after operations that must not be waited for.
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
    # All or none: a stacked slice with one part in a master would have to be copied as a whole.
    if not masters or any(m.in_use or m.is_bound for m in masters):
        return False
    for i, (part, master) in enumerate(zip(variable.parts, masters)):
        index = i if variable.is_stacked else None
        master.bind(SliceStorage(placed, part, index))
    return True


class SliceVariables(LaidOutVariable):
    """The slice variables of an mtf Variable.

    Only they store the value, unless the master is in use.

    Attributes:
      mesh_impl: a MeshImpl with a device for each processor.
      owner: for each processor, the number of the processor that stores its slice.
      slices: the slice variables, by the number of the processor that stores them.
    """

    # The values at the beginning of the step, by the number of the processor that stores them.
    _reads: dict[int, tf.Tensor]

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
        # A master that is the slice would be read by way of itself.
        self._is_bound = not self.slice_is_master and bind_masters(self, variable)

    @property
    def slice_is_master(self) -> bool:
        """Whether there is only one slice, which is the master itself."""
        return False

    @property
    def slice_variables(self) -> list[tf.Variable]:
        """The tf variables, one for each slice that is stored."""
        return list(self.slices.values())

    def _may_be_master(self) -> bool:
        """Returns whether the master has the form of a slice that is the whole value."""
        variable = self._variable
        return (
            variable.store is None
            and not variable.is_stacked
            and variable.slice_dtype == variable.master_dtype
            # Another Lowering may have bound it to slices, which then have the value.
            and not any(master.is_bound for master in variable.masters)
        )

    def _new_slice(self, number: int, sizes: Sequence[int]) -> tf.Variable:
        """Creates the tf variable of one slice on the device in force, without a value."""
        return tf.get_variable(
            f"{self._variable.name}_slice_{number}",
            sizes,
            dtype=self._variable.slice_dtype,
            initializer=tf.zeros_initializer(),
            # In no collection, where savers and initializers find the master instead.
            collections=[],
            use_resource=True,
        )

    # -- reading and assigning

    def _spread(self, values: dict[int, Any]) -> Any:
        return self.mesh_impl.LaidOutTensor([values[owner] for owner in self.owner])

    @property
    def laid_out_tensor(self) -> Any:
        """A LaidOutTensor of the values at the beginning of the step."""
        return self._spread(self._reads)

    def read(self) -> Any:
        """Returns a LaidOutTensor of the values at this point of the program."""
        return self._spread(self._read_slices())

    def _read_slices(self) -> dict[int, tf.Tensor]:
        """Returns the values of slice variables, each read where it is."""
        values = {}
        for pnum, v in self.slices.items():
            with tf.device(v.device):
                values[pnum] = v.read_value()
        return values

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
        # In eager code an assignment is done at once, and what it returns may be None.
        made = [a for a in assignments if a is not None]
        return made[0] if len(made) == 1 else tf.group(made)

    # -- stacked variables

    def has_room(self, pnum: int) -> tf.Operation:
        """Returns a tf.Operation that sets a slice to zeros if it is not initialized."""
        # One for all parts of a stack: another could set zeros after a part has been restored.
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
        # By the values, since tf.train.init_from_checkpoint sets others later.
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

    def _slices_to_master_op(self) -> tf.Operation:
        variable = self._variable
        # Read where they are and joined where the master is, so that each value travels once.
        values = self._read_slices()
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
        # Else the only place of the value would be assigned to itself.
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
        return self._copy(
            "copy_master_to_slices", lambda: self._set_slices(self._variable.read_master())
        )

    @property
    def copy_slices_to_master(self) -> tf.Operation:
        """A tf.Operation that copies the slices to the master."""
        return self._copy("copy_slices_to_master", self._slices_to_master_op)

"""Where the value of a variable is: its master, its slices, and the pieces that savers know.

A master is the whole value, as TensorFlow's savers and initializers know it. The slices are what
processors read and assign. A Lowering binds the master to the slices: then they alone are stored,
and the master is a view of them.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import numpy.typing as npt
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec

from mesh_tensorflow._mesh.devices import host_cpu
from mesh_tensorflow._mesh.mesh_impl import LaidOutTensor, MeshImpl
from mesh_tensorflow._mesh.slice_functions import cut_to, in_own_memory, padded
from mesh_tensorflow._mesh.variables.checkpoint_files import (
    ShardedVariable,
    is_read_in_slices,
    slice_spec,
)

if TYPE_CHECKING:
    from mesh_tensorflow._core.shape import Shape
    from mesh_tensorflow.ops._variable import Variable


# -- where the value is: pieces, storages, and what saves them


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of the whole value.

    Attributes:
      begin: the index of its first element along each dimension.
      sizes: its shape.
      device: the device that reads it.
      read: returns its value, a tf.Tensor of the master's dtype.
      assign: assigns such a tf.Tensor to it and to every copy of it; returns a tf.Operation.
      apart: for a whole value of which several processes have parts, how they save it; or None.
    """

    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    device: str
    read: Callable[[], tf.Tensor]
    assign: Callable[[tf.Tensor], tf.Operation]
    apart: Optional[ShardedVariable] = None

    def without_padding(self, whole: Sequence[int]) -> Optional[Piece]:
        """Returns what is in the whole of a slice that may reach beyond its end.

        Args:
          whole: the shape of the whole.

        Returns:
          A Piece; None if the slice is nothing but padding.
        """
        inside = tuple(
            max(0, min(n, size - b)) for b, n, size in zip(self.begin, self.sizes, whole)
        )
        if inside == self.sizes:
            return self
        if 0 in inside:
            return None

        def assign_padded(value: tf.Tensor) -> tf.Operation:
            for axis, (n, part) in enumerate(zip(self.sizes, inside)):
                value = padded(value, axis, n - part)
            return self.assign(value)

        return dataclasses.replace(
            self, sizes=inside, read=lambda: cut_to(self.read(), inside), assign=assign_padded
        )

    def slice_spec(self, whole: Sequence[int]) -> str:
        """Returns the slice in the notation of checkpoints; "" for the whole tensor.

        Args:
          whole: the shape of the whole tensor.
        """
        return slice_spec(whole, self.begin, self.sizes)


class VariableStorage(abc.ABC):
    """Stores the whole value of a variable in one or more pieces."""

    @abc.abstractmethod
    def pieces(self) -> list[Piece]:
        """Returns the pieces, which cover the whole value and do not overlap."""

    @abc.abstractmethod
    def read(self) -> tf.Tensor:
        """Returns the whole value."""

    @abc.abstractmethod
    def assign(self, value: tf.Tensor) -> tf.Operation:
        """Returns a tf.Operation that assigns a whole value to the pieces."""

    def initializer(self, value: tf.Tensor) -> tf.Operation:
        """Returns a tf.Operation that initializes all pieces with a whole value."""
        return self.assign(value)

    @abc.abstractmethod
    def is_initialized(self) -> tf.Tensor:
        """Returns whether all pieces are initialized, a bool tf.Tensor."""

    def pieces_by_process(self) -> list[list[Piece]]:
        """Returns the pieces grouped by process."""
        groups: dict[tuple, list[Piece]] = {}
        for piece in self.pieces():
            device = tf.DeviceSpec.from_string(piece.device or "")
            # A saver opens files in the process of the pieces, which then need not travel.
            groups.setdefault((device.job, device.replica, device.task), []).append(piece)
        return list(groups.values())


class WholeStorage(VariableStorage):
    """Stores the whole value in one tf variable."""

    def __init__(self, tf_variable: tf.Variable):
        """Creates a WholeStorage of a resource variable."""
        self._v = tf_variable

    def pieces(self) -> list[Piece]:
        """Returns the whole variable as its only piece."""
        sizes = tuple(self._v.shape.as_list())
        return [Piece((0,) * len(sizes), sizes, self._v.device, self.read, self.assign)]

    def read(self) -> tf.Tensor:
        """Reads the variable on its own device."""
        with tf.device(self._v.device):
            return self._v.read_value()

    def assign(self, value: tf.Tensor) -> tf.Operation:
        """Assigns the variable on its own device."""
        with tf.device(self._v.device):
            return self._v.assign(value, read_value=False)

    def initializer(self, value: tf.Tensor) -> tf.Operation:
        """Returns the variable's own initializer."""
        return self._v.initializer

    def is_initialized(self) -> tf.Tensor:
        """Returns whether the variable has a value."""
        return self._v.is_initialized()


class StorageInSlices(VariableStorage):
    """Stores a value in slices, each of them in one or more tf variables."""

    def __init__(self, whole: Sequence[int], dtype: tf.DType):
        """Creates a StorageInSlices.

        Args:
          whole: the shape of the value.
          dtype: its dtype in files, whatever the slices are kept in.
        """
        self._whole, self._dtype = whole, dtype

    @abc.abstractmethod
    def holders(self) -> tuple[Sequence[int], Mapping[tuple[int, ...], Sequence[tf.Variable]]]:
        """Returns the shape of a slice, and the tf variables that hold each, by where it begins."""

    def pieces(self) -> list[Piece]:
        """Returns one piece for each distinct slice, with all its copies."""
        sizes, holders = self.holders()
        # What is past the end has no place in files, and gets what the first slice does.
        past = [
            v
            for begin, vs in holders.items()
            if any(b >= n > 0 for b, n in zip(begin, self._whole))
            for v in vs
        ]
        slices = [
            Piece(
                begin,
                tuple(sizes),
                vs[0].device,
                functools.partial(self._read, vs[0]),
                functools.partial(self._assign_all, [*vs, *(() if any(begin) else past)]),
                self._apart(vs[0]),
            )
            for begin, vs in holders.items()
        ]
        pieces = [piece.without_padding(self._whole) for piece in slices]
        return [piece for piece in pieces if piece is not None]

    def _apart(self, v: tf.Variable) -> Optional[ShardedVariable]:
        """Returns how several processes save a slice; None if it is a variable of TensorFlow."""
        del v
        return None

    def _read(self, v: tf.Variable) -> tf.Tensor:
        with tf.device(v.device):
            return tf.cast(self._value(v), self._dtype)

    def _assign(self, v: tf.Variable, value: tf.Tensor) -> tf.Operation:
        with tf.device(v.device):
            return self._assigned(v, tf.cast(value, v.dtype))

    def _assign_all(self, vs: Sequence[tf.Variable], value: tf.Tensor) -> tf.Operation:
        # Every copy gets the value, as readers take any of them for it.
        assignments = [self._assign(v, value) for v in vs]
        # In eager code an assignment is done at once, and what it returns is None.
        return tf.group([op for op in assignments if op is not None])

    def _value(self, v: tf.Variable) -> tf.Tensor:
        """Returns the value of a slice, on its device."""
        return v.read_value()

    def _assigned(self, v: tf.Variable, value: tf.Tensor) -> tf.Operation:
        """Assigns a value of a slice, on its device."""
        return v.assign(value, read_value=False)


class PieceSaveable(SaveableObject):
    """Saves and restores the pieces of a variable in one process.

    The pieces are saved as slices of one tensor, which readers see as a whole, and restored in
    whatever slices are needed.

    Attributes:
      apart: for a variable of which several processes have parts, how they save it; or None. The
        savers of this package use it, and those of TensorFlow read and assign the whole value.
    """

    def __init__(self, master: WholeVariable, pieces: Sequence[Piece], saved_name: str, name: str):
        """Creates a PieceSaveable.

        Args:
          master: the variable of the pieces.
          pieces: the Pieces in one process.
          saved_name: the name of the whole tensor in the checkpoint.
          name: a unique name of the saveable.
        """
        self._pieces = pieces
        # A variable that is apart is a single piece here: its parts are in other processes.
        self.apart = pieces[0].apart
        self._saved_name = saved_name
        self._whole = tuple(master.shape.as_list())
        saved = [(_reader(piece), piece.slice_spec(self._whole)) for piece in pieces]
        if not is_read_in_slices(master.dtype):
            saved = [(master.read_value, "")]
        specs = [
            SaveSpec(read, spec, saved_name, dtype=master.dtype, device=pieces[0].device)
            for read, spec in saved
        ]
        super().__init__(None, specs, name)

    def restore(
        self,
        restored_tensors: Sequence[tf.Tensor],
        restored_shapes: Optional[Sequence[tf.Tensor]],
    ) -> tf.Operation:
        """Returns a tf.Operation that assigns restored tensors to the pieces.

        Args:
          restored_tensors: one tensor for each piece, of the piece or of the whole value; or one
            tensor of the whole value.
          restored_shapes: unused.
        """
        tensors = list(restored_tensors)
        several = len(self._pieces) > 1
        whole = [len(tensors) == 1 or t.shape == self._whole for t in tensors]
        # A saver that knows nothing of slices restores the whole tensor, once or for each piece.
        if several and all(whole):
            tensors = tensors * len(self._pieces) if len(tensors) == 1 else tensors
            tensors = [
                in_own_memory(tf.slice(t, p.begin, p.sizes), t)
                for t, p in zip(tensors, self._pieces)
            ]
        for tensor, piece in zip(tensors, self._pieces):
            if not tensor.shape.is_compatible_with(piece.sizes):
                raise ValueError(
                    f"variable {self._saved_name!r} has shape {tensor.shape} in the checkpoint and "
                    f"{piece.sizes} in the program. Build the program with the dimensions that it "
                    "was saved with"
                )
            tensor.set_shape(piece.sizes)
        return tf.group([p.assign(tensor) for p, tensor in zip(self._pieces, tensors)])


def _reader(piece: Piece) -> Callable[[], tf.Tensor]:
    """Returns a function that reads a piece on a CPU, where savers need it."""

    def read() -> tf.Tensor:
        value = piece.read()
        with tf.device(host_cpu(piece.device or "")):
            return tf.identity(value)

    return read


# -- the interface of a tf.Variable

# The name under which a tf.Variable, as a Trackable, saves its value.
_VARIABLE_VALUE = "VARIABLE_VALUE"


class WholeVariable(tf2.__internal__.tracking.Trackable, abc.ABC):
    """The whole value of an mtf variable; has the interface of a tf.Variable.

    A subclass defines the storage, and sets the attributes.

    Attributes:
      name: the name of the variable, with ":0".
      device: the device of the variable.
      dtype: the dtype of the variable, also in checkpoints.
      shape: the shape of the variable, a tf.TensorShape.
    """

    name: str
    device: str
    dtype: tf.DType
    shape: tf.TensorShape

    # None, by which savers know that it is no part of a partitioned variable.
    _save_slice_info = None
    # Makes NumPy leave arithmetic with arrays to this class.
    __array_priority__ = 100

    def __init__(self, trainable: bool):
        """Creates a WholeVariable.

        Args:
          trainable: whether optimizers update it.
        """
        self._trainable = trainable

    @abc.abstractmethod
    def _at_storage(self) -> VariableStorage:
        """Returns the storage of the value, which the caller is going to use."""

    # -- properties of a tf.Variable

    @property
    def _shared_name(self) -> str:
        return self.name.partition(":")[0]

    def get_shape(self) -> tf.TensorShape:
        """Returns the shape of the variable."""
        return self.shape

    @property
    def trainable(self) -> bool:
        """Whether optimizers update the variable."""
        return self._trainable

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype.name}>"

    def __hash__(self) -> int:
        return id(self)

    # -- reading and writing

    def read_value(self) -> tf.Tensor:
        """Returns the whole value, a tf.Tensor."""
        return self._at_storage().read()

    def value(self) -> tf.Tensor:
        """Returns the whole value, a tf.Tensor."""
        return self.read_value()

    def is_initialized(self, name: Optional[str] = None) -> tf.Tensor:
        """Returns whether the variable is initialized, a bool tf.Tensor."""
        return tf.identity(self._at_storage().is_initialized(), name=name)

    def assign(
        self,
        value: npt.ArrayLike,
        use_locking: Optional[bool] = None,
        name: Optional[str] = None,
        read_value: bool = True,
    ) -> Any:
        """Assigns the whole value.

        Args:
          value: a tf.Tensor of the shape and dtype of the variable, or what converts to one.
          use_locking: ignored.
          name: a name for the operation.
          read_value: whether to return the new value instead of the tf.Operation.

        Returns:
          A tf.Tensor, or a tf.Operation if not `read_value`.
        """
        storage = self._at_storage()
        value = tf.convert_to_tensor(value, self.dtype)
        with tf.name_scope(name or "assign"):
            done = storage.assign(value)
            if not read_value:
                return done
            # A new read, as one that was made earlier could come before the assignment.
            with tf.control_dependencies([done]):
                return storage.read()

    def assign_add(
        self,
        delta: npt.ArrayLike,
        use_locking: Optional[bool] = None,
        name: Optional[str] = None,
        read_value: bool = True,
    ) -> Any:
        """Adds to the whole value; see `assign`."""
        delta = tf.convert_to_tensor(delta, self.dtype)
        return self.assign(self.read_value() + delta, use_locking, name, read_value)

    def assign_sub(
        self,
        delta: npt.ArrayLike,
        use_locking: Optional[bool] = None,
        name: Optional[str] = None,
        read_value: bool = True,
    ) -> Any:
        """Subtracts from the whole value; see `assign`."""
        delta = tf.convert_to_tensor(delta, self.dtype)
        return self.assign(self.read_value() - delta, use_locking, name, read_value)

    # -- checkpoints

    def _gather_saveables_for_checkpoint(self) -> dict[str, Callable]:
        """Returns functions that create the saveables, one for each process that has slices."""
        storage = self._at_storage()
        in_slices = is_read_in_slices(self.dtype)
        pieces = storage.pieces_by_process() if in_slices else [storage.pieces()]

        def factory(process: int, name: Optional[str] = None) -> PieceSaveable:
            # TensorFlow adds further processes' keys to the name. In the file all are parts of one
            # tensor, which has the name without them.
            suffix = f"_{_key(process)}" if process else ""
            saved = (name or self._shared_name + suffix).removesuffix(suffix)
            return PieceSaveable(self, pieces[process], self._name_in_file(saved), saved + suffix)

        return {
            _key(process): functools.partial(factory, process) for process in range(len(pieces))
        }

    def _name_in_file(self, given: str) -> str:
        """Returns the name of the whole tensor in a checkpoint, for the name that a saver gives."""
        return given


def _key(process: int) -> str:
    return f"process_{process}" if process else _VARIABLE_VALUE


def add_operators(cls: type, value_of: Callable[[Any], tf.Tensor]) -> None:
    """Adds the operators of tf.Tensors to a class of variables.

    Args:
      cls: the class.
      value_of: returns what an operator of a variable computes with.
    """

    def operator(name: str) -> Callable:
        return lambda self, *args: getattr(value_of(self), name)(*args)

    # Set in the class, where Python looks operators up: `__getattr__` is not asked for them.
    # == and != compare identity, as collections need.
    for name in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:
        setattr(cls, name, operator(name))


# By the method of the instance, which subclasses replace.
add_operators(WholeVariable, lambda variable: variable.read_value())


def _convert(
    whole: WholeVariable,
    dtype: Optional[tf.DType] = None,
    name: Optional[str] = None,
    as_ref: bool = False,
) -> Any:
    del as_ref  # resource variables have no references
    if dtype is not None and not dtype.is_compatible_with(whole.dtype):
        return NotImplemented
    return tf.identity(whole.read_value(), name=name)


tf.register_tensor_conversion_function(WholeVariable, _convert)


# -- the masters of a graph


class MasterVariable(WholeVariable):
    """The whole value of an mtf variable; stands for a tf.Variable in TensorFlow's collections.

    Initializers, savers, reads and assignments use it through the collections. Before the first
    Lowering, the value is in a tf variable. If nothing in the graph uses that tf variable yet, the
    Lowering binds the MasterVariable to the slices: from then on it reads, assigns, saves and
    restores the slices, and the tf variable takes no memory. Otherwise the tf variable stays next
    to the slices, and values are copied between them.

    Attributes:
      by_parts: what assigns parts of the initial value, by the device of a part, if
        `begin_by_parts` has set it.
    """

    op: tf.Operation
    graph: tf.Graph
    _in_graph_mode = True
    _should_act_as_resource_variable = True  # checked by tf.train.init_from_checkpoint

    def __init__(self, tf_variable: tf.Variable, trainable: bool):
        """Creates a MasterVariable.

        Args:
          tf_variable: a resource variable.
          trainable: whether optimizers update it.
        """
        super().__init__(trainable)
        self._tf_variable = tf_variable
        for name in ("name", "op", "graph", "device", "dtype", "shape"):
            setattr(self, name, getattr(tf_variable, name))
        # Kept here too: slices are initialized from it once the tf variable is out of use.
        self._initial: Any = tf_variable.initial_value
        self._storage: VariableStorage = WholeStorage(tf_variable)
        self._in_use = False
        self.by_parts: Mapping[str, tf.Operation] = {}

    # -- where the value is stored

    @property
    def in_use(self) -> bool:
        """Whether the graph uses the tf variable, so that it must stay next to the slices."""
        return self._in_use

    @property
    def is_bound(self) -> bool:
        """Whether only the slices store the value."""
        return not isinstance(self._storage, WholeStorage)

    def keep(self) -> None:
        """Keeps the tf variable next to the slices of a Lowering."""
        self._in_use = True

    def bind(self, storage: VariableStorage) -> None:
        """Makes slices the only storage of the value.

        Args:
          storage: the storage in slices.
        """
        # What uses the tf variable already would go on to do so, and miss what the slices get.
        assert not self._in_use and not self.is_bound
        self._storage = storage

    @property
    def tf_variable(self) -> tf.Variable:
        """The tf variable of the whole value, for a Lowering that computes with it."""
        self._in_use = True
        return self._tf_variable

    def _at_storage(self) -> VariableStorage:
        # Whoever asks makes operations of it, for which a later Lowering must leave it in place.
        if not self.is_bound:
            self._in_use = True
        return self._storage

    # -- properties of a tf.Variable

    @property
    def _shared_name(self) -> str:
        return self.op.name

    def __getattr__(self, name: str) -> Any:
        # While a copy is made, __init__ has not run, and to look for the attribute would recurse.
        if name.startswith("__") or "_tf_variable" not in self.__dict__:
            raise AttributeError(name)
        if self.is_bound:
            raise AttributeError(
                f"variable {self.op.name!r} is kept in slices, which have no {name!r}. Make the "
                "Lowering with keep_masters=True to have a tf variable of the whole value too"
            )
        self._in_use = True
        return getattr(self._tf_variable, name)

    # -- initial value; tf.train.init_from_checkpoint sets the two private properties

    @property
    def initial_value(self) -> Any:
        """The initial value, a tf.Tensor of the shape of the variable."""
        return self._initial

    @property
    def _initial_value(self) -> Any:
        return self._initial

    @_initial_value.setter
    def _initial_value(self, value: tf.Tensor) -> None:
        self._initial, self.by_parts = value, {}
        if not self.is_bound:
            self._in_use = True
            self._tf_variable._initial_value = value

    @property
    def _initializer_op(self) -> tf.Operation:
        return self.initializer

    @_initializer_op.setter
    def _initializer_op(self, op: tf.Operation) -> None:
        # Slices are initialized from the initial value, which TensorFlow sets as well.
        if not self.is_bound:
            self._in_use = True
            self._tf_variable._initializer_op = op

    @property
    def initializer(self) -> tf.Operation:
        """A tf.Operation that assigns the initial value."""
        if self.by_parts:
            return tf.group(*self.by_parts.values())
        return self._at_storage().initializer(self._initial)

    def begin_by_parts(self, value: tf.Tensor, by_parts: Mapping[str, tf.Operation]) -> None:
        """Gives it an initial value that is assigned part by part.

        Args:
          value: the whole of it.
          by_parts: the operations that assign the parts, by the device of each part.
        """
        self._initial_value = value
        self._initializer_op = tf.group(*by_parts.values())
        self.by_parts = by_parts if self.is_bound else {}

    def initialized_value(self) -> tf.Tensor:
        """Returns the value, or the initial value if the variable is not initialized."""
        return tf.cond(self.is_initialized(), self.read_value, lambda: self._initial)

    # -- in a session

    # Graphs look for this method, by which a session can fetch the variable itself.
    def _as_graph_element(self) -> tf.Tensor:
        return self.read_value()

    def eval(self, session: Optional[tf.Session] = None) -> np.ndarray:
        """Returns the whole value as a NumPy array.

        Args:
          session: the default session if None.
        """
        return self.read_value().eval(session=session)

    def load(self, value: npt.ArrayLike, session: Optional[tf.Session] = None) -> None:
        """Assigns the whole value in a session.

        Args:
          value: an array of the shape of the variable.
          session: the default session if None.
        """
        _load(self, value, session)

    def to_proto(self, export_scope: Optional[str] = None) -> Any:
        """Returns a VariableDef; None if the value is in slices."""
        # TensorFlow leaves out of a MetaGraph what has no proto; the slices are not one variable.
        return None if self.is_bound else self._tf_variable.to_proto(export_scope)


def _load(variable: Any, value: npt.ArrayLike, session: Optional[tf.Session] = None) -> None:
    # `load` may be called anywhere, and must not wait for what is being built there.
    with variable.graph.as_default(), tf.control_dependencies(None):
        fed = tf.placeholder(variable.dtype, variable.shape)
        done = variable.assign(fed, read_value=False)
    (session or tf.get_default_session()).run(done, {fed: value})


def make_master(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> MasterVariable:
    """Creates a MasterVariable; a variable creator for tf.variable_creator_scope.

    Args:
      next_creator: creates the tf variable.
      **kwargs: the arguments that TensorFlow passes to variable creators.
    """
    collections = kwargs.pop("collections", None) or [tf.GraphKeys.GLOBAL_VARIABLES]
    trainable = kwargs.pop("trainable", None)
    trainable = True if trainable is None else trainable
    # Not in the collections itself: savers and initializers shall find the master in its place.
    tf_variable = next_creator(collections=[], trainable=False, **kwargs)
    master = MasterVariable(tf_variable, trainable)
    if trainable and tf.GraphKeys.TRAINABLE_VARIABLES not in collections:
        collections = [*collections, tf.GraphKeys.TRAINABLE_VARIABLES]
    tf.add_to_collections(collections, master)
    return master


# -- slices


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


class SliceStorage(StorageInSlices):
    """The slices of one variable, or of one part of a stacked variable."""

    def __init__(self, placed: SliceVariables, variable: Variable, index: Optional[int] = None):
        """Creates a SliceStorage.

        Args:
          placed: the slices.
          variable: the Variable whose value is stored.
          index: the index of the variable in a stacked variable; None if it is not stacked.
        """
        impl, shape = placed.mesh_impl, variable.stored_shape
        super().__init__(shape.to_integer_list, variable.master_dtype)
        self._placed = placed
        self._variable = variable
        self._index = index
        self._sizes = impl.slice_shape(shape)
        # By where a slice begins, the processors that store it.
        stored = set(placed.slices)
        self._owners = {
            begin: [pnum for pnum in pnums if pnum in stored]
            for begin, pnums in impl.holders(shape).items()
        }
        # With the values, so that their ids are not reused.
        self._initializers: dict[int, tuple[tf.Tensor, tf.Operation]] = {}

    def holders(self) -> tuple[list[int], dict[tuple[int, ...], list[tf.Variable]]]:
        """Returns the shape of a slice, and the variables that hold each; see the base class."""
        slices = self._placed.slices
        slices_by_begin = {
            begin: [slices[p] for p in pnums] for begin, pnums in self._owners.items()
        }
        return self._sizes, slices_by_begin

    def _apart(self, v: tf.Variable) -> Optional[ShardedVariable]:
        apart = getattr(v, "apart", None)
        return None if apart is None or self._index is not None else apart(self._dtype)

    def _value(self, v: tf.Variable) -> tf.Tensor:
        return super()._value(v) if self._index is None else v[self._index]

    def _assigned(self, v: tf.Variable, value: tf.Tensor) -> tf.Operation:
        if self._index is None:
            return super()._assigned(v, value)
        # A scatter into a stack that has no value yet would fail: restoring may come before
        # initializing.
        with tf.control_dependencies([self._placed.has_room(v)]):
            return tf.raw_ops.ResourceScatterUpdate(
                resource=v.handle, indices=self._index, updates=value
            )

    def read(self) -> tf.Tensor:
        """Returns the whole value, put together from one copy of each slice."""
        placed, variable = self._placed, self._variable
        values = {pnum: self._read(v) for pnum, v in placed.slices.items()}
        return placed.mesh_impl.combine_slices(
            [values[owner] for owner in placed.owner], variable.stored_shape, variable.master_device
        )

    def assign(self, value: tf.Tensor) -> tf.Operation:
        """Cuts a whole value and assigns each piece to all copies of its slice."""
        with tf.device(self._variable.master_device):
            pieces = self._placed.mesh_impl.make_slices(value, self._variable.stored_shape)
            values = {pnum: in_own_memory(pieces[pnum], value) for pnum in self._placed.slices}
        return tf.group([self._assign(v, values[pnum]) for pnum, v in self._placed.slices.items()])

    def initializer(self, value: tf.Tensor) -> tf.Operation:
        """Returns the operation that assigns an initial value; one for each value."""
        if self._index is not None:
            return self._placed.initializer()
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


class ValueOfVariable(LaidOutTensor):
    """The value of a variable as `lowering.variables` gives it to a user.

    Its `all_slices` are variables of TensorFlow, which have a device and an initializer, and can be
    assigned to in a session. What computes with it gets `tensor_list`.
    """

    def __init__(self, value: LaidOutTensor, placed: SliceVariables):
        """Creates a ValueOfVariable.

        Args:
          value: the value at the beginning of the step.
          placed: the slices.
        """
        super().__init__(value.tensor_list)
        self._value = value
        self._placed = placed

    @property
    def all_slices(self) -> list[tf.Variable]:
        """The slice variable of each processor."""
        return self._placed.initialized_slices()

    def of_shape(self, tensor_shape: Shape) -> LaidOutTensor:
        """Returns the value with the Shape of the whole tensor."""
        return self._value.of_shape(tensor_shape)

    def to_laid_out_tensor(self) -> LaidOutTensor:  # type: ignore[override]
        """Returns the value."""
        return self._value


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
        self._initializers: dict[tuple[int, ...], tuple[list, tf.Operation]] = {}
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

    def initializer(self) -> tf.Operation:
        """Returns a tf.Operation that gives the initial value to all slices."""
        variable = self._variable
        if self._is_bound and not variable.is_stacked:
            return variable.masters[0].initializer
        values = [part.get_master().initial_value for part in variable.parts]
        # By the values, since tf.train.init_from_checkpoint sets others later.
        key = tuple(map(id, values))
        if key not in self._initializers:
            with tf.control_dependencies(None), tf.name_scope(f"init/{variable.name}"):
                whole = tf.stack(values) if variable.is_stacked else values[0]
                self._initializers[key] = values, self._set_slices(whole)
        return self._initializers[key][1]

    def initialized_slices(self) -> list[tf.Variable]:
        """Returns the slice variable of each processor; its `initializer` is that of them all."""
        if self._variable.store is None and not self.slice_is_master:
            initializer = self.initializer()
            for v in self.slices.values():
                # TensorFlow made it with zeros, by which a program would begin with other weights.
                v._initializer_op = initializer
                # TensorFlow's own feeds the value of the initializer that it made.
                v.load = functools.partial(_load, v)
        return [self.slices[owner] for owner in self.owner]

    # -- reading and assigning

    def _spread(self, values: dict[int, Any]) -> Any:
        return self.mesh_impl.LaidOutTensor([values[owner] for owner in self.owner])

    @property
    def laid_out_tensor(self) -> Any:
        """The values at the beginning of the step, a ValueOfVariable."""
        return ValueOfVariable(self._spread(self._reads), self)

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
        operations = [a for a in assignments if a is not None]
        return operations[0] if len(operations) == 1 else tf.group(operations)

    # -- stacked variables

    def has_room(self, v: tf.Variable) -> tf.Operation:
        """Returns a tf.Operation that sets a slice to zeros if it is not initialized."""
        # One for all parts of a stack: another could set zeros after a part has been restored.
        if id(v) not in self._room:
            with tf.device(v.device), tf.control_dependencies(None):
                self._room[id(v)] = tf.cond(
                    v.is_initialized(),
                    tf.no_op,
                    lambda: v.assign(tf.zeros(v.shape, v.dtype), read_value=False),
                ).op
        return self._room[id(v)]

    # -- copies between slices and a separate master

    def _set_slices(self, whole: tf.Tensor) -> tf.Operation:
        """Returns a tf.Operation that assigns a whole value to the slices."""
        with tf.device(self._variable.master_device):
            whole = tf.cast(whole, self._variable.slice_dtype)
            pieces = self.mesh_impl.make_slices(whole, self._variable.stored_shape)
            # A piece is a view of the whole, which a variable would hold in memory as long as it
            # has it.
            values = {pnum: in_own_memory(pieces[pnum], whole) for pnum in self.slices}
        return tf.group(
            [v.assign(values[pnum], read_value=False) for pnum, v in self.slices.items()]
        )

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

"""The whole value of a variable, as TensorFlow's savers know it, wherever it is stored."""

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

from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.devices import host_cpu
from mesh_tensorflow._mesh.slice_functions import cut_to, in_own_memory, padded
from mesh_tensorflow._mesh.variables.checkpoint_files import ShardedVariable, slice_spec

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.variables.store import VariableStore


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
        specs = [
            SaveSpec(
                _reader(piece),
                piece.slice_spec(self._whole),
                saved_name,
                dtype=master.dtype,
                device=pieces[0].device,
            )
            for piece in pieces
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
        pieces = self._at_storage().pieces_by_process()

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


def _operator(name: str) -> Callable:
    def apply(self: WholeVariable, *args: object) -> Any:
        return getattr(self.read_value(), name)(*args)

    return apply


# Set in the class, where Python looks operators up: `__getattr__` is not asked for them.
# == and != compare identity, as collections need.
for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:
    setattr(WholeVariable, _name, _operator(_name))


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


# -- the masters: of a VariableStore, and of a graph


class _InStore(VariableStorage):
    """The current slices in a store; another Lowering may change their layout."""

    def __init__(self, store: VariableStore, name: str, sizes: Sequence[int], dtype: tf.DType):
        self._store, self._name, self._sizes, self._dtype = store, name, sizes, dtype

    def pieces(self) -> list[Piece]:
        sizes, holders = self._store.parts(self._name)
        slices = [
            Piece(
                begin,
                tuple(sizes),
                holders[begin][0].device,
                # Bound as defaults: closures would all find the variables of the last piece.
                lambda v=vs[0]: self._read(v),
                lambda value, vs=tuple(vs): self._assign(vs, value),
            )
            for begin, vs in holders.items()
        ]
        pieces = [piece.without_padding(self._sizes) for piece in slices]
        return [piece for piece in pieces if piece is not None]

    def _read(self, v: tf.Variable) -> tf.Tensor:
        with tf.device(v.device):
            return tf.cast(v.read_value(), self._dtype)

    def _assign(self, vs: Sequence[tf.Variable], value: tf.Tensor) -> tf.Operation:
        made = []
        # Every copy gets the value, as readers take any of them for it.
        for v in vs:
            with tf.device(v.device):
                made.append(v.assign(tf.cast(value, v.dtype), read_value=False))
        return tf.group([op for op in made if op is not None])

    def read(self) -> tf.Tensor:
        return tf.cast(self._store.value(self._name), self._dtype)

    def assign(self, value: tf.Tensor) -> tf.Operation:
        value.shape.assert_is_compatible_with(tf.TensorShape(self._sizes))
        made = []
        for piece in self.pieces():
            part = value[tuple(slice(b, b + n) for b, n in zip(piece.begin, piece.sizes))]
            # A view would hold all of the value in memory for as long as the variable has it.
            made.append(piece.assign(in_own_memory(part, value)))
        # In eager code an assignment is done at once, and what it returns is None.
        return tf.group([op for op in made if op is not None])

    def is_initialized(self) -> tf.Tensor:
        # A store makes slices with their values, so there are none without.
        return tf.constant(True)


class StoredMaster(WholeVariable):
    """The whole value of a variable that a VariableStore keeps; for eager code.

    It reads, assigns, saves and restores the slices. In a tf.function the slices exist once a
    Lowering has been created.
    """

    # By this, savers of TensorFlow tell variables of eager code from those of a graph.
    _in_graph_mode = False

    def __init__(
        self, store: VariableStore, name: str, shape: Shape, dtype: tf.DType, trainable: bool
    ):
        """Creates a StoredMaster.

        Args:
          store: the VariableStore that keeps the variable.
          name: the full name of the variable.
          shape: its Shape.
          dtype: its dtype in checkpoints.
          trainable: whether optimizers update it.
        """
        super().__init__(trainable)
        self._variable_name = name
        self.name = f"{name}:0"  # with an output number, as TensorFlow's variables have
        self.dtype = dtype
        self.shape = tf.TensorShape(shape.to_integer_list)
        self._store = store
        self._storage = _InStore(store, name, shape.to_integer_list, dtype)

    def _at_storage(self) -> VariableStorage:
        if self._variable_name not in self._store.names:
            raise ValueError(
                f"variable {self._variable_name!r} has no value yet: in a tf.function the "
                "Lowering makes its slices. Make the Lowering first"
            )
        return self._storage

    @property
    def device(self) -> str:  # type: ignore[override]
        """The device of the first piece."""
        return self._at_storage().pieces()[0].device

    @property
    def initializer(self) -> None:
        """None: the variable is initialized already."""

    def numpy(self) -> np.ndarray:
        """Returns the whole value as a NumPy array; only in eager code."""
        return self.read_value().numpy()

    def __array__(
        self, dtype: Optional[npt.DTypeLike] = None, copy: Optional[bool] = None
    ) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)


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
        # `load` may be called anywhere, and must not wait for what is being built there.
        with self.graph.as_default(), tf.control_dependencies(None):
            fed = tf.placeholder(self.dtype, self.shape)
            done = self.assign(fed, read_value=False)
        (session or tf.get_default_session()).run(done, {fed: value})

    def to_proto(self, export_scope: Optional[str] = None) -> Any:
        """Returns a VariableDef; None if the value is in slices."""
        # TensorFlow leaves out of a MetaGraph what has no proto; the slices are not one variable.
        return None if self.is_bound else self._tf_variable.to_proto(export_scope)


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

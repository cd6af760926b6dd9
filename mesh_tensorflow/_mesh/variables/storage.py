"""Where the value of a variable is, whole or in parts, and its initial value."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import numpy as np
import numpy.typing as npt
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec

from mesh_tensorflow._mesh.random_values import program_seed
from mesh_tensorflow._mesh.slice_functions import in_own_memory
from mesh_tensorflow._mesh.variables.checkpoint_files import ShardedVariable, slice_spec


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
        cpu = tf.DeviceSpec.from_string(piece.device or "").replace(
            device_type="CPU", device_index=0
        )
        with tf.device(cpu.to_string()):
            return tf.identity(value)

    return read


# The name under which a tf.Variable, as a Trackable, saves its value.
_VARIABLE_VALUE = "VARIABLE_VALUE"

_OPERATORS = (
    "__abs__",
    "__add__",
    "__and__",
    "__div__",
    "__floordiv__",
    "__ge__",
    "__getitem__",
    "__gt__",
    "__invert__",
    "__le__",
    "__lt__",
    "__matmul__",
    "__mod__",
    "__mul__",
    "__neg__",
    "__or__",
    "__pow__",
    "__radd__",
    "__rand__",
    "__rdiv__",
    "__rfloordiv__",
    "__rmatmul__",
    "__rmod__",
    "__rmul__",
    "__ror__",
    "__rpow__",
    "__rsub__",
    "__rtruediv__",
    "__rxor__",
    "__sub__",
    "__truediv__",
    "__xor__",
)


class WholeVariable(tf2.__internal__.tracking.Trackable, abc.ABC):
    """The whole value of an mtf variable; has the interface of a tf.Variable.

    A subclass defines the storage, the name, the device, the dtype and the shape.
    """

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
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the variable, with ":0"."""

    @property
    def _shared_name(self) -> str:
        return self.name.partition(":")[0]

    @property
    @abc.abstractmethod
    def device(self) -> str:
        """The device of the variable."""

    @property
    @abc.abstractmethod
    def dtype(self) -> tf.DType:
        """The dtype of the variable, also in checkpoints."""

    @property
    @abc.abstractmethod
    def shape(self) -> tf.TensorShape:
        """The shape of the variable."""

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
            given = (name or self._shared_name + suffix).removesuffix(suffix)
            return PieceSaveable(self, pieces[process], self._name_in_file(given), given + suffix)

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


for _name in _OPERATORS:
    if hasattr(tf.Tensor, _name):  # == and != compare identity, as collections need
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


def seeded_initializer(
    initializer: Optional[Callable[..., Any]], name: str, dtype: tf.DType = tf.float32
) -> Any:
    """Returns an initializer whose values depend only on the program's seed and on `name`.

    The initializer is unchanged if the program has no seed, or if the initializer has one.

    Args:
      initializer: a TensorFlow initializer; TensorFlow's default for the dtype if None.
      name: the full name of the variable.
      dtype: the dtype of the variable; the default for dtypes that are not floating is zeros.

    Returns:
      A TensorFlow initializer, or None for TensorFlow's default.
    """
    if initializer is None and not dtype.is_floating:
        return None
    if program_seed() is None:
        return initializer
    if initializer is None:
        initializer = tf.glorot_uniform_initializer()
    if isinstance(initializer, type):
        initializer = initializer()
    # By name and not by order, so that a variable starts alike if others are added before it. Not
    # Python's hash, which differs from process to process.
    number = zlib.crc32(name.encode()) % 2**31
    if draws_its_seed(initializer):
        seeded: Any = copy.copy(initializer)
        seeded.seed = zlib.crc32(f"{program_seed()}/{number}".encode()) % 2**31
        return seeded
    if getattr(initializer, "seed", 0) is None:
        # TensorFlow's own join this with the program's seed. A copy, as one initializer may be that
        # of several variables.
        seeded = copy.copy(initializer)
        seeded.seed = number
        return seeded
    return initializer


def draws_its_seed(initializer: object) -> bool:
    """Returns whether an initializer drew a seed when it was made, as Keras' do without a seed.

    It makes equal values in each call; what it is compared by, and copied for, is not this seed.

    Args:
      initializer: an initializer, or any other object.
    """
    return getattr(initializer, "_init_seed", 0) is None


def initial_value(
    initializer: Optional[Callable[..., Any]], name: str, sizes: Sequence[int], dtype: tf.DType
) -> tf.Tensor:
    """Returns the initial value of a variable, as tf.get_variable computes it.

    Args:
      initializer: a TensorFlow initializer; TensorFlow's default for the dtype if None.
      name: the full name of the variable.
      sizes: the shape of the variable.
      dtype: the dtype of the variable.

    Returns:
      A tf.Tensor of the shape and dtype of the variable.

    Raises:
      ValueError: the initializer returns a value of another shape or dtype.
    """
    if initializer is None and not dtype.is_floating:
        initializer = tf.zeros_initializer()
    initializer = seeded_initializer(initializer, name) or tf.glorot_uniform_initializer()
    if isinstance(initializer, type):
        initializer = initializer()
    # Functions written for TensorFlow 1 may require this argument, others do not know it.
    further = {"partition_info": None} if _takes_partition_info(initializer) else {}
    return checked_value(initializer(list(sizes), dtype=dtype, **further), name, sizes, dtype)


def checked_value(
    value: Union[tf.Tensor, np.ndarray, None], name: str, sizes: Sequence[int], dtype: tf.DType
) -> tf.Tensor:
    """Converts the result of an initializer to a tf.Tensor and checks its shape and dtype.

    Args:
      value: an array or a tf.Tensor.
      name: the full name of the variable.
      sizes: the shape of the variable.
      dtype: the dtype of the variable.

    Returns:
      A tf.Tensor of the shape and dtype of the variable.

    Raises:
      ValueError: `value` is None, or has another shape or dtype.
    """
    if value is not None and not tf.is_tensor(value):
        value = tf.convert_to_tensor(value, dtype)
    if value is None or value.shape != tf.TensorShape(sizes) or value.dtype != dtype:
        found = "None" if value is None else f"{value.dtype.name} {value.shape}"
        raise ValueError(
            f"the initializer of variable {name!r} returned {found}; it must return the shape and "
            f"dtype that it is called with, {dtype.name} {tf.TensorShape(sizes)}"
        )
    return value


def _takes_partition_info(initializer: Callable[..., Any]) -> bool:
    """Whether an initializer is a function with a required argument `partition_info`."""
    if not inspect.isfunction(initializer):
        return False
    argument = inspect.signature(initializer).parameters.get("partition_info")
    return argument is not None and argument.default is inspect.Parameter.empty

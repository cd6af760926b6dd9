"""WholeVariable: reads, assigns and saves the whole value of an mtf variable."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, Optional

import numpy.typing as npt
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables.storage import PieceSaveable, VariableStorage

__all__ = ["WholeVariable"]

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

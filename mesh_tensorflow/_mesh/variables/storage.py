"""VariableStorage: reads, assigns and saves the pieces of a variable as one whole value."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Optional

import tensorflow.compat.v1 as tf
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec

from mesh_tensorflow._mesh.slices.cutting import in_own_memory
from mesh_tensorflow._mesh.variables.apart import Apart
from mesh_tensorflow._mesh.variables.files import slice_spec

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.variables.whole_variable import WholeVariable

__all__ = ["Piece", "PieceSaveable", "VariableStorage", "WholeStorage"]


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
    apart: Optional[Apart] = None

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

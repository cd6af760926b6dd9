"""Where the slices of a variable are, read and set as one whole value."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec

__all__ = ["Piece", "PieceSaveable", "VariableStorage", "WholeStorage"]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of the whole value.

    Attributes:
      begin: its first index along each dimension.
      sizes: its sizes.
      device: where it is read.
      read: returns it, a tf.Tensor of the master's dtype.
      assign: sets it, and every copy of it, from such a tf.Tensor; returns a tf.Operation.
    """

    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    device: str
    read: Callable[[], tf.Tensor]
    assign: Callable[[tf.Tensor], Any]

    def slice_spec(self, whole: Sequence[int]) -> str:
        """Returns it in the notation of checkpoints; "" if it is the whole."""
        if tuple(whole) == self.sizes:
            return ""
        ranges = ":".join(f"{b},{n}" for b, n in zip(self.begin, self.sizes))
        return " ".join(map(str, whole)) + " " + ranges


class VariableStorage(abc.ABC):
    """The pieces that a whole value consists of."""

    @abc.abstractmethod
    def pieces(self) -> list[Piece]:
        """Returns them; together they are the whole value, and they do not overlap."""

    @abc.abstractmethod
    def read(self) -> tf.Tensor:
        """Returns the whole value."""

    @abc.abstractmethod
    def assign(self, value: tf.Tensor) -> tf.Operation:
        """Returns a tf.Operation that sets all pieces from a whole value."""

    def initializer(self, value: tf.Tensor) -> tf.Operation:
        """Returns a tf.Operation that gives all pieces their first values."""
        return self.assign(value)

    @abc.abstractmethod
    def is_initialized(self) -> tf.Tensor:
        """Returns a tf.Tensor, a bool: whether all pieces have values."""

    def pieces_by_process(self) -> list[list[Piece]]:
        """Returns the pieces in groups, one for each process."""
        groups: dict[tuple, list[Piece]] = {}
        for piece in self.pieces():
            device = tf.DeviceSpec.from_string(piece.device or "")
            groups.setdefault((device.job, device.replica, device.task), []).append(piece)
        return list(groups.values())


class WholeStorage(VariableStorage):
    """One tf variable."""

    def __init__(self, tf_variable: Any):
        """Creates a WholeStorage of a resource variable."""
        self._v = tf_variable

    def pieces(self) -> list[Piece]:
        sizes = tuple(self._v.shape.as_list())
        return [Piece((0,) * len(sizes), sizes, self._v.device, self.read, self.assign)]

    def read(self) -> tf.Tensor:
        with tf.device(self._v.device):
            return self._v.read_value()

    def assign(self, value: tf.Tensor) -> tf.Operation:
        with tf.device(self._v.device):
            return self._v.assign(value, read_value=False)

    def initializer(self, value: tf.Tensor) -> tf.Operation:
        return self._v.initializer

    def is_initialized(self) -> tf.Tensor:
        return self._v.is_initialized()


class PieceSaveable(SaveableObject):
    """The pieces of a variable in one process, as a saver writes and reads them.

    They are written as slices of one tensor, which readers see whole, and read back in whatever
    slices they are wanted.
    """

    def __init__(self, master: Any, pieces: Sequence[Piece], saved_name: str, name: str):
        """Creates a PieceSaveable.

        Args:
          master: the variable that they belong to.
          pieces: Pieces in one process.
          saved_name: the name of the whole tensor in the file.
          name: a name that no other saveable has.
        """
        self._pieces = pieces
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

    def restore(self, restored_tensors: Sequence[tf.Tensor], restored_shapes: Any) -> Any:
        """Returns a tf.Operation that sets the pieces.

        Args:
          restored_tensors: one for each piece, or one tensor of the whole value.
          restored_shapes: unused.
        """
        tensors = list(restored_tensors)
        if len(tensors) == 1 and len(self._pieces) > 1:
            tensors = [tf.slice(tensors[0], p.begin, p.sizes) for p in self._pieces]
        for tensor, piece in zip(tensors, self._pieces):
            tensor.set_shape(piece.sizes)  # a file of another shape is an error, not an assignment
        return tf.group([p.assign(tensor) for p, tensor in zip(self._pieces, tensors)])


def _reader(piece: Piece) -> Callable[[], tf.Tensor]:
    """Returns a function that reads a piece where savers can have it, which is on a CPU."""

    def read() -> tf.Tensor:
        value = piece.read()
        cpu = tf.DeviceSpec.from_string(piece.device or "").replace(
            device_type="CPU", device_index=0
        )
        with tf.device(cpu.to_string()):
            return tf.identity(value)

    return read

"""StoredMaster: the whole value of a variable that a VariableStore keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional

import numpy as np
import numpy.typing as npt
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.variables.storage import Piece, VariableStorage
from mesh_tensorflow._mesh.variables.whole_variable import WholeVariable

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.variables.store import VariableStore

__all__ = ["StoredMaster"]


class _InStore(VariableStorage):
    """The current slices in a store; another Lowering may change their layout."""

    def __init__(self, store: VariableStore, name: str, shape: Shape, dtype: tf.DType):
        self._store = store
        self._name = name
        self._shape = shape
        self._dtype = dtype

    def pieces(self) -> list[Piece]:
        sizes, holders = self._store.parts(self._name)
        return [
            Piece(
                begin,
                tuple(sizes),
                holders[begin][0].device,
                lambda v=vs[0]: self._read(v),
                lambda value, vs=tuple(vs): self._assign(vs, value),
            )
            for begin, vs in holders.items()
        ]

    def _read(self, v: tf.Variable) -> tf.Tensor:
        with tf.device(v.device):
            return tf.cast(v.read_value(), self._dtype)

    def _assign(self, vs: Sequence[tf.Variable], value: tf.Tensor) -> tf.Operation:
        made = []
        for v in vs:
            with tf.device(v.device):
                made.append(v.assign(tf.cast(value, v.dtype), read_value=False))
        return tf.group([op for op in made if op is not None])

    def read(self) -> tf.Tensor:
        return tf.cast(self._store.value(self._name), self._dtype)

    def assign(self, value: tf.Tensor) -> tf.Operation:
        value.shape.assert_is_compatible_with(tf.TensorShape(self._shape.to_integer_list))
        made = [
            piece.assign(value[tuple(slice(b, b + n) for b, n in zip(piece.begin, piece.sizes))])
            for piece in self.pieces()
        ]
        return tf.group([op for op in made if op is not None])

    def is_initialized(self) -> tf.Tensor:
        return tf.constant(True)


class StoredMaster(WholeVariable):
    """The whole value of a variable that a VariableStore keeps; for eager code.

    It reads, assigns, saves and restores the slices. In a tf.function the slices exist once a
    Lowering has been created.
    """

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
        self._shape = shape
        self._dtype = dtype
        self._store = store
        self._storage = _InStore(store, name, shape, dtype)

    def _at_storage(self) -> VariableStorage:
        if self._variable_name not in self._store.names:
            raise ValueError(
                f"variable {self._variable_name!r} has no value yet: in a tf.function the "
                "Lowering makes its slices. Make the Lowering first"
            )
        return self._storage

    @property
    def name(self) -> str:
        """The variable's name, with an output number as TensorFlow's have."""
        return f"{self._variable_name}:0"

    @property
    def device(self) -> str:
        """The device of the first piece."""
        return self._at_storage().pieces()[0].device

    @property
    def dtype(self) -> tf.DType:
        """The dtype in which checkpoints have the variable."""
        return self._dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The static shape of the whole variable."""
        return tf.TensorShape(self._shape.to_integer_list)

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

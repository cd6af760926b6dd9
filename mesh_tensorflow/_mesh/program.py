"""Program: the program that every processor of a SIMD mesh runs, and what its collectives share."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeVar

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.layout import coordinate_of
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.mesh_impl import Reducer
from mesh_tensorflow._mesh.slice_functions import constant

_Entry = TypeVar("_Entry", int, bool, Sequence[int])


def numbering(mesh_shape: Shape, logical_to_physical: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the physical numbers of logical processors, and the logical ones of physical.

    Args:
      mesh_shape: the logical mesh.
      logical_to_physical: the physical number of each logical processor.

    Raises:
      ValueError: `logical_to_physical` is not a permutation.
    """
    given = list(logical_to_physical)
    if sorted(given) != list(range(mesh_shape.size)):
        raise ValueError(
            f"logical_to_physical must have each of 0 to {mesh_shape.size - 1} once, for the mesh "
            f"{dims_text(mesh_shape)}; got {given}"
        )
    l2p = [int(p) for p in given]  # topologies have NumPy integers
    # The inverse permutation: p2l[l2p[l]] = l.
    return l2p, [l2p.index(p) for p in range(mesh_shape.size)]


class ProgramCollectives(Reducer[tf.Tensor]):
    """Collectives along the axes of a mesh, as the processor sees them that runs the program."""

    def __init__(self, mesh_shape: Shape, logical_to_physical: Sequence[int]):
        """Creates collectives.

        Args:
          mesh_shape: the logical mesh.
          logical_to_physical: the physical number of each logical processor.

        Raises:
          ValueError: `logical_to_physical` is not a permutation.
        """
        self._shape = mesh_shape
        self._physical, self._logical = numbering(mesh_shape, logical_to_physical)

    @abc.abstractmethod
    def pnum(self) -> tf.Tensor:
        """Returns the logical number of the processor that runs the program, an int32 scalar."""

    @abc.abstractmethod
    def allgather(self, x: tf.Tensor, mesh_axis: int) -> tf.Tensor:
        """Returns the slices of the processors along a mesh axis, stacked by coordinate."""

    def own(self, table: Sequence[_Entry], dtype: tf.DType = tf.int32) -> tf.Tensor:
        """Returns the entry of the processor that runs the program, of a table.

        Args:
          table: an entry for each logical processor.
          dtype: dtype of the result.
        """
        if all(entry == table[0] for entry in table):
            # One value for all needs no processor's number.
            return constant(table[0], dtype)
        return tf.gather(constant(list(table), dtype), self.pnum())

    def coordinates(self, mesh_axis: int) -> list[int]:
        """Returns the coordinate of each logical processor along a mesh axis."""
        numbers = range(self._shape.size)
        return [coordinate_of(self._shape, pnum, mesh_axis) for pnum in numbers]

    def _by_coordinate(
        self, mesh_axis: int, table: Sequence[_Entry], dtype: tf.DType = tf.int32
    ) -> tf.Tensor:
        """Returns the entry of a table for the processor's coordinate along a mesh axis."""
        return self.own([table[c] for c in self.coordinates(mesh_axis)], dtype)

    def _selected(
        self, x: tf.Tensor, mesh_axis: int, sources: Sequence[Optional[int]]
    ) -> tf.Tensor:
        """Returns the slice of a source, which may have several receivers, from all slices."""
        # Whoever is to have zeros takes any slice, which `_or_zeros` replaces.
        known = [source or 0 for source in sources]
        return tf.gather(self.allgather(x, mesh_axis), self._by_coordinate(mesh_axis, known))

    def _or_zeros(
        self, y: tf.Tensor, mesh_axis: int, sources: Sequence[Optional[int]]
    ) -> tf.Tensor:
        """Returns a received slice; zeros on processors that have no source."""
        if None not in sources:
            return y
        holds = self._by_coordinate(mesh_axis, [s is not None for s in sources], tf.bool)
        # A selection: a product with 0 would keep a NaN of the processor whose slice came.
        return tf.where(holds, y, tf.zeros_like(y))


class Program(abc.ABC):
    """The program of a SimdMeshImpl: where its operations and variables are placed.

    Attributes:
      devices: a device for each processor, by physical number.
      local: physical numbers of the processors that this process runs.
      binds_masters: whether slices may be the only place of a variable's value.
      orders_operations: whether the program supports control dependencies and printing.
      has_infeed: whether the inputs of each step come by the infeed of a TPU; otherwise
        `own_tensor` brings them into the program.
    """

    devices: list[str]
    local: list[int]
    binds_masters: bool
    orders_operations: bool
    has_infeed: bool = False

    @abc.abstractmethod
    def outside(self) -> contextlib.AbstractContextManager:
        """Returns a context in which operations are created outside of the program."""

    @abc.abstractmethod
    def at_beginning(self) -> contextlib.AbstractContextManager:
        """Returns a context for the point of the program where variables are read."""

    @abc.abstractmethod
    def make_slice(
        self, name: str, sizes: Sequence[int], dtype: tf.DType, trainable: bool, host: str
    ) -> tf.Variable:
        """Creates the tf variable of one slice, on the current device, initialized to zeros.

        Args:
          name: the name of the tf variable.
          sizes: the shape of the slice.
          dtype: the dtype of the slice.
          trainable: whether it is added to the trainable variables.
          host: the device of the zeros.

        Returns:
          A tf.Variable.
        """

    @abc.abstractmethod
    def own_variable(self, name: str, slices: Sequence[tf.Variable]) -> Any:
        """Returns one variable that stands, within the program, for each processor's slice.

        Args:
          name: the name of the mtf variable.
          slices: tf variables by physical number; only those of this process are used.

        Returns:
          What has `read_value`, `assign`, `assign_add` and `assign_sub` of a tf.Variable.
        """

    def own_tensor(self, parts: Sequence[Optional[tf.Tensor]]) -> tf.Tensor:
        """Returns one tensor that stands, within the program, for each processor's part.

        Only of a program without infeed.

        Args:
          parts: tf.Tensors created outside of the program, by physical number, all of one shape;
            those of other processes may be None.
        """
        raise NotImplementedError(f"{type(self).__name__} has no own_tensor")

    @abc.abstractmethod
    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a new key for random numbers, the same on all processors.

        Args:
          seed: the seed of the operation, or None.
        """

    @abc.abstractmethod
    def same_everywhere(self, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns a value that is computed once and is the same on all processors.

        Args:
          make: a function that creates the tf.Tensor.
        """

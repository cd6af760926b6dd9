"""Program: the program that every processor of a SIMD mesh runs, while it is traced."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

__all__ = ["Program"]


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

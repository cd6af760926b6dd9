"""Program: one program that every processor of a mesh runs, while it is made."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

__all__ = ["Program"]


class Program(abc.ABC):
    """What SimdMeshImpl asks of a program: where its operations and variables are.

    Attributes:
      devices: a device for each processor, by physical number.
      binds_masters: whether slices may be the only place of a variable's value.
      orders_operations: whether operations can be made to wait for others, and print.
    """

    devices: list[str]
    binds_masters: bool
    orders_operations: bool

    @abc.abstractmethod
    def outside(self) -> contextlib.AbstractContextManager:
        """Makes operations outside of the program."""

    @abc.abstractmethod
    def at_beginning(self) -> contextlib.AbstractContextManager:
        """Makes operations where the program reads its variables."""

    @abc.abstractmethod
    def make_slice(
        self, name: str, sizes: Sequence[int], dtype: tf.DType, trainable: bool, host: str
    ) -> Any:
        """Makes the tf variable of one slice, on the device in force; its value is zeros.

        Args:
          name: a string.
          sizes: its sizes.
          dtype: its dtype.
          trainable: whether it is among the trainable variables.
          host: the device that the zeros are made on.
        """

    @abc.abstractmethod
    def own_variable(self, name: str, slices: Sequence[Any], parts: Sequence[Any]) -> Any:
        """Returns the variable that is each processor's own within the program.

        Args:
          name: a string.
          slices: tf variables by physical number.
          parts: by physical number, which part of the whole it is: equal for equal slices.
        """

    @abc.abstractmethod
    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a new key for random numbers, the same one for all processors."""

    @abc.abstractmethod
    def same_everywhere(self, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns a value that is made once for all processors.

        Args:
          make: a function that makes a tf.Tensor.
        """

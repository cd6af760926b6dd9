"""First values of variables: initializers as TensorFlow calls them, and their seeds."""

from __future__ import annotations

import copy
import inspect
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.slices.random_values import program_seed

__all__ = ["checked_value", "initial_value", "seeded_initializer"]


def seeded_initializer(initializer: Any, name: str, dtype: tf.DType = tf.float32) -> Any:
    """Returns an initializer whose values depend on the program's seed and on `name` alone.

    Only where the program has a seed and the initializer has none of its own.

    Args:
      initializer: a TensorFlow initializer or None.
      name: full name of a variable.
      dtype: its dtype; those that are not floating begin with zeros.
    """
    if initializer is None and not dtype.is_floating:
        return None
    if program_seed() is None:
        return initializer
    if initializer is None:
        initializer = tf.glorot_uniform_initializer()
    if isinstance(initializer, type):
        initializer = initializer()
    if getattr(initializer, "seed", 0) is None:
        initializer = copy.copy(initializer)
        initializer.seed = zlib.crc32(name.encode()) % 2**31
    return initializer


def initial_value(initializer: Any, name: str, sizes: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """Returns the first value of a variable, as tf.get_variable would compute it.

    Args:
      initializer: a TensorFlow initializer; TensorFlow's default for the dtype if None.
      name: full name of the variable.
      sizes: its sizes.
      dtype: its dtype.

    Raises:
      ValueError: the initializer returns a value of another shape or dtype.
    """
    if initializer is None and not dtype.is_floating:
        initializer = tf.zeros_initializer()
    initializer = seeded_initializer(initializer, name) or tf.glorot_uniform_initializer()
    if isinstance(initializer, type):
        initializer = initializer()
    further = {"partition_info": None} if _takes_partition_info(initializer) else {}
    return checked_value(initializer(list(sizes), dtype=dtype, **further), name, sizes, dtype)


def checked_value(value: Any, name: str, sizes: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """Returns the result of an initializer as a tf.Tensor.

    Args:
      value: an array or a tf.Tensor.
      name: full name of the variable.
      sizes: its sizes.
      dtype: its dtype.

    Raises:
      ValueError: it is None, or of another shape or dtype.
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


def _takes_partition_info(initializer: Any) -> bool:
    """Whether it is a function that insists on an argument for partitions of variables."""
    if not inspect.isfunction(initializer):
        return False
    argument = inspect.signature(initializer).parameters.get("partition_info")
    return argument is not None and argument.default is inspect.Parameter.empty

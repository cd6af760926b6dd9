"""Initial values of variables: calls initializers as TensorFlow does, and seeds them."""

from __future__ import annotations

import copy
import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.slices.random_values import program_seed

__all__ = ["checked_value", "initial_value", "seeded_initializer"]


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
    # Keras' initializers without a seed draw one when they are made, and use it alone.
    if getattr(initializer, "_init_seed", 0) is None:
        seeded: Any = copy.copy(initializer)
        seeded.seed = zlib.crc32(f"{program_seed()}/{number}".encode()) % 2**31
        return seeded
    if getattr(initializer, "seed", 0) is None:
        seeded = copy.copy(initializer)
        seeded.seed = number
        return seeded
    return initializer


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

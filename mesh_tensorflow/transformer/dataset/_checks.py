"""Checks of the arguments of functions on data sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

__all__ = [
    "Lengths",
    "MODULE",
    "checked_int32",
    "chosen_keys",
    "feature_specs",
    "length_of",
    "spec_text",
]

# The gin module of the functions of this package.
MODULE = "mesh_tensorflow.transformer.dataset"

Lengths = Union[int, Mapping[str, int]]


def checked_int32(name: str, key: str, ids: tf.Tensor, where: Sequence[Any] = ()) -> tf.Tensor:
    """Returns ids as int32; an error when they are read names one that it does not hold.

    Args:
      name: a string, the name of the calling function.
      key: the name of the feature.
      ids: a tensor of integers.
      where: further parts of the message.
    """
    narrow = tf.cast(ids, tf.int32)
    if ids.dtype in (tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32):
        return narrow
    differs = tf.not_equal(tf.cast(narrow, ids.dtype), ids)
    text = f"{name}: feature {key} has an id that is no int32, as models need:"
    found = tf.boolean_mask(ids, differs)[:1]
    check = tf.Assert(tf.logical_not(tf.reduce_any(differs)), [text, found, *where])
    with tf.control_dependencies([check]):
        return tf.identity(narrow)


def spec_text(spec: tf.TensorSpec) -> str:
    """Returns the shape and dtype of a feature as text."""
    return f"{spec.shape} {spec.dtype.name}"


def feature_specs(name: str, dataset: tf.data.Dataset) -> dict[str, Any]:
    """Returns the specifications of the features of a data set.

    Args:
      name: a string, the name of the calling function.
      dataset: a Dataset of dictionaries.

    Raises:
      ValueError: its elements are not dictionaries.
    """
    specs = tf.data.experimental.get_structure(dataset)
    if not isinstance(specs, Mapping):
        raise ValueError(
            f"{name}: the elements of the data set must be dictionaries of features, and are "
            f"{specs}; supervised_to_dict makes them of pairs"
        )
    return dict(specs)


def chosen_keys(
    name: str, specs: Mapping[str, Any], keys: Optional[Union[str, Iterable[str]]]
) -> list[str]:
    """Returns the names of the features to work on: those given, or all of them.

    Raises:
      ValueError: the data set has no such feature.
    """
    if keys is None:
        return list(specs)
    keys = [keys] if isinstance(keys, str) else list(keys)
    missing = [k for k in keys if k not in specs]
    if missing:
        raise ValueError(
            f"{name}: the data set has no feature {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, specs))}"
        )
    return keys


def length_of(name: str, length: Lengths, key: str) -> int:
    """Returns the length of a feature.

    Raises:
      ValueError: there is none, or it is not a positive integer.
    """
    if isinstance(length, Mapping):
        if key not in length:
            raise ValueError(
                f"{name}: no length for feature {key!r} in {dict(length)}; give one, or name the "
                "features to work on"
            )
        length = length[key]
    if isinstance(length, bool) or not hasattr(length, "__index__") or length < 1:
        raise ValueError(
            f"{name}: the length of {key!r} must be a positive integer, not {length!r}"
        )
    return int(length)

"""Checks of the arguments of functions on data sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

__all__ = ["Lengths", "MODULE", "chosen_keys", "feature_specs", "length_of", "spec_text"]

# The gin module of the functions of this package.
MODULE = "mesh_tensorflow.transformer.dataset"

Lengths = Union[int, Mapping[str, int]]


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

"""Calls of a function once for each device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

__all__ = ["parallel"]


def parallel(devices: Sequence[str], fn: Callable, *args: object, **kwargs: object) -> list[Any]:
    """Calls `fn` once on each device, in variable scopes parallel_0, parallel_1, ...

    Args:
      devices: a list of device strings.
      fn: a function.
      *args: a list with a value for each device, or any other value, passed to all calls.
      **kwargs: likewise.

    Returns:
      A list of the results.

    Raises:
      ValueError: `devices` is not a list, or an argument is a list of another length.
    """
    if not isinstance(devices, list):
        raise ValueError(f"devices must be a list, not {type(devices).__name__}")
    for value in (*args, *kwargs.values()):
        if isinstance(value, list) and len(value) != len(devices):
            raise ValueError(
                f"a list argument must have a value for each of {len(devices)} devices, got "
                f"{len(value)}: {value!r}"
            )

    def pick(value: object, i: int) -> object:
        return value[i] if isinstance(value, list) else value

    results = []
    for i, device in enumerate(devices):
        with tf.variable_scope(f"parallel_{i}"), tf.device(device):
            results.append(
                fn(
                    *[pick(a, i) for a in args],
                    **{key: pick(value, i) for key, value in kwargs.items()},
                )
            )
    return results

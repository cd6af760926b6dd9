"""Takes the parts of an array that this process has, and joins the parts of all processes.

No process can read the whole of an array that is split over the devices of several; the first
process asks the others for their parts, over the connections of `crew.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import numpy as np

__all__ = ["joined", "own_parts"]


def own_parts(array: jax.Array) -> list[tuple[list[int], np.ndarray]]:
    """Returns the first index and the value of each part that this process has; copies once.

    Args:
      array: an array; what is there in several processes counts as that of the first.
    """
    return [
        ([part.start or 0 for part in shard.index], np.asarray(shard.data))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def joined(array: jax.Array, parts: Iterable[tuple[Sequence[int], np.ndarray]]) -> np.ndarray:
    """Returns the whole value of an array.

    Args:
      array: the array.
      parts: the first index and the value of each part, of all processes.
    """
    whole = np.empty(array.shape, array.dtype)
    for begin, value in parts:
        place = tuple(slice(b, b + n) for b, n in zip(begin, value.shape))
        whole[place] = value
    return whole

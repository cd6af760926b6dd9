"""Reducer: the interface of sums, maxima and minima over groups of processors.

Each kind of mesh has its own: `placement/collectives.py`, `simd/collectives.py` and
`tpu/collectives.py`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Generic, TypeVar

__all__ = ["Reducer"]

# What a program has of a tensor: the slice of its processor, or a list with one for each processor.
_Slices = TypeVar("_Slices")


class Reducer(abc.ABC, Generic[_Slices]):
    """Reduces slices over groups of processors; the collective behind `MeshImpl.allreduce`.

    `Reducer[tf.Tensor]` is one processor's view, in a program that every processor runs.
    `Reducer[Sequence[tf.Tensor]]` handles the slices of all processors.
    """

    @abc.abstractmethod
    def allreduce(self, x: _Slices, mesh_axes: Sequence[int], reduction: str) -> _Slices:
        """Reduces over the processors that differ along mesh axes.

        Args:
          x: the slices, all of one shape.
          mesh_axes: the mesh axes to reduce over.
          reduction: "SUM", "MAX" or "MIN".

        Returns:
          Slices of the same shape and dtype, equal for the members of a group.
        """

"""PlacedTensor: the slices of one tensor on a PlacementMeshImpl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from mesh_tensorflow._core.shape import Shape

__all__ = ["PlacedTensor"]


class PlacedTensor:
    """One tf.Tensor for each processor, in order of processor number."""

    def __init__(self, tensor_list: Sequence[Any], tensor_shape: Optional[Shape] = None):
        """Makes one.

        Args:
          tensor_list: a tf.Tensor for each processor.
          tensor_shape: the Shape of the whole, if it is known.
        """
        self._tensor_list = list(tensor_list)
        self.tensor_shape = tensor_shape

    def of_shape(self, tensor_shape: Shape) -> PlacedTensor:
        """Returns the same slices, known to be those of a tensor of a certain Shape."""
        return PlacedTensor(self._tensor_list, tensor_shape)

    def __repr__(self) -> str:
        return f"[{','.join(map(repr, self._tensor_list))}]"

    @classmethod
    def from_tensor_list(cls, tensor_list: Sequence[Any]) -> PlacedTensor:
        """Makes one from a list of tf.Tensors."""
        return cls(tensor_list)

    @property
    def tensor_list(self) -> list[Any]:
        """The slices."""
        return self._tensor_list

    @property
    def all_slices(self) -> list[Any]:
        """The slices."""
        return self._tensor_list

    @property
    def slice_shape(self) -> list[int]:
        """Shape of one slice."""
        return self._tensor_list[0].shape.as_list()

    def to_laid_out_tensor(self) -> PlacedTensor:
        """Returns itself."""
        return self

"""PlacedTensor: the slices of one tensor on a PlacementMeshImpl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.laid_out import LaidOutTensor

__all__ = ["PlacedTensor"]


class PlacedTensor(LaidOutTensor):
    """A tf.Tensor for each processor, in order of processor number.

    Attributes:
      tensor_shape: the Shape of the whole tensor, or None if it is unknown.
    """

    def __init__(self, tensor_list: Sequence[Any], tensor_shape: Optional[Shape] = None):
        """Creates a PlacedTensor.

        Args:
          tensor_list: a tf.Tensor for each processor.
          tensor_shape: the Shape of the whole tensor, or None if it is unknown.
        """
        super().__init__(tensor_list)
        self.tensor_shape = tensor_shape

    def of_shape(self, tensor_shape: Shape) -> PlacedTensor:
        """Returns the same slices with the Shape of the whole tensor."""
        return PlacedTensor(self._tensor_list, tensor_shape)

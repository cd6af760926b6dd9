"""GspmdTensor: the whole value of a tensor on a GspmdMeshImpl."""

from __future__ import annotations

from typing import Any, ClassVar

from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.laid_out import LaidOutTensor

__all__ = ["GspmdTensor"]


class GspmdTensor(LaidOutTensor):
    """A whole value, as the only slice.

    Attributes:
      mesh_impl: the mesh implementation, which annotates values; each one has a subclass.
    """

    mesh_impl: ClassVar[Any] = None

    def of_shape(self, tensor_shape: Shape) -> GspmdTensor:
        """Returns the same value, annotated by the layout of the tensor's Shape."""
        [value] = self._tensor_list
        return type(self)([self.mesh_impl.annotate(value, tensor_shape)])

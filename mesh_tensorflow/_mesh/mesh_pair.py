"""MeshPair: the mesh that was asked for, and the one that a program is executed on."""

from __future__ import annotations

import dataclasses
from typing import Any

from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.laid_out import LaidOutTensor

__all__ = ["MeshPair"]


@dataclasses.dataclass(frozen=True)
class MeshPair:
    """Two mesh implementations for one mesh, mostly one and the same.

    They differ where processors that are one device are executed as one: the executed mesh has
    fewer processors. What is checked, counted and said in errors is by the requested one.

    Attributes:
      requested: the mesh implementation that the user made.
      executed: the one that operations are lowered through.
    """

    requested: Any
    executed: Any

    @classmethod
    def of(cls, requested: Any, may_merge: bool) -> MeshPair:
        """Returns the pair of a mesh implementation.

        Args:
          requested: a MeshImpl, or an object that does what one does.
          may_merge: whether processors may be executed as one.
        """
        executed = getattr(requested, "execution_impl", requested) if may_merge else requested
        return cls(requested, executed)

    @property
    def is_merged(self) -> bool:
        """Whether the executed mesh is another."""
        return self.executed is not self.requested

    def executed_form(self, tensor: Tensor, laid_out: Any) -> Any:
        """Returns a laid-out value with the slices of the executed mesh.

        Args:
          tensor: the Tensor of which it is the value.
          laid_out: a LaidOutTensor of either mesh.
        """
        if not self.is_merged or not isinstance(laid_out, LaidOutTensor):
            return laid_out
        if len(laid_out.all_slices) == self.requested.size:
            laid_out = self.of_requested(tensor, laid_out.all_slices)
        # With its shape it can be cut again for who uses the requested mesh.
        return laid_out.of_shape(tensor.shape)

    def of_requested(self, tensor: Tensor, slices: Any) -> Any:
        """Returns the executed form of slices that the requested mesh has.

        Args:
          tensor: a Tensor.
          slices: a list with a slice for each processor of the requested mesh.
        """
        whole = self.requested.combine_slices(slices, tensor.shape)
        return self.executed.import_tf_tensor(tensor, whole)

    def requested_slices(self, slices: list[Any], tensor_shape: Shape) -> list[Any]:
        """Returns a slice for each processor of the requested mesh.

        Args:
          slices: one for each processor of the executed mesh.
          tensor_shape: the Shape of the whole tensor.
        """
        whole = self.executed.combine_slices(slices, tensor_shape)
        return self.requested.make_slices(whole, tensor_shape)

"""MeshPair: the requested mesh, and the one that a program is executed on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.interfaces import LaidOutLike
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.laid_out import LaidOutTensor

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.mesh_impl import MeshImpl

__all__ = ["HasSlices", "MeshPair", "slices_of"]


class HasSlices(Protocol):
    """What the laid-out values of a mesh implementation from elsewhere have at least."""

    @property
    def tensor_list(self) -> Sequence[tf.Tensor]:
        """The slices."""


def slices_of(laid_out: Union[LaidOutLike, HasSlices]) -> Sequence[tf.Tensor]:
    """Returns the slices of a laid-out value, computed if it is lazy."""
    if hasattr(laid_out, "to_laid_out_tensor"):
        return laid_out.to_laid_out_tensor().all_slices
    return laid_out.tensor_list


@dataclasses.dataclass(frozen=True)
class MeshPair:
    """The requested and the executed mesh implementation of a mesh, usually the same object.

    They differ where processors on one device are merged: the executed mesh has fewer processors.
    Checks, counters and error messages refer to the requested one.

    Attributes:
      requested: the mesh implementation that the user made.
      executed: the one that operations are lowered through.
    """

    requested: MeshImpl
    executed: MeshImpl

    @classmethod
    def of(cls, requested: MeshImpl, may_merge: bool) -> MeshPair:
        """Returns the pair of a mesh implementation.

        Args:
          requested: a MeshImpl, or an object with its methods.
          may_merge: whether processors may be merged.
        """
        merges = may_merge or getattr(requested, "needs_execution_impl", False)
        executed = getattr(requested, "execution_impl", requested) if merges else requested
        return cls(requested, executed)

    @property
    def is_merged(self) -> bool:
        """Whether the executed mesh differs from the requested one."""
        return self.executed is not self.requested

    def executed_form(self, tensor: Tensor, laid_out: LaidOutLike) -> LaidOutLike:
        """Returns a laid-out value with the slices of the executed mesh.

        Args:
          tensor: the Tensor whose value it is.
          laid_out: a LaidOutTensor of either mesh, or a lazy value.
        """
        if not self.is_merged or not isinstance(laid_out, LaidOutTensor):
            return laid_out
        # An operation may set slices of either mesh. Their number tells: a merged mesh has fewer.
        if len(laid_out.all_slices) == self.requested.size:
            laid_out = self.of_requested(tensor, laid_out.all_slices)
        # With its shape it can be cut again for callers that use the requested mesh.
        return laid_out.of_shape(tensor.shape)

    def import_requested(
        self, tensor: Tensor, laid_out: Union[LaidOutLike, HasSlices]
    ) -> Union[LaidOutLike, HasSlices]:
        """Returns a laid-out value of the requested mesh with the slices of the executed mesh.

        Args:
          tensor: the Tensor whose value it is.
          laid_out: a LaidOutTensor, or an object with the attribute `tensor_list`, its slices.
        """
        return self.of_requested(tensor, slices_of(laid_out)) if self.is_merged else laid_out

    def of_requested(self, tensor: Tensor, slices: Sequence[tf.Tensor]) -> LaidOutTensor:
        """Returns a LaidOutTensor of the executed mesh, from slices of the requested mesh.

        Args:
          tensor: the Tensor whose slices they are.
          slices: a slice for each processor of the requested mesh.
        """
        whole = self.requested.combine_slices(slices, tensor.shape)
        return self.executed.import_tf_tensor(tensor, whole)

    def requested_slices(self, slices: Sequence[tf.Tensor], tensor_shape: Shape) -> list[tf.Tensor]:
        """Returns a slice for each processor of the requested mesh.

        Args:
          slices: a slice for each processor of the executed mesh.
          tensor_shape: the Shape of the whole tensor.
        """
        whole = self.executed.combine_slices(slices, tensor_shape)
        return self.requested.make_slices(whole, tensor_shape)

"""LaidOutVariable: what a mesh implementation keeps of a variable."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow.compat.v1 as tf

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.laid_out import LaidOutTensor
    from mesh_tensorflow._mesh.mesh_impl import MeshImpl
    from mesh_tensorflow.ops._variables.variable import Variable

__all__ = ["LaidOutVariable"]


class LaidOutVariable(abc.ABC):
    """The slices of one Variable on a mesh; `MeshImpl.LaidOutVariable` is the class of a mesh.

    A Lowering makes one for each Variable, reads its value from it, and assigns to it. It calls
    the members below and checks no types: a class that has them need not derive from this one.
    """

    @abc.abstractmethod
    def __init__(self, variable: Variable, mesh_impl: MeshImpl):
        """Creates the slices, or finds those that exist.

        Args:
          variable: the Variable.
          mesh_impl: the MeshImpl that lowers it.
        """

    @property
    @abc.abstractmethod
    def laid_out_tensor(self) -> LaidOutTensor:
        """The value at the beginning of the step, of the slice dtype of the Variable."""

    @abc.abstractmethod
    def read(self) -> LaidOutTensor:
        """Reads the value at the point of the program where it is called.

        Returns:
          A LaidOutTensor of the slice dtype of the Variable.
        """

    @abc.abstractmethod
    def assign_to_slices(
        self, assign_fn: Callable[..., Any], values: Sequence[tf.Tensor]
    ) -> tf.Operation:
        """Assigns to the slices, after `laid_out_tensor` has been read.

        Args:
          assign_fn: takes the Variable, a tf variable and a tf.Tensor for it; returns a
            tf.Operation.
          values: the slices of a LaidOutTensor of the Variable's shape.

        Returns:
          A tf.Operation that does all assignments.
        """

    @property
    def needs_copies(self) -> bool:
        """Whether the slices and the master both store the value, so that it must be copied."""
        return True

    @property
    def copy_master_to_slices(self) -> tf.Operation:
        """A tf.Operation that copies the master to the slices; used if `needs_copies`."""
        raise NotImplementedError(f"{type(self).__name__} has no copy_master_to_slices")

    @property
    def copy_slices_to_master(self) -> tf.Operation:
        """A tf.Operation that copies the slices to the master; used if `needs_copies`."""
        raise NotImplementedError(f"{type(self).__name__} has no copy_slices_to_master")

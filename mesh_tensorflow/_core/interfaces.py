"""What laid-out values and placers of variables have, whoever makes them, as typing Protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import tensorflow.compat.v1 as tf

    from mesh_tensorflow._mesh.mesh_impl import LaidOutTensor

__all__ = ["LaidOutLike", "VariablePlacer"]


class VariablePlacer(Protocol):
    """Chooses the devices of variables, as `mtf.utils.BalancedVariablePlacer` does."""

    def device_function(self, var: tf.Operation) -> str:
        """Returns the device of a variable.

        Args:
          var: the tf operation that makes it.
        """


class LaidOutLike(Protocol):
    """A value spread over a mesh: a LaidOutTensor, or a lazy value that makes one."""

    @property
    def slice_shape(self) -> list[int]:
        """Sizes of one processor's slice."""

    def to_laid_out_tensor(self) -> LaidOutTensor:
        """Returns the slices, computed if need be."""

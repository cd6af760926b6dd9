"""What laid-out values, placers of variables and pipelines have, as typing Protocols.

Their classes are in rooms that import `_core`, or are those of users.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import tensorflow.compat.v1 as tf

    from mesh_tensorflow._core.shape import Dimension, Shape
    from mesh_tensorflow._core.tensor import Tensor
    from mesh_tensorflow._mesh.mesh_impl import LaidOutTensor
    from mesh_tensorflow.ops._variables.variable import VariableDType

__all__ = ["LaidOutLike", "StagesLike", "VariablePlacer"]


class VariablePlacer(Protocol):
    """Chooses the devices of variables, as `mtf.utils.BalancedVariablePlacer` does."""

    def device_function(self, var: tf.Operation) -> str:
        """Returns the device of a variable.

        Args:
          var: the tf operation that makes it.
        """


class StagesLike(Protocol):
    """Gives layers that are applied to all stages of a pipeline at once what they ask for.

    Attributes:
      dims: the dimensions of stages, which layers do not know of and never sum over.
    """

    dims: list[Dimension]

    def variable(self, name: str, shape: Shape, dtype: VariableDType, **kwargs: Any) -> Tensor:
        """Returns the values of a variable in all stages.

        Args:
          name: a string, relative to the variable scope.
          shape: a Shape, that of one stage.
          dtype: a VariableDType.
          **kwargs: further arguments of mtf.get_variable.
        """

    def random(self, shape: Shape, tf_fn: Callable, **kwargs: Any) -> Tensor:
        """Returns random values for all stages.

        Args:
          shape: a Shape.
          tf_fn: a function of a shape, such as tf.random.uniform.
          **kwargs: keyword arguments of `tf_fn`.
        """


class LaidOutLike(Protocol):
    """A value spread over a mesh: a LaidOutTensor, or a lazy value that makes one."""

    @property
    def slice_shape(self) -> list[int]:
        """Sizes of one processor's slice."""

    def to_laid_out_tensor(self) -> LaidOutTensor:
        """Returns the slices, computed if need be."""

"""What operations may ask of a Lowering, of laid-out values and of pipelines, as typing Protocols.

The classes themselves are in `_lowering`, `_mesh` and `layers`, which import `_core`, so that
`_core` and `ops` cannot import them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional, Protocol, Union

if TYPE_CHECKING:
    import tensorflow.compat.v1 as tf

    from mesh_tensorflow._core.graph import Mesh
    from mesh_tensorflow._core.operation import Operation, PendingSums
    from mesh_tensorflow._core.shape import Dimension, Shape
    from mesh_tensorflow._core.tensor import Tensor
    from mesh_tensorflow._mesh.mesh_impl import HasSlices, LaidOutTensor, MeshImpl
    from mesh_tensorflow.ops._variables.variable import Variable, VariableDType

__all__ = ["LaidOutLike", "LoweringLike", "StagesLike", "VariablePlacer"]


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


class LoweringLike(Protocol):
    """The interface of `mesh_tensorflow.Lowering` that operations use.

    Attributes:
      operations: from Assign operations, and others that have effects, to tf operations.
      assigned: from Variables to the last assignment to each, in the order of the program.
      tensors: from Tensors to laid-out values.
      variables: from Variables to LaidOutVariables.
      loop_tapes: from loops to the saved values that their gradients read.
      random_keys: keys of the random operations in loops, in the current iteration.
    """

    operations: dict[Operation, tf.Operation]
    assigned: dict[Variable, tf.Operation]
    tensors: dict[Tensor, Any]
    variables: dict[Variable, Any]
    loop_tapes: dict[Operation, tuple]
    random_keys: dict[Operation, tf.Tensor]

    def mesh_impl(self, m: Union[Mesh, Operation, Tensor]) -> MeshImpl:
        """Returns the executed MeshImpl, which operations are lowered through."""

    def requested_impl(self, m: Union[Mesh, Operation, Tensor]) -> MeshImpl:
        """Returns the requested MeshImpl, which counters and checks refer to."""

    def set_tensor_lowering(self, tensor: Tensor, laid_out_tensor: LaidOutLike) -> None:
        """Sets the lowered value of a Tensor."""

    def set_partial_sum(
        self, tensor: Tensor, summands: LaidOutTensor, mesh_axes: Sequence[int], label: str
    ) -> None:
        """Sets the lowered value of a Tensor to a partial sum, summed when it is needed."""

    def import_slices(self, tensor: Tensor, laid_out: Union[LaidOutLike, HasSlices]) -> Any:
        """Returns a laid-out value of the requested mesh with the slices of the executed mesh."""

    def lower_operations(self, operations: Iterable[Operation]) -> None:
        """Lowers the inner operations of an operation, in order."""

    def lowered_operation(self, op: Operation) -> tf.Operation:
        """Returns the tf operation of an Assign."""

    def copy_masters_to_slices(self) -> tf.Operation:
        """Returns a tf operation that copies all masters to their slices."""

    def copy_slices_to_masters(self) -> tf.Operation:
        """Returns a tf operation that copies all slices to their masters."""

    def add_counter(self, key: str, value: int) -> None:
        """Adds a pair to the counters."""

    def count_collectives(
        self, op: Operation, label: Optional[str], pending: Optional[PendingSums] = None
    ) -> None:
        """Counts the collectives of an operation, given the inputs that are partial sums."""

    def allreduce_counter(
        self, mesh_axes: Sequence[int], x: Tensor, label: str
    ) -> Callable[[], None]:
        """Returns a function that counts the allreduce of a Tensor over mesh axes."""

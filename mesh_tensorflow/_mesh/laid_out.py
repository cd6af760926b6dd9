"""Laid-out tensors and variables: the slices that the processors of a mesh have."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.shape import Shape

if TYPE_CHECKING:
    from typing_extensions import Self

    from mesh_tensorflow._mesh.mesh_impl import MeshImpl
    from mesh_tensorflow.ops._variables.variable import Variable

__all__ = [
    "LaidOutTensor",
    "LaidOutVariable",
    "LazyAllreduceSum",
    "LazyLaidOutTensor",
    "compatible_lazy_allreduce_sums",
    "convert_args_to_laid_out_tensors",
]


class LaidOutTensor:
    """The slices of one tensor that a program has: those of all processors, or of one.

    `MeshImpl.LaidOutTensor` is the subclass of a mesh implementation, which passes its instances
    to `slicewise` and to collectives.
    """

    def __init__(self, tensor_list: Sequence[tf.Tensor]):
        """Creates a LaidOutTensor.

        Args:
          tensor_list: the slices, tf.Tensors.
        """
        self._tensor_list = list(tensor_list)

    def __repr__(self) -> str:
        return f"[{','.join(map(repr, self._tensor_list))}]"

    @classmethod
    def from_tensor_list(cls, tensor_list: Sequence[tf.Tensor]) -> Self:
        """Creates an instance from a list of tf.Tensors."""
        return cls(tensor_list)

    @property
    def tensor_list(self) -> list[tf.Tensor]:
        """The slices."""
        return self._tensor_list

    @property
    def all_slices(self) -> list[tf.Tensor]:
        """The slices."""
        return self._tensor_list

    @property
    def slice_shape(self) -> list[int]:
        """The shape of one slice."""
        return self._tensor_list[0].shape.as_list()

    def of_shape(self, tensor_shape: Shape) -> LaidOutTensor:
        """Returns the same slices; a subclass may record the Shape of the whole tensor.

        Args:
          tensor_shape: the Shape of the whole tensor.
        """
        return self

    def to_laid_out_tensor(self) -> Self:
        """Returns itself."""
        return self


class LazyAllreduceSum:
    """A partial sum: the sum of a laid-out tensor over groups of processors, computed lazily.

    Additions and reshapes work on the summands, so that a sum of several partial sums is
    communicated once. `to_laid_out_tensor` computes the sum once and caches it.

    Attributes:
      mesh_impl: the MeshImpl that computes the sum.
      laid_out_input: the summands, a LaidOutTensor.
      mesh_axes: the mesh axes to sum over.
      add_counter_fn: called without arguments when the sum is computed; or None.
    """

    def __init__(
        self,
        mesh_impl: MeshImpl,
        laid_out_input: LaidOutTensor,
        mesh_axes: Sequence[int],
        add_counter_fn: Optional[Callable[[], None]] = None,
    ):
        self.mesh_impl = mesh_impl
        self.laid_out_input = laid_out_input
        self.mesh_axes = list(mesh_axes)
        self.add_counter_fn = add_counter_fn
        self._sum: Any = None

    def to_laid_out_tensor(self) -> Any:
        """Returns the sum, a LaidOutTensor."""
        if self._sum is None:
            # Counted once, where it is computed: a sum that nobody needs is not communicated.
            if self.add_counter_fn is not None:
                self.add_counter_fn()
            self._sum = self.mesh_impl.allreduce(self.laid_out_input, self.mesh_axes, "SUM")
        return self._sum

    @property
    def is_summed(self) -> bool:
        """Whether the sum has been computed."""
        return self._sum is not None

    @property
    def slice_shape(self) -> list[int]:
        """The shape of one slice."""
        return self.laid_out_input.slice_shape

    def __add__(self, other: LazyAllreduceSum) -> LazyAllreduceSum:
        """Returns the lazy sum with a compatible LazyAllreduceSum."""
        add = self.mesh_impl.slicewise
        return self.with_summands(
            # sum(a) + sum(b) = sum(a + b) over processors: one allreduce in place of two.
            add(lambda a, b: a + b, self.laid_out_input, other.laid_out_input)
        )

    def with_summands(self, summands: LaidOutTensor) -> LazyAllreduceSum:
        """Returns the lazy sum of other summands over the same mesh axes.

        Args:
          summands: a LaidOutTensor.
        """
        # Of an addition, the one allreduce is counted under the label of the first sum, as in the
        # classic.
        return LazyAllreduceSum(self.mesh_impl, summands, self.mesh_axes, self.add_counter_fn)


class LazyLaidOutTensor:
    """A laid-out tensor that is computed on each use, such as a large constant."""

    def __init__(self, to_laid_out_tensor_fn: Callable[[], Any], slice_shape: Sequence[int]):
        """Creates a LazyLaidOutTensor.

        Args:
          to_laid_out_tensor_fn: returns the LaidOutTensor; called without arguments.
          slice_shape: the shape of one slice.
        """
        self._to_laid_out_tensor_fn = to_laid_out_tensor_fn
        self._slice_shape = list(slice_shape)

    def to_laid_out_tensor(self) -> Any:
        """Computes the value, a LaidOutTensor."""
        # Not cached: what is made again at each use takes no memory between its uses.
        return self._to_laid_out_tensor_fn()

    @property
    def slice_shape(self) -> list[int]:
        """The shape of one slice."""
        return self._slice_shape


def compatible_lazy_allreduce_sums(xs: Iterable[Any]) -> bool:
    """Returns whether all `xs` are pending sums over the same mesh axes of one MeshImpl."""
    xs = list(xs)
    # To add the summands of a sum that has been computed would communicate the same values again.
    if not xs or not all(isinstance(x, LazyAllreduceSum) and not x.is_summed for x in xs):
        return False
    first = xs[0]
    # Over other axes, sum(a) + sum(b) is no sum of a + b: each has groups of its own.
    return all(x.mesh_impl is first.mesh_impl and x.mesh_axes == first.mesh_axes for x in xs)


def convert_args_to_laid_out_tensors(xs: Iterable[Any]) -> list[Any]:
    """Returns `xs` with lazy values computed; other values are unchanged."""
    return [x.to_laid_out_tensor() if hasattr(x, "to_laid_out_tensor") else x for x in xs]


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

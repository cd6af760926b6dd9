"""Values spread over a mesh: there, or still to be computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional

from mesh_tensorflow._core.shape import Shape

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "LaidOutTensor",
    "LazyAllreduceSum",
    "LazyLaidOutTensor",
    "compatible_lazy_allreduce_sums",
    "convert_args_to_laid_out_tensors",
]


class LaidOutTensor:
    """The slices of one tensor that a program has, of one processor or of all.

    What mesh implementations pass to the functions of `slicewise` and to collectives is a subclass
    of it; `MeshImpl.LaidOutTensor` says which.
    """

    def __init__(self, tensor_list: Sequence[Any]):
        """Creates a LaidOutTensor.

        Args:
          tensor_list: the slices, tf.Tensors.
        """
        self._tensor_list = list(tensor_list)

    def __repr__(self) -> str:
        return f"[{','.join(map(repr, self._tensor_list))}]"

    @classmethod
    def from_tensor_list(cls, tensor_list: Sequence[Any]) -> Self:
        """Creates an instance from a list of tf.Tensors."""
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

    def of_shape(self, tensor_shape: Shape) -> LaidOutTensor:
        """Returns the same slices, known to be those of a tensor of a certain Shape."""
        return self

    def to_laid_out_tensor(self) -> Self:
        """Returns itself."""
        return self


class LazyAllreduceSum:
    """The sum of a laid-out tensor over groups of processors, not communicated yet.

    Additions and reshapes work on the summands, so that a sum of several such values is
    communicated once. `to_laid_out_tensor` sums, once, and remembers the result.

    Attributes:
      mesh_impl: a MeshImpl.
      laid_out_input: the summands, a LaidOutTensor.
      mesh_axes: the mesh axes to sum over.
      add_counter_fn: a function of no arguments, called when the sum is made; or None.
    """

    def __init__(
        self,
        mesh_impl: Any,
        laid_out_input: Any,
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
            if self.add_counter_fn is not None:
                self.add_counter_fn()
            self._sum = self.mesh_impl.allreduce(self.laid_out_input, self.mesh_axes, "SUM")
        return self._sum

    @property
    def is_summed(self) -> bool:
        """Whether the sum was made already."""
        return self._sum is not None

    @property
    def slice_shape(self) -> list[int]:
        """Shape of one processor's slice."""
        return self.laid_out_input.slice_shape

    def __add__(self, other: Any) -> Any:
        """Returns the sum with a compatible LazyAllreduceSum, still lazy."""
        return LazyAllreduceSum(
            self.mesh_impl,
            self.mesh_impl.slicewise(lambda a, b: a + b, self.laid_out_input, other.laid_out_input),
            self.mesh_axes,
            self.add_counter_fn,
        )


class LazyLaidOutTensor:
    """A laid-out tensor that is computed each time it is asked for, such as a large constant."""

    def __init__(self, to_laid_out_tensor_fn: Callable[[], Any], slice_shape: Sequence[int]):
        """Creates a LazyLaidOutTensor.

        Args:
          to_laid_out_tensor_fn: a function of no arguments that returns a LaidOutTensor.
          slice_shape: shape of one processor's slice.
        """
        self._to_laid_out_tensor_fn = to_laid_out_tensor_fn
        self._slice_shape = list(slice_shape)

    def to_laid_out_tensor(self) -> Any:
        """Computes the value anew."""
        return self._to_laid_out_tensor_fn()

    @property
    def slice_shape(self) -> list[int]:
        """Shape of one processor's slice."""
        return self._slice_shape


def compatible_lazy_allreduce_sums(xs: Iterable[Any]) -> bool:
    """Returns whether all of `xs` are sums, not made yet, over the same axes of one mesh."""
    xs = list(xs)
    if not xs or not all(isinstance(x, LazyAllreduceSum) and not x.is_summed for x in xs):
        return False
    first = xs[0]
    return all(x.mesh_impl is first.mesh_impl and x.mesh_axes == first.mesh_axes for x in xs)


def convert_args_to_laid_out_tensors(xs: Iterable[Any]) -> list[Any]:
    """Returns `xs` with lazy values computed; what is no laid-out value stays as it is."""
    return [x.to_laid_out_tensor() if hasattr(x, "to_laid_out_tensor") else x for x in xs]

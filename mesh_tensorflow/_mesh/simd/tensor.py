"""SimdTensor: one processor's slice of a tensor, in a program that all processors run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["SimdTensor"]


class SimdTensor:
    """A list of one tf.Tensor: the slice of the processor that runs the program."""

    def __init__(self, tensor_list: Sequence[Any]):
        """Makes one.

        Args:
          tensor_list: a list of one tf.Tensor.
        """
        if len(tensor_list) != 1:
            raise ValueError(f"a SIMD program has one slice of a tensor, not {len(tensor_list)}")
        self._tensor_list = list(tensor_list)

    def __repr__(self) -> str:
        return f"[{self.one_slice!r}]"

    @classmethod
    def from_tensor_list(cls, tensor_list: Sequence[Any]) -> SimdTensor:
        """Makes one from a list of one tf.Tensor."""
        return cls(tensor_list)

    @property
    def tensor_list(self) -> list[Any]:
        """The slice, in a list."""
        return self._tensor_list

    @property
    def one_slice(self) -> Any:
        """The slice."""
        return self._tensor_list[0]

    @property
    def all_slices(self) -> list[Any]:
        """The slice, in a list."""
        return self._tensor_list

    @property
    def slice_shape(self) -> list[int]:
        """Shape of the slice."""
        return self.one_slice.shape.as_list()

    def to_laid_out_tensor(self) -> SimdTensor:
        """Returns itself."""
        return self

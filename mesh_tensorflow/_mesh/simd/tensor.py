"""SimdTensor: one processor's slice of a tensor, in a program that all processors run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh_tensorflow._mesh.laid_out import LaidOutTensor

__all__ = ["SimdTensor"]


class SimdTensor(LaidOutTensor):
    """A list of one tf.Tensor: the slice of the processor that runs the program."""

    def __init__(self, tensor_list: Sequence[Any]):
        """Creates a SimdTensor.

        Args:
          tensor_list: a list of one tf.Tensor.
        """
        if len(tensor_list) != 1:
            raise ValueError(f"a SIMD program has one slice of a tensor, not {len(tensor_list)}")
        super().__init__(tensor_list)

    @property
    def one_slice(self) -> Any:
        """The slice."""
        return self._tensor_list[0]

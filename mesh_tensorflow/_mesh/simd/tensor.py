"""SimdTensor: the laid-out tensor of SIMD programs, one processor's slice."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.laid_out import LaidOutTensor

__all__ = ["SimdTensor"]


class SimdTensor(LaidOutTensor):
    """The slice of the processor that runs the program, as a list of one tf.Tensor."""

    def __init__(self, tensor_list: Sequence[tf.Tensor]):
        """Creates a SimdTensor.

        Args:
          tensor_list: a list of one tf.Tensor.
        """
        if len(tensor_list) != 1:
            raise ValueError(f"a SIMD program has one slice of a tensor, not {len(tensor_list)}")
        super().__init__(tensor_list)

    @property
    def one_slice(self) -> tf.Tensor:
        """The slice, a tf.Tensor."""
        return self._tensor_list[0]

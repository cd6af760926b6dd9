"""Slice and pad along one dimension; each is the gradient of the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.interfaces import LoweringLike
from mesh_tensorflow._core.operation import Operation, gradient_of_output
from mesh_tensorflow._core.shape import Dimension, Shape
from mesh_tensorflow._core.tensor import Tensor

__all__ = ["PadOperation", "SliceOperation", "mtf_slice", "pad"]


def _resized(shape: Shape, axis: int, size: int) -> Shape:
    dims = shape.dims
    dims[axis] = Dimension(dims[axis].name, size)
    return Shape(dims)


class SliceOperation(Operation):
    """A range along a dimension that is not split."""

    def __init__(
        self, x: Tensor, begin: int, size: int, slice_dim_name: str, name: Optional[str] = None
    ):
        """Creates the operation; see `mtf_slice`."""
        dim = x.shape.get_dim_by_name(slice_dim_name)
        if size == -1:
            size = dim.size - begin
        if begin < 0 or size < 0 or begin + size > dim.size:
            raise ValueError(
                f"{name or 'slice'}: {begin} .. {begin + size} is not within "
                f"{dims_text([dim])} of {x.name} {x.shape}"
            )
        super().__init__([x], name=name or "slice")
        self._dim = dim
        self._axis = x.shape.dims.index(dim)
        self._begin = begin
        self._size = size
        self._outputs = [Tensor(self, _resized(x.shape, self._axis, size), x.dtype)]

    def _unsplittable(self) -> Iterable[str]:
        return [self._dim.name]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Pads dy with zeros where nothing was taken."""
        after = self._dim.size - self._begin - self._size
        return [pad(gradient_of_output(grad_ys), [self._begin, after], self._dim.name)]

    def lower(self, lowering: LoweringLike) -> None:
        """Slices along a dimension that is not split."""
        mesh_impl = lowering.mesh_impl(self)
        sizes = mesh_impl.slice_shape(self.outputs[0].shape)
        begin = [self._begin if axis == self._axis else 0 for axis in range(len(sizes))]
        value = mesh_impl.slicewise(
            lambda t: tf.slice(t, begin, sizes), lowering.tensors[self.inputs[0]]
        )
        lowering.set_tensor_lowering(self.outputs[0], value)


def mtf_slice(
    x: Tensor, begin: int, size: int, slice_dim_name: str, name: Optional[str] = None
) -> Tensor:
    """Returns a range along a dimension; exported as mtf.slice.

    >>> x = mtf.range(mesh, mtf.Dimension("d", 5), tf.int32)
    >>> print(mtf.slice(x, 1, 3, "d").numpy())
    [1 2 3]

    Args:
      x: a Tensor.
      begin: the first index of the range.
      size: the size of the range; -1 for all that follows.
      slice_dim_name: a string; no layout may split this dimension.
      name: a string or None.

    Raises:
      ValueError: the range is not within the dimension.
    """
    return SliceOperation(x, begin, size, slice_dim_name, name=name).outputs[0]


class PadOperation(Operation):
    """A Tensor with zeros before and after it along a dimension that is not split."""

    def __init__(
        self, x: Tensor, paddings: Sequence[int], pad_dim_name: str, name: Optional[str] = None
    ):
        """Creates the operation; see `pad`."""
        dim = x.shape.get_dim_by_name(pad_dim_name)
        if len(paddings) != 2 or min(paddings) < 0:
            raise ValueError(
                f"{name or 'pad'}: paddings must be two numbers [before, after] of 0 or more, "
                f"got {paddings!r} for {dims_text([dim])} of {x.name} {x.shape}"
            )
        super().__init__([x], name=name or "pad")
        self._dim = dim
        self._axis = x.shape.dims.index(dim)
        self._paddings = list(paddings)
        size = dim.size + sum(paddings)
        self._outputs = [Tensor(self, _resized(x.shape, self._axis, size), x.dtype)]

    def _unsplittable(self) -> Iterable[str]:
        return [self._dim.name]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Takes from dy what was there before padding."""
        dy = gradient_of_output(grad_ys)
        return [mtf_slice(dy, self._paddings[0], self._dim.size, self._dim.name)]

    def lower(self, lowering: LoweringLike) -> None:
        """Pads along a dimension that is not split."""
        mesh_impl = lowering.mesh_impl(self)
        x = self.inputs[0]
        paddings = [
            self._paddings if axis == self._axis else [0, 0] for axis in range(len(x.shape))
        ]
        value = mesh_impl.slicewise(lambda t: tf.pad(t, paddings), lowering.tensors[x])
        lowering.set_tensor_lowering(self.outputs[0], value)


def pad(x: Tensor, paddings: Sequence[int], dim_name: str, name: Optional[str] = None) -> Tensor:
    """Returns a Tensor with zeros before and after it along a dimension.

    >>> x = mtf.ones(mesh, "d:2")
    >>> print(mtf.pad(x, [1, 2], "d").numpy())
    [0. 1. 1. 0. 0.]

    Args:
      x: a Tensor.
      paddings: [number of zeros before, number of zeros after].
      dim_name: a string; no layout may split this dimension.
      name: a string or None.

    Raises:
      ValueError: the paddings are not two numbers of 0 or more.
    """
    return PadOperation(x, paddings, dim_name, name=name).outputs[0]

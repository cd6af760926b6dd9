"""The gradients of convolutions with respect to their inputs and to their filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

from mesh_tensorflow._core.shape import ShapeLike, convert_to_shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow.ops._contractions.conv import ConvNdOperation
from mesh_tensorflow.ops._contractions.conv_kind import FILTER, conv_kind

__all__ = [
    "Conv2or3dBackpropFilterOperation",
    "Conv2or3dBackpropInputOperation",
    "conv2d_backprop_filter",
    "conv2d_backprop_input",
    "conv2d_transpose_backprop_filter",
    "conv2d_transpose_backprop_input",
    "conv3d_backprop_filter",
    "conv3d_backprop_input",
    "conv3d_transpose_backprop_filter",
    "conv3d_transpose_backprop_input",
]


class Conv2or3dBackpropInputOperation(ConvNdOperation):
    """The gradient of a convolution with respect to its input, of shape `input_shape`."""

    def __init__(
        self,
        conv_dimension: int,
        is_transpose: bool,
        input_shape: ShapeLike,
        conv_filter: Tensor,
        dy: Tensor,
        strides: Sequence[int],
        padding: str,
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          conv_dimension: number of spatial dimensions, 2 or 3.
          is_transpose: whether it is a transposed convolution.
          input_shape: a Shape [batch..., spatial..., in], that of the convolution's input.
          conv_filter: a Tensor [window..., in, out]; [window..., out, in] if transposed.
          dy: a Tensor [batch..., spatial..., out], the gradient of the convolution's output.
          strides: a list [1, stride of each spatial dimension..., 1].
          padding: "SAME" or "VALID".
          name: a string or None.

        Raises:
          ValueError: dtypes, shapes, strides or padding are invalid or do not match.
        """
        what = name or type(self).__name__
        kind = conv_kind(what, conv_dimension, is_transpose, strides, padding)
        operands = {FILTER: conv_filter, kind.output_role: dy}
        super().__init__(kind, operands, convert_to_shape(input_shape), name)

    def gradient(self, unused_grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Returns the gradients of the filter and of the output's gradient."""
        return super().gradient(unused_grad_ys)


class Conv2or3dBackpropFilterOperation(ConvNdOperation):
    """The gradient of a convolution with respect to its filter, of shape `filter_shape`."""

    def __init__(
        self,
        conv_dimension: int,
        is_transpose: bool,
        conv_input: Tensor,
        filter_shape: ShapeLike,
        dy: Tensor,
        strides: Sequence[int],
        padding: str,
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          conv_dimension: number of spatial dimensions, 2 or 3.
          is_transpose: whether it is a transposed convolution.
          conv_input: a Tensor [batch..., spatial..., in], the convolution's input.
          filter_shape: a Shape [window..., in, out]; [window..., out, in] if transposed.
          dy: a Tensor [batch..., spatial..., out], the gradient of the convolution's output.
          strides: a list [1, stride of each spatial dimension..., 1].
          padding: "SAME" or "VALID".
          name: a string or None.

        Raises:
          ValueError: dtypes, shapes, strides or padding are invalid or do not match.
        """
        what = name or type(self).__name__
        kind = conv_kind(what, conv_dimension, is_transpose, strides, padding)
        operands = {kind.input_role: conv_input, kind.output_role: dy}
        super().__init__(kind, operands, convert_to_shape(filter_shape), name)

    def gradient(self, unused_grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Returns the gradients of the input and of the output's gradient."""
        return super().gradient(unused_grad_ys)


def _named(fn: Callable, rank: int, transposed: bool, end: str) -> Callable:
    """Sets the public name of a function, and the name of its convolution in the docstring."""
    family = f"conv{rank}d" + ("_transpose" if transposed else "")
    fn.__name__ = fn.__qualname__ = f"{family}_{end}"
    fn.__doc__ = (fn.__doc__ or "").replace("<a convolution>", family)
    return fn


def _backprop_input(rank: int, transposed: bool) -> Callable:
    def backprop_input(
        input_shape: ShapeLike,
        conv_filter: Tensor,
        dy: Tensor,
        strides: Sequence[int],
        padding: str,
        name: Optional[str] = None,
    ) -> Tensor:
        """Returns the gradient with respect to the input of <a convolution>.

        See Conv2or3dBackpropInputOperation.
        """
        return Conv2or3dBackpropInputOperation(
            rank, transposed, input_shape, conv_filter, dy, strides, padding, name=name
        ).outputs[0]

    return _named(backprop_input, rank, transposed, "backprop_input")


def _backprop_filter(rank: int, transposed: bool) -> Callable:
    def backprop_filter(
        conv_input: Tensor,
        filter_shape: ShapeLike,
        dy: Tensor,
        strides: Sequence[int],
        padding: str,
        name: Optional[str] = None,
    ) -> Tensor:
        """Returns the gradient with respect to the filter of <a convolution>.

        See Conv2or3dBackpropFilterOperation.
        """
        return Conv2or3dBackpropFilterOperation(
            rank, transposed, conv_input, filter_shape, dy, strides, padding, name=name
        ).outputs[0]

    return _named(backprop_filter, rank, transposed, "backprop_filter")


conv2d_backprop_input = _backprop_input(2, False)
conv3d_backprop_input = _backprop_input(3, False)
conv2d_transpose_backprop_input = _backprop_input(2, True)
conv3d_transpose_backprop_input = _backprop_input(3, True)
conv2d_backprop_filter = _backprop_filter(2, False)
conv3d_backprop_filter = _backprop_filter(3, False)
conv2d_transpose_backprop_filter = _backprop_filter(2, True)
conv3d_transpose_backprop_filter = _backprop_filter(3, True)

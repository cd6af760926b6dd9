"""Printing values and writing summaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow.utils import SCALAR_SUMMARIES_COLLECTION_KEY

if TYPE_CHECKING:
    from mesh_tensorflow._lowering.lowering import Lowering

__all__ = ["Print", "PrintOperation", "ScalarSummaryOperation", "scalar_summary"]


class PrintOperation(Operation):
    """The same value; prints other values when it is computed."""

    has_effect = True
    takes_padding = True
    costs_nothing = True

    def __init__(
        self,
        x: Tensor,
        data: Sequence[Tensor],
        message: str,
        name: Optional[str] = None,
        **kwargs: object,
    ):
        """Creates the operation; see `Print`."""
        # What is printed are inputs too: it is computed before, and summed where it is pending.
        super().__init__([x, *data], name=name or "Print")
        self._message = message
        self._kwargs = kwargs
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Passes the gradient on to the value that is returned."""
        return [*grad_ys, *[None] * (len(self.inputs) - 1)]

    def lower(self, lowering: Lowering) -> None:
        """Has the mesh implementation print the slices."""
        if self in lowering.operations:  # the gradient of a loop computes its body again
            lowering.set_tensor_lowering(self.outputs[0], lowering.tensors[self.inputs[0]])
            return
        x, *data = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
        value = lowering.mesh_impl(self).Print(x, data, self._message, **self._kwargs)
        # A loop looks there for what must run in each iteration, whether its result is used or not.
        lowering.operations[self] = tf.group(value.all_slices)
        lowering.set_tensor_lowering(self.outputs[0], value)


def Print(x: Tensor, data: Sequence[Tensor], message: str, **kwargs: Any) -> Tensor:
    """Returns `x`, and prints slices of `data` when it is computed, like tf.Print.

    >>> x = mtf.ones(mesh, "d:2")
    >>> y = mtf.Print(x, [x], "x: ")
    >>> print(y.shape)
    Shape[d=2]

    Args:
      x: a Tensor.
      data: a list of Tensors; the slice of one processor is printed.
      message: a string.
      **kwargs: name, and arguments of tf.Print such as summarize and first_n.
    """
    return PrintOperation(x, data, message, **kwargs).outputs[0]


class ScalarSummaryOperation(Operation):
    """Adds a scalar to the summaries, with its name as the tag."""

    has_effect = True
    takes_padding = True
    costs_nothing = True

    def __init__(self, name: str, x: Tensor):
        """Creates the operation; see `scalar_summary`."""
        if x.shape.ndims:
            raise ValueError(
                f"scalar_summary {name!r}: {x.name} {x.shape} is no scalar; reduce it with "
                "mtf.reduce_mean"
            )
        super().__init__([x], name=name)
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    def lower(self, lowering: Lowering) -> None:
        """Adds the first processor's value to the collection of scalar summaries."""
        value = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        # The collection outlives an eager program: only the latest values are kept.
        if tf.executing_eagerly():
            known = tf.get_collection_ref(SCALAR_SUMMARIES_COLLECTION_KEY)
            known[:] = [(name, x) for name, x in known if name != self.name]
        # A scalar is whole on each processor, so that the first one has it.
        tf.add_to_collection(SCALAR_SUMMARIES_COLLECTION_KEY, (self.name, value.all_slices[0]))
        lowering.set_tensor_lowering(self.outputs[0], value)

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Passes the gradient on."""
        return list(grad_ys)


def scalar_summary(name: str, x: Tensor) -> Operation:
    """Adds a scalar to the summaries, in the collection "mtf_scalar_summaries".

    >>> summary = mtf.scalar_summary("loss", mtf.constant(mesh, 0.5))
    >>> print(type(summary).__name__)
    ScalarSummaryOperation

    Args:
      name: the tag, under the variable scope; it is made unique.
      x: a scalar Tensor. In layers of a pipeline, which are applied to all stages at once, nothing
        is recorded.

    Returns:
      The operation.

    Raises:
      ValueError: `x` has dimensions.
    """
    # In a pipeline the Tensor has the values of all stages, and is no scalar.
    return ScalarSummaryOperation(name, x) if x.graph.stages is None else x.operation

"""Reverse-mode differentiation: adds the operations that compute gradients to a program.

Gradients are operations like any other, made before lowering, so layouts, partial sums and costs
hold for them as for the rest; an optimizer's sum over the batch needs no code of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Optional, Union

from mesh_tensorflow._core.errors import tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.tensor import Tensor, check_tensors
from mesh_tensorflow.ops._source import Constant

__all__ = ["gradients"]


@leaves_no_node
def gradients(
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    grad_ys: Optional[Sequence[Union[Tensor, float, None]]] = None,
    operations: Optional[Sequence[Operation]] = None,
) -> list[Optional[Tensor]]:
    """Returns the gradients of the sum of `ys` with respect to `xs`.

    >>> x = mtf.constant(mesh, [1.0, 2.0], "d:2")
    >>> [dx] = mtf.gradients([mtf.reduce_sum(mtf.square(x))], [x])
    >>> print(dx.numpy())
    [2. 4.]

    Args:
      ys: a list of Tensors.
      xs: a list of Tensors.
      grad_ys: for each of `ys` its gradient, a Tensor, a number, or None for ones; all ones if
        None.
      operations: the operations to differentiate; all of the graph if None.

    Returns:
      A Tensor for each of `xs`, or None if `ys` do not depend on it.

    Raises:
      ValueError: `ys` or `xs` are not lists of Tensors, or a gradient has another shape than its
        Tensor.
    """
    _check_arguments(ys, xs)
    graph = ys[0].graph
    operations = list(graph.operations if operations is None else operations)
    grad_ys = grad_ys or [None] * len(ys)
    # Without this, gradients of everything that `ys` depend on would be built, down to the inputs.
    needed = _reached_from(xs, operations)
    # sums[x] = d(sum of ys) / dx, through those users of x that have been visited.
    sums: dict[Tensor, Tensor] = {}
    # Added and not set: a Tensor may be given twice among `ys`, and then counts twice.
    for y, dy in zip(ys, grad_ys, strict=True):
        if not isinstance(dy, Tensor):
            dy = Constant(y.mesh, 1 if dy is None else dy, y.shape, y.dtype).outputs[0]
        _accumulate(sums, y, dy)
    # Names must not depend on the variable scope that `gradients` happens to be called in.
    with graph.scope(graph.captured_variable_scope.name):
        # Operations are in the order of their creation, so all that reads an output has been
        # visited, and its gradient is complete, when the turn of the operation comes.
        for op in reversed(operations):
            dys = [sums.get(y) for y in op.outputs]
            # Without a gradient, as of stop_gradient, what has flowed this far ends here.
            if not op.has_gradient or all(dy is None for dy in dys):
                continue
            if not any(x in needed for x in op.inputs):
                continue
            with graph.gradient_scope(op):
                dxs = op.gradient(dys)
                for x, dx in zip(op.inputs, dxs, strict=True):
                    # An operation gives the gradients of all inputs; those that lead to none of
                    # `xs` go no further.
                    if dx is not None and x in needed:
                        _accumulate(sums, x, dx)
    return [sums.get(x) for x in xs]


def _check_arguments(ys: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    for what, given in (("ys", ys), ("xs", xs)):
        if isinstance(given, Tensor) or not isinstance(given, Iterable):
            raise ValueError(f"gradients: {what} must be a list of mtf.Tensors, not {given!r}")
    check_tensors("gradients: ys", ys)
    if not ys:
        raise ValueError("gradients: ys must be a list of at least one mtf.Tensor; it is empty")


def _reached_from(xs: Sequence[Tensor], operations: Sequence[Operation]) -> set[Tensor]:
    """Returns the Tensors that gradients flow through to `xs`."""
    reached = set(xs)
    # In the order of creation, inputs are decided upon before what reads them.
    for op in operations:
        if op.has_gradient and any(x in reached for x in op.inputs):
            reached.update(op.outputs)
    return reached


def _accumulate(sums: dict[Tensor, Tensor], x: Tensor, dx: Tensor) -> None:
    if dx.shape != x.shape:
        raise ValueError(
            f"the gradient of {tensors_text([x])} has another shape: {tensors_text([dx])}"
        )
    # A new addition and not a list for one sum: partial sums over the same axes are added before
    # they are communicated, in either form.
    sums[x] = sums[x] + dx if x in sums else dx

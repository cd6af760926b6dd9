"""A program as a list of steps, those of loops included."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow.ops._while_gradient import WhileGradientOperation
from mesh_tensorflow.ops._while_loop import WhileLoopOperation

__all__ = ["Loop", "Step", "all_operations", "inner_loop", "iterations", "program_steps"]


class Step(NamedTuple):
    """One thing that happens, in order.

    Attributes:
      op: the operation that runs; None if values are just needed, or passed on.
      needs: Tensors whose values are needed, besides what `op` asks for.
      passes: pairs (y, x); y awaits the sum that x awaits.
      times: how often it happens in a step of the program.
      layer: the name of the operation, or of the loop around it.
    """

    op: Optional[Operation]
    needs: tuple[Tensor, ...]
    passes: tuple[tuple[Tensor, Tensor], ...]
    times: float
    layer: str


class Loop(NamedTuple):
    """What is in a loop.

    Attributes:
      operations: those of an iteration.
      needed: Tensors whose values are needed at the end of an iteration.
      sums: pairs (output of the loop, Tensor of an iteration) that are summed over iterations.
      rounds: number of iterations.
      tape: Tensors of each iteration that are kept for the gradient.
    """

    operations: list[Operation]
    needed: list[Tensor]
    sums: list[tuple[Tensor, Tensor]]
    rounds: float
    tape: list[Tensor]


def iterations(op: Any) -> float:
    """Returns the number of iterations of a loop, if `maximum_iterations` is one; else 1.

    Args:
      op: a WhileLoopOperation or the operation of its gradient.
    """
    loop = op._forward if isinstance(op, WhileGradientOperation) else op
    most = loop._tf_kwargs.get("maximum_iterations")
    return max(1, int(most)) if isinstance(most, numbers.Integral) else 1


def inner_loop(op: Operation) -> Optional[Loop]:
    """Returns what is in an operation that is a loop, or None."""
    if isinstance(op, WhileLoopOperation):
        n = op.num_vars
        return Loop(
            op._cond_ops + op.body_operations,
            [op._cond_output, *op.body_outputs[:n]],
            list(zip(op.outputs[n:], op.body_outputs[n:])),
            iterations(op),
            op.taped() if op._keeps_tape else [],
        )
    if isinstance(op, WhileGradientOperation):
        n = len(op._carried)
        return Loop(
            op._operations,
            op._results[:n],
            list(zip(op.outputs[n:], op._results[n:])),
            iterations(op),
            [],
        )
    return None


def all_operations(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yields operations, and those of loops in them.

    Args:
      operations: Operations.
    """
    for op in operations:
        yield op
        loop = inner_loop(op)
        if loop is not None:
            yield from all_operations(loop.operations)


def program_steps(
    operations: Iterable[Operation], outputs: Sequence[Tensor] = ()
) -> Iterator[Step]:
    """Yields the steps of a program.

    Args:
      operations: Operations in order.
      outputs: Tensors whose values are needed in the end.
    """
    yield from _steps(operations, 1.0, None)
    yield Step(None, tuple(outputs), (), 1.0, "outputs")


def _steps(
    operations: Iterable[Operation], times: float, layer: Optional[str]
) -> Iterator[Step]:
    for op in operations:
        name = layer or op.name
        loop = inner_loop(op)
        if loop is None:
            yield Step(op, (), (), times, name)
            continue
        yield Step(None, tuple(op.inputs), (), times, name)
        yield from _steps(loop.operations, times * loop.rounds, name)
        yield Step(None, tuple(loop.needed), tuple(loop.sums), times * loop.rounds, name)

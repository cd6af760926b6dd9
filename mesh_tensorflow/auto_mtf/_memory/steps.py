"""A program as a list of steps, including those in loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Optional

from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.tensor import Tensor

__all__ = ["Step", "program_steps"]


class Step(NamedTuple):
    """One event of a program.

    Attributes:
      op: the operation that runs; None if values are only needed or passed on.
      needs: Tensors whose values are needed, besides those that `op` needs.
      passes: pairs (y, x), where y takes over the pending sum of x.
      times: the number of times that it occurs in a step of the program.
      layer: the name of the operation, or of the loop that contains it.
    """

    op: Optional[Operation]
    needs: tuple[Tensor, ...]
    passes: tuple[tuple[Tensor, Tensor], ...]
    times: float
    layer: str


def program_steps(
    operations: Iterable[Operation], outputs: Sequence[Tensor] = ()
) -> Iterator[Step]:
    """Yields the steps of a program.

    Args:
      operations: Operations in order.
      outputs: Tensors whose values are needed at the end.
    """
    yield from _steps(operations, 1.0, None)
    yield Step(None, tuple(outputs), (), 1.0, "outputs")


def _steps(operations: Iterable[Operation], times: float, layer: Optional[str]) -> Iterator[Step]:
    for op in operations:
        name = layer or op.name
        loop = op.loop
        if loop is None:
            yield Step(op, (), (), times, name)
            continue
        yield Step(None, tuple(op.inputs), (), times, name)
        yield from _steps(loop.operations, times * loop.iterations, name)
        yield Step(None, tuple(loop.needed), tuple(loop.sums), times * loop.iterations, name)

"""A program as a list of steps, those of loops included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Optional

from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.tensor import Tensor

__all__ = ["Step", "program_steps"]


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

"""Loop: the contents of a loop operation; operations within operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Optional

if TYPE_CHECKING:
    from mesh_tensorflow._core.operation import Operation
    from mesh_tensorflow._core.tensor import Tensor

__all__ = ["Loop", "with_inner_operations"]


class Loop(NamedTuple):
    """The contents of a loop, and the inputs and outputs of an iteration.

    Attributes:
      operations: the operations of an iteration, in order.
      needed: Tensors whose values are needed at the end of an iteration.
      sums: pairs (output of the loop, Tensor of an iteration) that are summed over iterations.
      iterations: the number of iterations; 1 if it is unknown.
      tape: Tensors of each iteration that are saved for the gradient.
      tape_of: the loop whose tape an iteration reads, or None.
    """

    operations: list[Operation]
    needed: list[Tensor]
    sums: list[tuple[Tensor, Tensor]]
    iterations: float
    tape: list[Tensor]
    tape_of: Optional[Operation]


def with_inner_operations(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yields operations, each followed by its inner operations.

    Args:
      operations: Operations.
    """
    for op in operations:
        yield op
        yield from with_inner_operations(op.inner_operations)

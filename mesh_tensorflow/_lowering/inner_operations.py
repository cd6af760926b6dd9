"""The operations of a program, those that are held by loops and the like among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mesh_tensorflow._core.operation import Operation

__all__ = ["INNER_OPERATIONS", "with_inner_operations"]

# Attributes of operations that hold the operations inside them.
INNER_OPERATIONS = ("_cond_ops", "_body_ops", "_operations", "_forward_operations")


def with_inner_operations(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yields operations, each before those inside it: conditions and bodies of loops, gradients."""
    for op in operations:
        yield op
        for name in INNER_OPERATIONS:
            inner = getattr(op, name, ())
            if isinstance(inner, (list, tuple)):  # a class of a user may mean something else
                yield from with_inner_operations(x for x in inner if isinstance(x, Operation))

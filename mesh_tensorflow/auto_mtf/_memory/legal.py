"""Finds which layout rules of a program are legal, and which exclude each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from typing import Union

from mesh_tensorflow._core.layout import LayoutRules
from mesh_tensorflow._core.operation import Operation, with_inner_operations
from mesh_tensorflow.auto_mtf._memory.space import LayoutSpace
from mesh_tensorflow.auto_mtf.valid_layouts import LayoutValidator
from mesh_tensorflow.layers._attention.blocked_operation import Blocked
from mesh_tensorflow.ops._control.control import CustomGradientOperation
from mesh_tensorflow.ops._control.recompute import DelayOperation
from mesh_tensorflow.ops._control.while_loop import WhileGradientOperation, WhileLoopOperation
from mesh_tensorflow.ops._movement.reshape import ReshapeOperation
from mesh_tensorflow.ops._variables.assign import Assign
from mesh_tensorflow.signal._fft import FourierOperation

__all__ = ["layout_pairs", "layout_space"]

_SEPARATORS = re.compile(r"[;,\s]+")

# Operations that process each of their tensors independently, or move from one layout to another.
_TENSORS_APART = (
    Assign,
    CustomGradientOperation,
    DelayOperation,
    FourierOperation,
    WhileLoopOperation,
    WhileGradientOperation,
)


# With exchanges, also what changes dimensions, or passes parts of a memory around.
_EXCHANGES = (*_TENSORS_APART, Blocked, ReshapeOperation)


def layout_space(
    operations: Iterable[Operation], validator: LayoutValidator, exchanges: bool = False
) -> LayoutSpace:
    """Returns the legal layouts of a program.

    Those that ring attention refuses are not among them.

    Args:
      operations: the Operations of the program.
      validator: the LayoutValidator of the program.
      exchanges: whether one mesh dimension may split a dimension before a reshape and another one
        after it, and both the rows and the memory of attention by blocks.
    """
    apart = _EXCHANGES if exchanges else _TENSORS_APART
    every = list(with_inner_operations(operations))
    rings = [op for op in every if isinstance(op, Blocked) and op.ring_dims]
    alike = {frozenset(d.name for d in op.ring_dims) for op in rings}
    # A tensor that has a name twice cannot be split along it.
    repeated = {
        name
        for op in every
        for t in op.outputs
        for name in t.shape.dimension_names
        if t.shape.dimension_names.count(name) > 1
    }
    sizes = validator.mesh_dimension_name_to_size
    pairs = [
        (d, m)
        for d in validator.splittable_mtf_dimension_names - repeated
        for m in sizes
        if validator.is_valid_assignment(d, m) and all(_has_parts(op, d, sizes[m]) for op in rings)
    ]
    sets = {names for op in every for names in _together(op, apart, alike)}
    return LayoutSpace(pairs, sizes, sets, alike)


def _has_parts(op: Blocked, name: str, processors: int) -> bool:
    """Returns whether processors of a ring can cut a dimension as they have to, if it is one's."""
    parts = op.parts_in_ring * processors
    return all(d.size % parts == 0 for d in op.ring_dims if d.name == name)


def _together(
    op: Operation, apart: tuple[type, ...], alike: Iterable[Set[str]]
) -> list[frozenset[str]]:
    """Returns sets of dimension names, no two of which may be split over one mesh dimension.

    Args:
      op: an Operation.
      apart: classes of those that process each of their tensors independently.
      alike: sets of names that layouts split alike, as what exchanges dimensions allows.
    """
    tensors = [frozenset(t.shape.dimension_names) for t in [*op.inputs, *op.outputs]]
    if isinstance(op, apart):
        return tensors
    found = [frozenset().union(*tensors)]
    if isinstance(op, _EXCHANGES):
        for group in alike:
            found = [s - group | kept for s in found for kept in _one_of(s & group)]
        found += tensors
    return found


def _one_of(names: Set[str]) -> list[Set[str]]:
    return [{name} for name in names] or [names]


def layout_pairs(layout: Union[str, LayoutRules, Mapping[str, str]]) -> list[tuple[str, str]]:
    """Returns the pairs (dimension name, mesh dimension name) of a layout.

    Args:
      layout: a string such as "batch:rows;d_ff:cols", LayoutRules, or a dictionary.

    Raises:
      ValueError: a string is malformed.
    """
    if isinstance(layout, LayoutRules):
        return sorted(layout._pairs)
    if isinstance(layout, Mapping):
        return sorted(layout.items())
    pairs = []
    for piece in filter(None, _SEPARATORS.split(layout)):
        d, colon, m = piece.partition(":")
        if not (d and m and colon) or ":" in m:
            raise ValueError(
                f"malformed layout {layout!r}: {piece!r} is not a pair left:right. Write "
                'it as "batch:rows;d_ff:cols"'
            )
        pairs.append((d, m))
    return pairs

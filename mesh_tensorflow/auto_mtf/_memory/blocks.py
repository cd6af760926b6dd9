"""Blocks of memory, the operations that make and read them, and what stored layouts add."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

import numpy as np

from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.shape import Dimension, Shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow.auto_mtf._memory.storing import Storing
from mesh_tensorflow.auto_mtf._memory.updates import Updates, takes_again
from mesh_tensorflow.ops._variables.assign import Assign
from mesh_tensorflow.ops._variables.variable import Variable

__all__ = ["Block", "Column", "Item", "StoredItems", "kinds_of", "maximal_rows"]

_NOTHING = 2**62  # parts of a block that does not exist


class Column(NamedTuple):
    """What decides how a block is split.

    Attributes:
      dims: sorted names of its dimensions that may be split.
      weight: the dimensions of the weight, if it belongs to an update and is stored in parts, or is
        a whole copy of that; else None.
      stored: names of the dimensions that may be stored in parts; empty for a whole copy.
    """

    dims: tuple[str, ...]
    weight: Optional[tuple[Dimension, ...]] = None
    stored: tuple[str, ...] = ()

    def names(self, candidates: frozenset[str]) -> tuple[str, ...]:
        """Returns the sorted names of all dimensions that the number of parts depends on."""
        if self.weight is None:
            return self.dims
        return tuple(sorted({*self.dims, *(d.name for d in self.weight)} & candidates))

    def parts(self, layout: Mapping[str, str], sizes: Mapping[str, int], storing: Storing) -> int:
        """Returns the number of parts under a layout.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
          sizes: a dictionary from mesh dimension names to sizes.
          storing: a Storing.
        """
        split = math.prod(sizes[layout[d]] for d in self.dims if d in layout)
        if self.weight is None:
            return split
        if self.stored:
            return split * storing.parts(self.weight, self.stored, layout)
        return split if storing.rules(self.weight, layout) else _NOTHING


class Block(NamedTuple):
    """A tensor, or another block of memory that is allocated and freed as one."""

    name: str
    kind: str
    bytes: int
    column: Column


class Item(NamedTuple):
    """An operation, or one assignment of an operation that has several."""

    name: str
    op: Operation
    inputs: list[str]
    outputs: list[str]


class StoredItems:
    """What a stored layout adds to a program: copies of weights, and parts of gradients."""

    def __init__(self, updates: Updates, weights_too: bool, candidates: frozenset[str]):
        """Creates the StoredItems.

        Args:
          updates: the Updates of the program.
          weights_too: whether weights are stored in parts, besides what optimizers keep.
          candidates: names of the dimensions that may be split.
        """
        self._updates, self._weights_too = updates, weights_too
        self._candidates = candidates
        self._made: set[str] = set()

    def column(self, op: Operation, dims: tuple[str, ...], shape: Shape) -> Column:
        """Returns the Column of a variable, or of an output of an operation."""
        weight = self._updates.weight_of.get(op)
        whole = isinstance(op, Variable) and op.trainable and not self._weights_too
        if weight is None or whole:
            return Column(dims)
        return Column(dims, tuple(weight), tuple(sorted(shape.dimension_names)))

    def inputs(
        self, op: Operation, roots: Mapping[Tensor, str]
    ) -> tuple[list[str], list[tuple[Item, Block]]]:
        """Returns the names of an operation's inputs, and what is made before it.

        Args:
          op: an Operation.
          roots: the names of the blocks of Tensors.
        """
        names, added = [], []
        for i, x in enumerate(op.inputs):
            name, root = self._instead(op, i, x), roots[x]
            names.append(f"{root}{name}" if name else root)
            if name and names[-1] not in self._made:
                self._made.add(names[-1])
                added.append(self._copy(op, i, x, root, names[-1]))
        return names, added

    def _instead(self, op: Operation, i: int, x: Tensor) -> str:
        """Returns what is added to the name of an input, or nothing if it is used as it is."""
        weight_of = self._updates.weight_of
        if isinstance(op, Assign):
            v = op.variables[i]
            return "/whole" if self._whole(v) and x.operation in weight_of else ""
        if op in weight_of:
            made_in_parts = x.operation in weight_of or not x.shape.ndims
            return "" if made_in_parts else "/part"
        if x in self._updates.gathers and self._weights_too:
            return "/again" if takes_again(op) else "/whole"
        return ""

    def _whole(self, v: Variable) -> bool:
        return v in self._updates.weight_of and v.trainable and not self._weights_too

    def _copy(self, op: Operation, i: int, x: Tensor, root: str, name: str) -> tuple[Item, Block]:
        dims = tuple(sorted(set(x.shape.dimension_names) & self._candidates))
        size = x.shape.size * x.dtype.size
        if name.endswith("/part"):
            weight = self._updates.weight_of[op]
            column = Column(dims, tuple(weight), tuple(sorted(x.shape.dimension_names)))
            return Item(name, op, [root], [name]), Block(name, "gradients", size, column)
        if isinstance(op, Assign):
            column = Column(dims, tuple(self._updates.weight_of[op.variables[i]]))
            return Item(name, op, [root], [name]), Block(name, "updates", size, column)
        column = Column(dims, tuple(self._updates.weight_of[x.operation]))
        return Item(name, op, [], [name]), Block(name, "gathered", size, column)


def maximal_rows(rows: np.ndarray) -> np.ndarray:
    """Returns the rows that no other row exceeds in all columns; the peak is at one of them."""
    rows = np.unique(rows, axis=0)
    kept = np.empty([0, rows.shape[1]], rows.dtype)
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not (kept >= row).all(axis=1).any():
            kept = np.concatenate([kept, row[np.newaxis]])
    return kept


def kinds_of(operations: Sequence[Operation]) -> dict[Operation, str]:
    """Returns, for each operation, the kind of its output tensors."""
    backward: Optional[int] = None
    kinds = {}
    for i, op in enumerate(operations):
        if op.gradient_of is not None:
            backward = i if backward is None else backward
            kinds[op] = "recomputed" if op.original is not None else "gradients"
        else:
            kinds[op] = "activations" if backward is None else "updates"
    return kinds

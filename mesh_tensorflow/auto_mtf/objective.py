"""Peak memory: exact for a layout, and as constraints of an integer program.

First the live tensors of a schedule, as in the classic release; then the memory that a processor
needs at each point of a step, with variables, loops and what stored layouts add.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

import numpy as np

from mesh_tensorflow._core.operation import Loop, Operation, Tensor
from mesh_tensorflow._core.placement import inner_mesh_impl
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.auto_mtf import scheduler
from mesh_tensorflow.auto_mtf._space import (
    NO_UPDATES,
    LayoutSpace,
    Storing,
    Updates,
    Weight,
    takes_again,
)
from mesh_tensorflow.auto_mtf.graph_interface import (
    GraphInterface,
    MemoryChange,
    live_names,
    memory_changes,
)
from mesh_tensorflow.ops._control.while_loop import is_of_microbatches
from mesh_tensorflow.ops._variable import Assign, Variable

__all__ = ["LiveMemory", "live_memory", "peak_memory"]


# The number of parts of what a layout does not need: of any bytes, one part is nothing.
NO_BLOCK = 2**62


class Column(NamedTuple):
    """What decides how a block is split.

    Attributes:
      dims: sorted names of its dimensions that may be split.
      weight: the dimensions of the weight, if it belongs to an update and is stored in parts, or is
        a whole copy of that; else None.
      stored: names of the dimensions that may be stored in parts; empty for a whole copy.
      sizes: the sizes of `dims` where slices may end in padding; else empty.
      only: names of dimensions without a split of which the block is not there; none if it always
        is.
    """

    dims: tuple[str, ...]
    weight: Optional[Weight] = None
    stored: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    only: tuple[str, ...] = ()

    def names(self, candidates: Collection[str]) -> tuple[str, ...]:
        """Returns the sorted names of all dimensions that the number of parts depends on."""
        # Along which dimension a weight is stored in parts depends on how the layout splits the
        # others.
        of_weight = {d.name for d in self.weight or ()}
        return tuple(sorted({*self.dims, *self.only, *of_weight}.intersection(candidates)))

    def parts(self, layout: Mapping[str, str], storing: Storing) -> float:
        """Returns the number of parts under a layout; less by the padding, if that counts.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
          storing: a Storing, on the mesh.
        """
        if self.only and not any(d in layout for d in self.only):
            return NO_BLOCK
        into = {d: storing.mesh_sizes[layout[d]] for d in self.dims if d in layout}
        split: float = math.prod(into.values())
        for d, size in zip(self.dims, self.sizes):
            if d in into and size % into[d]:
                # Of ten elements on four processors, each has three. A little less, so that what
                # is divided by it is not rounded down by a whole byte.
                split *= size / (into[d] * -(-size // into[d])) * (1 - 2**-40)
        if self.weight is None:
            return split
        if self.stored:
            return split * storing.parts(self.weight, self.stored, layout)
        # A weight that is stored as it is computed with needs no whole copy beside it.
        return split if storing.rules(self.weight, layout) else NO_BLOCK


class LiveMemory:
    """Bytes in use on a processor over time, by what decides how they are split.

    Attributes:
      columns: the Columns, one for all blocks of memory that are split alike.
      dimension_sets: for each column, the sorted names of the dimensions that its parts depend on.
      bytes: an int64 array [times, columns], the bytes of all live blocks of a column, before
        splitting.
    """

    def __init__(
        self,
        columns: Iterable[Column],
        bytes: np.ndarray,
        candidates: Collection[str],
        storing: Storing,
    ):
        """Creates a LiveMemory.

        Args:
          columns: see LiveMemory.
          bytes: see LiveMemory.
          candidates: names of the dimensions that may be split.
          storing: a Storing, on the mesh.
        """
        self.columns, self.bytes, self._storing = list(columns), bytes, storing
        self.dimension_sets = [column.names(candidates) for column in self.columns]
        # A peak is at one of these times under every layout, so that others need not be looked at
        # again.
        self._highest = maximal_rows(bytes)

    def parts(self, layout: Mapping[str, str]) -> np.ndarray:
        """Returns the number of parts into which each column is split."""
        return np.array([c.parts(layout, self._storing) for c in self.columns])

    def parts_of_rows(
        self, column: int, space: LayoutSpace, dims: Sequence[str], rows: np.ndarray
    ) -> Sequence[int]:
        """Returns the number of parts of a column for each assignment of some dimensions.

        Args:
          column: the index of a column.
          space: a LayoutSpace.
          dims: names of dimensions, with those of the column.
          rows: an int64 array [assignments, dims] of mesh axes.
        """
        one, own = self.columns[column], self.dimension_sets[column]
        if one.weight is None and not one.only:  # all at once, as there are many
            return space.parts(own, rows[:, [dims.index(d) for d in own]]).tolist()
        # A search splits evenly, so that no part is less by padding.
        return [int(one.parts(space.layout(dims, row), self._storing)) for row in rows]

    def in_use(self, layout: Mapping[str, str]) -> np.ndarray:
        """Returns the bytes in use on one processor at each time.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
        """
        # Without remainders, since a layout that a search tries divides all sizes evenly.
        return (self.bytes // self.parts(layout)).sum(axis=1)

    def peak(self, layout: Mapping[str, str]) -> int:
        """Returns the peak memory per processor in bytes; see `in_use`."""
        return int((self._highest // self.parts(layout)).sum(axis=1).max(initial=0))

    def least(self, space: LayoutSpace) -> int:
        """Returns a lower bound of the peak memory of all layouts, in bytes.

        Args:
          space: a LayoutSpace.
        """
        most_parts = [
            # Each column as small as in any layout: no layout needs less, though none may reach it.
            max(self.parts_of_rows(i, space, dims, space.assignments(dims)))
            for i, dims in enumerate(self.dimension_sets)
        ]
        return int((self._highest // np.array(most_parts)).sum(axis=1).max(initial=0))


def maximal_rows(rows: np.ndarray) -> np.ndarray:
    """Returns the distinct rows that no other row exceeds in all columns."""
    rows = np.unique(rows, axis=0) if len(rows) else rows
    maximal = np.zeros((0, rows.shape[1]), rows.dtype)
    # A row that exceeds another one has a larger sum, so it comes first and is in `kept`.
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not (maximal >= row).all(axis=1).any():
            maximal = np.concatenate([maximal, row[np.newaxis]])
    return maximal


def peak_memory(
    graph: GraphInterface,
    schedule: Iterable[int],
    layout: Mapping[str, str],
    mesh_sizes: Mapping[str, int],
) -> int:
    """Returns the peak memory of live tensors, in bytes per processor.

    Args:
      graph: a GraphInterface.
      schedule: indices of operations, in execution order.
      layout: a dictionary from dimension names to mesh dimension names.
      mesh_sizes: a dictionary from mesh dimension names to sizes.
    """
    size = {
        name: graph.get_tensor_size(name, layout, mesh_sizes)
        for name in graph.get_all_tensor_names()
    }
    column = dict.fromkeys(size, 0)
    changes = graph.memory_changes(schedule)
    return int(bytes_over_time(changes, column, size, 1).max(initial=0))


def bytes_over_time(
    changes: Iterable[MemoryChange], column: Mapping[str, int], size: Mapping[str, int], count: int
) -> np.ndarray:
    """Returns the bytes in use at each change in memory, an int64 array [changes, columns].

    Args:
      changes: MemoryChanges.
      column: the column that each tensor counts in, by name.
      size: the bytes of each tensor.
      count: the number of columns.
    """
    now = np.zeros(count, np.int64)
    rows = []
    for born, dead in changes:
        for name in born:
            now[column[name]] += size[name]
        # What an operation reads last is still there while it runs.
        rows.append(now.copy())
        for name in dead:
            now[column[name]] -= size[name]
    return np.array(rows, np.int64).reshape(len(rows), count)


def live_memory(graph: GraphInterface, schedule: Sequence[int], space: LayoutSpace) -> LiveMemory:
    """Returns the bytes in memory under a schedule, by the dimensions that may be split.

    Tensors with the same splittable dimensions are counted together, and times that cannot be the
    peak of any layout are left out. So the result grows with the number of distinct sets of
    dimensions, not with the number of layers.

    Args:
      graph: a GraphInterface.
      schedule: indices of operations, in execution order.
      space: the LayoutSpace, whose dimensions may be split.
    """
    kind = {
        name: tuple(sorted(set(graph.get_tensor_mtf_dimension_names(name)) & set(space.dims)))
        for name in graph.get_all_tensor_names()
    }
    sets = sorted(set(kind.values()))
    column = {name: sets.index(dimension_set) for name, dimension_set in kind.items()}
    size = {name: graph.get_tensor_size(name) for name in kind}
    rows = bytes_over_time(graph.memory_changes(schedule), column, size, len(sets))
    storing = Storing(Shape(list(space.mesh_sizes.items())), None)
    return LiveMemory(map(Column, sets), maximal_rows(rows), space.dims, storing)


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


def kinds_of(operations: Sequence[Operation]) -> dict[Operation, str]:
    """Returns, for each operation, the kind of its output tensors."""
    backward: Optional[int] = None
    kinds = {}
    for i, op in enumerate(operations):
        if op.gradient_of is not None:
            backward = i if backward is None else backward
            kinds[op] = "recomputed" if op.original is not None else "gradients"
        else:
            # After the first gradient, what is not part of one is part of an update.
            kinds[op] = "activations" if backward is None else "updates"
    return kinds


def _with_sums_early(loop: Loop) -> list[Operation]:
    """Returns the operations of an iteration; what is only summed is made when its input is free.

    So gradients that are cast and summed over iterations are not all in memory at the end of one.
    """
    needed, makers = {*loop.needed, *loop.tape}, {y for op in loop.operations for y in op.outputs}
    readers: dict[Tensor, list[Operation]] = {}
    for op in loop.operations:
        for x in op.inputs:
            readers.setdefault(x, []).append(op)
    summed: dict[Operation, Tensor] = {}  # what is between a gradient and its sum, with its input
    for op in reversed(loop.operations):
        summands = {x for x in op.inputs if x in makers}
        waiting = {reader for y in op.outputs for reader in readers.get(y, ())}
        goes_on = not op.outputs or needed.intersection(op.outputs) or waiting - summed.keys()
        if len(summands) == 1 and not goes_on:
            summed[op] = summands.pop()
    place: dict[Operation, int] = {op: i for i, op in enumerate(loop.operations)}
    for op in filter(summed.__contains__, loop.operations):
        others = [reader for reader in readers[summed[op]] if reader not in summed]
        place[op] = max(place[other] for other in [summed[op].operation, *others])
    # A stable sort: what has one place stays in the order that it has.
    return sorted(loop.operations, key=place.__getitem__)


class Held(NamedTuple):
    """A tensor or a variable in memory.

    Attributes:
      name: the name of the tensor or the variable.
      kind: "weights", "slots", "copies" (of both and of images, as XLA makes them), "activations",
        "recomputed", "gradients", "updates", "gathered" (whole copies of weights that are stored in
        parts, and what an operation has in another layout) or "loop tape".
      bytes: its size on one processor.
    """

    name: str
    kind: str
    bytes: int


class ResidentMemory(LiveMemory):
    """The memory of a program on one processor over time, under any layout.

    Variables, including optimizer slots, are in memory throughout. Other tensors are live from the
    operation that creates them to the last one that reads them. Operations run in the order of
    `scheduler`, or in order of creation with updates as early as possible, whichever has the lower
    peak.

    Attributes:
      at: for each time, the name of the operation that runs.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        outputs: Sequence[Tensor],
        candidates: frozenset[str],
        storing: Storing,
        updates: Updates = NO_UPDATES,
        impl: Optional[MeshImpl] = None,
    ):
        """Creates a ResidentMemory.

        Args:
          operations: the Operations of a program that run, in order.
          outputs: Tensors that stay in memory until the end.
          candidates: names of the dimensions that may be split.
          storing: a Storing.
          updates: the Updates of the program, if variables are stored in parts; or none.
          impl: a MeshImpl, to count what is held in its layout alone, too: padding, and what
            operations that need a dimension whole have in another layout.
        """
        self._candidates, self._impl, self._storing = candidates, impl, storing
        self._updates, self._outputs = updates, outputs
        blocks = self._variable_blocks(operations)
        self._blocks = {b.name: b for b in blocks}
        self._variables = list(self._blocks)
        self._root: dict[Tensor, str] = {}
        self._kinds = kinds_of(operations)
        self._items = list(self._make_items(operations))
        self._final = {self._root[t] for t in outputs if t in self._root}
        self._columns: dict[Column, int] = {}
        for block in self._blocks.values():
            self._columns.setdefault(block.column, len(self._columns))
        self._inner: dict[str, list[MemoryChange]] = {}
        for item in self._items:
            loop = item.op.loop
            if loop is not None and item.name == item.op.name:
                self._inner[item.name] = list(self._iteration(item.op, loop))
        # By bytes before splitting: one order serves all layouts, so that memory is linear in their
        # assignments.
        self._changes, bytes_, self.at = min(
            map(self._run, self._orders()), key=lambda run: run[1].sum(axis=1).max()
        )
        super().__init__(self._columns, bytes_, candidates, storing)

    # -- blocks of memory

    def _block(self, t: Tensor, kind: str) -> Block:
        weight = self._updates.sums.get(t, self._updates.weight_of.get(t.operation))
        column = self._column(t.operation, t.shape, weight)
        return Block(t.name, kind, t.shape.size * t.dtype.size, column)

    def _column(self, op: Operation, shape: Shape, weight: Optional[Weight]) -> Column:
        # Below stage 3, weights are whole, and only slots and updates are in parts.
        if isinstance(op, Variable) and op.trainable and not self._storing.weights_too:
            weight = None
        stored = () if weight is None else tuple(sorted(shape.dimension_names))
        column = Column(self._split(shape), weight, stored)
        if self._impl is None:
            return column
        sizes = {d.name: d.size for d in shape}
        return column._replace(sizes=tuple(sizes[d] for d in column.dims))

    def _split(self, shape: Shape) -> tuple[str, ...]:
        return tuple(sorted(set(shape.dimension_names) & self._candidates))

    def _moved(self, op: Operation) -> Optional[Block]:
        """Returns what an operation has in another layout than the program; None if nothing."""
        outer = self._impl
        inner = None if outer is None else inner_mesh_impl(op, outer)
        if outer is None or inner is None:
            return None
        tensors = dict.fromkeys(x for x in op.inputs + op.outputs if x.mesh is op.mesh)
        most = sum(
            inner.slice_size(x.shape) * x.dtype.size
            for x in tensors
            if inner.tensor_layout(x.shape) != outer.tensor_layout(x.shape)
        )
        # Bytes of one processor as they are: in other layouts, something else would move.
        return Block(f"{op.name}/moved", "gathered", most, Column(()))

    def _variable_blocks(self, operations: Sequence[Operation]) -> Iterator[Block]:
        for op in operations:
            if isinstance(op, Variable):
                kind = "weights" if op.trainable else "slots"
                column = self._column(op, op.shape, self._updates.weight_of.get(op))
                yield Block(op.name, kind, op.size * op.slice_dtype.size, column)

    def _reads(self, op: Operation, i: int) -> Sequence[str]:
        """Returns the names of what has to be in memory for an operation to read an input."""
        return [self._root[op.inputs[i]]]

    def _is_kept(self, op: Operation, y: Tensor, inputs: Sequence[str]) -> bool:
        """Returns whether a result is in memory, of an operation that reads what has some names."""
        return op.takes_memory

    def _make_items(self, operations: Iterable[Operation]) -> Iterator[Item]:
        for op in operations:
            passed = op.passes_on(self._candidates)
            # What passes its input on in every layout has no memory of its own.
            self._root.update((y, self._root[x]) for y, x in passed.items())
            if passed:
                continue
            copies = [self._copy(op, i) for i in range(len(op.inputs))]
            read_by = [self._reads(op, i) if c is None else [c.name] for i, c in enumerate(copies)]
            for i, copy_ in enumerate(copies):
                # One copy serves all that read it.
                if copy_ is not None and copy_.name not in self._blocks:
                    self._blocks[copy_.name] = copy_
                    # A gathered weight is made of what is stored, which is in memory throughout.
                    read = [] if copy_.kind == "gathered" else [*self._reads(op, i)]
                    yield Item(copy_.name, op, read, [copy_.name])
            if isinstance(op, Assign):
                for i, names in enumerate(read_by):
                    # Each by itself, so that a new value is freed as soon as its variable is
                    # assigned.
                    yield Item(f"{op.name}/{i}", op, [*names], [])
                continue
            inputs = [name for names in read_by for name in names]
            for y in op.outputs:
                self._root[y] = y.name
                block, is_kept = self._block(y, self._kinds[op]), self._is_kept(op, y, inputs)
                self._blocks[y.name] = block if is_kept else block._replace(bytes=0)
            outputs = [y.name for y in op.outputs]
            loop = op.loop
            if loop is not None:
                # The tape is no input of the operation, but lives until the loop of the gradient
                # has read it.
                inputs += [name for name in self._tapes(loop) if name not in inputs]
                outputs += self._make_tape(op, loop)
            moved = self._moved(op)
            if moved is not None:
                # Nothing reads it, so that it is in memory while the operation runs.
                self._blocks[moved.name] = moved
                outputs.append(moved.name)
            yield Item(op.name, op, inputs, outputs)

    def _copy(self, op: Operation, i: int) -> Optional[Block]:
        """Returns what an operation reads in place of an input, where variables are in parts."""
        weight_of, x = self._updates.weight_of, op.inputs[i]
        # What an update computes is in parts already, and what has no dimensions cannot be.
        made_in_parts = x.operation in weight_of or x in self._updates.sums
        stored: tuple[str, ...] = ()
        if isinstance(op, Assign):
            v = op.variables[i]
            whole = v in weight_of and v.trainable and not self._storing.weights_too
            if not (whole and made_in_parts):
                return None
            # An update in parts is gathered before it is assigned to a weight that is stored whole.
            end, kind, weight = "/whole", "updates", weight_of[v]
        elif op in weight_of:
            if made_in_parts or not x.shape.ndims:
                return None
            # A gradient is split before the update reads it.
            end, kind, weight = "/part", "gradients", weight_of[op]
            stored = tuple(sorted(x.shape.dimension_names))
        elif self._storing.early and is_of_microbatches(op):
            return None  # in each iteration
        elif x in self._updates.sums:
            end, kind, weight = "/whole", "gathered", self._updates.sums[x]
        elif x in self._updates.gathers and self._storing.weights_too:
            return self._whole_weight(x, op)
        else:
            return None
        column = Column(self._split(x.shape), weight, stored)
        return Block(f"{self._root[x]}{end}", kind, x.shape.size * x.dtype.size, column)

    def _make_tape(self, op: Operation, loop: Loop) -> list[str]:
        names = []
        for t in loop.tape:
            block = self._block(t, "loop tape")
            name = f"{op.name}/tape/{t.name}"
            # The gradient's loop reads the values of all iterations.
            self._blocks[name] = block._replace(name=name, bytes=int(block.bytes * loop.iterations))
            names.append(name)
        return names

    def _tapes(self, loop: Loop) -> list[str]:
        if loop.tape_of is None:
            return []
        return [n for n in self._blocks if n.startswith(f"{loop.tape_of.name}/tape/")]

    def _iteration(self, at: Operation, loop: Loop) -> Iterator[MemoryChange]:
        """Yields the changes in memory during an iteration of a loop, and adds their blocks."""
        operations = _with_sums_early(loop)
        last: dict[Tensor, int] = {}
        for i, op in enumerate(operations):
            last.update(dict.fromkeys(op.outputs + op.inputs, i))
        # What the next iteration takes over lives to the end of this one. What is summed up over
        # iterations is added as soon as it is made.
        last.update(dict.fromkeys(loop.needed, len(operations)))
        dead: dict[int, list[str]] = {}
        gathered = self._gathered_by(at, operations)
        for i, op in enumerate(operations):
            born: dict[Block, int] = {**gathered.get(i, {})}
            if op.takes_memory and not op.passes_on(self._candidates):
                born.update((self._block(y, "activations"), last[y]) for y in op.outputs)
            moved = self._moved(op)
            if moved is not None:
                born[moved] = i
            for block, end in born.items():
                self._blocks[block.name] = block
                self._columns.setdefault(block.column, len(self._columns))
                dead.setdefault(end, []).append(block.name)
            yield MemoryChange([block.name for block in born], [])
            yield from () if op.loop is None else self._iteration(op, op.loop)
            yield MemoryChange([], dead.pop(i, []))
        yield MemoryChange([], dead.pop(len(operations), []))

    def _gathered_by(
        self, loop: Operation, operations: Sequence[Operation]
    ) -> dict[int, dict[Block, int]]:
        """Returns the whole copies of weights that are made in each iteration of a loop.

        By the place of the first operation that reads one: the copy, with the place of the last.
        """
        spans: dict[Block, list[int]] = {}
        for i, op in enumerate(operations if is_of_microbatches(loop) else ()):
            for x in op.inputs:
                if x in self._updates.gathers and self._storing.weights_too:
                    copy = self._whole_weight(x, op)
                    spans.setdefault(copy._replace(name=f"{loop.name}/{copy.name}"), []).append(i)
        born: dict[int, dict[Block, int]] = {}
        for block, places in spans.items():
            born.setdefault(places[0], {})[block] = places[-1]
        return born

    def _whole_weight(self, x: Tensor, op: Operation) -> Block:
        """Returns the whole copy of a weight in parts that an operation reads."""
        # Gathered once more for the backward pass, so that no whole copy lives in between.
        name = f"{self._root[x]}{'/again' if takes_again(op) else '/whole'}"
        column = Column(self._split(x.shape), self._updates.weight_of[x.operation])
        return Block(name, "gathered", x.shape.size * x.dtype.size, column)

    # -- lifetimes

    def _orders(self) -> list[list[int]]:
        """Returns orders of the items, of which the one with the lowest peak counts."""
        as_listed = scheduler.list_schedule(
            [item.name for item in self._items],
            [item.inputs for item in self._items],
            [item.outputs for item in self._items],
            {name: block.bytes for name, block in self._blocks.items()},
            self._final,
        )
        # Neither order is always better, and TensorFlow promises none.
        return [as_listed, self._eager_order()]

    def _needed(self) -> list[list[int]]:
        """Returns, for each item, the numbers of those that make what it reads."""
        maker = {name: i for i, item in enumerate(self._items) for name in item.outputs}
        return [list(dict.fromkeys(maker[n] for n in item.inputs)) for item in self._items]

    def _eager_order(self) -> list[int]:
        """Returns the order of creation, with updates as early as possible.

        Operations that depend only on variables and constants run when they are first needed.
        """
        inputs = self._needed()
        early: list[bool] = []  # whether an operation could be made before all others
        readers: dict[int, list[int]] = {}
        missing = [0] * len(inputs)
        for i, numbers in enumerate(inputs):
            item = self._items[i]
            # What is made when it is needed, rather than when it can be.
            waits = not item.inputs or (self._kinds[item.op] == "updates" and bool(item.outputs))
            early.append(waits and all(early[n] for n in numbers))
            for number in numbers:
                if not early[number]:
                    readers.setdefault(number, []).append(i)
                    missing[i] += 1
        order: dict[int, None] = {}

        def with_inputs(number: int) -> None:
            # A stack instead of a recursion, for which chains of operations may be too long.
            waiting = [number]
            while waiting:
                needed = [n for n in inputs[waiting[-1]] if early[n] and n not in order]
                if needed:
                    waiting += needed
                else:
                    order[waiting.pop()] = None

        # What could be made early, and nothing has needed, comes last.
        for first in [i for i, it in enumerate(early) if not it] + list(range(len(inputs))):
            ready = [first]
            while ready:
                number = ready.pop()
                if number in order:
                    continue
                with_inputs(number)
                # The last one of a stack is next, so that the first reader runs first.
                for reader in reversed(readers.get(number, [])):
                    missing[reader] -= 1
                    op = self._items[reader].op
                    is_update = isinstance(op, Assign) or self._kinds[op] == "updates"
                    if is_update and not missing[reader]:
                        ready.append(reader)
        return list(order)

    def _run(self, order: Sequence[int]) -> tuple[list[MemoryChange], np.ndarray, list[str]]:
        """Returns the changes in memory in an order; the bytes and the operation at each time."""
        inputs, outputs = [i.inputs for i in self._items], [i.outputs for i in self._items]
        changes = [*memory_changes(inputs, outputs, self._final, order)] or [MemoryChange([], [])]
        # Variables have no operation that makes them: they are in memory from one step to the next.
        changes[0].born[:0] = self._variables
        column = {name: self._columns[block.column] for name, block in self._blocks.items()}
        size = {name: block.bytes for name, block in self._blocks.items()}
        outer = bytes_over_time(changes, column, size, len(self._columns))
        rows = [outer]
        at = [self._items[number].name for number in order] or [""]
        for place, name in enumerate(at[: len(changes)]):
            # Moments within loops come after those of the schedule, where `contents` looks for
            # them.
            inner = bytes_over_time(self._inner.get(name, ()), column, size, len(self._columns))
            rows.append(outer[place] + inner)
            at += [name] * len(inner)
        return changes, np.concatenate(rows), at

    # -- under a layout

    def on(self, storing: Storing) -> ResidentMemory:
        """Returns the same memory with the same stage of storing, on another mesh.

        Args:
          storing: a Storing.
        """
        # Rows are bytes before splitting, so only the numbers of parts depend on the mesh.
        other = copy.copy(self)
        other._storing = storing
        return other

    def _held(self, block: Block, layout: Mapping[str, str]) -> int:
        return int(block.bytes // block.column.parts(layout, self._storing))

    def by_kind(self, layout: Mapping[str, str]) -> dict[str, np.ndarray]:
        """Returns, for each kind, the bytes in use during each operation, except inside loops.

        Steady kinds come first: at the bottom of a chart, they leave even ground to the others.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
        """
        bytes_of = {n: self._held(b, layout) for n, b in self._blocks.items()}
        kind_of = {name: self._blocks[name].kind for born, _ in self._changes for name in born}
        kinds = list(dict.fromkeys(kind_of.values()))
        column = {name: kinds.index(kind) for name, kind in kind_of.items()}
        rows = bytes_over_time(self._changes, column, bytes_of, len(kinds))
        used = {kind: bytes_ for kind, bytes_ in zip(kinds, rows.T) if bytes_.any()}
        return dict(sorted(used.items(), key=lambda pair: -int(pair[1].min())))

    def contents(self, time: int, layout: Mapping[str, str]) -> list[Held]:
        """Returns the live tensors at a time, largest first; see `in_use`."""
        # A moment within a loop has the name of the loop, and the place of that in the schedule.
        place, times = self.at.index(self.at[time]), len(self._changes)
        live = next(itertools.islice(live_names(self._changes), place, None))
        if time >= times:
            moment = time - self.at.index(self.at[time], times)
            within = live_names(self._inner[self.at[time]])
            live = live | next(itertools.islice(within, moment, None))
        blocks = [self._blocks[name] for name in live]
        held = [Held(b.name, b.kind, self._held(b, layout)) for b in blocks]
        return sorted((h for h in held if h.bytes), key=lambda h: (-h.bytes, h.name))

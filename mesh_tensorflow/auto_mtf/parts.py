"""More than one rule for a name: dimensions get names of their own in a part of a program.

A layout splits a dimension in the same way wherever its name occurs. A program may rename it where
another way is better, as from an encoder to a decoder. Here such programs are made of one without:
operations of a part are copied under other names, a reshape stands where a tensor crosses, and the
usual search finds the layout of both names. The copy is what the program would be, had its user
called `mtf.rename_dimension` at these places, with the same gradients; it is estimated only, and
the user's graph stays as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import re
from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from mesh_tensorflow._core.errors import first_names
from mesh_tensorflow._core.graph import Graph, Mesh
from mesh_tensorflow._core.operation import Operation, Tensor, is_of_package
from mesh_tensorflow._core.shape import Dimension, Shape
from mesh_tensorflow._lowering.rewrites import Names, renamed
from mesh_tensorflow.auto_mtf._space import PartBoundary
from mesh_tensorflow.auto_mtf._units import layer_kind
from mesh_tensorflow.auto_mtf.step_time import Estimate, ProgramParts, StepEstimator
from mesh_tensorflow.ops._control.gradients import usable
from mesh_tensorflow.ops._elementwise.binary import AddOperation
from mesh_tensorflow.ops._variable import Assign, Variable

__all__ = ["Crossing", "Part", "RenamedProgram", "best_part", "candidate_parts"]

_NEAR = 1e-3  # a part is worth its renames if a step takes less by a larger fraction
_SHARE = 0.02  # of the time of a step, which a part and the rest have to take at least
_MOST = 8  # parts that are tried
_SHOWN = 4  # tensors to name
_SAME = 1e-6  # times that differ by a smaller fraction are equal
_NO_NAME = re.compile(r"[^A-Za-z0-9_]+")


class Part(NamedTuple):
    """Operations that may have names of their own for dimensions.

    Attributes:
      name: the variable scopes that they are in, without numbers, joined by ", ".
      operations: the operations, with those of their gradients and updates.
    """

    name: str
    operations: frozenset[Operation]


class Crossing(NamedTuple):
    """A tensor that is renamed where it enters or leaves a part.

    Attributes:
      tensor: a Tensor of the user's program.
      reader: the first operation that takes it under the other names.
      enters: whether it enters the part; else it leaves.
    """

    tensor: Tensor
    reader: Operation
    enters: bool


# -- which operation is in which part


def with_unread(operations: Sequence[Operation]) -> list[Operation]:
    """Returns operations, and what was computed again for gradients and then read by none.

    A program leaves that out, but the gradients say that they are of it.
    """
    included, every = set(operations), list[Operation]()

    def add(op: Operation) -> None:
        if op not in included and op.original in included:
            included.add(op)
            for x in op.inputs:
                add(x.operation)
            every.append(op)

    for op in operations:
        if op.gradient_of is not None:
            add(op.gradient_of)
        every.append(op)
    return every


def _first_gradient(operations: Sequence[Operation]) -> int:
    """Returns the number of operations before the first one of a gradient."""
    numbers = (i for i, op in enumerate(operations) if op.gradient_of is not None)
    return next(numbers, len(operations))


def _scopes(operations: Sequence[Operation]) -> dict[Operation, str]:
    """Returns the variable scope, without numbers, of each operation of the forward pass."""
    scopes = {op: layer_kind(op.name) if "/" in op.name else "" for op in operations}
    for op in operations:
        # What is made between scopes belongs to that which it continues.
        makers = (scopes.get(x.operation) for x in op.inputs if x.shape.ndims)
        scopes[op] = scopes[op] or next(filter(None, makers), "")
    for op in operations:
        for x in op.inputs:
            # What the program is given, such as labels, belongs to what reads it first.
            if not x.operation.inputs and not scopes.get(x.operation, "not of these"):
                scopes[x.operation] = scopes[op]
    return scopes


def _members(
    operations: Sequence[Operation], inside: Collection[Operation]
) -> frozenset[Operation]:
    """Returns the operations of a part, with those of its gradients and updates.

    Args:
      operations: all operations of a program.
      inside: the operations of the part that are of the forward pass.
    """
    forward = _first_gradient(operations)
    side: dict[Operation, Optional[bool]] = {op: op in inside for op in operations[:forward]}
    for op in operations[forward:]:
        of = op.original or op.gradient_of  # a copy is where what it is a copy of is
        makers = (side.get(x.operation) for x in op.inputs if x.shape.ndims)
        if of is not None:
            side[op] = side.get(of)
        else:  # of an update
            side[op] = next((one for one in makers if one is not None), None)
    # The slots of an optimizer are made before what tells the weight that they are of.
    for op in reversed(operations[forward:]):
        for x in op.inputs:
            if side.get(x.operation) is None:
                side[x.operation] = side[op]
    for op in operations[forward:]:
        for v, x in zip(op.variables, op.inputs) if isinstance(op, Assign) else ():
            if side.get(v) is None:
                side[v] = side[x.operation]
    return frozenset(op for op, one in side.items() if one)


def candidate_parts(estimator: StepEstimator, layout: Mapping[str, str]) -> list[Part]:
    """Returns the parts of a program that may be worth names of their own.

    These are the variable scopes, of any depth and without numbers, so that layers that repeat are
    one; and each top scope with all that follow it.

    Args:
      estimator: the StepEstimator of the program.
      layout: the fastest layout with one rule for each name.
    """
    operations = with_unread(estimator.parts.graph.operations)
    scopes = _scopes(operations[: _first_gradient(operations)])
    paths = {tuple(scope.split("/")) for scope in scopes.values() if scope}
    prefixes = {path[:i] for path in paths for i in range(1, len(path) + 1)}
    top = list(dict.fromkeys(scope.split("/")[0] for scope in scopes.values() if scope))
    sets = [frozenset([prefix]) for prefix in sorted(prefixes)]
    sets += [frozenset((name,) for name in top[i:]) for i in range(1, len(top) - 1)]
    seconds = estimator.times.by_layer(layout)
    whole = sum(s.total for s in seconds.values())
    candidates: dict[frozenset[Operation], tuple[float, str]] = {}
    for some in sets:
        forward = frozenset(
            op for op, scope in scopes.items() if any(_within(scope, prefix) for prefix in some)
        )
        time = sum(s.total for layer, s in seconds.items() if any(_within(layer, p) for p in some))
        if forward in candidates or not _SHARE * whole <= time <= (1 - _SHARE) * whole:
            continue
        names = [name for name in top if (name,) in some] or ["/".join(p) for p in some]
        candidates[forward] = time, ", ".join(names)
    # Half of a step can gain most: a part that is all of it has nothing to differ from.
    ranked = sorted(
        candidates, key=lambda ops: (abs(candidates[ops][0] - whole / 2), candidates[ops][1])
    )
    return [Part(candidates[ops][1], _members(operations, ops)) for ops in ranked[:_MOST]]


def _within(scope: str, prefix: tuple[str, ...]) -> bool:
    return tuple(scope.split("/"))[: len(prefix)] == prefix


# -- the program under other names


@dataclasses.dataclass
class _Sum:
    """The gradient of a tensor, of what both sides give it.

    Attributes:
      of: the tensor.
      terms: the gradients in the order of their addition, each with the operation that gives it.
      home: whether the tensor is of the part.
      left: by side, how many terms are still to come.
      so_far: by side, the sum of those that have come.
      across: by side, the whole sum under its names.
    """

    of: Tensor
    terms: list[tuple[Tensor, Optional[Operation]]]
    home: bool
    left: Counter[bool]
    so_far: dict[bool, Tensor] = dataclasses.field(default_factory=dict)
    across: dict[bool, Tensor] = dataclasses.field(default_factory=dict)


class RenamedProgram:
    """A copy of a program that has other names of dimensions in a part.

    Attributes:
      program: the ProgramParts of the user's program.
      part: the Part.
      names: from the names of dimensions to those in the part.
      crossings: the Crossings of the forward pass, in order.
      made: the operations of the part without inputs, such as variables, that have other names.
      parts: the ProgramParts of the copy.
    """

    def __init__(self, program: ProgramParts, part: Part, dims: Iterable[str]):
        """Copies a program.

        Args:
          program: the ProgramParts of the user's program.
          part: a Part of it.
          dims: names of the dimensions that have other names in the part.
        """
        self.program, self.part, self._graph = program, part, program.graph
        graph = program.graph
        self.names: Names = _new_names(graph, part, dims)
        self.crossings: list[Crossing] = []
        self.made: list[Operation] = []
        self._copies: dict[Operation, Operation] = {}
        self._tensors: dict[Tensor, Tensor] = {}
        self._across: dict[tuple[Tensor, bool], Tensor] = {}
        self._taken: set[str] = set()
        self._operations: list[Operation] = []
        self._readers: dict[Tensor, list[Operation]] = {}
        every = with_unread(graph.operations)
        for op in every:
            is_differentiated = op.gradient_of is None or op.original is not None
            for x in dict.fromkeys(op.inputs if is_differentiated else ()):
                self._readers.setdefault(x, []).append(op)
        self._place = {op: i for i, op in enumerate(every)}
        self._first_gradient = _first_gradient(every)
        # By the operation whose gradient reads it, and the gradient of its output that it reads.
        self._sums: dict[tuple[Optional[Operation], Tensor], _Sum] = {}
        self._adds: dict[Operation, tuple[_Sum, int]] = {}
        self._accumulations: set[Operation] = set()
        self._found: set[tuple[Optional[Operation], Tensor]] = set()
        self._find_sums(program.outputs)
        mark = graph.mark()
        try:
            for op in every:
                self._operation(op)
        finally:
            graph.roll_back(mark)
        unread = {self._copies[op] for op in set(every).difference(graph.operations)}
        self._operations = [op for op in self._operations if op not in unread]
        outputs = [self._tensors[y] for y in program.outputs]
        self.parts = ProgramParts(self._copied_graph(), outputs)

    def _copied_graph(self) -> Graph:
        graph = copy.copy(self._graph)
        graph._operations = self._operations
        of = self._copies
        graph._all_variables = [of[v] for v in self._graph.all_variables]
        graph._trainable_variables = [of[v] for v in self._graph.trainable_variables]
        return graph

    def __str__(self) -> str:
        """What a user writes to have this program."""
        names = ", ".join(f"{old} is {new}" for old, new in self.names.items())
        lines = [f"in the part {self.part.name!r}, {names}"]
        for enters in (True, False):
            some = [c for c in self.crossings if c.enters == enters]
            lines += [f"  {self._renaming(c)}" for c in some[:_SHOWN]]
            if some[_SHOWN:]:
                where = "into it" if enters else "out of it"
                lines.append(f"  and {len(some) - _SHOWN} more on the way {where}")
        lines_made = [f"{op.name} {renamed(op.outputs[0].shape, self.names)}" for op in self.made]
        if lines_made:
            lines.append(f"  made there with these names: {first_names(lines_made, _SHOWN)}")
        return "\n".join(lines)

    def _renaming(self, crossing: Crossing) -> str:
        """Returns the line that renames a tensor."""
        x, shape = crossing.tensor, crossing.tensor.shape
        inside = renamed(shape, self.names)
        pairs = [(d.name, new.name) for d, new in zip(shape, inside) if d != new]
        pairs = pairs if crossing.enters else [(new, old) for old, new in pairs]
        after = inside if crossing.enters else shape
        if len(pairs) == 1:
            text = f"mtf.rename_dimension(x, {pairs[0][0]!r}, {pairs[0][1]!r})"
        else:
            # At once: what is renamed one by one moves several times.
            text = f"mtf.reshape(x, {','.join(f'{d.name}:{d.size}' for d in after)!r})"
        verb = "enters" if crossing.enters else "leaves"
        where = f"x is {x.name}, which {verb} at {crossing.reader.name}"
        return f"x = {text}, where {where}"

    # -- gradients

    def _find_sums(self, outputs: Iterable[Tensor]) -> None:
        """Finds the gradients whose terms come from both sides, or pass a side unchanged."""
        for y in outputs:
            self._find(None, y)
        # What reads a sum comes before its additions, which are then known as such.
        for op in sorted(self._place, key=self._place.__getitem__, reverse=True):
            for x in op.inputs[1:] if op in self._accumulations else op.inputs:
                self._find(op.gradient_of, x)

    def _find(self, of: Optional[Operation], t: Tensor) -> None:
        """Finds out how the gradient of an output of an operation is added up.

        Args:
          of: the operation; None if the gradient is the result, such as that of a variable.
          t: what may be a gradient.
        """
        giver = t.operation.gradient_of
        if giver is None or _is_within(giver, of) or (of, t) in self._found:
            return
        self._found.add((of, t))
        x, terms, adds = self._terms(of, t, giver)
        self._accumulations.update(adds)
        for term, by in terms:
            self._find(by, term)
        if x is None:
            return
        inside = self.part.operations
        sides = Counter(self._is_inside(term, by) for term, by in terms)
        # Of one side, a sum is made there, and crosses as any tensor does, if it does; but a single
        # term that was made elsewhere has to go to that side and to come back.
        plain = len(sides) == 1 and (adds or (t.operation in inside) in sides)
        if plain and not any((by, term) in self._sums for term, by in terms):
            return
        self._sums[of, t] = total = _Sum(x, terms, x.operation in inside, sides)
        self._adds.update((add, (total, i + 1)) for i, add in enumerate(adds))

    def _terms(
        self, of: Optional[Operation], t: Tensor, giver: Operation
    ) -> tuple[Optional[Tensor], list[tuple[Tensor, Optional[Operation]]], list[Operation]]:
        """Returns what a tensor is the gradient of, if known, its terms, and what adds them.

        Args:
          of: the operation that made what it is the gradient of, or None.
          t: a gradient.
          giver: the operation whose gradient the last term is.
        """
        terms = giver.inputs if of is None else of.outputs
        xs = {x for x in terms if x.shape == t.shape}
        last, later = t, list[Operation]()
        while xs and isinstance(last.operation, AddOperation):
            add = last.operation
            reads = xs.intersection(add.gradient_of.inputs if add.gradient_of else ())
            if not reads or any(x.shape != t.shape for x in add.inputs):
                break
            xs, last = reads, add.inputs[0]
            later.append(add)
        x = min(xs, key=lambda y: (not isinstance(y.operation, Variable), y.name), default=None)
        # What passes its gradient on, such as an addition, has made none itself.
        first = last.operation.gradient_of
        if x is not None and (first is None or x not in first.inputs):
            givers = {add.gradient_of for add in later}
            others = [r for r in self._readers.get(x, ()) if r not in givers and r.has_gradient]
            first = max(others, key=self._place.__getitem__, default=first)
        adds = later[::-1]
        return x, [(last, first), *((add.inputs[1], add.gradient_of) for add in adds)], adds

    def _is_inside(self, term: Tensor, by: Optional[Operation]) -> bool:
        return (term.operation if by is None else by) in self.part.operations

    def _add_term(self, total: _Sum, number: int, at: Operation) -> None:
        """Adds a term on its side; when that is not the tensor's, and has all, the sum crosses."""
        term, by = total.terms[number]
        side = self._is_inside(term, by)
        self._add_to(total, side, self._input(term, side, at, by), at)
        total.left[side] -= 1
        if side != total.home and not total.left[side]:
            moved = self._crossed(total.so_far.pop(side), total.of.shape, total.home, at)
            self._add_to(total, total.home, moved, at)

    def _add_to(self, total: _Sum, side: bool, y: Tensor, at: Operation) -> None:
        if side in total.so_far:
            new = copy.copy(at)
            new._inputs = [total.so_far[side], y]
            self._finish(new, at, self.names if side else {})
            y = new.outputs[0]
        total.so_far[side] = y

    # -- copies

    def _operation(self, op: Operation) -> None:
        """Adds the copy of an operation, after what its inputs need."""
        if op in self._adds:
            total, number = self._adds[op]
            for i in (0, 1) if number == 1 else (number,):
                self._add_term(total, i, op)
            if number == len(total.terms) - 1:
                self._tensors[op.outputs[0]] = total.so_far[total.home]
            return
        side = op in self.part.operations
        # Variables that are assigned together may be of both sides.
        readers: Sequence[Operation] = op.variables if isinstance(op, Assign) else ()
        inputs = [
            self._input(x, (reader or op) in self.part.operations, op, op.gradient_of)
            for x, reader in itertools.zip_longest(op.inputs, readers)
        ]
        new, names = copy.copy(op), self.names if side else {}
        for attribute, value in vars(new).items():
            # Of a variable, the rest is how TensorFlow has it.
            if attribute not in _NOT_OF_DIMENSIONS and (
                attribute == "_shape" or not isinstance(op, Variable)
            ):
                setattr(new, attribute, _under_names(value, names, self._copies))
        # What it waits for is no input, and has no names that it works with.
        new.replace_inputs(ChainMap(dict(zip(op.inputs, inputs)), self._tensors))
        new._inputs = inputs  # one tensor may be assigned on both sides
        self._finish(new, op, names)
        self._copies[op] = new
        self._tensors.update(zip(op.outputs, new.outputs))
        named = any(n in names for y in op.outputs for n in y.shape.dimension_names)
        if named and not op.inputs and self._place[op] < self._first_gradient:
            self.made.append(op)

    def _finish(self, new: Operation, op: Operation, names: Names) -> None:
        """Gives a copy its outputs, and adds it."""
        if op.name in self._taken:  # an addition, and another one of what has crossed
            new._name = self._graph.unique_name(op.name)
        self._taken.add(new.name)
        new._copy_outputs(op, lambda shape: renamed(shape, names))
        new.gradient_of = self._copies.get(op.gradient_of) if op.gradient_of else None
        new.original = self._copies.get(op.original) if op.original else None
        self._operations.append(new)

    def _input(self, x: Tensor, side: bool, at: Operation, of: Optional[Operation]) -> Tensor:
        """Returns the copy of what an operation, of the gradient of another one, reads."""
        total = self._sums.get((of, x))
        if total is None:
            return self._under(x, side, at)
        if not total.so_far:  # the only term
            self._add_term(total, 0, at)
        if side not in total.across:
            total.across[side] = self._crossed(total.so_far[total.home], x.shape, side, at)
        return total.across[side]

    def _under(self, x: Tensor, side: bool, at: Operation) -> Tensor:
        """Returns the copy of a tensor under the names of a side."""
        if (x, side) not in self._across:
            y = self._tensors[x]
            self._across[x, side] = renamed_y = self._crossed(y, x.shape, side, at)
            if renamed_y is not y and self._place[at] < self._first_gradient:
                self.crossings.append(Crossing(x, at, side))
        return self._across[x, side]

    def _crossed(self, y: Tensor, shape: Shape, side: bool, at: Operation) -> Tensor:
        """Returns a tensor under the names that its shape has on a side."""
        shape = renamed(shape, self.names if side else {})
        if y.shape == shape:
            return y
        with usable([y.operation]):
            boundary = PartBoundary(y, shape, name=f"{at.name}/renamed")
        boundary.gradient_of = self._copies.get(at.gradient_of) if at.gradient_of else None
        self._operations.append(boundary)
        return boundary.outputs[0]


def _is_within(giver: Optional[Operation], of: Optional[Operation]) -> bool:
    """Returns whether what is made for the gradient of one operation is so for that of another."""
    # An operation that computes a gradient reads values of its own, and those of what it repeats.
    while giver is not None and giver is not of:
        giver = giver.gradient_of
    return giver is not None


# What is set elsewhere, or says nothing of dimensions.
_NOT_OF_DIMENSIONS = frozenset(
    ("_inputs", "_outputs", "_mesh", "_graph", "_site", "_mark", "_name", "gradient_of", "original")
)


def _under_names(value: Any, names: Names, copies: Mapping[Operation, Operation]) -> Any:
    """Returns an attribute of an operation as its copy under other names has it.

    Operations keep dimensions, their names, Shapes and other operations in attributes, within
    containers and objects of this package such as the form of a convolution. All else, such as
    numbers and functions, is of no dimension, and returned as it is.

    Args:
      value: the attribute, or a part of it.
      names: the other names of dimensions.
      copies: the copies of operations so far.
    """

    def under(part: Any) -> Any:
        return _under_names(part, names, copies)

    if isinstance(value, Dimension):
        return Dimension(names.get(value.name, value.name), value.size)
    if isinstance(value, str):
        # No type tells the name of a dimension from another string that is the same; `best_part`
        # leaves out a copy whose step, split alike, takes another time than the program's.
        return names.get(value, value)
    if isinstance(value, Shape):
        return renamed(value, names)
    if isinstance(value, Operation):
        # Such as the variables of an assignment. What comes later has no copy yet.
        return copies.get(value, value)
    if isinstance(value, dict):
        return {under(key): under(one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # Before tuples: a NamedTuple takes its fields one by one.
        return type(value)(*map(under, value))
    # Of these types alone: a class that is derived from one may be made by other arguments.
    if type(value) in (list, tuple, frozenset):
        return type(value)(map(under, value))
    # A Tensor, Graph or Mesh leads to the whole program; inputs are replaced as such.
    is_ours = is_of_package(type(value)) and not isinstance(value, (Tensor, Graph, Mesh))
    if is_ours and getattr(value, "__dict__", None):
        # A copy, since the operation of the user's program has the same object.
        value = copy.copy(value)
        vars(value).update({name: under(one) for name, one in vars(value).items()})
    return value


def _new_names(graph: Graph, part: Part, dims: Iterable[str]) -> Names:
    """Returns a new name for each dimension, of the part's name and unlike all in the program."""
    used = {n for op in graph.operations for y in op.outputs for n in y.shape.dimension_names}
    names: dict[str, str] = {}
    for d in sorted(dims):
        new = f"{d}_{_NO_NAME.sub('_', part.name)}"
        while new in used:
            new += "_"
        names[d] = new
        used.add(new)
    return names


# -- the search


def best_part(
    estimator: StepEstimator,
    best: Estimate,
    limit: Optional[float],
    estimator_of: Callable[[ProgramParts], StepEstimator],
) -> Optional[tuple[RenamedProgram, StepEstimator, Estimate]]:
    """Returns the program that a rename in one part makes fastest; None if none is worth it.

    Args:
      estimator: the StepEstimator of the program as it is.
      best: its fastest layout.
      limit: the memory that a step may use on one processor, or None.
      estimator_of: returns the StepEstimator of another program on the same mesh.

    Raises:
      ValueError: the program has loops, whose operations have one name for all iterations.
    """
    program = estimator.parts
    loops = [op.name for op in program.graph.operations if op.inner_operations]
    if loops:
        raise ValueError(
            f"parts=True: names of dimensions in loops cannot differ from those around, and "
            f"{loops[0]} is one. Leave parts out, or build the program without loops"
        )
    found: Optional[tuple[RenamedProgram, StepEstimator, Estimate]] = None
    seconds = best.seconds.total * (1 - _NEAR)
    for part in candidate_parts(estimator, best.layout):
        dims = _dims_of_both(program.graph, part) & {*estimator.space.dims}
        copied = RenamedProgram(program, part, dims)
        if not copied.names:
            continue
        other = estimator_of(copied.parts)
        alike = {copied.names[d]: m for d, m in best.layout.items() if d in copied.names}
        again = other.estimate({**best.layout, **alike}).seconds.total
        # Names change nothing where both are split alike. What an operation of a class of the
        # user's holds in another way than others has not been renamed.
        if not math.isclose(again, best.seconds.total, rel_tol=_SAME):
            continue
        faster = other.faster_than(seconds, limit)
        if faster is not None:
            found, seconds = (copied, other, faster), faster.seconds.total
    return found and _fewest_names(*found, estimator_of)


def _dims_of_both(graph: Graph, part: Part) -> set[str]:
    """Returns the names of dimensions in a part and outside of it."""
    names: tuple[set[str], set[str]] = (set(), set())
    for op in graph.operations:
        names[op in part.operations].update(n for y in op.outputs for n in y.shape.dimension_names)
    return names[0] & names[1]


def _fewest_names(
    copied: RenamedProgram,
    estimator: StepEstimator,
    best: Estimate,
    estimator_of: Callable[[ProgramParts], StepEstimator],
) -> tuple[RenamedProgram, StepEstimator, Estimate]:
    """Renames only what the layout splits in another way in the part."""
    layout = dict(best.layout)
    for old, new in copied.names.items():
        # A name of its own that makes no difference is not worth writing.
        for one, other in ((old, new), (new, old)):
            same = {d: m for d, m in layout.items() if d != other}
            if one in layout:
                same[other] = layout[one]
            if layout.get(old) == layout.get(new) or not estimator.space.is_legal(same):
                continue
            estimate = estimator.estimate(same)
            is_near = estimate.seconds.total <= best.seconds.total * (1 + _SAME)
            if is_near and estimate.peak_bytes <= best.peak_bytes:
                layout = same
    dims = [old for old, new in copied.names.items() if layout.get(old) != layout.get(new)]
    fewer = RenamedProgram(copied.program, copied.part, dims)
    rules = {d: m for d, m in layout.items() if d not in copied.names.values()}
    rules.update((new, layout[new]) for new in fewer.names.values() if new in layout)
    estimator = estimator_of(fewer.parts)
    return fewer, estimator, estimator.estimate(rules)

"""Plans of transforms along split dimensions: what moves between processors, and when.

A dimension can be transformed while it is whole on each processor. A plan is a sequence of steps
that begins with the layout of the input, makes each transformed dimension whole at some time, and
ends with the layout of the output. There are many such sequences; `plan_of` finds the one that
communicates the least, by Dijkstra's algorithm over the layouts that lie between.

An example is a pencil decomposition: x and y are split over two mesh axes, z is whole. If the
output splits y and z, two all-to-alls are enough:

    split      step
    x:0, y:1   transform z
               all-to-all along mesh axis 1, from y to z
    x:0, z:1   transform y
               all-to-all along mesh axis 0, from x to y
    y:0, z:1   transform x

A dimension whose size the mesh axis does not divide is padded with zeros while it is split. This
concerns only layouts between that of the input and that of the output.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple, Optional

from mesh_tensorflow._core.shape import list_product

__all__ = ["Plan", "Problem", "Step", "plan_of"]

# What is gathered is also transformed and held by each processor, so an all-to-all of two thirds as
# much as a gather, or less, is preferred.
_WEIGHTS = {"alltoall": 2, "allconcat": 3}
# For each mesh axis the tensor axis that it splits, or None.
_Layout = tuple[Optional[int], ...]


class Problem(NamedTuple):
    """What a plan is made for.

    Attributes:
      sizes: the sizes of the input.
      new_sizes: the sizes of the output, which has the same axes.
      itemsizes: the bytes of an element, before and after the transforms.
      transformed: the axes to transform.
      parts: the sizes of the mesh.
      begin: the layout of the input: for each mesh axis the axis that it splits, or None.
      end: the layout of the output.
    """

    sizes: tuple[int, ...]
    new_sizes: tuple[int, ...]
    itemsizes: tuple[int, int]
    transformed: frozenset[int]
    parts: tuple[int, ...]
    begin: _Layout
    end: _Layout


class Step(NamedTuple):
    """One step of a plan.

    Attributes:
      kind: "transform", or the collective: "alltoall", "allconcat" or "allsplit".
      axes: the axes that are transformed.
      mesh_axis: the mesh axis of a collective.
      split: the axis that the mesh axis splits from now on, or None.
      joined: the axis that it has split so far, or None.
      padding: the zeros that are appended to `split` before the step.
      size: the size of `joined` after the step, without padding.
      elements: as in `Collective`; those of all slices for a transform.
      itemsize: the bytes of an element.
    """

    kind: str
    axes: tuple[int, ...] = ()
    mesh_axis: int = -1
    split: Optional[int] = None
    joined: Optional[int] = None
    padding: int = 0
    size: int = 0
    elements: int = 0
    itemsize: int = 0

    @property
    def moved_bytes(self) -> int:
        """The bytes that are communicated."""
        return self.elements * self.itemsize if self.kind in ("alltoall", "allconcat") else 0


Plan = tuple[Step, ...]


class _State(NamedTuple):
    layout: _Layout
    done: frozenset[int]


@functools.lru_cache(maxsize=1024)
def plan_of(problem: Problem) -> Plan:
    """Returns the steps that communicate the least, and of these plans one of the fewest steps."""
    first, steps = _transformed(problem, _State(problem.begin, frozenset()))
    goal = _State(problem.end, problem.transformed)
    count = itertools.count()  # states are not compared
    queue = [(0, len(steps), next(count), first, steps)]
    visited = set()
    while queue:
        moved, _, _, state, steps = heapq.heappop(queue)
        if state == goal:
            return steps
        # Dijkstra's algorithm: the first time that a state is taken from the queue is the cheapest
        # way to it.
        if state in visited:
            continue
        visited.add(state)
        for step in _moves(problem, state):
            after, transforms = _transformed(problem, _after(state, step))
            if after not in visited:
                new = (*steps, step, *transforms)
                total = moved + step.moved_bytes * _WEIGHTS.get(step.kind, 0)
                heapq.heappush(queue, (total, len(new), next(count), after, new))
    raise AssertionError(f"no plan for {problem}")  # gathering everything always is one


def _size(problem: Problem, state: _State, axis: int) -> int:
    return (problem.new_sizes if axis in state.done else problem.sizes)[axis]


def _itemsize(problem: Problem, state: _State) -> int:
    return problem.itemsizes[bool(state.done)]


def _laid_out_size(problem: Problem, state: _State) -> int:
    """Returns the number of elements of all slices, with padding."""
    sizes = [_size(problem, state, axis) for axis in range(len(problem.sizes))]
    for parts, axis in zip(problem.parts, state.layout):
        if axis is not None:
            sizes[axis] = -(-sizes[axis] // parts)
    return list_product(sizes) * list_product(problem.parts)


def _after(state: _State, step: Step) -> _State:
    layout = list(state.layout)
    layout[step.mesh_axis] = step.split
    return state._replace(layout=tuple(layout))


def _transformed(problem: Problem, state: _State) -> tuple[_State, Plan]:
    """Returns the state after all that can be transformed in it is, and the step that does so."""
    axes = sorted(problem.transformed - state.done - set(state.layout))
    if not axes:
        return state, ()
    elements = _laid_out_size(problem, state)
    step = Step("transform", tuple(axes), elements=elements, itemsize=_itemsize(problem, state))
    return state._replace(done=state.done.union(axes)), (step,)


def _moves(problem: Problem, state: _State) -> Iterator[Step]:
    """Yields the collectives that are possible in a state."""
    itemsize, elements = _itemsize(problem, state), _laid_out_size(problem, state)
    whole = [axis for axis in range(len(problem.sizes)) if axis not in state.layout]
    for mesh_axis, (parts, joined) in enumerate(zip(problem.parts, state.layout)):
        if parts == 1:
            continue
        size = 0 if joined is None else _size(problem, state, joined)
        for split in whole:
            points = _size(problem, state, split)
            padding = -points % parts
            if joined is not None:
                sent = elements // max(1, points) * (points + padding)
                yield Step("alltoall", (), mesh_axis, split, joined, padding, size, sent, itemsize)
            elif not padding:
                yield Step("allsplit", (), mesh_axis, split)
        if joined is not None:
            # Its elements are those of the output.
            yield Step(
                "allconcat", (), mesh_axis, None, joined, 0, size, elements * parts, itemsize
            )

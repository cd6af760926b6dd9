"""The additive parts of a program's time: operations, and groups of pending sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Optional

from mesh_tensorflow._core.cost import Collective, Cost
from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.pending import Walk
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.auto_mtf._memory.steps import Step
from mesh_tensorflow.auto_mtf._time.seconds import CostModel, Seconds
from mesh_tensorflow.ops._variables.assign import Assign

__all__ = ["Unit", "program_units"]


class Unit(NamedTuple):
    """A part of a program whose time depends only on the layout of its own dimensions.

    Attributes:
      signature: equal for units that take equally long under every layout.
      dims: names of the dimensions that its time depends on.
      times: the number of times that it occurs in a step.
      layer: the name of its layer.
      seconds: a function of a CostModel and a MeshImpl that returns Seconds.
      apart: a function that returns smaller Units of about the same total time, with fewer
        dimensions; or None.
    """

    signature: Any
    dims: frozenset[str]
    times: float
    layer: str
    seconds: Callable[[CostModel, MeshImpl], Seconds]
    apart: Optional[Callable[[], list[Unit]]] = None


def program_units(steps: Iterable[Step], candidates: frozenset[str]) -> list[Unit]:
    """Returns the units of a program.

    Args:
      steps: Steps.
      candidates: names of the dimensions that may be split.
    """
    finder = _SumFinder(candidates)
    units = []
    for step in steps:
        finder.step(step)
        if step.op is None:
            continue
        if isinstance(step.op, Assign):
            units += _assignments(step.op, step, candidates)
            continue
        op, dims = step.op, _dims([step.op], candidates)
        seconds = functools.partial(_operation_seconds, op)
        units.append(Unit(signature(op), dims, step.times, step.layer, seconds))
    return units + [sums.unit(candidates) for sums in finder.found()]


def _operation_seconds(op: Operation, model: CostModel, impl: MeshImpl) -> Seconds:
    return model.operation(op, impl)


def _assignments(op: Assign, step: Step, candidates: frozenset[str]) -> list[Unit]:
    """Returns one unit per variable, since variables assigned together may differ in layout."""
    units = []
    for x, variable in zip(op.inputs, op.variables):
        size = variable.slice_dtype.size
        units.append(
            Unit(
                (Assign, tuple(x.shape), size),
                frozenset(x.shape.dimension_names) & candidates,
                step.times,
                step.layer,
                functools.partial(_assignment_seconds, x, size),
            )
        )
    return units


def _assignment_seconds(x: Tensor, size: int, model: CostModel, impl: MeshImpl) -> Seconds:
    cost = Cost(0, 2 * impl.laid_out_size(x.shape) * size)
    return model.seconds(cost, x.dtype.name, [x], impl)


def _dims(operations: Iterable[Operation], candidates: frozenset[str]) -> frozenset[str]:
    return (
        frozenset(
            n for op in operations for t in op.inputs + op.outputs for n in t.shape.dimension_names
        )
        & candidates
    )


# -- pending sums


class _Event(NamedTuple):
    """An operation that begins or delays sums, or a value that is needed or passed on."""

    op: Optional[Operation]
    need: Optional[Tensor]
    passed: Optional[tuple[Tensor, Tensor]]
    times: float


class _AskedSums(Walk):
    """A walk that records which pending sums were needed."""

    def __init__(self, mesh_impl: MeshImpl):
        super().__init__(mesh_impl)
        self.asked: list[tuple[Tensor, Collective]] = []

    def need(self, x: Tensor) -> list[Collective]:
        asked = super().need(x)
        self.asked += [(x, collective) for collective in asked]
        return asked

    def scatter(self, x: Tensor, collectives: Sequence[Collective]) -> list[Collective]:
        asked = super().scatter(x, collectives)
        self.asked += [(x, collective) for collective in asked]
        return asked


class _Sums:
    """The operations that begin, delay and need a group of pending sums."""

    def __init__(self) -> None:
        self.events: list[tuple[int, _Event]] = []
        self.layer = ""

    def add(self, place: int, event: _Event) -> None:
        self.events.append((place, event))

    def seconds(self, model: CostModel, impl: MeshImpl) -> Seconds:
        walk, total = _AskedSums(impl), 0.0
        for _, event in self.events:
            walk.asked.clear()
            if event.op is not None:
                walk.ask(event.op)
            elif event.need is not None:
                walk.need(event.need)
            elif event.passed is not None:
                walk.same(*event.passed)
            total += event.times * sum(model.pending_sum(x, c, impl) for x, c in walk.asked)
        return Seconds(0.0, total)

    def apart(self, candidates: frozenset[str]) -> list[Unit]:
        """Returns units in which no sum is delayed: each is computed at once."""
        units = []
        for place, event in self.events:
            if event.op is None or event.op.may_delay_sums(len(event.op.inputs)):
                continue
            part = _Sums()
            part.layer = self.layer
            part.add(place, event)
            for y in event.op.outputs:
                part.add(place, _Event(None, y, None, event.times))
            units.append(part.unit(candidates)._replace(apart=None))
        return units

    def unit(self, candidates: frozenset[str]) -> Unit:
        self.events.sort(key=lambda pair: pair[0])
        number: dict[Tensor, int] = {}

        def numbered(tensors: Iterable[Tensor]) -> tuple[int, ...]:
            return tuple(number.setdefault(t, len(number)) for t in tensors)

        key = []
        for _, event in self.events:
            if event.op is not None:
                tensors = numbered(event.op.inputs + event.op.outputs)
                key.append((event.times, signature(event.op), tensors))
            else:
                needed = event.passed or (event.need,)
                key.append((event.times, None, numbered(needed)))  # type: ignore[arg-type]
        dims = _dims((event.op for _, event in self.events if event.op is not None), candidates)
        apart = functools.partial(self.apart, candidates)
        return Unit(tuple(key), dims, 1.0, self.layer, self.seconds, apart)


class _SumFinder:
    """Groups the pending sums of a program with the operations that delay or need them."""

    def __init__(self, candidates: frozenset[str]):
        self._candidates = candidates
        self._sums: dict[Tensor, _Sums] = {}  # of a Tensor that may be pending
        self._all: dict[_Sums, None] = {}
        self._place = 0

    def found(self) -> list[_Sums]:
        return list(self._all)

    def step(self, step: Step) -> None:
        self._place += 1
        for x in step.needs:
            self._need(x, step.times)
        for y, x in step.passes:
            if x in self._sums:
                sums = self._sums[y] = self._sums[x]
                sums.add(self._place, _Event(None, None, (y, x), step.times))
        if step.op is not None:
            self._operation(step.op, step)

    def _need(self, x: Tensor, times: float) -> None:
        if x in self._sums:
            self._sums.pop(x).add(self._place, _Event(None, x, None, times))

    def _operation(self, op: Operation, step: Step) -> None:
        pending = [x for x in op.inputs if x in self._sums]
        if pending and not op.may_delay_sums(len(pending)):
            for x in pending:
                self._need(x, step.times)
            pending = []
        if not pending and not op.may_begin_sum(self._candidates):
            return
        sums = self._joined([self._sums[x] for x in pending])
        sums.layer = sums.layer or step.layer
        sums.add(self._place, _Event(op, None, None, step.times))
        for y in op.outputs:
            self._sums[y] = sums

    def _joined(self, parts: Sequence[_Sums]) -> _Sums:
        if not parts:
            new = _Sums()
            self._all[new] = None
            return new
        first, *others = dict.fromkeys(parts)
        for other in others:
            first.events += other.events
            del self._all[other]
            for x in [x for x, sums in self._sums.items() if sums is other]:
                self._sums[x] = first
        return first


# -- which operations cost the same


def signature(op: Operation) -> Hashable:
    """Returns a key that two operations share only if they cost the same under every layout.

    Args:
      op: an Operation.
    """
    shapes = tuple((tuple(t.shape), t.dtype) for t in op.inputs + op.outputs)
    return type(op), len(op.inputs), shapes, op.cost_key()

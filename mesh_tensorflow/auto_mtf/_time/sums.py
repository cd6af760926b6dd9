"""Pending sums of a program, in groups whose time depends on few dimensions."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, Optional

from mesh_tensorflow._core.cost import Collective
from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.pending import Walk
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.auto_mtf._memory.steps import Step
from mesh_tensorflow.auto_mtf._memory.updates import Updates
from mesh_tensorflow.auto_mtf._time.seconds import CostModel, Seconds
from mesh_tensorflow.auto_mtf._time.unit import Unit, dims_of, signature, weight_key
from mesh_tensorflow.ops._variables.assign import Assign

__all__ = ["SumFinder"]


class _Event(NamedTuple):
    """An operation that begins or delays sums, or a value that is needed or passed on.

    `weight` is the Shape of the weight, if it is part of an update, which may be in parts.
    `assigned` says that it becomes the value of the weight, which is in parts at stage 3 only.
    """

    op: Optional[Operation]
    need: Optional[Tensor]
    passed: Optional[tuple[Tensor, Tensor]]
    times: float
    weight: Optional[Shape] = None
    assigned: bool = False


class _AskedSums(Walk):
    """A walk that records which pending sums were needed, in updates that may be in parts."""

    def __init__(self, model: CostModel, mesh_impl: MeshImpl):
        super().__init__(mesh_impl)
        self._model, self._whole = model, mesh_impl
        self._in_parts: dict[Tensor, MeshImpl] = {}
        self.asked: list[tuple[Tensor, Collective]] = []

    def visit(self, op: Operation, weight: Optional[Shape]) -> None:
        """Visits an operation, after gradients have been split as the weight is stored."""
        impl = self._split(op.inputs, weight)
        self._mesh_impl = impl
        self.ask(op)
        self._mesh_impl = self._whole
        if impl is not self._whole:
            self._in_parts.update(dict.fromkeys(op.outputs, impl))

    def needed(self, x: Tensor, weight: Optional[Shape], assigned: bool) -> None:
        """Records that a value is needed, by an update if there is a weight."""
        if not assigned or self._model.storing.weights_too:
            self._split([x], weight)
        self.need(x)

    def need(self, x: Tensor) -> list[Collective]:
        outer, self._mesh_impl = self._mesh_impl, self._in_parts.get(x, self._whole)
        asked = super().need(x)
        self._mesh_impl = outer
        self.asked += [(x, collective) for collective in asked]
        return asked

    def scatter(self, x: Tensor, collectives: Sequence[Collective]) -> list[Collective]:
        asked = super().scatter(x, collectives)
        self.asked += [(x, collective) for collective in asked]
        return asked

    def _split(self, xs: Sequence[Tensor], weight: Optional[Shape]) -> MeshImpl:
        """Sums and splits partial sums, as a reshape to stored dimensions does."""
        impl = self._model.in_parts(weight, self._whole)
        for x in xs if impl is not self._whole else ():
            axes = self.pending_axes(x)
            split = {*impl.splitting_axes(x.shape)} - {*self._whole.splitting_axes(x.shape)}
            if x in self._in_parts or not axes or not split:
                continue
            elements = self._whole.laid_out_size(x.shape)
            for axis in sorted(split):
                if axis in axes:
                    bytes_ = elements * x.dtype.size
                    one = Collective("reduce_scatter", (axis,), elements, bytes_)
                    self.asked.append((x, one))
                elements //= impl.shape[axis].size
            self.summed_over(x, split)
            self._in_parts[x] = impl
        return impl


class _Sums:
    """The operations that begin, delay and need a group of pending sums."""

    def __init__(self) -> None:
        self.events: list[tuple[int, _Event]] = []
        self.layer = ""

    def add(self, place: int, event: _Event) -> None:
        self.events.append((place, event))

    def seconds(self, model: CostModel, impl: MeshImpl) -> Seconds:
        walk, total = _AskedSums(model, impl), 0.0
        for _, event in self.events:
            walk.asked.clear()
            if event.op is not None:
                walk.visit(event.op, event.weight)
            elif event.need is not None:
                walk.needed(event.need, event.weight, event.assigned)
            elif event.passed is not None:
                walk.same(*event.passed)
            total += event.times * sum(model.pending_sum(x, c, impl) for x, c in walk.asked)
        return Seconds(0.0, total)

    def apart(self, candidates: frozenset[str]) -> list[Unit]:
        """Returns units in which no sum is delayed: each is computed at once."""
        units = []
        weights = {event.need: event.weight for _, event in self.events}
        for place, event in self.events:
            if event.op is None or event.op.may_delay_sums(len(event.op.inputs)):
                continue
            part = _Sums()
            part.layer = self.layer
            part.add(place, event)
            for y in event.op.outputs:
                part.add(place, _Event(None, y, None, event.times, weights.get(y)))
            units.append(part.unit(candidates)._replace(apart=None))
        return units

    def unit(self, candidates: frozenset[str]) -> Unit:
        # Groups that were joined have their events one after the other, and a walk needs them in
        # the order of the program.
        self.events.sort(key=lambda pair: pair[0])
        number: dict[Tensor, int] = {}

        def numbered(tensors: Iterable[Tensor]) -> tuple[int, ...]:
            return tuple(number.setdefault(t, len(number)) for t in tensors)

        key: list[Hashable] = []
        for _, event in self.events:
            if event.op is not None:
                tensors = numbered(event.op.inputs + event.op.outputs)
                key.append((event.times, signature(event.op), tensors, weight_key(event.weight)))
            else:
                needed = event.passed or (event.need,)
                tensors = numbered(needed)  # type: ignore[arg-type]
                key.append((event.times, None, tensors, weight_key(event.weight), event.assigned))
        events = [event for _, event in self.events]
        operations = (event.op for event in events if event.op is not None)
        dims = dims_of(operations, (event.weight for event in events), candidates)
        apart = functools.partial(self.apart, candidates)
        is_stored = any(event.weight is not None for event in events)
        return Unit(tuple(key), dims, 1.0, self.layer, self.seconds, apart, is_stored)


class SumFinder:
    """Groups the pending sums of a program with the operations that delay or need them."""

    def __init__(self, candidates: frozenset[str], updates: Optional[Updates] = None):
        """Creates a SumFinder.

        Args:
          candidates: names of the dimensions that may be split.
          updates: the Updates of the program, if variables may be stored in parts.
        """
        self._candidates = candidates
        self._weight_of = {} if updates is None else updates.weight_of
        self._sums: dict[Tensor, _Sums] = {}  # of a Tensor that may be pending
        self._all: dict[_Sums, None] = {}
        self._place = 0

    def found(self) -> list[Unit]:
        """Returns a Unit for each group of pending sums so far."""
        return [sums.unit(self._candidates) for sums in self._all]

    def step(self, step: Step) -> None:
        """Visits the next step of the program.

        Args:
          step: a Step.
        """
        self._place += 1
        for x in step.needs:
            self._need(x, step.times)
        for y, x in step.passes:
            if x in self._sums:
                sums = self._sums[y] = self._sums[x]
                sums.add(self._place, _Event(None, None, (y, x), step.times))
        if step.op is not None:
            self._operation(step.op, step)

    def _need(
        self,
        x: Tensor,
        times: float,
        weight: Optional[Shape] = None,
        assigned: bool = False,
    ) -> None:
        if x in self._sums:
            event = _Event(None, x, None, times, weight, assigned)
            self._sums.pop(x).add(self._place, event)

    def _operation(self, op: Operation, step: Step) -> None:
        if isinstance(op, Assign):
            for x, v in zip(op.inputs, op.variables):
                self._need(x, step.times, self._weight_of.get(v), v.trainable)
        pending = [x for x in op.inputs if x in self._sums]
        weight, split = self._weight_of.get(op), self._candidates
        if weight is not None:  # whose dimensions may be split where it is stored
            split = split | frozenset(weight.dimension_names)
        if pending and not op.may_delay_sums(len(pending)):
            for x in pending:
                self._need(x, step.times, weight)
            pending = []
        if not pending and not op.may_begin_sum(split):
            return
        sums = self._joined([self._sums[x] for x in pending])
        sums.layer = sums.layer or step.layer
        sums.add(self._place, _Event(op, None, None, step.times, weight))
        for y in op.outputs:
            self._sums[y] = sums

    def _joined(self, parts: Sequence[_Sums]) -> _Sums:
        if not parts:
            new = _Sums()
            self._all[new] = None
            return new
        # Two sums that one operation adds are put off together or not at all, so their time cannot
        # be told apart.
        first, *others = dict.fromkeys(parts)
        for other in others:
            first.events += other.events
            del self._all[other]
            for x in [x for x, sums in self._sums.items() if sums is other]:
                self._sums[x] = first
        return first

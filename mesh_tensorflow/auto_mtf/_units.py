"""The time of a step under a layout, as a sum over units: operations, gathers, pending sums."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from mesh_tensorflow._core.operation import Collective, Cost, Operation
from mesh_tensorflow._core.placement import Walk
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.auto_mtf._seconds import ZERO, CostModel, Seconds
from mesh_tensorflow.auto_mtf._space import LayoutSpace
from mesh_tensorflow.auto_mtf._stored import Updates
from mesh_tensorflow.ops._variables.assign import Assign
from mesh_tensorflow.ops._variables.variable import Variable

# -- the steps of a program


class Step(NamedTuple):
    """One event of a program.

    Attributes:
      op: the operation that runs; None if values are only needed or passed on.
      needs: Tensors whose values are needed, besides those that `op` needs.
      passes: pairs (y, x), where y takes over the pending sum of x.
      times: the number of times that it occurs in a step of the program.
      layer: the name of the operation, or of the loop that contains it.
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
      outputs: Tensors whose values are needed at the end.
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
        # No partial sum enters a loop.
        yield Step(None, tuple(op.inputs), (), times, name)
        # Iterations of loops in loops multiply.
        yield from _steps(loop.operations, times * loop.iterations, name)
        yield Step(None, tuple(loop.needed), tuple(loop.sums), times * loop.iterations, name)


# -- units


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
      is_stored: whether its time depends on how variables are stored.
    """

    signature: Any
    dims: frozenset[str]
    times: float
    layer: str
    seconds: Callable[[CostModel, MeshImpl], Seconds]
    apart: Optional[Callable[[], list[Unit]]] = None
    is_stored: bool = False


def dims_of(
    operations: Iterable[Operation],
    weights: Iterable[Optional[Shape]],
    candidates: frozenset[str],
) -> frozenset[str]:
    """Returns the names of dimensions that the time of operations depends on.

    Args:
      operations: Operations.
      weights: Shapes of weights whose update they are part of, or Nones.
      candidates: names of the dimensions that may be split.
    """
    shapes = [t.shape for op in operations for t in op.inputs + op.outputs]
    shapes += [weight for weight in weights if weight is not None]
    return frozenset(n for shape in shapes for n in shape.dimension_names) & candidates


def weight_key(weight: Optional[Shape]) -> Hashable:
    """Returns what tells Shapes of weights apart, or None."""
    return None if weight is None else tuple(weight)


def signature(op: Operation) -> Hashable:
    """Returns a key that two operations share only if they cost the same under every layout.

    Args:
      op: an Operation.
    """
    shapes = tuple((tuple(t.shape), t.dtype) for t in op.inputs + op.outputs)
    return type(op), len(op.inputs), shapes, op.cost_key()


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


class _CountedSums(Walk):
    """A walk that records which pending sums were needed, in updates that may be in parts."""

    def __init__(self, model: CostModel, mesh_impl: MeshImpl):
        super().__init__(mesh_impl)
        self._model, self._whole = model, mesh_impl
        self._in_parts: dict[Tensor, MeshImpl] = {}

    def visit(self, op: Operation, weight: Optional[Shape]) -> None:
        """Visits an operation, after gradients have been split as the weight is stored."""
        impl = self._split(op.inputs, weight)
        # What a Walk counts has the sizes of this: of parts within an update, else of whole
        # tensors.
        self._mesh_impl = impl
        self.sum_inputs(op)
        self._mesh_impl = self._whole
        # What an update makes of parts is in parts, too, for the operations of it that follow.
        if impl is not self._whole:
            self._in_parts.update(dict.fromkeys(op.outputs, impl))

    def needed(self, x: Tensor, weight: Optional[Shape], assigned: bool) -> None:
        """Records that a value is needed, by an update if there is a weight."""
        if not assigned or self._model.storing.weights_too:
            self._split([x], weight)
        self.need(x)

    def need(self, x: Tensor) -> list[Collective]:
        # An allreduce has the size that its tensor was made with, wherever it is needed.
        outer, self._mesh_impl = self._mesh_impl, self._in_parts.get(x, self._whole)
        asked = super().need(x)
        self._mesh_impl = outer
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
                # Along other axes, each processor keeps its part of what it has, and nothing is
                # sent.
                if axis in axes:
                    bytes_ = elements * x.dtype.size
                    one = Collective("reduce_scatter", (axis,), elements, bytes_)
                    self._ask(x, [one])
                # What is left is a part, so that the next collective moves less.
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
        # Which operation pays for a sum depends on the layout, so the events are walked for each
        # one.
        walk, total = _CountedSums(model, impl), 0.0
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
            # What would delay a sum is given none here: each is computed where it begins.
            if event.op is None or event.op.delays_sums:
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

        # By the order of appearance, so that groups of equal layers have equal keys.
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
        # What a loop sums up over iterations is needed once after the loop, and not in each of
        # them.
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
            # The first that needs a sum pays for it, and the others find it computed.
            self._sums.pop(x).add(self._place, event)

    def _operation(self, op: Operation, step: Step) -> None:
        if isinstance(op, Assign):
            for x, v in zip(op.inputs, op.variables):
                self._need(x, step.times, self._weight_of.get(v), v.trainable)
        pending = [x for x in op.inputs if x in self._sums]
        weight, split = self._weight_of.get(op), self._candidates
        if weight is not None:  # whose dimensions may be split where it is stored
            split = split | frozenset(weight.dimension_names)
        if pending and not 0 < op.delays_sums <= len(pending):
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


def program_units(
    steps: Iterable[Step], candidates: frozenset[str], updates: Optional[Updates] = None
) -> list[Unit]:
    """Returns the units of a program.

    Args:
      steps: Steps.
      candidates: names of the dimensions that may be split.
      updates: the Updates of the program, if variables may be stored in parts; then the units
        are those of any stored layout, which is a part of the CostModel.
    """
    finder = SumFinder(candidates, updates)
    gathers = {} if updates is None else updates.gathers
    units = [_gather(x, times, candidates) for x, times in gathers.items()]
    for step in steps:
        finder.step(step)
        # What is needed or passed on costs nothing but sums, which the finder has.
        if step.op is None:
            continue
        # Variables that are assigned together may differ in layout.
        if isinstance(step.op, Assign):
            pairs = zip(step.op.inputs, step.op.variables)
            units += [_assignment(x, v, step, candidates, updates) for x, v in pairs]
        else:
            weight = None if updates is None else updates.weight_of.get(step.op)
            units.append(_operation(step.op, weight, step, candidates))
    return units + finder.found()


def _operation(
    op: Operation, weight: Optional[Shape], step: Step, candidates: frozenset[str]
) -> Unit:
    def seconds(model: CostModel, impl: MeshImpl) -> Seconds:
        return model.operation(op, model.in_parts(weight, impl))

    key, dims = (signature(op), weight_key(weight)), dims_of([op], [weight], candidates)
    return Unit(key, dims, step.times, step.layer, seconds, is_stored=weight is not None)


def _gather(x: Tensor, times: int, candidates: frozenset[str]) -> Unit:
    """Returns the unit of a weight that is gathered for its uses, if it is stored in parts."""

    def seconds(model: CostModel, impl: MeshImpl) -> Seconds:
        return _gathered(x, x.shape, model, impl) if model.storing.weights_too else ZERO

    key, dims = ("gather", tuple(x.shape), x.dtype), dims_of([], [x.shape], candidates)
    return Unit(key, dims, times, x.operation.name, seconds, is_stored=True)


def _gathered(x: Tensor, weight: Shape, model: CostModel, impl: MeshImpl) -> Seconds:
    """Returns the seconds of an allgather of a tensor that is in parts as a weight is stored."""
    stored = model.in_parts(weight, impl)
    whole, elements = impl.laid_out_size(x.shape), stored.laid_out_size(x.shape)
    before = elements
    collectives = []
    for axis in sorted({*stored.splitting_axes(x.shape)} - {*impl.splitting_axes(x.shape)}):
        # The size of an allconcat is that of its result, from which the next one goes on.
        elements *= impl.shape[axis].size
        collectives.append(Collective("allconcat", (axis,), elements, elements * x.dtype.size))
    if not collectives:
        return ZERO
    cost = Cost(0, (before + whole) * x.dtype.size, tuple(collectives))
    return model.seconds(cost, x.dtype.name, [x], impl)


def _assignment(
    x: Tensor,
    variable: Variable,
    step: Step,
    candidates: frozenset[str],
    updates: Optional[Updates],
) -> Unit:
    """Returns the unit of the assignment of a value to one variable."""
    size = variable.slice_dtype.size
    weight = None if updates is None else updates.weight_of.get(variable)
    gathers = updates is not None and variable.trainable and x.operation in updates.weight_of

    def seconds(model: CostModel, impl: MeshImpl) -> Seconds:
        before = ZERO
        # Before stage 3 an update is in parts and its weight is whole: the new value is gathered.
        if weight is not None and gathers and not model.storing.weights_too:
            before = _gathered(x, weight, model, impl)
        else:
            impl = model.in_parts(weight, impl)
        # The value is read, and the variable is written.
        cost = Cost(0, 2 * impl.laid_out_size(x.shape) * size)
        return before + model.seconds(cost, x.dtype.name, [x], impl)

    key = (Assign, tuple(x.shape), x.dtype, size, weight_key(weight), gathers)
    dims = dims_of([], [x.shape, weight], candidates)
    return Unit(key, dims, step.times, step.layer, seconds, is_stored=weight is not None)


# Units with more assignments than this are split into smaller ones.
_MOST_ASSIGNMENTS = 20_000

# Seconds by the signature of a unit, and the layout of its dimensions.
SecondsOfUnits = dict[Any, dict[frozenset, Seconds]]

_NUMBER = re.compile(r"(?<=[A-Za-z])_?\d+(?=/|$)")
_GRADIENTS = "gradients"


def layer_kind(name: str) -> str:
    """Returns the name of a layer without numbers and operations, for grouping equal layers.

    Args:
      name: the name of an operation, such as "layer_3/dense/einsum/gradients/einsum_2".
    """
    *scopes, last = _NUMBER.sub("", name).split("/")
    if _GRADIENTS in scopes:
        # What is before `gradients` is an operation, and no layer.
        forward = scopes[: max(0, scopes.index(_GRADIENTS) - 1)]
        return "/".join([*forward, _GRADIENTS])
    return "/".join(scopes) or last


class Sent(NamedTuple):
    """A collective of a step.

    Attributes:
      layer: the name of its kind of layer.
      collective: a Collective.
      times: the number of times that it occurs in a step.
      seconds: how long all of these take.
    """

    layer: str
    collective: Collective
    times: float
    seconds: float


class _Kind:
    """Units of equal time, with their count in each layer."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self.dims = tuple(sorted(unit.dims))
        self.layers: Counter[str] = Counter()
        self.times = 0.0
        self.known: dict[frozenset, Seconds] = {}


class StepTime:
    """The time of a step under any layout.

    Equal units are counted together, so that the work does not grow with the number of layers.

    Attributes:
      is_exact: whether all sums that may be delayed together were evaluated together.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        space: LayoutSpace,
        model: CostModel,
        known: Optional[SecondsOfUnits] = None,
    ):
        """Creates a StepTime.

        Args:
          units: Units.
          space: a LayoutSpace.
          model: a CostModel.
          known: the seconds of units that other StepTimes on the same mesh have evaluated, which
            differ in how variables are stored; more are added.
        """
        self._known: SecondsOfUnits = {} if known is None else known
        self._space = space
        self._model = model
        self.is_exact = True
        self._kinds: dict[Any, _Kind] = {}
        for unit in units:
            self._add(unit)

    def _add(self, unit: Unit) -> None:
        if unit.apart is not None and unit.signature not in self._kinds:
            dims = tuple(sorted(unit.dims))
            # A table has a row for each assignment, and their number grows exponentially with
            # dimensions.
            if self._space.count(dims, _MOST_ASSIGNMENTS + 1) > _MOST_ASSIGNMENTS:
                self.is_exact = False
                for part in unit.apart():
                    self._add(part)
                return
        if unit.signature not in self._kinds:
            self._kinds[unit.signature] = kind = _Kind(unit)
            # Only what does not depend on how variables are stored is the same for other ways to
            # store them.
            if not unit.is_stored:
                kind.known = self._known.setdefault(unit.signature, {})
        kind = self._kinds[unit.signature]
        kind.layers[layer_kind(unit.layer)] += unit.times  # type: ignore[assignment]
        kind.times += unit.times

    def _seconds(self, kind: _Kind, layout: Mapping[str, str]) -> Seconds:
        own = {d: layout[d] for d in kind.dims if d in layout}
        # By its own dimensions, so that layouts that differ in others share what was computed.
        key = frozenset(own.items())
        if key not in kind.known:
            kind.known[key] = kind.unit.seconds(self._model, self._model.impl(own))
        return kind.known[key]

    def total(self, layout: Mapping[str, str]) -> Seconds:
        """Returns the seconds of a step.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
        """
        kinds = self._kinds.values()
        return sum((self._seconds(k, layout).times(k.times) for k in kinds), ZERO)

    def by_layer(self, layout: Mapping[str, str]) -> dict[str, Seconds]:
        """Returns the seconds of a step by kind of layer, longest first.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
        """
        found: dict[str, Seconds] = {}
        for kind in self._kinds.values():
            seconds = self._seconds(kind, layout)
            for layer, times in kind.layers.items():
                found[layer] = found.get(layer, ZERO) + seconds.times(times)
        return dict(sorted(found.items(), key=lambda pair: -pair[1].total))

    def sent(self, layout: Mapping[str, str]) -> list[Sent]:
        """Returns the collectives of a step, without those of a mesh dimension of one processor.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
        """
        found = []
        for kind in self._kinds.values():
            # The stored seconds do not say of which collectives they are, so they are computed
            # again.
            model = self._model.recording()
            own = {d: layout[d] for d in kind.dims if d in layout}
            kind.unit.seconds(model, model.impl(own))
            for collective, seconds in model.recorded:
                for layer, times in kind.layers.items():
                    found.append(Sent(layer, collective, times, seconds * times))
        return found

    def tables(self) -> dict[tuple[str, ...], np.ndarray]:
        """Returns, for each set of dimensions, the seconds of each assignment in the space."""
        found: dict[tuple[str, ...], np.ndarray] = {}
        for kind in self._kinds.values():
            rows = self._space.assignments(kind.dims)
            seconds = [
                self._seconds(kind, self._space.layout(kind.dims, row)).total for row in rows
            ]
            column = np.array(seconds) * kind.times
            # One column for all kinds of the same dimensions: the search asks only for their sum.
            found[kind.dims] = found.get(kind.dims, 0.0) + column
        return found

    def __len__(self) -> int:
        """The number of kinds of units."""
        return len(self._kinds)

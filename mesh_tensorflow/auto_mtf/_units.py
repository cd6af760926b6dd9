"""The time of a step under a layout, as a sum over units: operations, gathers, pending sums."""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from mesh_tensorflow._core.operation import (
    Collective,
    Cost,
    Operation,
    Tensor,
)
from mesh_tensorflow._core.placement import Walk
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.auto_mtf._space import LayoutSpace, Updates, Weight
from mesh_tensorflow.auto_mtf.hardware import ZERO, CostModel, Seconds, Sent
from mesh_tensorflow.ops._source import is_constant
from mesh_tensorflow.ops._variable import Assign, Variable

# -- the steps of a program


class Step(NamedTuple):
    """One event of a program.

    Attributes:
      op: the operation that runs; None if values are only needed or passed on.
      needs: Tensors whose values are needed, besides those that `op` needs.
      passes: pairs (y, x), where y takes over the pending sum of x.
      times: the number of times that it occurs in a step of the program.
      layer: the name of the operation, or of the loop that contains it.
      weight: the dimensions of the weight, if it is part of an update, which may be in parts.
      assigned: whether what it needs becomes the value of the weight, which is in parts at stage 3
        only.
      beside: whether another operation, of the same slices, is computed beside it; see
        `computed_beside`.
      made_of: of a result that depends on constants alone, what makes it; see `constants`.
      is_waited_for: whether something else than an update reads what it makes; see `for_updates`.
    """

    op: Optional[Operation]
    needs: tuple[Tensor, ...]
    passes: tuple[tuple[Tensor, Tensor], ...]
    times: float
    layer: str
    weight: Optional[Weight] = None
    assigned: bool = False
    beside: bool = False
    made_of: tuple[Operation, ...] = ()
    is_waited_for: bool = True


def constants(operations: Iterable[Operation]) -> dict[Operation, tuple[Operation, ...]]:
    """Returns, for operations whose results depend on constants alone, all that make these.

    Neither variables nor data or random numbers are among that. The operation itself is the last.

    Args:
      operations: the Operations of a program, in order.
    """
    makers: dict[Operation, tuple[Operation, ...]] = {}
    for op in operations:
        if op.has_effect or op.inner_operations:
            continue
        if all(x.operation in makers for x in op.inputs) if op.inputs else is_constant(op):
            before = dict.fromkeys(itertools.chain(*(makers[x.operation] for x in op.inputs)))
            makers[op] = (*before, op)
    return makers


def read_by_gradients(operations: Sequence[Operation]) -> frozenset[Operation]:
    """Returns the operations that a gradient is computed of, other than those of weights.

    Args:
      operations: the Operations of a program, in order.
    """
    # What is made of variables alone, such as their casts, has gradients that go no further.
    of_weights: set[Operation] = set()
    for op in operations:
        if isinstance(op, Variable) or (
            op.inputs and all(x.operation in of_weights for x in op.inputs)
        ):
            of_weights.add(op)
    goes_on: set[Operation] = set()
    # Operations come after those whose results they read.
    for op in reversed(operations):
        of = op.gradient_of
        if op in goes_on or not (of is None or of in of_weights):
            goes_on.update(x.operation for x in op.inputs)
    return frozenset(goes_on)


def for_updates(operations: Sequence[Operation], goes_on: Collection[Operation]) -> set[Operation]:
    """Returns gradients, and what is made of them, that nothing but updates waits for.

    Args:
      operations: the Operations of a program, in order.
      goes_on: what `read_by_gradients` returns.
    """
    found: set[Operation] = set()
    for op in operations:
        of_gradients = op.gradient_of is not None or any(x.operation in found for x in op.inputs)
        if of_gradients and op not in goes_on:
            found.add(op)
    return found


def computed_beside(
    operations: Sequence[Operation], goes_on: Collection[Operation]
) -> frozenset[Operation]:
    """Returns the gradients of weights that are computed beside another gradient.

    The gradients of a product by its two inputs begin at the same time, and have the same slices.
    That of the weight is read by updates alone, so that the other one goes on without it.

    Args:
      operations: the Operations of a program, in order.
      goes_on: what `read_by_gradients` returns.
    """
    others = {op.gradient_of for op in goes_on} - {None}
    return frozenset(op for op in operations if op not in goes_on and op.gradient_of in others)


def program_steps(
    operations: Sequence[Operation], outputs: Sequence[Tensor] = ()
) -> Iterator[Step]:
    """Yields the steps of a program.

    Args:
      operations: Operations in order.
      outputs: Tensors whose values are needed at the end.
    """
    goes_on, made_of = read_by_gradients(operations), constants(operations)
    beside, late = computed_beside(operations, goes_on), for_updates(operations, goes_on)
    for step in _steps(operations, 1.0, None):
        op = step.op
        if op is not None:
            step = step._replace(
                beside=op in beside, made_of=made_of.get(op, ()), is_waited_for=op not in late
            )
        yield step
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
    weights: Iterable[Optional[Weight]],
    candidates: frozenset[str],
) -> frozenset[str]:
    """Returns the names of dimensions that the time of operations depends on.

    Args:
      operations: Operations.
      weights: dimensions of weights whose update they are part of, or Nones.
      candidates: names of the dimensions that may be split.
    """
    shapes = [t.shape for op in operations for t in op.inputs + op.outputs]
    every = itertools.chain(*shapes, *(weight for weight in weights if weight is not None))
    return frozenset(d.name for d in every) & candidates


def signature(op: Operation) -> Hashable:
    """Returns a key that two operations share only if they cost the same under every layout.

    Args:
      op: an Operation.
    """
    shapes = tuple((tuple(t.shape), t.dtype) for t in op.inputs + op.outputs)
    return type(op), len(op.inputs), shapes, op.cost_key()


def _numbering() -> Callable[[Iterable[Tensor]], tuple[int, ...]]:
    """Returns what numbers Tensors by their first appearance, so that equal layers are equal."""
    number: dict[Tensor, int] = {}
    return lambda xs: tuple(number.setdefault(x, len(number)) for x in xs)


class _CountedSums(Walk):
    """A walk that records which pending sums were needed, in updates that may be in parts."""

    def __init__(self, model: CostModel, mesh_impl: MeshImpl):
        super().__init__(mesh_impl)
        self._model, self._whole = model, mesh_impl
        self._in_parts: dict[Tensor, MeshImpl] = {}

    def visit(self, op: Operation, weight: Optional[Weight]) -> None:
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

    def needed(self, x: Tensor, weight: Optional[Weight], assigned: bool) -> None:
        """Records that a value is needed, by an update if there is a weight."""
        if not assigned or self._model.storing.weights_too:
            self._split([x], weight)
        self.need(x)

    def passed(self, y: Tensor, x: Tensor, weight: Optional[Weight]) -> None:
        """Records that a loop sums `x` to `y`; in parts, if it is the gradient of a weight."""
        impl = self._split([x], weight)
        self.same(y, x)
        if impl is not self._whole:
            self._in_parts[y] = impl

    def need(self, x: Tensor) -> list[Collective]:
        # An allreduce has the size that its tensor was made with, wherever it is needed.
        outer, self._mesh_impl = self._mesh_impl, self._in_parts.get(x, self._whole)
        collectives = super().need(x)
        self._mesh_impl = outer
        return collectives

    def _split(self, xs: Sequence[Tensor], weight: Optional[Weight]) -> MeshImpl:
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
    """The steps that begin, delay and need a group of pending sums, with their places."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, Step]] = []
        self.layer = ""

    def seconds(self, model: CostModel, impl: MeshImpl) -> Seconds:
        # Which operation pays for a sum depends on the layout, so the steps are walked for each
        # one.
        walk, total = _CountedSums(model, impl), 0.0
        # Sums that nothing but updates waits for are sent beside each other, and beside what is
        # computed meanwhile.
        late = {y for _, s in self.steps if s.op and not s.is_waited_for for y in s.op.outputs}
        for _, step in self.steps:
            walk.asked.clear()
            if step.op is not None:
                walk.visit(step.op, step.weight)
            for x in step.needs:
                walk.needed(x, step.weight, step.assigned)
            for y, x in step.passes:
                walk.passed(y, x, step.weight)
            total += sum(
                model.pending_sum(x, c, impl, step.times, x in late) for x, c in walk.asked
            )
        return Seconds(0.0, total)

    def apart(self, candidates: frozenset[str]) -> list[Unit]:
        """Returns units in which no sum is delayed: each is computed at once."""
        units = []
        weights = {x: step.weight for _, step in self.steps for x in step.needs}
        for place, step in self.steps:
            # What would delay a sum is given none here: each is computed where it begins.
            if step.op is None or step.op.delays_sums:
                continue
            part = _Sums()
            part.layer = self.layer
            part.steps = [(place, step)]
            for y in step.op.outputs:
                needs = step._replace(op=None, needs=(y,), weight=weights.get(y))
                part.steps.append((place, needs))
            units.append(part.unit(candidates)._replace(apart=None))
        return units

    def unit(self, candidates: frozenset[str]) -> Unit:
        # Groups that were joined have their steps one after the other, and a walk needs them in
        # the order of the program.
        self.steps.sort(key=lambda pair: pair[0])
        numbers, key = _numbering(), list[Hashable]()
        for _, step in self.steps:
            op = step.op
            used = [*step.needs, *itertools.chain(*step.passes)]
            used += op.inputs + op.outputs if op else []
            what = op and (signature(op), step.is_waited_for)
            key.append((step.times, what, numbers(used), step.weight, step.assigned))
        operations = [step.op for _, step in self.steps if step.op is not None]
        weights = [step.weight for _, step in self.steps if step.weight is not None]
        dims = dims_of(operations, weights, candidates)
        apart = functools.partial(self.apart, candidates)
        return Unit(tuple(key), dims, 1.0, self.layer, self.seconds, apart, bool(weights))


class SumFinder:
    """Groups the pending sums of a program with the operations that delay or need them.

    Attributes:
      groups: the groups so far, each a _Sums; a dictionary as an ordered set.
    """

    def __init__(self, candidates: frozenset[str], updates: Updates):
        """Creates a SumFinder.

        Args:
          candidates: names of the dimensions that may be split.
          updates: the Updates of the program, or none unless variables may be stored in parts.
        """
        self._candidates = candidates
        self._weight_of, self._of_loops = updates.weight_of, updates.sums
        self._sums: dict[Tensor, _Sums] = {}  # of a Tensor that may be pending
        self.groups: dict[_Sums, None] = {}
        self._place = 0

    def step(self, step: Step) -> None:
        """Visits the next step of the program.

        Args:
          step: a Step.
        """
        self._place += 1
        for x in step.needs:
            self._need(x, step)
        # What a loop sums up over iterations is needed once after the loop, and not in each of
        # them.
        for y, x in step.passes:
            if x in self._sums:
                sums = self._sums[y] = self._sums[x]
                one = step._replace(needs=(), passes=((y, x),), weight=self._of_loops.get(y))
                sums.steps.append((self._place, one))
        if step.op is not None:
            self._operation(step.op, step)

    def _need(
        self, x: Tensor, step: Step, weight: Optional[Weight] = None, assigned: bool = False
    ) -> None:
        # The first that needs a sum pays for it, and the others find it computed.
        sums = self._sums.pop(x, None)
        if sums is not None:
            needs = Step(None, (x,), (), step.times, step.layer, weight, assigned)
            sums.steps.append((self._place, needs))

    def _operation(self, op: Operation, step: Step) -> None:
        if isinstance(op, Assign):
            for x, v in zip(op.inputs, op.variables):
                self._need(x, step, self._weight_of.get(v), v.trainable)
        pending = [x for x in op.inputs if x in self._sums]
        weight, split = self._weight_of.get(op), self._candidates
        if weight is not None:  # whose dimensions may be split where it is stored
            split = split | frozenset(d.name for d in weight)
        if pending and not 0 < op.delays_sums <= len(pending):
            for x in pending:
                self._need(x, step, weight)
            pending = []
        if not pending and not op.may_begin_sum(split):
            return
        sums = self._joined([self._sums[x] for x in pending])
        sums.layer = sums.layer or step.layer
        sums.steps.append((self._place, step._replace(weight=weight)))
        for y in op.outputs:
            self._sums[y] = sums

    def _joined(self, parts: Sequence[_Sums]) -> _Sums:
        if not parts:
            new = _Sums()
            self.groups[new] = None
            return new
        # Two sums that one operation adds are put off together or not at all, so their time cannot
        # be told apart.
        first, *others = dict.fromkeys(parts)
        for other in others:
            first.steps += other.steps
            del self.groups[other]
            for x in [x for x, sums in self._sums.items() if sums is other]:
                self._sums[x] = first
        return first


def program_units(
    steps: Iterable[Step], candidates: frozenset[str], updates: Updates
) -> list[Unit]:
    """Returns the units of a program.

    Args:
      steps: Steps.
      candidates: names of the dimensions that may be split.
      updates: the Updates of the program, if variables may be stored in parts, or none; the units
        are those of any stored layout, which is a part of the CostModel.
    """
    finder = SumFinder(candidates, updates)
    units = [
        _gather(x, times, candidates, x in updates.sums) for x, times in updates.gathers.items()
    ]
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
            units.append(_operation(step.op, updates.weight_of.get(step.op), step, candidates))
    return units + [sums.unit(candidates) for sums in finder.groups]


def _operation(
    op: Operation, weight: Optional[Weight], step: Step, candidates: frozenset[str]
) -> Unit:
    # Whether all of that is known before the first step depends on how each part of it is split.
    made_of, numbers = step.made_of, _numbering()

    def seconds(model: CostModel, impl: MeshImpl) -> Seconds:
        own = model.in_parts(weight, impl)
        share = 1.0 - model.folded_share(made_of, own) if made_of else 1.0
        if not share:
            return ZERO
        seconds = model.operation(op, own).times(share)
        return seconds.times(model.beside(op, own) if step.beside else 1.0)

    dims = dims_of(made_of or [op], [weight], candidates)
    whole = tuple((signature(one), numbers(one.inputs + one.outputs)) for one in made_of)
    signed = (signature(op), weight, step.beside, whole)
    return Unit(signed, dims, step.times, step.layer, seconds, is_stored=weight is not None)


def _gather(x: Tensor, times: float, candidates: frozenset[str], is_sum: bool) -> Unit:
    """Returns the unit of a weight, or of a gradient, that is in parts and is gathered for uses."""

    def seconds(model: CostModel, impl: MeshImpl) -> Seconds:
        in_parts = is_sum or model.storing.weights_too
        return _gathered(x, tuple(x.shape), model, impl) if in_parts else ZERO

    key = ("gather", tuple(x.shape), x.dtype, is_sum)
    dims = dims_of([], [tuple(x.shape)], candidates)
    return Unit(key, dims, times, x.operation.name, seconds, is_stored=True)


def _gathered(x: Tensor, weight: Weight, model: CostModel, impl: MeshImpl) -> Seconds:
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
    updates: Updates,
) -> Unit:
    """Returns the unit of the assignment of a value to one variable."""
    size = variable.slice_dtype.size
    weight = updates.weight_of.get(variable)
    gathers = variable.trainable and x.operation in updates.weight_of

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

    key = (Assign, tuple(x.shape), x.dtype, size, weight, gathers)
    dims = dims_of([], [tuple(x.shape), weight], candidates)
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


class _Kind:
    """Units of equal time, with their count in each layer."""

    def __init__(self, unit: Unit, known: dict[frozenset, Seconds]):
        self.unit, self.known = unit, known
        self.dims = tuple(sorted(unit.dims))
        self.layers: Counter[str] = Counter()
        self.times = 0.0

    def rules(self, layout: Mapping[str, str]) -> dict[str, str]:
        """Returns the rules of a layout for its dimensions, which are all that it depends on."""
        return {d: layout[d] for d in self.dims if d in layout}

    def seconds(self, model: CostModel, layout: Mapping[str, str]) -> Seconds:
        """Returns the seconds of one of the units by a CostModel."""
        return self.unit.seconds(model, model.impl(self.rules(layout)))


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
            # Only what does not depend on how variables are stored is the same for other ways to
            # store them.
            known = {} if unit.is_stored else self._known.setdefault(unit.signature, {})
            self._kinds[unit.signature] = _Kind(unit, known)
        kind = self._kinds[unit.signature]
        kind.layers[layer_kind(unit.layer)] += unit.times  # type: ignore[assignment]
        kind.times += unit.times

    def _seconds(self, kind: _Kind, layout: Mapping[str, str]) -> Seconds:
        # By its own dimensions, so that layouts that differ in others share what was computed.
        key = frozenset(kind.rules(layout).items())
        if key not in kind.known:
            kind.known[key] = kind.seconds(self._model, layout)
        return kind.known[key]

    def total(self, layout: Mapping[str, str]) -> Seconds:
        """Returns the seconds of a step.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
        """
        kinds = self._kinds.values()
        return sum((self._seconds(k, layout).times(k.times) for k in kinds), ZERO)

    def by_layer(
        self, layout: Mapping[str, str], model: Optional[CostModel] = None
    ) -> dict[str, Seconds]:
        """Returns the seconds of a step by kind of layer, longest first.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
          model: another CostModel than its own.
        """
        layers: dict[str, Seconds] = {}
        for kind in self._kinds.values():
            seconds = kind.seconds(model, layout) if model else self._seconds(kind, layout)
            for layer, times in kind.layers.items():
                layers[layer] = layers.get(layer, ZERO) + seconds.times(times)
        return dict(sorted(layers.items(), key=lambda pair: -pair[1].total))

    def sent(self, layout: Mapping[str, str]) -> list[Sent]:
        """Returns the collectives of a step, without those of a mesh dimension of one processor.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
        """
        # The stored seconds do not say of which collectives they are, so they are computed again.
        model, collectives = copy.copy(self._model), list[Sent]()
        for kind in self._kinds.values():
            model.recorded = []
            kind.seconds(model, layout)
            for collective, times, seconds in model.recorded:
                collectives.append(Sent(collective, times * kind.times, seconds * kind.times))
        return collectives

    def tables(self) -> dict[tuple[str, ...], np.ndarray]:
        """Returns, for each set of dimensions, the seconds of each assignment in the space."""
        seconds_of: dict[tuple[str, ...], np.ndarray] = {}
        for kind in self._kinds.values():
            rows = self._space.assignments(kind.dims)
            seconds = [
                self._seconds(kind, self._space.layout(kind.dims, row)).total for row in rows
            ]
            column = np.array(seconds) * kind.times
            # One column for all kinds of the same dimensions: the search asks only for their sum.
            seconds_of[kind.dims] = seconds_of.get(kind.dims, 0.0) + column
        return seconds_of

    def __len__(self) -> int:
        """The number of kinds of units."""
        return len(self._kinds)

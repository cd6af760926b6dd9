"""The additive parts of a program's time: operations, gathers of weights, and pending sums."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Optional

from mesh_tensorflow._core.cost import Collective, Cost
from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.auto_mtf._memory.steps import Step
from mesh_tensorflow.auto_mtf._memory.updates import Updates
from mesh_tensorflow.auto_mtf._time.seconds import ZERO, CostModel, Seconds
from mesh_tensorflow.auto_mtf._time.sums import SumFinder
from mesh_tensorflow.auto_mtf._time.unit import Unit, dims_of, signature, weight_key
from mesh_tensorflow.ops._variables.assign import Assign

__all__ = ["program_units"]


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
    units = [] if updates is None else _gathers(updates, candidates)
    for step in steps:
        finder.step(step)
        if step.op is None:
            continue
        if isinstance(step.op, Assign):
            units += _assignments(step.op, step, candidates, updates)
            continue
        op, weight = step.op, None if updates is None else updates.weight_of.get(step.op)
        dims = dims_of([op], [weight], candidates)
        seconds = functools.partial(_operation_seconds, op, weight)
        key, is_stored = (signature(op), weight_key(weight)), weight is not None
        units.append(Unit(key, dims, step.times, step.layer, seconds, None, is_stored))
    return units + finder.found()


def _operation_seconds(
    op: Operation, weight: Optional[Shape], model: CostModel, impl: MeshImpl
) -> Seconds:
    return model.operation(op, model.in_parts(weight, impl))


def _gathers(updates: Updates, candidates: frozenset[str]) -> list[Unit]:
    """Returns a unit for each weight: stored in parts, it is gathered for its uses."""
    return [
        Unit(
            ("gather", tuple(x.shape), x.dtype),
            frozenset(x.shape.dimension_names) & candidates,
            times,
            x.operation.name,
            functools.partial(_gather_seconds, x),
            None,
            True,
        )
        for x, times in updates.gathers.items()
    ]


def _gather_seconds(x: Tensor, model: CostModel, impl: MeshImpl) -> Seconds:
    return _gathered(x, x.shape, model, impl) if model.storing.weights_too else ZERO


def _gathered(x: Tensor, weight: Shape, model: CostModel, impl: MeshImpl) -> Seconds:
    """Returns the seconds of an allgather of a tensor that is in parts as a weight is stored."""
    stored = model.in_parts(weight, impl)
    whole, elements = impl.laid_out_size(x.shape), stored.laid_out_size(x.shape)
    before = elements
    collectives = []
    for axis in sorted({*stored.splitting_axes(x.shape)} - {*impl.splitting_axes(x.shape)}):
        elements *= impl.shape[axis].size
        collectives.append(Collective("allconcat", (axis,), elements, elements * x.dtype.size))
    if not collectives:
        return ZERO
    cost = Cost(0, (before + whole) * x.dtype.size, tuple(collectives))
    return model.seconds(cost, x.dtype.name, [x], impl)


def _assignments(
    op: Assign, step: Step, candidates: frozenset[str], updates: Optional[Updates]
) -> list[Unit]:
    """Returns one unit per variable, since variables assigned together may differ in layout."""
    units = []
    for x, variable in zip(op.inputs, op.variables):
        size = variable.slice_dtype.size
        weight = None if updates is None else updates.weight_of.get(variable)
        gathers = updates is not None and variable.trainable and x.operation in updates.weight_of
        units.append(
            Unit(
                (Assign, tuple(x.shape), x.dtype, size, weight_key(weight), gathers),
                dims_of([], [x.shape, weight], candidates),
                step.times,
                step.layer,
                functools.partial(_assignment_seconds, x, size, weight, gathers),
                None,
                weight is not None,
            )
        )
    return units


def _assignment_seconds(
    x: Tensor,
    size: int,
    weight: Optional[Shape],
    gathers: bool,
    model: CostModel,
    impl: MeshImpl,
) -> Seconds:
    before = ZERO
    if weight is not None and gathers and not model.storing.weights_too:
        before = _gathered(x, weight, model, impl)
    elif weight is not None:
        impl = model.in_parts(weight, impl)
    cost = Cost(0, 2 * impl.laid_out_size(x.shape) * size)
    return before + model.seconds(cost, x.dtype.name, [x], impl)

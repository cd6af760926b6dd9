"""Time of operations and collectives, by a roofline model and by models of rings and trees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Optional

from mesh_tensorflow._core.layout import LayoutRules, StoredLayout
from mesh_tensorflow._core.operation import Collective, Cost, Operation
from mesh_tensorflow._core.placement import cost_of
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._units import ms_text
from mesh_tensorflow.auto_mtf._stored import Storing, Weight
from mesh_tensorflow.auto_mtf.hardware import Hardware, Link

__all__ = ["ZERO", "CostModel", "Seconds"]


class Seconds(NamedTuple):
    """Seconds of computation and of communication."""

    compute: float
    communication: float

    @property
    def total(self) -> float:
        """The sum of both; no overlap is assumed."""
        return self.compute + self.communication

    def __add__(self, other: Any) -> Seconds:
        return Seconds(self[0] + other[0], self[1] + other[1])

    def __radd__(self, other: Any) -> Seconds:
        return self if other == 0 else self + other

    def __str__(self) -> str:
        compute, communication = ms_text(self.compute), ms_text(self.communication)
        return f"{ms_text(self.total)} ms: compute {compute}, communication {communication}"

    def times(self, count: float) -> Seconds:
        """Returns the time multiplied by a count."""
        return Seconds(self.compute * count, self.communication * count)


ZERO = Seconds(0.0, 0.0)


class CostModel:
    """Converts costs of operations to seconds.

    The time of an operation is that of its arithmetic or of its memory traffic, whichever is
    longer (a roofline model). The time of a step is the sum over its operations and collectives.

    Attributes:
      mesh_shape: a Shape.
      hardware: a Hardware.
      storing: a Storing, how variables are stored.
      recorded: pairs (Collective, its seconds), to which each one that moves something is added;
        nothing is if None.
    """

    def __init__(
        self, mesh_shape: Shape, hardware: Hardware, stored_layout: Optional[StoredLayout] = None
    ):
        """Creates a CostModel.

        Args:
          mesh_shape: a Shape.
          hardware: a Hardware.
          stored_layout: how variables are stored, if not as they are computed with; or None.
        """
        self.mesh_shape = mesh_shape
        self.hardware = hardware
        self.storing = Storing(mesh_shape, stored_layout)
        self.recorded: Optional[list[tuple[Collective, float]]] = None
        self._impls: dict[frozenset, MeshImpl] = {}

    def impl(self, layout: Mapping[str, str]) -> MeshImpl:
        """Returns an abstract MeshImpl with a layout.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
        """
        key = frozenset(layout.items())
        if key not in self._impls:
            self._impls[key] = MeshImpl(self.mesh_shape, LayoutRules(key))
        return self._impls[key]

    def in_parts(self, weight: Optional[Weight], impl: MeshImpl) -> MeshImpl:
        """Returns the MeshImpl that splits a weight, and its update, as they are stored.

        Args:
          weight: the dimensions of a weight; or None, of what is not stored in parts.
          impl: a MeshImpl with the layout of the weight's dimensions.
        """
        if weight is None or self.storing.layout is None:
            return impl
        own = dict(impl.layout_rules.pairs)
        rules = self.storing.rules(weight, own)
        return self.impl({**own, **rules}) if rules else impl

    def operation(self, op: Operation, impl: MeshImpl) -> Seconds:
        """Returns the time of an operation, without the allreduces of pending sums of its inputs.

        Args:
          op: an Operation.
          impl: a MeshImpl.
        """
        # Measured profiles have rates of their own for convolutions, by the class of the operation.
        rate, tensors = type(op).__name__, [*op.outputs, *op.inputs]
        if rate not in self.hardware.flops:
            rate = tensors[0].dtype.name if tensors else ""
        return self.seconds(cost_of(op, impl), rate, tensors, impl)

    def seconds(self, cost: Cost, rate: str, tensors: Iterable[Tensor], impl: MeshImpl) -> Seconds:
        """Returns the time of a cost.

        Args:
          cost: a Cost.
          rate: a dtype or operation class in `Hardware.flops`.
          tensors: the Tensors that are read and created.
          impl: a MeshImpl.
        """
        hardware, size = self.hardware, impl.size
        # A Cost is the sum over all processors, which have equal shares of it.
        calls, flops, moved = 1, cost.flops / size, cost.bytes / size
        if hardware.one_memory:
            # Equal slices of one memory are computed once, so work grows with the parts and not
            # with the processors.
            calls = self._parts(impl, tensors)
            flops, moved = flops * calls, moved * calls
        arithmetic = flops / hardware.product_flops(rate)
        compute = max(arithmetic, moved / hardware.memory_bandwidth)
        # What only passes a value on, as a reshape that moves nothing, takes no time.
        if cost.flops or cost.bytes:
            compute += calls * hardware.operation_seconds
        communication = sum(self.collective(c, calls) for c in cost.collectives)
        return Seconds(compute, communication)

    def pending_sum(self, x: Tensor, collective: Collective, impl: MeshImpl) -> float:
        """Returns the seconds of the allreduce of a Tensor.

        Args:
          x: a Tensor.
          collective: its Collective.
          impl: a MeshImpl.
        """
        # By the slices of the sum: in one memory, processors that have the same slice share one.
        return self.collective(collective, self._parts(impl, [x]))

    def _parts(self, impl: MeshImpl, tensors: Iterable[Tensor]) -> int:
        """Returns the number of distinct slices of tensors."""
        return self._processors({axis for x in tensors for axis in impl.splitting_axes(x.shape)})

    def _processors(self, axes: Iterable[int]) -> int:
        """Returns the number of processors along some axes of the mesh together."""
        return math.prod(self.mesh_shape[axis].size for axis in axes)

    def collective(self, collective: Collective, parts: int = 1) -> float:
        """Returns the seconds of a collective.

        Args:
          collective: a Collective.
          parts: the number of distinct slices; used only in one memory domain.
        """
        moved = collective.bytes / self.mesh_shape.size
        count = self._processors(collective.mesh_axes)
        if self.hardware.one_memory:
            seconds = self._in_one_memory(collective.kind, moved, parts, count)
        else:
            seconds = 0.0
            links = [self.hardware.links(self.mesh_shape, axis) for axis in collective.mesh_axes]
            # Reducing over fast links first leaves less data for the slow ones.
            levels = sorted(itertools.chain(*links), key=lambda level: -level[1].bandwidth)
            for size, link in levels:
                if size == 1:
                    continue
                seconds += _COLLECTIVES[collective.kind](moved, size, link)
                # Slow links come last in a reduction and first in a gather: both send parts over
                # them.
                if collective.kind in ("allreduce", "reduce_scatter", "allconcat"):
                    moved /= size
        if self.recorded is not None and count > 1:
            self.recorded.append((collective, seconds))
        return seconds

    def _in_one_memory(self, kind: str, moved: float, parts: int, count: int) -> float:
        """Returns the seconds in one memory domain.

        Processors read each other's slices, and equal slices are computed once.
        """
        if count == 1:
            return 0.0
        link, read, copies = self.hardware.link, moved * parts, parts
        if kind in ("allreduce", "reduce_scatter"):
            # A sum reads `count` slices and writes one.
            read, copies = read * (count + 1), copies * count
        return read / link.bandwidth + copies * link.latency


def _allreduce(moved: float, count: int, link: Link) -> float:
    # A reduce-scatter and an allgather of count - 1 steps each, of one part of `count` in a step.
    ring = 2 * (count - 1) * (moved / count / link.bandwidth + link.latency)
    # Up a binary tree and down again: more bytes than a ring, but fewer messages, for small sums.
    steps = math.ceil(math.log2(count))
    return min(ring, 2 * steps * (moved / link.bandwidth + link.latency))


def _allconcat(moved: float, count: int, link: Link) -> float:
    # Each part of the result passes through all other processors, one step at a time.
    return (count - 1) * (moved / count / link.bandwidth + link.latency)


def _alltoall(moved: float, count: int, link: Link) -> float:
    if link.kind == "ring":  # a part travels count / 4 steps on average
        return moved * count / 4 / link.bandwidth + count // 2 * link.latency
    return (count - 1) * (moved / count / link.bandwidth + link.latency)


def _shift(moved: float, count: int, link: Link) -> float:
    # A bandwidth of a ring counts both of its directions.
    directions = 2 if link.kind == "ring" else 1  # only one of the two is used
    return moved * directions / link.bandwidth + link.latency


# Seconds by the bytes per processor (of an allconcat, those of the result) among `count` of them:
# rings of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
# workstations", 2009; for short sums a tree.
_COLLECTIVES = {
    "allreduce": _allreduce,
    "reduce_scatter": _allconcat,  # the same parts travel around the ring
    "allconcat": _allconcat,
    "alltoall": _alltoall,
    "shift": _shift,
}

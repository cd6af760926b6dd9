"""Search over programs, meshes, layouts and stored layouts for the fastest plan that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional, Protocol, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.shape import Shape, convert_to_shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.stored_layout import StoredLayout
from mesh_tensorflow._units import bytes_text
from mesh_tensorflow.auto_mtf._time.program_parts import ProgramParts
from mesh_tensorflow.auto_mtf._time.stored import stored_layouts
from mesh_tensorflow.auto_mtf.api import all_mesh_shapes
from mesh_tensorflow.auto_mtf.hardware import Hardware, hardware_profile
from mesh_tensorflow.auto_mtf.plans.choice import Choice, choices
from mesh_tensorflow.auto_mtf.plans.parts import plan_of
from mesh_tensorflow.auto_mtf.plans.result import Lost, Plan, Plans
from mesh_tensorflow.auto_mtf.step_time import Estimate, MemoryLimitError, StepEstimator

__all__ = ["plan"]


class HasGraph(Protocol):
    """A program, such as a `models.Program`: a complete graph, and Tensors that stay in memory."""

    @property
    def graph(self) -> Graph:
        """An mtf.Graph."""

    @property
    def outputs(self) -> Sequence[Tensor]:
        """Tensors."""


Built = Union[HasGraph, tuple[Graph, Sequence[Tensor]]]


def plan(
    build: Callable[[Choice], Built],
    processors: int,
    candidates: Optional[Iterable[Choice]] = None,
    zero: Sequence[int] = (0, 2, 3),
    memory_limit_bytes: Optional[float] = None,
    hardware: Union[str, Hardware, None] = None,
    max_mesh_shape_dimensions: int = 2,
    mesh_shapes: Optional[Iterable[Any]] = None,
    within: float = math.inf,
) -> Plans:
    """Returns the fastest way to build, split and store a program, and why others lose.

    Each candidate is built. For each mesh shape, and each way to store variables, the layout that
    takes the least time is found, of those that fit. Reshapes may exchange dimensions over one mesh
    dimension, and the length and the memory of attention in a ring may be split over one.

    >>> from mesh_tensorflow.auto_mtf.plans.language_model import planned_language_model
    >>> sizes = {"batch": 8, "length": 8, "d_model": 16, "d_ff": 32, "d_kv": 4, "vocab": 16}
    >>> plans = mtf.auto_mtf.plan(lambda choice: planned_language_model(choice, **sizes), 4)
    >>> print(plans.best.choice)
    layers in a row

    Args:
      build: a function of a Choice that builds the whole step, in a new graph, and returns a
        Program, or a tuple (mtf.Graph, outputs). A ValueError says that it cannot be built so.
      processors: the number of processors.
      candidates: Choices; `choices()` if None.
      zero: the stages of ZeRO to choose from, each over any mesh dimension; 1 and 2 are one.
      memory_limit_bytes: the memory that a step may use on one processor, or None.
      hardware: see `auto_mtf.layout`.
      max_mesh_shape_dimensions: the maximum number of mesh dimensions.
      mesh_shapes: Shapes, or what converts to them, instead of all with the number of processors.
      within: plans that take more than this many times as long as the best are not looked at
        closely; 1 finds the best plan soonest.

    Returns:
      Plans. Of equally fast plans, the first candidate's with the first stage is the best.

    Raises:
      ValueError: an argument is invalid, or no candidate can be built.
      auto_mtf.step_time.MemoryLimitError: no plan fits; the error names the nearest, and says by
        how much it misses.
      auto_mtf.layout_optimizer.SolverError: the solver did not find an optimum.
    """
    if memory_limit_bytes is not None and not memory_limit_bytes > 0:
        raise ValueError(f"memory_limit_bytes={memory_limit_bytes} must be more than 0, or None")
    if not within >= 1:
        raise ValueError(f"within={within} must be 1 or more: a multiple of the best plan's time")
    shapes = _shapes(processors, max_mesh_shape_dimensions, mesh_shapes)
    search = _Search(shapes, memory_limit_bytes, hardware_profile(hardware), within)
    for choice in choices() if candidates is None else candidates:
        search.add(choice, build, list(zero))
    return search.result(processors)


def _shapes(processors: int, most: int, given: Optional[Iterable[Any]]) -> list[Shape]:
    if given is None:
        return all_mesh_shapes(processors, most)
    shapes = [convert_to_shape(shape) for shape in given]
    for shape in shapes:
        if shape.size != processors:
            raise ValueError(
                f"mesh shape {dims_text(shape)} has {shape.size} processors, but there are "
                f"{processors}; its sizes must have that product"
            )
    return shapes


class _Found(NamedTuple):
    """A family's best."""

    estimator: StepEstimator
    estimate: Estimate


class _Search:
    """The best plan so far, and what was lost."""

    def __init__(
        self, shapes: Sequence[Shape], limit: Optional[float], hardware: Hardware, within: float
    ):
        self._shapes, self._limit, self._hardware = shapes, limit, hardware
        self._within = within
        self._best: Optional[Plan] = None
        self._best_zero: Optional[int] = None
        self._lost: list[Lost] = []
        self._nearest: Optional[tuple[Choice, StepEstimator, Estimate]] = None

    # -- adding a candidate

    def add(self, choice: Choice, build: Callable[[Choice], Built], zero: Sequence[int]) -> None:
        """Builds a candidate, and finds its best layouts at each stage of ZeRO."""
        shapes = [s for s in self._shapes if _divides(s, choice.stages)]
        if not shapes:
            sizes = sorted({d.size for shape in self._shapes for d in shape})
            self._lost.append(
                Lost(
                    choice, None, f"no mesh dimension, of sizes {', '.join(map(str, sizes))}, "
                    f"divides {choice.stages} stages",
                )
            )  # fmt: skip
            return
        try:
            choice.check()
            with tf.Graph().as_default():
                built = build(choice)
        except ValueError as e:
            self._lost.append(Lost(choice, None, f"cannot be built: {e}"))
            return
        graph, outputs = (built.graph, built.outputs) if hasattr(built, "graph") else built  # type: ignore[union-attr]
        # One that was built before has evaluated much already.
        parts = built if isinstance(built, ProgramParts) else ProgramParts(graph, outputs)
        for stage in zero:
            self._family(choice, stage, [*self._estimators(parts, shapes, stage)])

    def _estimators(
        self, parts: ProgramParts, shapes: Sequence[Shape], zero: int
    ) -> Iterator[StepEstimator]:
        for shape in shapes:
            seen = set()
            for stored in stored_layouts(shape, [zero]):
                alike = self._alike(shape, stored)
                if alike not in seen:
                    seen.add(alike)
                    yield StepEstimator(
                        parts.graph, shape, parts.outputs, self._hardware, stored, parts,
                        exchanges=True,
                    )  # fmt: skip

    def _alike(self, shape: Shape, stored: Optional[StoredLayout]) -> Any:
        """Returns what is equal for stored layouts that differ by a permutation of the mesh."""
        if stored is None or stored.mesh_dim is None:
            return None
        axis = shape.dimension_names.index(stored.mesh_dim)
        return shape[axis].size, tuple(map(tuple, self._hardware.links(shape, axis)))

    def _family(self, choice: Choice, zero: int, estimators: list[StepEstimator]) -> None:
        """Finds the best layout of one program at one stage, over all meshes."""
        found: Optional[_Found] = None
        floors = {e: e.least() for e in estimators}
        for estimator in sorted(estimators, key=lambda e: floors[e][0]):
            least_seconds, least_bytes = floors[estimator]
            if self._limit is not None and least_bytes > self._limit:
                continue
            most = min(self._most(), math.inf if found is None else found.estimate.seconds.total)
            if least_seconds >= most:
                continue
            better = estimator.faster_than(most, self._limit)
            found = found if better is None else _Found(estimator, better)
        if found is not None:
            self._keep(choice, zero, found)
            return
        self._lost.append(self._why_none(choice, zero, floors))

    def _why_none(
        self, choice: Choice, zero: int, floors: dict[StepEstimator, tuple[float, int]]
    ) -> Lost:
        """Returns why a family has no layout that is fast enough and fits."""
        least = self._least_memory({e: floor for e, (_, floor) in floors.items()})
        if self._limit is None or least.estimate.peak_bytes <= self._limit:
            why = f"takes more than {self._within:.3g} times as long as the best"
            return Lost(choice, zero, why)
        missing = least.estimate.peak_bytes - self._limit
        if self._nearest is None or least.estimate.peak_bytes < self._nearest[2].peak_bytes:
            self._nearest = (choice, *least)
        why = f"does not fit: {bytes_text(missing)} too many"
        return Lost(choice, zero, why, None, least.estimator.mesh_shape, missing)

    def _most(self) -> float:
        return math.inf if self._best is None else self._best.seconds.total * self._within

    def _least_memory(self, floors: dict[StepEstimator, int]) -> _Found:
        """Returns the layout with the lowest peak; one that fits is low enough."""
        least: Optional[_Found] = None
        for estimator in sorted(floors, key=lambda e: floors[e]):
            if least is not None:
                enough = self._limit is None or least.estimate.peak_bytes <= self._limit
                if enough or floors[estimator] >= least.estimate.peak_bytes:
                    break
            estimate = estimator.least_memory()
            if least is None or estimate.peak_bytes < least.estimate.peak_bytes:
                least = _Found(estimator, estimate)
        assert least is not None
        return least

    def _keep(self, choice: Choice, zero: int, found: _Found) -> None:
        """Keeps a family's best as the best of all, or as lost."""
        if self._best is None or found.estimate.seconds.total < self._best.seconds.total:
            if self._best is not None:
                self._lose(self._best.choice, self._best_zero, self._best.estimate,
                           self._best.mesh_shape)  # fmt: skip
            self._best, self._best_zero = plan_of(choice, *found), zero
        else:
            self._lose(choice, zero, found.estimate, found.estimator.mesh_shape)

    def _lose(self, choice: Choice, zero: Optional[int], estimate: Estimate, shape: Shape) -> None:
        self._lost.append(Lost(choice, zero, "", estimate, shape))

    # -- results

    def result(self, processors: int) -> Plans:
        """Returns the Plans.

        Raises:
          ValueError: there are none.
        """
        if self._best is None:
            raise self._nothing(processors)
        lost = [self._told(lost) for lost in self._lost]
        lost.sort(key=lambda one: one.best.seconds.total if one.best else math.inf)
        return Plans(self._best, lost, self._hardware, self._limit)

    def _told(self, lost: Lost) -> Lost:
        """Says what takes longer than in the best plan."""
        if lost.best is None or self._best is None:
            return lost
        ours, theirs = self._best.seconds, lost.best.seconds
        parts = [
            f"{what} {(b - a) * 1e3:+.3g} ms"
            for what, a, b in zip(ours._fields, ours, theirs)
            if abs(b - a) > 1e-3 * ours.total
        ]
        why = f"{theirs.total / ours.total:.2f} times as long: {', '.join(parts) or 'as fast'}"
        return Lost(lost.choice, lost.zero, why, lost.best, lost.mesh_shape)

    def _nothing(self, processors: int) -> ValueError:
        if self._nearest is None or self._limit is None:
            reasons = "\n".join(f"  {lost.choice}: {lost.why}" for lost in self._lost)
            return ValueError(
                f"none of the candidates can be built:\n{reasons or '  there are none'}"
            )
        choice, estimator, estimate = self._nearest
        missing = estimate.peak_bytes - self._limit
        stored = "" if estimate.stored_layout is None else f"; {estimate.stored_layout}"
        lines = [
            f"no plan fits in {bytes_text(self._limit)} of each of {processors} processors. The "
            f"nearest is: {choice}; {estimate.text or 'no splits'}{stored}, on the mesh "
            f"{dims_text(estimator.mesh_shape)}, which takes {bytes_text(estimate.peak_bytes)}, "
            f"{bytes_text(missing)} too many. Of these are:"
        ]
        for kind, held in estimator.peak_by_kind(estimate.layout).items():
            lines.append(f"  {bytes_text(held):>10} {kind}")
        return MemoryLimitError("\n".join(lines), missing)


def _divides(shape: Shape, stages: int) -> bool:
    """Returns whether a mesh dimension can split the stages."""
    return stages == 1 or any(d.size > 1 and stages % d.size == 0 for d in shape)

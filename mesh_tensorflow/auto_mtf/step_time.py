"""StepEstimator: estimates the time and memory of a step, and finds the fastest layouts."""

from __future__ import annotations

import collections
import functools
import heapq
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

from mesh_tensorflow._core.errors import dims_text, is_real
from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.layout import UNEVEN, LayoutRules, StoredLayout, joined_names
from mesh_tensorflow._core.operation import Operation, Tensor, needed_operations
from mesh_tensorflow._core.shape import JOIN, Shape, convert_to_shape
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._units import bytes_text
from mesh_tensorflow.auto_mtf._compiled import CompiledMemory
from mesh_tensorflow.auto_mtf._program import FastestLayouts, Tables
from mesh_tensorflow.auto_mtf._space import (
    NO_UPDATES,
    Storing,
    Updates,
    find_updates,
    layout_pairs,
    layout_space,
    layout_text,
)
from mesh_tensorflow.auto_mtf._units import (
    SecondsOfUnits,
    Step,
    StepTime,
    Unit,
    program_steps,
    program_units,
)
from mesh_tensorflow.auto_mtf.hardware import CostModel, Hardware, Seconds, hardware_profile
from mesh_tensorflow.auto_mtf.objective import Held, ResidentMemory
from mesh_tensorflow.auto_mtf.valid_layouts import LayoutValidator

if TYPE_CHECKING:
    from mesh_tensorflow.auto_mtf.models import Program
from mesh_tensorflow.ops._control.while_loop import is_of_microbatches

__all__ = ["Estimate", "Held", "MemoryLimitError", "Seconds", "StepEstimator"]

AnyLayout = Union[str, LayoutRules, Mapping[str, str]]
Built = Union["Program", "ProgramParts", tuple[Graph, Sequence[Tensor]]]

_HINTS = {
    "weights": "more processors, or mesh dimensions whose sizes divide more of its dimensions; "
    "a shorter slice dtype",
    "slots": "an optimizer with smaller slots, such as Adafactor",
    "copies": "more processors, or mesh dimensions whose sizes divide more of its dimensions",
    "activations": "a smaller batch, mtf.recompute_grad around each layer, or bfloat16",
    "recomputed": "a smaller batch, or mtf.recompute_grad around smaller parts",
    "gradients": "a smaller batch, or bfloat16",
    "gathered": "mtf.recompute_grad around each layer, which gathers its weights again; a layout "
    "that splits no dimension that an operation needs whole",
    "updates": "more processors; an optimizer that computes less at once",
    "loop tape": "fewer iterations of the loop, or smaller loop variables",
}


def check_memory_limit(memory_limit_bytes: Optional[float]) -> None:
    """Raises ValueError for a limit of memory that is no number above 0, nor None."""
    if memory_limit_bytes is not None and not (
        is_real(memory_limit_bytes) and memory_limit_bytes > 0
    ):
        raise ValueError(
            f"memory_limit_bytes={memory_limit_bytes!r} must be a number of bytes, more than 0, "
            "such as 15e9, or None"
        )


class MemoryLimitError(ValueError):
    """No layout fits in the memory limit.

    Attributes:
      missing_bytes: the bytes by which the layout with the lowest peak memory exceeds the limit.
    """

    def __init__(self, message: str, missing_bytes: float):
        """Creates the error."""
        super().__init__(message)
        self.missing_bytes = missing_bytes


class Estimate(NamedTuple):
    """The estimated time and memory of a step under a layout.

    Attributes:
      layout: a dictionary from dimension names to mesh dimension names.
      seconds: the Seconds of computation and communication.
      peak_bytes: the peak memory per processor, in bytes.
      stored_layout: how variables are stored, a StoredLayout; None if as they are computed with.
    """

    layout: dict[str, str]
    seconds: Seconds
    peak_bytes: int
    stored_layout: Optional[StoredLayout] = None

    @property
    def text(self) -> str:
        """The layout as a string, such as "batch:rows;d_ff:cols"."""
        return layout_text(self.layout)


class ProgramParts:
    """The units and the memory of a program, which are found once for all meshes."""

    def __init__(self, graph: Graph, outputs: Iterable[Tensor] = ()):
        """Creates the ProgramParts.

        Args:
          graph: an mtf.Graph, which is not changed afterwards.
          outputs: Tensors that stay in memory until the end.
        """
        self.graph = graph
        self.outputs = list(outputs)
        # A cache of the instance: that of a decorated method would keep all programs alive.
        self.units, self.updates = functools.cache(self._units), functools.cache(self._updates)
        self._known: dict[Hashable, SecondsOfUnits] = {}
        self._memory: dict[Hashable, ResidentMemory] = {}

    @classmethod
    def of(cls, built: Built) -> ProgramParts:
        """Returns the parts of what a function has built; itself, if it is some already.

        Args:
          built: a Program, or another object with a graph and outputs; or a tuple of both.
        """
        if isinstance(built, ProgramParts):
            return built
        graph, outputs = (built.graph, built.outputs) if hasattr(built, "graph") else built  # type: ignore[union-attr]
        return cls(graph, outputs)

    def stages(self, zero: Sequence[int]) -> list[int]:
        """Returns stages of ZeRO without 1 where it is what 2 is, which is also among them.

        They differ in microbatches alone, each of which scatters gradients from stage 2 on.

        Args:
          zero: stages.
        """
        apart = 2 not in zero or any(map(is_of_microbatches, self.graph.operations))
        return [stage for stage in zero if stage != 1 or apart]

    def _updates(self, early: Optional[bool]) -> Updates:
        """Returns the Updates of the program; see Storing for `early`."""
        return NO_UPDATES if early is None else find_updates(self.graph, early)

    def known(self, *mesh: Hashable) -> SecondsOfUnits:
        """Returns the seconds of units that are evaluated so far, on one mesh.

        Args:
          *mesh: what tells meshes apart.
        """
        return self._known.setdefault(mesh, {})

    @functools.cached_property
    def operations(self) -> list[Operation]:
        """The operations of the program that what it is run for needs."""
        return needed_operations(self.graph.operations, self.outputs)

    @functools.cached_property
    def steps(self) -> list[Step]:
        """The steps of the program."""
        return list(program_steps(self.operations, self.outputs))

    def _units(self, candidates: frozenset[str], early: Optional[bool]) -> list[Unit]:
        """Returns the units of the program, of variables in parts if `early` is not None."""
        return program_units(self.steps, candidates, self.updates(early))

    def memory(
        self,
        candidates: frozenset[str],
        storing: Storing,
        impl: Optional[MeshImpl] = None,
        compiled: bool = False,
    ) -> ResidentMemory:
        """Returns the memory of the program on one processor.

        Args:
          candidates: names of the dimensions that may be split.
          storing: a Storing.
          impl: a MeshImpl, for what is held in its layout alone; see `ResidentMemory`.
          compiled: see Hardware.
        """
        updates = self.updates(storing.early)
        # Rows do not depend on the mesh, but on what is in parts.
        key = candidates, storing.early, storing.weights_too, compiled
        make = functools.partial(
            CompiledMemory if compiled else ResidentMemory,
            self.operations, self.outputs, candidates, storing, updates, impl,
        )  # fmt: skip
        if impl is not None:
            return make()
        if key not in self._memory:
            self._memory[key] = make()
        return self._memory[key].on(storing)


class StepEstimator:
    """Estimates a step of a program under any layout, from the costs of its operations.

    The program is the graph at the time of construction. A loop counts with its
    `maximum_iterations`, or with one iteration if it has none.

    Attributes:
      mesh_shape: a Shape.
      hardware: a Hardware.
      stored_layout: a StoredLayout, or None.
      space: the legal layouts, a LayoutSpace.
      times: the time of a step, a StepTime.
      memory: the memory over time, a ResidentMemory.
      parts: what it shares with estimates on other meshes, a ProgramParts.
      costs: the CostModel in place of that of `hardware`, or None.
      over: names of the mesh dimensions that a search may split over; None for all.
    """

    def __init__(
        self,
        mtf_graph: Graph,
        mesh_shape: Any,
        mtf_outputs: Iterable[Tensor] = (),
        hardware: Union[str, Hardware, None] = None,
        stored_layout: Optional[StoredLayout] = None,
        parts: Optional[ProgramParts] = None,
        exchanges: bool = False,
        joint: bool = False,
        also: Iterable[tuple[str, str]] = (),
        costs: Optional[CostModel] = None,
        over: Optional[frozenset[str]] = None,
        apart: Sequence[StepEstimator] = (),
    ):
        """Creates a StepEstimator.

        Args:
          mtf_graph: an mtf.Graph.
          mesh_shape: a Shape, or what converts to one.
          mtf_outputs: Tensors that stay in memory until the end.
          hardware: see `hardware_profile`.
          stored_layout: how variables are stored, such as `stored_layout(mesh_shape, zero=3)`;
            None if as they are computed with.
          parts: the ProgramParts of the same graph and outputs, if there already are some.
          exchanges: whether a reshape may exchange dimensions over one mesh dimension, and
            attention by blocks may split its rows and its memory over one, as in a ring.
          joint: whether a search may split one dimension over several mesh dimensions together.
          also: further pairs (dimension name, mesh dimension name) that layouts may have.
          costs: the CostModel in place of that of `hardware`, such as measured ones.
          over: names of the mesh dimensions that a search may split over; all if None.
          apart: estimators, each with its `over`, of the layouts that split over these mesh
            dimensions alone, as their programs run in another way: with more threads for an
            operation, for example.
        """
        self.over, self._apart = over, tuple(apart)
        self._exchanges, self._joint, self._also = exchanges, joint, frozenset(also)
        self.costs = costs
        self.mesh_shape: Shape = convert_to_shape(mesh_shape) or Shape([])
        self.hardware = hardware_profile(hardware)
        self._validator = LayoutValidator(mtf_graph, self.mesh_shape)
        # One processor splits nothing, and takes as long with a rule as without.
        among = [d.name for d in self.mesh_shape if d.size > 1 and (over is None or d.name in over)]
        self.space = layout_space(
            mtf_graph.operations, self._validator, exchanges, joint, self._also, among
        )
        self.stored_layout = stored_layout
        self.parts = parts = parts or ProgramParts(mtf_graph, mtf_outputs)
        own = CostModel(self.mesh_shape, self.hardware, stored_layout)
        candidates = frozenset(self.space.dims)
        # Meshes whose sizes divide the same dimensions have the same candidates and units.
        units = parts.units(candidates, own.storing.early)
        # By its text, since a Hardware has dictionaries and so no hash. What is measured grows.
        times = None
        if costs is None:
            times = parts.known(tuple(self.mesh_shape), repr(self.hardware))
        self.times = StepTime(units, self.space, costs or own, times)
        impl = own.impl(dict(self._also)) if self._also else None
        self.memory = parts.memory(candidates, own.storing, impl, self.hardware.compiled)

    def estimate(self, layout: AnyLayout) -> Estimate:
        """Estimates the time and memory of a step under a layout.

        Rules for missing dimensions, of the program or of the mesh, are ignored, as are those for
        mesh dimensions of one processor.

        Args:
          layout: a string such as "batch:rows;d_ff:cols", LayoutRules, or a dictionary.

        Raises:
          ValueError: the layout is malformed, or a tensor cannot be split that way.
        """
        estimator, rules = self.reaching(layout), self._rules(layout)
        peak = estimator.memory.peak(rules)
        return Estimate(rules, estimator.times.total(rules), peak, self.stored_layout)

    def reaching(self, layout: AnyLayout) -> StepEstimator:
        """Returns an estimator whose tables have all that a layout splits; this one, if it has.

        A search tries no layout that splits what operations need whole, or what the mesh does not
        divide, so that its tables are without them.

        Args:
          layout: a string, LayoutRules, or a dictionary.

        Raises:
          ValueError: as for `estimate`.
        """
        rules = self._rules(layout)
        if (other := self._of(rules)) is not self:
            return other.reaching(layout)
        beyond = {*rules.items()} - {*self.space.pairs}
        if beyond and self._also:
            raise ValueError(f"layout {layout!r}: {sorted(beyond)} cannot be split in this way")
        if not beyond:
            return self
        graph, outputs = self.parts.graph, self.parts.outputs
        return StepEstimator(
            graph, self.mesh_shape, outputs, self.hardware, self.stored_layout, self.parts,
            self._exchanges, self._joint, rules.items(), self.costs, self.over, self._apart,
        )  # fmt: skip

    def _of(self, rules: Mapping[str, str]) -> StepEstimator:
        """Returns the estimator of the layouts that some rules are one of."""
        sizes = self.space.mesh_sizes
        used = {name for m in rules.values() for name in joined_names(m, sizes)}
        return next((one for one in self._apart if used <= (one.over or set())), self)

    def _rules(self, layout: AnyLayout) -> dict[str, str]:
        """Returns the rules of a layout that split something, after checking them."""
        rules: dict[str, str] = {}
        sizes, names_of_dims = self.space.mesh_sizes, self._validator.mtf_dimension_names
        for d, m in layout_pairs(layout):
            names = [name for name in joined_names(m, sizes) if sizes.get(name, 1) > 1]
            # One layout is used for many models and meshes, as in a Lowering.
            if d not in names_of_dims or not names:
                continue
            uneven, m = m.endswith(UNEVEN), JOIN.join(names)
            other = rules.get(d, m).removesuffix(UNEVEN)
            if other != m:
                raise ValueError(f"layout {layout!r} splits {d!r} over both {other!r} and {m!r}")
            if self._validator.divides(d, m):
                uneven = False  # as every layout
            elif not uneven:
                raise ValueError(
                    f"layout {layout!r}: mesh dimension {m}={sizes[m]} does not divide all sizes "
                    f"of dimension {d!r}; {d}:{m}{UNEVEN} allows that"
                )
            rules[d] = m + UNEVEN if uneven else m
        return rules

    def solve(self, memory_limit_bytes: Optional[float] = None) -> Estimate:
        """Returns the fastest layout; of equally fast ones, the one with the lowest peak memory.

        Args:
          memory_limit_bytes: the memory that a step may use on one processor; None for no limit.

        Raises:
          MemoryLimitError: no layout fits.
          SolverError: the solver did not find an optimum.
        """
        return self.best(1, memory_limit_bytes)[0]

    def faster_than(
        self, seconds: float, memory_limit_bytes: Optional[float] = None
    ) -> Optional[Estimate]:
        """Returns the fastest layout, or None if none that fits takes fewer seconds.

        Args:
          seconds: a number.
          memory_limit_bytes: the memory that a step may use on one processor; None for no limit.

        Raises:
          SolverError: the solver did not find an optimum.
        """
        fastest: Optional[Estimate] = None
        for estimator in (self, *self._apart):
            best = next(self._search(estimator, memory_limit_bytes, seconds), None)
            # The program does not tell times apart that differ by a millionth.
            if best is not None and best.seconds.total < seconds:
                fastest, seconds = best, best.seconds.total
        return fastest

    def best(self, count: int, memory_limit_bytes: Optional[float] = None) -> list[Estimate]:
        """Returns the fastest layouts, fastest first.

        Args:
          count: the number of layouts to return, or fewer if there are no more.
          memory_limit_bytes: the memory that a step may use on one processor; None for no limit.

        Raises:
          MemoryLimitError: no layout fits.
          SolverError: the solver did not find an optimum.
        """
        return list(itertools.islice(self.fastest(memory_limit_bytes), count))

    def fastest(self, memory_limit_bytes: Optional[float] = None) -> Iterator[Estimate]:
        """Yields all layouts, fastest first; see `best`."""
        check_memory_limit(memory_limit_bytes)
        searches = [self._search(e, memory_limit_bytes) for e in (self, *self._apart)]
        none = True
        for estimate in heapq.merge(*searches, key=lambda e: e.seconds.total):
            none = False
            yield estimate
        if none:
            # Without a limit there is always a layout: the one without splits.
            raise self.does_not_fit(memory_limit_bytes or 0)

    def _search(
        self, estimator: StepEstimator, limit: Optional[float], seconds: float = math.inf
    ) -> Iterator[Estimate]:
        """Yields the layouts that are estimated by one estimator, itself or one apart, alone."""
        program = estimator.program(limit)
        # Each call leaves out what those before it have returned.
        while (layout := program.next_best(seconds)) is not None:
            if self._of(layout) is estimator:
                yield estimator.estimate(layout)

    def least(self) -> tuple[float, int]:
        """Returns lower bounds of the seconds and of the peak memory of all layouts."""
        seconds = min(e._tables.least() for e in (self, *self._apart))
        return seconds, self.memory.least(self.space)

    @functools.cached_property
    def _tables(self) -> Tables:
        # Only for a search: an estimate of one layout would wait for all assignments. The memory's
        # sets are covered too, for the constraints on it.
        return Tables(self.space, self.times.tables(), self.memory.dimension_sets)

    def program(self, memory_limit_bytes: Optional[float] = None) -> FastestLayouts:
        """Returns the integer program that searches for layouts; see `best`."""
        # A new one for each search, as it leaves out the layouts that it has returned before.
        return FastestLayouts(self._tables, self.memory, memory_limit_bytes)

    def least_memory(self) -> Estimate:
        """Returns the layout with the lowest peak memory, regardless of its time.

        Raises:
          SolverError: the solver did not find an optimum.
        """
        return self.estimate(self.program(None).least_memory())

    def does_not_fit(self, limit: float) -> MemoryLimitError:
        """Returns the error that says by how much the layout with the least memory exceeds a limit.

        Args:
          limit: bytes on one processor.
        """
        least = self.least_memory()
        stored = "" if self.stored_layout is None else f" with {self.stored_layout}"
        missing = least.peak_bytes - limit
        lines = [
            f"no layout fits in {bytes_text(limit)} of a processor of mesh "
            f"{dims_text(self.mesh_shape)}{stored}: {least.text or 'no splits'!r}, which needs the "
            f"least, takes {bytes_text(least.peak_bytes)}, {bytes_text(missing)} too many. Of "
            "these are:"
        ]
        for kind, held in self.peak_by_kind(least.layout).items():
            lines.append(f"  {bytes_text(held):>10} {kind}; less with {_HINTS[kind]}")
        return MemoryLimitError("\n".join(lines), missing)

    def peak_contents(self, layout: AnyLayout) -> list[Held]:
        """Returns the live tensors at the peak, largest first.

        Args:
          layout: see `estimate`.
        """
        rules = self.estimate(layout).layout
        return self.memory.contents(self._time_of_peak(rules), rules)

    def _time_of_peak(self, rules: Mapping[str, str]) -> int:
        # That of one operation: the first that has the peak.
        return int(self.memory.in_use(rules).argmax())

    def peak_by_kind(self, layout: AnyLayout) -> dict[str, int]:
        """Returns the bytes at the peak by kind, largest first; see `peak_contents`."""
        total: collections.Counter[str] = collections.Counter()
        for held in self.peak_contents(layout):
            total[held.kind] += held.bytes
        return dict(total.most_common())

    def peak_at(self, layout: AnyLayout) -> str:
        """Returns the name of the operation that runs at the peak; see `peak_contents`."""
        return self.memory.at[self._time_of_peak(self.estimate(layout).layout)]


def fastest(
    estimators: Iterable[StepEstimator], limit: Optional[float], seconds: float = math.inf
) -> Optional[tuple[StepEstimator, Estimate]]:
    """Returns the fastest layout of some estimators that fits, or None; in a tie, the first.

    Args:
      estimators: StepEstimators.
      limit: the memory that a step may use on one processor, or None.
      seconds: a time; layouts that take as long or longer are not looked for.
    """
    best: Optional[tuple[StepEstimator, Estimate]] = None
    for estimator in estimators:
        # The time to beat prunes most layouts of the next one, before its integer program is
        # solved.
        faster = estimator.faster_than(seconds, limit)
        if faster is not None:
            best, seconds = (estimator, faster), faster.seconds.total
    return best

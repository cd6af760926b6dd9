"""plan: searches over programs, meshes, layouts and ways to store variables.

It has each program built, and estimates it; none is run, but for operations that are timed alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import check_choice, check_whole, dims_text, text_table
from mesh_tensorflow._core.layout import LayoutRules, StoredLayout
from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.shape import Shape, convert_to_shape
from mesh_tensorflow._units import bytes_text, ms_text
from mesh_tensorflow.auto_mtf._space import stored_layouts
from mesh_tensorflow.auto_mtf.api import all_mesh_shapes
from mesh_tensorflow.auto_mtf.hardware import CostModel, Hardware, hardware_profile
from mesh_tensorflow.auto_mtf.profiles import Processors, Profile, estimator_for
from mesh_tensorflow.auto_mtf.step_time import (
    Built,
    Estimate,
    MemoryLimitError,
    ProgramParts,
    Seconds,
    StepEstimator,
    check_memory_limit,
    fastest,
)
from mesh_tensorflow.layers import PipelineSchedule
from mesh_tensorflow.ops._variable import Variable

__all__ = ["ATTENTIONS", "Choice", "Lost", "Plan", "Plans", "choices", "plan", "plan_of"]


ATTENTIONS = ("whole", "ring", "all_to_all")


class Choice(NamedTuple):
    """How a program is built, where the layout cannot say it.

    >>> import mesh_tensorflow as mtf
    >>> print(mtf.auto_mtf.Choice(stages=2, microbatches=4, recompute=True))
    2 stages, 4 microbatches; layers recomputed

    Attributes:
      stages: the number of stages of a pipeline; 1 for none.
      microbatches: the number of microbatches of a pipeline; with one stage, of a batch whose
        gradients are accumulated, as by `mtf.optimize.accumulate_gradients`.
      repeats: how often each microbatch passes all stages, in a circular pipeline.
      recompute: whether layers are recomputed for the gradient.
      attention: "whole" if keys and values of all positions are on each processor; "ring" or
        "all_to_all" for layouts that split the length.
      sequence_parallel: whether the length between layers has a name of its own,
        `residual_length`, which a layout may split where tensor parallelism leaves it whole.
    """

    stages: int = 1
    microbatches: int = 1
    repeats: int = 1
    recompute: bool = False
    attention: str = "whole"
    sequence_parallel: bool = False

    def __str__(self) -> str:
        phrases = []
        if self.stages > 1:
            again = f", {self.repeats} times" if self.repeats > 1 else ""
            phrases.append(f"{self.stages} stages{again}, {self.microbatches} microbatches")
        elif self.microbatches > 1:
            phrases.append(f"{self.microbatches} microbatches")
        if self.recompute:
            phrases.append("layers recomputed")
        if self.attention != "whole":
            phrases.append(f"attention {self.attention}")
        if self.sequence_parallel:
            phrases.append("residuals by length")
        return "; ".join(phrases) or "layers in a row"

    def check(self) -> None:
        """Checks the numbers.

        Raises:
          ValueError: a number is less than 1, `attention` is unknown, or a circular pipeline has
            fewer microbatches than stages.
        """
        for name in ("stages", "microbatches", "repeats"):
            check_whole("Choice", name, getattr(self, name))
        check_choice("Choice", "attention", self.attention, ATTENTIONS)
        if self.repeats > 1 and self.microbatches < self.stages:
            raise ValueError(
                f"repeats={self.repeats} makes the pipeline circular, which needs a microbatch for "
                f"each stage: microbatches={self.microbatches} is less than stages={self.stages}"
            )


def choices(
    stages: Iterable[int] = (1,),
    microbatches: Iterable[int] = (1,),
    repeats: Iterable[int] = (1,),
    recompute: Iterable[bool] = (False, True),
    attention: Iterable[str] = ("whole",),
    sequence_parallel: Iterable[bool] = (False,),
) -> list[Choice]:
    """Returns all combinations, without those that make no difference or no pipeline.

    >>> print(*mtf.auto_mtf.choices(stages=[1, 2], microbatches=[4], recompute=[False]), sep=" | ")
    layers in a row | 2 stages, 4 microbatches

    Args:
      stages: numbers of stages.
      microbatches: numbers of microbatches, of pipelines.
      repeats: how often microbatches pass all stages, in pipelines.
      recompute: whether layers are recomputed.
      attention: of "whole", "ring" and "all_to_all".
      sequence_parallel: whether residuals may be split by length.

    Raises:
      ValueError: see `Choice.check`.
    """
    combinations: dict[Choice, None] = {}
    combined = itertools.product(
        stages, microbatches, repeats, recompute, attention, sequence_parallel
    )
    for values in combined:
        choice = Choice(*values)
        if choice.stages == 1:
            # Without a pipeline these make no difference, so equal candidates become one key.
            choice = choice._replace(microbatches=1, repeats=1)
        # No error, unlike for a single choice: of all combinations, some are no circular pipelines.
        elif choice.repeats > 1 and choice.microbatches < choice.stages:
            continue
        choice.check()
        combinations[choice] = None
    return list(combinations)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to build, split and store a program, and what a step is estimated to take.

    Attributes:
      choice: a Choice, of how the program is built.
      mesh_shape: a Shape.
      estimate: the Estimate, with the layout and the stored layout.
      memory: bytes on one processor at the peak, by kind: "weights", "slots", "activations",
        "gradients" and so on.
      communication: seconds by collective and mesh dimensions, such as "allreduce over rows".
      bubble: the share of the ticks of a pipeline in which a stage has nothing to do.
      bubble_seconds: what stages compute in these.
      recomputed_seconds: what is computed again for the gradient; of it, too, a part is in bubbles.
    """

    choice: Choice
    mesh_shape: Shape
    estimate: Estimate
    memory: dict[str, int]
    communication: dict[str, float]
    bubble: float
    bubble_seconds: float
    recomputed_seconds: float

    @property
    def layout(self) -> LayoutRules:
        """The layout rules."""
        return LayoutRules(self.estimate.layout.items())

    @property
    def stored_layout(self) -> Optional[StoredLayout]:
        """How variables are stored; its `stage` and `mesh_dim` are arguments of meshes."""
        return self.estimate.stored_layout

    @property
    def arguments(self) -> dict[str, Union[str, int]]:
        """The mesh and the layout as arguments of `mtf.train.fit` and of mesh implementations."""
        shape = ",".join(f"{d.name}:{d.size}" for d in self.mesh_shape)
        arguments: dict[str, Union[str, int]] = {
            "mesh_shape": shape,
            "layout": self.estimate.text.replace(";", ","),
        }
        stored = self.stored_layout
        if stored is not None and stored.stage:
            arguments["zero"] = stored.stage
            if stored.mesh_dim is not None:
                arguments["zero_axis"] = stored.mesh_dim
        return arguments

    @property
    def seconds(self) -> Seconds:
        """The Seconds of a step."""
        return self.estimate.seconds

    @property
    def rules(self) -> str:
        """What was picked, in one line."""
        stored = "" if self.stored_layout is None else f"; {self.stored_layout}"
        return f"{self.choice}; {self.estimate.text or 'no splits'}{stored}"

    def __str__(self) -> str:
        lines = [
            f"program  {self.choice}",
            f"mesh     {dims_text(self.mesh_shape)}",
            f"layout   {self.estimate.text or 'no splits'}",
            f"stored   {self.stored_layout or 'as computed with'}",
            f"step     {self.seconds}",
        ]
        if self.recomputed_seconds:
            lines.append(f"         of computing, {ms_text(self.recomputed_seconds)} ms recompute")
        if self.bubble:
            lines.append(
                f"         of computing, {ms_text(self.bubble_seconds)} ms are the bubble, "
                f"{self.bubble:.3f} of the ticks"
            )
        lines += [f"{ms_text(s):>12} ms {what}" for what, s in self.communication.items()]
        lines.append(f"memory   {bytes_text(self.estimate.peak_bytes)} at the peak")
        lines += [f"{bytes_text(held):>15} {kind}" for kind, held in self.memory.items()]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Lost:
    """Why a Choice with a stage of ZeRO is no plan, or not the best.

    Attributes:
      choice: a Choice.
      zero: a stage of ZeRO; None if the program cannot be built.
      why: what is wrong.
      best: the Estimate of its best layout, if one fits.
      mesh_shape: the mesh of that, or of the layout that misses by the least; or None.
      missing_bytes: by how much the memory is exceeded at least, if none fits; else 0.
    """

    choice: Choice
    zero: Optional[int]
    why: str
    best: Optional[Estimate] = None
    mesh_shape: Optional[Shape] = None
    missing_bytes: float = 0.0


@dataclasses.dataclass(eq=False, repr=False)
class Plans:
    """The best plan, and why others lost; printed, it explains itself.

    Attributes:
      best: a Plan.
      lost: for each other Choice and stage of ZeRO, a Lost: first those that fit, fastest first.
      hardware: a Hardware.
      memory_limit_bytes: bytes on one processor, or None.
    """

    best: Plan
    lost: list[Lost]
    hardware: Hardware
    memory_limit_bytes: Optional[float]

    def __str__(self) -> str:
        limit = self.memory_limit_bytes
        within = "" if limit is None else f", of which {bytes_text(limit)} may be used"
        lines = [str(self.best), "", f"on processors of {self.hardware.name}{within}"]
        if self.lost:
            rows = [["other plans", "zero", "mesh and layout", "step ms", "memory", "why not"]]
            rows += [self._row(lost) for lost in self.lost]
            lines += ["", *text_table(rows, left=(0, 2, 5))]
        return "\n".join(lines)

    @staticmethod
    def _row(lost: Lost) -> list[str]:
        zero = "-" if lost.zero is None else str(lost.zero)
        if lost.best is None:
            return [str(lost.choice), zero, "-", "-", "-", lost.why]
        seconds, peak = lost.best.seconds.total, lost.best.peak_bytes
        where = f"{dims_text(lost.mesh_shape or Shape([]))}: {lost.best.text or 'no splits'}"
        if lost.best.stored_layout is not None:
            where += f" ({lost.best.stored_layout})"
        return [str(lost.choice), zero, where, ms_text(seconds), bytes_text(peak), lost.why]


_NAMES = {"allconcat": "allgather", "reduce_scatter": "reduce-scatter", "alltoall": "all-to-all"}
STAGES = "stages"  # the dimension of a pipeline's stages


def plan_of(choice: Choice, estimator: StepEstimator, estimate: Estimate) -> Plan:
    """Returns the Plan of a choice with a layout.

    Args:
      choice: a Choice.
      estimator: the StepEstimator of the program that it builds.
      estimate: an Estimate of that.
    """
    rules = estimate.layout
    communication: dict[str, float] = {}
    for sent in estimator.times.sent(rules):
        one = sent.collective
        over = ", ".join(estimator.mesh_shape[axis].name for axis in one.mesh_axes)
        name = f"{_NAMES.get(one.kind, one.kind)} over {over}"
        communication[name] = communication.get(name, 0.0) + sent.seconds
    # bubble = (K - 1) / (M * R + K - 1), of K stages, M microbatches and R repeats.
    schedule = PipelineSchedule(choice.stages, choice.microbatches, choice.repeats)
    in_stages = recomputed = 0.0
    # In the layout alone: what is stored in parts concerns updates, which are in no stage.
    model = estimator.costs or CostModel(estimator.mesh_shape, estimator.hardware)
    impl = model.impl(rules)
    updates = estimator.parts.updates(True).weight_of
    for step in estimator.parts.steps:
        op = step.op
        if op is None:
            continue
        staged = choice.stages > 1 and op not in updates and _is_staged(op)
        # What is computed again is a copy, and knows the operation that it is a copy of.
        again = op.original is not None
        if staged or again:
            # Without communication: both numbers are told as parts of the time of computing.
            seconds = model.operation(op, impl).compute * step.times
            in_stages += staged * seconds
            recomputed += again * seconds
    return Plan(
        choice,
        estimator.mesh_shape,
        estimate,
        estimator.peak_by_kind(rules),
        dict(sorted(communication.items(), key=lambda pair: -pair[1])),
        schedule.bubble,
        # Stages compute in every tick, so the bubble's share of the ticks is its share of their
        # time.
        in_stages * schedule.bubble,
        recomputed,
    )


def _is_staged(op: Operation) -> bool:
    return not isinstance(op, Variable) and any(
        STAGES in y.shape.dimension_names for y in op.outputs
    )


def plan(
    build: Callable[[Choice], Built],
    processors: int,
    candidates: Optional[Iterable[Choice]] = None,
    zero: Sequence[int] = (0, 1, 2, 3),
    memory_limit_bytes: Optional[float] = None,
    hardware: Union[str, Hardware, None] = None,
    max_mesh_shape_dimensions: int = 2,
    mesh_shapes: Optional[Iterable[Any]] = None,
    within: float = math.inf,
    joint: bool = False,
    profile: Union[bool, Profile] = False,
) -> Plans:
    """Returns the fastest way to build, split and store a program, and why others lose.

    Each candidate is built. For each mesh shape, and each way to store variables, the layout that
    takes the least time is found, of those that fit. Reshapes may exchange dimensions over one mesh
    dimension, and the length and the memory of attention in a ring may be split over one.

    >>> from mesh_tensorflow.auto_mtf.models import language_model
    >>> sizes = {"batch": 8, "length": 8, "d_model": 16, "d_ff": 32, "d_kv": 4, "vocab": 16}
    >>> def build(choice):
    ...     return language_model(recompute=choice.recompute, **sizes)
    >>> plans = mtf.auto_mtf.plan(build, 4)
    >>> print(plans.best.choice)
    layers in a row

    Args:
      build: a function of a Choice that builds the whole step, in a new graph, and returns a
        Program, or a tuple (mtf.Graph, outputs). A ValueError says that it cannot be built so.
      processors: the number of processors.
      candidates: Choices; `choices()` if None.
      zero: the stages of ZeRO to choose from, each over any mesh dimension; 1 and 2
        are one but in microbatches, and only 2 is tried then.
      memory_limit_bytes: the memory that a step may use on one processor, or None.
      hardware: see `auto_mtf.layout`.
      max_mesh_shape_dimensions: the maximum number of mesh dimensions.
      mesh_shapes: Shapes, or what converts to them, instead of all with the number of processors.
      within: plans that take more than this many times as long as the best are not looked at
        closely; 1 finds the best plan soonest.
      joint: whether a layout may split one dimension over several mesh dimensions together, and
        variables be stored so.
      profile: True, or a Profile, times the operations of all candidates on the processors of this
        machine, as `auto_mtf.layout` does; its seconds are those of the whole search, of which each
        candidate, mesh shape and stored layout has an equal share.

    Returns:
      Plans. Of equally fast plans, the first candidate's with the first stage is the best.

    Raises:
      ValueError: an argument is invalid, or no candidate can be built.
      auto_mtf.step_time.MemoryLimitError: no plan fits; the error names the nearest, and says by
        how much it misses.
      auto_mtf.layout_optimizer.SolverError: the solver did not find an optimum.
    """
    check_memory_limit(memory_limit_bytes)
    if not within >= 1:
        raise ValueError(f"within={within} must be 1 or more: a multiple of the best plan's time")
    if mesh_shapes is None:
        shapes = all_mesh_shapes(processors, max_mesh_shape_dimensions)
    else:
        shapes = [convert_to_shape(shape) for shape in mesh_shapes]
    for shape in shapes:
        if shape.size != processors:
            raise ValueError(
                f"mesh shape {dims_text(shape)} has {shape.size} processors, but there are "
                f"{processors}; its sizes must have that product"
            )
    looked_at = list(choices() if candidates is None else candidates)
    profile = Profile() if profile is True else profile
    if profile:
        stored = sum(len(list(stored_layouts(shape, zero, joint))) for shape in shapes)
        share = profile.seconds / max(1, len(looked_at) * stored)
        profile = dataclasses.replace(profile, seconds=share)
    if profile and hardware is None:
        hardware = Processors([("all", processors)], profile.devices, profile.simd).hardware()
    profile_of_hardware = hardware_profile(hardware)
    search = _Search(shapes, memory_limit_bytes, profile_of_hardware, within, joint, profile)
    for choice in looked_at:
        search.add(choice, build, list(zero))
    return search.result(processors)


class _BestLayout(NamedTuple):
    """The best layout of a choice at a stage of ZeRO."""

    choice: Choice
    zero: int
    estimator: StepEstimator
    estimate: Estimate


@dataclasses.dataclass
class _Search:
    """The best layouts so far, and what has none."""

    shapes: Sequence[Shape]
    limit: Optional[float]
    hardware: Hardware
    within: float
    joint: bool
    profile: Union[bool, Profile] = False
    found: list[_BestLayout] = dataclasses.field(default_factory=list)
    lost: list[Lost] = dataclasses.field(default_factory=list)
    nearest: Optional[_BestLayout] = None

    @property
    def _best(self) -> Optional[_BestLayout]:
        # Of equally fast plans, the first candidate's.
        return min(self.found, key=lambda one: one.estimate.seconds.total, default=None)

    # -- adding a candidate

    def add(self, choice: Choice, build: Callable[[Choice], Built], zero: Sequence[int]) -> None:
        """Builds a candidate, and finds its best layouts at each stage of ZeRO."""
        # Stages that are not split compute in bubbles as well, and gain nothing.
        shapes = [
            shape
            for shape in self.shapes
            if choice.stages == 1 or any(d.size > 1 and choice.stages % d.size == 0 for d in shape)
        ]
        if not shapes:
            sizes = sorted({d.size for shape in self.shapes for d in shape})
            why = f"no mesh dimension, of sizes {', '.join(map(str, sizes))}, divides"
            self.lost.append(Lost(choice, None, f"{why} {choice.stages} stages"))
            return
        try:
            choice.check()
            # Each candidate in a graph of its own: variables of two would have the same names.
            with tf.Graph().as_default():
                built = build(choice)
        # One that cannot be built is a result to tell, and does not end the search.
        except ValueError as e:
            self.lost.append(Lost(choice, None, f"cannot be built: {e}"))
            return
        parts = ProgramParts.of(built)
        for stage in parts.stages(zero):
            estimators: dict[Any, StepEstimator] = {}
            for shape in shapes:
                for stored in stored_layouts(shape, [stage], self.joint):
                    # Of mesh dimensions with one size and equal links, one stands for all.
                    key = (*shape, self._alike(shape, stored))
                    if key not in estimators:
                        estimators[key] = estimator_for(
                            parts, shape, self.hardware, stored, self.profile,
                            exchanges=True, joint=self.joint,
                        )  # fmt: skip
            self._find(choice, stage, estimators.values())

    def _alike(self, shape: Shape, stored: Optional[StoredLayout]) -> Any:
        """Returns what is equal for stored layouts that differ by a permutation of the mesh."""
        if stored is None or stored.mesh_dim is None:
            return None
        if stored.mesh_dim not in shape.dimension_names:
            return stored.mesh_dim  # several, joined
        axis = shape.dimension_names.index(stored.mesh_dim)
        return shape[axis].size, tuple(map(tuple, self.hardware.links(shape, axis)))

    def _find(self, choice: Choice, zero: int, estimators: Iterable[StepEstimator]) -> None:
        """Finds the best layout of one program at one stage, over all meshes."""
        limit = math.inf if self.limit is None else self.limit
        floors = {e: e.least() for e in estimators}
        # The most promising first: what it finds is below the lower bounds of many others. Where
        # the lower bound of the memory is too much, no layout fits.
        promising = sorted((e for e in floors if floors[e][1] <= limit), key=lambda e: floors[e][0])
        # What takes longer is lost in any case, and need not be found.
        best = self._best
        most = math.inf if best is None else best.estimate.seconds.total * self.within
        fast = fastest(promising, self.limit, most)
        if fast is not None:
            self.found.append(_BestLayout(choice, zero, *fast))
            return
        # Only where none was found, since the least memory takes a search of its own.
        least: Optional[_BestLayout] = None
        for estimator in sorted(floors, key=lambda e: floors[e][1]):
            # By lower bounds, so that none of the rest can need less than the least so far.
            enough = max(limit, floors[estimator][1])
            if least is not None and least.estimate.peak_bytes <= enough:
                break
            estimate = estimator.least_memory()
            if least is None or estimate.peak_bytes < least.estimate.peak_bytes:
                least = _BestLayout(choice, zero, estimator, estimate)
        assert least is not None
        if least.estimate.peak_bytes <= limit:
            why = f"takes more than {self.within:.3g} times as long as the best"
            self.lost.append(Lost(choice, zero, why))
            return
        # Of all candidates, for the error that is raised if none of them fits.
        if self.nearest is None or least.estimate.peak_bytes < self.nearest.estimate.peak_bytes:
            self.nearest = least
        missing = least.estimate.peak_bytes - limit
        why = f"does not fit: {bytes_text(missing)} too many"
        self.lost.append(Lost(choice, zero, why, None, least.estimator.mesh_shape, missing))

    # -- results

    def result(self, processors: int) -> Plans:
        """Returns the Plans.

        Raises:
          ValueError: there are none.
        """
        best = self._best
        if best is None:
            raise self._no_plan_error(processors)
        # At the end, as the best plan, which they are compared with, was not known before.
        slower = [_slower(one, best.estimate.seconds) for one in self.found if one is not best]
        slower.sort(key=lambda lost: lost.best.seconds.total if lost.best else math.inf)
        estimator = best.estimator.reaching(best.estimate.layout)
        plan = plan_of(best.choice, estimator, best.estimate)
        return Plans(plan, [*slower, *self.lost], self.hardware, self.limit)

    def _no_plan_error(self, processors: int) -> ValueError:
        if self.nearest is None or self.limit is None:
            reasons = "\n".join(f"  {lost.choice}: {lost.why}" for lost in self.lost)
            return ValueError(
                f"none of the candidates can be built:\n{reasons or '  there are none'}"
            )
        choice, _, estimator, estimate = self.nearest
        missing = estimate.peak_bytes - self.limit
        stored = "" if estimate.stored_layout is None else f"; {estimate.stored_layout}"
        lines = [
            f"no plan fits in {bytes_text(self.limit)} of each of {processors} processors. The "
            f"nearest is: {choice}; {estimate.text or 'no splits'}{stored}, on the mesh "
            f"{dims_text(estimator.mesh_shape)}, which takes {bytes_text(estimate.peak_bytes)}, "
            f"{bytes_text(missing)} too many. Of these are:"
        ]
        for kind, held in estimator.peak_by_kind(estimate.layout).items():
            lines.append(f"  {bytes_text(held):>10} {kind}")
        return MemoryLimitError("\n".join(lines), missing)


def _slower(slow: _BestLayout, best: Seconds) -> Lost:
    """Returns what takes longer than in the best plan."""
    seconds = slow.estimate.seconds
    differences = [
        f"{what} {(theirs - ours) * 1e3:+.3g} ms"
        for what, ours, theirs in zip(best._fields, best, seconds)
        if abs(theirs - ours) > 1e-3 * best.total
    ]
    times = f"{seconds.total / best.total:.2f} times as long"
    why = f"{times}: {', '.join(differences) or 'as fast'}"
    return Lost(slow.choice, slow.zero, why, slow.estimate, slow.estimator.mesh_shape)

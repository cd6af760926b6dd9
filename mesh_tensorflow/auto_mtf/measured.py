"""Layouts that are run: the best of those that the cost model finds, by the time of real steps.

A cost model ranks layouts without running anything, but knows a machine only by a few rates. So the
fastest few of its ranking are built and timed, as autotuners do (Zheng et al., "Ansor", OSDI 2020):
the model prunes, and the machine decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import text_table
from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.layout import StoredLayout, given_stored_layout
from mesh_tensorflow._core.shape import Shape, ShapeLike
from mesh_tensorflow._mesh.devices import threads_by_session
from mesh_tensorflow._pjrt import pjrt
from mesh_tensorflow._processes.peers import Exchange, alone
from mesh_tensorflow._processes.processes import processes, several_of_jax
from mesh_tensorflow._progress import Progress
from mesh_tensorflow._units import ms_text
from mesh_tensorflow.auto_mtf._cache import Cache
from mesh_tensorflow.auto_mtf._units import signature
from mesh_tensorflow.auto_mtf.explanation import distinct
from mesh_tensorflow.auto_mtf.hardware import Hardware
from mesh_tensorflow.auto_mtf.profiles import Processors, Profile, estimator_on
from mesh_tensorflow.auto_mtf.step_time import ProgramParts, StepEstimator
from mesh_tensorflow.estimator import Estimator, RunConfig, step_of_training, steps_to_look_at
from mesh_tensorflow.estimator.processes import in_cluster, programs_over, servers_of_all

__all__ = [
    "Auto",
    "Choice",
    "Tried",
    "choose_on",
    "compiling_pays",
    "layout_of_estimator",
    "layout_on",
]

_STEPS = 20  # at most, of each layout
_FEWEST = 3
# Compiling takes time, and rounds otherwise: for less than this part of a step it is not done.
_PAYS = 0.95
_EARLIER = {True: ", in an earlier run", False: ""}
# A function of a layout that opens what runs its steps, one in each call.
Runner = Callable[[str], contextlib.AbstractContextManager[Callable[[], Any]]]


@dataclasses.dataclass(frozen=True)
class Auto:
    """Asks for the layout whose steps are the fastest where they run.

    `mtf.train.fit(layout=mtf.auto_mtf.Auto(seconds=30), ...)`; `layout="auto"` is `Auto()`.

    >>> mtf.auto_mtf.Auto(seconds=30).candidates
    3

    Attributes:
      seconds: how long layouts are looked for. Half of it operations are timed, and then layouts
        are tried; the one that is being tried at the end is the last.
      candidates: how many layouts are tried, the best by the cost model; the one without splits is
        tried, too.
      memory_limit_bytes: the memory that a step may use on one processor by the cost model; None
        for no limit.
      hardware: what the cost model is of, see `auto_mtf.layout`; None for the devices, as far as
        they are known.
      profile: whether operations are timed on the processors, see `auto_mtf.Profile`, so that the
        cost model is that of the machine; not with mesh_impl="pjrt".
      cache: a JSON file that choices and times are kept in, and taken from by later runs of the
        same program on the same machine. None for layouts.json and profiles.json in
        ~/.cache/mesh_tensorflow; "" for none.
    """

    seconds: float = 60.0
    candidates: int = 3
    memory_limit_bytes: Optional[float] = None
    hardware: Union[str, Hardware, None] = None
    profile: bool = True
    cache: Optional[str] = None

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.candidates >= 1):
            raise ValueError(f"{self}: seconds must be more than 0, and candidates 1 or more")


class Tried(NamedTuple):
    """A layout that was looked at.

    Attributes:
      layout: as a string.
      predicted: the seconds of a step by the cost model.
      measured: the median of those of steps; None if it was not run to the end.
      why: why it was not.
    """

    layout: str
    predicted: float
    measured: Optional[float]
    why: str = ""


class Choice(NamedTuple):
    """The layout that is the fastest.

    Attributes:
      layout: as a string, such as "batch:rows;d_ff:cols".
      tried: all that were looked at, the fastest first.
      known: whether they are of an earlier run.
    """

    layout: str
    tried: list[Tried]
    known: bool = False

    def __str__(self) -> str:
        head = ["layout", "predicted ms", "measured ms"]
        rows = [
            [
                one.layout or "no splits",
                ms_text(one.predicted),
                one.why if one.measured is None else ms_text(one.measured),
            ]
            for one in self.tried
        ]
        number = sum(one.measured is not None for one in self.tried)
        what = f"the fastest of {number} that were tried{_EARLIER[self.known]}"
        title = f"layout {self.layout or 'no splits'}: {what}"
        return "\n".join([title, *(f"  {line}" for line in text_table([head, *rows]))])


def _preferred(
    estimator: StepEstimator, auto: Auto, machine: Processors
) -> list[tuple[str, float]]:
    """Returns the layouts to try, the one that the cost model prefers first, and their seconds."""
    whole, limit = estimator.estimate(""), auto.memory_limit_bytes
    # On one device all layouts are one program, and differences of their times say nothing.
    merged = machine.executed.size == 1
    fits = limit is None or whole.peak_bytes <= limit
    estimates = [] if merged and fits else distinct(estimator, auto.candidates, limit)
    # What is not split is often the fastest on few cores, and a layout that all others must beat.
    if fits and not any(e.layout == whole.layout for e in estimates):
        estimates.append(whole)
    return [(e.text, e.seconds.total) for e in estimates]


def choose_on(
    machine: Processors,
    graph: Graph,
    auto: Auto,
    stored_layout: Optional[StoredLayout],
    run: Runner,
    show: bool = False,
) -> Choice:
    """Returns the layout whose steps are the fastest at a place, of those the cost model prefers.

    Args:
      machine: where the programs run.
      graph: the Graph of a whole step.
      auto: an Auto.
      stored_layout: how variables are stored; None if as they are computed with.
      run: a function of a layout that opens what runs its steps. A tf.errors.ResourceExhaustedError
        in it says that the layout needs too much memory.
      show: whether there is a progress line, and what was tried is printed.

    Raises:
      MemoryLimitError: no layout fits in the limit.
      tf.errors.ResourceExhaustedError: no layout could be run.
    """
    if machine.servers is None:  # which have begun, and have threads for all of their sessions
        threads_by_session()
    exchange, is_first = machine.exchange, machine.is_first

    def find() -> dict[str, Any]:
        begin, parts = time.monotonic(), ProgramParts(graph)
        profile = Profile(auto.seconds / 2, auto.cache, show=show) if auto.profile else None
        estimator = estimator_on(machine, parts, profile, auto.hardware, stored_layout)
        # One process searches: the others wait, and leave it the cores that they have in common.
        candidates = exchange(_preferred(estimator, auto, machine) if is_first else None)[0]
        tried = _tried(candidates, auto, begin, run, exchange, show)
        return {"layout": tried[0].layout, "tried": tried}

    where = f"pjrt={machine.pjrt} {machine.kind} {machine.key}"
    key = _key_of(graph, machine.shape, auto, stored_layout, where)
    found, is_cached = Cache("layouts.json", auto.cache).known_or(key, find, exchange, is_first)
    choice = Choice(found["layout"], [Tried(*one) for one in found["tried"]], is_cached)
    if show:
        print(choice, file=sys.stderr, flush=True)
    return choice


def _tried(
    candidates: Sequence[tuple[str, float]],
    auto: Auto,
    begin: float,
    run: Runner,
    exchange: Exchange,
    show: bool,
) -> list[Tried]:
    """Returns layouts with the times of their steps, the fastest first.

    Args:
      candidates: the layouts, each with the seconds by the cost model.
      auto: an Auto.
      begin: when its seconds began.
      run: see `choose_on`.
      exchange: tells what all processes say, which try them together.
      show: whether there is a progress line.

    Raises:
      tf.errors.ResourceExhaustedError: none could be run.
    """
    tried, error = list[Tried](), None
    with Progress(len(candidates), "try layouts", "layout", leave=False, show=show) as progress:
        for number, (layout, predicted) in enumerate(candidates):
            left = begin + auto.seconds - time.monotonic()
            measured, why = None, f"not tried within {auto.seconds:g} s"
            # The first is always tried: without any, there would be no choice.
            if exchange(left > 0 or not any(one.measured for one in tried))[0]:
                try:
                    share = left / (len(candidates) - number)
                    measured = _seconds_of(run(layout), share, exchange)
                except tf.errors.ResourceExhaustedError as e:
                    error = e
                if any(exchange(measured is None)):  # in one process, which all others need
                    measured, why = None, "out of memory"
            tried.append(Tried(layout, predicted, measured, why))
            progress.update()
    tried.sort(key=lambda one: (one.measured is None, one.measured, one.predicted))
    tried = [Tried(*one) for one in exchange(tried)[0]]
    if tried[0].measured is None:
        raise error or tf.errors.ResourceExhaustedError(None, None, "in another process")
    return tried


def layout_on(
    who: str,
    machine_of: Callable[[], Processors],
    graph_of: Callable[[], Graph],
    run: Runner,
    auto: Optional[Auto] = None,
) -> str:
    """Returns the layout whose steps are the fastest, for a program that stores as it computes.

    Args:
      who: what asks for it, for errors.
      machine_of: returns where the programs run.
      graph_of: returns the Graph of a whole step.
      run: see `choose_on`.
      auto: see `choose_on`; None for `Auto()`.

    Raises:
      ValueError: there are several processes, which do not serve this one.
      MemoryLimitError: no layout fits in the limit.
      tf.errors.ResourceExhaustedError: no layout could be run.
    """
    _check_chief(who)
    if not in_cluster():
        # Before TensorFlow lists devices, and before the first session: they decide about threads.
        threads_by_session()
    machine = machine_of()
    stored = given_stored_layout(machine.shape, None, None, None)
    return choose_on(machine, graph_of(), auto or Auto(), stored, run, show=True).layout


def _check_chief(who: str) -> None:
    """Checks that no other process chooses a layout of its own, as times differ.

    Args:
      who: what asks for it, for errors.

    Raises:
      ValueError: there are others, which do not serve this one.
    """
    number = max(processes().count, len(programs_over(RunConfig().cluster_spec)))
    serve = in_cluster() or (several_of_jax() and pjrt().driving())
    if number > 1 and not serve:
        raise ValueError(
            f"{who}: there are {number} processes, and each would choose a layout by times of its "
            "own. Call it in a function that mtf.estimator.run_cluster runs in the first one, or "
            "let one process choose the layout, on a mesh of this shape, and give it to all"
        )


def layout_of_estimator(
    estimator_of: Callable[[str], Estimator],
    input_fn: Callable[..., Any],
    mesh_shape: ShapeLike,
    mesh_impl: str = "placement",
    devices: Optional[Sequence[str]] = None,
    auto: Optional[Auto] = None,
) -> str:
    """Returns the layout under which an Estimator trains the fastest, by steps of its training.

    They begin from initial values, and hooks that save are left out. Each layout has an estimator
    of its own, and the model function makes a Lowering.

    >>> def estimator_of(layout):
    ...     params = {"mesh_shape": "rows:2,cols:2", "layout": layout}
    ...     return tf.estimator.Estimator(model_fn, params=params)
    >>> layout = mtf.auto_mtf.layout_of_estimator(
    ...     estimator_of, input_fn, "rows:2,cols:2"
    ... )  # doctest: +SKIP

    Args:
      estimator_of: returns an Estimator, or a TPUEstimator, for a layout, a string such as
        "batch:rows;d_ff:cols".
      input_fn: that of `Estimator.train`.
      mesh_shape: the shape of the mesh.
      mesh_impl: the mesh implementation that the model function makes: "placement", "simd" or
        "pjrt".
      devices: its devices, one for each processor; None for the first GPUs, or logical CPUs.
      auto: for how long layouts are looked for, and how many are tried; None for `Auto()`.

    Raises:
      ValueError: there are several processes, and this is not within `run_cluster`; or the model
        function makes no Lowering.
      MemoryLimitError: no layout fits in the limit.
      tf.errors.ResourceExhaustedError: no layout could be run.
    """

    def machine_of() -> Processors:
        simd, jax = mesh_impl == "simd", mesh_impl == "pjrt"
        servers = None if jax else servers_of_all(estimator_of("").config)
        return Processors(mesh_shape, devices, simd, jax, servers)

    return layout_on(
        "layout_of_estimator",
        machine_of,
        lambda: step_of_training(estimator_of(""), input_fn),
        lambda layout: steps_to_look_at(estimator_of(layout), input_fn),
        auto,
    )


def compiling_pays(
    machine: Processors,
    graph: Graph,
    auto: Auto,
    run: Callable[[bool], contextlib.AbstractContextManager[Callable[[], Any]]],
    show: bool = False,
) -> bool:
    """Returns whether steps that XLA compiles are faster at a place, and tells the user of it.

    Args:
      machine: where the programs run, with all processors on one device.
      graph: see `choose_on`.
      auto: how long steps are timed, and where the times are kept.
      run: opens what runs steps that XLA compiles, or others, one in each call.
      show: whether it is printed.
    """

    def find() -> dict[str, Any]:
        plain, compiled, why = _seconds_of(run(False), auto.seconds / 2), None, ""
        try:
            compiled = _seconds_of(run(True), auto.seconds / 2)
        # The same step has just run without XLA, so what fails is XLA's part.
        except (
            tf.errors.InvalidArgumentError,
            tf.errors.ResourceExhaustedError,
            tf.errors.UnimplementedError,
        ) as e:
            why = e.message.splitlines()[0]
        return {"plain": plain, "compiled": compiled, "why": why}

    where = f"compiled {machine.kind} {machine.devices}"
    key = _key_of(graph, machine.shape, auto, None, where)
    times, is_cached = Cache("layouts.json", auto.cache).known_or(key, find)
    plain, compiled = times["plain"], times["compiled"]
    pays = compiled is not None and compiled < _PAYS * plain
    if show:
        found = f"XLA does not compile this step: {times['why']}"
        if compiled is not None:
            found = (
                f"a step takes {ms_text(compiled)} ms if XLA compiles it, {ms_text(plain)} ms if "
                f"not{_EARLIER[is_cached]}"
            )
        what = "are" if pays else "are not"
        print(f"{found}. Steps {what} compiled", file=sys.stderr, flush=True)
    return pays


def _seconds_of(
    opened: contextlib.AbstractContextManager[Callable[[], Any]],
    budget: float,
    exchange: Exchange = alone,
) -> float:
    """Returns the median time of the steps that a context runs, as the first process has it."""
    begin = time.monotonic()
    with opened as step:
        step()  # in which programs are compiled, and memory is found
        times: list[float] = []
        while exchange(
            len(times) < _FEWEST or (len(times) < _STEPS and time.monotonic() <= begin + budget)
        )[0]:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _key_of(
    graph: Graph, mesh_shape: Shape, auto: Auto, stored: Optional[StoredLayout], where: str
) -> str:
    """Returns what tells programs and machines apart; names of operations do not count."""
    of_auto = auto.candidates, auto.memory_limit_bytes, repr(auto.hardware), auto.profile
    parts = [
        *(repr(signature(op)) for op in graph.operations),
        *map(repr, (list(mesh_shape), of_auto, str(stored), where)),
        tf.__version__,
        f"{os.uname().nodename} {os.cpu_count()}",
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()

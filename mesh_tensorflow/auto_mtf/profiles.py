"""Profiles: how long each operation of a program takes where it runs, under each layout of its own.

A cost model knows a machine by a few rates. It does not know that one size of a product is slow,
or that the slices of four processors share two cores. So each distinct operation is lowered alone,
by the mesh implementation that the program will have, and its slices are computed on all
processors at once. Layers that repeat are the same operations on the same shapes, so that a deep
model has no more of them than a shallow one: Hu et al., "CFP: Low-overhead Profiling-based
Intra-operator Parallelism Generation by Preserving Communication-Free Structures" (2025).
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Protocol, Union

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.layout import (
    UNEVEN,
    StoredLayout,
    convert_to_layout_rules,
    joined_names,
)
from mesh_tensorflow._core.operation import Collective, Cost, LaidOutLike, Operation, Tensor
from mesh_tensorflow._core.shape import JOIN, Shape, ShapeLike, convert_to_shape
from mesh_tensorflow._lowering.lowering import Lowering
from mesh_tensorflow._mesh.devices import (
    cores,
    default_devices,
    local_cpus,
    one_thread_each,
    parts_of_mesh,
    set_cpus,
    threads_by_session,
)
from mesh_tensorflow._mesh.mesh_impl import LaidOutTensor, MeshImpl, summands_of
from mesh_tensorflow._pjrt import pjrt
from mesh_tensorflow._processes.peers import Exchange, alone
from mesh_tensorflow._processes.processes import processes, several_of_jax
from mesh_tensorflow._progress import Progress
from mesh_tensorflow.auto_mtf._cache import Cache
from mesh_tensorflow.auto_mtf._space import layout_pairs, layout_text
from mesh_tensorflow.auto_mtf._units import signature
from mesh_tensorflow.auto_mtf.hardware import (
    ZERO,
    CostModel,
    Hardware,
    Seconds,
    hardware_profile,
    local_machine,
    named_like,
)
from mesh_tensorflow.auto_mtf.step_time import ProgramParts, StepEstimator
from mesh_tensorflow.ops._source import ImportLaidOutTensorOperation, ImportOperation
from mesh_tensorflow.ops._variable import Assign, ReadVariable, Variable
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

__all__ = ["MeasuredCosts", "Processors", "Profile", "estimator_for", "estimator_on"]

# Read in the state of a Lowering, or in tf tensors of the user's graph; loops are timed by parts.
_NOT_ALONE = (Assign, ImportLaidOutTensorOperation, ImportOperation, ReadVariable, Variable)
# An operation is repeated within a step, until that takes so long: what a step itself costs varies.
_STEP_SECONDS, _FEWEST, _MOST = 1e-3, 3, 16
_ROUNDS, _RUN_SECONDS = 8, 0.05  # of such steps in turns: so many, or fewer that take so long
_ROUNDS_OF_BATCH = 2  # at a time, so that four batches are open
_NEAREST = 5  # operations of a class, of which what is not timed is about as long as one
_IN_ONE_GRAPH = 20  # operations; TensorFlow looks through all of a graph for each fetch
_LONGEST_STEP = 600.0  # seconds, where none are given
_SHORTEST_LIMIT = 10.0  # of a step that is timed, whose first run takes as long as it is built
_FORM = 5  # of what is kept; others are of other ways to time
_FILLING = 0.5  # whose casts are 0, an id of every vocabulary, and True


@dataclasses.dataclass(frozen=True)
class Profile:
    """Asks for the times of a program's operations on this machine.

    >>> mtf.auto_mtf.Profile(seconds=20).simd
    False

    Attributes:
      seconds: how long operations are timed; the costliest by the cost model come first. A step
        that takes longer than that, and than 10 seconds, is an error.
      cache: a JSON file that times are kept in, and taken from for the same operations on the same
        machine. None for profiles.json in ~/.cache/mesh_tensorflow; "" for none.
      devices: the device of each processor; None for the GPUs of the process or its logical CPUs.
      simd: whether the processors run one program, as with `simd_mesh_impl.replicate`.
      show: whether there is a progress line.
    """

    seconds: float = 60.0
    cache: Optional[str] = None
    devices: Optional[Sequence[str]] = None
    simd: bool = False
    show: bool = True

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"{self}: seconds must be more than 0")


# -- where operations are timed


class Servers(Protocol):
    """The servers of several processes, whose processors a mesh has."""

    @property
    def local(self) -> Optional[Sequence[int]]:
        """The numbers of the processors that this process computes for; None for all."""

    @property
    def is_first(self) -> bool:
        """Whether this process decides what all do."""

    @property
    def exchange(self) -> Exchange:
        """What tells all processes that do the same what each of them says."""

    def session(self, graph: tf.Graph, options: Optional[tf.GraphOptions] = None) -> tf.Session:
        """Returns a session that has the processors of all processes."""

    def run(self, session: tf.Session, fetches: Any, seconds: float) -> Any:
        """Returns what a session fetches, without waiting longer, or for a lost process."""


class Processors:
    """Where a program runs: the processors of a mesh, logical CPUs, GPUs or devices of JAX.

    Attributes:
      shape: the Shape of the mesh.
      devices: a device string for each processor.
      simd: whether they run one program.
      pjrt: whether they are devices of JAX, on which nothing is timed alone.
      servers: those of several processes; None if all processors are in this one, or JAX's.
    """

    def __init__(
        self,
        shape: ShapeLike,
        devices: Optional[Sequence[str]] = None,
        simd: bool = False,
        pjrt: bool = False,
        servers: Optional[Servers] = None,
    ):
        """Creates the Processors of a mesh.

        Args:
          shape: the shape of the mesh.
          devices: a device for each; None for the first GPUs, or logical CPUs, of the process.
          simd: whether they run one program.
          pjrt: whether they are devices of JAX, which have no device strings.
          servers: those of several processes, if all processes do what is done here.
        """
        self.shape = convert_to_shape(shape) or Shape([])
        self.simd, self.pjrt, self.servers = simd, pjrt, servers
        if pjrt:
            devices = [""] * self.shape.size
        found = list(default_devices() if devices is None else devices)
        if devices is None and len(found) < self.shape.size:
            found = [f"/device:CPU:{i}" for i in range(self.shape.size)]
        self.devices = found[: self.shape.size] if devices is None else found

    @property
    def exchange(self) -> Exchange:
        """What tells all processes that do the same what each of them says."""
        return alone if self.servers is None else self.servers.exchange

    @property
    def is_first(self) -> bool:
        """Whether this process decides what all do."""
        return self.servers is None or self.servers.is_first

    @property
    def key(self) -> str:
        """What tells machines apart whose times differ."""
        return f"simd={self.simd} {self.devices}"

    @property
    def processes(self) -> int:
        """How many processes have the devices."""
        if self.pjrt:
            return processes().count if several_of_jax() else 1
        specs = [tf.DeviceSpec.from_string(device) for device in self.devices]
        return len({(spec.job, spec.task) for spec in specs})

    @property
    def kind(self) -> str:
        """What the devices are called by their maker; "" for CPUs."""
        if self.pjrt:
            return pjrt().device_kind_of(self.shape)
        if not any("gpu" in device.lower() for device in self.devices):
            return ""
        [gpu, *_] = tf2.config.list_physical_devices("GPU")
        return tf2.config.experimental.get_device_details(gpu).get("device_name", "")

    def hardware(self, given: Union[str, Hardware, None] = None) -> Hardware:
        """Returns the profile of the cost model.

        Args:
          given: what the user asks for, see `hardware_profile`; None for what the devices are.
        """
        if given is not None:
            return hardware_profile(given)
        if self.kind:
            return named_like(self.kind) or hardware_profile()
        several = self.processes > 1
        return local_machine(
            self.shape.size,
            one_memory=self.one_memory,
            processes=self.processes,
            machines=processes().machines if several else 1,
            compiled=self.pjrt,
        )

    @property
    def executed(self) -> Shape:
        """The shape of the mesh whose slices are computed, with merged processors as one."""
        apart = self.simd or self.pjrt
        return self.shape if apart else self._placement("").execution_impl.shape

    @property
    def one_memory(self) -> bool:
        """Whether processors share equal slices, which are computed once."""
        return not (self.simd or self.pjrt) and len(set(self._placement("").domains)) == 1

    def slices(self, layout: str) -> int:
        """Returns how many slices are computed, each by a part of the machine."""
        if not self.one_memory:  # where each processor computes its own
            return self.executed.size
        return parts_of_mesh(self.executed, convert_to_layout_rules(layout))

    @property
    def few_parts(self) -> list[frozenset[str]]:
        """Mesh dimensions that cut into fewer parts than there are cores: the largest such sets.

        Programs that split over no others leave threads to TensorFlow, which all others do not.
        """
        names = self.shape.dimension_names
        if not self.one_thread_each(names):
            return []
        sets = [
            frozenset(some)
            for count in range(len(names))
            for some in itertools.combinations(names, count)
            if not self.one_thread_each(some)
        ]
        return [some for some in sets if not any(some < other for other in sets)]

    def one_thread_each(self, names: Iterable[str]) -> bool:
        """Returns whether operations of a program that splits over some mesh dimensions have one.

        Args:
          names: names of mesh dimensions.
        """
        rules = convert_to_layout_rules(layout_over(names))
        return one_thread_each(local_cpus(self.devices), self.shape, rules)

    def _placement(self, layout: str) -> PlacementMeshImpl:
        return PlacementMeshImpl(self.shape, layout, self.devices)

    def run(self, layout: str, program: Callable[[MeshImpl], Any]) -> Any:
        """Returns what a program returns that is given the mesh in a layout."""
        if self.servers is None:  # before a SIMD program is traced, with which TensorFlow begins
            threads_by_session()
        if not self.simd:
            return program(self._placement(layout))
        local = None if self.servers is None else self.servers.local
        return replicate(
            lambda: program(SimdMeshImpl(self.shape, layout)), devices=self.devices, local=local
        )

    def session(
        self, graph: tf.Graph, layout: str, optimized: bool = True, seconds: float = _LONGEST_STEP
    ) -> tf.Session:
        """Returns a session for a tf graph, with the threads of a program in a layout.

        Args:
          graph: the tf graph.
          layout: the layout of the program.
          optimized: whether TensorFlow optimizes the graph, as it does the user's.
          seconds: the time limit of a step.
        """
        config = tf.ConfigProto(operation_timeout_in_ms=int(1000 * seconds))
        options = config.graph_options
        if not optimized:
            # What is timed is there several times, and nothing reads it: one optimizer would leave
            # it out, and the other would compute it once.
            options.rewrite_options.disable_meta_optimizer = True
            options.optimizer_options.opt_level = tf.OptimizerOptions.L0
        if self.servers is not None:  # which have threads for all of their sessions
            return self.servers.session(graph, options)
        rules = convert_to_layout_rules(layout)
        set_cpus(config, local_cpus(self.devices), self.shape, rules, own_threads=True)
        return tf.Session(graph=graph, config=config)

    def runner(
        self, session: tf.Session, fetch: Any, seconds: float = _LONGEST_STEP
    ) -> Callable[[], Any]:
        """Returns a function that runs fetches in a session.

        Args:
          session: what `session` returned.
          fetch: those of `session.run`.
          seconds: what `session` was given.
        """
        if self.servers is None:
            # Unlike session.run, it does not look the fetches up again in each step.
            return session.make_callable(fetch)
        return functools.partial(self.servers.run, session, fetch, seconds)


def layout_over(names: Iterable[str]) -> str:
    """Returns a layout that splits something over each of some mesh dimensions."""
    return layout_text({name: name for name in names})


# -- one operation


class _Alone(Lowering):
    """A Lowering of single operations, whose inputs are stand-ins."""

    def __init__(self, graph: Graph, mesh_impl: MeshImpl, tensors: Sequence[Tensor]):
        """Lowers nothing yet.

        Args:
          graph: the program.
          mesh_impl: a MeshImpl.
          tensors: the inputs.
        """
        self._begin(graph, {op.mesh: mesh_impl for op in graph.operations})
        self._inputs = tensors
        for x in tensors:
            impl, dtype = self.mesh_impl(x), tf.as_dtype(x.dtype)
            whole = tf.fill(x.shape.to_integer_list, tf.cast(_FILLING, dtype))
            # Each slice is made on its own device, of its shape alone: parts of the whole would
            # come from another device, or another process, in each step.
            self.tensors[x] = impl.slicewise(
                lambda t: tf.fill(t.shape, tf.cast(_FILLING, t.dtype)),
                impl.import_tf_tensor(x, whole),
            )

    def follow(self, results: Sequence[LaidOutTensor]) -> None:
        """Lets what reads the inputs, on each processor, wait for what that one has computed."""

        def after(t: tf.Tensor, *own: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies(own):
                return tf.identity(t)

        self.tensors.update(
            (x, self.mesh_impl(x).slicewise(after, self.tensors[x], *results)) for x in self._inputs
        )


class _Timed(NamedTuple):
    """What is timed: how often in a step of the program, for how long by the cost model, and how.

    Attributes:
      kind: the class of the operation, or "sum", or one that nothing but updates waits for: of what
        its time is compared with others'.
      predicted: the seconds of one, by the cost model.
      weight: those of a step of the program.
      layout: the layout that it is timed in, of its own dimensions.
      program: a layout of the program that it is timed for, which says how many threads it has.
      waits: whether it reads slices of other processors, and so waits for them.
      tensors: Tensors whose slices are there before.
      run: a function of an _Alone that computes it once, and returns its results, laid out.
    """

    kind: str
    predicted: float
    weight: float
    layout: str
    program: str
    waits: bool
    tensors: tuple[Tensor, ...]
    run: Callable[[_Alone], Sequence[LaidOutTensor]]

    @property
    def inputs(self) -> Hashable:
        """What is equal where the inputs are."""
        return self.layout, self.program, tuple((tuple(x.shape), x.dtype) for x in self.tensors)

    @property
    def repeats(self) -> int:
        """How often it is computed in a step that is timed."""
        return min(_MOST, max(_FEWEST, math.ceil(_STEP_SECONDS / self.predicted)))


def _lower(op: Operation, lowering: _Alone) -> list[LaidOutTensor]:
    lowering.lower_operations([op])
    return [summands_of(lowering.tensors[y]) for y in op.outputs]


def _sum(x: Tensor, mesh_axes: Sequence[int], lowering: _Alone) -> list[LaidOutTensor]:
    impl, value = lowering.mesh_impl(x), lowering.tensors[x]
    for axis in mesh_axes:
        # Summands differ: equal ones in one memory would be one tensor, which is read once.
        coordinate = impl.laid_out_pcoord(axis)
        value = impl.slicewise(lambda t, c: t + tf.cast(c, t.dtype), value, coordinate)
    return [impl.allreduce(value, mesh_axes, "SUM")]


def _ops_of(values: Iterable[LaidOutLike]) -> list[tf.Operation]:
    return [t.op for value in values for t in summands_of(value).all_slices]


def _fetch(graph: Graph, timed: _Timed, machine: Processors, repeats: int) -> tf.Operation:
    """Returns what a session runs to compute an operation some times; its inputs alone for 0."""
    # In a step, processors do not wait for each other after each operation, and all cores are busy.
    # Where one operation at a time is computed, or waits for others, the next would hide that.
    side_by_side = machine.slices(timed.layout) >= cores() and not timed.waits
    # What waits for all processors would ask other memories, and other processes, for them. There
    # each processor waits for its own, as in a step.
    by_processor = bool(timed.tensors) and not machine.one_memory

    def program(mesh_impl: MeshImpl) -> tf.Operation:
        lowering = _Alone(graph, mesh_impl, timed.tensors)
        done = _ops_of(lowering.tensors.values())
        last = [] if by_processor else done
        for _ in range(repeats):
            with tf.control_dependencies(last):
                results = timed.run(lowering)
            done = done + _ops_of(results)
            if not side_by_side and by_processor:
                lowering.follow(results)
            elif not side_by_side:
                last = done
        return tf.group(done)

    return machine.run(timed.layout, program)


# Of an operation that reads what only its own program has, or that refuses the stand-ins.
_CANNOT = (KeyError, TypeError, ValueError, tf.errors.InvalidArgumentError)


def _times_of(
    graph: Graph,
    wanted: Sequence[_Timed],
    machine: Processors,
    more: Callable[[], bool],
    limit: float = _LONGEST_STEP,
) -> list[Optional[float]]:
    """Returns the seconds of the first of what is to be timed; None of what cannot run alone.

    Args:
      graph: the program that it is of.
      wanted: what is to be timed.
      machine: the Processors.
      more: called for each; returns whether to go on, in all processes alike.
      limit: the seconds that a step of them may take.

    Raises:
      TimeoutError: a step has not ended by then.
    """
    times: list[Optional[float]] = []
    # By shapes and layout: a step of what is timed begins with its inputs.
    of_inputs: dict[Hashable, float] = {}
    asked: set[Hashable] = set()
    waiting: collections.deque[_Batch] = collections.deque()
    with contextlib.ExitStack() as opened:
        for begin in range(0, len(wanted), _IN_ONE_GRAPH):
            some = wanted[begin : begin + _IN_ONE_GRAPH]
            batch = _Batch(graph, some, machine, asked, more, limit)
            waiting.append(opened.enter_context(batch))
            batch.prepare()
            # Other load lasts for seconds. So the rounds of an operation are spread over the time
            # that later ones take to be built: with all in a row, a tenth of the operations of a
            # language model took 1.6 times as long in one run as in another.
            for one in waiting:
                one.turns.take(_ROUNDS_OF_BATCH)
            while waiting and waiting[0].turns.done:
                times += waiting.popleft().times(of_inputs)
            if batch.is_last:
                break
        while any(not one.turns.done for one in waiting):
            for one in waiting:
                one.turns.take(1)
        for one in waiting:
            times += one.times(of_inputs)
    return times


class _Batch(contextlib.ExitStack):
    """Some of what is timed, in one tf graph, with a session for the threads of each program.

    Attributes:
      is_last: whether the seconds are over.
      turns: the _Turns of all steps, once they are prepared.
    """

    is_last = False
    turns: _Turns

    def __init__(
        self,
        graph: Graph,
        wanted: Sequence[_Timed],
        machine: Processors,
        asked: set[Hashable],
        more: Callable[[], bool],
        limit: float,
    ):
        """Builds what is run, until the seconds are over.

        Args:
          graph: the program.
          wanted: what is to be timed.
          machine: the Processors.
          asked: the inputs that are timed in earlier batches, to which those of this one are added.
          more: see `_times_of`.
          limit: see `_times_of`.
        """
        super().__init__()
        self._machine, self._limit = machine, limit
        # By inputs, or by number: what is timed, and what a session runs for it.
        self._built: dict[Hashable, tuple[_Timed, Optional[tf.Operation]]] = {}
        self._looked_at: list[_Timed] = []
        with tf.Graph().as_default() as self._made:
            # All of a graph before its sessions, which would take long to add to each time.
            for number, one in enumerate(wanted):
                if one.inputs not in asked:
                    asked.add(one.inputs)
                    self._built[one.inputs] = one, _fetch(graph, one, machine, 0)
                self._built[number] = one, _fetch_if_possible(graph, one, machine)
                self._looked_at.append(one)
                # A convolution whose parts have edges of others takes a second to be built.
                self.is_last = not more()
                if self.is_last:
                    break
        self._sessions: dict[str, tf.Session] = {}

    def prepare(self) -> None:
        """Runs each step once."""
        steps = {key: self._step(*built) for key, built in self._built.items()}
        can_run = {key: step for key, step in steps.items() if step is not None}
        self.turns = _Turns(can_run, self._machine.exchange)

    def _step(self, timed: _Timed, fetch: Optional[tf.Operation]) -> Optional[Callable[[], Any]]:
        """Returns a function that computes something, and has done so; None if it cannot run."""
        if fetch is None:
            return None
        if timed.program not in self._sessions:
            session = self._machine.session(self._made, timed.program, False, self._limit)
            self._sessions[timed.program] = self.enter_context(contextlib.closing(session))
        step = self._machine.runner(self._sessions[timed.program], fetch, self._limit)

        def run() -> None:
            try:
                step()
            except tf.errors.DeadlineExceededError:
                raise TimeoutError(
                    f"time operations: a step of {timed.kind} of "
                    f"{', '.join(str(x.shape) for x in timed.tensors)} in the layout "
                    f"{timed.layout or 'without splits'!r} did not end within {self._limit:g} s. "
                    "Leave out the times of operations (profile=False), or give more seconds"
                ) from None

        try:
            run()
            can = True
        except _CANNOT:
            can = False
        return run if all(self._machine.exchange(can)) else None

    def times(self, of_inputs: dict[Hashable, float]) -> Iterator[Optional[float]]:
        """Yields the seconds of each that was looked at; None of what cannot run. Closes sessions.

        Args:
          of_inputs: the seconds of inputs, to which those of this batch are added.
        """
        least = self.turns.least()
        self.close()
        of_inputs.update(least)  # and the numbers of this batch, which are no inputs
        for number, one in enumerate(self._looked_at):
            seconds = least.get(number)
            if seconds is not None:
                seconds = max(0.0, seconds - of_inputs[one.inputs]) / one.repeats
            yield seconds


def _fetch_if_possible(graph: Graph, timed: _Timed, machine: Processors) -> Optional[tf.Operation]:
    try:
        return _fetch(graph, timed, machine, timed.repeats)
    except _CANNOT:
        return None


class _Turns:
    """The shortest times of some steps, those of the first process.

    Other load on the machine only adds to a time, but may last for longer than a step is run in a
    row. So they take turns.

    Attributes:
      done: whether all turns are taken.
    """

    done = False

    def __init__(self, steps: Mapping[Hashable, Callable[[], Any]], exchange: Exchange = alone):
        """Takes no turn yet.

        Args:
          steps: functions, each of which does a step.
          exchange: tells what all processes say.
        """
        self._steps, self._exchange, self._rounds = steps, exchange, 0
        self._times: dict[Hashable, list[float]] = {key: [] for key in steps}

    def take(self, rounds: int) -> None:
        """Runs each step so often, or less if all turns are taken, or if it takes long.

        Args:
          rounds: the number of turns.
        """
        times = self._times
        for number in range(self._rounds, min(self._rounds + rounds, _ROUNDS)):
            for key in self._steps if number % 2 == 0 else reversed(list(self._steps)):
                # All processes go the same way, or one would wait for others in a sum forever.
                # After their talk they also begin at the same time.
                if self._exchange(number >= 2 and number * min(times[key]) > _RUN_SECONDS)[0]:
                    continue
                start = time.perf_counter()
                self._steps[key]()
                times[key].append(time.perf_counter() - start)
        self._rounds += rounds
        self.done = self._rounds >= _ROUNDS

    def least(self) -> dict[Hashable, float]:
        """Returns the shortest times."""
        least = self._exchange([min(column) for column in self._times.values()])[0]
        return dict(zip(self._times, least))


# -- the costs


class MeasuredCosts(CostModel):
    """A CostModel with the times of operations and of sums, as far as they are measured.

    What is not measured has the time of the cost model, multiplied by what that is off for
    operations of the same class that it takes to be about as long.
    """

    def __init__(
        self,
        mesh_shape: Shape,
        hardware: Hardware,
        stored_layout: Optional[StoredLayout],
        parts: ProgramParts,
    ):
        """Creates a MeasuredCosts that has measured nothing.

        Args:
          mesh_shape: the Shape of the mesh whose slices are computed.
          hardware: a Hardware.
          stored_layout: see CostModel.
          parts: the ProgramParts of the program.
        """
        super().__init__(mesh_shape, hardware, stored_layout)
        self._graph, self._program = parts.graph, ""
        self._sizes = {d.name: d.size for d in mesh_shape}
        self._times_of: collections.Counter[Any] = collections.Counter()
        for step in parts.steps:
            if step.op is not None:
                self._times_of[signature(step.op)] += step.times  # type: ignore[assignment]
        self._wanted: dict[str, _Timed] = {}
        self._seconds: dict[str, float] = {}
        # By class: pairs of what the cost model says and what was measured, in this order.
        self._pairs: dict[str, list[tuple[float, float]]] = {}
        self._only_timed = False
        self._refused = 0
        self.spent = 0.0

    def of(self, program: str, shares_out: bool, share: float) -> MeasuredCosts:
        """Returns the costs of another layout of the program, which are measured together.

        Args:
          program: the layout.
          shares_out: see CostModel.
          share: see CostModel.
        """
        other = copy.copy(self)
        other._program, other.shares_out, other.share = program, shares_out, share
        return other

    def only_timed(self) -> MeasuredCosts:
        """Returns the costs without what is not measured."""
        other = copy.copy(self)
        other._only_timed = True
        return other

    def _of_all(self, op: Operation, impl: MeshImpl) -> Seconds:
        """Returns the time of an operation on all processors."""
        predicted = super()._of_all(op, impl)
        # Loops' own operations are no steps; without a cost, nothing is computed.
        if isinstance(op, _NOT_ALONE) or not predicted.total:
            return predicted.times(0.0 if self._only_timed else 1.0)
        same, layout = signature(op), self._layout_of([*op.inputs, *op.outputs], impl)
        weight = predicted.total * self._times_of[same]
        timed = _Timed(
            type(op).__name__, predicted.total, weight, layout, self._program,
            predicted.communication > 0, tuple(op.inputs), functools.partial(_lower, op),
        )  # fmt: skip
        return predicted.times(self._factor(f"{same} {self._form(layout)}", timed))

    def seconds(self, cost: Cost, rate: str, tensors: Sequence[Tensor], impl: MeshImpl) -> Seconds:
        """Returns the time of a cost that is no operation's, and is not measured."""
        return ZERO if self._only_timed else super().seconds(cost, rate, tensors, impl)

    def pending_sum(
        self, x: Tensor, collective: Collective, impl: MeshImpl, times: float, beside: bool = False
    ) -> float:
        """Returns the seconds of the allreduces of a Tensor."""
        predicted = super().pending_sum(x, collective, impl, times, beside)
        if not predicted or collective.kind != "allreduce":
            return 0.0 if self._only_timed else predicted
        layout, axes = self._layout_of([x], impl), collective.mesh_axes
        sizes = [self.mesh_shape[axis].size for axis in axes]
        kind = "sum of gradients" if beside else "sum"
        key = f"{kind} {tuple(x.shape)} {x.dtype.name} over {sizes} {self._form(layout)}"
        timed = _Timed(
            kind, predicted / times, predicted, layout, self._program, not beside, (x,),
            functools.partial(_sum, x, axes),
        )  # fmt: skip
        return predicted * self._factor(key, timed)

    def _layout_of(self, tensors: Sequence[Tensor], impl: MeshImpl) -> str:
        """Returns the rules for the dimensions of some tensors, over more than one processor."""
        names, sizes = {d.name for x in tensors for d in x.shape}, self._sizes
        return layout_text(
            {
                d: m
                for d, m in impl.layout_rules.written
                if d in names and any(sizes.get(name, 1) > 1 for name in joined_names(m, sizes))
            }
        )

    def _form(self, layout: str) -> str:
        """Returns a layout with mesh dimensions by number and size: what is timed once for all."""
        sizes, number, rules = self._sizes, dict[str, int](), []
        for d, m in layout_pairs(layout):
            names = joined_names(m, sizes)
            numbers = [f"{number.setdefault(n, len(number))}={sizes[n]}" for n in names]
            rules.append(f"{d}:{JOIN.join(numbers)}{UNEVEN if m.endswith(UNEVEN) else ''}")
        return f"{rules} of {sorted(sizes.values())}"

    def _factor(self, key: str, timed: _Timed) -> float:
        """Returns what the time of the cost model is to be multiplied by."""
        key = f"{key} in {self._form(timed.program)}"
        if key in self._seconds:
            return self._seconds[key] / timed.predicted
        earlier = self._wanted.get(key)
        if earlier is None or earlier.weight < timed.weight:
            self._wanted[key] = timed
        return 0.0 if self._only_timed else self._correction(timed)

    def _correction(self, timed: _Timed) -> float:
        """Returns by how much the cost model is off for what is like something not timed."""
        pairs = self._pairs.get(timed.kind) or self._pairs.get("") or [(1.0, 1.0)]
        place = bisect.bisect(pairs, (timed.predicted,))
        near = pairs[max(0, place - _NEAREST // 2) :][:_NEAREST]
        return sum(measured for _, measured in near) / sum(predicted for predicted, _ in near)

    def measure(self, machine: Processors, profile: Profile) -> None:
        """Times what was asked for, the costliest first, until the seconds of a profile are over.

        Args:
          machine: where the program runs.
          profile: a Profile.
        """
        begin = time.monotonic()
        where = f"{_FORM} {machine.key} {tf.__version__} {os.uname().nodename} {os.cpu_count()}"
        cache = Cache("profiles.json", profile.cache)
        # What the first process knows, in all: they time the same operations in the same order.
        cached = machine.exchange(cache.read(where))[0]
        hashed = {key: hashlib.sha256(key.encode()).hexdigest()[:24] for key in self._wanted}
        whole = hashlib.sha256("".join(sorted(hashed.values())).encode()).hexdigest()
        # These are changed in place: the costs of other layouts have the same dictionaries.
        self._seconds.update({key: cached[name] for key, name in hashed.items() if name in cached})
        missing = [key for key in self._wanted if key not in self._seconds]
        missing.sort(key=lambda key: -self._wanted[key].weight)
        # A program whose time was over once has the same costs in the next run.
        if missing and whole not in cached:
            self._time(missing, machine, profile, begin)
            times = {hashed[key]: seconds for key, seconds in self._seconds.items()}
            if machine.is_first:
                cache.keep(where, {**cached, **times, whole: float(len(times))})
        self._compare()
        self.spent = time.monotonic() - begin

    def _time(
        self, keys: Sequence[str], machine: Processors, profile: Profile, begin: float
    ) -> None:
        label, show = "time operations", profile.show
        with Progress(len(keys), label, "operation", leave=False, show=show) as progress:

            def more() -> bool:
                progress.update()
                return machine.exchange(time.monotonic() - begin < profile.seconds)[0]

            timed = [self._wanted[key] for key in keys]
            limit = max(profile.seconds, _SHORTEST_LIMIT)
            times = _times_of(self._graph, timed, machine, more, limit)
        self._seconds.update({key: t for key, t in zip(keys, times) if t is not None})
        self._refused = times.count(None)

    def _compare(self) -> None:
        """Notes what the cost model says of what was timed, for each class and in all."""
        for key, seconds in self._seconds.items():
            timed = self._wanted[key]
            for kind in (timed.kind, ""):
                self._pairs.setdefault(kind, []).append((timed.predicted, seconds))
        for pairs in self._pairs.values():
            pairs.sort()

    def __str__(self) -> str:
        weight = sum(t.weight for key, t in self._wanted.items() if key in self._seconds)
        share = weight / max(1e-30, sum(t.weight for t in self._wanted.values()))
        refused = f"; {self._refused} cannot run alone" if self._refused else ""
        return (
            f"{len(self._seconds)} of {len(self._wanted)} operations timed in {self.spent:.0f} s, "
            f"{share:.0%} of the time by the cost model{refused}"
        )


def estimator_for(
    parts: ProgramParts,
    mesh_shape: ShapeLike,
    hardware: Union[str, Hardware, None] = None,
    stored_layout: Optional[StoredLayout] = None,
    profile: Union[bool, Profile] = False,
    **options: Any,
) -> StepEstimator:
    """Returns an estimator by a hardware profile, or by the times of operations on this machine.

    Args:
      parts: the ProgramParts of the program.
      mesh_shape: the shape of the mesh.
      hardware: see `auto_mtf.layout`.
      stored_layout: see StepEstimator.
      profile: a Profile; True for `Profile()`, and False for none.
      **options: further arguments of StepEstimator.
    """
    if not profile:
        return StepEstimator(
            parts.graph, mesh_shape, parts.outputs, hardware, stored_layout, parts, **options
        )
    profile = profile if isinstance(profile, Profile) else Profile()
    machine = Processors(mesh_shape, profile.devices, profile.simd)
    return estimator_on(machine, parts, profile, hardware, stored_layout, **options)


def estimator_on(
    machine: Processors,
    parts: ProgramParts,
    profile: Optional[Profile],
    hardware: Union[str, Hardware, None] = None,
    stored_layout: Optional[StoredLayout] = None,
    **options: Any,
) -> StepEstimator:
    """Returns an estimator of what some processors execute.

    Args:
      machine: the Processors.
      parts: the ProgramParts of the program.
      profile: a Profile, to time operations there, but on devices of JAX; None to know just which
        processors are merged.
      hardware: that of what is not timed, see `Processors.hardware`.
      stored_layout: see StepEstimator.
      **options: further arguments of StepEstimator.
    """
    shape, executed, rates = machine.shape, machine.executed, machine.hardware(hardware)
    if machine.pjrt:  # which has threads of its own, and leaves out nothing
        return StepEstimator(
            parts.graph, shape, parts.outputs, rates, stored_layout, parts, **options
        )
    costs = MeasuredCosts(executed, rates, stored_layout, parts) if profile else None
    # Without splits no processor needs another that has a memory of its own, and without effects
    # only the results of the first are read.
    apart = not machine.one_memory and executed.size > 1
    only_first = apart and not any(op.has_effect for op in parts.operations)

    def of(names: Collection[str], **also: Any) -> StepEstimator:
        """Returns the estimator of the layouts that split over some mesh dimensions."""
        program = layout_over(names) if machine.one_thread_each(names) else ""
        # Where threads are left to TensorFlow, each operation has all of them.
        shares_out = not program
        share = 1.0 / executed.size if only_first and not names else 1.0
        its = CostModel(executed, rates, stored_layout, shares_out, share)
        if costs is not None:
            its = costs.of(program, shares_out, share)
        return StepEstimator(
            parts.graph, shape, parts.outputs, rates, stored_layout, parts,
            costs=its, **options, **also,
        )  # fmt: skip

    def all_layouts() -> StepEstimator:
        sets = machine.few_parts
        if only_first:  # without splits, before those that also have that layout
            sets = [frozenset[str](), *filter(None, sets)]
        few = [of(names, over=names) for names in sets]
        return of(shape.dimension_names, apart=few)

    estimator = all_layouts()
    if profile is None or costs is None:
        return estimator
    # Bounds of the times of all layouts ask for all that any of them needs.
    estimator.least()
    costs.measure(machine, profile)
    return all_layouts()

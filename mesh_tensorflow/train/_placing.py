"""Where a training runs: meshes, devices, processes, and a layout that is chosen by steps."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.layout import (
    LayoutLike,
    LayoutRules,
    convert_to_layout_rules,
    coordinate_of,
    stored_layout,
)
from mesh_tensorflow._core.shape import ShapeLike
from mesh_tensorflow._mesh.devices import (
    check_devices,
    check_devices_exist,
    default_devices,
    local_cpus,
    set_cpus,
    set_threads,
    soft_placement,
)
from mesh_tensorflow._mesh.mesh_impl import MESH_IMPLS, MeshImpl
from mesh_tensorflow._pjrt import pjrt
from mesh_tensorflow._processes.peers import POLL_SECONDS, Exchange
from mesh_tensorflow._processes.processes import Processes, check_described, is_pjrt, processes
from mesh_tensorflow._stop_signals import StopSignals
from mesh_tensorflow.auto_mtf.measured import Auto, choose_on, compiling_pays
from mesh_tensorflow.auto_mtf.profiles import Processors
from mesh_tensorflow.estimator.processes import in_cluster
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate
from mesh_tensorflow.train._data import Batch, Features, Part
from mesh_tensorflow.train._model import Model

if TYPE_CHECKING:
    from mesh_tensorflow.train._engine import SessionEngine

# More than any number of steps, so that `step < last` says that nobody has decided yet.
_NEVER = 2**62

_found: list[Cluster] = []  # the one of this process, whose server lasts as long as it


class Cluster:
    """The processes of a run, and the server of this one; they are the Servers of a profile.

    Attributes:
      processes: the Processes.
      per_process: the number of logical CPUs of each.
      exchange: within `together`, tells all processes what each says.
    """

    exchange: Exchange

    def __init__(self, found: Processes, per_process: int):
        """Starts the server of this process, and waits for those of the others."""
        self.processes, self.per_process = found, per_process
        self._server = found.start_server(per_process)
        self._runs = self._talks = 0
        self._finished = False
        # A process that ends early would take its slices away from the others.
        atexit.register(self._at_exit)

    @property
    def local(self) -> list[int]:
        """The numbers of the processors of this process."""
        return self.processes.local(self.per_process)

    @property
    def is_first(self) -> bool:
        """Whether this process decides what all do."""
        return self.processes.is_chief

    def session(self, graph: tf.Graph, options: Optional[tf.GraphOptions] = None) -> tf.Session:
        """Returns a session on the server of this process.

        Args:
          graph: its tf graph.
          options: how TensorFlow optimizes it; None for as usual.
        """
        config = self.processes.config(self.per_process)
        if options is not None:
            config.graph_options.CopyFrom(options)
        return tf.Session(self._server.target, graph=graph, config=config)

    def run(self, session: tf.Session, fetches: Any, seconds: float) -> Any:
        """Returns what a session fetches, without waiting forever for a lost process."""
        return self.processes.run(session, fetches, timeout_seconds=seconds)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Context in which all processes do the same, and tell each other what they find.

        All enter such contexts in the same order. If one fails within, all do, with its reason.
        """
        self._talks += 1
        name = f"fit_talks_{self._talks}"
        with self.processes.exchanging(self._server, name) as self.exchange:
            yield

    def next_container(self) -> str:
        """Returns the name of the place on the servers where the next run has its variables."""
        # All processes begin the same runs in the same order, so that their names agree.
        self._runs += 1
        return f"fit_{self._runs}"

    def finish(self) -> None:
        """Waits until all processes have come here; the second call does nothing."""
        if not self._finished:
            self._finished = True
            self.processes.finish(self._server)

    def _at_exit(self) -> None:
        # After an error here, the others may wait in a step that this process takes no part in, and
        # would never come.
        if getattr(sys, "last_type", None) is None:  # no error ended the program
            self.finish()


# What processes tell each other, by the names of variables.
_LAST, _SIGNAL, _SAVED = "last_step_of_all", "signal_of_all", "saved_step_of_all"


class Agreement:
    """What all know of each other: the step at which they stop and why, and that all is saved."""

    def __init__(self, cluster: Cluster):
        """Adds its variables to the default tf graph."""
        self._cluster = cluster
        chief = f"/job:{cluster.processes.job}/replica:0/task:0/device:CPU:0"
        with tf.device(chief):
            # They are no global variables: every process would initialize them, and savers save
            # them.
            counters = {
                name: tf.Variable(
                    tf.constant(0, tf.int64),
                    collections=[],
                    trainable=False,
                    use_resource=True,
                    name=name,
                )
                for name in (_LAST, _SIGNAL, _SAVED)
            }
            # Fed, as an operation for each new value would extend the graph in every session that
            # has it.
            self._fed = tf.placeholder(tf.int64, [])
            self._sets = {n: v.assign(self._fed, read_value=False) for n, v in counters.items()}
            self._reads = {name: v.read_value() for name, v in counters.items()}

    def reset(self, session: tf.Session) -> None:
        """Makes a run begin; in the chief, before the others read what it decides."""
        if self._cluster.processes.is_chief:
            # -1 is the number of no step: 0 would look saved to a run that ends before its first
            # step.
            for name, value in ((_SIGNAL, 0), (_LAST, _NEVER), (_SAVED, -1)):
                self._run(session, self._sets[name], value)

    def settle(self, session: tf.Session, step: int) -> None:
        """Waits until the chief has come here too, and so has saved."""
        if self._cluster.processes.is_chief:
            self._run(session, self._sets[_SAVED], step)
        # By `run`, which ends with an error if a process is lost, while this would wait forever.
        while self._run(session, self._reads[_SAVED]) != step:
            time.sleep(POLL_SECONDS)

    def agreed(self, session: tf.Session, step: int, wanted: bool, signals: StopSignals) -> bool:
        """Returns whether all processes stop after this step.

        Processes are in the same step when they compute, as it needs all of them. When one of them
        decides, others may be done with this step, but not with the next.

        Args:
          session: the session of this process.
          step: the number of steps that are done.
          wanted: whether this process was asked to stop.
          signals: those that this process received; the one of another is noted there.
        """
        # Nobody ends the next step before all have begun it, so all that decide at once are at the
        # same step, and write the same number.
        last = self._run(session, self._reads[_LAST])
        if wanted and last == _NEVER:
            if signals.received is not None:  # first, so that whoever stops knows why
                self._run(session, self._sets[_SIGNAL], int(signals.received))
            self._run(session, self._sets[_LAST], step + 1)
        if step < last:
            return False
        if number := self._run(session, self._reads[_SIGNAL]):
            signals.note_of_other(number)
        return True

    def _run(self, session: tf.Session, fetches: Any, value: Optional[int] = None) -> Any:
        fed = None if value is None else {self._fed: value}
        return self._cluster.processes.run(session, fetches, fed)


def find_cluster(simd: bool, size: int) -> Optional[Cluster]:
    """Returns the cluster of this process; None if it is the only process.

    Args:
      simd: whether all processors run one program.
      size: the number of processors of the mesh.

    Raises:
      ValueError: the mesh can't be run in so many processes.
    """
    check_described(os.environ)
    running = processes()
    if running.count == 1:
        return None
    if not simd:
        raise ValueError(
            f"fit: there are {running.count} processes. Each computes for its own processors with "
            "fit(simd=True); for a mesh of devices that one process drives, train within "
            "estimator.run_cluster"
        )
    if size % running.count:
        raise ValueError(
            f"fit: the mesh has {size} processors, which {running.count} processes can't share "
            "equally. Make the size of the mesh a multiple of the number of processes"
        )
    per_process = size // running.count
    # One server for all runs, as its address is taken, and its number of devices fixed.
    if not _found:
        _found.append(Cluster(running, per_process))
    if _found[0].per_process != per_process:
        raise ValueError(
            "fit: the processes were started for meshes of "
            f"{_found[0].per_process * running.count} processors, and this one has {size}. Use "
            "meshes of one size in a program"
        )
    return _found[0]


@dataclasses.dataclass(frozen=True)
class Placing:
    """A mesh, its layout, its devices, and how programs are run on it.

    Attributes:
      shape: the Shape of the mesh.
      rules: the LayoutRules.
      devices: a device string for each processor.
      simd: whether all processors run one program.
      given: the mesh implementation of the user, or None.
      cluster: the processes that share the processors, or None.
      pjrt: whether it runs on devices of JAX.
      compiled: whether XLA compiles each step, for the one device that all processors have.
      stored: arguments of mesh implementations that say how variables are stored.
    """

    shape: mtf.Shape
    rules: LayoutRules
    devices: tuple[str, ...]
    simd: bool = False
    given: Optional[MeshImpl] = None
    cluster: Optional[Cluster] = None
    pjrt: bool = False
    compiled: bool = False
    stored: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make_impl(self) -> MeshImpl:
        """Returns the mesh implementation; on a SIMD mesh within a program."""
        if self.given is not None and not self.compiled:
            return self.given
        if self.pjrt:
            return mtf.GspmdMeshImpl(self.shape, self.rules, **self.stored)
        if self.simd or self.compiled:
            simd = SimdMeshImpl(self.shape, self.rules, **self.stored)
            if self.given is not None:
                simd.stored_layout = self.given.stored_layout
            return simd
        return PlacementMeshImpl(self.shape, self.rules, list(self.devices), **self.stored)

    def run(self, program: Callable[..., Any], inputs: Sequence[tf.Tensor]) -> Any:
        """Returns what a program returns, as tensors and operations of the tf graph.

        Args:
          program: a function of the inputs that makes a Lowering.
          inputs: tf.Tensors.
        """
        if self.pjrt:
            return pjrt().in_session(program, inputs)
        if self.compiled:  # on one device, all of whose processors are merged
            return replicate(program, inputs, devices=self.devices[:1], jit_compile=True)
        if self.simd:
            # Before the program is traced, with which TensorFlow fixes the threads of the process.
            if self.cluster is None:
                set_threads(local_cpus(self.devices), self.shape, self.rules)
            local = None if self.cluster is None else self.cluster.local
            return replicate(program, inputs, devices=list(self.devices), local=local)
        return program(*inputs)

    def session(self, graph: tf.Graph) -> tf.Session:
        """Returns a session that has the devices."""
        if self.cluster is not None:
            return self.cluster.session(graph)
        # Two processors of a SIMD program that soft placement put on one device would wait for each
        # other forever.
        config = tf.ConfigProto(allow_soft_placement=not self.simd)
        rules = None if self.pjrt else self.rules
        # As many operations at a time as this layout wants; several runs may be in one process.
        set_cpus(config, local_cpus(self.devices), self.shape, rules, own_threads=True)
        return tf.Session(graph=graph, config=config)

    def parts_of_batch(self, batch_dim: mtf.Dimension) -> int:
        """Returns the number that the size of the batch has to be a multiple of."""
        # Rows that are left over may be there where the layout allows uneven sizes.
        if batch_dim.name in self.rules.uneven:
            return 1
        return mtf.tensor_dim_to_mesh_dim_size(self.rules, self.shape, batch_dim)

    def without(self, name: str) -> Placing:
        """Returns the same mesh, with a layout that does not split a dimension."""
        return dataclasses.replace(self, rules=self.rules.without(name))

    def part(self, batch_dim: mtf.Dimension) -> Part:
        """Returns the rows of each batch that this process reads: those of its processors."""
        # Where the batch is not split, each processor has all of it, and each process reads all.
        axis = self.rules.mesh_axis(batch_dim, self.shape)
        if self.cluster is None or axis is None:
            return Part()
        if batch_dim.size % self.shape[axis].size:
            return Part()  # its last parts are shorter: each process reads all, and keeps its own
        parts, per_process = self.shape[axis].size, self.cluster.per_process
        # For each processor, the number of the part of the batch that it computes with.
        along = [coordinate_of(self.shape, n, axis) for n in range(self.shape.size)]
        spans = [along[i : i + per_process] for i in range(0, len(along), per_process)]
        # The smallest parts that hold the rows of each process. All have parts of one size: what
        # some rows are a part of is one batch, whoever reads them.
        width = next(
            w
            for w in range(1, parts + 1)
            if parts % w == 0 and all(min(span) // w == max(span) // w for span in spans)
        )
        return Part(along[self.cluster.local[0]] // width, parts // width)


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """What the user says about the mesh.

    Attributes:
      mesh_shape: the shape of the mesh.
      layout: its layout rules.
      devices: a device for each processor, or None.
      simd: whether all processors run one program.
      mesh_impl: a name of MESH_IMPLS, a PlacementMeshImpl in place of the others, or None.
      variable_layout: see PlacementMeshImpl.
      zero: likewise.
      zero_axis: likewise.
      uneven: likewise.
      jit_compile: whether XLA compiles steps, or "auto".
    """

    mesh_shape: ShapeLike = "all:1"
    layout: LayoutLike = ""
    devices: Optional[Sequence[str]] = None
    simd: bool = False
    mesh_impl: Union[MeshImpl, str, None] = None
    variable_layout: Optional[LayoutLike] = None
    zero: Optional[int] = None
    zero_axis: Optional[str] = None
    uneven: bool = False
    jit_compile: Union[bool, str] = False

    @property
    def rules(self) -> LayoutRules:
        """The layout rules."""
        rules = convert_to_layout_rules(self.layout)
        return rules.allowing_uneven() if self.uneven else rules

    @property
    def stored(self) -> dict[str, Any]:
        """How variables are stored, as arguments of mesh implementations."""
        named = {n: getattr(self, n) for n in ("variable_layout", "zero", "zero_axis")}
        return {name: value for name, value in named.items() if value is not None}


def placing_of(given: MeshOptions) -> Placing:
    """Returns the Placing that the arguments of `fit` describe.

    Raises:
      ValueError: there are too few devices, some are not there, or `mesh_impl` is given besides the
        others.
      TypeError: `mesh_impl` is no mesh implementation.
    """
    mesh_impl = given.mesh_impl
    if isinstance(mesh_impl, str):
        return _placing_of_name(given, mesh_impl)
    if mesh_impl is not None:
        if given != MeshOptions(mesh_impl=mesh_impl, jit_compile=given.jit_compile):
            raise ValueError(
                "fit: mesh_impl is given besides mesh_shape, layout, devices or simd, or how "
                "variables are stored, all of which it takes the place of: leave them out"
            )
        if isinstance(mesh_impl, SimdMeshImpl):
            raise ValueError(
                "fit: a SimdMeshImpl belongs to one program: give fit(mesh_shape=..., layout=..., "
                "simd=True), which makes it within the program"
            )
        if not isinstance(mesh_impl, MeshImpl):
            raise TypeError(
                f"fit: mesh_impl should be a mesh implementation, but is {mesh_impl!r}. Give "
                "mtf.placement_mesh_impl.PlacementMeshImpl(...), or mesh_shape and layout"
            )
        # Each process would train a model of its own; within run_cluster, one of them runs this.
        if not in_cluster():
            find_cluster(False, mesh_impl.shape.size)
        own = tuple(getattr(mesh_impl, "devices", ()))
        _check_exist(own, "fit")
        return Placing(mesh_impl.shape, mesh_impl.layout_rules, own, False, mesh_impl)
    shape, rules = mtf.convert_to_shape(given.mesh_shape), given.rules
    cluster = find_cluster(given.simd, shape.size)
    if cluster is not None:
        devices = tuple(cluster.processes.devices(per_process=cluster.per_process))
    else:
        devices = devices_of(shape, given.devices, given.simd)
    return Placing(shape, rules, devices, given.simd, cluster=cluster, stored=given.stored)


def _placing_of_name(given: MeshOptions, name: str) -> Placing:
    """Returns the Placing for the name of a mesh implementation."""
    if name not in MESH_IMPLS or (given.simd and name != "simd"):
        raise ValueError(
            f"fit: mesh_impl={name!r}{' with simd=True' if given.simd else ''}: it is one of "
            f"{', '.join(map(repr, MESH_IMPLS))}, or a mesh implementation"
        )
    if name != "pjrt":
        return placing_of(dataclasses.replace(given, simd=name == "simd", mesh_impl=None))
    check_pjrt("fit", given.devices)
    shape, rules = mtf.convert_to_shape(given.mesh_shape), given.rules
    return Placing(shape, rules, ("",) * shape.size, pjrt=True, stored=given.stored)


def check_pjrt(what: str, devices: Optional[Sequence[str]]) -> None:
    """Checks that programs can run on devices of JAX.

    Args:
      what: the function that was called, for errors.
      devices: the devices that it was given, or None.

    Raises:
      ImportError: JAX is not installed.
      ValueError: devices are given, or JAX does not connect the processes.
    """
    pjrt()
    if devices is not None:
        raise ValueError(
            f"{what}: devices are those of TensorFlow, but mesh_impl='pjrt' runs on the first of "
            "jax.devices(). Leave them out"
        )
    check_described(os.environ)
    if processes().count > 1 and not is_pjrt():
        raise ValueError(
            f"{what}: there are {processes().count} processes, and mesh_impl='pjrt' runs on the "
            "devices of all if JAX connects them: start them with python -m mesh_tensorflow.launch "
            "--runtime pjrt, or set MTF_RUNTIME=pjrt in each"
        )


def _check_exist(devices: Sequence[str], what: str) -> None:
    """Raises ValueError if devices are not there, unless soft placement has been asked for.

    A run would take hours on other devices before one saw it.
    """
    soft = soft_placement(default=False)
    check_devices_exist(devices, soft, in_session=True, who=f"{what}: devices")


def devices_of(
    shape: mtf.Shape, devices: Optional[Sequence[str]], simd: bool = False, what: str = "fit"
) -> tuple[str, ...]:
    """Returns a device for each processor.

    Args:
      shape: the shape of the mesh.
      devices: the devices that the user named, or None.
      simd: whether all processors run one program, in a session.
      what: the function that was called, for errors.

    Raises:
      ValueError: there are other devices than those, or too few.
    """
    if devices is not None:
        check_devices(devices, shape)
        _check_exist(devices, what)
        return tuple(devices)
    available = default_devices()
    if len(available) >= shape.size:
        return tuple(available[: shape.size])
    if any("GPU" in device for device in available):
        raise ValueError(
            f"{what}: the mesh [{dims_text(shape)}] has {shape.size} processors, but there are "
            f"{len(available)} GPUs. Name the devices, or make the mesh smaller"
        )
    if simd:  # the session has as many logical CPUs
        return tuple(f"/device:CPU:{i}" for i in range(shape.size))
    # Any mesh can be tried on one CPU: processors on one device are merged.
    return ("/device:CPU:0",) * shape.size


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the programs of an engine have in common, whatever batch each of them is for.

    Attributes:
      model: the model.
      placing: where programs run.
      features: the features of a batch.
      seed: the seed of initial values and of random operations; None for another one in each run.
      container: that of variables on servers of several processes, which outlive a session.
    """

    model: Model
    placing: Placing
    features: Features
    seed: Optional[int]
    container: str = ""


# -- a layout that is chosen: steps of the user's own program under the best candidates


@dataclasses.dataclass(frozen=True)
class Choosing:
    """Chooses the layout of a run, and whether XLA compiles its steps, by running some.

    Attributes:
      auto: what the user asks for.
      layout: whether the layout is chosen.
      compiled: whether it is chosen whether XLA compiles steps.
      show: whether the user is told of it.
    """

    auto: Auto
    layout: bool
    compiled: bool
    show: bool

    def placing(
        self,
        setup: Setup,
        batch: Batch,
        engine_of: Callable[[Setup, Callable[[], object]], SessionEngine],
    ) -> Placing:
        """Returns where the run is placed, so that its steps are the fastest.

        Args:
          setup: that of the training; without a layout, if that is chosen.
          batch: a batch, which all steps that are timed are of.
          engine_of: returns a new engine for a Setup, which calls a function before it runs what it
            has built.
        """
        placing, cluster = setup.placing, setup.placing.cluster

        def when_built() -> None:
            if cluster is not None:
                # One that could not build it says so here; the others would wait for it in a step.
                cluster.exchange(None)

        @contextlib.contextmanager
        def run(tried: Placing) -> Iterator[Callable[[], Any]]:
            engine = engine_of(dataclasses.replace(setup, placing=tried), when_built)
            try:
                engine.prepare(batch, None, None)
                yield lambda: engine.train(batch)
                engine.forget()
            finally:
                engine.close()

        with contextlib.nullcontext() if cluster is None else cluster.together():
            graph = _graph_of(setup, batch)
            machine = Processors(
                placing.shape, placing.devices, placing.simd, placing.pjrt, cluster
            )
            return self._chosen(machine, placing, graph, run)

    def _chosen(
        self,
        machine: Processors,
        placing: Placing,
        graph: mtf.Graph,
        run: Callable[[Placing], contextlib.AbstractContextManager[Callable[[], Any]]],
    ) -> Placing:
        """Returns where the run is placed; see `placing`."""
        if self.layout:
            stored = stored_layout(placing.shape, **placing.stored) if placing.stored else None
            # Under a name of its own: `placing` is another one below, when layouts have been tried.
            start = placing
            choice = choose_on(
                machine,
                graph,
                self.auto,
                stored,
                lambda layout: run(_with_layout(start, layout)),
                self.show,
            )
            placing = _with_layout(placing, choice.layout)
        # After the layout, since what XLA saves depends on how the program is split.
        if self.compiled and compiling_pays(
            machine,
            graph,
            self.auto,
            lambda compiled: run(dataclasses.replace(placing, compiled=compiled)),
            self.show,
        ):
            placing = dataclasses.replace(placing, compiled=True)
        return placing


def _with_layout(placing: Placing, layout: str) -> Placing:
    return dataclasses.replace(placing, rules=convert_to_layout_rules(layout))


def compiled_or_not(placing: Placing, jit_compile: Union[bool, str]) -> tuple[Placing, bool]:
    """Returns where a run is placed whose steps XLA compiles, and whether that is to be chosen.

    Args:
      placing: where it is placed without XLA.
      jit_compile: the argument of `fit`.

    Raises:
      ValueError: `jit_compile` is something else, or XLA cannot compile a step there.
    """
    if not (isinstance(jit_compile, bool) or jit_compile == "auto"):
        raise ValueError(
            f'fit: jit_compile is True, False or "auto", but is {jit_compile!r}. "auto" times a '
            "few steps both ways"
        )
    why = ""
    if placing.pjrt:
        why = 'mesh_impl="pjrt" has every step compiled by XLA'
    elif not getattr(placing.given, "merges_devices", placing.given is None):
        name = type(placing.given).__name__
        why = f"mesh_impl is of the class {name}, whose methods a compiled step would not call"
    elif placing.cluster is not None or len(set(placing.devices)) > 1:
        why = (
            f"XLA compiles a step for one device, but the mesh [{dims_text(placing.shape)}] has "
            f'{len(set(placing.devices))}: mesh_impl="pjrt" compiles for several'
        )
    if jit_compile is True and why:
        raise ValueError(f"fit: jit_compile=True: {why}")
    if why or not jit_compile:
        return placing, False
    # SIMD on one device is one program of one processor, as the compiled one is.
    placing = dataclasses.replace(placing, compiled=jit_compile is True)
    return placing, jit_compile == "auto"


def _graph_of(setup: Setup, batch: Batch) -> mtf.Graph:
    """Returns the program of a step, which is the same for each layout."""
    with tf.Graph().as_default():
        step = tf.train.create_global_step()
        tensors = [tf.placeholder(array.dtype, array.shape) for array in batch]
        one = PlacementMeshImpl("all:1", "", [""])
        lowered, _ = setup.model.build(
            setup.features, tensors, lambda: one, step, step.read_value(), True
        )
    return lowered.graph

"""Programs of sessions and their variables, on the devices of this process, or of all.

Only the first process has a session. It has the others define programs, run them and save their
variables, one message after another, in an order that is the same in all, so that all take part in
the collectives of a program. No process can read the whole of an array that is split over the
devices of several, so the first one asks the others for their parts.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import json
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import jax
import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._calls import within
from mesh_tensorflow._core.layout import TensorLayout
from mesh_tensorflow._core.shape import Dimension, Shape
from mesh_tensorflow._mesh.variables.checkpoint_files import (
    Faults,
    ShardedVariable,
    faults,
    reading,
    write_parts,
)
from mesh_tensorflow._processes.peers import (
    Peer,
    PeerLostError,
    Watch,
    follow,
    lead,
    place_of,
    wait_for,
)
from mesh_tensorflow._processes.processes import Processes, processes, several_of_jax
from mesh_tensorflow._stop_signals import StopSignals, deferred, tell_of_other
from mesh_tensorflow.pjrt._devices import (
    AnyMesh,
    all_dtypes,
    check_kept,
    described,
    device_kind,
    device_mesh,
    driving,
    join,
    placed,
    process_count,
    run_step,
    sharding,
)
from mesh_tensorflow.pjrt._function import CompiledProgram
from mesh_tensorflow.pjrt._store import own_specs, parts_to_write, read_array
from mesh_tensorflow.pjrt._trace import Trace, imported

# A TensorLayout as JSON can say it; empty if each device has all of a value.
Layout = Sequence[Union[int, Sequence[int], None]]


@dataclasses.dataclass(frozen=True)
class VariableOfProgram:
    """A variable of a program.

    Attributes:
      placeholder: the name of its value in the program; None if the program does not read it.
      sizes: its shape.
      dtype_name: the name of its dtype.
      axes: its layout.
    """

    placeholder: Optional[str]
    sizes: Sequence[int]
    dtype_name: str
    axes: Layout

    @property
    def dtype(self) -> tf.DType:
        """Its dtype."""
        return tf.as_dtype(self.dtype_name)


@dataclasses.dataclass(frozen=True)
class Description:
    """A program, as one process tells the others.

    Attributes:
      mesh: pairs of the name and the size of each mesh dimension.
      devices: the numbers of its devices; None for the first of all.
      arguments: the names of its arguments.
      layouts: the layout of each of them.
      variables: its variables, by name.
      fetches: the names of its results, and then of new values of variables.
      result_layouts: the layout of each result.
      assigned: the names of the variables with new values.
      is_checked: whether it has checks for NaNs, for which TensorFlow runs it, and not XLA.
    """

    mesh: Sequence[tuple[str, int]]
    devices: Optional[Sequence[int]]
    arguments: Sequence[str]
    layouts: Sequence[Layout]
    variables: Mapping[str, VariableOfProgram]
    fetches: Sequence[str]
    result_layouts: Sequence[Layout]
    assigned: Sequence[str]
    is_checked: bool

    def plain(self) -> dict[str, Any]:
        """Returns it as what JSON can say."""
        return dataclasses.asdict(self)

    @staticmethod
    def of_plain(values: dict[str, Any]) -> Description:
        """Returns the Description that `plain` returned the values of."""
        variables = {n: VariableOfProgram(**v) for n, v in values["variables"].items()}
        return Description(**{**values, "variables": variables})


class _CompiledProgram:
    """A program, its compiled forms and its variables."""

    def __init__(self, description: Description, graph_def: tf.GraphDef):
        self.description, self._graph_def = description, graph_def
        self.arrays: dict[str, jax.Array] = {}
        shape = Shape([Dimension(*d) for d in description.mesh])
        self._mesh: AnyMesh = device_mesh(shape, _devices(description.devices))
        self.variables = {
            name: described(self._mesh, v.sizes, v.dtype, TensorLayout(v.axes))
            for name, v in description.variables.items()
        }
        self._compiled: dict[Any, CompiledProgram] = {}

    def run(self, arrays: Sequence[np.ndarray]) -> list[jax.Array]:
        # XLA compiles for fixed shapes; the last batch of an epoch may be smaller.
        key = tuple(a.shape for a in arrays)
        if key not in self._compiled:
            self._compiled[key] = CompiledProgram(self._trace(arrays))
        program = self._compiled[key]
        with all_dtypes():
            arguments = [placed(a, x.sharding) for a, x in zip(arrays, program.trace.arguments)]
            kept = [self.current(name) for name in program.kept]
            assigned = [self.current(name) for name in program.assigned]
            # Between the two, there are variables whose memory the step was given.
            with deferred():
                # No keys: the session draws them, and gives them as arguments.
                results, new = run_step(program.step, arguments, [], kept, assigned)
                self.arrays.update(zip(program.assigned, new))
        return results

    def current(self, name: str) -> jax.Array:
        if name not in self.arrays:
            raise ValueError(
                f"variable {name!r} has no value: run tf.global_variables_initializer() or restore "
                "a checkpoint, then lowering.copy_masters_to_slices()"
            )
        array = self.arrays[name]
        check_kept(name, array)
        return array

    def assign(self, name: str, value: np.ndarray) -> None:
        with all_dtypes():
            self.arrays[name] = placed(value, self.variables[name].sharding)

    def _trace(self, arrays: Sequence[np.ndarray]) -> Trace:
        description = self.description
        # What is assigned to and not read has no placeholder, but memory to give away.
        own = {
            name: v.placeholder or ""
            for name, v in description.variables.items()
            if v.placeholder is not None or name in description.assigned
        }
        # In several processes, each device has all of a result, so that any can read it.
        several = process_count() > 1
        return Trace(
            imported(self._graph_def, [*description.arguments, *own.values()], description.fetches),
            [
                described(self._mesh, a.shape, tf.as_dtype(a.dtype), TensorLayout(axes))
                for a, axes in zip(arrays, description.layouts)
            ],
            [],
            [
                sharding(self._mesh, None if several else TensorLayout(axes))
                for axes in description.result_layouts
            ],
            {name: self.variables[name] for name in own},
            description.assigned,
            is_checked=description.is_checked,
        )


def _devices(numbers: Optional[Sequence[int]]) -> Optional[list[Any]]:
    """Returns devices by their numbers."""
    if numbers is None:
        return None
    by_id = {device.id: device for device in jax.devices()}
    return [by_id[number] for number in numbers]


def _own_parts(array: jax.Array) -> list[tuple[list[int], np.ndarray]]:
    """Returns the first index and the value of each part that this process has; copies once.

    Args:
      array: an array; what is there in several processes counts as that of the first.
    """
    return [
        # Where a dimension is whole, JAX gives the range slice(None), without a start.
        ([part.start or 0 for part in shard.index], np.asarray(shard.data))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def _joined(array: jax.Array, parts: Iterable[tuple[Sequence[int], np.ndarray]]) -> np.ndarray:
    """Returns the whole value of an array.

    Args:
      array: the array.
      parts: the first index and the value of each part, of all processes.
    """
    # Without initial values: the first copies of all parts make the whole.
    whole = np.empty(array.shape, array.dtype)
    for begin, value in parts:
        place = tuple(slice(b, b + n) for b, n in zip(begin, value.shape))
        whole[place] = value
    return whole


# -- what a process does


class Message(NamedTuple):
    """What processes do, or what one answers.

    Attributes:
      call: what is asked for or answered.
      values: what JSON can say of it.
      arrays: the arrays that belong to it.
    """

    call: str
    values: Any = None
    arrays: Sequence[np.ndarray] = ()


Answer = tuple[Any, Sequence[Any]]  # the values and the arrays of a Message
_NOTHING: Answer = (None, ())

# The name in the file, the number of the program, the name there, and the name of the dtype in the
# file; what JSON can say.
Saved = tuple[str, int, str, str]


class Executor:
    """Programs on the devices of this process, by number, with their variables."""

    def __init__(self) -> None:
        """Begins without programs."""
        self.programs: dict[int, _CompiledProgram] = {}

    def do(self, message: Message) -> Answer:
        """Does what a message says.

        Args:
          message: one of CALLS, with what it takes.
        """
        return CALLS[message.call](self, *message.values, *message.arrays)

    def add(self, number: int, description: Description, graph_def: tf.GraphDef) -> Answer:
        """Adds a program.

        Args:
          number: its number.
          description: what it is.
          graph_def: its operations.
        """
        self.programs[number] = _CompiledProgram(description, graph_def)
        return _NOTHING

    def _define(self, number: int, described: dict[str, Any], data: np.ndarray) -> Answer:
        graph_def = tf.GraphDef.FromString(data.tobytes())
        return self.add(number, Description.of_plain(described), graph_def)

    def _forget(self, number: int) -> Answer:
        self.programs.pop(number, None)
        return _NOTHING

    def _run(self, number: int, *arrays: np.ndarray) -> Answer:
        return None, self.programs[number].run(arrays)

    def _assign(self, number: int, name: str, value: np.ndarray) -> Answer:
        self.programs[number].assign(name, value)
        return _NOTHING

    def _kind(self, mesh: Sequence[tuple[str, int]]) -> Answer:
        return device_kind(Shape([Dimension(*d) for d in mesh])), ()

    def _read(self, number: int, name: str) -> Answer:
        parts = _own_parts(self.programs[number].current(name))
        return [begin for begin, _ in parts], [value for _, value in parts]

    def _write(self, prefix: str, variables: Sequence[Saved]) -> Answer:
        parts = [
            part
            for name, number, key, dtype in variables
            for part in parts_to_write(self.programs[number].current(key), name, tf.as_dtype(dtype))
        ]
        # All that this process has may be copies of parts that others write.
        if not parts:
            return _NOTHING
        # A file for each process, as no two may write to one; the first process joins them.
        path = f"{prefix}-{jax.process_index()}-of-{jax.process_count()}"
        write_parts(path, parts)
        return path, ()

    def _restore(self, path: str, variables: Sequence[Saved]) -> Answer:
        with reading(path) as reader:
            for name, number, key, dtype in variables:
                program = self.programs[number]
                program.arrays[key] = read_array(
                    reader, name, tf.as_dtype(dtype), program.variables[key]
                )
        return _NOTHING

    def _faults(self, path: str, variables: Sequence[Saved]) -> Answer:
        expected = {
            name: (tf.as_dtype(dtype), own_specs(self.programs[number].variables[key]))
            for name, number, key, dtype in variables
        }
        return faults(path, expected), ()


# By the name of what is called: what each process does with the values and arrays of a message.
CALLS: dict[str, Callable[..., Answer]] = {
    "define": Executor._define,  # a program
    "forget": Executor._forget,  # a program and its variables
    "run": Executor._run,  # a step
    "kind": Executor._kind,  # of the devices of a mesh
    "assign": Executor._assign,  # the whole value of a variable
    "read": Executor._read,  # a variable: its parts that are here, copies once over all processes
    "write": Executor._write,  # these parts of variables, to a file; answers its path, or None
    "restore": Executor._restore,  # variables, from a checkpoint
    "faults": Executor._faults,  # of the data of these parts in a checkpoint
}


# -- what all do


class Programs:
    """The programs of sessions, by number; in several processes, all do what is called here."""

    def __init__(self, peers: Optional[PeerProcesses] = None):
        """Begins without programs.

        Args:
          peers: the other processes, or None.
        """
        self._peers, self._executor = peers, Executor()
        # One thing at a time, so that all processes do the same in the same order.
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        # Finalizers add to it, in any thread and within any call, where they could send no message.
        self._unused: collections.deque[int] = collections.deque()

    def _do(
        self, message: Message, own: Optional[Callable[[], Answer]] = None
    ) -> tuple[Answer, list[Message]]:
        """Has all processes do something; returns this one's answer, and those of the others."""
        with self._lock:
            while self._unused:
                # In all processes at the same place in the order of messages.
                number = self._unused.popleft()
                self._do_now(Message("forget", [number]))
            return self._do_now(message, own)

    def _do_now(
        self, message: Message, own: Optional[Callable[[], Answer]] = None
    ) -> tuple[Answer, list[Message]]:
        own = own or functools.partial(self._executor.do, message)
        return (own(), []) if self._peers is None else self._peers.do(message, own)

    def define(self, description: Description, graph_def: tf.GraphDef) -> int:
        """Adds a program; returns its number.

        Args:
          description: what it is.
          graph_def: its operations.
        """
        # Given by the first process, so that programs have the same numbers in all.
        number = next(self._numbers)
        data = (
            [] if self._peers is None else [np.frombuffer(graph_def.SerializeToString(), "uint8")]
        )
        message = Message("define", [number, description.plain()], data)
        # This process has what the others read from the message.
        self._do(message, lambda: self._executor.add(number, description, graph_def))
        return number

    def device_kind(self, mesh_shape: Shape) -> str:
        """Returns what the devices of a mesh are called by their maker; "" for CPUs."""
        # In all processes: JAX makes its devices when it is asked first, and waits there for what
        # the other processes have.
        (kind, _), _ = self._do(Message("kind", [[(d.name, d.size) for d in mesh_shape]]))
        return kind

    def forget(self, number: int) -> None:
        """Removes a program before the next call; may be called at any time, in any thread."""
        self._unused.append(number)

    def run(self, number: int, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Does a step of a program; returns its results."""
        (_, results), _ = self._do(Message("run", [number], arrays))
        return [np.asarray(y) for y in results]

    def assign(self, number: int, name: str, value: np.ndarray) -> None:
        """Sets a variable."""
        self._do(Message("assign", [number, name], [value]))

    def value(self, number: int, name: str) -> np.ndarray:
        """Returns the whole value of a variable."""
        with self._lock:
            # The lock is held until all parts are here: a step of another thread would take the
            # array's memory.
            array = self._executor.programs[number].current(name)
            # Then this process has all of it, and no other is asked.
            if array.is_fully_addressable or array.is_fully_replicated:
                return np.asarray(array)
            own, answers = self._do(Message("read", [number, name]))
            all_of = [own, *((a.values, a.arrays) for a in answers)]
            return _joined(array, [part for begins, parts in all_of for part in zip(begins, parts)])

    # -- checkpoints of several processes, as `checkpoint_files.ShardHolders` says

    @property
    def are_apart(self) -> bool:
        """Whether other processes have parts of the variables."""
        return self._peers is not None

    def write(self, prefix: str, variables: Mapping[str, ShardedVariable]) -> list[str]:
        """Has each process write its parts; returns the paths of what they wrote.

        Args:
          prefix: how these paths begin.
          variables: the variables, by name in files.
        """
        paths = self._do_with_files("write", prefix, variables)
        return [path for path in paths if path is not None]

    def restore(self, path: str, variables: Mapping[str, ShardedVariable]) -> None:
        """Has each process read its parts of the variables, and set them.

        Args:
          path: the path of a checkpoint.
          variables: the variables, by name in files.
        """
        self._do_with_files("restore", path, variables)

    def faults(self, path: str, variables: Mapping[str, ShardedVariable]) -> Faults:
        """Returns what is wrong with the data of variables, which all processes read in parts.

        Args:
          path: the path of a checkpoint.
          variables: the variables, by name in files.
        """
        of_processes = [
            Faults(*values) for values in self._do_with_files("faults", path, variables)
        ]
        # In the order of the answers: that of this process, then those of the others.
        peers = [] if self._peers is None else [self._peers.me, *self._peers.peers]
        reasons = [f"{peer}: {f.why}" for peer, f in zip(peers, of_processes) if f.damaged]
        return Faults(
            [name for f in of_processes for name in f.damaged],
            reasons[0] if reasons else of_processes[0].why,
            [name for f in of_processes for name in f.not_numbers],
            [name for f in of_processes for name in f.infinite],
        )

    def _do_with_files(
        self, call: str, path: str, variables: Mapping[str, ShardedVariable]
    ) -> list[Any]:
        """Has all processes do something with files; returns the values that they answer.

        An error names the process.
        """
        saved = [(name, v.number, v.name, v.dtype.name) for name, v in variables.items()]
        message = Message(call, [path, saved])

        def named() -> Answer:
            try:
                return self._executor.do(message)
            # As failures of the other processes are told, with the name of the process.
            except OSError as error:
                if self._peers is None:
                    raise
                raise RuntimeError(f"{self._peers.me} failed: OSError: {error}") from error

        (own, _), answers = self._do(message, named)
        return [own, *(answer.values for answer in answers)]

    def array(self, number: int, name: str) -> Any:
        """Returns a variable as an array of JAX, or None if it has no value yet."""
        return self._executor.programs[number].arrays.get(name)


_alone = Programs()
_current: contextvars.ContextVar[Programs] = contextvars.ContextVar("programs", default=_alone)


def current_programs() -> Programs:
    """Returns the programs to which a new one is added."""
    return _current.get()


def device_kind_of(mesh_shape: Shape) -> str:
    """Returns what the devices of a mesh are called by their maker; "" for CPUs."""
    return current_programs().device_kind(mesh_shape)


def programs_over(peers: PeerProcesses) -> contextlib.AbstractContextManager[None]:
    """Context in which new programs run in all processes."""
    # A new set, as other processes do not know the programs that were made before `main`.
    return within(_current, Programs(peers))


# -- run_in_chief: a program that the first process runs, on the devices of all processes


_START_SECS = 1800.0  # for all processes to be started
_FAILED, _SIGNAL, _DONE = "failed", "signal", "done"  # messages beside those of CALLS


Shared = tuple[Any, Sequence[np.ndarray]]  # what JSON can say, and arrays


def run_in_chief(main: Callable[[], Any], share: Optional[Callable[[Any], Shared]] = None) -> Any:
    """Runs a function in the first process, with the devices of all processes.

    Each process of `python -m mesh_tensorflow.launch --runtime pjrt` calls it. Programs of
    `mtf.pjrt.in_session` within `main` run on the devices of all; what else `main` does, such as
    to read data, to write checkpoints and to report, is done once. The other processes do what the
    first one tells them, until `main` returns. `mesh_tensorflow.estimator.run_cluster`,
    `mesh_tensorflow.train.fit` and the programs of `mesh_tensorflow.transformer` call it. With one
    process, or within another `main`, it calls `main`.

    Args:
      main: a function without arguments.
      share: takes the result of `main`, and returns a pair that the other processes get: values
        that JSON can say, and a list of arrays. If None, they get None and an empty list.

    Returns:
      The result of `main`; in the other processes, the pair.

    Raises:
      PeerLostError: another process ended, or was not started.
      RuntimeError: in the other processes, if the program of the first failed; or another thread
        is within `main`.
    """
    if not several_of_jax():
        return main()
    if driving():
        # The programs of `main` are in a context variable, which other threads do not see.
        if current_programs() is _alone:
            raise RuntimeError(
                "run_in_chief: another thread of this process tells the other processes what to "
                "do, and they do one thing at a time. Call it in the thread that called `main`, "
                "one program after the other"
            )
        return main()
    mine = processes()
    driving(True)
    try:
        return _lead(mine, main, share) if mine.is_chief else _follow(mine)
    finally:
        driving(False)


# -- the first process


def _lead(
    mine: Processes, main: Callable[[], Any], share: Optional[Callable[[Any], Shared]]
) -> Any:
    me, *others = mine.peers
    with contextlib.ExitStack() as stack:
        connections = _connections(others, me, stack)
        # After the connections: the others join only once they have accepted one, and JAX waits for
        # them here until they do.
        join()
        peers = PeerProcesses(connections, me)
        shared: list[Shared] = [(None, ())]

        def program() -> Any:
            with programs_over(peers):
                result = main()
            if share is not None:
                shared[0] = share(result)
            return result

        def tell(why: Optional[str]) -> None:
            peers.end(Message(_DONE, *shared[0]) if why is None else Message(_FAILED, why))

        return lead(program, peers.watch, tell)


def _connections(
    others: Sequence[Peer], me: Peer, stack: contextlib.ExitStack
) -> list[tuple[Peer, socket.socket]]:
    """Returns connections to processes, which may not have been started yet."""
    connections: dict[Peer, socket.socket] = {}

    def connect(peer: Peer) -> bool:
        try:
            connections[peer] = socket.create_connection(
                place_of(peer.address), timeout=_START_SECS
            )
        except OSError:
            return False
        connected(stack.enter_context(connections[peer]))
        return True

    wait_for(others, me, _START_SECS, connect)
    return [(peer, connections[peer]) for peer in others]


# -- the other processes


def _follow(mine: Processes) -> Shared:
    chief, me = mine.peers[0], mine.peers[mine.index]
    with socket.create_server(place_of(me.address)) as server:
        server.settimeout(_START_SECS)
        try:
            connection, _ = server.accept()
        except TimeoutError as error:
            raise PeerLostError(
                f"{me}: {chief} has not connected. Start all processes, with the same addresses",
                chief,
            ) from error

    def serve(signals: StopSignals) -> tuple[Optional[str], Shared]:
        # As in `_lead`, after the connection: JAX waits here for all, who have been started by now.
        join()
        watch = watch_over([(chief, connected(connection))], me)
        try:
            news = _serve(connection, watch, chief, signals)
        finally:
            watch.stop()
        return news.values if news.call == _FAILED else None, (news.values, news.arrays)

    with connection:
        return follow(me, chief, serve)


def _serve(connection: socket.socket, watch: Watch, chief: Peer, signals: StopSignals) -> Message:
    """Does what the chief says, and tells it of a signal; returns what it says at the end."""
    executor = Executor()
    while True:
        try:
            message = receive(connection)
            if message.call not in CALLS:
                return message
            answer = _answered(executor, message)
            if (number := signals.to_tell()) is not None:
                # Before the answer, since the chief reads no message but while it waits for one.
                send(connection, Message(_SIGNAL, int(number)))
            send(connection, answer)
        except (EOFError, OSError):  # OSError: a host that cannot be reached, too
            watch.has_lost(chief)


def _answered(executor: Executor, message: Message) -> Message:
    """Does what a message says, and returns the answer."""
    try:
        values, arrays = executor.do(message)
    except Exception as error:
        # The chief raises it, unless it has the same error itself.
        return Message(_FAILED, f"{type(error).__name__}: {error}")
    # The results of a step are left: each device has all of them, so the chief gives the session
    # its own.
    return Message(message.call, values, () if message.call == "run" else arrays)


# -- the other processes, as the chief sees them


class PeerProcesses:
    """The other processes, as the chief sees them.

    Attributes:
      watch: the Watch of them.
      me: this process.
      peers: the others.
    """

    def __init__(self, others: Sequence[tuple[Peer, socket.socket]], me: Peer):
        """Creates a PeerProcesses.

        Args:
          others: each other process, and a connection to it.
          me: this process.
        """
        self._others, self.me = list(others), me
        self._broken_off: Optional[str] = None  # the message whose answers were not taken
        self.peers = [peer for peer, _ in self._others]
        self.watch = watch_over(self._others, me)

    def do(self, message: Message, own: Callable[[], Any]) -> tuple[Any, list[Message]]:
        """Has all processes do something, this one as well.

        Args:
          message: what the others do.
          own: does it in this process.

        Returns:
          What `own` returns, and the answers.

        Raises:
          PeerLostError: a process is lost.
          RuntimeError: another process could not do it; or a second Ctrl-C has broken off an
            earlier message.
        """
        if self._broken_off is not None:
            self.watch.check()
            raise RuntimeError(
                f"the message {self._broken_off!r} to the other processes was broken off, so that "
                "they are not where this one is. Start all processes again, from a checkpoint"
            )
        signals: list[signal.Signals] = []
        try:
            # As a whole: Ctrl-C in between would leave answers, for the next message to take.
            with deferred():
                result, answers = self._finish_call(message, own, signals)
        finally:
            for number in signals:
                tell_of_other(number)
        for (peer, _), answer in zip(self._others, answers):
            if answer.call == _FAILED:
                raise RuntimeError(f"{peer} failed: {answer.values}")
        return result, answers

    def _finish_call(
        self, message: Message, own: Callable[[], Any], signals: list[signal.Signals]
    ) -> tuple[Any, list[Message]]:
        self._broken_off = message.call
        # To the others first: `own` may take part in collectives, in which it would wait for them.
        self._on_each_peer(lambda connection: send(connection, message))
        error: Optional[Exception] = None
        result = None
        try:
            result = own()
        except Exception as found:
            error = found
        # All answers are taken, also after an error: one that stayed would be taken for that of the
        # next message. They have the same error, or a process is lost.
        answers = self._on_each_peer(lambda connection: _answer(connection, signals))
        self._broken_off = None
        if error is not None:
            raise error
        return result, answers

    def _on_each_peer(self, call: Callable[[socket.socket], Any]) -> list[Any]:
        results = []
        for peer, connection in self._others:
            try:
                results.append(call(connection))
            except (EOFError, OSError):
                self.watch.has_lost(peer)
        return results

    def end(self, news: Message) -> None:
        """Tells the other processes, as far as they are there, that the program has ended.

        Args:
          news: how.
        """
        for _, connection in self._others:
            with contextlib.suppress(OSError):
                send(connection, news)


def _answer(connection: socket.socket, signals: list[signal.Signals]) -> Message:
    """Returns the answer of a process; adds signals that it received, for this one as well."""
    while (message := receive(connection)).call == _SIGNAL:
        signals.append(signal.Signals(message.values))
        tf.logging.warning("Another process of this program received %s.", signals[-1].name)
    return message


# -- messages

_LENGTH = 8  # bytes of the length of a header


def send(connection: socket.socket, message: Message) -> None:
    """Sends a message."""
    arrays = [np.asarray(a) for a in message.arrays]
    described = [[a.dtype.name, list(a.shape)] for a in arrays]
    header = json.dumps([message.call, message.values, described]).encode()
    connection.sendall(len(header).to_bytes(_LENGTH, "little") + header)
    for a in arrays:
        if a.size:
            # As bytes, since buffers of other packages' dtypes, such as bfloat16, have no format.
            connection.sendall(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data)


def receive(connection: socket.socket) -> Message:
    """Returns the next message.

    Raises:
      EOFError: the other process closed the connection.
    """
    length = int.from_bytes(_bytes(connection, _LENGTH), "little")
    call, values, described = json.loads(bytes(_bytes(connection, length)))
    arrays = []
    for name, sizes in described:
        dtype = np.dtype(name)
        data = _bytes(connection, int(np.prod(sizes, dtype=np.int64)) * dtype.itemsize)
        arrays.append(np.frombuffer(data, np.uint8).view(dtype).reshape(sizes))
    return Message(call, values, arrays)


def _bytes(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        got = connection.recv_into(view[done:], min(count - done, 2**24))
        if not got:
            raise EOFError("the connection was closed")
        done += got
    return data


_CLOSED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
# Seconds without a message, and between questions, after which a machine is asked whether it is
# there; the number of questions without an answer.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def connected(connection: socket.socket) -> socket.socket:
    """Returns a connection, with the settings of those between processes."""
    # The limit was for the start; a step may take as long as it needs.
    connection.settimeout(None)
    # A message is written in parts, of which a small one would otherwise wait until the one before
    # is acknowledged.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _is_open(connection: socket.socket) -> bool:
    """Returns whether another process has not closed its connection, as it does when it ends."""
    poll = select.poll()
    with contextlib.suppress(ValueError):  # this process has
        # Not for data, which are left to whoever waits for a message.
        poll.register(connection, _CLOSED)
    return not poll.poll(0)


def watch_over(others: Sequence[tuple[Peer, socket.socket]], me: Peer) -> Watch:
    """Returns a Watch over processes with connections.

    Args:
      others: other processes, and connections to them.
      me: this process.
    """
    connections = dict(others)
    # One miss is enough, as a connection that was closed does not come back.
    return Watch(connections, me, lambda peer: _is_open(connections[peer]), misses=1)

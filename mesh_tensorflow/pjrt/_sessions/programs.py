"""The programs of a session: what they are made of, how they are run and their variables saved.

No process can read the whole of an array that is split over the devices of several; the first
process asks the others for their parts, over the connections of `chief.py`.

Only the first process has a session. It tells the others to define programs, run them and save
their variables, one message after another; `CALLS` has the method for each kind of message.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import itertools
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

import jax
import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables.checkpoint_files import (
    Faults,
    ShardedVariable,
    faults,
    reading,
    write_parts,
)
from mesh_tensorflow._processes.peers import Peer
from mesh_tensorflow._stop_signals import deferred, tell_of_other
from mesh_tensorflow.pjrt._sessions.executor import Description, Executor
from mesh_tensorflow.pjrt._sessions.wire import Message, Watch, receive, send
from mesh_tensorflow.pjrt._store import own_specs, parts_to_write, read_array


def own_parts(array: jax.Array) -> list[tuple[list[int], np.ndarray]]:
    """Returns the first index and the value of each part that this process has; copies once.

    Args:
      array: an array; what is there in several processes counts as that of the first.
    """
    return [
        ([part.start or 0 for part in shard.index], np.asarray(shard.data))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def joined(array: jax.Array, parts: Iterable[tuple[Sequence[int], np.ndarray]]) -> np.ndarray:
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


# The name in the file, the number of the program, the name there, and the name of the dtype in the
# file; what JSON can say.
Saved = tuple[str, int, str, str]


def saved(variables: Mapping[str, ShardedVariable]) -> list[Saved]:
    """Returns what other processes are told of variables.

    Args:
      variables: the variables, by name in files.
    """
    return [(name, v.number, v.name, v.dtype.name) for name, v in variables.items()]


def write_here(executor: Executor, prefix: str, variables: Sequence[Saved]) -> Optional[str]:
    """Writes the parts that this process has, of copies those that count as the first.

    Args:
      executor: what has the variables.
      prefix: the beginning of the path.
      variables: the variables.

    Returns:
      The path; None if this process has nothing to write.

    Raises:
      ValueError: a variable has no value yet.
      OSError: the parts cannot be written.
    """
    parts = [
        part
        for name, number, key, dtype in variables
        for part in parts_to_write(executor.current(number, key), name, tf.as_dtype(dtype))
    ]
    if not parts:
        return None
    path = f"{prefix}-{jax.process_index()}-of-{jax.process_count()}"
    write_parts(path, parts)
    return path


def restore_here(executor: Executor, path: str, variables: Sequence[Saved]) -> None:
    """Reads the parts that the devices of this process have, and sets the variables.

    Args:
      executor: what has the variables.
      path: the path of a checkpoint.
      variables: the variables.

    Raises:
      OSError: a part cannot be read.
    """
    with reading(path) as reader:
        for name, number, key, dtype in variables:
            like, where = executor.place(number, key)
            array = read_array(reader, name, tf.as_dtype(dtype), like, where)
            executor.put(number, key, array)


def faults_here(executor: Executor, path: str, variables: Sequence[Saved]) -> Faults:
    """Returns what is wrong with the parts that this process would write.

    Args:
      executor: what has the variables.
      path: the path of a checkpoint.
      variables: the variables.
    """
    wanted = {}
    for name, number, key, dtype in variables:
        like, where = executor.place(number, key)
        wanted[name] = tf.as_dtype(dtype), own_specs(like.shape, where)
    return faults(path, wanted)


FAILED, SIGNAL = "failed", "signal"  # beside answers

Answer = tuple[Any, Sequence[np.ndarray]]
_NOTHING: Answer = (None, ())


class Follower:
    """Does what the chief asks for, on the devices of this process."""

    def __init__(self) -> None:
        """Begins without programs."""
        self._executor = Executor()

    def answer(self, message: Message) -> Message:
        """Does what a message says, and returns the answer.

        Args:
          message: one of CALLS.
        """
        try:
            values, arrays = CALLS[message.call](self, message)
        except Exception as error:
            # The chief raises it, unless it has the same error itself.
            return Message(FAILED, f"{type(error).__name__}: {error}")
        return Message(message.call, values, arrays)

    def define(self, message: Message) -> Answer:
        """Adds a program.

        Args:
          message: its number and description; its operations.
        """
        number, described = message.values
        graph_def = tf.GraphDef.FromString(message.arrays[0].tobytes())
        self._executor.define(number, Description.of_plain(described), graph_def)
        return _NOTHING

    def forget(self, message: Message) -> Answer:
        """Removes a program.

        Args:
          message: its number.
        """
        self._executor.forget(message.values)
        return _NOTHING

    def run(self, message: Message) -> Answer:
        """Does a step.

        Args:
          message: the number of the program; its arguments.
        """
        # Its results are left: each device has all of them, so the chief gives the session its own.
        self._executor.run(message.values, message.arrays)
        return _NOTHING

    def assign(self, message: Message) -> Answer:
        """Sets a variable.

        Args:
          message: the number of the program and the name; the whole value.
        """
        number, name = message.values
        self._executor.assign(number, name, message.arrays[0])
        return _NOTHING

    def read(self, message: Message) -> Answer:
        """Returns the parts of a variable that this process has, copies once over all processes.

        Args:
          message: the number of the program and the name.
        """
        parts = own_parts(self._executor.current(*message.values))
        return [begin for begin, _ in parts], [value for _, value in parts]

    def write(self, message: Message) -> Answer:
        """Writes the parts of variables that this process has to a file; returns its path, or None.

        Args:
          message: the beginning of the path; the variables.
        """
        return write_here(self._executor, *message.values), ()

    def restore(self, message: Message) -> Answer:
        """Sets variables to what a checkpoint has.

        Args:
          message: the path; the variables.
        """
        restore_here(self._executor, *message.values)
        return _NOTHING

    def faults(self, message: Message) -> Answer:
        """Returns what is wrong with the data of this process' parts in a checkpoint.

        Args:
          message: the path; the variables.
        """
        return faults_here(self._executor, *message.values), ()


CALLS: dict[str, Callable[[Follower, Message], Answer]] = {
    "define": Follower.define,
    "forget": Follower.forget,
    "run": Follower.run,
    "assign": Follower.assign,
    "read": Follower.read,
    "write": Follower.write,
    "restore": Follower.restore,
    "faults": Follower.faults,
}


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
        self.watch = Watch(others, me)

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
            raise self.watch.error() or RuntimeError(
                f"the message {self._broken_off!r} to the other processes was broken off, so that "
                "they are not where this one is. Start all processes again, from a checkpoint"
            )
        signals: list[signal.Signals] = []
        try:
            # As a whole: Ctrl-C in between would leave answers, for the next message to take.
            with deferred():
                result, answers = self._done(message, own, signals)
        finally:
            for number in signals:
                tell_of_other(number)
        for (peer, _), answer in zip(self._others, answers):
            if answer.call == FAILED:
                raise RuntimeError(f"{peer} failed: {answer.values}")
        return result, answers

    def _done(
        self, message: Message, own: Callable[[], Any], signals: list[signal.Signals]
    ) -> tuple[Any, list[Message]]:
        self._broken_off = message.call
        # To the others first: `own` may take part in collectives, in which it would wait for them.
        self._each(lambda connection: send(connection, message))
        error: Optional[Exception] = None
        result = None
        try:
            result = own()
        except Exception as found:
            error = found
        # All answers are taken, also after an error: one that stayed would be taken for that of the
        # next message. They have the same error, or a process is lost.
        answers = self._each(lambda connection: _answer(connection, signals))
        self._broken_off = None
        if error is not None:
            raise error
        return result, answers

    def _each(self, call: Callable[[socket.socket], Any]) -> list[Any]:
        results = []
        for peer, connection in self._others:
            try:
                results.append(call(connection))
            except (EOFError, OSError) as error:
                lost = self.watch.error(peer)
                assert lost is not None
                raise lost from error
        return results

    def end(self, news: Message) -> None:
        """Tells the other processes, as far as they are there, that the program has ended.

        Args:
          news: how.
        """
        self.watch.stop()
        for _, connection in self._others:
            with contextlib.suppress(OSError):
                send(connection, news)


def _answer(connection: socket.socket, signals: list[signal.Signals]) -> Message:
    """Returns the answer of a process; adds signals that it received, for this one as well."""
    while (message := receive(connection)).call == SIGNAL:
        signals.append(signal.Signals(message.values))
        tf.logging.warning("Another process of this program received %s.", signals[-1].name)
    return message


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

    def _do(self, message: Message, own: Callable[[], Any]) -> tuple[Any, list[Message]]:
        with self._lock:
            while self._unused:
                # In all processes at the same place in the order of messages.
                number = self._unused.popleft()
                self._do_now(Message("forget", number), lambda n=number: self._executor.forget(n))
            return self._do_now(message, own)

    def _do_now(self, message: Message, own: Callable[[], Any]) -> tuple[Any, list[Message]]:
        return (own(), []) if self._peers is None else self._peers.do(message, own)

    def define(self, description: Description, graph_def: tf.GraphDef) -> int:
        """Adds a program; returns its number.

        Args:
          description: what it is.
          graph_def: its operations.
        """
        number = next(self._numbers)
        data = (
            [] if self._peers is None else [np.frombuffer(graph_def.SerializeToString(), "uint8")]
        )
        message = Message("define", [number, description.plain()], data)
        self._do(message, lambda: self._executor.define(number, description, graph_def))
        return number

    def forget(self, number: int) -> None:
        """Removes a program before the next call; may be called at any time, in any thread.

        Args:
          number: its number.
        """
        self._unused.append(number)

    def run(self, number: int, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Does a step of a program; returns its results.

        Args:
          number: its number.
          arrays: its arguments.
        """
        results, _ = self._do(
            Message("run", number, arrays),
            lambda: [np.asarray(y) for y in self._executor.run(number, arrays)],
        )
        return results

    def assign(self, number: int, name: str, value: np.ndarray) -> None:
        """Sets a variable.

        Args:
          number: the number of its program.
          name: its name.
          value: its whole value.
        """
        message = Message("assign", [number, name], [value])
        self._do(message, lambda: self._executor.assign(number, name, value))

    def value(self, number: int, name: str) -> np.ndarray:
        """Returns the whole value of a variable.

        Args:
          number: the number of its program.
          name: its name.
        """
        with self._lock:
            array = self._executor.current(number, name)
            # Then this process has all of it, and no other is asked.
            if array.is_fully_addressable or array.is_fully_replicated:
                return np.asarray(array)
            own, answers = self._do(Message("read", [number, name]), lambda: own_parts(array))
            given = [part for a in answers for part in zip(a.values, a.arrays)]
            return joined(array, [*own, *given])

    # -- checkpoints of several processes, as `apart.ShardHolders` says

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
        told = saved(variables)
        path, answers = self._do_with_files(
            Message("write", [prefix, told]), lambda: write_here(self._executor, prefix, told)
        )
        return [p for p in (path, *(a.values for a in answers)) if p is not None]

    def restore(self, path: str, variables: Mapping[str, ShardedVariable]) -> None:
        """Has each process read its parts of the variables, and set them.

        Args:
          path: the path of a checkpoint.
          variables: the variables, by name in files.
        """
        told = saved(variables)
        self._do_with_files(
            Message("restore", [path, told]), lambda: restore_here(self._executor, path, told)
        )

    def faults(self, path: str, variables: Mapping[str, ShardedVariable]) -> Faults:
        """Returns what is wrong with the data of variables, which all processes read in parts.

        Args:
          path: the path of a checkpoint.
          variables: the variables, by name in files.
        """
        told = saved(variables)
        own, answers = self._do_with_files(
            Message("faults", [path, told]), lambda: faults_here(self._executor, path, told)
        )
        found = [own, *(Faults(*a.values) for a in answers)]
        peers = [] if self._peers is None else [self._peers.me, *self._peers.peers]
        reasons = [f"{peer}: {f.why}" for peer, f in zip(peers, found) if f.damaged]
        return Faults(
            [name for f in found for name in f.damaged],
            reasons[0] if reasons else own.why,
            [name for f in found for name in f.not_numbers],
            [name for f in found for name in f.infinite],
        )

    def _do_with_files(self, message: Message, own: Callable[[], Any]) -> tuple[Any, list[Message]]:
        """Has all processes do something with files; an error names the process."""

        def named() -> Any:
            try:
                return own()
            except OSError as error:
                if self._peers is None:
                    raise
                raise RuntimeError(f"{self._peers.me} failed: OSError: {error}") from error

        return self._do(message, named)

    def array(self, number: int, name: str) -> Any:
        """Returns a variable as an array of JAX, or None if it has no value yet.

        Args:
          number: the number of its program.
          name: its name.
        """
        return self._executor.array(number, name)


_alone = Programs()
_current: contextvars.ContextVar[Programs] = contextvars.ContextVar("programs", default=_alone)


def programs_alone() -> Programs:
    """Returns those of this process alone, as `current_programs` does outside of `main`."""
    return _alone


def current_programs() -> Programs:
    """Returns the programs to which a new one is added."""
    return _current.get()


@contextlib.contextmanager
def programs_over(peers: PeerProcesses) -> Iterator[None]:
    """Context in which new programs run in all processes.

    Args:
      peers: the other processes.
    """
    token = _current.set(Programs(peers))
    try:
        yield
    finally:
        _current.reset(token)

"""run_in_chief: a program that the first process runs, on the devices of all processes.

The first process, the chief, sends the others messages: what `_programs.py` has all of them do.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

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
from mesh_tensorflow.pjrt._devices import driving, join
from mesh_tensorflow.pjrt._programs import (
    CALLS,
    Executor,
    Message,
    current_programs,
    programs_alone,
    programs_over,
)

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
        if current_programs() is programs_alone():
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
    made: dict[Peer, socket.socket] = {}

    def connect(peer: Peer) -> bool:
        try:
            made[peer] = socket.create_connection(place_of(peer.address), timeout=_START_SECS)
        except OSError:
            return False
        connected(stack.enter_context(made[peer]))
        return True

    wait_for(others, me, _START_SECS, connect)
    return [(peer, made[peer]) for peer in others]


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
                result, answers = self._done(message, own, signals)
        finally:
            for number in signals:
                tell_of_other(number)
        for (peer, _), answer in zip(self._others, answers):
            if answer.call == _FAILED:
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
    """Sends a message.

    Args:
      connection: a connected socket.
      message: the message.
    """
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

    Args:
      connection: a connected socket.

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
    """Returns a connection, with the settings of those between processes.

    Args:
      connection: a connected socket.
    """
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

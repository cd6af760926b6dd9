"""run_in_chief: a program that the first process runs, on the devices of all processes.

The first process, the chief, tells the others which programs there are, when to run them, and what
to do with their variables; see `programs.py` for its side. They do it in this order, so that all
take part in the collectives of a program.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import numpy as np

from mesh_tensorflow._processes.peers import Peer, PeerLostError
from mesh_tensorflow._processes.processes import Processes, processes, several_of_jax
from mesh_tensorflow._stop_signals import StopSignals
from mesh_tensorflow.pjrt._devices import driving, join
from mesh_tensorflow.pjrt._sessions.programs import (
    CALLS,
    SIGNAL,
    Follower,
    PeerProcesses,
    current_programs,
    programs_alone,
    programs_over,
)
from mesh_tensorflow.pjrt._sessions.wire import Message, Watch, connected, receive, send

__all__ = ["run_in_chief"]

_POLL_SECS = 0.2
_START_SECS = 1800.0  # for all processes to be started
_DONE, _FAILED = "done", "failed"


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
    with contextlib.ExitStack() as stack:
        others = [
            (peer, stack.enter_context(_connection(peer))) for peer in _peers(mine) if peer.task
        ]
        # After the connections: the others join only once they have accepted one, and JAX waits for
        # them here until they do.
        join()
        peers = PeerProcesses(others, _peers(mine)[0])
        news = Message(_FAILED, "it failed")
        try:
            with programs_over(peers):
                result = main()
            news = Message(_DONE, *((None, ()) if share is None else share(result)))
            return result
        except BaseException as error:
            news = Message(_FAILED, f"{type(error).__name__}: {error}")
            lost = peers.watch.error()
            if lost is not None and not isinstance(error, PeerLostError):
                # What a step or a collective raises then is a consequence; the cause is told.
                raise lost from None
            raise
        finally:
            # Also after an error, as the others wait for the next message.
            peers.end(news)


def _peers(mine: Processes) -> list[Peer]:
    return [Peer(mine.job, task, address) for task, address in enumerate(mine.addresses)]


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def _connection(peer: Peer) -> Iterator[socket.socket]:
    """Yields a connection to a process, which may not have been started yet."""
    deadline = time.monotonic() + _START_SECS
    while True:
        try:
            connection = socket.create_connection(_place(peer.address), timeout=_START_SECS)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"{peer} does not answer: it was not started, or its address cannot be "
                    f"reached from here ({error}). Start all processes, with the same addresses",
                    peer,
                ) from error
            time.sleep(_POLL_SECS)
    with connection:
        yield connected(connection)


# -- the other processes


def _follow(mine: Processes) -> Shared:
    chief, me = _peers(mine)[0], _peers(mine)[mine.index]
    with socket.create_server(_place(me.address)) as server:
        server.settimeout(_START_SECS)
        try:
            connection, _ = server.accept()
        except TimeoutError as error:
            raise PeerLostError(
                f"{me}: {chief} has not connected. Start all processes, with the same addresses",
                chief,
            ) from error
    # The chief, which is told of a signal, needs this process until it has saved.
    with connection, StopSignals() as signals:
        join()
        watch = Watch([(chief, connected(connection))], me)
        try:
            news = _serve(connection, watch, chief, signals)
        finally:
            watch.stop()
    if signals.received is not None:
        raise signals.error(f"{me} was stopped, after {chief}")
    if news.call == _FAILED:
        raise RuntimeError(f"{chief} has stopped: {news.values}")
    return news.values, news.arrays


def _serve(connection: socket.socket, watch: Watch, chief: Peer, signals: StopSignals) -> Message:
    """Does what the chief says, and tells it of a signal; returns what it says at the end."""
    follower, told = Follower(), False
    while True:
        try:
            message = receive(connection)
            if message.call not in CALLS:
                return message
            answer = follower.answer(message)
            if signals.received is not None and not told:
                # Before the answer, since the chief reads no message but while it waits for one.
                told = True
                send(connection, Message(SIGNAL, int(signals.received)))
            send(connection, answer)
        except (EOFError, OSError) as error:  # OSError: a host that cannot be reached, too
            lost = watch.error(chief)
            assert lost is not None
            raise lost from error

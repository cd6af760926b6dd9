"""Failure detection: whether the servers of the other processes answer."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mesh_tensorflow._core.errors import reason

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = [
    "ANSWER_SECS",
    "POLL_SECONDS",
    "Lookout",
    "Peer",
    "PeerLostError",
    "answers",
    "check_address",
    "check_addresses",
    "naming_port",
    "task_index",
    "wait_at_end",
    "wait_for",
]

ANSWER_SECS = 5.0  # the time for a peer to answer
POLL_SECONDS = 0.2  # the interval at which a process checks what it waits for
_PING_SECS = 0.5  # the interval of pings
_MISSES = 2  # the number of unanswered pings in a row after which a peer is lost
# How long a process that finds a peer lost keeps running, so that all others find the same peer
# lost: a process that ends later than that ended only because of it.
_STAY_SECS = 4 * _PING_SECS

# The connection preface of an HTTP/2 client, with empty settings; servers answer with theirs.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class PeerLostError(RuntimeError):
    """Another process of the cluster does not answer.

    Attributes:
      text: the message.
      peer: the lost process.
      is_complete: whether the message says what to do, and nothing has to be added.
    """

    is_complete = False

    def __init__(self, text: str, peer: Peer) -> None:
        """Creates a PeerLostError.

        Args:
          text: the message.
          peer: the lost process.
        """
        super().__init__(text)
        self.text, self.peer = text, peer

    def __str__(self) -> str:
        return self.text


class Peer(NamedTuple):
    """A process of a cluster."""

    job: str
    task: int
    address: str

    def __str__(self) -> str:
        return f"/job:{self.job}/task:{self.task} at {self.address}"

    @property
    def device(self) -> str:
        """The device string of the process."""
        return f"/job:{self.job}/task:{self.task}"


@contextlib.contextmanager
def naming_port(me: Peer) -> Iterator[None]:
    """Turns errors of starting a server within into ones that name its port.

    Args:
      me: the process of the server.

    Raises:
      RuntimeError: TensorFlow could not start the server.
    """
    import tensorflow.compat.v1 as tf

    try:
        yield
    except tf.errors.OpError as error:
        raise RuntimeError(
            f"{me}: its server cannot be started ({reason(error)}). Another process may use the "
            "port, as one that is left of an earlier run: end it, or give this process another "
            "port in the TF_CONFIG of all"
        ) from error


def check_address(address: object) -> None:
    """Checks the address of a process in TF_CONFIG.

    Args:
      address: the entry of TF_CONFIG.

    Raises:
      ValueError: it is not of the form "host:port".
    """
    # From the right, since an IPv6 address has colons of its own.
    host, _, port = str(address).rpartition(":")
    if not isinstance(address, str) or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f'TF_CONFIG: the address {address!r} should be "host:port", with a port of 1 to '
            "65535 that the process can be reached at"
        )


def check_addresses(addresses: Sequence[object]) -> None:
    """Checks the addresses of all processes in TF_CONFIG.

    Args:
      addresses: the entries of TF_CONFIG.

    Raises:
      ValueError: one is not of the form "host:port", or two processes have the same.
    """
    for address in addresses:
        check_address(address)
    twice = [address for address, n in collections.Counter(addresses).items() if n > 1]
    if twice:
        raise ValueError(
            f"TF_CONFIG: {', '.join(map(str, twice))} is the address of several tasks, but each "
            f"process needs a port of its own; the addresses are {', '.join(map(str, addresses))}"
        )


def task_index(index: object) -> int:
    """Returns the number of a task in TF_CONFIG.

    Args:
      index: the entry of TF_CONFIG, an integer or its digits.

    Raises:
      ValueError: it is something else, or negative.
    """
    # Not isinstance, since a JSON true would be the number 1.
    if type(index) is int and index >= 0:
        return index
    if isinstance(index, str) and index.isdecimal():
        return int(index)
    raise ValueError(
        f'TF_CONFIG: the "index" of "task" is {index!r}; it should be a whole number, and counts '
        "from 0"
    )


def answers(address: str, seconds: float = ANSWER_SECS) -> bool:
    """Returns whether a server answers a connection.

    Args:
      address: "host:port".
      seconds: how long to wait.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as found:
            # The kernel accepts connections even for a process that hangs, so it has to answer.
            found.sendall(_HELLO)
            return bool(found.recv(1))
    except OSError:
        return False


def wait_for(peers: Iterable[Peer], me: Peer, seconds: float) -> None:
    """Waits until processes answer.

    Args:
      peers: the processes.
      me: this process.
      seconds: the maximum time to wait.

    Raises:
      PeerLostError: a process did not answer in time.
    """
    deadline, missing = time.monotonic() + seconds, list(peers)
    told = False
    while True:
        missing = [peer for peer in missing if not answers(peer.address)]
        if not missing:
            return
        names = ", ".join(map(str, missing))
        if time.monotonic() >= deadline:
            raise PeerLostError(
                f"{me} waited {seconds:g} s for {names}, in vain: start it with the same "
                "TF_CONFIG but for its task, and see that nothing blocks the port",
                missing[0],
            )
        if not told:
            logging.getLogger("tensorflow").info("%s waits for %s.", me, names)
            told = True
        time.sleep(POLL_SECONDS)


class Lookout:
    """Pings other processes in a thread, and records which did not answer first."""

    def __init__(self, peers: Iterable[Peer]) -> None:
        """Creates a Lookout, which pings until this process ends.

        Args:
          peers: the other processes, all of which have answered.
        """
        self._silent_since: dict[Peer, float] = {}
        self._misses = dict.fromkeys(peers, 0)
        self._begun = self._ended = 0  # rounds of pings
        self._running: list[tf.compat.v1.Session] = []
        threading.Thread(target=self._ping, name="lookout", daemon=True).start()

    def lost(self) -> list[Peer]:
        """Returns the lost peers, without those that ended because of them."""
        since = {
            peer: moment
            # Copied at once, as the thread that pings may change it during the iteration.
            for peer, moment in self._silent_since.copy().items()
            if self._misses[peer] >= _MISSES
        }
        first = min(since.values(), default=0.0)
        return [peer for peer in self._misses if since.get(peer, math.inf) < first + _STAY_SECS]

    def confirmed(self) -> list[Peer]:
        """Returns the lost peers, after enough time for all processes to find the same ones."""
        # A round takes as long as all processes that hang let it wait; one may be under way.
        rounds = (_MISSES + 1) * (_PING_SECS + ANSWER_SECS * max(1, len(self._misses)))
        deadline = time.monotonic() + rounds
        # A session's error may come before the first ping that a lost process does not answer.
        begun = self._begun
        while not self.lost() and time.monotonic() < deadline:
            # A round under way may have asked a process before it was lost; a later one has not.
            if not self._silent_since and self._ended > begun:
                break  # all have answered since
            time.sleep(_PING_SECS / 2)
        lost = self.lost()
        if lost:
            time.sleep(_STAY_SECS)
        return lost

    @contextlib.contextmanager
    def ending(self, session: tf.compat.v1.Session) -> Iterator[None]:
        """Context in which a session runs a step, which ends as soon as a process is lost.

        A step that waits in a collective for a lost process ends in no other way, unless it has a
        limit of time; nor can it be interrupted.

        Args:
          session: the session, which is closed then.
        """
        self._running.append(session)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # it has been closed
                self._running.remove(session)

    def _end_steps(self) -> None:
        """Closes the sessions whose steps may wait for a lost process."""
        while self._running:
            session = self._running.pop()
            # In threads: closing a session may wait for the lost process.
            threading.Thread(target=_close, args=(session,), daemon=True).start()

    def call(self, function: Callable[[], None], seconds: float, what: str) -> None:
        """Calls a function that may wait for another process, in a separate thread.

        A TensorFlow call that waits for a lost process cannot be interrupted, so its thread keeps
        running.

        Args:
          function: a function without arguments or result.
          seconds: the maximum time that it may take.
          what: a description of the function, for the error message.

        Raises:
          PeerLostError: a process is lost.
          TimeoutError: all processes answer, but the function took too long.
        """
        errors: list[BaseException] = []

        def run() -> None:
            try:
                function()
            except BaseException as error:  # raised again in the calling thread
                errors.append(error)

        thread = threading.Thread(target=run, name=what, daemon=True)
        thread.start()
        deadline = time.monotonic() + seconds
        while thread.is_alive():
            thread.join(_PING_SECS / 2)
            # Asked again: it may have ended meanwhile, and then no process is to blame.
            lost = self.confirmed() if thread.is_alive() and self.lost() else []
            if lost:
                raise PeerLostError(f"{', '.join(map(str, lost))}", lost[0])
            if time.monotonic() >= deadline and thread.is_alive():
                raise TimeoutError(f"{what} took longer than {seconds:g} s")
        if errors:
            raise errors[0]

    def _ping(self) -> None:
        while True:
            self._begun += 1
            for peer in self._misses:
                # Noted before the ping, which waits for seconds if a process has fallen silent.
                moment = time.monotonic()
                if answers(peer.address):
                    self._misses[peer] = 0
                    self._silent_since.pop(peer, None)
                else:
                    self._silent_since.setdefault(peer, moment)
                    self._misses[peer] += 1
            self._ended += 1
            if self.lost():
                self._end_steps()
            time.sleep(_PING_SECS)


def _close(session: tf.compat.v1.Session) -> None:
    import tensorflow as tf

    try:
        session.close()
    except (tf.errors.OpError, RuntimeError) as error:
        logging.getLogger("tensorflow").info("A session was not closed: %s", error)


def wait_at_end(peers: Sequence[Peer], index: int, server: tf.distribute.Server) -> None:
    """Waits until all processes have called this function.

    Args:
      peers: all processes; the first one counts the calls.
      index: the index of this process.
      server: the server of this process.

    Raises:
      PeerLostError: this is the first process, and another one is lost.
      tf.errors.OpError: the first process was lost before the call.
    """
    import tensorflow.compat.v1 as tf

    chief, me = peers[0], peers[index]
    # Without filters, a session connects to all processes, and waits for those that have ended.
    config = tf.ConfigProto(device_filters=[chief.device, me.device])
    limit = tf.RunOptions(timeout_in_ms=int(1000 * ANSWER_SECS))
    with tf.Graph().as_default(), tf.device(f"{chief.device}/device:CPU:0"):
        # Each process builds it in its own graph; by the shared name it is one queue, at the chief.
        come = tf.queue.FIFOQueue(len(peers), tf.int32, shared_name="processes_at_their_end")
        add, number = come.enqueue(index), come.size()
        with tf.Session(server.target, config=config) as session:
            session.run(add, options=limit)
            while answers(chief.address):
                # The first one may end between two lines, once all have called.
                with contextlib.suppress(tf.errors.UnavailableError, tf.errors.AbortedError):
                    if session.run(number, options=limit) == len(peers):
                        return
                # Only the chief judges: the others may all end, and be silent, once they have seen
                # the full number.
                lost = [peer for peer in peers if not answers(peer.address)] if me is chief else []
                # They may have called, and ended, since the number was read.
                if lost and session.run(number, options=limit) < len(peers):
                    raise PeerLostError(
                        f"{me} waits at its end for {', '.join(map(str, lost))}, which does not "
                        "answer: see what it wrote last",
                        lost[0],
                    )
                time.sleep(POLL_SECONDS)

"""The processes of a program, as each other sees them: by whether their servers answer."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["ANSWER_SECS", "Peer", "PeerLostError", "answers", "wait_at_end", "wait_for"]

ANSWER_SECS = 5.0  # that a peer has to answer
_POLL_SECONDS = 0.2

# What an HTTP/2 client says first, with empty settings: a server answers with its settings.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class PeerLostError(RuntimeError):
    """Another process of the cluster is gone."""

    def __init__(self, text: str, peer: Peer) -> None:
        """Makes one.

        Args:
          text: what happened.
          peer: the process.
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
        """The process as a device."""
        return f"/job:{self.job}/task:{self.task}"


def answers(address: str, seconds: float = ANSWER_SECS) -> bool:
    """Returns whether a server answers a connection.

    Args:
      address: host and port.
      seconds: how long to wait.

    Returns:
      a bool.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as found:
            found.sendall(_HELLO)
            return bool(found.recv(1))
    except OSError:
        return False


def wait_for(peers: Iterable[Peer], me: Peer, seconds: float) -> None:
    """Waits until processes answer.

    Args:
      peers: the processes.
      me: this process.
      seconds: how long at most.

    Raises:
      PeerLostError: one has not been started.
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
                missing[0])
        if not told:
            logging.getLogger("tensorflow").info("%s waits for %s.", me, names)
            told = True
        time.sleep(0.2)


def wait_at_end(peers: Sequence[Peer], index: int, server: Any) -> None:
    """Waits until all processes have come here.

    Args:
      peers: all processes; the first one keeps account.
      index: which of them this is.
      server: its server.

    Raises:
      PeerLostError: this is the first one, and another is gone.
      tf.errors.OpError: the first one was gone from the start.
    """
    import tensorflow.compat.v1 as tf

    chief, me = peers[0], peers[index]
    config = tf.ConfigProto(device_filters=[chief.device, me.device])
    limit = tf.RunOptions(timeout_in_ms=int(1000 * ANSWER_SECS))
    with tf.Graph().as_default(), tf.device(f"{chief.device}/device:CPU:0"):
        come = tf.queue.FIFOQueue(len(peers), tf.int32, shared_name="processes_at_their_end")
        add, number = come.enqueue(index), come.size()
        with tf.Session(server.target, config=config) as session:
            session.run(add, options=limit)
            while answers(chief.address):
                # The first one may go between two lines, when all have come.
                with contextlib.suppress(tf.errors.UnavailableError, tf.errors.AbortedError):
                    if session.run(number, options=limit) == len(peers):
                        return
                lost = [peer for peer in peers if not answers(peer.address)] if me is chief else []
                if lost:
                    raise PeerLostError(
                        f"{me} waits at its end for {', '.join(map(str, lost))}, which does not "
                        "answer: see what it wrote last", lost[0])
                time.sleep(_POLL_SECONDS)

"""The processes of a program, as each other sees them: by whether their servers answer."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["ANSWER_SECS", "Peer", "PeerLostError", "answers", "wait_for"]

ANSWER_SECS = 5.0  # that a peer has to answer

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

"""Watch: ends a process that waits, in a collective, for another one that is lost."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Optional

from mesh_tensorflow._processes.peers import Peer, PeerLostError

__all__ = ["Watch", "connected"]

_POLL_SECS = 0.5
_GRACE_SECS = 10.0  # for the program to raise an error, before the process is ended
_CLOSED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
# Seconds without a message, and between questions, after which a machine is asked whether it is
# there; the number of questions without an answer.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def connected(connection: socket.socket) -> socket.socket:
    """Returns a connection, with the settings of those between processes.

    Args:
      connection: a connected socket.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


class Watch:
    """Notes when another process closes its connection, as it does when it ends.

    If the program does not end after that, as a collective cannot be interrupted, it ends the
    process.
    """

    def __init__(self, others: Sequence[tuple[Peer, socket.socket]], me: Peer):
        """Starts to watch.

        Args:
          others: other processes, and connections to them.
          me: this process.
        """
        self._others = {connection.fileno(): peer for peer, connection in others}
        self._me = me
        self._lost: Optional[Peer] = None
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="watch of processes", daemon=True).start()

    def stop(self) -> None:
        """Stops watching; the process is not ended any more."""
        self._stopped.set()

    def error(self, lost: Optional[Peer] = None) -> Optional[PeerLostError]:
        """Returns an error for a lost process, or None if there is none.

        Args:
          lost: a process that is found to be lost.
        """
        self._lost = self._lost or lost
        if self._lost is None:
            return None
        return PeerLostError(
            f"{self._lost} does not answer any more: the process ended, or its machine or the "
            f"network is down. {self._me} stops. Training resumes from the last checkpoint when "
            "all processes are started again",
            self._lost,
        )

    def _run(self) -> None:
        poll = select.poll()
        for number in self._others:
            poll.register(number, _CLOSED)
        while not self._stopped.is_set():
            closed = [number for number, _ in poll.poll(1000 * _POLL_SECS)]
            if closed and not self._stopped.is_set():
                self.error(self._others[closed[0]])
                if not self._stopped.wait(_GRACE_SECS):
                    print(f"error: {self.error()}", file=sys.stderr, flush=True)
                    os._exit(1)

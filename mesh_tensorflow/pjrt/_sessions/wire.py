"""Messages between the processes of a session's program, and a watch over them."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from mesh_tensorflow._processes.peers import Peer, PeerLostError

_LENGTH = 8  # bytes of the length of a header


class Message(NamedTuple):
    """A message.

    Attributes:
      call: what is asked for or answered.
      values: what JSON can say of it.
      arrays: the arrays that belong to it.
    """

    call: str
    values: Any = None
    arrays: Sequence[np.ndarray] = ()


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
        # The first one: others may end because it is lost.
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
            # Not for data, which are left to whoever waits for a message.
            poll.register(number, _CLOSED)
        while not self._stopped.is_set():
            closed = [number for number, _ in poll.poll(1000 * _POLL_SECS)]
            if closed and not self._stopped.is_set():
                self.error(self._others[closed[0]])
                if not self._stopped.wait(_GRACE_SECS):
                    print(f"error: {self.error()}", file=sys.stderr, flush=True)
                    # sys.exit would end this thread alone; the main one may be in a collective.
                    os._exit(1)

"""Messages between the processes of a session's program: names, numbers and arrays."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Message", "receive", "send"]

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

"""Leaves lines of a library out of what the process writes, while it is connected.

Gloo, by which JAX connects CPUs of several processes, writes a line to the standard output whenever
it has connected some of them, past Python. There is no setting against that.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator

__all__ = ["LineFilter", "without_connection_lines"]

_START = b"[Gloo] Rank "
_PIECES = (
    _START,
    b" is connected to ",
    b" peer ranks. ",
    b"Expected number of connected peer ranks is : ",
)
_FIRST = re.compile(re.escape(_START))
_PIECE = re.compile(b"|".join(map(re.escape, _PIECES)) + rb"|\d+|\n")
_BEGINNINGS = [re.escape(_START[:size]) + rb"\Z" for size in range(1, len(_START))]
_MAY_BEGIN = re.compile(b"|".join([re.escape(_START), *_BEGINNINGS]))
_STDOUT = 1
_CHUNK = 2**16

_lock = threading.Lock()
_depth = 0
_active: list[_Redirection] = []


class LineFilter:
    """Passes bytes on as they come, without the lines of Gloo.

    A thread of each device writes the pieces of its line, so those of several lines may come mixed.

    >>> from mesh_tensorflow.pjrt._quiet import LineFilter
    >>> lines = LineFilter()
    >>> line = b"[Gloo] Rank 0 is connected to 1 peer ranks. "
    >>> line += b"Expected number of connected peer ranks is : 1"
    >>> [lines.passed(b"loss [0.5"), lines.passed(b"]" + line), lines.passed(bytes([10, 65]))]
    [b'loss [0.5', b']', b'A']
    """

    def __init__(self) -> None:
        """Begins."""
        self._held = b""
        self._unfinished = 0  # lines of Gloo of which the end has not come

    def passed(self, data: bytes) -> bytes:
        """Returns what can be passed on, and holds back what may be the beginning of a piece.

        Args:
          data: the next bytes.
        """
        data, passed = self._held + data, b""
        while data:
            pieces, pattern = (_PIECES, _PIECE) if self._unfinished else (_PIECES[:1], _FIRST)
            if piece := pattern.match(data):
                self._unfinished += (piece[0] == _START) - (piece[0] == b"\n")
                data = data[piece.end() :]
            elif any(p.startswith(data) for p in pieces):
                break
            else:
                end = self._end_of_others(data)
                passed, data = passed + data[:end], data[end:]
        self._held = data
        return passed

    def _end_of_others(self, data: bytes) -> int:
        """Returns where what is not of Gloo ends: at a line of it, or where one goes on."""
        begins = _MAY_BEGIN.search(data, 1)
        end = begins.start() if begins else len(data)
        return min(end, data.find(b"\n") + 1 or end) if self._unfinished else end

    def rest(self) -> bytes:
        """Returns what is held back, at the end."""
        rest, self._held, self._unfinished = self._held, b"", 0
        return rest


class _Redirection:
    """The standard output, whose bytes a thread passes on."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._end = b"\0" + secrets.token_hex(8).encode() + b"\0"
        self._drained = threading.Event()
        self._kept = os.dup(_STDOUT)
        self._read, write = os.pipe()
        os.dup2(write, _STDOUT)
        os.close(write)
        threading.Thread(target=self._pass_on, daemon=True).start()

    def close(self) -> None:
        """Puts the standard output back, after all of its bytes have been passed on."""
        sys.stdout.flush()
        os.write(_STDOUT, self._end)
        self._drained.wait()
        os.dup2(self._kept, _STDOUT)

    def _pass_on(self) -> None:
        lines, pending = LineFilter(), b""
        # Until the end of file: a program that was started meanwhile may still write.
        while data := os.read(self._read, _CHUNK):
            pending += data
            before, end, after = pending.partition(self._end)
            if end:
                self._write(lines.passed(before) + lines.rest())
                self._drained.set()
                pending = after
            start = pending.rfind(b"\0")  # a part of the mark may have come
            known = start if start >= 0 and self._end.startswith(pending[start:]) else len(pending)
            self._write(lines.passed(pending[:known]))
            pending = pending[known:]
        self._write(lines.passed(pending) + lines.rest())
        os.close(self._read)
        os.close(self._kept)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._kept, view) :]


@contextlib.contextmanager
def without_connection_lines() -> Iterator[None]:
    """Leaves out the lines of Gloo from what is written to the standard output within.

    All else is passed on in its order, as it is written.
    """
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1 and _is_open():
            _active.append(_Redirection())
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _active:
                _active.pop().close()


def _is_open() -> bool:
    try:
        os.fstat(_STDOUT)
    except OSError:
        return False
    return sys.stdout is not None

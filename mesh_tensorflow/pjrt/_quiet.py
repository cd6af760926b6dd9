"""Keeps the C++ libraries of the process from writing to the standard output for a while.

Gloo, by which JAX connects CPUs of several processes, writes a line to std::cout whenever it has
connected some of them, and has no setting against that. What Python writes takes another way.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Optional

__all__ = ["without_connection_lines"]

_GOOD, _BAD = 0, 1  # std::ios_base::goodbit, and badbit, with which a stream writes nothing

_lock = threading.Lock()
_depth = 0


@functools.cache
def _set_state() -> Optional[Callable[[int], object]]:
    """Returns a function that sets the state of std::cout; None where it cannot be found.

    The library is GNU's, which JAX's wheels for Linux load. The std::ios part of a stream, a
    virtual base, is where the third entry before its table of virtual functions says.
    """
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        stream = ctypes.addressof(ctypes.c_char.in_dll(library, "_ZSt4cout"))
        clear = library["_ZNSt9basic_iosIcSt11char_traitsIcEE5clearESt12_Ios_Iostate"]
    except (OSError, ValueError, AttributeError):
        return None
    table = ctypes.c_void_p.from_address(stream).value
    if table is None:  # no library has initialized it
        return None
    offset = ctypes.c_ssize_t.from_address(table - 3 * ctypes.sizeof(ctypes.c_void_p)).value
    clear.argtypes, clear.restype = [ctypes.c_void_p, ctypes.c_int], None
    return functools.partial(clear, stream + offset)


@contextlib.contextmanager
def without_connection_lines() -> Iterator[None]:
    """Context in which std::cout writes nothing, where the library is known; else lines are seen.

    What Python and other processes write is not touched.
    """
    global _depth
    set_state = _set_state()
    if set_state is None:
        yield
        return
    with _lock:
        _depth += 1
        set_state(_BAD)
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                set_state(_GOOD)

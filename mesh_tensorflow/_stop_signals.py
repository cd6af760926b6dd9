"""Signals such as Ctrl-C: they end training after its step, and what is done as a whole is done."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Optional

__all__ = ["StopSignals", "StoppedBySignal", "deferred", "tell_of_other"]

# What the user did or sent.
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
# What a program may have given a handler that raises an exception.
_RAISING = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]


class StoppedBySignal(SystemExit):
    """Ends the program with an exit code and a message."""

    def __init__(self, code: int, text: str) -> None:
        """Creates a StoppedBySignal."""
        super().__init__(code)
        self.text = text

    def __str__(self) -> str:
        return self.text


class StopSignals:
    """A context that notes SIGTERM and SIGINT instead of letting them end the process.

    A second signal ends the process at once; one that another process has received is no first, as
    a cluster's manager sends one to each. Outside of the main thread, where Python handles no
    signals, the context does nothing; nor for a signal whose handler is not Python's, which could
    not be put back.

    Attributes:
      received: the first signal, or None.
      is_of_other: whether another process received it.
    """

    def __init__(self, noted: Optional[Callable[[signal.Signals], None]] = None) -> None:
        """Creates a StopSignals.

        Args:
          noted: is called with the first signal; or None.
        """
        self.received: Optional[signal.Signals] = None
        self.is_of_other = False
        self._noted = noted
        self._is_told = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _NAMES:
                if signal.getsignal(number) is not None:
                    self._previous[number] = signal.signal(number, self._note)
            # The main thread's alone, as only its context has handlers that note a signal.
            _active.append(self)
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
        if self in _active:
            _active.remove(self)

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        number_given = signal.Signals(number)
        if self.received is not None and not self.is_of_other:
            raise _error(number_given, f"stopped at once by a second {number_given.name}")
        # No exception: it could interrupt the step, or the writing of a checkpoint, at any place.
        seen_before, self.received, self.is_of_other = self.received, number_given, False
        # Told once: another process may have been the first to hear of the same stop.
        if seen_before is None and self._noted is not None:
            self._noted(number_given)

    def note_of_other(self, number: int) -> None:
        """Notes a signal that another process of this run received."""
        if self.received is None:
            self.received, self.is_of_other = signal.Signals(number), True
            if self._noted is not None:
                self._noted(self.received)

    def to_tell(self) -> Optional[signal.Signals]:
        """Returns the signal that was received, the first time; other processes are told of it."""
        if self.received is None or self._is_told:
            return None
        self._is_told = True
        return self.received

    @property
    def name(self) -> str:
        """What the user did or sent, such as "Ctrl-C"; empty if there was nothing."""
        if self.received is None:
            return ""
        return _NAMES[self.received] + (" in another process" if self.is_of_other else "")

    def error(self, text: str) -> BaseException:
        """Returns the exception that ends the program for the signal that was received.

        Returns:
          a KeyboardInterrupt for SIGINT; a SystemExit with the exit code 143 for SIGTERM.
        """
        assert self.received is not None
        return _error(self.received, text)


_active: list[StopSignals] = []  # contexts that the main thread is in


def tell_of_other(number: int) -> None:
    """Passes on a signal that another process of this run received; may be called in any thread."""
    if _active:
        # Not sent to this process, which may have its own: the two would count as a second signal.
        _active[-1].note_of_other(number)
    else:
        # Nobody stops in order here, so it is handled as a signal of this process's own.
        os.kill(os.getpid(), number)


def _error(number: signal.Signals, text: str) -> BaseException:
    if number == signal.SIGINT:
        return KeyboardInterrupt(text)
    # The exit code by which shells tell a process that a signal has ended.
    return StoppedBySignal(128 + number, text)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Context for what has to be done as a whole: Python's handlers of signals run at its end.

    They run in the main thread, between any two of its operations, and may raise an exception, as
    that of Ctrl-C does. A second signal is handled at once, so that it ends what hangs.
    """
    handlers: dict[int, Any] = {}
    received: dict[int, Any] = {}
    ended = False

    def note(number: int, frame: Optional[FrameType]) -> None:
        # One that an exception of another kept in place goes on as before.
        if received or ended:
            handlers[number](number, frame)
        else:
            received[number] = frame

    try:
        if threading.current_thread() is threading.main_thread():
            for number in _RAISING:
                handler = signal.getsignal(number)
                # SIG_DFL and SIG_IGN are not: they run no Python code, which could raise an
                # exception.
                if callable(handler):
                    handlers[number] = handler
                    signal.signal(number, note)
        yield
    finally:
        ended = True
        noted = list(received.items())
        # All handlers are back in place before one of them may raise an exception.
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in noted:
            handlers[number](number, frame)

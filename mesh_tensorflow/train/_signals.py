"""Ctrl-C and SIGTERM: a run ends after the step, and saves first."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Optional

__all__ = ["Signals"]

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Signals:
    """A context in which the first signal is noted, and a second one has its usual effect.

    Attributes:
      received: the signal, or None.
    """

    def __init__(self) -> None:
        self.received: Optional[signal.Signals] = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        # Only the main thread may set handlers; there, others stay responsible for signals.
        if threading.current_thread() is threading.main_thread():
            for number in _NAMES:
                # A handler that was not set by Python can't be put back.
                if signal.getsignal(number) is not None:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *args: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        self.received = signal.Signals(number)
        self._restore()

    @property
    def name(self) -> str:
        """What the user did or sent, such as "Ctrl-C"."""
        return "" if self.received is None else _NAMES[self.received]

    def error(self, message: str) -> BaseException:
        """Returns the exception that ends the program.

        Args:
          message: its text.
        """
        if self.received == signal.SIGTERM:
            return SystemExit(128 + signal.SIGTERM)
        return KeyboardInterrupt(message)

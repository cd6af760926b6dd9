"""Handles signals that stop training: finishes the step, saves a checkpoint, and exits."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Optional

import tensorflow.compat.v1 as tf

__all__ = ["StopSignals", "StoppedBySignal"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """A context that records SIGTERM and SIGINT instead of letting them end the process.

    A second signal ends the process at once. Outside of the main thread, where Python handles no
    signals, the context does nothing.
    """

    def __init__(self) -> None:
        self._received: Optional[int] = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._previous.items():
            # A handler that was not installed from Python is None, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    @property
    def received(self) -> Optional[int]:
        """The number of the first signal, or None."""
        return self._received

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        if self._received is not None:
            raise self._error(number, f"stopped at once by a second {_name(number)}")
        self._received = number
        tf.logging.warning(
            "%s: training stops after this step and saves. A second signal stops it at once.",
            _name(number),
        )

    def _error(self, number: int, text: str) -> BaseException:
        if number == signal.SIGINT:
            return KeyboardInterrupt(text)
        return StoppedBySignal(128 + number, text)

    def raise_if_received(self, step: Optional[int], saved: Optional[str]) -> None:
        """Ends the program if a signal was received.

        Args:
          step: the last step.
          saved: the latest checkpoint, or None.

        Raises:
          SystemExit: SIGTERM was received; the exit code is 143.
          KeyboardInterrupt: SIGINT was received.
        """
        if self._received is not None:
            kept = f"the latest checkpoint is {saved}" if saved else "nothing was saved"
            text = f"training stopped by {_name(self._received)} after step {step}; {kept}"
            tf.logging.warning("%s", text)
            raise self._error(self._received, text)


class StoppedBySignal(SystemExit):
    """Ends the program with an exit code and a message."""

    def __init__(self, code: int, text: str) -> None:
        """Creates a StoppedBySignal.

        Args:
          code: the exit code.
          text: the message.
        """
        super().__init__(code)
        self.text = text

    def __str__(self) -> str:
        return self.text


def _name(number: int) -> str:
    return signal.Signals(number).name

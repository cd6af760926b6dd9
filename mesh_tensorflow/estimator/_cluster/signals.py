"""Signals that ask a training to stop: finish the step, save, and leave."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Optional

import tensorflow.compat.v1 as tf

__all__ = ["StopSignals", "StoppedBySignal"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """While it is entered, SIGTERM and SIGINT are noted instead of ending the process at once.

    A second signal ends it at once. Elsewhere than in the main thread Python takes no signals,
    and this does nothing.
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
            # A handler that was not made by Python is None, and cannot be put back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    @property
    def received(self) -> Optional[int]:
        """The first signal's number, or None."""
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
        """Ends the program if there was a signal.

        Args:
          step: the last step.
          saved: the latest checkpoint, or None.

        Raises:
          SystemExit: SIGTERM came; the exit code is 143.
          KeyboardInterrupt: SIGINT came.
        """
        if self._received is not None:
            kept = f"the latest checkpoint is {saved}" if saved else "nothing was saved"
            text = f"training stopped by {_name(self._received)} after step {step}; {kept}"
            tf.logging.warning("%s", text)
            raise self._error(self._received, text)


class StoppedBySignal(SystemExit):
    """Ends the program with an exit code and says why."""

    def __init__(self, code: int, text: str) -> None:
        """Creates a StoppedBySignal.

        Args:
          code: the exit code.
          text: what happened.
        """
        super().__init__(code)
        self.text = text

    def __str__(self) -> str:
        return self.text


def _name(number: int) -> str:
    return signal.Signals(number).name

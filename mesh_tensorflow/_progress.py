"""A progress line for long commands: steps, rate, time left, and values such as the loss."""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Optional, TextIO

from mesh_tensorflow._units import bytes_text, plural

__all__ = ["Progress", "duration"]

_SILENT_SECONDS = 1.0  # work that ends sooner gets its last line only
_REDRAW_SECONDS = 0.1
# Seconds between the lines of a log: they double from the first to the last.
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0
_SAMPLES, _SAMPLE_SECONDS = 60, 0.5  # the rate is that of the last samples
_NARROWEST_BAR, _WIDEST_BAR = 6, 20
_CLEAR = "\r\x1b[K"


class Progress:
    """Shows how far a loop is: one line that rewrites itself, or some lines in a log.

    In a terminal, the line rewrites itself, and gives way to log lines, warnings and prints. Into
    a file or a pipe, lines are written at growing intervals. Nothing is written in the first
    second. At the end, a last line says how many steps there were and how long they took.

    >>> import io
    >>> stream = io.StringIO()
    >>> with Progress(2, "count", stream=stream) as progress:
    ...     for i in range(2):
    ...         progress.update(value=i)
    >>> print(stream.getvalue().split(" in ")[0])
    count: 2/2 steps
    """

    def __init__(
        self,
        total: Optional[int],
        label: str,
        unit: str = "step",
        stream: Optional[TextIO] = None,
        start: int = 0,
        leave: bool = True,
        show: bool = True,
    ):
        """Creates a progress line; the clock starts at `with`, or at the first update.

        Args:
          total: the number of steps; None if it is unknown, then there is no time left.
          label: what is done, such as "train".
          unit: what is counted, in the singular; a number of "byte" is shown as "3.2 MiB".
          stream: where to write; None is the standard error stream.
          start: the number of steps that had been done before, by an earlier run.
          leave: whether to write the last line.
          show: False to write nothing.
        """
        self.total, self.label, self.unit = total, label, unit
        self.done = self._start = start
        self._leave = leave
        # Within another Progress, `sys.stderr` clears the live line before it writes, and so would
        # undo each drawing. What a silent one writes, nobody reads.
        self._stream = (
            _unwrapped(sys.stderr if stream is None else stream) if show else io.StringIO()
        )
        self._live = _is_terminal(self._stream)
        self._values: dict[str, Any] = {}
        self._began: Optional[float] = None
        self._next = 0.0
        self._pause = _FIRST_PAUSE
        self._samples: collections.deque[tuple[float, int]] = collections.deque(maxlen=_SAMPLES)
        self._ended = False

    def __enter__(self) -> Progress:
        self._begin()
        return self

    def __exit__(self, kind: Optional[type[BaseException]], *args: object) -> None:
        self.close(stopped=kind is not None)

    def _begin(self) -> None:
        if self._began is None:
            self._began = time.monotonic()
            self._next = self._began + _SILENT_SECONDS
            if self._live:
                _line.join(self)

    def update(self, n: int = 1, /, **values: Any) -> None:
        """Counts steps, and shows the line if it is time; nothing after `close`.

        Args:
          n: the number of steps that have been done since the last call.
          **values: what to show after the count, such as `loss=0.5`: strings, numbers, scalars with
            a `__float__`, or functions without arguments that return one. They are converted only
            when they are shown, and are kept until they are given again.
        """
        if self._ended:
            return
        self._begin()
        self.done += n
        # Converted when they are shown: to read the loss from a device would make each step wait
        # for it.
        self._values.update(values)
        now = time.monotonic()
        # The first sample is taken after the first step, so that `rate` leaves its preparations
        # out.
        if n and (not self._samples or now >= self._samples[-1][0] + _SAMPLE_SECONDS):
            self._samples.append((now, self.done))
        if now < self._next:
            return
        if self._live:
            self._next = now + _REDRAW_SECONDS
            _line.show(self)
        elif not (self._leave and self.done == self.total):  # the last line says it, and how long
            self._next = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            _write(self._stream, self.line() + "\n")

    def close(self, stopped: bool = False) -> None:
        """Writes the last line; further calls do nothing.

        Args:
          stopped: whether the work ended early, by an error or a key.
        """
        if self._ended:
            return
        # Also without an update, as the last line says how long it took.
        self._begin()
        self._ended = True
        if self._live:
            _line.leave(self)
        if self._leave:
            _write(self._stream, self._last_line(stopped) + "\n")

    def rate(self) -> Optional[float]:
        """Returns the recent number of steps per second; None if there was none.

        The first step is left out as soon as there are others: it often includes preparations.
        """
        if not self._samples or self._began is None:
            return None
        now = time.monotonic()
        begin, count = self._samples[0]
        if self.done == count or now - begin < _REDRAW_SECONDS:
            # A single sample, or one of a moment ago, is no base for a rate.
            begin, count = self._began, self._start
        return (self.done - count) / max(now - begin, 1e-9)

    def line(self, width: Optional[int] = None) -> str:
        """Returns the line as it is now.

        Args:
          width: the number of characters it may have; None if there is no limit, then there is no
            bar.
        """
        columns = []
        rate = self.rate()
        if rate:
            columns.append(_per_second(rate, self.unit))
            # A first step compiles: a minute of it says nothing of how long the others take.
            if self.total is not None and self.done - self._start > 1:
                columns.append(f"{duration(max(self.total - self.done, 0) / rate)} left")
        text = ", ".join([f"{self.label}: {self._count()}", *columns, *self._shown_values()])
        if width is None:
            return text
        # Besides its brackets: its spaces take the place of the colon and the space after it.
        room = min(width - len(text) - 2, _WIDEST_BAR)
        if self.total and room >= _NARROWEST_BAR:
            head, _, tail = text.partition(": ")
            text = f"{head} {_bar(self.done / self.total, room)} {tail}"
        return text if len(text) <= width else text[: max(width - 3, 0)] + "..."[:width]

    def _count(self) -> str:
        if self.unit == "byte":
            total = "" if self.total is None else f"/{bytes_text(self.total)}"
            return f"{bytes_text(self.done)}{total}"
        if self.total is None:
            return f"{self.done} {plural(self.unit, self.done)}"
        return f"{self.done}/{self.total} {plural(self.unit, self.total)}"

    def _shown_values(self) -> list[str]:
        return [f"{name} {_shown(value)}" for name, value in self._values.items()]

    def _last_line(self, stopped: bool) -> str:
        assert self._began is not None
        seconds = time.monotonic() - self._began
        took = f"{self._count()} in {duration(seconds)}"
        done = self.done - self._start
        if done and seconds >= 1:  # otherwise it says nothing
            took += f" ({_per_second(done / seconds, self.unit)})"
        how = "stopped at " if stopped else ""
        return ", ".join([f"{self.label}: {how}{took}", *self._shown_values()])


def duration(seconds: float) -> str:
    """Returns a duration in words.

    Args:
      seconds: a number of seconds.

    >>> [duration(s) for s in (0.24, 8.4, 72, 5000, 200000)]
    ['0.2 s', '8 s', '1:12', '1:23:20', '2 d 7:33:20']
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 5 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _per_second(rate: float, unit: str) -> str:
    """Returns a rate; slow ones as the seconds of a step."""
    if unit == "byte":
        return f"{bytes_text(rate)}/s"
    if rate < 1:
        return f"{1 / rate:.3g} s/{unit}"
    number = f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"
    return f"{number} {plural(unit, 0)}/s"


def _shown(value: Any) -> str:
    """Returns a value in a few characters."""
    if callable(value):
        value = value()
    if isinstance(value, (str, bool, int)):
        return str(value)
    number = float(value)
    return f"{number:.4g}" if abs(number) < 1e4 else f"{number:,.0f}"


def _bar(share: float, width: int) -> str:
    full = min(int(share * width), width)
    return "[" + ("=" * full + ">" * (full < width)).ljust(width) + "]"


def _is_terminal(stream: TextIO) -> bool:
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty()) and os.environ.get("TERM") != "dumb"


def _width(stream: TextIO) -> int:
    """Returns the width of a terminal; some do not say it."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return columns or 80


def _write(stream: TextIO, text: str) -> None:
    """Writes in the encoding of the stream, which may lack some characters."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    # A run must not end because nobody watches it any more: the terminal may be closed.
    with contextlib.suppress(OSError, ValueError):
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()


class _LiveLine:
    """The line of a terminal that is rewritten: the innermost Progress is shown.

    While there is one, everything that Python writes to the terminal clears it first: log records,
    warnings and prints. After each drawing, the cursor goes back to the beginning of the line, so
    that what other code writes begins there.
    """

    def __init__(self) -> None:
        # Reentrant: a value that is converted while the line is drawn may log, which clears the
        # line.
        self._lock = threading.RLock()
        self._members: list[Progress] = []
        self._shown: Optional[TextIO] = None
        self._unhook: Callable[[], None] = lambda: None
        self.in_a_line = False  # a print has begun a line, and has not ended it yet

    def join(self, progress: Progress) -> None:
        with self._lock:
            self.clear()
            if not self._members:
                self._unhook = _hook(self)
            self._members.append(progress)

    def leave(self, progress: Progress) -> None:
        with self._lock:
            self.clear()
            self._members.remove(progress)
            if not self._members:
                self._unhook()

    def show(self, progress: Progress) -> None:
        with self._lock:
            if self._members[-1] is not progress:
                return
            stream = progress._stream
            # A character in the last column makes some terminals begin a new line.
            text = progress.line(_width(stream) - 1)
            # Clearing would take away what a print has begun to write.
            begin = "\n" if self.in_a_line else _CLEAR
            self.in_a_line = False
            _write(stream, f"{begin}{text}\r")
            self._shown = stream

    def clear(self) -> None:
        with self._lock:
            if self._shown is not None:
                stream, self._shown = self._shown, None
                _write(stream, _CLEAR)


_line = _LiveLine()


def _hook(line: _LiveLine) -> Callable[[], None]:
    """Makes Python's own output clear a live line first; returns what ends that."""
    # Handlers of logs hold the stream that they were created with, so replacing `sys.stderr` does
    # not reach them. A record is made before any of them writes.
    make_record, show_warning = logging.getLogRecordFactory(), warnings.showwarning

    def clear_and_make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        line.clear()
        return make_record(*args, **kwargs)

    def clear_and_show(*args: Any, **kwargs: Any) -> None:
        line.clear()
        show_warning(*args, **kwargs)

    replaced = {
        name: (stream, _Clearing(stream, line))
        for name, stream in [("stdout", sys.stdout), ("stderr", sys.stderr)]
        if stream is not None and _is_terminal(stream)
    }
    logging.setLogRecordFactory(clear_and_make)
    warnings.showwarning = clear_and_show
    for name, (_, clearing) in replaced.items():
        setattr(sys, name, clearing)

    def unhook() -> None:
        # What others have put in place since then stays.
        if logging.getLogRecordFactory() is clear_and_make:
            logging.setLogRecordFactory(make_record)
        if warnings.showwarning is clear_and_show:
            warnings.showwarning = show_warning
        for name, (stream, clearing) in replaced.items():
            if getattr(sys, name) is clearing:
                setattr(sys, name, stream)

    return unhook


class _Clearing:
    """A stream that clears a live line before it writes."""

    def __init__(self, stream: TextIO, line: _LiveLine):
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        self._line.clear()
        if text:
            self._line.in_a_line = not text.endswith("\n")
        return self._stream.write(text)

    def writelines(self, lines: list[str]) -> None:
        for text in lines:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _unwrapped(stream: TextIO) -> TextIO:
    """Returns the stream that a live line in the terminal has replaced."""
    return stream._stream if isinstance(stream, _Clearing) else stream

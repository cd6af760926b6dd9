"""The progress line: in a terminal, in a file, between log lines; rates and times."""

import contextlib
import fcntl
import io
import logging
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
import warnings

import pytest

from mesh_tensorflow import _progress
from mesh_tensorflow._progress import Progress, duration


@pytest.fixture
def at_once(monkeypatch):
    """Lines are written at once, where users would see none in the first second."""
    monkeypatch.setattr(_progress, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(_progress, "_REDRAW_SECONDS", 0.0)


def untimed(text):
    """Replaces the seconds that something took, which are more on a busy machine."""
    return re.sub(r"in \d+\.\d s", "in 0.0 s", text)


_END = "\x04"  # after what has been written, for the reader to know that it has all


class Terminal:
    """A pseudoterminal: `stream` writes to it, `screen` is what it shows in the end.

    It is read all the time, since a write waits where the buffer is full.
    """

    def __init__(self, columns=80, encoding="utf-8"):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = open(slave, "w", encoding=encoding, buffering=1)
        self._received = bytearray()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self):
        with contextlib.suppress(OSError):  # the other end was closed
            while data := os.read(self._master, 1 << 16):
                self._received += data

    def read(self):
        """Returns what was written since the last call."""
        self.stream.write(_END)
        self.stream.flush()
        end = time.monotonic() + 60
        while not self._received.endswith(_END.encode()):
            assert time.monotonic() < end, bytes(self._received)
            time.sleep(0.001)
        data = bytes(self._received).removesuffix(_END.encode())
        self._received.clear()
        return data.decode(self.stream.encoding).replace("\r\n", "\n")

    def screen(self):
        """Returns the lines that are seen: a line that is returned to is written over."""
        lines, at = [""], 0
        text = self.read().replace("\x1b[K", "\0")
        for c in text:
            if c == "\n":
                lines.append("")
                at = 0
            elif c == "\r":
                at = 0
            elif c == "\0":
                lines[-1] = lines[-1][:at]
            else:
                lines[-1] = lines[-1][:at] + c + lines[-1][at + 1 :]
                at += 1
        return lines


@pytest.fixture
def output(monkeypatch):
    """Returns a function that makes a terminal the output of a test, whose own pytest captures."""

    def becomes(terminal):
        monkeypatch.setattr(sys, "stdout", terminal.stream)
        monkeypatch.setattr(sys, "stderr", terminal.stream)

    return becomes


@pytest.fixture
def terminal(at_once, monkeypatch):
    made = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    yield made
    made.stream.close()


def test_work_of_less_than_a_second_has_only_a_last_line():
    stream = io.StringIO()
    with Progress(300, "train", stream=stream) as progress:
        for i in range(300):
            progress.update(loss=1 / (i + 1))
    assert untimed(stream.getvalue()) == "train: 300/300 steps in 0.0 s, loss 0.003333\n"


def test_the_last_step_is_told_once(at_once):
    stream = io.StringIO()
    with Progress(1, "train", stream=stream) as progress:
        progress.update()
    assert untimed(stream.getvalue()) == "train: 1/1 step in 0.0 s\n"


def test_a_silent_line_writes_nothing(at_once, terminal, output):
    output(terminal)
    with Progress(9, "train", show=False) as progress:
        progress.update(loss=0.5)
        print("in between")
    assert terminal.read() == "in between\n"


def test_bytes_are_shown_in_units(at_once):
    stream = io.StringIO()
    with Progress(3 * 2**20, "read", unit="byte", stream=stream) as progress:
        progress.update(2**20)
        assert re.search(r"^read: 1 MiB/3 MiB(, [\d.,]+ [KMGTP]iB/s, .* left)?$", progress.line())
        progress.update(2**21)
    assert untimed(stream.getvalue()).endswith("read: 3 MiB/3 MiB in 0.0 s\n")


def test_a_file_gets_few_lines(at_once, monkeypatch):
    monkeypatch.setattr(_progress, "_FIRST_PAUSE", 0.02)
    stream = io.StringIO()
    with Progress(None, "read", unit="example", stream=stream) as progress:
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            progress.update(4, size="big")
            time.sleep(0.001)
    lines = stream.getvalue().splitlines()
    # At the beginning, after 0.02, 0.06, 0.14, 0.3 s, and at the end.
    assert 3 <= len(lines) <= 6
    assert lines[0] == "read: 4 examples, size big" or "examples/s, size big" in lines[0]
    assert lines[-1].startswith(f"read: {progress.done} examples in 0.4 s")


def test_time_left_leaves_the_first_step_out(at_once):
    progress = Progress(12, "train", stream=io.StringIO())
    progress.update(0)
    time.sleep(0.3)
    progress.update()  # the first step takes long
    for _ in range(4):
        time.sleep(0.05)
        progress.update()
    assert 10 < progress.rate() < 20.1
    assert " steps/s, 0." in progress.line() and progress.line().endswith(" s left")


def test_a_run_that_goes_on_counts_from_where_it_was():
    stream = io.StringIO()
    with Progress(10, "train", stream=stream, start=6) as progress:
        assert progress.line() == "train: 6/10 steps"
        progress.update()
    assert untimed(stream.getvalue()) == "train: 7/10 steps in 0.0 s\n"


def test_a_run_that_is_stopped_says_where(terminal, output):
    output(terminal)
    with pytest.raises(KeyboardInterrupt), Progress(10, "train") as progress:
        progress.update(3)
        raise KeyboardInterrupt
    assert [*map(untimed, terminal.screen())] == ["train: stopped at 3/10 steps in 0.0 s", ""]


def test_the_line_of_a_terminal_is_one(terminal, output):
    output(terminal)
    with Progress(200, "train") as progress:
        for _ in range(200):
            progress.update(loss=0.5)
        shown = terminal.screen()
    assert len(shown) == 1
    # The cursor stands at the beginning of the line.
    assert shown[0].startswith("train [====") and "200/200 steps" in shown[0]
    assert len(shown[0]) < 80
    assert [*map(untimed, terminal.screen())] == [
        "train: 200/200 steps in 0.0 s, loss 0.5",
        "",
    ]


@pytest.mark.slips
def test_other_output_is_on_lines_of_its_own(terminal, output):
    output(terminal)
    handler = logging.StreamHandler(terminal.stream)
    logger = logging.getLogger("test_progress")
    logger.addHandler(handler)
    factory, shown = logging.getLogRecordFactory(), warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *args, **named: handler.stream.write(f"{message}\n")
        with Progress(9, "train") as progress:
            progress.update(1)
            logger.warning("a record")
            progress.update(1)
            print("a print")
            progress.update(1)
            warnings.warn("a warning", stacklevel=1)
            progress.update(1)
            print("a word, ", end="")
            print("another")
            progress.update(1)
            print("no end", end="")
            progress.update(4)
    logger.removeHandler(handler)
    lines = terminal.screen()
    assert lines[:4] == ["a record", "a print", "a warning", "a word, another"]
    assert lines[4] == "no end" and lines[5].startswith("train: 9/9 steps in")
    assert lines[6:] == [""]
    assert sys.stdout is terminal.stream and sys.stderr is terminal.stream
    assert logging.getLogRecordFactory() is factory and warnings.showwarning is shown


def test_the_inner_of_two_is_shown(terminal, output):
    output(terminal)
    with Progress(9, "train") as outer:
        outer.update(1)
        with Progress(4, "evaluate", leave=False) as inner:
            inner.update(1)
            outer.update(1)
            middle = terminal.screen()
        outer.update(1)
        after = terminal.screen()
    assert [line.split(" [")[0] for line in middle] == ["evaluate"]
    assert [line.split(" [")[0] for line in after] == ["train"]
    assert len(terminal.screen()) == 2


def test_a_narrow_terminal(at_once, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress(1000, "a long label", stream=io.StringIO())
    progress.update(10, loss=0.123)
    full = progress.line(200)
    assert "[>" in full and "10/1000 steps" in full
    assert "[" not in progress.line(70)
    assert progress.line(20) == progress.line()[:17] + "..."
    assert len(progress.line(2)) == 2


def test_a_stream_without_some_characters(at_once):
    data = io.BytesIO()
    stream = io.TextIOWrapper(data, encoding="ascii")
    with Progress(1, "Größe", stream=stream) as progress:
        progress.update()
    last = data.getvalue().splitlines()[-1].decode()
    assert untimed(last) == "Gr??e: 1/1 step in 0.0 s"


def test_a_stream_that_is_closed_does_not_end_the_work(at_once):
    stream = io.StringIO()
    with Progress(2, "train", stream=stream) as progress:
        progress.update()
        stream.close()
        progress.update()
    assert progress.done == 2


def test_values_are_converted_when_they_are_shown():
    calls = []
    progress = Progress(3, "train", stream=io.StringIO())
    progress.update(loss=lambda: calls.append(1) or 12345.6)
    assert not calls
    assert progress.line().endswith(", loss 12,346") and calls == [1]


def test_durations():
    assert [duration(s) for s in (59.6, 60, 3599.7, 86400)] == [
        "60 s",
        "1:00",
        "1:00:00",
        "1 d 0:00:00",
    ]


def test_slow_steps_are_told_in_seconds(at_once):
    progress = Progress(3, "compile", unit="query", stream=io.StringIO())
    progress.update(0)
    time.sleep(0.25)
    progress.update(0)
    assert progress.rate() is None
    assert _progress._per_second(0.25, "query") == "4 s/query"
    assert _progress._per_second(2500.4, "query") == "2500 queries/s"


def test_nothing_is_shown_after_the_end(at_once):
    stream = io.StringIO()
    progress = Progress(3, "train", stream=stream)
    progress.update()
    progress.close()
    before = stream.getvalue()
    progress.update(1, n=2.0)
    assert stream.getvalue() == before and progress.done == 1

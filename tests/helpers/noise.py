"""Counts what programs write that does not serve their users.

`check(done)` is for programs that a test runs anyway; `run` starts one in a process of its own, in
which nothing is imported yet, with pipes or in a terminal.
"""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

from helpers.paths import TESTS, environment
from helpers.processes import python

__all__ = ["MOST", "check", "lines_of", "noise_in", "run", "screen"]

MOST = 10  # lines of a program that do not serve its user
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"

# What nobody asked for, wherever it stands in a line: log lines of TensorFlow, absl and gin,
# warnings of Python, and news of libraries about themselves.
NOISE = [
    ("C++ log line", r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWEF] "),
    ("C++ log line", r"(?:^|[^\w])[IWEF]\d{4} \d\d:\d\d:\d+\.\d+\s+\d+ \S+:\d+\] "),
    ("C++ log line", r"All log messages before absl::InitializeLog"),
    ("Python log line", r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):\w+:"),
    ("deprecation", r"Instructions for updating:|is deprecated and will be removed"),
    ("deprecation", r"non-resource variables are not supported in the long term"),
    ("warning", r"\S:\d+: \w*Warning: "),
    ("warning", r"^\s*warnings\.warn\("),
    ("gin", r"Path not found: "),
    ("iterator", r"Local rendezvous|End of sequence|OUT_OF_RANGE"),
    ("TensorFlow", r"oneDNN|cpu_feature_guard|cost_estimator|grappler"),
    ("TensorFlow's hooks", r"^(?:Calling model_fn|Done calling model_fn|Graph was finalized)\b"),
    ("TensorFlow's hooks", r"^(?:Running local_init_op|Done running local_init_op)\b"),
    ("TensorFlow's hooks", r"^(?:Create CheckpointSaverHook|Calling checkpoint listeners)\b"),
    ("TensorFlow's hooks", r"^(?:Restoring parameters from|Saving checkpoints for) "),
    ("traceback", r"^Traceback \(most recent call last\)"),
]
# What is written to the standard error stream for the user.
SERVED = [
    r"^\s*$",
    r"^[\w ./-]+: (?:stopped at )?\d[\d,]*/?[\d,]* \w+.*",  # progress lines
    r"^(?:mesh|layout|parameters|per processor|communication|logs|checkpoints) +\S",
    r"^ {16}\S.* (?:times|once|kinds)",  # the report of a training at its start
    r"^step \d+: evaluation: ",
    r"^loss = .*step = \d+",
    r"^(?:error|stopped|usage|warning): ",
    r"^MeshTensorFlowWarning: ",
]
_CONTROL = re.compile(r"\x1b\[(\d*)([A-Za-z])")


def noise_in(lines, served=(), everything=False):
    """Returns (kind, line) for each line that does not serve the user.

    Args:
      lines: the lines.
      served: patterns of lines that the program writes for its user.
      everything: whether a line that matches no pattern is noise too.
    """
    found = []
    for line in lines:
        if any(re.search(pattern, line) for pattern in served):
            continue
        kind = next((kind for kind, pattern in NOISE if re.search(pattern, line)), None)
        if kind is None and everything and not any(re.search(p, line) for p in SERVED):
            kind = "unknown"
        if kind is not None:
            found.append((kind, line))
    return found


def check(done, served=(), most=MOST):
    """Asserts that what a process wrote has few lines that do not serve the user.

    Args:
      done: a Done; unknown lines count if they are on its stderr.
      served: patterns of lines that the program writes for its user.
      most: how many other lines there may be.

    Returns:
      The Done.
    """
    found = noise_in(done.stdout.splitlines(), served)
    found += noise_in(done.stderr.splitlines(), served, everything=True)
    assert len(found) <= most, _told(found)
    return done


def _told(found):
    return f"{len(found)} lines do not serve the user:\n" + "\n".join(
        f"  {kind}: {line}" for kind, line in found[:60]
    )


def lines_of(transcript):
    """Returns the lines that a terminal shows, and those in which two texts are mixed.

    A live line that is rewritten leaves one line. It runs into another if that one neither clears
    it nor is written over all of it.
    """
    shown, mixed = [], []
    for line in transcript.replace("\r\n", "\n").split("\n"):
        cells, cursor, turn, place = [], 0, 0, 0
        while place < len(line):
            control = _CONTROL.match(line, place)
            if control:
                if control[2] == "K":
                    cells = [] if control[1] == "2" else cells[:cursor]
                place = control.end()
                continue
            char = line[place]
            place += 1
            if char == "\r":
                cursor, turn = 0, turn + 1
                continue
            cells[cursor : cursor + 1] = [(char, turn)]
            cursor += 1
        text = "".join(char for char, _ in cells)
        shown.append(text)
        if len({turn for _, turn in cells}) > 1:
            mixed.append(text)
    return shown, mixed


def screen(transcript):
    """Returns the lines that a terminal shows; asserts that none is a mixture of two."""
    shown, mixed = lines_of(transcript)
    assert not mixed, f"a live line runs into another line: {mixed}"
    return shown


def run(*arguments, terminal=False, timeout=300, cwd=None, served=(), most=MOST, code=0):
    """Runs `python ARGUMENTS` in a process of its own, and checks what it writes.

    Args:
      *arguments: the arguments of Python.
      terminal: whether its streams are a terminal; else pipes.
      timeout: seconds after which it is killed.
      cwd: its directory.
      served: patterns of lines that the program writes for its user.
      most: how many lines may not serve the user.
      code: its exit code.

    Returns:
      Its lines, in a terminal those that are left on the screen.
    """
    cwd = cwd or TESTS.parent
    if terminal:
        variables = environment(PYTHONUNBUFFERED="1", TERM="xterm")
        variables.pop(_LEVEL, None)
        command = [sys.executable, *map(str, arguments)]
        status, text = _in_terminal(command, variables, cwd, timeout)
        lines = screen(text)
        found = noise_in(lines, served)
    else:
        ended = python(
            *arguments, code=None, timeout=timeout, cwd=cwd, without=[_LEVEL], PYTHONUNBUFFERED="1"
        )
        status, text = ended.returncode, ended.stdout + ended.stderr
        lines = text.splitlines()
        check(ended, served, most)
        found = []
    assert status == code, text
    assert len(found) <= most, _told(found)
    return lines


def _in_terminal(command, variables, cwd, timeout):
    """Returns the exit code and the transcript of a command whose streams are a terminal."""
    own, its = pty.openpty()
    process = subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, env=variables, cwd=cwd, start_new_session=True
    )
    os.close(its)
    deadline, parts = time.monotonic() + timeout, []
    try:
        while True:
            ready, _, _ = select.select([own], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{command} did not end within {timeout} s")
            try:
                part = os.read(own, 65536)
            except OSError:  # Linux's answer once the other end is closed
                break
            if not part:
                break
            parts.append(part)
        return process.wait(30), b"".join(parts).decode(errors="replace")
    finally:
        os.close(own)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

"""Processes that measure, and answer in lines of JSON."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Process", "peak_mb", "serve"]


def peak_mb() -> float:
    """The largest resident memory of this process since it was last reset, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10


def serve(prepare: Callable[[], tuple[Callable[[], Any], dict[str, Any]]]) -> None:
    """Answers requests until the end of the input.

    Args:
      prepare: returns what is timed, and the first answer. What it prints goes to the error stream.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    run, answer = prepare()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of what is measured, not of loading
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            return
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        answer = {"seconds": seconds, "peak_mb": peak_mb()}


class Process:
    """A process that serves.

    Attributes:
      name: what it is called in messages.
      ready: its first answer.
    """

    def __init__(self, name: str, command: Sequence[str], drop: Sequence[str] = ()):
        """Starts it and waits for its first answer.

        Args:
          name: what it is called in messages.
          command: the program and its arguments.
          drop: environment variables that it does not get.
        """
        self.name = name
        environment = {k: v for k, v in os.environ.items() if k not in drop}
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.ready = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self.name}: {self._log.read()[-2000:]}")
        return json.loads(line)

    def ask(self, count: int) -> Any:
        """Has it repeat what it measures; returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

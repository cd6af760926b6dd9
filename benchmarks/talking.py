"""Processes that measure: they answer in lines of JSON, or leave a file of it when they end."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Union

__all__ = [
    "ALLOCATORS",
    "Process",
    "forget_largest",
    "leave",
    "measured_together",
    "memory",
    "peak_mb",
    "serve",
]

# Environment variables with which memory is returned as soon as a tensor is freed; or none.
ALLOCATORS: dict[str, dict[str, str]] = {
    "direct": {"TF_ENABLE_ONEDNN_OPTS": "0", "MALLOC_MMAP_THRESHOLD_": "65536"},
    "default": {},
}


def memory(field: str) -> int:
    """Bytes of this process: VmRSS, those that are resident now, or VmHWM, the largest."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def forget_largest() -> None:
    """Makes VmHWM begin again at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def measured_together(
    script: str, processes: int, options: Sequence[str], worker: str, allocator: str
) -> list[Any]:
    """Runs a script as several processes that train together; returns what each has left.

    Args:
      script: the path of the script.
      processes: how many.
      options: its command line, but for the following.
      worker: the value of its option `--worker`, which a directory for `leave` is added to.
      allocator: a key of `ALLOCATORS`.
    """
    with tempfile.TemporaryDirectory() as directory:
        program = [
            *("-m", "mesh_tensorflow.launch", "--processes", str(processes), script),
            *("--processes", str(processes), *options, "--worker", f"{worker}:{directory}"),
        ]
        environment = {**os.environ, **ALLOCATORS[allocator]}
        subprocess.run([sys.executable, *program], check=True, env=environment)
        return [json.loads(path.read_text()) for path in sorted(Path(directory).iterdir())]


def leave(directory: str, index: int, found: Any) -> None:
    """Leaves what the process of a number has measured."""
    (Path(directory) / f"process_{index:04d}.json").write_text(json.dumps(found))


def peak_mb() -> float:
    """The largest resident memory of this process since it was last reset, in MB."""
    return memory("VmHWM") / 2**20


# What is timed: a function, or several by their names.
Runs = Union[Callable[[], Any], Mapping[str, Callable[[], Any]]]


def serve(prepare: Callable[[], tuple[Runs, dict[str, Any]]]) -> None:
    """Answers requests until the end of the input.

    Args:
      prepare: returns what is timed, and the first answer. What it prints goes to the error stream.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    runs, answer = prepare()
    forget_largest()  # the peak of what is measured, not of loading
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            return
        count, *names = line.split()
        run = runs if callable(runs) else runs[names[0]]
        seconds = []
        for _ in range(int(count)):
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

    def ask(self, count: int, name: str = "") -> Any:
        """Has it repeat what it measures, or what has a name there; returns its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count} {name}\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

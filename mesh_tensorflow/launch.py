"""Starts several processes of one program, which discover each other.

    python -m mesh_tensorflow.launch --processes 4 script.py --its_flags
    python -m mesh_tensorflow.launch --processes 4 -m its.module --its_flags

starts four processes of a script on this machine. Within the script, `processes()` returns all
processes and the index of this one; on a cluster with another launcher, it reads TF_CONFIG or the
variables of SLURM.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Optional

from mesh_tensorflow._processes.peers import POLL_SECONDS
from mesh_tensorflow._processes.processes import Processes, processes, task_of, variables_for

__all__ = ["Processes", "main", "processes"]

_LAST_LINES = 25


# Makes Linux kill the process when the launcher ends, for any reason, then executes the command.
# (A function between fork and exec would run next to the launcher's threads.)
# The process looks at its parent afterwards: of one that ended before the call, no signal comes.
_ENDS_WITH_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def _ending_with_launcher(command: Sequence[str]) -> list[str]:
    """Returns a command whose process ends with this one, if the system supports that."""
    program = shutil.which(command[0])
    if sys.platform != "linux" or program is None:
        return list(command)
    return [
        sys.executable,
        # With -I and -S, no module of the current directory, such as a `signal.py`, and no site
        # packages are imported.
        "-I",
        "-S",
        "-c",
        _ENDS_WITH_LAUNCHER,
        str(os.getpid()),
        program,
        *command[1:],
    ]


class _Child:
    """A process of the script; its output is shown, or its last lines are kept."""

    def __init__(
        self,
        command: Sequence[str],
        index: int,
        addresses: Sequence[str],
        shown: bool,
        runtime: str = "tensorflow",
    ):
        kind, number = task_of(index)
        self.index = index
        self.name = f"process {index} ({kind} {number}, {addresses[index]})"
        self.process = subprocess.Popen(
            _ending_with_launcher(command),
            env={**os.environ, **variables_for(addresses, index, runtime)},
            stdout=None if shown else subprocess.PIPE,
            stderr=None if shown else subprocess.STDOUT,
        )
        self.lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._reader: Optional[threading.Thread] = None
        if not shown:
            # A pipe that nobody reads fills up, and the process would wait for ever to write to it.
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip("\n"))

    def end(self) -> None:
        """Terminates the process, and kills it if that fails."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def how_it_ended(self) -> str:
        """Returns a sentence about how the process ended, with its last lines of output."""
        if self._reader is not None:
            # Not for ever: what the process has started may still hold the other end of the pipe.
            self._reader.join(1)
        status = self.process.returncode
        how = (
            f"was killed by {signal.Signals(-status).name}"
            if status < 0
            else f"ended with status {status}"
        )
        wrote = "".join(f"\n    {line}" for line in self.lines)
        return f"{self.name} {how}{wrote}"


# Below those that systems give to connections, one of which may take a port that is free here
# before a process of the script, seconds later, begins to listen at it.
_PORTS = (10000, 32768)
_TRIES = 100  # of ports there, before the system chooses one


def _free_addresses(count: int) -> list[str]:
    """Returns addresses on this machine with unused ports."""
    sockets = [socket.socket() for _ in range(count)]
    # By chance, so that several launchers at once choose different ones.
    chance = random.SystemRandom()
    try:
        for s in sockets:
            for port in [*(chance.randrange(*_PORTS) for _ in range(_TRIES)), 0]:
                with contextlib.suppress(OSError):
                    s.bind(("127.0.0.1", port))
                    break
        # All sockets are still bound here, so no port is given twice.
        return [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    finally:
        for s in sockets:
            s.close()


def run(
    command: Sequence[str], count: int, show_all: bool = False, runtime: str = "tensorflow"
) -> int:
    """Runs a command in several processes that know each other's addresses.

    If one fails, the others are terminated, and its last lines of output are shown.

    Args:
      command: a list of strings.
      count: the number of processes.
      show_all: whether to show the output of all processes; by default only of the first.
      runtime: what connects the processes: "tensorflow", or "pjrt" for JAX.

    Returns:
      0, or 1 if a process failed.
    """
    addresses = _free_addresses(count)
    children = [_Child(command, i, addresses, show_all or i == 0, runtime) for i in range(count)]
    try:
        while True:
            statuses = [child.process.poll() for child in children]
            # A process that was killed comes first: others may have failed because of it.
            failed = sorted(
                (status, child.index) for status, child in zip(statuses, children) if status
            )
            if failed:
                sys.stdout.flush()
                first = children[failed[0][1]]
                print(
                    f"mesh_tensorflow.launch: {first.how_it_ended()}\n"
                    f"Ending the other {count - 1}.",
                    file=sys.stderr,
                    flush=True,
                )
                return 1
            if all(status == 0 for status in statuses):
                return 0
            time.sleep(POLL_SECONDS)
    finally:
        for child in children:
            child.end()


def _options(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        prog="python -m mesh_tensorflow.launch",
        description="Starts several processes of a script on this machine, which find each other "
        "by\nmesh_tensorflow.launch.processes(). Ends all if one fails.",
    )
    parser.add_argument("--processes", type=int, required=True, help="how many")
    parser.add_argument(
        "--show_all",
        action="store_true",
        help="show what every process writes, not the first alone",
    )
    parser.add_argument(
        "--runtime",
        choices=("tensorflow", "pjrt"),
        default="tensorflow",
        help="what connects them: TensorFlow's servers, or JAX, for mesh_tensorflow.pjrt",
    )
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        default=[],
        help="a module in place of a script, and its arguments",
    )
    parser.add_argument("script", nargs="?", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, got {options.processes}")
    if not options.script and not options.module:
        parser.error("name a script, or a module by -m")
    if options.script and not os.path.exists(options.script):
        parser.error(f"there is no script {options.script}")
    return options


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command line; see the module docstring."""
    parsed = _options(arguments)
    # As an exception, so that `run` ends its processes in order; the default ends this one at once.
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(143))
    named = [parsed.script, *parsed.arguments] if parsed.script else ["-m", *parsed.module]
    command = [sys.executable, *named]
    return run(command, parsed.processes, parsed.show_all, parsed.runtime)


if __name__ == "__main__":
    sys.exit(main())

"""Starts several processes of one program, which discover each other.

    python -m mesh_tensorflow.launch --processes 4 script.py --its_flags
    python -m mesh_tensorflow.launch --processes 4 -m its.module --its_flags

starts four processes of a script on this machine. Within the script, `processes()` returns all
processes and the index of this one; on a cluster with another launcher, it reads TF_CONFIG or the
variables of SLURM.

With `--restarts 3`, a process that is lost does not end the program: all processes are ended and
started again, up to three times, and go on from the last checkpoint, as `mtf.train.fit` does. With
`--min_processes 2`, there are fewer of them after two losses.
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
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NamedTuple, Optional

from mesh_tensorflow._processes.peers import POLL_SECONDS
from mesh_tensorflow._processes.processes import Processes, processes, task_of, variables_for
from mesh_tensorflow._programs import parser_of
from mesh_tensorflow._units import plural

__all__ = ["Processes", "main", "processes"]

_LAST_LINES = 25
_LOSSES = 2  # of as many processes, before there are fewer
_END_SECONDS = 10.0  # for the other processes, when one has failed


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
            # A terminal sends Ctrl-C to all processes of a session: with one of its own, this one
            # gets it once, from the launcher. A second one would end it before it has saved.
            start_new_session=True,
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


class Options(NamedTuple):
    """How processes are run.

    Attributes:
      processes: their number.
      show_all: whether to show the output of all of them; by default only of the first.
      runtime: what connects the processes: "tensorflow", or "pjrt" for JAX.
      restarts: how often they are started again after one has failed.
      min_processes: how few there may be then; None for as many as at first.
      grace_seconds: how long they may take to end when the launcher is asked to.
    """

    processes: int
    show_all: bool = False
    runtime: str = "tensorflow"
    restarts: int = 0
    min_processes: Optional[int] = None
    grace_seconds: float = 60.0


class _Stopped(SystemExit):
    """The launcher was asked to end.

    Attributes:
      number: the signal to pass on.
    """

    def __init__(self, number: signal.Signals):
        super().__init__(128 + number)
        self.number = number


def _stop(number: int, frame: Optional[FrameType]) -> None:
    # As an exception, so that `_run_once` ends its processes in order; a second one kills them.
    raise _Stopped(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


def _end(children: Sequence[_Child], number: signal.Signals, seconds: float) -> None:
    """Sends a signal to processes, and kills those that have not ended after some seconds."""
    deadline = time.monotonic() + seconds
    try:
        for child in children:
            child.process.send_signal(number)  # which does nothing to one that has ended
        for child in children:
            child.process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        pass  # they are killed
    finally:
        for child in children:
            child.process.kill()
            child.process.wait()


def _run_once(command: Sequence[str], options: Options, count: int) -> bool:
    """Runs a command in several processes; returns whether all succeed. If one fails, ends all."""
    addresses = _free_addresses(count)
    children: list[_Child] = []
    number, seconds = signal.SIGTERM, _END_SECONDS
    try:
        for i in range(count):
            shown = options.show_all or i == 0
            children.append(_Child(command, i, addresses, shown, options.runtime))
        while True:
            statuses = [child.process.poll() for child in children]
            # A process that was killed comes first: others may have failed because of it.
            failed = sorted(
                (status, child.index) for status, child in zip(statuses, children) if status
            )
            if failed:
                first = children[failed[0][1]]
                _say(f"{first.how_it_ended()}\nEnding the other {count - 1}.")
                return False
            if all(status == 0 for status in statuses):
                return True
            time.sleep(POLL_SECONDS)
    except _Stopped as stopped:
        number, seconds = stopped.number, options.grace_seconds
        _say(f"{number.name} is passed on to all processes, which have {seconds:g} s to end.")
        raise
    finally:
        _end(children, number, seconds)


def _say(text: str) -> None:
    sys.stdout.flush()
    print(f"mesh_tensorflow.launch: {text}", file=sys.stderr, flush=True)


def run(command: Sequence[str], options: Options) -> int:
    """Runs a command in several processes that know each other's addresses.

    If one fails, the others are terminated, and its last lines of output are shown. All are started
    again, as often as `options` say.

    Args:
      command: a list of strings.
      options: how they are run.

    Returns:
      0, or 1 if a process failed, and no restart was left.
    """
    count, losses = options.processes, 0
    least = count if options.min_processes is None else options.min_processes
    for restart in range(1, options.restarts + 2):
        if _run_once(command, options, count):
            return 0
        if restart > options.restarts:
            break
        losses += 1
        before = count
        if losses == _LOSSES and count > least:
            # Halved, as sizes that a mesh divides by one number it mostly divides by half of it.
            count, losses = max(count // 2, least), 0
        fewer = f"{count} {plural('process', count)} in place of {before}"
        which = f"all {count} again" if count == before else fewer
        _say(f"Starting {which}: restart {restart} of {options.restarts}.")
    if options.restarts:
        _say(f"No restart is left of {options.restarts}.")
    return 1


def _check(options: argparse.Namespace, error: Callable[[str], object]) -> None:
    """Calls a function with what is wrong with a command line."""
    if options.processes < 1:
        error(f"--processes must be at least 1, got {options.processes}")
    if options.restarts < 0:
        error(f"--restarts must be at least 0, got {options.restarts}")
    if options.min_processes is not None and not 1 <= options.min_processes <= options.processes:
        error(
            f"--min_processes must be 1 to {options.processes}, the number of processes, got "
            f"{options.min_processes}"
        )
    if options.min_processes is not None and not options.restarts:
        error("--min_processes has no effect without --restarts")
    if not options.script and not options.module:
        error("name a script, or a module by -m")
    if options.script and not os.path.exists(options.script):
        error(f"there is no script {options.script}")


def _parsed(arguments: Optional[Sequence[str]]) -> tuple[list[str], Options]:
    """Returns the command of each process, and how they are run, as the command line says."""
    parser = parser_of(
        "launch",
        "Starts several processes of a script on this machine, which find each other by\n"
        "mesh_tensorflow.launch.processes(). Ends all if one fails.",
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
        "--restarts",
        type=int,
        default=0,
        help="how often all are started again after one has failed",
    )
    parser.add_argument(
        "--min_processes",
        type=int,
        help="after two failures of as many processes, start half of them, but not fewer than this",
    )
    parser.add_argument(
        "--grace_seconds",
        type=float,
        default=Options._field_defaults["grace_seconds"],
        help="how long processes may take to save and end after SIGTERM or Ctrl-C",
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
    flags = parser.parse_args(arguments)
    _check(flags, parser.error)
    named = [flags.script, *flags.arguments] if flags.script else ["-m", *flags.module]
    options = Options(**{name: getattr(flags, name) for name in Options._fields})
    return [sys.executable, *named], options


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command line; see the module docstring."""
    command, options = _parsed(arguments)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # What is ignored, as SIGHUP by nohup, stays so.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    return run(command, options)


if __name__ == "__main__":
    sys.exit(main())

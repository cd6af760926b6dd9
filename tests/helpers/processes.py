"""Runs programs in processes of their own.

`run` and `started` fork one with TensorFlow imported and nothing done, which saves the seconds of the
import; `python` and `launch` begin a fresh one, where what comes before the import matters.
"""

import contextlib
import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from typing import NamedTuple
from unittest import mock

from helpers.paths import environment

__all__ = ["Done", "Running", "context", "launch", "python", "run", "started"]


class Done(NamedTuple):
    """What a process ended with."""

    returncode: int
    stdout: str
    stderr: str


@functools.cache
def context():
    """Returns what makes such processes; all tests share the one that they are forked from."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["mesh_tensorflow", "helpers.processes"])
    with mock.patch.dict(os.environ, environment()):
        forkserver.ensure_running()
    return made


def _main(arguments, variables, directory, files):
    for number, file in enumerate(files, 1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    kind, *rest = arguments
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = rest
        sys.path.insert(0, directory)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        sys.path.insert(0, os.path.dirname(kind))
        runpy.run_path(kind, run_name="__main__")


class Running:
    """A process that runs what `python ARGUMENTS` would.

    Attributes:
      process: the process.
    """

    def __init__(self, arguments, cwd, directory):
        self._files = [os.path.join(directory, name) for name in ("stdout", "stderr")]
        self._arguments = arguments
        where = str(cwd or os.getcwd())
        self.process = context().Process(
            target=_main,
            args=([str(a) for a in arguments], dict(os.environ), where, self._files),
        )
        self.process.start()

    def texts(self):
        """Returns [what it has written to stdout so far, the same of stderr]."""
        texts = []
        for file in self._files:
            with contextlib.suppress(FileNotFoundError), open(file, encoding="utf-8") as f:
                texts.append(f.read())
        return texts if len(texts) == 2 else ["", ""]

    def end(self, timeout=300):
        """Waits for its end, and returns a Done; kills it after some seconds."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"{self._arguments} did not end within {timeout} s")
        return Done(self.process.exitcode, *self.texts())


@contextlib.contextmanager
def started(*arguments, cwd=None):
    """Returns a context in which a process runs, a Running; see `run`."""
    with tempfile.TemporaryDirectory() as directory:
        running = Running(arguments, cwd, directory)
        try:
            yield running
        finally:
            if running.process.exitcode is None:
                running.process.kill()
                running.process.join()


def run(*arguments, timeout=300, cwd=None):
    """Runs what `python ARGUMENTS` would, without the seconds that it takes to import TensorFlow.

    Args:
      *arguments: "-c" and a program, "-m" and a module, or a script; then its arguments.
      timeout: seconds after which the process is killed.
      cwd: its directory; that of this process if None.

    Returns:
      A Done.

    Raises:
      TimeoutError: it was killed.
    """
    with started(*arguments, cwd=cwd) as running:
        return running.end(timeout)


def python(*arguments, code=0, timeout=300, cwd=None, without=(), **variables):
    """Runs `python ARGUMENTS` in a fresh process.

    Args:
      *arguments: the arguments of Python.
      code: the exit code that it must end with; None for any.
      timeout: seconds after which it is killed.
      cwd: its directory; that of this process if None.
      without: names of variables that its environment lacks.
      **variables: variables of its environment, besides those of this process.

    Returns:
      A Done.
    """
    given = environment(**variables)
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={name: value for name, value in given.items() if name not in without},
        cwd=cwd, timeout=timeout, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert code in (None, ended.returncode), ended.stdout[-1000:] + ended.stderr[-3000:]
    return Done(ended.returncode, ended.stdout, ended.stderr)


def launch(count, *arguments, **options):
    """Runs `python -m mesh_tensorflow.launch --processes COUNT ARGUMENTS`; see `python`."""
    return python("-m", "mesh_tensorflow.launch", "--processes", count, *arguments, **options)

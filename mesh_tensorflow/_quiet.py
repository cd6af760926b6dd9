"""TensorFlow without what it writes about itself, at its import and in calls of older functions."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Optional

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_VERBOSE = ("TF_CPP_VMODULE", "TF_CPP_MAX_VLOG_LEVEL")  # who sets these wants to see more
_ERRORS, _FATAL = "2", "3"  # the least severe messages that are written
# Written while shared libraries are loaded, before TensorFlow reads the level.
_CHATTER = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    rb"|[IW]\d{4} .*(cudart_stub|cpu_feature_guard|port|cuda_\w+)\.cc:\d+\]"
    rb"|E\d{4} .*Unable to register cu\w+ (factory|plugin)"
    rb"|[IWE]\d{4} .*computation_placer\.cc:\d+\]"
)
# TensorFlow imports these in a `try`, and works without them: Keras to register optimizers of saved
# models, JAX for conversions to TensorFlow Lite. tf.keras still loads Keras when it is used.
_NOT_NEEDED = ("keras", "jax")
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def set_log_level() -> None:
    """Makes TensorFlow write errors alone, unless the user has set TF_CPP_MIN_LOG_LEVEL.

    Without a GPU's driver, not even errors, which would be about that: what fails raises an
    exception in Python all the same.
    """
    drivers = any(os.path.exists(path) for path in _GPU_DRIVERS)
    os.environ.setdefault(_LEVEL, _ERRORS if drivers else _FATAL)


# Copies lines to stderr, without those that match its argument, until there are no more.
_PASS_ON = """
import os, re, sys
for line in sys.stdin.buffer:
    if not re.match(os.fsencode(sys.argv[1]), line):
        os.write(2, line)
"""


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Context in which lines of chatter that C++ code writes to stderr are dropped.

    A process of its own passes the others on, so that none is lost if this one is killed. It is no
    fork of this one, which may have threads, and takes no part in its Ctrl-C.
    """
    _flush()
    command = [sys.executable, "-I", "-S", "-c", _PASS_ON, os.fsdecode(_CHATTER.pattern)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
    assert child.stdin is not None
    stderr = os.dup(2)
    os.dup2(child.stdin.fileno(), 2)
    # Descriptor 2 is then the only way into the pipe: the child ends when it is put back.
    child.stdin.close()
    try:
        yield
    finally:
        _flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        # What it still has to pass on comes before all that is written after this.
        child.wait()


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


def _has_stderr() -> bool:
    """Returns whether there is anywhere to write messages to."""
    try:
        os.fstat(2)
    except OSError:
        return False
    return True


class _Later:
    """Finds the modules to leave out, and refuses to load them, as if they were not installed."""

    def find_spec(
        self, name: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        """Returns where a module is, since TensorFlow looks for Keras' folder; None for others."""
        if name not in _NOT_NEEDED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Creates the default module."""

    def exec_module(self, module: ModuleType) -> None:
        """Raises ImportError."""
        raise ImportError(f"{module.__name__} is not imported while TensorFlow is")


@contextlib.contextmanager
def _left_out() -> Iterator[None]:
    """Context in which Keras and JAX are not imported: a second and 200 MB for both."""
    finder = _Later()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _is_program() -> bool:
    """Returns whether the process is a program of the package: those need no Keras nor JAX."""
    command = os.path.basename(sys.argv[0]) if sys.argv else ""
    if command != "-m":  # what it is while Python locates the module, as now
        return command.startswith("mtf-")
    # `sys.argv` has "-m" where the other has the module, and the same arguments after it.
    return "mesh_tensorflow" in sys.orig_argv[len(sys.orig_argv) - len(sys.argv)]


def import_tensorflow() -> None:
    """Imports TensorFlow without its messages about the machine, unless it is imported already.

    A lower TF_CPP_MIN_LOG_LEVEL that the user has set shows them, and so does TF_CPP_VMODULE or
    TF_CPP_MAX_VLOG_LEVEL. In a program of the package, Keras and JAX are loaded when they are used.
    """
    is_verbose = os.environ.get(_LEVEL, _FATAL) < _ERRORS or any(v in os.environ for v in _VERBOSE)
    if not is_verbose:
        set_log_level()
    shown = is_verbose or "tensorflow" in sys.modules or os.name != "posix" or not _has_stderr()
    with (
        _left_out() if _is_program() else contextlib.nullcontext(),
        contextlib.nullcontext() if shown or not sys.executable else _without_chatter(),
    ):
        importlib.import_module("tensorflow")


# -- advice


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "Instructions for updating" not in str(record.msg)


@contextlib.contextmanager
def not_advised() -> Iterator[None]:
    """Context without TensorFlow's advice to replace functions, which is for who calls them."""
    log = logging.getLogger("tensorflow")
    log.addFilter(_is_no_advice)
    try:
        yield
    finally:
        log.removeFilter(_is_no_advice)

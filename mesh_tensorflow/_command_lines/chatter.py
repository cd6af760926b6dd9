"""Imports TensorFlow without what it writes meanwhile, and without what programs do not need."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Optional

__all__ = ["import_quietly", "set_log_level"]

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
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


def _pass_on(source: int, target: int) -> None:
    """Copies lines from one file descriptor to another, without chatter, until the first ends."""
    with open(source, "rb") as lines, open(target, "wb", 0) as out:
        for line in lines:
            if not _CHATTER.match(line):
                out.write(line)


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Context in which lines of chatter that C++ code writes to stderr are dropped.

    A process of its own passes the others on, so that none is lost if this one is killed.
    """
    sys.stderr.flush()
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(into)
            _pass_on(out, 2)
        finally:
            os._exit(0)
    os.close(out)
    stderr = os.dup(2)
    os.dup2(into, 2)
    os.close(into)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        os.waitpid(child, 0)


class _LaterLoader:
    """Refuses to load a module, as if it was not installed."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Creates the default module."""

    def exec_module(self, module: ModuleType) -> None:
        """Raises ImportError."""
        raise ImportError(f"{module.__name__} is not imported while TensorFlow is")


class _LaterFinder:
    """Finds the modules to leave out, with a loader that refuses to load them."""

    def find_spec(
        self, name: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        """Returns where a module is, since TensorFlow looks for Keras' folder; None for others."""
        if name not in _NOT_NEEDED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _LaterLoader()  # type: ignore[assignment]
        return spec


@contextlib.contextmanager
def _left_out() -> Iterator[None]:
    """Context in which Keras and JAX are not imported: a second and 200 MB for both."""
    finder = _LaterFinder()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]


def import_quietly(name: str) -> None:
    """Imports a module, by default without TensorFlow's messages about the machine.

    A lower TF_CPP_MIN_LOG_LEVEL that the user has set shows them. TensorFlow is imported without
    Keras and JAX, which are loaded when they are used.

    Args:
      name: the module.
    """
    wanted = os.environ.get(_LEVEL, _FATAL) < _ERRORS
    set_log_level()
    noisy = wanted or name in sys.modules or not hasattr(os, "fork")
    with _left_out(), contextlib.nullcontext() if noisy else _without_chatter():
        importlib.import_module(name)

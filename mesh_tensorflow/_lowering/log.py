"""Traces of lowering: a log line for each operation (MTF_LOG), and marks in profiles."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING

import tensorflow as tf

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._watching.requests import EAGER_EVENT, is_profiling

if TYPE_CHECKING:
    from mesh_tensorflow._lowering.lowering import Lowering

__all__ = ["is_logging", "log_operation", "trace_mark"]

_LOGGER = logging.getLogger("mesh_tensorflow.lowering")
_NO_MARK = contextlib.nullcontext()
_ASKS = ("1", "true", "yes", "on", "all", "lowering")


class _Stderr(logging.StreamHandler):
    """Writes to what is standard error at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        # Notebooks and tests replace sys.stderr; a stream that was kept would write to the old one.
        self.setStream(sys.stderr)
        super().emit(record)


def is_logging() -> bool:
    """Returns whether MTF_LOG asks for a line for each operation, and prepares the logger."""
    asked = os.environ.get("MTF_LOG", "").lower().replace(" ", "").split(",")
    if not any(word in _ASKS for word in asked):
        return False
    if not _LOGGER.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(message)s"))
        _LOGGER.addHandler(handler)
        _LOGGER.setLevel(logging.INFO)
        # The root logger, which absl or the user has set up, would write each line a second time.
        _LOGGER.propagate = False
    return True


def log_operation(lowering: Lowering, op: Operation, communicated: int) -> None:
    """Logs an operation that has just been lowered.

    Args:
      lowering: the Lowering.
      op: the operation.
      communicated: the number of collectives of the Lowering before it.
    """
    impl = lowering.requested_impl(op)
    parts = [f"lowering {op.name} {type(op).__name__}"]
    parts += [_output_text(impl, y) for y in op.outputs]
    for _, mesh_impl, collective in lowering.collectives[communicated:]:
        axes = ", ".join(mesh_impl.shape[axis].name for axis in collective.mesh_axes)
        parts.append(f"{collective.kind} over {axes}: {collective.bytes:,} bytes")
    if op.site is not None:
        parts.append(f"{'gradient of ' if op.gradient_of is not None else ''}{op.site}")
    _LOGGER.info("%s", " | ".join(parts))


def _output_text(impl: MeshImpl, y: Tensor) -> str:
    layout = impl.tensor_layout(y.shape)
    rules = ", ".join(
        f"{d.name}:{impl.shape[axis].name}" for d, axis in zip(y.shape, layout) if axis is not None
    )
    shape = f"{dims_text(y.shape) or 'scalar'} {y.dtype.name}"
    return f"{shape}, slice {impl.slice_shape(y.shape)}, {rules or 'whole'}"


def trace_mark(op: Operation) -> contextlib.AbstractContextManager:
    """Marks an operation of eager code in a profile; others are found by the names of their nodes.

    Args:
      op: the operation that is lowered within.
    """
    if not is_profiling() or not tf.executing_eagerly():
        return _NO_MARK
    return tf.profiler.experimental.Trace(f"{EAGER_EVENT}{op.name}")

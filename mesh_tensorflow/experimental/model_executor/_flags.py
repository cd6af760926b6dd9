"""Flags of a run."""

from __future__ import annotations

from mesh_tensorflow._command_lines.experimental import RUN_FLAGS
from mesh_tensorflow._flags import FLAGS, define

__all__ = ["FLAGS"]

define(RUN_FLAGS)

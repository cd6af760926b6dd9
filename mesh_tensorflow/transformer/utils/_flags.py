"""Command-line flags for gin files and parameters."""

from __future__ import annotations

from mesh_tensorflow._command_lines.transformer import GIN_FLAGS
from mesh_tensorflow._flags import FLAGS, define

__all__ = ["FLAGS", "MODULE"]

# The gin module of the functions of this package.
MODULE = "mesh_tensorflow.transformer.utils"

define(GIN_FLAGS)

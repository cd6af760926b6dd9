"""Flags of U-Nets, of their data and of their losses."""

from __future__ import annotations

from mesh_tensorflow._command_lines.experimental import UNET_FLAGS
from mesh_tensorflow._flags import FLAGS, define

__all__ = ["FLAGS"]

define(UNET_FLAGS)

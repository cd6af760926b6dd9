"""Command-line flags for gin files and parameters."""

from __future__ import annotations

from absl import flags

from mesh_tensorflow._flags import FLAGS, Flag, define

__all__ = ["FLAGS", "MODULE"]

# The gin module of the functions of this package.
MODULE = "mesh_tensorflow.transformer.utils"

_DEFINITIONS: tuple[Flag, ...] = (
    (flags.DEFINE_multi_string, "gin_file", None, "Path to a Gin file."),
    (flags.DEFINE_multi_string, "gin_param", None, "Gin parameter binding."),
    (flags.DEFINE_list, "gin_location_prefix", [], "Gin file search path."),
)

define(_DEFINITIONS)

"""Command-line flags that say which gin files and parameters a program reads."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf
from absl import flags

__all__ = ["FLAGS", "MODULE"]

# The module under which gin knows the functions of this package.
MODULE = "mesh_tensorflow.transformer.utils"

_DEFINITIONS: Any = (
    (flags.DEFINE_multi_string, "gin_file", None, "Path to a Gin file."),
    (flags.DEFINE_multi_string, "gin_param", None, "Gin parameter binding."),
    (flags.DEFINE_list, "gin_location_prefix", [], "Gin file search path."),
)

for _define, _name, _default, _help in _DEFINITIONS:
    # Programs that have flags of these names of their own read them through FLAGS all the same.
    if _name not in flags.FLAGS:
        _define(_name, _default, _help)

# This form reads the command line by itself when a flag is first asked for.
FLAGS = tf.flags.FLAGS

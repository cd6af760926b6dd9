"""Mesh TensorFlow: model parallelism by named dimensions and layout rules."""

from mesh_tensorflow import ops  # noqa: I001 (the order in which the package is built up)
from mesh_tensorflow import placement_mesh_impl
from mesh_tensorflow import utils
from mesh_tensorflow import ops_with_redefined_builtins
from mesh_tensorflow.ops_with_redefined_builtins import *  # noqa: F403
from mesh_tensorflow import layers
from mesh_tensorflow import optimize

__version__ = "0.2.0"

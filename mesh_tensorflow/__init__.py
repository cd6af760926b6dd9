"""Mesh TensorFlow: model parallelism by named dimensions and layout rules."""

from mesh_tensorflow import ops as ops  # isort: skip (the order in which the package is built up)
from mesh_tensorflow import placement_mesh_impl as placement_mesh_impl  # isort: skip
from mesh_tensorflow import simd_mesh_impl as simd_mesh_impl  # isort: skip
from mesh_tensorflow import tpu_variables as tpu_variables  # isort: skip
from mesh_tensorflow import utils as utils  # isort: skip
from mesh_tensorflow import ops_with_redefined_builtins as ops_with_redefined_builtins  # isort: skip
from mesh_tensorflow.ops_with_redefined_builtins import *

from mesh_tensorflow import auto_mtf as auto_mtf  # isort: skip
from mesh_tensorflow import beam_search as beam_search  # isort: skip
from mesh_tensorflow import checkpoint as checkpoint  # isort: skip
from mesh_tensorflow import layers as layers  # isort: skip
from mesh_tensorflow import optimize as optimize  # isort: skip

__version__ = "0.2.0"

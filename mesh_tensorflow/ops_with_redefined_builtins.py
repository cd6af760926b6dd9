"""All names of `ops`, and those that shadow Python builtins: abs, complex, pow, range, slice."""

from mesh_tensorflow import ops, utils
from mesh_tensorflow.ops import *
from mesh_tensorflow.ops import mtf_abs as abs
from mesh_tensorflow.ops import mtf_complex as complex
from mesh_tensorflow.ops import mtf_pow as pow
from mesh_tensorflow.ops import mtf_range as range
from mesh_tensorflow.ops import mtf_slice as slice

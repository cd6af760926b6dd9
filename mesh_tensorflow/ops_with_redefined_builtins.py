"""The language, with the names that would hide Python's own: abs, pow, range, slice."""

from mesh_tensorflow.ops import *  # noqa: F403
from mesh_tensorflow.ops import mtf_abs as abs  # noqa: A004, F401
from mesh_tensorflow.ops import mtf_pow as pow  # noqa: A004, F401
from mesh_tensorflow.ops import mtf_range as range  # noqa: A004, F401
from mesh_tensorflow.ops import mtf_slice as slice  # noqa: A004, F401
from mesh_tensorflow import utils  # noqa: E402, F401

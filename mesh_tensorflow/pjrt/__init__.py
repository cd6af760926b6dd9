"""Programs on any accelerator that XLA and PJRT know, through JAX.

`mtf.pjrt.function` is to `mtf.GspmdMeshImpl` what `mtf.function` is to the other mesh
implementations: it builds and lowers mtf programs, keeps their variables, and runs them. XLA's
partitioner splits the program over the devices, by the layout.
"""

import os as _os

try:
    import jax as _jax
except ImportError as e:
    raise ImportError(
        "mesh_tensorflow.pjrt runs programs through JAX, which is not installed: "
        'pip install "jax>=0.8", or as JAX says for your accelerator'
    ) from e
if _jax.__version_info__ < (0, 8):
    raise ImportError(
        f"mesh_tensorflow.pjrt needs JAX 0.8 or newer, but {_jax.__version__} is installed: "
        'pip install "jax>=0.8", or as JAX says for your accelerator. That needs Python 3.11 and '
        "TensorFlow 2.19, or newer ones"
    )

# Or XLA would warn at each compilation that GSPMD partitions the program, which is meant. If
# TensorFlow has imported JAX before this package was imported, XLA has read its level already; the
# one of Python's loggers, which comes with it, is put back.
if _os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0":
    for _level in ("ERROR", _jax.config.values["jax_logging_level"]):
        _jax.config.update("jax_logging_level", _level)

from mesh_tensorflow.pjrt._devices import driving as driving
from mesh_tensorflow.pjrt._devices import gathered
from mesh_tensorflow.pjrt._function import Collectives, Lowered, export, function
from mesh_tensorflow.pjrt._in_session import in_session
from mesh_tensorflow.pjrt._programs import device_kind_of as device_kind_of
from mesh_tensorflow.pjrt._programs import run_in_chief
from mesh_tensorflow.pjrt._store import ArrayStore, restore, save
from mesh_tensorflow.pjrt._trace import mesh_impl

__all__ = [
    "ArrayStore",
    "Collectives",
    "Lowered",
    "export",
    "function",
    "gathered",
    "in_session",
    "mesh_impl",
    "restore",
    "run_in_chief",
    "save",
]

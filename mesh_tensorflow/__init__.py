"""Mesh TensorFlow: model parallelism by named dimensions and layout rules."""

import gc as _gc  # isort: skip
import importlib as _importlib  # isort: skip
import typing as _typing  # isort: skip
from mesh_tensorflow import _quiet as _quiet  # isort: skip

_quiet.import_tensorflow()

_collects = _gc.isenabled()
# Nothing of an import is garbage, and TensorFlow has left so many objects that a full collection
# would be a third of the time of this one.
_gc.disable()
try:
    from mesh_tensorflow import _pjrt as _pjrt  # isort: skip
    from mesh_tensorflow import ops as ops  # isort: skip (the order in which the package is built up)
    from mesh_tensorflow import placement_mesh_impl as placement_mesh_impl  # isort: skip
    from mesh_tensorflow import simd_mesh_impl as simd_mesh_impl  # isort: skip
    from mesh_tensorflow import tpu_variables as tpu_variables  # isort: skip
    from mesh_tensorflow import utils as utils  # isort: skip
    from mesh_tensorflow import ops_with_redefined_builtins as ops_with_redefined_builtins  # isort: skip
    from mesh_tensorflow.ops_with_redefined_builtins import *
    from mesh_tensorflow import beam_search as beam_search  # isort: skip
    from mesh_tensorflow import debug as debug  # isort: skip
    from mesh_tensorflow.debug import inspect as inspect  # isort: skip
    from mesh_tensorflow import layers as layers  # isort: skip
    from mesh_tensorflow import schedules as schedules  # isort: skip
    from mesh_tensorflow import optimize as optimize  # isort: skip
finally:
    if _collects:
        _gc.enable()


if _typing.TYPE_CHECKING:
    from mesh_tensorflow import auto_mtf as auto_mtf
    from mesh_tensorflow import checkpoint as checkpoint
    from mesh_tensorflow import models as models
    from mesh_tensorflow import signal as signal
    from mesh_tensorflow import train as train
    from mesh_tensorflow import visualize as visualize
    from mesh_tensorflow.visualize import summary as summary

# Most programs do without some of these, which are half of the package: each is imported when it is
# first asked for.
_LATER = ("auto_mtf", "checkpoint", "models", "signal", "train", "visualize")
__all__ = [name for name in sorted(globals()) if name[0] != "_"]
# `models` is left out, as `pjrt` is: it brings the transformers, which `import *` would pay for.
__all__ += [name for name in _LATER if name != "models"] + ["summary"]


def __getattr__(name: str) -> object:
    if name == "pjrt":  # which needs JAX
        return _pjrt.pjrt()
    if name in _LATER:
        return _importlib.import_module(f"{__name__}.{name}")
    if name == "summary":
        return _importlib.import_module(f"{__name__}.visualize").summary
    raise AttributeError(f"module 'mesh_tensorflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, "pjrt", "summary"})


__version__ = "0.2.0"

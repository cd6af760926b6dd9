"""Mesh TensorFlow: model parallelism by named dimensions and layout rules."""

import gc  # isort: skip
import importlib  # isort: skip
from mesh_tensorflow import _quiet as _quiet  # isort: skip

_quiet.import_tensorflow()

_collects = gc.isenabled()
# Nothing of an import is garbage, and TensorFlow has left so many objects that a full collection
# would be a third of the time of this one.
gc.disable()
try:
    from mesh_tensorflow import _gin_names as _gin_names  # isort: skip
    from mesh_tensorflow import _pjrt as _pjrt  # isort: skip
    from mesh_tensorflow import _replaced as _replaced  # isort: skip
    from mesh_tensorflow._core import errors as _errors  # isort: skip
    from mesh_tensorflow._core import operation as _operation  # isort: skip
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
    from mesh_tensorflow import debug as debug  # isort: skip
    from mesh_tensorflow.debug import inspect as inspect  # isort: skip
    from mesh_tensorflow import layers as layers  # isort: skip
    from mesh_tensorflow import schedules as schedules  # isort: skip
    from mesh_tensorflow import signal as signal  # isort: skip
    from mesh_tensorflow import optimize as optimize  # isort: skip
    from mesh_tensorflow import visualize as visualize  # isort: skip
    from mesh_tensorflow import train as train  # isort: skip
    from mesh_tensorflow.visualize import summary as summary
finally:
    if _collects:
        gc.enable()

_gin_names.prefer_names_of_users()
_replaced.replaceable(__name__)


def __getattr__(name: str) -> object:
    if name == "pjrt":  # imported when it is used, since it needs JAX
        return _pjrt.pjrt()
    if name == "models":  # which most programs do without, since it brings the transformers
        return importlib.import_module("mesh_tensorflow.models")
    raise AttributeError(f"module 'mesh_tensorflow' has no attribute {name!r}{_elsewhere(name)}")


def _elsewhere(name: str) -> str:
    """Returns the end of a sentence: where a name is, or what there is in its place."""
    if name.startswith("_"):  # what Python and tools ask each module for
        return ""
    for part in (layers, train, optimize, schedules, signal, debug, visualize, utils):
        if name in part.__all__:
            return f". It is {part.__name__.replace('mesh_tensorflow', 'mtf')}.{name}"
    instead = _operation.written_instead(name, function=True)
    return instead or _errors.did_you_mean(name, [n for n in globals() if not n.startswith("_")])


__version__ = "0.2.0"

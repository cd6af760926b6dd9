"""The door to mesh_tensorflow.pjrt, which is imported when it is used, since it needs JAX."""

import importlib
from typing import Any


def pjrt() -> Any:
    """Returns the module mesh_tensorflow.pjrt.

    Raises:
      ImportError: JAX is not installed.
    """
    return importlib.import_module("mesh_tensorflow.pjrt")

"""Imports TensorFlow without its messages about the machine.

Benchmarks read their flags before that, so that `--help` needs no seconds.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_MODULE = Path(__file__).resolve().parent.parent / "mesh_tensorflow/_quiet.py"


def import_tensorflow() -> None:
    """Imports TensorFlow quietly; a TF_CPP_MIN_LOG_LEVEL that the user has set counts.

    The module that does so is loaded by its path: mesh_tensorflow would import TensorFlow first,
    and some processes measure TensorFlow without it.
    """
    spec = importlib.util.spec_from_file_location("quiet", _MODULE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.import_tensorflow()
    # Else disable_v2_behavior says that it is deprecated.
    sys.modules["tensorflow"].get_logger().setLevel("ERROR")

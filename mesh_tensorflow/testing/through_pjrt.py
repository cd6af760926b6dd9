"""A GspmdMeshImpl whose programs run in sessions of TensorFlow, but on devices of JAX.

python -m mesh_tensorflow.testing.conformance mesh_tensorflow.testing.through_pjrt:split
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mesh_tensorflow as mtf
from mesh_tensorflow.pjrt import in_session
from mesh_tensorflow.pjrt._devices import make_cpus

__all__ = ["split"]

_PROCESSORS = 4


def split(mesh_shape: str, layout: str) -> mtf.MeshImpl:
    """Returns a GspmdMeshImpl, for use in the program that `split.replicate` runs."""
    return mtf.GspmdMeshImpl(mesh_shape, layout)


def _replicate(program: Callable[[], Sequence[Any]], processors: int) -> list[Any]:
    """Runs a program on devices of JAX; returns what it returns.

    Args:
      program: a function that returns tf.Tensors, and operations.
      processors: the number of processors of the mesh.
    """
    make_cpus(max(_PROCESSORS, processors))  # programs of other sizes may follow
    return list(in_session(program))


split.replicate = _replicate  # type: ignore[attr-defined]

"""What connects the processes of a program: TensorFlow's servers, or JAX."""

from __future__ import annotations

import os

from mesh_tensorflow._processes.processes import processes

__all__ = ["RUNTIME", "is_pjrt", "several_of_jax"]

RUNTIME = "MTF_RUNTIME"  # "pjrt" where the launcher started processes for JAX


def is_pjrt() -> bool:
    """Returns whether the processes, if there are several, are connected by JAX.

    Raises:
      ValueError: the environment variable has a value that no launcher sets.
    """
    found = os.environ.get(RUNTIME) or "tensorflow"
    if found not in ("tensorflow", "pjrt"):
        raise ValueError(
            f'{RUNTIME} is {found!r}; it should be "tensorflow" or "pjrt", or not be set'
        )
    return found == "pjrt"


def several_of_jax() -> bool:
    """Returns whether there are several processes, which are connected by JAX."""
    return is_pjrt() and processes().count > 1

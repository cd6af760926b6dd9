"""Lowered: a program of mtf.pjrt.function before it runs: its texts, communication and costs."""

from __future__ import annotations

import functools
from typing import Any

import jax

from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow.pjrt._collectives import Collectives, collectives_of
from mesh_tensorflow.pjrt._devices import all_dtypes

__all__ = ["Lowered"]


class Lowered:
    """A program for arguments of certain shapes, on a mesh of devices."""

    def __init__(self, lowered: jax.stages.Lowered, mesh_shape: Shape):
        """Creates a Lowered.

        Args:
          lowered: what JAX made of the program.
          mesh_shape: the Shape of the mesh.
        """
        self._lowered, self._mesh_shape = lowered, mesh_shape

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The program of one device, as XLA compiled it."""
        with all_dtypes():
            return self._lowered.compile()

    @property
    def stablehlo(self) -> str:
        """The program of whole tensors with annotations, as StableHLO."""
        return self._lowered.as_text()

    @property
    def compiled_text(self) -> str:
        """The program of one device, in XLA's notation."""
        return self.compiled.as_text() or ""

    def collectives(self) -> list[Collectives]:
        """Returns the communication that XLA put in, with what is in a loop counted once."""
        return collectives_of(self.compiled_text, self._mesh_shape)

    def memory(self) -> Any:
        """Returns what XLA knows of the memory on one device, such as `temp_size_in_bytes`."""
        return self.compiled.memory_analysis()

    def cost(self) -> dict[str, float]:
        """Returns what XLA knows of the cost on one device, such as "flops"."""
        found = self.compiled.cost_analysis()
        return dict(found[0] if isinstance(found, list) else found or {})

"""ProgramParts: what estimates of one program on several meshes have in common."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow.auto_mtf._memory.resident import ResidentMemory
from mesh_tensorflow.auto_mtf._memory.steps import program_steps
from mesh_tensorflow.auto_mtf._memory.storing import Storing
from mesh_tensorflow.auto_mtf._memory.updates import Updates, find_updates
from mesh_tensorflow.auto_mtf._time.times import Known
from mesh_tensorflow.auto_mtf._time.unit import Unit
from mesh_tensorflow.auto_mtf._time.units import program_units

__all__ = ["ProgramParts"]


class ProgramParts:
    """The units and the memory of a program, which are found once for all meshes."""

    def __init__(self, graph: Graph, outputs: Iterable[Tensor] = ()):
        """Creates the ProgramParts.

        Args:
          graph: an mtf.Graph, which is not changed afterwards.
          outputs: Tensors that stay in memory until the end.
        """
        self.graph = graph
        self.outputs = list(outputs)
        self._updates: list[Updates] = []
        self._units: dict[tuple[frozenset[str], bool], list[Unit]] = {}
        self._known: dict[Hashable, Known] = {}
        self._memory: dict[tuple[frozenset[str], int], ResidentMemory] = {}

    @property
    def updates(self) -> Updates:
        """The Updates of the program."""
        if not self._updates:
            self._updates.append(find_updates(self.graph))
        return self._updates[0]

    def known(self, *mesh: Hashable) -> Known:
        """Returns the seconds of units that are evaluated so far, on one mesh.

        Args:
          *mesh: what tells meshes apart.
        """
        return self._known.setdefault(mesh, {})

    def units(self, candidates: frozenset[str], stored: bool) -> list[Unit]:
        """Returns the units of the program.

        Args:
          candidates: names of the dimensions that may be split.
          stored: whether variables are stored in parts.
        """
        key = candidates, stored
        if key not in self._units:
            steps = program_steps(self.graph.operations, self.outputs)
            updates = self.updates if stored else None
            self._units[key] = program_units(steps, candidates, updates)
        return self._units[key]

    def memory(self, candidates: frozenset[str], storing: Storing) -> ResidentMemory:
        """Returns the memory of the program on one processor.

        Args:
          candidates: names of the dimensions that may be split.
          storing: a Storing.
        """
        stored = storing.layout is not None
        key = candidates, stored + storing.weights_too
        if key not in self._memory:
            updates = self.updates if stored else None
            self._memory[key] = ResidentMemory(
                self.graph, self.outputs, candidates, storing, updates
            )
        return self._memory[key].on(storing)

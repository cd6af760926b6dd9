"""LayoutValidator: checks which dimensions may be split, and over which mesh dimensions."""

from __future__ import annotations

import math
import re
from typing import Any

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.layout import StoredName, joined_names
from mesh_tensorflow._core.operation import with_inner_operations
from mesh_tensorflow._core.shape import Shape, convert_to_shape

__all__ = ["LayoutValidator"]

_ANONYMOUS = re.compile(r"_anonymous_\d+")


class MeshSizes(dict[str, int]):
    """The sizes of mesh dimensions by name, which also knows that of names joined by "+"."""

    def __missing__(self, name: str) -> int:
        names = joined_names(name, self)
        if len(names) == 1 and names[0] in self:
            return self[names[0]]
        if len(names) < 2 or not self.keys() >= {*names}:
            raise KeyError(f"the mesh has no dimension {name!r}: {dict(self)}")
        return math.prod(self[n] for n in names)


class LayoutValidator:
    """Checks which dimensions of a graph may be split over which mesh dimensions.

    A dimension name may be split if a tensor in the graph has it, no operation needs it whole, and
    it is not the name of an anonymous dimension.
    """

    def __init__(self, mtf_graph: Graph, mesh_shape: Any):
        """Creates a LayoutValidator.

        Args:
          mtf_graph: an mtf.Graph.
          mesh_shape: a Shape, or what converts to one.

        Raises:
          ValueError: a dimension of the mesh has no processors, or the graph has been lowered with
            variables that are stored in parts.
        """
        mesh_shape = convert_to_shape(mesh_shape) or Shape([])
        empty = [d for d in mesh_shape if d.size < 1]
        if empty:
            raise ValueError(
                f"a mesh with {dims_text(empty)} has no processors: {mesh_shape}. Sizes of meshes "
                "are numbers of processors, from 1"
            )
        self._divisor: dict[str, int] = {}
        forbidden: set[str] = set()
        for operation in with_inner_operations(mtf_graph.operations):
            # By name, since a layout rule holds for all tensors that have the name.
            forbidden |= operation.unsplittable_dims
            for tensor in operation.outputs:
                for d in tensor.shape:
                    if isinstance(d.name, StoredName):
                        raise ValueError(
                            f"auto_mtf: {tensor.name} {tensor.shape} is of a program whose "
                            "variables a Lowering has cut in parts (zero=, or variable_layout=). "
                            "Choose and explain layouts before the Lowering"
                        )
                    # gcd(0, n) = n, so 0 stands for a name that was not seen before.
                    self._divisor[d.name] = math.gcd(self._divisor.get(d.name, 0), d.size)
        self._splittable = {
            name
            for name in self._divisor
            if name not in forbidden and not _ANONYMOUS.fullmatch(name)
        }
        self._mesh_sizes = MeshSizes({d.name: d.size for d in mesh_shape})

    @property
    def splittable_mtf_dimension_names(self) -> set[str]:
        """Names of the dimensions that a layout may split."""
        return set(self._splittable)

    @property
    def mtf_dimension_names(self) -> set[str]:
        """Names of all dimensions, also of those that some operation needs whole."""
        return set(self._divisor)

    def divides(self, mtf_dimension_name: str, mesh_dimension_name: str) -> bool:
        """Returns whether a mesh dimension divides all sizes of the dimensions of a name."""
        return self._divisor[mtf_dimension_name] % self._mesh_sizes[mesh_dimension_name] == 0

    @property
    def mesh_dimension_name_to_size(self) -> dict[str, int]:
        """Sizes of the mesh dimensions, by name; also of names joined by "+"."""
        return MeshSizes(self._mesh_sizes)

    def is_valid_assignment(self, mtf_dimension_name: str, mesh_dimension_name: str) -> bool:
        """Returns whether a dimension may be split over a mesh dimension.

        It may if the size of the mesh dimension divides all sizes of dimensions of that name.

        Args:
          mtf_dimension_name: a string.
          mesh_dimension_name: a string; of several mesh dimensions, their names joined by "+".

        Raises:
          KeyError: the mesh has no such dimension.
        """
        splittable = mtf_dimension_name in self._splittable
        return splittable and self.divides(mtf_dimension_name, mesh_dimension_name)

"""Storing: the rules that a stored layout adds to a layout, for each weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Optional

from mesh_tensorflow._core.layout import LayoutRules
from mesh_tensorflow._core.shape import Dimension, Shape
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.stored_layout import WEIGHTS_TOO, StoredLayout

__all__ = ["Storing"]


class Storing:
    """A stored layout on a mesh.

    Attributes:
      layout: a StoredLayout, or None.
      weights_too: whether weights are stored in parts, besides what optimizers keep.
    """

    def __init__(self, mesh_shape: Shape, layout: Optional[StoredLayout]):
        """Creates a Storing.

        Args:
          mesh_shape: a Shape.
          layout: a StoredLayout, or None.
        """
        self._mesh_shape = mesh_shape
        self.layout = layout
        self.weights_too = layout is not None and layout.stage >= WEIGHTS_TOO
        self._known: dict[tuple, dict[str, str]] = {}

    def rules(self, weight: Iterable[Dimension], layout: Mapping[str, str]) -> dict[str, str]:
        """Returns the mesh dimensions that split dimensions of a weight where it is stored.

        Args:
          weight: the dimensions of a weight.
          layout: a dictionary from dimension names to mesh dimension names.
        """
        if self.layout is None:
            return {}
        weight = Shape(weight)
        own = {d: layout[d] for d in weight.dimension_names if d in layout}
        key = (tuple(weight), tuple(sorted(own.items())))
        if key not in self._known:
            impl: MeshImpl = MeshImpl(self._mesh_shape, LayoutRules(own.items()))
            names = self.layout.names(weight, impl)
            self._known[key] = {d: name.mesh_dim for d, name in names.items()}
        return self._known[key]

    def parts(
        self, weight: Iterable[Dimension], dims: Iterable[str], layout: Mapping[str, str]
    ) -> int:
        """Returns how often a tensor of an update is split, beyond what the layout splits.

        Args:
          weight: the dimensions of the weight.
          dims: names of the tensor's dimensions.
          layout: a dictionary from dimension names to mesh dimension names.
        """
        rules, parts = self.rules(weight, layout), 1
        for d in set(dims) & rules.keys():
            parts *= self._mesh_shape.get_dim_by_name(rules[d]).size
        return parts

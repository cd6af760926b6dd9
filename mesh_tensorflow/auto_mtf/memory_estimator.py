"""MemoryEstimator: the program and the mesh that a layout optimizer works on."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.operation import Tensor
from mesh_tensorflow._core.shape import convert_to_shape
from mesh_tensorflow.auto_mtf.graph_interface import GraphInterface
from mesh_tensorflow.auto_mtf.valid_layouts import LayoutValidator

__all__ = ["MemoryEstimator"]


class MemoryEstimator:
    """Creates the GraphInterface and the LayoutValidator of a program lazily.

    Attributes:
      mtf_graph: an mtf.Graph.
      mesh_shape: a Shape.
      mtf_outputs: the outputs of the program.
    """

    def __init__(self, mtf_graph: Graph, mesh_shape: Any, mtf_outputs: Iterable[Tensor] = ()):
        """Creates a MemoryEstimator.

        Args:
          mtf_graph: an mtf.Graph.
          mesh_shape: a Shape, or what converts to one.
          mtf_outputs: Tensors that stay in memory until the end.
        """
        self.mtf_graph = mtf_graph
        self.mesh_shape = convert_to_shape(mesh_shape)
        self.mtf_outputs = mtf_outputs

    @functools.cached_property
    def _layout_validator(self) -> LayoutValidator:
        return LayoutValidator(self.mtf_graph, self.mesh_shape)

    @functools.cached_property
    def _graph_interface(self) -> GraphInterface:
        graph = GraphInterface(self.mtf_graph)
        for tensor in self.mtf_outputs:
            graph.set_tensor_final(tensor.name)
        return graph

    def get_layout_validator(self) -> LayoutValidator:
        """Returns the LayoutValidator."""
        return self._layout_validator

    def get_graph_interface(self) -> GraphInterface:
        """Returns the GraphInterface, with the outputs marked as final."""
        # Made once: a schedule refers to its operations by their numbers.
        return self._graph_interface

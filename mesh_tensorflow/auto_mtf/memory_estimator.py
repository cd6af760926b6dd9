"""MemoryEstimator: the program and the mesh that a layout optimizer works on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.shape import convert_to_shape
from mesh_tensorflow._core.tensor import Tensor
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
        self._layout_validator: Optional[LayoutValidator] = None
        self._graph_interface: Optional[GraphInterface] = None

    def get_layout_validator(self) -> LayoutValidator:
        """Returns the LayoutValidator."""
        if self._layout_validator is None:
            self._layout_validator = LayoutValidator(self.mtf_graph, self.mesh_shape)
        return self._layout_validator

    def get_graph_interface(self) -> GraphInterface:
        """Returns the GraphInterface, with the outputs marked as final."""
        # Made once: a schedule refers to its operations by their numbers.
        if self._graph_interface is None:
            graph = GraphInterface(self.mtf_graph)
            for tensor in self.mtf_outputs:
                graph.set_tensor_final(tensor.name)
            self._graph_interface = graph
        return self._graph_interface

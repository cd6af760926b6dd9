"""The layout, and the mesh shape, with which a program needs the least memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Optional

from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.layout import LayoutRules
from mesh_tensorflow._core.shape import Shape, convert_to_shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow.auto_mtf import layout_optimizer, memory_estimator

__all__ = ["layout", "layout_and_mesh_shape"]


def layout(mtf_graph: Graph, mesh_shape: Any, mtf_outputs: Iterable[Tensor] = ()) -> LayoutRules:
    """Returns the layout under which a program needs the least memory on each processor.

    The program is the graph as it is when this is called: to choose a layout for training,
    call it after gradients and updates were made.

    Args:
      mtf_graph: an mtf.Graph.
      mesh_shape: a Shape, or what converts to one.
      mtf_outputs: Tensors that stay in memory to the end.

    Raises:
      auto_mtf.layout_optimizer.SolverError: the solver did not find an optimum.
    """
    estimator = memory_estimator.MemoryEstimator(
        mtf_graph, convert_to_shape(mesh_shape), mtf_outputs
    )
    return _rules(layout_optimizer.LayoutOptimizer(estimator).solve())


def layout_and_mesh_shape(
    mtf_graph: Graph,
    num_machines: int,
    mtf_outputs: Iterable[Tensor] = (),
    max_mesh_shape_dimensions: int = 2,
) -> tuple[LayoutRules, Shape]:
    """Returns the layout and the mesh shape with which a program needs the least memory.

    Args:
      mtf_graph: an mtf.Graph.
      num_machines: number of processors.
      mtf_outputs: Tensors that stay in memory to the end.
      max_mesh_shape_dimensions: how many dimensions the mesh has at the most.

    Returns:
      (LayoutRules, Shape); the mesh dimensions are mesh_0, mesh_1, and so on.

    Raises:
      ValueError: `num_machines` or `max_mesh_shape_dimensions` is less than 1.
      auto_mtf.layout_optimizer.SolverError: the solver did not find an optimum.
    """
    if num_machines < 1 or max_mesh_shape_dimensions < 1:
        raise ValueError(
            f"num_machines={num_machines} and "
            f"max_mesh_shape_dimensions={max_mesh_shape_dimensions} must be 1 or more"
        )
    outputs = list(mtf_outputs)
    best: Optional[tuple[float, str, Shape]] = None
    for sizes in _mesh_shape_iterator(num_machines, max_mesh_shape_dimensions):
        mesh_shape = Shape([(f"mesh_{i}", size) for i, size in enumerate(sizes)])
        estimator = memory_estimator.MemoryEstimator(mtf_graph, mesh_shape, outputs)
        optimizer = layout_optimizer.LayoutOptimizer(estimator)
        found = optimizer.solve()
        peak = optimizer.evaluate_layout(found)
        if best is None or peak < best[0]:
            best = (peak, found, mesh_shape)
    assert best is not None  # there is always the mesh of one dimension
    return _rules(best[1]), best[2]


def _rules(text: str) -> LayoutRules:
    pairs = (piece.split(":") for piece in text.split(";") if piece)
    return LayoutRules((d, m) for d, m in pairs)


def _mesh_shape_iterator(
    num_machines: int, max_mesh_shape_dimensions: Optional[int] = None
) -> Iterator[list[int]]:
    """Yields the sizes of all meshes of so many processors, largest dimensions first.

    Args:
      num_machines: number of processors.
      max_mesh_shape_dimensions: how many dimensions a mesh has at the most; any number if
        None.
    """
    if num_machines == 1:
        yield [1]
        return
    yield from _factorings(num_machines, num_machines, max_mesh_shape_dimensions)


def _factorings(n: int, largest: int, length: Optional[int]) -> Iterator[list[int]]:
    if n == 1:
        yield []
    elif length is None or length > 0:
        for size in range(min(n, largest), 1, -1):
            if n % size == 0:
                rest = None if length is None else length - 1
                yield from ([size, *tail] for tail in _factorings(n // size, size, rest))

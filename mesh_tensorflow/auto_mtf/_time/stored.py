"""Choosing how variables are stored, together with the layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Optional, Union

from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.layout import StoredLayout, stored_layout
from mesh_tensorflow._core.shape import Shape, convert_to_shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow.auto_mtf._time.time_program import ProgramParts
from mesh_tensorflow.auto_mtf.hardware import Hardware
from mesh_tensorflow.auto_mtf.step_time import Estimate, StepEstimator

__all__ = ["fastest", "stored_estimators", "stored_layouts"]


def stored_layouts(mesh_shape: Shape, zero: Iterable[int]) -> list[Optional[StoredLayout]]:
    """Returns how variables may be stored: at each stage, over each mesh dimension.

    Args:
      mesh_shape: a Shape.
      zero: stages of ZeRO; 1 and 2 are one.

    Raises:
      ValueError: a stage is unknown.
    """
    found: list[Optional[StoredLayout]] = []
    for stage in zero:
        if stage == 0:
            found.append(None)
            continue
        names = [d.name for d in mesh_shape if d.size > 1] or mesh_shape.dimension_names[:1]
        found += [stored_layout(mesh_shape, zero=stage, zero_axis=name) for name in names]
    return found


def stored_estimators(
    graph: Graph,
    mesh_shape: Any,
    outputs: Iterable[Tensor],
    hardware: Union[str, Hardware, None],
    zero: Iterable[int],
    parts: Optional[ProgramParts] = None,
) -> list[StepEstimator]:
    """Returns a StepEstimator for each way to store variables.

    Args:
      graph: an mtf.Graph.
      mesh_shape: a Shape, or what converts to one.
      outputs: Tensors that stay in memory until the end.
      hardware: see `hardware_profile`.
      zero: stages of ZeRO.
      parts: the ProgramParts of the graph, if there already are some.

    Raises:
      ValueError: a stage or the hardware is unknown.
    """
    shape = convert_to_shape(mesh_shape) or Shape([])
    parts = parts or ProgramParts(graph, outputs)
    return [
        StepEstimator(graph, shape, parts.outputs, hardware, stored, parts)
        for stored in stored_layouts(shape, zero)
    ]


def fastest(estimators: Sequence[StepEstimator], limit: Optional[float]) -> Estimate:
    """Returns the fastest Estimate that fits; of equally fast ones, the first.

    Args:
      estimators: StepEstimators, at least one.
      limit: the memory that a step may use on one processor, or None.

    Raises:
      auto_mtf.step_time.MemoryLimitError: none fits; that of the one that misses by the least.
    """
    best: Optional[Estimate] = None
    for estimator in estimators:
        # The time to beat prunes most layouts of the next one, before its integer program is
        # solved.
        most = math.inf if best is None else best.seconds.total
        best = estimator.faster_than(most, limit) or best
    if best is None:
        errors = [estimator.does_not_fit(limit or 0) for estimator in estimators]
        raise min(errors, key=lambda e: e.missing_bytes)
    return best

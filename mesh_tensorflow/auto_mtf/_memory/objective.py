"""Peak memory: exact for a layout, and as constraints of an integer program."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mesh_tensorflow.auto_mtf.graph_interface import GraphInterface

__all__ = ["DimensionSet", "LiveMemory", "live_memory", "peak_memory"]

DimensionSet = tuple[str, ...]


class LiveMemory(NamedTuple):
    """Bytes in use at the times at which memory may peak.

    Attributes:
      dimension_sets: for each column, the sorted names of dimensions that may be split.
      bytes: an int64 array [times, dimension sets], the bytes of all live tensors that have
        exactly these dimensions, before splitting. No row is dominated by another row, so each
        may be the peak under some layout.
    """

    dimension_sets: list[DimensionSet]
    bytes: np.ndarray


def peak_memory(
    graph: GraphInterface,
    schedule: Iterable[int],
    layout: Mapping[str, str],
    mesh_sizes: Mapping[str, int],
) -> int:
    """Returns the peak memory of live tensors, in bytes per processor.

    Args:
      graph: a GraphInterface.
      schedule: indices of operations, in execution order.
      layout: a dictionary from dimension names to mesh dimension names.
      mesh_sizes: a dictionary from mesh dimension names to sizes.
    """
    size = {
        name: graph.get_tensor_size(name, layout, mesh_sizes)
        for name in graph.get_all_tensor_names()
    }
    now = peak = 0
    for born, dead in graph.memory_changes(schedule):
        now += sum(size[name] for name in born)
        peak = max(peak, now)
        now -= sum(size[name] for name in dead)
    return peak


def live_memory(
    graph: GraphInterface, schedule: Sequence[int], candidates: Collection[str]
) -> LiveMemory:
    """Returns the bytes in memory under a schedule, by the dimensions that may be split.

    Tensors with the same splittable dimensions are counted together, and dominated times are left
    out. So the result grows with the number of distinct sets of dimensions, not with the number
    of layers.

    Args:
      graph: a GraphInterface.
      schedule: indices of operations, in execution order.
      candidates: names of the dimensions that may be split.
    """
    kind = {
        name: tuple(sorted(set(graph.get_tensor_mtf_dimension_names(name)) & set(candidates)))
        for name in graph.get_all_tensor_names()
    }
    sets = sorted(set(kind.values()))
    column = {dimension_set: place for place, dimension_set in enumerate(sets)}
    size = {name: graph.get_tensor_size(name) for name in kind}
    now = np.zeros(len(sets), np.int64)
    rows = []
    for born, dead in graph.memory_changes(schedule):
        for name in born:
            now[column[kind[name]]] += size[name]
        # Memory grows only where tensors are made, so the peak is at one of these times.
        if born:
            rows.append(now.copy())
        for name in dead:
            now[column[kind[name]]] -= size[name]
    return LiveMemory(sets, _maximal_rows(np.array(rows, np.int64).reshape(len(rows), len(sets))))


def _maximal_rows(rows: np.ndarray) -> np.ndarray:
    """Returns the distinct rows that are not dominated by another row."""
    rows = np.unique(rows, axis=0) if len(rows) else rows
    kept = np.zeros((0, rows.shape[1]), rows.dtype)
    # A row that dominates another one has a larger sum, so it comes first and is in `kept`.
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not (kept >= row).all(axis=1).any():
            kept = np.concatenate([kept, row[np.newaxis]])
    return kept

"""Peak memory: exact for a layout, and as constraints of an integer program."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from mesh_tensorflow.auto_mtf._space import LayoutSpace
from mesh_tensorflow.auto_mtf.graph_interface import GraphInterface, MemoryChange

__all__ = ["DimensionSet", "LiveMemory", "live_memory", "peak_memory"]

DimensionSet = tuple[str, ...]


# The number of parts of what a layout does not need: of any bytes, one part is nothing.
NO_BLOCK = 2**62


class LiveMemory:
    """Bytes in use on a processor over time, by the dimensions that may be split.

    Attributes:
      dimension_sets: for each column, the sorted names of dimensions that may be split.
      bytes: an int64 array [times, dimension sets], the bytes of all live tensors that have
        exactly these dimensions, before splitting.
    """

    def __init__(self, dimension_sets: Sequence[DimensionSet], bytes: np.ndarray):
        """Creates a LiveMemory."""
        self.dimension_sets = list(dimension_sets)
        self.bytes = bytes
        # A peak is at one of these times under every layout, so that others need not be looked at
        # again.
        self._highest = maximal_rows(bytes)

    def parts(self, layout: Mapping[str, str], mesh_sizes: Mapping[str, int]) -> np.ndarray:
        """Returns the number of parts into which each column is split."""
        return np.array(
            [
                math.prod(mesh_sizes[layout[d]] for d in dims if d in layout)
                for dims in self.dimension_sets
            ],
            np.int64,
        )

    def parts_of_rows(
        self, column: int, space: LayoutSpace, dims: Sequence[str], rows: np.ndarray
    ) -> Sequence[int]:
        """Returns the number of parts of a column for each assignment of some dimensions.

        Args:
          column: the index of a column.
          space: a LayoutSpace.
          dims: names of dimensions, with those of the column.
          rows: an int64 array [assignments, dims] of mesh axes.
        """
        own = self.dimension_sets[column]
        return space.parts(own, rows[:, [dims.index(d) for d in own]]).tolist()

    def in_use(self, layout: Mapping[str, str], mesh_sizes: Mapping[str, int]) -> np.ndarray:
        """Returns the bytes in use on one processor at each time.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
          mesh_sizes: a dictionary from mesh dimension names to sizes.
        """
        # Without remainders, since a layout that a search tries divides all sizes evenly.
        return (self.bytes // self.parts(layout, mesh_sizes)).sum(axis=1)

    def peak(self, layout: Mapping[str, str], mesh_sizes: Mapping[str, int]) -> int:
        """Returns the peak memory per processor in bytes; see `in_use`."""
        parts = self.parts(layout, mesh_sizes)
        return int((self._highest // parts).sum(axis=1).max(initial=0))

    def least(self, space: LayoutSpace) -> int:
        """Returns a lower bound of the peak memory of all layouts, in bytes.

        Args:
          space: a LayoutSpace.
        """
        parts = [
            # Each column as small as in any layout: no layout needs less, though none may reach it.
            max(self.parts_of_rows(i, space, dims, space.assignments(dims)))
            for i, dims in enumerate(self.dimension_sets)
        ]
        return int((self._highest // np.array(parts)).sum(axis=1).max(initial=0))


def maximal_rows(rows: np.ndarray) -> np.ndarray:
    """Returns the distinct rows that no other row exceeds in all columns."""
    rows = np.unique(rows, axis=0) if len(rows) else rows
    kept = np.zeros((0, rows.shape[1]), rows.dtype)
    # A row that exceeds another one has a larger sum, so it comes first and is in `kept`.
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not (kept >= row).all(axis=1).any():
            kept = np.concatenate([kept, row[np.newaxis]])
    return kept


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
    column = dict.fromkeys(size, 0)
    changes = graph.memory_changes(schedule)
    return int(bytes_over_time(changes, column, size, 1).max(initial=0))


def bytes_over_time(
    changes: Iterable[MemoryChange], column: Mapping[str, int], size: Mapping[str, int], count: int
) -> np.ndarray:
    """Returns the bytes in use at each change in memory, an int64 array [changes, columns].

    Args:
      changes: MemoryChanges.
      column: the column that each tensor counts in, by name.
      size: the bytes of each tensor.
      count: the number of columns.
    """
    now = np.zeros(count, np.int64)
    rows = []
    for born, dead in changes:
        for name in born:
            now[column[name]] += size[name]
        # What an operation reads last is still there while it runs.
        rows.append(now.copy())
        for name in dead:
            now[column[name]] -= size[name]
    return np.array(rows, np.int64).reshape(len(rows), count)


def live_memory(
    graph: GraphInterface, schedule: Sequence[int], candidates: Collection[str]
) -> LiveMemory:
    """Returns the bytes in memory under a schedule, by the dimensions that may be split.

    Tensors with the same splittable dimensions are counted together, and times that cannot be the
    peak of any layout are left out. So the result grows with the number of distinct sets of
    dimensions, not with the number of layers.

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
    column = {name: sets.index(dimension_set) for name, dimension_set in kind.items()}
    size = {name: graph.get_tensor_size(name) for name in kind}
    rows = bytes_over_time(graph.memory_changes(schedule), column, size, len(sets))
    return LiveMemory(sets, maximal_rows(rows))

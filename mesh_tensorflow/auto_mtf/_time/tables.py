"""Tables of seconds by assignment, with pruning and local search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Optional

import numpy as np

from mesh_tensorflow.auto_mtf._memory.space import LayoutSpace, maximal_sets

__all__ = ["Table", "Tables", "local_search"]

Layout = dict[str, str]


class Table:
    """Seconds of the parts of a step that depend on one set of dimensions.

    Attributes:
      dims: sorted names of the dimensions.
      rows: the assignments, an int64 array [assignments, dims] of mesh axes.
      seconds: a float array [assignments].
      alive: a bool array [assignments], which assignments have not been pruned.
    """

    def __init__(self, dims: tuple[str, ...], rows: np.ndarray):
        """Creates a Table of zeros."""
        self.dims = dims
        self.rows = rows
        self.seconds = np.zeros(len(rows))
        self.alive = np.ones(len(rows), bool)

    def codes(self, dims: Iterable[str], base: int) -> np.ndarray:
        """Returns a code for each row; equal codes mean equal assignments of some dimensions."""
        columns = [self.dims.index(d) for d in dims]
        return (self.rows[:, columns] + 1) @ (base ** np.arange(len(columns), dtype=np.int64))


class Tables:
    """The seconds of a step as a sum over tables, one for each maximal set of dimensions.

    Attributes:
      space: a LayoutSpace.
      tables: a list of Tables.
    """

    def __init__(
        self,
        space: LayoutSpace,
        seconds: Mapping[tuple[str, ...], np.ndarray],
        other_sets: Iterable[tuple[str, ...]] = (),
    ):
        """Creates the Tables.

        Args:
          space: a LayoutSpace.
          seconds: for each set of dimensions, the seconds of each assignment in `space`.
          other_sets: further sets of dimensions that a single table must cover.
        """
        self.space = space
        self._base = len(space.mesh_sizes) + 1
        sets = maximal_sets([*seconds, *other_sets, *([d] for d in space.dims)])
        self.tables = [Table(dims, space.assignments(dims)) for dims in sets]
        for dims, column in seconds.items():
            table = self.holder(dims)
            table.seconds += column[space.rows_within(table.dims, dims, table.rows)]
        self._lookup = [dict(zip(map(tuple, t.rows.tolist()), t.seconds)) for t in self.tables]

    def holder(self, dims: Iterable[str]) -> Table:
        """Returns the smallest table that covers some dimensions."""
        wanted = set(dims)
        return min((t for t in self.tables if wanted <= set(t.dims)), key=lambda t: len(t.rows))

    def total(self, layout: Mapping[str, str]) -> float:
        """Returns the seconds of a legal layout."""
        axis = {m: i for i, m in enumerate(self.space.mesh_sizes)}
        of_dim = {d: axis[m] for d, m in layout.items()}
        return sum(
            lookup[tuple(of_dim.get(d, -1) for d in table.dims)]
            for table, lookup in zip(self.tables, self._lookup)
        )

    def least(self) -> float:
        """Returns a lower bound of the seconds of all layouts."""
        return sum(float(table.seconds.min()) for table in self.tables)

    def prune(self, most: float) -> None:
        """Prunes assignments that cannot be in a layout of at most `most` seconds."""
        for table in self.tables:
            table.alive[:] = True
        before = -1
        while before != (count := sum(int(t.alive.sum()) for t in self.tables)):
            before = count
            for table in self.tables:
                least = table.seconds.copy()
                for other in self.tables:
                    if other is not table:
                        least += self._least(table, other)
                table.alive &= least <= most

    def _least(self, table: Table, other: Table) -> np.ndarray:
        """Returns, for each row of a table, the minimum seconds of compatible rows of another."""
        shared = [d for d in table.dims if d in other.dims]
        least = np.full(self._base ** len(shared), np.inf)
        codes = other.codes(shared, self._base)
        np.minimum.at(least, codes[other.alive], other.seconds[other.alive])
        return least[table.codes(shared, self._base)]


def local_search(
    space: LayoutSpace, seconds: Callable[[Layout], float], is_allowed: Callable[[Layout], bool]
) -> Optional[Layout]:
    """Returns a layout that no change of one or two rules makes faster, or None.

    Args:
      space: a LayoutSpace.
      seconds: a function that returns the seconds of a legal layout.
      is_allowed: a function that returns whether a legal layout may be returned.
    """
    best: Optional[Layout] = None
    least = np.inf
    here: Layout = {}
    here_seconds = seconds(here)
    while True:
        if is_allowed(here) and here_seconds < least:
            best, least = here, here_seconds
        near = list(neighbors(space, here))
        near += [n for one in near for n in neighbors(space, one)]
        layouts = list({tuple(sorted(n.items())): n for n in near}.values())
        ranked = sorted((seconds(n), i) for i, n in enumerate(layouts))
        for s, i in ranked:
            if s < least and is_allowed(layouts[i]):
                best, least = layouts[i], s
                break
        if not ranked or ranked[0][0] >= here_seconds:
            return best
        here_seconds, here = ranked[0][0], layouts[ranked[0][1]]


def neighbors(space: LayoutSpace, layout: Mapping[str, str]) -> Iterator[Layout]:
    """Yields the legal layouts that change the rule of one dimension.

    Rules of dimensions that are split alike change with it; those that conflict are dropped.

    Args:
      space: a LayoutSpace.
      layout: a legal layout.
    """
    for d in layout:
        yield {other: m for other, m in layout.items() if other not in space.together(d)}
    for d, m in space.pairs:
        if layout.get(d) != m:
            changed = space.together(d)
            dropped = {
                x for o, n in layout.items() for c in changed
                if n == m and space.meet(c, o) for x in space.together(o)
            }  # fmt: skip
            kept = {o: n for o, n in layout.items() if o not in dropped}
            yield {**kept, **dict.fromkeys(changed, m)}

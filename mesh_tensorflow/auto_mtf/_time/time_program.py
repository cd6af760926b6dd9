"""The integer program for the fastest layout that fits in memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np
import pulp

from mesh_tensorflow.auto_mtf._memory.program import global_var_name, local_var_name
from mesh_tensorflow.auto_mtf._memory.resident import ResidentMemory
from mesh_tensorflow.auto_mtf._memory.solvers import Infeasible, make_solver, solve_to_optimum
from mesh_tensorflow.auto_mtf._time.tables import Table, Tables, local_search, neighbors

__all__ = ["TimeProgram"]

Layout = dict[str, str]

# Layouts whose times differ by a smaller fraction count as equally fast.
_SAME = 1e-6
_SCALE = 1000.0


class TimeProgram:
    """Finds the fastest layouts; among equally fast ones, the one with the least memory.

    The size of the integer program depends on the number of distinct sets of dimensions, not on
    the number of layers: each table of seconds has a variable for each assignment of its
    dimensions. A layout found by local search bounds the time, and assignments that cannot be in
    a faster layout are pruned. Memory constraints are added lazily, for the times at which
    solutions exceed the limit.

    Attributes:
      sizes: (variables, constraints) of each integer program solved so far.
    """

    def __init__(self, tables: Tables, memory: ResidentMemory, limit: Optional[float] = None):
        """Creates a TimeProgram.

        Args:
          tables: Tables.
          memory: a ResidentMemory.
          limit: the memory limit in bytes per processor, or None.
        """
        self._tables = tables
        self._space = tables.space
        self._memory = memory
        self._limit = limit
        self._found: list[Layout] = []
        self._moments: list[int] = []
        self.sizes: list[tuple[int, int]] = []

    def peak(self, layout: Mapping[str, str]) -> int:
        """Returns the peak memory of a layout, in bytes."""
        return self._memory.peak(layout, self._space.mesh_sizes)

    def seconds(self, layout: Mapping[str, str]) -> float:
        """Returns the seconds of a legal layout."""
        return self._tables.total(layout)

    def _fits(self, layout: Mapping[str, str]) -> bool:
        return self._limit is None or self.peak(layout) <= self._limit

    # -- search

    def is_slower(self, seconds: float) -> bool:
        """Returns whether every layout, whether it fits or not, is known to be slower."""
        self._tables.prune(seconds * (1 + _SAME))
        return not all(table.alive.any() for table in self._tables.tables)

    def next_best(self, most_seconds: float = np.inf) -> Optional[Layout]:
        """Returns the next fastest layout that fits; None if there are no more.

        Args:
          most_seconds: slower layouts are not searched for.

        Raises:
          SolverError: the solver did not find an optimum.
        """
        if self.is_slower(most_seconds):
            return None
        known = self._incumbent()
        if known is not None and self._tables.total(known) > most_seconds * (1 + _SAME):
            known = None
        most = self._tables.total(known) if known is not None else most_seconds
        self._tables.prune(most * (1 + _SAME))
        best: Optional[Layout] = known
        with contextlib.suppress(Infeasible):
            best = self._solve(None)
        if best is None:
            return None
        # The solver works to a tolerance, and may return a layout that is slower than the one known
        # before.
        if known is not None and most < self._tables.total(best):
            best = known
        if not self._found:
            best = self._smallest(best)
        alike = self._alike(best)
        self._found += alike
        return alike[0]

    def _alike(self, layout: Layout) -> list[Layout]:
        """Returns the layouts that differ from one only by a permutation of mesh dimensions."""
        sizes = self._space.mesh_sizes
        seconds, peak = self._tables.total(layout), self.peak(layout)
        found = {}
        for order in itertools.permutations(sizes):
            name = dict(zip(sizes, order))
            if any(sizes[a] != sizes[b] for a, b in name.items()):
                continue
            other = {d: name[m] for d, m in layout.items()}
            if not self._space.is_legal(other):
                continue
            same = abs(self._tables.total(other) - seconds) <= _SAME * seconds
            if same and self.peak(other) == peak:
                found[tuple(list(sizes).index(m) for _, m in sorted(other.items()))] = other
        return [found[key] for key in sorted(found)]

    def _incumbent(self) -> Optional[Layout]:
        """Returns a feasible layout, found without a solver."""

        def allowed(layout: Layout) -> bool:
            return layout not in self._found and self._fits(layout)

        if not self._found:
            return local_search(self._space, self._tables.total, allowed)
        near = [n for found in self._found for n in neighbors(self._space, found) if allowed(n)]
        return min(near, key=self._tables.total, default=None)

    def _smallest(self, best: Layout) -> Layout:
        """Returns the layout with the least memory among equally fast ones."""
        most = self._tables.total(best) * (1 + _SAME)
        self._tables.prune(most)
        if all(table.alive.sum() <= 1 for table in self._tables.tables):
            return best
        try:
            small = self._solve(most)
        except Infeasible:
            return best
        slow = self._tables.total(small) > most
        return best if slow or self.peak(small) >= self.peak(best) else small

    def least_memory(self) -> Layout:
        """Returns the layout with the least memory, regardless of its time.

        Raises:
          SolverError: the solver did not find an optimum.
        """
        self._tables.prune(np.inf)
        limit, self._limit = self._limit, None
        try:
            return self._solve(np.inf)
        finally:
            self._limit = limit

    # -- the integer program

    def _solve(self, most: Optional[float]) -> Layout:
        """Returns the fastest layout; given a maximum time, the one with the least memory."""
        program = _Program(self._tables, self._memory, self._limit, most)
        for layout in self._found:
            program.exclude(layout)
        moments = self._moments if most is None else []
        if most is not None:
            moments = [int(self._memory.bytes.sum(axis=1).argmax())]
        for moment in moments:
            program.bound(moment)
        solver = make_solver()
        while True:
            self.sizes.append((program.model.numVariables(), program.model.numConstraints()))
            solve_to_optimum(program.model, solver)
            layout = program.layout()
            in_use = self._memory.in_use(layout, self._space.mesh_sizes)
            highest = int(in_use.argmax())
            if highest in moments or (most is None and self._fits(layout)):
                return layout
            if most is not None and in_use[highest] <= in_use[moments].max():
                return layout
            moments.append(highest)
            program.bound(highest)


class _Program:
    """An integer program over the assignments that have not been pruned."""

    def __init__(
        self,
        tables: Tables,
        memory: ResidentMemory,
        limit: Optional[float],
        most: Optional[float],
    ):
        self._tables = tables
        self._space = tables.space
        self._memory = memory
        self._limit = limit
        self._count = 0
        self.model = pulp.LpProblem("fastest_layout", pulp.LpMinimize)
        self._x = {
            pair: self._variable(global_var_name(*pair), cat="Integer", upBound=1)
            for pair in self._space.pairs
        }
        self._y = [self._assignments(table) for table in tables.tables]
        self._once()
        self._peak = None
        floor = sum(float(t.seconds[t.alive].min()) for t in tables.tables if t.alive.any())
        time = pulp.LpAffineExpression(
            [
                (y, float(s) * _SCALE / (floor or 1.0))
                for table, ys in zip(tables.tables, self._y)
                for y, s in zip(ys, table.seconds[table.alive])
            ]
        )
        if most is None:
            self.model.setObjective(time)
            return
        if np.isfinite(most):
            self.model += time <= most * _SCALE / (floor or 1.0)
        self._peak = self._variable("z")
        self.model.setObjective(pulp.lpSum([self._peak]))

    def _variable(self, name: str, **kwargs: Any) -> Any:
        self._count += 1  # keeps names distinct that solvers would map to one
        return self.model.add_variable(f"{name}_{self._count}", lowBound=0, **kwargs)

    def _assignments(self, table: Table) -> list[Any]:
        """Adds one-hot variables for the assignments of a table."""
        rows = table.rows[table.alive]
        layouts = [self._space.layout(table.dims, row) for row in rows]
        ys = [self._variable(local_var_name(table.dims, layout)) for layout in layouts]
        self.model += pulp.lpSum(ys) == 1
        for (d, m), chosen in self._x.items():
            if d in table.dims:
                split = [y for layout, y in zip(layouts, ys) if layout.get(d) == m]
                self.model += pulp.lpSum(split) == chosen
        return ys

    def _once(self) -> None:
        for d in self._space.dims:
            chosen = [x for (name, _), x in self._x.items() if name == d]
            self.model += pulp.lpSum(chosen) <= 1
        for names in self._space.operation_sets:
            for m in self._space.mesh_sizes:
                chosen = [x for (d, n), x in self._x.items() if n == m and d in names]
                if len(chosen) > 1:
                    self.model += pulp.lpSum(chosen) <= 1

    def exclude(self, layout: Mapping[str, str]) -> None:
        """Adds a constraint that excludes a layout."""
        kept = [1 - x if layout.get(d) == m else x for (d, m), x in self._x.items()]
        self.model += pulp.lpSum(kept) >= 1

    def bound(self, moment: int) -> None:
        """Adds constraints that memory at a time is within the limit and at most the peak."""
        row = self._memory.bytes[moment]
        unit = float(self._limit or self._memory.peak({}, {}) or 1) / _SCALE
        terms = []
        for column, held in enumerate(row):
            if not held:
                continue
            table = self._tables.holder(self._memory.dimension_sets[column])
            ys = self._y[self._tables.tables.index(table)]
            rows = table.rows[table.alive]
            parts = self._memory.parts_of_rows(column, self._space, table.dims, rows)
            terms += [(y, float(held) / p / unit) for y, p in zip(ys, parts)]
        in_use = pulp.LpAffineExpression(_joined(terms))
        if self._limit is not None:
            # A layout exactly at the limit fits, despite rounding errors of solvers.
            self.model += in_use <= self._limit / unit * (1 + 1e-9)
        if self._peak is not None:
            self.model += in_use <= self._peak

    def layout(self) -> Layout:
        """Returns the solution."""
        return {d: m for (d, m), x in self._x.items() if (pulp.value(x) or 0.0) > 0.5}


def _joined(terms: Sequence[tuple[Any, float]]) -> list[tuple[Any, float]]:
    """Adds up the terms of each variable."""
    total: dict[Any, float] = {}
    for variable, amount in terms:
        total[variable] = total.get(variable, 0.0) + amount
    return list(total.items())

"""The integer program that finds the layout with the shortest step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

import numpy as np
import pulp

from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow.auto_mtf._memory.program import (
    Infeasible,
    global_var_name,
    local_var_name,
    make_solver,
    solve_to_optimum,
)
from mesh_tensorflow.auto_mtf._memory.resident import ResidentMemory
from mesh_tensorflow.auto_mtf._memory.space import (
    LayoutSpace,
    Storing,
    Updates,
    find_updates,
    maximal_sets,
    program_steps,
)
from mesh_tensorflow.auto_mtf._time.units import Known, Unit, program_units


class ProgramParts:
    """The units and the memory of a program, which are found once for all meshes."""

    def __init__(self, graph: Graph, outputs: Iterable[Tensor] = ()):
        """Creates the ProgramParts.

        Args:
          graph: an mtf.Graph, which is not changed afterwards.
          outputs: Tensors that stay in memory until the end.
        """
        self.graph = graph
        self.outputs = list(outputs)
        self._updates: list[Updates] = []
        self._units: dict[tuple[frozenset[str], bool], list[Unit]] = {}
        self._known: dict[Hashable, Known] = {}
        self._memory: dict[tuple[frozenset[str], int], ResidentMemory] = {}

    @property
    def updates(self) -> Updates:
        """The Updates of the program."""
        if not self._updates:
            self._updates.append(find_updates(self.graph))
        return self._updates[0]

    def known(self, *mesh: Hashable) -> Known:
        """Returns the seconds of units that are evaluated so far, on one mesh.

        Args:
          *mesh: what tells meshes apart.
        """
        return self._known.setdefault(mesh, {})

    def units(self, candidates: frozenset[str], stored: bool) -> list[Unit]:
        """Returns the units of the program.

        Args:
          candidates: names of the dimensions that may be split.
          stored: whether variables are stored in parts.
        """
        key = candidates, stored
        if key not in self._units:
            steps = program_steps(self.graph.operations, self.outputs)
            updates = self.updates if stored else None
            self._units[key] = program_units(steps, candidates, updates)
        return self._units[key]

    def memory(self, candidates: frozenset[str], storing: Storing) -> ResidentMemory:
        """Returns the memory of the program on one processor.

        Args:
          candidates: names of the dimensions that may be split.
          storing: a Storing.
        """
        stored = storing.layout is not None
        # Rows do not depend on the mesh, so there are three: nothing in parts, slots, and weights
        # too.
        key = candidates, stored + storing.weights_too
        if key not in self._memory:
            updates = self.updates if stored else None
            self._memory[key] = ResidentMemory(
                self.graph, self.outputs, candidates, storing, updates
            )
        return self._memory[key].on(storing)


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
            # An earlier call may have pruned more: the next best layout is slower than the best.
            table.alive[:] = True
        before = -1
        # What is pruned in one table may raise the bounds of rows of others, so until nothing
        # changes.
        while before != (count := sum(int(t.alive.sum()) for t in self.tables)):
            before = count
            for table in self.tables:
                # seconds(row) + sum over other tables of the least seconds of a row that agrees
                # with it, which no layout with this row can beat.
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
        # Codes repeat, and `least[codes] = ...` would keep the last of them instead of the least.
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
        # Two rules at once: splitting two dimensions may pay where splitting either of them does
        # not.
        near += [n for one in near for n in neighbors(space, one)]
        layouts = list({tuple(sorted(n.items())): n for n in near}.values())
        ranked = sorted((seconds(n), i) for i, n in enumerate(layouts))
        # The walk may go on through layouts that are not allowed, but returns none of them.
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


# Layouts whose times differ by a smaller fraction count as equally fast.
_SAME = 1e-6
# Tolerances of solvers are absolute, so times and bytes are scaled to numbers of about this size.
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
        # What is slower than a layout that is known to fit need not be in the integer program.
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
        # One layout stands for those that differ by a permutation, and all of them are excluded.
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
            # Mesh dimensions of one size may have different links, so the times are compared.
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
        # One row of each table is one layout, so no other one is as fast.
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
        program = _IntegerProgram(self._tables, self._memory, self._limit, most)
        for layout in self._found:
            program.exclude(layout)
        # The same list, so that later programs begin with the moments at which earlier layouts
        # failed.
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
            # A bounded moment exceeds the limit by the tolerance of the solver at most.
            if highest in moments or (most is None and self._fits(layout)):
                return layout
            if most is not None and in_use[highest] <= in_use[moments].max():
                return layout
            moments.append(highest)
            program.bound(highest)


class _IntegerProgram:
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
        # The number of pairs in which a layout differs from this one is at least 1.
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

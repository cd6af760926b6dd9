"""The integer program of layouts, for least memory or least time, and the search for the fastest.

The memory of a layout, and the time of its step, are sums of amounts that each depend on how a few
dimensions are split. A table has the amounts for all assignments of one set of dimensions.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

import numpy as np
import pulp

from mesh_tensorflow._core.layout import joined_names
from mesh_tensorflow._core.shape import JOIN
from mesh_tensorflow.auto_mtf._space import LayoutSpace, maximal_sets
from mesh_tensorflow.auto_mtf.objective import NO_BLOCK, LiveMemory

Layout = Mapping[str, str]

# -- solvers

# In order of preference: the name in PuLP, the required module, and the options. Solvers use one
# thread, so that results are reproducible. That is the default of CBC, and setting it explicitly
# sometimes makes CBC wait for ten seconds.
_SOLVERS: dict[str, tuple[str, dict[str, Any]]] = {
    # In 1.15.1, presolve does not terminate for some programs of twenty variables.
    "HiGHS": ("highspy", {"threads": 1, "gapRel": 0.0, "presolve": "off"}),
    "PULP_CBC_CMD": ("pulp", {"gapRel": 0.0}),
    "COIN_CMD": ("pulp", {"gapRel": 0.0}),
}


class SolverError(Exception):
    """No optimum was found."""


class Infeasible(SolverError):
    """The program has no solution."""


def available_solvers() -> list[str]:
    """Returns the names of the installed solvers, in order of preference."""
    of_pulp = set(pulp.listSolvers())
    return [
        name
        for name, (module, _) in _SOLVERS.items()
        if name in of_pulp
        and importlib.util.find_spec(module) is not None
        and pulp.getSolver(name, msg=False).available()
    ]


def make_solver() -> Any:
    """Creates the preferred solver of PuLP.

    Raises:
      SolverError: no solver is installed.
    """
    names = available_solvers()
    if not names:
        raise SolverError(
            "PuLP finds no solver of integer programs: pip install highspy, or pulp[cbc]"
        )
    return pulp.getSolver(names[0], msg=False, **_SOLVERS[names[0]][1])


def solve_to_optimum(model: pulp.LpProblem, solver: Any) -> None:
    """Solves an integer program to optimality.

    Raises:
      SolverError: the solver did not find an optimum.
    """
    try:
        model.solve(solver)
    except pulp.PulpSolverError as e:
        raise SolverError(f"{solver.name} failed: {e}") from e
    # Not `status` alone: that is "Optimal" also of a solver that stopped early with some solution.
    if model.sol_status != pulp.LpSolutionOptimal:
        infeasible = model.status == pulp.LpStatusInfeasible
        raise (Infeasible if infeasible else SolverError)(
            f"{solver.name} found no optimum of the layout program, which has "
            f"{model.numVariables()} variables and {model.numConstraints()} constraints: "
            f"{pulp.LpStatus[model.status]}"
        )


# -- tables


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


def holder(tables: Iterable[Table], dims: Iterable[str]) -> Table:
    """Returns the smallest table that covers some dimensions."""
    needed = set(dims)
    # Each of its rows is a variable in the constraints that it is looked up for.
    return min((t for t in tables if needed <= set(t.dims)), key=lambda t: len(t.rows))


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
        sets = maximal_sets([*seconds, *other_sets, *([d] for d in space.dims)])
        self.tables = [Table(dims, space.assignments(dims)) for dims in sets]
        for dims, column in seconds.items():
            table = holder(self.tables, dims)
            of_code = dict(zip(space.codes(dims, dims, space.assignments(dims)).tolist(), column))
            codes = space.codes(table.dims, dims, table.rows)
            table.seconds += [of_code[code] for code in codes.tolist()]
        self._lookup = [dict(zip(map(tuple, t.rows.tolist()), t.seconds)) for t in self.tables]

    def total(self, layout: Mapping[str, str]) -> float:
        """Returns the seconds of a legal layout."""
        axis = {m: i for i, m in enumerate(self.space.mesh_dims)}
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
        least = np.full(self.space.base ** len(shared), np.inf)
        codes = self.space.codes(other.dims, shared, other.rows)
        # Codes repeat, and `least[codes] = ...` would keep the last of them instead of the least.
        np.minimum.at(least, codes[other.alive], other.seconds[other.alive])
        return least[self.space.codes(table.dims, shared, table.rows)]


# -- the integer program

# Solvers have tolerances of about 1e-7, so amounts should not be much larger than the inverse.
_LARGEST_AMOUNT = 10**7
# These tolerances are absolute, so times and limits are scaled to numbers of about this size.
_SCALE = 1000.0


def global_var_name(splittable_dimension: str, mesh_dimension: str) -> str:
    """Returns the name of the variable for splitting a dimension over a mesh dimension."""
    return f"x_({splittable_dimension}:{mesh_dimension})"


def local_var_name(splittable_dimensions: Iterable[str], assignment: Mapping[str, str]) -> str:
    """Returns the name of the variable for an assignment of a set of dimensions."""
    names = sorted(splittable_dimensions)
    pairs = (f"{d}:{assignment[d]}" if d in assignment else d for d in names)
    return f"y_({','.join(pairs)})"


class LayoutProgram:
    """The integer program of the layouts of a space: for least time, or for least memory.

    The binary variable x_(d:m) is 1 if dimension d is split over mesh dimension m. Of each table,
    one of the variables of its assignments is 1: y_(d:m,e) if of {d, e} only d is split, over m.
    z is the peak memory.

    The size of the integer program grows with the number of distinct sets of dimensions, not with
    that of layers. Constraints on memory are added lazily: a solution whose memory exceeds what is
    allowed at a time that is not yet in the program adds that time. A few suffice.

    Attributes:
      model: the pulp.LpProblem.
      times: the times at which memory is bounded.
      sizes: (variables, constraints) of each program that was solved.
    """

    def __init__(
        self,
        space: LayoutSpace,
        tables: Sequence[Table],
        memory: LiveMemory,
        limit: Optional[float] = None,
    ):
        """Creates the program, without an objective.

        Args:
          space: a LayoutSpace.
          tables: Tables of sets of dimensions; one covers those of each column of the memory that
            is ever in use.
          memory: a LiveMemory.
          limit: the bytes that may be in use, or None.
        """
        self._space = space
        self._tables = list(tables)
        self._memory = memory
        self._limit = limit
        self._names: set[str] = set()
        self.times: list[int] = []
        self.sizes: list[tuple[int, int]] = []
        self.model = pulp.LpProblem("layout", pulp.LpMinimize)
        self._x = {
            pair: self._variable(global_var_name(*pair), cat="Integer", upBound=1)
            for pair in space.pairs
        }
        self._each_split_once()
        self._split_alike()
        self._y = {table: self._assignments(table) for table in self._tables}
        self._split: dict[int, list[tuple[int, Any]]] = {}
        self._peak: Any = None
        self._unit = (limit or 1.0) / _SCALE

    def _variable(self, name: str, **kwargs: Any) -> Any:
        """Adds a nonnegative variable, under a name that is unique for solvers too."""
        # PuLP replaces characters that solvers do not take, so two names may become one.
        key, count = pulp.LpVariable(name).name, 1
        while key in self._names:
            count += 1
            key = pulp.LpVariable(f"{name}_{count}").name
        self._names.add(key)
        return self.model.add_variable(key, lowBound=0, **kwargs)

    # -- legal layouts

    def _each_split_once(self) -> None:
        by_dim: dict[str, list[Any]] = {}
        by_mesh_dim: dict[str, dict[str, list[Any]]] = {}
        for (d, m), x in self._x.items():
            by_dim.setdefault(d, []).append(x)
            for name in joined_names(m, self._space.mesh_sizes):
                by_mesh_dim.setdefault(name, {}).setdefault(d, []).append(x)
        for of_dim in by_dim.values():
            self._at_most_one(of_dim)
        for split in by_mesh_dim.values():
            # At most one of a set: that implies the same for all of its subsets.
            for together in maximal_sets(set(s) & split.keys() for s in self._space.operation_sets):
                self._at_most_one([x for d in together for x in split[d]])

    def _at_most_one(self, variables: Sequence[Any]) -> None:
        if len(variables) > 1:
            self.model += pulp.lpSum(variables) <= 1

    def _split_alike(self) -> None:
        for first, *others in map(sorted, self._space.alike):
            for (d, m), x in self._x.items():
                if d in others:
                    self.model += x == self._x[first, m]

    def _assignments(self, table: Table) -> list[Any]:
        """Adds one-hot variables for the assignments of a table that are alive."""
        layouts = [self._space.layout(table.dims, row) for row in table.rows[table.alive]]
        ys = [self._variable(local_var_name(table.dims, layout)) for layout in layouts]
        self.model += pulp.lpSum(ys) == 1
        for (d, m), x in self._x.items():
            if d in table.dims:
                split = [y for layout, y in zip(layouts, ys) if layout.get(d) == m]
                # sum of y_(...d:m...) = x_(d:m). With whole x, these leave a single assignment, so
                # that y need not be integers for the solver.
                self.model += pulp.lpSum(split) == x
        return ys

    def exclude(self, layout: Layout) -> None:
        """Adds a constraint that excludes a layout."""
        # The number of pairs in which a layout differs from this one is at least 1.
        changes = [1 - x if layout.get(d) == m else x for (d, m), x in self._x.items()]
        self.model += pulp.lpSum(changes) >= 1

    # -- objectives

    def minimize_seconds(self) -> None:
        """Makes the time of a step the objective."""
        self.model.setObjective(self._seconds()[0])

    def _seconds(self) -> tuple[Any, float]:
        """Returns the time of a step, and the number of its units in a second."""
        alive = [table.seconds[table.alive] for table in self._tables]
        floor = sum(float(seconds.min()) for seconds in alive if len(seconds))
        scale = _SCALE / (floor or 1.0)
        ys = self._y.values()
        terms = [
            (y, float(s) * scale) for some, column in zip(ys, alive) for y, s in zip(some, column)
        ]
        return pulp.LpAffineExpression(terms), scale

    def minimize_peak(self, most_seconds: float = np.inf) -> None:
        """Makes the peak memory the objective.

        Args:
          most_seconds: the most seconds that a step may take.
        """
        if np.isfinite(most_seconds):
            time, scale = self._seconds()
            self.model += time <= most_seconds * scale
        self._unit = self._amount_unit()
        self._peak = self._variable("z")
        self.model.setObjective(pulp.lpSum([self._peak]))
        if len(self._memory.bytes):
            # One time from the beginning: without any, the peak would be 0 in each layout.
            self.bound(int(self._memory.bytes.sum(axis=1).argmax()))

    # -- memory

    def _parts(self, column: int) -> list[tuple[int, Any]]:
        """Returns pairs (number of parts of a column, variable), for each assignment."""
        if column not in self._split:
            table = holder(self._tables, self._memory.dimension_sets[column])
            rows = table.rows[table.alive]
            parts = self._memory.parts_of_rows(column, self._space, table.dims, rows)
            self._split[column] = list(zip(parts, self._y[table]))
        return self._split[column]

    def _amount_unit(self) -> float:
        """Returns a common divisor of all amounts, so that the optimum is exact; or about one."""
        bytes_ = self._memory.bytes
        divisors = []
        for column in np.flatnonzero(bytes_.any(axis=0)).tolist():
            # Every amount, bytes / parts, is a multiple of bytes / lcm(parts).
            most = math.lcm(*(p for p, _ in self._parts(column) if p < NO_BLOCK))
            divisors.append(int(np.gcd.reduce(bytes_[:, column] // most)))
        return max(math.gcd(*divisors), self._memory.peak({}) / _LARGEST_AMOUNT) or 1

    def bound(self, time: int) -> None:
        """Adds constraints that memory at a time is within the limit, and at most the peak."""
        amounts: dict[Any, float] = {}
        for column, bytes_ in enumerate(self._memory.bytes[time]):
            for parts, y in self._parts(column) if bytes_ else ():
                # Columns may have one table, whose variables then have the amounts of all of them.
                amounts[y] = amounts.get(y, 0.0) + int(bytes_) / (parts * self._unit)
        in_use = pulp.LpAffineExpression(list(amounts.items()))
        if self._limit is not None:
            # A layout exactly at the limit fits, despite rounding errors of solvers.
            self.model += in_use <= self._limit / self._unit * (1 + 1e-9)
        if self._peak is not None:
            self.model += in_use <= self._peak
        self.times.append(time)

    # -- solutions

    def layout(self) -> Layout:
        """Returns the solution as a dictionary from dimension names to mesh dimension names."""
        # Solvers return whole numbers with rounding errors.
        return {d: m for (d, m), x in self._x.items() if (pulp.value(x) or 0.0) > 0.5}

    def optimum(self, solver: Any) -> Layout:
        """Solves the program, adding times until memory is highest at one of them, or allowed.

        Args:
          solver: a solver of PuLP.

        Raises:
          SolverError: the solver did not find an optimum.
        """
        allowed = 0.0
        if self._peak is None:
            allowed = np.inf if self._limit is None else self._limit
        while True:
            self.sizes.append((self.model.numVariables(), self.model.numConstraints()))
            solve_to_optimum(self.model, solver)
            layout = self.layout()
            in_use = self._memory.in_use(layout)
            # With some times left out, the optimum is a lower bound. Here memory is highest at one
            # of those that are in, so that no layout is better; what is bounded by the limit
            # exceeds it by the tolerance of the solver at most.
            if in_use.max(initial=0) <= max(allowed, in_use[self.times].max(initial=0)):
                return layout
            self.bound(int(in_use.argmax()))

    def least_memory(self, solver: Any) -> Layout:
        """Returns a layout of least peak that splits the most dimensions.

        The program is one that minimizes the peak; afterwards its objective is the number of
        splits.

        Args:
          solver: a solver of PuLP.

        Raises:
          SolverError: the solver did not find an optimum.
        """
        self.model.setObjective(pulp.lpSum([self._peak]))
        if not self._x:
            self._peak.varValue = self._memory.peak({}) / self._unit
            return {}
        best = self.optimum(solver)
        self.model.setObjective(-pulp.lpSum(self._x.values()))
        # Half a unit leaves room for rounding errors only, if amounts are whole.
        self._peak.upBound = self._memory.peak(best) / self._unit + 0.5
        last = self.optimum(solver)
        # If amounts are rounded to the unit, half a unit may let in a layout that needs more.
        return last if self._memory.peak(last) <= self._memory.peak(best) else best


# -- the fastest layouts

# Layouts whose times differ by a smaller fraction count as equally fast.
_SAME = 1e-6


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
    current: Layout = {}
    here_seconds = seconds(current)
    while True:
        if is_allowed(current) and here_seconds < least:
            best, least = current, here_seconds
        near = list(neighbors(space, current))
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
        here_seconds, current = ranked[0][0], layouts[ranked[0][1]]


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
                if space.share(n, m) and space.meet(c, o) for x in space.together(o)
            }  # fmt: skip
            others = {o: n for o, n in layout.items() if o not in dropped}
            yield {**others, **dict.fromkeys(changed, m)}


class FastestLayouts:
    """Finds the fastest layouts; among equally fast ones, the one with the least memory.

    A layout found by local search bounds the time, and assignments that cannot be in a faster
    layout are pruned before the integer program is solved.

    Attributes:
      sizes: (variables, constraints) of each integer program solved so far.
    """

    def __init__(self, tables: Tables, memory: LiveMemory, limit: Optional[float] = None):
        """Creates a FastestLayouts.

        Args:
          tables: Tables.
          memory: a LiveMemory.
          limit: the memory limit in bytes per processor, or None.
        """
        self._tables = tables
        self._space = tables.space
        self._memory = memory
        self._limit = limit
        self._found: list[Layout] = []
        self._times: list[int] = []
        self.sizes: list[tuple[int, int]] = []

    def seconds(self, layout: Mapping[str, str]) -> float:
        """Returns the seconds of a legal layout."""
        return self._tables.total(layout)

    def _fits(self, layout: Mapping[str, str]) -> bool:
        return self._limit is None or self._memory.peak(layout) <= self._limit

    # -- search

    def next_best(self, most_seconds: float = np.inf) -> Optional[Layout]:
        """Returns the next fastest layout that fits; None if there are no more.

        Args:
          most_seconds: slower layouts are not searched for.

        Raises:
          SolverError: the solver did not find an optimum.
        """
        self._tables.prune(most_seconds * (1 + _SAME))
        # A layout has a row of each table, so where none is left there is no layout.
        if not all(table.alive.any() for table in self._tables.tables):
            return None
        # What is slower than a layout that is known to fit need not be in the integer program.
        incumbent = self._incumbent()
        if incumbent is not None and self._tables.total(incumbent) > most_seconds * (1 + _SAME):
            incumbent = None
        most = self._tables.total(incumbent) if incumbent is not None else most_seconds
        self._tables.prune(most * (1 + _SAME))
        best: Optional[Layout] = incumbent
        with contextlib.suppress(Infeasible):
            best = self._solve(None)
        if best is None:
            return None
        # The solver works to a tolerance, and may return a layout that is slower than the one known
        # before.
        if incumbent is not None and most < self._tables.total(best):
            best = incumbent
        if not self._found:
            best = self._smallest(best)
        alike = self._alike(best)
        # One layout stands for those that differ by a permutation, and all of them are excluded.
        self._found += alike
        return alike[0]

    def _alike(self, layout: Layout) -> list[Layout]:
        """Returns the layouts that differ from one only by a permutation of mesh dimensions."""
        sizes = self._space.mesh_sizes
        seconds, peak = self._tables.total(layout), self._memory.peak(layout)
        layouts = {}
        for order in itertools.permutations(sizes):
            name = dict(zip(sizes, order))
            if any(sizes[a] != sizes[b] for a, b in name.items()):
                continue
            other = {d: self._renamed(m, name) for d, m in layout.items()}
            if not self._space.is_legal(other):
                continue
            # Mesh dimensions of one size may have different links, so the times are compared.
            same = abs(self._tables.total(other) - seconds) <= _SAME * seconds
            if same and self._memory.peak(other) == peak:
                mesh_dims = self._space.mesh_dims
                layouts[tuple(mesh_dims.index(m) for _, m in sorted(other.items()))] = other
        # In an order of its own: which of them stands for all does not depend on the solver.
        return [layouts[key] for key in sorted(layouts)]

    def _renamed(self, mesh_dim: str, name: Mapping[str, str]) -> str:
        """Returns a mesh dimension, or the joined ones of the space, under other names."""
        if mesh_dim in name:
            return name[mesh_dim]
        sizes = self._space.mesh_sizes
        names = {name[n] for n in joined_names(mesh_dim, sizes)}
        return JOIN.join(n for n in sizes if n in names)

    def _incumbent(self) -> Optional[Layout]:
        """Returns a feasible layout, found without a solver."""

        def allowed(layout: Layout) -> bool:
            return layout not in self._found and self._fits(layout)

        if not self._found:
            return local_search(self._space, self._tables.total, allowed)
        # It only bounds the time, so a layout near to one found before is enough.
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
        return best if slow or self._memory.peak(small) >= self._memory.peak(best) else small

    def least_memory(self) -> Layout:
        """Returns the layout with the least memory, regardless of its time.

        Raises:
          SolverError: the solver did not find an optimum.
        """
        self._tables.prune(np.inf)
        # Also where no layout fits: this one says what is missing.
        limit, self._limit = self._limit, None
        try:
            return self._solve(np.inf)
        finally:
            self._limit = limit

    # -- the integer program

    def _solve(self, most: Optional[float]) -> Layout:
        """Returns the fastest layout; given a maximum time, the one with the least memory."""
        program = LayoutProgram(self._space, self._tables.tables, self._memory, self._limit)
        for layout in self._found:
            program.exclude(layout)
        if most is None:
            program.minimize_seconds()
            # Begins with the times at which earlier layouts exceeded the limit.
            for time in self._times:
                program.bound(time)
        else:
            program.minimize_peak(most)
        try:
            return program.optimum(make_solver())
        finally:
            self.sizes += program.sizes
            if most is None:
                self._times = program.times

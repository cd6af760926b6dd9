"""The integer program that finds the layout with the least memory.

The binary variable x_(d:m) is 1 if dimension d is split over mesh dimension m. For each set of
dimensions of a tensor, there are binary variables for its assignments: y_(d:m,e) is 1 if of the set
{d, e} only d is split, over m. z is the peak memory.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pulp

from mesh_tensorflow.auto_mtf._memory.objective import DimensionSet, LiveMemory
from mesh_tensorflow.auto_mtf._memory.space import maximal_sets

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
    known = set(pulp.listSolvers())
    return [
        name
        for name, (module, _) in _SOLVERS.items()
        if name in known
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
    if model.sol_status != pulp.LpSolutionOptimal:
        infeasible = model.status == pulp.LpStatusInfeasible
        raise (Infeasible if infeasible else SolverError)(
            f"{solver.name} found no optimum of the layout program, which has "
            f"{model.numVariables()} variables and {model.numConstraints()} constraints: "
            f"{pulp.LpStatus[model.status]}"
        )


Assignment = dict[str, str]

# Solvers have tolerances of about 1e-7, so amounts should not be much larger than the inverse.
_LARGEST_AMOUNT = 10**7


def global_var_name(splittable_dimension: str, mesh_dimension: str) -> str:
    """Returns the name of the variable for splitting a dimension over a mesh dimension."""
    return f"x_({splittable_dimension}:{mesh_dimension})"


def local_var_name(splittable_dimensions: Iterable[str], assignment: Mapping[str, str]) -> str:
    """Returns the name of the variable for an assignment of a set of dimensions."""
    names = sorted(splittable_dimensions)
    parts = (f"{d}:{assignment[d]}" if d in assignment else d for d in names)
    return f"y_({','.join(parts)})"


def generate_assignments(
    splittable_dims: Collection[str], mesh_dimension_to_size: Collection[str]
) -> list[Assignment]:
    """Returns all assignments of distinct mesh dimensions to some of the dimensions.

    Args:
      splittable_dims: names of dimensions.
      mesh_dimension_to_size: names of mesh dimensions.
    """
    dims, mesh_dims = sorted(splittable_dims), sorted(mesh_dimension_to_size)
    return [
        dict(zip(some, order))
        for count in range(min(len(dims), len(mesh_dims)) + 1)
        for some in itertools.combinations(dims, count)
        for order in itertools.permutations(mesh_dims, count)
    ]


class LayoutProgram:
    """Finds the layout with the least memory; among several, one that splits the most dimensions.

    The size of the integer program grows with the number of distinct sets of dimensions of
    operations and tensors. Constraints on peak memory are added lazily: it starts with the time
    of peak memory without splits, and adds the time at which a solution peaks until that is
    already included. A few times suffice, regardless of the depth of the model.

    Memory is counted in units of a common divisor of all amounts, so that the optimum is exact;
    if that makes numbers too large for solvers, in units of 1e-7 of the memory without splits.

    Attributes:
      model: the pulp.LpProblem; its objective after `solve` is the number of splits.
    """

    def __init__(
        self,
        pairs: Collection[tuple[str, str]],
        mesh_sizes: Mapping[str, int],
        operation_sets: Iterable[Collection[str]],
        memory: LiveMemory,
        alike: Iterable[Collection[str]] = (),
    ):
        """Creates the program.

        Args:
          pairs: the pairs (dimension name, mesh dimension name) that may be in the layout.
          mesh_sizes: a dictionary from mesh dimension names to sizes.
          operation_sets: for each operation, the names of its splittable dimensions, no two of
            which may be split over the same mesh dimension.
          memory: the LiveMemory of the program.
          alike: sets of names of dimensions that are split over the same mesh dimension or not at
            all; all have the same pairs.
        """
        self._sizes = mesh_sizes
        self._memory = memory
        self._names: set[str] = set()
        self.model = pulp.LpProblem("layout", pulp.LpMinimize)
        self._global = {
            pair: self._variable(global_var_name(*pair), cat="Integer", upBound=1)
            for pair in sorted(pairs)
        }
        self._each_split_once(operation_sets)
        for first, *others in map(sorted, alike):
            for (d, m), x in self._global.items():
                if d in others:
                    self.model += x == self._global[first, m]
        self._used = [
            column for column in range(len(memory.dimension_sets)) if memory.bytes[:, column].any()
        ]
        self._local = {c: self._local_variables(memory.dimension_sets[c]) for c in self._used}
        self._unit = self._amount_unit()
        self._peak = self._variable("z")
        self._bounded: list[int] = []
        if len(memory.bytes):
            self._bound_peak(0)

    def _variable(self, name: str, **kwargs: Any) -> Any:
        """Adds a nonnegative variable, under a name that is unique for solvers too."""
        # PuLP replaces characters that solvers do not take, so two names may become one.
        key, count = pulp.LpVariable(name).name, 1
        while key in self._names:
            count += 1
            key = pulp.LpVariable(f"{name}_{count}").name
        self._names.add(key)
        return self.model.add_variable(key, lowBound=0, **kwargs)

    def _each_split_once(self, operation_sets: Iterable[Collection[str]]) -> None:
        by_dim: dict[str, list[str]] = {}
        by_mesh_dim: dict[str, list[str]] = {}
        for d, m in self._global:
            by_dim.setdefault(d, []).append(m)
            by_mesh_dim.setdefault(m, []).append(d)
        for d, mesh_dims in by_dim.items():
            self._at_most_one([self._global[d, m] for m in mesh_dims])
        for m, dims in by_mesh_dim.items():
            # At most one of a set: that implies the same for all of its subsets.
            for together in maximal_sets(set(s) & set(dims) for s in operation_sets):
                self._at_most_one([self._global[d, m] for d in together])

    def _at_most_one(self, variables: Sequence[Any]) -> None:
        if len(variables) > 1:
            self.model += pulp.lpSum(variables) <= 1

    def _local_variables(self, dims: DimensionSet) -> list[tuple[int, Any]]:
        """Adds one-hot variables for the assignments of a set; returns (parts, variable) pairs."""
        assignments = [
            a for a in generate_assignments(dims, self._sizes) if a.items() <= self._global.keys()
        ]
        variables = [self._variable(local_var_name(dims, a)) for a in assignments]
        self.model += pulp.lpSum(variables) == 1
        for (d, m), chosen in self._global.items():
            if d in dims:
                split = [y for a, y in zip(assignments, variables) if a.get(d) == m]
                # sum of y_(...d:m...) = x_(d:m). With whole x, these leave a single assignment, so
                # that y need not be integers for the solver.
                self.model += pulp.lpSum(split) == chosen
        parts = [math.prod(self._sizes[m] for m in a.values()) for a in assignments]
        return list(zip(parts, variables))

    def _amount_unit(self) -> float:
        # Every amount, bytes / parts, is a multiple of bytes / lcm(parts).
        most = {c: math.lcm(*(parts for parts, _ in local)) for c, local in self._local.items()}
        amounts = (int(row[c]) // most[c] for row in self._memory.bytes for c in self._used)
        return max(math.gcd(*amounts), self.peak({}) / _LARGEST_AMOUNT) or 1

    def _bound_peak(self, time: int) -> None:
        """Adds the constraint that the peak is at least the memory in use at a time."""
        row = self._memory.bytes[time]
        terms = [
            (y, int(row[c]) / (parts * self._unit))
            for c in self._used
            if row[c]
            for parts, y in self._local[c]
        ]
        self.model += pulp.LpAffineExpression(terms) <= self._peak
        self._bounded.append(time)

    def layout(self) -> dict[str, str]:
        """Returns the solution as a dictionary from dimension names to mesh dimension names."""
        # Solvers return whole numbers with rounding errors.
        return {d: m for (d, m), x in self._global.items() if (pulp.value(x) or 0.0) > 0.5}

    def _in_use(self, layout: Mapping[str, str]) -> np.ndarray:
        """Returns the bytes in use at each time."""
        parts = [
            math.prod(self._sizes[layout[d]] for d in dims if d in layout)
            for dims in self._memory.dimension_sets
        ]
        return (self._memory.bytes // np.array(parts, np.int64)).sum(axis=1)

    def peak(self, layout: Mapping[str, str]) -> int:
        """Returns the peak memory of a layout, in bytes."""
        return int(self._in_use(layout).max(initial=0))

    def _optimum(self, solver: Any) -> dict[str, str]:
        """Solves the program, adding times until the peak of the solution is at one of them."""
        while True:
            solve_to_optimum(self.model, solver)
            layout = self.layout()
            in_use = self._in_use(layout)
            highest = int(in_use.argmax())
            # With some times left out, the optimum is a lower bound of the peak. Here the peak of
            # the layout is one of those that are in, so no layout has less.
            if in_use[highest] <= in_use[self._bounded].max():
                return layout
            self._bound_peak(highest)

    def solve(self, solver: Any) -> dict[str, str]:
        """Returns a layout of least peak that splits the most dimensions.

        Args:
          solver: a solver of PuLP.

        Raises:
          SolverError: the solver did not find an optimum.
        """
        self.model.setObjective(pulp.lpSum([self._peak]))
        if not self._global:
            self._peak.varValue = self.peak({}) / self._unit
            return {}
        best = self._optimum(solver)
        self.model.setObjective(-pulp.lpSum(self._global.values()))
        # Half a unit leaves room for rounding errors only, if amounts are whole.
        self._peak.upBound = self.peak(best) / self._unit + 0.5
        last = self._optimum(solver)
        # If amounts are rounded to the unit, half a unit may let in a layout that needs more.
        return last if self.peak(last) <= self.peak(best) else best

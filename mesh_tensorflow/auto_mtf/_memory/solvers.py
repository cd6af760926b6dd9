"""Solvers of integer programs: HiGHS if `highspy` is installed, else CBC."""

from __future__ import annotations

import importlib.util
from typing import Any

import pulp

__all__ = ["Infeasible", "SolverError", "available_solvers", "make_solver", "solve_to_optimum"]

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

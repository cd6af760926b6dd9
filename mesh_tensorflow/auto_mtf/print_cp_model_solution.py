"""Prints the solution of an integer program."""

from __future__ import annotations

from typing import Any

import pulp

__all__ = ["print_solution"]


def print_solution(model: pulp.LpProblem, solver: Any) -> None:
    """Prints the variables of a solved program and its objective.

    Args:
      model: a pulp.LpProblem that was solved.
      solver: the solver of PuLP that solved it.
    """
    for variable in model.variables():
        print(f"  {variable.name} = {_number(variable.value())}")
    sense = {pulp.LpMinimize: "Minimize", pulp.LpMaximize: "Maximize"}[model.sense]
    print(f"{sense}: {model.objective}")
    print(f"Objective value: {_number(pulp.value(model.objective))} ({solver.name})")


def _number(value: Any) -> str:
    """Returns a value as text, without the dust that solvers leave on integers."""
    if value is None:
        return "undetermined"
    return str(round(value)) if abs(value - round(value)) < 1e-6 else str(value)

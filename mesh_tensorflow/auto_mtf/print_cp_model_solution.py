"""Prints the solution of an integer program."""

from __future__ import annotations

from typing import Optional

import pulp

__all__ = ["print_solution"]


def print_solution(model: pulp.LpProblem, solver: pulp.LpSolver) -> None:
    """Prints the variables of a solved program and its objective.

    Args:
      model: a solved pulp.LpProblem.
      solver: the PuLP solver that solved it.
    """
    for variable in model.variables():
        print(f"  {variable.name} = {_number(variable.value())}")
    sense = {pulp.LpMinimize: "Minimize", pulp.LpMaximize: "Maximize"}[model.sense]
    print(f"{sense}: {model.objective}")
    print(f"Objective value: {_number(pulp.value(model.objective))} ({solver.name})")


def _number(value: Optional[float]) -> str:
    """Formats a value, without the rounding errors of integers in solvers."""
    if value is None:
        return "undetermined"
    return str(round(value)) if abs(value - round(value)) < 1e-6 else str(value)

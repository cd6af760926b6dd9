"""Prints the solution of an integer program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

import pulp

__all__ = ["print_solution"]


def print_solution(model: Any, solver: Any) -> None:
    """Prints the variables of a solved program and its objective.

    Args:
      model: a solved pulp.LpProblem, or a CpModel of OR-Tools, in which programs for the classic
        were written.
      solver: the PuLP solver or the CpSolver that solved it.

    Raises:
      TypeError: `model` is neither.
    """
    if isinstance(model, pulp.LpProblem):
        values = [(v.name, v.value()) for v in model.variables()]
        sense, objective = pulp.LpSenses[model.sense], str(model.objective)
        value, name = pulp.value(model.objective), solver.name
    elif hasattr(model, "Proto"):  # OR-Tools is no dependency of this package
        values, sense, objective = _of_or_tools(model.Proto(), solver.ResponseProto().solution)
        value, name = solver.ObjectiveValue(), type(solver).__name__
    else:
        raise TypeError(
            "print_solution: model should be a pulp.LpProblem or a CpModel of OR-Tools, but is "
            f"{model!r}"
        )
    for variable, given in values:
        print(f"  {variable} = {_number(given)}")
    print(f"{sense}: {objective}")
    print(f"Objective value: {_number(value)} ({name})")


def _of_or_tools(
    program: Any, solution: Iterable[int]
) -> tuple[list[tuple[str, Optional[float]]], str, str]:
    """Returns the named variables with their values, the sense and the objective."""
    names = [v.name for v in program.variables]
    objective, real = program.objective, program.floating_point_objective
    # Objectives of integers are minimized; the factor of one to be maximized is negative.
    factor = objective.scaling_factor or 1.0
    maximize = factor < 0
    if real.vars:
        objective, factor, maximize = real, 1.0, real.maximize
    # Variable -1 - i stands for the negative of variable i.
    products = sorted(
        (i, c) if i >= 0 else (-1 - i, -c) for i, c in zip(objective.vars, objective.coeffs)
    )
    terms = [f"{_number(factor * c)}*{names[i]}" for i, c in products]
    if objective.offset:
        terms.append(_number(factor * objective.offset))
    text = " + ".join(terms).replace("+ -", "- ")
    values: list[tuple[str, Optional[float]]] = [
        (name, float(x)) for name, x in zip(names, solution) if name
    ]
    return values, "Maximize" if maximize else "Minimize", text


def _number(value: Optional[float]) -> str:
    """Formats a value, without the rounding errors of integers in solvers."""
    if value is None:
        return "undetermined"
    return str(round(value)) if abs(value - round(value)) < 1e-6 else str(value)

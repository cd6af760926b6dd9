"""LayoutOptimizer: finds the layout of a program with the lowest peak memory."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Union

from absl import logging

from mesh_tensorflow._core.layout import LayoutRules
from mesh_tensorflow.auto_mtf import print_cp_model_solution, scheduler
from mesh_tensorflow.auto_mtf._program import LayoutProgram, SolverError, Table, make_solver
from mesh_tensorflow.auto_mtf._program import global_var_name as _global_var_name
from mesh_tensorflow.auto_mtf._program import local_var_name as _local_var_name
from mesh_tensorflow.auto_mtf._space import layout_pairs, layout_space, layout_text
from mesh_tensorflow.auto_mtf.memory_estimator import MemoryEstimator
from mesh_tensorflow.auto_mtf.objective import live_memory, peak_memory

__all__ = [
    "LayoutOptimizer",
    "SolverError",
    "_generate_assignments",
    "_global_var_name",
    "_local_var_name",
]


def _generate_assignments(
    splittable_dims: Collection[str], mesh_dimension_to_size: Collection[str]
) -> list[dict[str, str]]:
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


class LayoutOptimizer:
    """Finds the layout with the lowest peak memory per processor.

    A layout is legal if it splits each dimension over at most one mesh dimension, splits no two
    dimensions of one operation over the same mesh dimension, and divides all sizes evenly. Of the
    lengths of ring attention, it splits both over the same mesh dimension, or neither. Peak memory
    is that of the live tensors while operations run one after the other. Among layouts with equal
    peak memory, the one that splits the most dimensions is chosen.
    """

    def __init__(
        self, memory_estimator: MemoryEstimator, scheduler_alg: str = "LIST", joint: bool = False
    ):
        """Creates the integer program.

        Args:
          memory_estimator: a MemoryEstimator.
          scheduler_alg: "LIST" or "NAIVE"; see `scheduler.minimize_peak_memory`.
          joint: whether several mesh dimensions may split one dimension together.

        Raises:
          NotImplementedError: `scheduler_alg` is unknown.
        """
        self._graph = memory_estimator.get_graph_interface()
        self._validator = memory_estimator.get_layout_validator()
        self._mesh_sizes = self._validator.mesh_dimension_name_to_size
        # One schedule for all layouts, so that memory at each time is linear in the assignments.
        self._schedule = list(scheduler.minimize_peak_memory(self._graph, scheduler_alg))
        operations = memory_estimator.mtf_graph.operations
        space = layout_space(operations, self._validator, joint=joint)
        memory = live_memory(self._graph, self._schedule, space)
        # No table for what is not in memory at any time that may be the peak: its variables would
        # have no part in any constraint on memory.
        sets = [d for i, d in enumerate(memory.dimension_sets) if memory.bytes[:, i].any()]
        tables = [Table(dims, space.assignments(dims)) for dims in sets]
        self._program = LayoutProgram(space, tables, memory)
        self._program.minimize_peak()
        self._model = self._program.model

    def solve(self, print_solution: bool = False) -> str:
        """Returns the layout with the lowest peak memory, such as "batch:rows;d_ff:cols".

        Args:
          print_solution: whether to print the variables of the integer program.

        Raises:
          SolverError: the solver did not find an optimum.
        """
        return layout_text(self.least_memory(print_solution))

    def least_memory(self, print_solution: bool = False) -> Mapping[str, str]:
        """Returns the layout of `solve`, as a dictionary: names may contain what strings end at.

        Args:
          print_solution: whether to print the variables of the integer program.

        Raises:
          SolverError: the solver did not find an optimum.
        """
        # Not before: to evaluate layouts, no solver has to be installed.
        solver = make_solver()
        layout = self._program.least_memory(solver)
        if print_solution:
            print_cp_model_solution.print_solution(self._model, solver)
        return layout

    def evaluate_layout(self, layout: Union[str, LayoutRules, Mapping[str, str]]) -> float:
        """Returns the peak memory under a layout, in bytes per processor.

        Uneven splits are rounded up to whole entries. Dimensions that may not be split count as
        whole, with a warning in the log.

        Args:
          layout: a string such as "batch:rows;d_ff:cols", LayoutRules, or a dictionary.

        Raises:
          KeyError: the mesh lacks a dimension of the layout.
          ValueError: the layout is malformed, or splits a dimension over two mesh dimensions.
        """
        splittable = self._validator.splittable_mtf_dimension_names
        assignment: dict[str, str] = {}
        for d, m in layout_pairs(layout):
            if d not in splittable:
                logging.warning("Skipping unsplittable dimension %s.", d)
                continue
            _ = self._mesh_sizes[m]  # raises if the mesh lacks it
            if assignment.setdefault(d, m) != m:
                raise ValueError(
                    f"layout {layout!r} splits dimension {d!r} over both {assignment[d]!r} and "
                    f"{m!r}: keep one of these rules"
                )
        # Not by the integer program, in whose layouts all splits are even.
        return float(peak_memory(self._graph, self._schedule, assignment, self._mesh_sizes))

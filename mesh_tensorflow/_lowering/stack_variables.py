"""Graph rewrites: similar variables are stacked, and their assignments are combined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from mesh_tensorflow._core.graph import Graph, Mesh
from mesh_tensorflow._core.operation import Operation, with_inner_operations
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.gspmd import current_compilation
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.ops._control.control import Depend
from mesh_tensorflow.ops._movement.split_concat import StackOperation, UnstackOperation
from mesh_tensorflow.ops._variables.assign import Assign, ReadVariable
from mesh_tensorflow.ops._variables.variable import StackedVariable, Variable

__all__ = ["combine_assignments", "largest_stacked_slice", "rewrite_stack_variables"]

# Stacks of variables stay below this many elements per slice, unless there are very many.
_MAX_STACKED_SLICE = 2**16
_MANY_SLICES = 2**16
_LARGE_STACKED_SLICE = 2**27


def largest_stacked_slice(graph: Graph, impls: Mapping[Mesh, MeshImpl]) -> int:
    """Returns the most elements of a slice of stacked variables; 0 if none should be stacked.

    Args:
      graph: the Graph.
      impls: the MeshImpl of each Mesh.
    """
    variables = graph.all_variables
    # A store keeps each variable under its own name, for Lowerings that may be of another layout.
    if graph.is_stacked or any(v.store is not None for v in variables):
        return 0
    if current_compilation() is not None:
        return 0  # a compiled program gains nothing
    num_slices = sum(impls[v.mesh].size for v in variables)
    return _LARGE_STACKED_SLICE if num_slices >= _MANY_SLICES else _MAX_STACKED_SLICE


def _groups(
    graph: Graph, max_size: int, max_slice: int, mesh_to_impl: Optional[Mapping[Mesh, MeshImpl]]
) -> list[list[Variable]]:
    """Returns the variables of the graph, in order, in groups that can be stacked."""
    assigned: dict[Variable, set[int]] = {}
    for i, op in enumerate(graph.operations):
        if isinstance(op, Assign):
            for v in op.variables:
                assigned.setdefault(v, set()).add(i)
    alone = _read_again(graph.operations) | assigned_in_loops(graph.operations)
    open_groups: dict[tuple, list[Variable]] = {}
    groups: list[list[Variable]] = []
    for v in graph.all_variables:
        impl = mesh_to_impl[v.mesh] if mesh_to_impl else None
        # What is read again after an assignment needs a variable of its own to wait for; and on one
        # processor there is nothing to save.
        if v in alone or v.store is not None or (impl is not None and impl.size == 1):
            groups.append([v])
            continue
        # Names do not matter, but all that tells how a variable is stored, read and updated does.
        key = (
            id(v.mesh),
            tuple(v.stored_shape),
            v.master_dtype,
            v.slice_dtype,
            v.activation_dtype,
            v.trainable,
            # Parts of a stack are assigned to as one, so the same assignments must assign to all of
            # them.
            frozenset(assigned.get(v, ())),
            # One of these has storage of its own, and the other not: a stack cannot mix them.
            any(master.in_use or master.is_bound for master in v.masters),
        )
        slice_size = v.size if impl is None else impl.slice_size(v.stored_shape)
        group = open_groups.get(key)
        if group is not None and (
            (len(group) + 1) * v.size <= max_size and (len(group) + 1) * slice_size <= max_slice
        ):
            group.append(v)
        else:
            open_groups[key] = [v]
            groups.append(open_groups[key])
    return groups


def assigned_in_loops(operations: Iterable[Operation]) -> set[Operation]:
    """Returns the variables that an Assign within another operation assigns to.

    Args:
      operations: the operations of a program.
    """
    inner = with_inner_operations(i for op in operations for i in op.inner_operations)
    return {v for op in inner if isinstance(op, Assign) for v in op.variables}


def _read_again(operations: Iterable[Operation]) -> set[Operation]:
    """Returns the variables that a ReadVariable or Depend reads again."""
    return {
        op.inputs[0].operation
        for op in with_inner_operations(operations)
        if isinstance(op, (ReadVariable, Depend))
    }


def rewrite_stack_variables(
    graph: Graph,
    max_combined_variable_size: int,
    max_combined_slice_size: int,
    mesh_to_impl: Optional[Mapping[Mesh, MeshImpl]],
) -> None:
    """Replaces similar variables by StackedVariables; see Graph.

    Raises:
      ValueError: it was called on this graph before.
    """
    if graph.is_stacked:
        raise ValueError("rewrite_stack_variables was called before on this graph")
    graph.is_stacked = True
    groups = _groups(graph, max_combined_variable_size, max_combined_slice_size, mesh_to_impl)
    if all(len(group) == 1 for group in groups):
        return
    old_operations = list(graph.operations)
    # A StackedVariable adds itself to the lists, in the place of its first part, and its own name
    # to the dictionary. So the lists begin empty, and the names of the program are put aside.
    names, trainable = dict(graph.name_to_variable), set(graph.trainable_variables)
    graph._all_variables, graph._trainable_variables = [], []
    replaced: dict[Variable, tuple[Variable, list[Operation]]] = {}
    value_of: dict[Tensor, Tensor] = {}
    for group in groups:
        if len(group) == 1:
            graph._all_variables.append(group[0])
            if group[0] in trainable:
                graph._trainable_variables.append(group[0])
            continue
        stacked, new_operations = _stack(graph, group, value_of)
        for v in group:
            replaced[v] = (stacked, new_operations if v is group[0] else [])
    # In the same dictionary, which says what is near to a name that it lacks.
    graph.name_to_variable.clear()
    graph.name_to_variable.update(
        {name: replaced[v][0] if v in replaced else v for name, v in names.items()}
    )
    graph.operations[:] = _rewritten(graph, old_operations, replaced, value_of)
    graph.stacked_values.update(value_of)


def _stack(
    graph: Graph, group: Sequence[Variable], value_of: dict[Tensor, Tensor]
) -> tuple[Variable, list[Operation]]:
    """Returns a StackedVariable, and the operations that compute the values of its parts."""

    def make() -> StackedVariable:
        stacked = StackedVariable(group)
        values = UnstackOperation(stacked.value, stacked.shape[0]).outputs
        value_of.update((v.value, value) for v, value in zip(group, values))
        return stacked

    # Taken out of the graph, at whose end they are: what reads the parts comes before that.
    return graph.take_operations(make)


def _rewritten(
    graph: Graph,
    operations: Sequence[Operation],
    replaced: Mapping[Variable, tuple[Variable, list[Operation]]],
    value_of: Mapping[Tensor, Tensor],
) -> list[Operation]:
    """Returns the operations with variables replaced by stacked ones.

    A stacked variable takes the place of the first of its parts.
    """
    rewritten: list[Operation] = []
    for op in operations:
        if op in replaced:
            rewritten += replaced[op][1]  # type: ignore[index]
            continue
        for inner in with_inner_operations([op]):
            inner.replace_inputs(value_of)
        if isinstance(op, Assign) and any(v in replaced for v in op.variables):
            # The operations that stack the new values come before the assignment that takes the
            # stack.
            rewritten += _stack_assignment(graph, op, replaced)
        rewritten.append(op)
    return rewritten


def _stack_assignment(
    graph: Graph, op: Assign, replaced: Mapping[Variable, tuple[Variable, list[Operation]]]
) -> list[Operation]:
    """Makes an Assign assign to stacked variables; returns operations that stack the values."""
    new_values = dict(zip(op.variables, op.inputs))
    variables: dict[Variable, Tensor] = {}
    added: list[Operation] = []
    for v in op.variables:
        if v not in replaced:
            variables[v] = new_values[v]
            continue
        stacked = replaced[v][0]
        if stacked not in variables:
            # All parts are there: only variables that the same operations assign to are stacked.
            parts = [new_values[part] for part in stacked._parts]  # type: ignore[attr-defined]
            y, ops = graph.take_operations(
                lambda parts=parts: StackOperation(parts, "stacked", 0).outputs[0]
            )
            added += ops
            variables[stacked] = y
    op._variables, op._inputs = list(variables), list(variables.values())
    return added


def combine_assignments(graph: Graph, assignments: Sequence[Operation]) -> list[Operation]:
    """Joins Assign operations that have the same assign function; see Graph."""
    for op in assignments:
        if not isinstance(op, Assign):
            raise ValueError(f"combine_assignments takes Assign operations, not {op}")
    groups: dict[Any, list[Assign]] = {}
    for op in assignments:
        groups.setdefault((op.assign_fn, op.mesh), []).append(op)  # type: ignore
    chosen = {id(op) for op in assignments}
    # Removed first: the joined ones are added at the end, where the values of all are there.
    graph.operations[:] = [op for op in graph.operations if id(op) not in chosen]
    return [
        Assign(
            [v for op in group for v in op.variables],
            [x for op in group for x in op.inputs],
            assign_fn=group[0].assign_fn,
        )
        for group in groups.values()
    ]

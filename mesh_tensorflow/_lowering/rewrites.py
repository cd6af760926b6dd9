"""Graph rewrites before a Lowering: variables are stacked, or stored in parts (ZeRO, FSDP).

Similar small variables become one `StackedVariable`, and assignments of one kind one `Assign`.

ZeRO and FSDP are no operations of their own. What is stored in parts gets dimensions of other
names, such as `d_model@rows`, which rows splits wherever they occur. Where an operation needs the
tensor under the names of the model, or the other way around, a reshape stands between: from the
stored names it gathers; from a gradient that is a partial sum it is a reduce-scatter.

An example, for one weight w [d_model, d_ff] with `zero=3` over rows, which splits the batch:

    w [d_model, d_ff@rows]      the variable; so are the slots of the optimizer
    w' = reshape(w)             an allgather, before the first operation that needs it
    g [d_model, d_ff]           the gradient: a partial sum over rows, as everywhere
    g' = reshape(g)             [d_model, d_ff@rows], a reduce-scatter
    update(g', slots, w)        on parts, each processor has its own
    assign(w, ...)              of parts

For the backward pass, w' is made again, so that it need not be in memory in between. A gradient is
reduce-scattered as soon as it is there, and the next one is computed after that: whole gradients
are in memory one by one.

With stage 1 or 2, w is [d_model, d_ff]: its update is computed of parts, and the new value is
gathered before it is assigned. With stage 1, gradients are scattered when the update needs them.

A loop over microbatches is a forward and a backward pass in each iteration, and so it gathers and
scatters in each: what it sums are parts. Of any other loop, weights are gathered before it.

Nothing marks an operation as part of an update; they are found backward from the assignments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, TypeAlias

from mesh_tensorflow._core.graph import Graph, Mesh
from mesh_tensorflow._core.layout import WEIGHTS_TOO, StoredLayout, StoredName, plain_shape
from mesh_tensorflow._core.operation import (
    Collective,
    Operation,
    Tensor,
    is_of_package,
    with_inner_operations,
)
from mesh_tensorflow._core.placement import Walk
from mesh_tensorflow._core.shape import Dimension, Shape
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._watching import tell_lowering_error
from mesh_tensorflow.ops._control.control import Depend
from mesh_tensorflow.ops._control.gradients import DelayOperation, usable
from mesh_tensorflow.ops._control.while_loop import WhileLoopOperation, is_of_microbatches
from mesh_tensorflow.ops._elementwise.slicewise import GenericGradOperation
from mesh_tensorflow.ops._movement.reshape import ReshapeOperation
from mesh_tensorflow.ops._movement.split_concat import StackOperation, UnstackOperation
from mesh_tensorflow.ops._variable import Assign, ReadVariable, StackedVariable, Variable

# -- stacked variables

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
    if any(getattr(impl, "is_compiled_by_xla", False) for impl in impls.values()):
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
        slice_size = v.size if impl is None else _slice_size(v, impl)
        group = open_groups.get(key)
        if group is not None and (
            (len(group) + 1) * v.size <= max_size and (len(group) + 1) * slice_size <= max_slice
        ):
            group.append(v)
        else:
            open_groups[key] = [v]
            groups.append(open_groups[key])
    return groups


def _slice_size(variable: Variable, mesh_impl: MeshImpl) -> int:
    try:
        return mesh_impl.slice_size(variable.stored_shape)
    except ValueError as e:  # a layout that does not fit is found here, before anything is lowered
        tell_lowering_error(e, variable)
        raise


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
    groups = _groups(graph, max_combined_variable_size, max_combined_slice_size, mesh_to_impl)
    graph.is_stacked = True
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
        groups.setdefault((op.assign_fn, op.mesh), []).append(op)  # type: ignore[arg-type, attr-defined]
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


# -- variables in the layout that is stored

# From dimensions' own names to those that they are stored with.
Names: TypeAlias = Mapping[str, str]


class StoredNames(NamedTuple):
    """The names that a stored layout gives to dimensions.

    Attributes:
      variables: of variables, as they are stored; empty for weights before stage 3.
      updates: of the operations that update them.
      sums: of the sums of a loop over microbatches that are gradients, if it sums their parts.
    """

    variables: dict[Variable, Names]
    updates: dict[Operation, Names]
    sums: dict[Tensor, Names]


def stored_names(
    graph: Graph, impls: Mapping[Mesh, MeshImpl], early_on: Collection[Mesh]
) -> StoredNames:
    """Returns the names of variables as they are stored, and of what updates them.

    An update consists of the operations between the gradient of a weight, the slots, and the
    assignments: those that have no other dimensions than the weight.

    Args:
      graph: a Graph.
      impls: from a Mesh to its MeshImpl, which has a `stored_layout`; not all meshes of the graph.
      early_on: those of them on which each gradient is split before the next one is computed.
    """
    finder = _Finder(graph, impls, early_on)
    # Weights first: their slots, which are not trainable, are then found by way of the updates.
    for v in sorted(graph.all_variables, key=lambda v: not v.trainable):
        if v.mesh in impls and v not in finder.stored:
            finder.group(v)
    return StoredNames(finder.stored, finder.updates, finder.sums)


def has_stored_names(graph: Graph) -> bool:
    """Returns whether a Lowering has renamed dimensions to store variables in parts.

    Args:
      graph: an mtf.Graph.
    """
    return any(
        isinstance(name, StoredName)
        for op in with_inner_operations(graph.operations)
        for x in op.outputs
        for name in x.shape.dimension_names
    )


def stored_shapes(graph: Graph, impls: Mapping[Mesh, MeshImpl]) -> dict[Variable, Shape]:
    """Returns the Shapes that variables are stored with, whether the graph is lowered or not.

    Args:
      graph: a Graph.
      impls: from each Mesh to its MeshImpl.
    """
    shapes = {part: part.stored_shape for v in graph.all_variables for part in v.parts}
    laid_out = {m: i for m, i in impls.items() if getattr(i, "stored_layout", None) is not None}
    # Once the graph has been rewritten, its variables tell their stored shapes themselves.
    if laid_out and graph.stored_layouts is None and not graph.is_stacked:
        for v, names in stored_names(graph, laid_out, _early_on(laid_out)).variables.items():
            shapes[v] = renamed(v.shape, names)
    return shapes


def _early_on(impls: Mapping[Mesh, MeshImpl]) -> set[Mesh]:
    """Returns the meshes on which each gradient is split before the next one is computed."""
    return {mesh for mesh, impl in impls.items() if impl.stored_layout.is_early}  # type: ignore[union-attr]


def renamed(shape: Shape, names: Names) -> Shape:
    """Returns a Shape with other names.

    Args:
      shape: a Shape.
      names: from some dimensions' names to others.
    """
    return Shape([Dimension(names.get(d.name, d.name), d.size) for d in shape])


class _Delays(Walk):
    """A walk that records which operations pass partial sums on."""

    def __init__(self, mesh_impl: MeshImpl):
        super().__init__(mesh_impl)
        self.delaying: set[Operation] = set()

    def sum_inputs(self, op: Operation) -> list[Collective]:
        """Visits one operation."""
        before = [x for x in op.inputs if self.pending_axes(x)]
        collectives = super().sum_inputs(op)
        # Inputs that are still pending afterwards have not been summed for this operation.
        if before and all(self.pending_axes(x) for x in before):
            self.delaying.add(op)
        return collectives


class _Finder:
    """Finds, from each weight, its update and its slots."""

    def __init__(
        self, graph: Graph, impls: Mapping[Mesh, MeshImpl], early_on: Collection[Mesh]
    ) -> None:
        self._impls, self._early_on = impls, early_on
        self.stored: dict[Variable, Names] = {}
        self.updates: dict[Operation, Names] = {}
        self.sums: dict[Tensor, Names] = {}
        self._assigned: dict[Variable, list[Tensor]] = {}
        # The value that a loop assigns is of the loop's own names, which no reshape meets: what is
        # assigned to there is stored whole.
        self._in_loops = assigned_in_loops(graph.operations)
        walks = {mesh: _Delays(impl) for mesh, impl in impls.items()}
        for op in graph.operations:
            if op.mesh in walks:
                walks[op.mesh].sum_inputs(op)
                self._add_sums(op, walks[op.mesh])
            if isinstance(op, Assign):
                for v, x in zip(op.variables, op.inputs):
                    self._assigned.setdefault(v, []).append(x)
        # Gradients of a weight are added up before they are split.
        self._outside = {op for walk in walks.values() for op in walk.delaying}
        # TensorFlow differentiates what an operation became from the tensors that it was given, so
        # both that operation and its gradient take them in one layout.
        for op in with_inner_operations(graph.operations):
            if isinstance(op, GenericGradOperation):
                self._outside |= {op, op._forward_op}

    def _add_sums(self, op: Operation, walk: Walk) -> None:
        """Names the dimensions of gradients that a loop over microbatches sums in parts."""
        impl = self._impls[op.mesh]
        layout: StoredLayout = impl.stored_layout  # type: ignore[assignment]
        if not is_of_microbatches(op) or op.mesh not in self._early_on:
            return
        for i, v in op.gradient_sums.items():
            names = layout.names(v.shape, impl)
            if names and v not in self._in_loops:
                y = op.outputs[i]
                self.sums[y] = names
                # What follows works on parts, whatever these are still to be summed over.
                walk.summed_over(y, walk.pending_axes(y))

    def group(self, v: Variable) -> None:
        """Names the dimensions of a weight, of its update, and of its slots."""
        impl = self._impls[v.mesh]
        names = impl.stored_layout.names(v.shape, impl)  # type: ignore[union-attr]
        if not names or v in self._in_loops:
            return
        whole = v.trainable and impl.stored_layout.stage < WEIGHTS_TOO  # type: ignore[union-attr]
        self.stored[v] = {} if whole else names
        nearby = [x.operation for x in self._assigned.get(v, ())]
        beyond: list[Operation] = []  # found through values without dimensions, such as norms
        seen: set[Operation] = set()
        while nearby or beyond:
            # Near ones first: what is reached in both ways is then judged as a near one.
            near = bool(nearby)
            op = (nearby or beyond).pop()
            if op in seen:
                continue
            seen.add(op)
            if isinstance(op, Variable):
                if not op.trainable and self._may_be_slot(op, v):
                    self.stored[op] = {n: names[n] for n in names if n in op.shape.dimension_names}
                    # A slot is updated by operations that the weight's own assignment need not
                    # depend on.
                    nearby += [x.operation for x in self._assigned[op]]
                continue
            dims = {d for t in op.inputs + op.outputs for d in t.shape}
            if not dims:
                # A scalar on the way, such as a clipping factor of the global norm, depends on all
                # gradients. So behind it, operations are of this update only if they have the
                # dimensions of this weight.
                beyond += [x.operation for x in op.inputs]
            elif self._is_update(op, v, names) and (near or dims == set(v.shape)):
                self.updates[op] = names
                (nearby if near else beyond).extend(x.operation for x in op.inputs)

    def _may_be_slot(self, op: Variable, v: Variable) -> bool:
        is_known = op in self.stored or op in self._in_loops
        return not is_known and op in self._assigned and set(op.shape) <= set(v.shape)

    def _is_update(self, op: Operation, v: Variable, names: Names) -> bool:
        """Returns whether an operation can do a part of an update under other names."""
        return (
            op.works_by_name
            and is_of_package(type(op))
            and op not in self.updates
            and op not in self._outside
            and all(set(t.shape) <= set(v.shape) for t in op.inputs + op.outputs)
            # Under a stored name the dimension is split, which the operation has to allow.
            and names.keys().isdisjoint(op.unsplittable_dims)
        )


def rewrite_stored_layouts(graph: Graph, mesh_to_impl: Mapping[Mesh, MeshImpl]) -> None:
    """Gives variables and updates the dimensions that they are stored with, in place.

    Args:
      graph: a Graph.
      mesh_to_impl: a dictionary from Mesh to MeshImpl, which may have a `stored_layout`.

    Raises:
      ValueError: the graph was lowered before in another stored layout.
    """
    layouts: dict[Mesh, StoredLayout] = {}
    for mesh, impl in mesh_to_impl.items():
        layout = getattr(impl, "stored_layout", None)
        if layout is not None:
            layouts[mesh] = layout
    # Another Lowering in this stored layout, such as one to evaluate, finds it rewritten.
    if not layouts or graph.stored_layouts == layouts:
        return
    if graph.stored_layouts is not None or graph.is_stacked:
        raise ValueError(
            "this graph was lowered before, with its variables stored in another layout. Build it "
            "again, in a new mtf.Graph, to lower it with other variable_layout or zero"
        )
    graph.stored_layouts = layouts
    impls = {mesh: mesh_to_impl[mesh] for mesh in layouts}
    early_on = _early_on(impls)
    names = stored_names(graph, impls, early_on)
    waits = {mesh for mesh, impl in impls.items() if _can_wait(impl)}
    _Rewriter(graph, names, waits, early_on).rewrite()


def _can_wait(impl: MeshImpl) -> bool:
    return impl.supports_control_dependencies or impl.is_compiled_by_xla


class _Rewriter:
    """Renames dimensions, and puts reshapes where names meet that differ."""

    def __init__(
        self,
        graph: Graph,
        names: StoredNames,
        waits: Collection[Mesh],
        early_on: Collection[Mesh],
        loop: Optional[WhileLoopOperation] = None,
    ):
        """Creates a _Rewriter.

        Args:
          graph: a Graph.
          names: the names of variables, of the operations of updates, and of gradients in loops.
          waits: the meshes on which operations can wait for others.
          early_on: the meshes on which gradients are scattered as soon as they are there.
          loop: a loop over microbatches, whose body is rewritten in place of the graph.
        """
        self._graph, self._waits, self._early_on = graph, waits, early_on
        self._names, self._loop = names, loop
        self._stored, self._updates = names.variables, names.updates
        self._operations: list[Operation] = []
        # Tensors under other names, by the tensor under the first, and their shape.
        self._renamed: dict[tuple[Tensor, tuple[Dimension, ...]], Tensor] = {}
        # By the Tensor that the program knows, the parts of each weight, and of each gradient that
        # a loop has summed; those that have not been gathered yet; and what is gathered besides:
        # for gradients, where the second value is True, and in a loop.
        self._weights: dict[Tensor, Tensor] = {}
        self._waiting: set[Tensor] = set()
        self._whole: dict[tuple[Tensor, bool], Tensor] = {}
        # The gradients that are scattered as soon as they are there, with the names of their parts.
        self._early = self._gradients()
        self._scattered: dict[Mesh, Tensor] = {}  # the last one
        # What has waited for one. Later operations take it too: a partial sum is summed once.
        self._delayed: dict[Tensor, Tensor] = {}

    def _gradients(self) -> dict[Tensor, list[Names]]:
        """Returns the gradients that are taken in parts, with the names that they have there."""
        gradients: dict[Tensor, list[Names]] = {}
        if self._loop is not None:
            for y, x in zip(self._loop.outputs, self._loop.body_outputs):
                if y in self._names.sums:
                    gradients.setdefault(x, []).append(self._names.sums[y])
            return gradients
        for op, names in self._updates.items():
            for x in op.inputs:
                is_gradient = x.operation.gradient_of is not None
                if op.mesh in self._early_on and is_gradient and x.operation not in self._updates:
                    gradients.setdefault(x, []).append(names)
        return gradients

    def rewrite(self) -> None:
        """Rewrites the operations of the graph."""
        # A copy: new operations are made in the graph, and taken out of it, on the way.
        for op in list(self._graph.operations):
            if isinstance(op, Variable):
                self._variable(op)
            else:
                self._operation(op)
        for weight, value in self._weights.items():
            if weight in self._waiting:  # no operation needs it, but the user may
                gathered = self._reshaped(value, weight.shape)
                gathered.is_on_demand = True
                # The user holds `known`, so that Tensor itself becomes the output of the gather.
                gathered._outputs, weight._operation = [weight], gathered
        self._graph.operations[:] = self._operations

    def _variable(self, variable: Variable) -> None:
        self._operations.append(variable)
        names = self._stored.get(variable)
        if not names:
            return
        # Updates read slots under their stored names; what else reads one gets a reshape before it.
        if not variable.trainable:
            _rename(variable.value, names)
            return
        # Operations of the model keep the Tensor that they know, which now is a gathered value.
        weight = variable.value
        value = Tensor(variable, renamed(weight.shape, names), weight.dtype)
        variable._outputs = [value]
        # So updates, which ask for it under stored names, take what is stored and cut nothing.
        self._renamed[weight, tuple(value.shape)] = value
        self._weights[weight] = value
        self._waiting.add(weight)

    def _operation(self, op: Operation) -> None:
        """Adds an operation, after what its inputs need."""
        own = self._updates.get(op, {})
        if isinstance(op, (ReadVariable, Depend)) and self._variable_of(op) is not None:
            own = self._stored.get(self._variable_of(op), {})  # type: ignore[arg-type]
        mapping: dict[Tensor, Tensor] = {}
        within = self._gathered_within(op)
        for i, x in enumerate(op.inputs):
            names = self._stored.get(op.variables[i], {}) if isinstance(op, Assign) else own
            mapping[x] = self._weights[x] if x in within else self._under(x, names, op)
        for inner in with_inner_operations(op.inner_operations):
            for x in inner.inputs:
                if x not in mapping:
                    # What is in a loop is no part of an update: it takes the names of the model.
                    mapping[x] = self._under(x, {}, op)
        for inner in with_inner_operations([op]):
            for d in inner.dependencies:
                if isinstance(d, Tensor) and d in self._weights:
                    # Waiting for a weight is waiting for its parts: nothing is gathered for that.
                    mapping.setdefault(d, self._weights[d])
        # What has been delayed is taken delayed from here on, since the delayed form and the plain
        # one would be two partial sums, each with an allreduce of its own.
        mapping = {x: self._delayed.get(y, y) for x, y in mapping.items()}
        if any(y in self._early for y in op.outputs):
            self._after_last_gradient(op, mapping)
        changed = {x: y for x, y in mapping.items() if x is not y}
        if changed:
            op.replace_inputs(changed)
            changed = {x: y for x, y in changed.items() if x not in within}
            for each in with_inner_operations(op.inner_operations):
                each.replace_inputs(changed)
        self._operations.append(op)
        if is_of_microbatches(op) and op.mesh in self._early_on:
            self._microbatches(op)
        if own:
            for y in op.outputs:
                _rename(y, own)
            _rename_rules(op, own)
        for y in op.outputs:
            for names in self._early.get(y, ()):
                # Made here: the reduce-scatter comes right after the gradient, not with the update.
                part = self._under(y, names, op)
                if part is not y:
                    self._scattered[op.mesh] = part

    def _gathered_within(self, op: Operation) -> set[Tensor]:
        """Returns the weights that a loop over microbatches gathers in each iteration."""
        if not is_of_microbatches(op) or op.mesh not in self._early_on:
            return set()
        # What an iteration hands out as it is has the names of the model.
        return {x for x in op.inputs if x in self._weights} - {*op.body_outputs}

    def _microbatches(self, loop: WhileLoopOperation) -> None:
        """Rewrites the body of a loop over microbatches, which sums parts of gradients."""
        body = _Rewriter(self._graph, self._names, self._waits, self._early_on, loop)
        body._weights = {x: y for x, y in self._weights.items() if y in loop.inputs}
        for op in list(loop.body_operations):
            body._operation(op)
        for i, (weight, y) in enumerate(zip(loop.outputs, loop.body_outputs)):
            if weight in self._names.sums:
                part = body._under(y, self._names.sums[weight], y.operation)
                loop.body_outputs[i] = part
                loop._outputs[i] = Tensor(loop, part.shape, weight.dtype, index=i)
                # As of a weight: updates take the parts, and what else reads it has it gathered.
                self._renamed[weight, tuple(part.shape)] = loop._outputs[i]
                self._weights[weight] = loop._outputs[i]
                self._waiting.add(weight)
        loop.body_operations[:] = body._operations

    def _after_last_gradient(self, op: Operation, mapping: dict[Tensor, Tensor]) -> None:
        """Makes an operation of a gradient wait until the one before it has been scattered."""
        last = self._scattered.get(op.mesh)
        # Without this wait, TensorFlow may compute all gradients first and have all of them whole
        # in memory at once. A variable is there from the beginning; delaying its read delays
        # nothing.
        waiting = [x for x in op.inputs if not isinstance(x.operation, Variable)]
        if last is None or not waiting or op.mesh not in self._waits:
            return
        xs = [mapping[waiting[-1]]]
        [delayed] = self._made(lambda: DelayOperation(xs, [last]), xs).outputs
        mapping[waiting[-1]] = self._delayed[xs[0]] = delayed

    @staticmethod
    def _variable_of(op: Operation) -> Optional[Variable]:
        return op._var if isinstance(op, ReadVariable) else op._variable()  # type: ignore[attr-defined]

    def _under(self, x: Tensor, names: Names, op: Operation) -> Tensor:
        """Returns a Tensor with the dimensions' names that an operation works with."""
        # Both ways: by names from stored to those of the model if there are none, else to stored
        # ones.
        shape = renamed(plain_shape(x.shape), names)
        if x.shape == shape:
            return self._gathered(x, op) if x in self._weights else x
        key = x, tuple(shape)
        if key not in self._renamed:
            # Of a weight, what is stored: its whole value may not have been gathered yet, and the
            # update of another weight may want parts of its own.
            self._renamed[key] = self._reshaped(self._weights.get(x, x), shape).outputs[0]
        return self._renamed[key]

    def _reshaped(self, x: Tensor, shape: Shape) -> Operation:
        name = f"{x.operation.name}_layout"
        return self._made(lambda: ReshapeOperation(x, shape, name=name), [x])

    def _made(self, make: Callable[[], Operation], xs: Sequence[Tensor]) -> Operation:
        """Adds a new operation of Tensors; errors in it point to the line that made the first."""
        with usable([x.operation for x in xs]):
            op, _ = self._graph.take_operations(make)
        op._site = xs[0].operation._site
        self._operations.append(op)
        return op

    def _gathered(self, weight: Tensor, op: Operation) -> Tensor:
        """Returns a whole weight for an operation; it is made before the first that needs it."""
        after = [x for x in op.inputs if x not in self._weights]
        # A loop and its gradient may have operations in common, which read one tensor.
        in_backward = op.gradient_of is not None and not op.inner_operations
        # Gathered anew for gradients, so that no whole weight is kept from the forward pass to
        # then. On meshes that cannot wait, the second gather would only be the first one done
        # twice.
        backward = in_backward and weight.mesh in self._waits
        again = backward or _is_recomputed(op)
        if again or self._loop is not None:
            if (weight, again) not in self._whole:
                self._whole[weight, again] = self._gather(weight, after).outputs[0]
            return self._whole[weight, again]
        if weight in self._waiting:
            self._waiting.remove(weight)
            gathered = self._gather(weight, after)
            gathered._outputs = [weight]
            weight._operation = gathered
        return weight

    def _gather(self, weight: Tensor, after: Sequence[Tensor]) -> Operation:
        """Makes a weight whole, once other Tensors are there, so that not all are at once."""
        value = self._weights[weight]
        after = [x for x in after if not isinstance(x.operation, Variable)]
        if after and weight.mesh in self._waits:
            stored = [value]
            value = self._made(lambda: DelayOperation(stored, after), [weight, *after]).outputs[0]
        return self._reshaped(value, weight.shape)


def _is_recomputed(op: Operation) -> bool:
    return op.original is not None or (
        op.gradient_of is not None and op.gradient_of.original is not None
    )


def _rename(x: Tensor, names: Names) -> None:
    x._shape = renamed(x.shape, names)


def _rename_rules(op: Operation, names: Names) -> None:
    """Renames the dimensions that an operation has declared splittable, or not."""
    for attribute in ("_splittable_dims", "_unsplittable_dims"):
        declared = getattr(op, attribute)
        if declared is not None:
            setattr(op, attribute, frozenset(names.get(n, n) for n in declared))

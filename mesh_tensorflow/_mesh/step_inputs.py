"""What a step takes from outside of its program: inputs, and TensorFlow's own counters of steps.

A program of a session often computes its learning rate from the global step, and increments that in
the same run:

    rate = schedule(tf.cast(global_step, tf.float32))
    ...
    train_op = tf.group(lowering.lowered_operation(update), tf.assign_add(global_step, 1))

In a graph of TensorFlow 1, nothing says which comes first. As for the variables of the mesh, it is
the read: an increment gets control dependencies on the reads that a lowered program depends on. It
is usually made after the program, so it gets them when it is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables.storage import WholeVariable


class GlobalSteps:
    """Keeps the collection of the global step the same in a program and in the calling graph.

    Else the program would not find a global step that was made before it or while it is traced,
    since variables are made outside of it.
    """

    def __init__(self, device: Optional[str] = "") -> None:
        """Notes those of the default graph, which calls the program.

        Args:
          device: where variables are made; "" for the device in force in the calling graph.
        """
        self._device = device
        self._outside = tf.get_collection_ref(tf.GraphKeys.GLOBAL_STEP)
        self._inside: list[tf.Variable] = []

    @contextlib.contextmanager
    def in_program(self) -> Iterator[None]:
        """Copies the collection to that of the default graph, and back at the end.

        Variables of the program are made in the calling graph.
        """
        self._inside = tf.get_collection_ref(tf.GraphKeys.GLOBAL_STEP)
        _add_new(self._outside, self._inside)
        with tf.variable_creator_scope(self._make_outside):
            yield
        _add_new(self._inside, self._outside)

    def _make_outside(
        self, next_creator: Callable[..., tf.Variable], **arguments: object
    ) -> tf.Variable:
        del next_creator
        # Outside of the function that is traced, so that sessions initialize it and savers find it;
        # a resource, as functions know reads and assignments of variables by their handles.
        with tf.init_scope(), tf.device(self._device):
            return tf.Variable(**{**arguments, "use_resource": True})

    def made(self, next_creator: Callable[..., tf.Variable], **arguments: object) -> tf.Variable:
        """Makes a variable, and notes it if it is a global step; a variable creator.

        Args:
          next_creator: makes the variable.
          **arguments: what variable creators are given.
        """
        variable = next_creator(**arguments)
        _add_new(self._outside, self._inside)
        return variable


def _add_new(source: Sequence[tf.Variable], target: list[tf.Variable]) -> None:
    """Adds to a list what it lacks of another one."""
    target.extend(v for v in source if not any(v is old for old in target))


_INCREMENTS = {"AssignAdd", "AssignSub", "AssignAddVariableOp", "AssignSubVariableOp"}
_ASSIGNMENTS = {*_INCREMENTS, "Assign", "AssignVariableOp"}
# These pass on the memory of a variable of the old kind, which an increment changes in place.
_ALIASES = {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"}
# What reads a variable by its handle.
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd"}
# Into branches and loops, and out of loops. Nothing outside can wait for what is inside of them.
_ENTRANCES = {"Switch", "RefSwitch", "Enter", "RefEnter"}
_EXITS = {"Exit", "RefExit"}
# Of the operations that call functions those which may assign in them.
_CALLS = {"If", "Case", "While", "StatefulPartitionedCall"}
_ATTRIBUTE = "_mtf_step_inputs"


def _is_session_graph() -> bool:
    building = tf.get_default_graph().building_function
    return not tf.executing_eagerly_outside_functions() and not building


def operations_so_far() -> int:
    """Returns the number of operations of the default graph, if it is that of a session; else 0."""
    return len(tf.get_default_graph().get_operations()) if _is_session_graph() else 0


def read_before_increments(steps: Optional[Iterable[tf.Operation]] = None, start: int = 0) -> None:
    """Makes increments of variables wait for their reads by a step.

    It does nothing in functions and in eager code, which keep the order of a program.

    Args:
      steps: operations of the default graph that do the step; those since `start` if None.
      start: `operations_so_far()` before the step was built.
    """
    if not _is_session_graph():
        return
    graph = tf.get_default_graph()
    all_variables = [*tf.global_variables(), *tf.local_variables()]
    # Variables of the mesh are left out: their assignments wait for their own reads already.
    variables = {v.op for v in all_variables if not isinstance(v, WholeVariable)}
    if not variables:
        return
    inputs = getattr(graph, _ATTRIBUTE, None)
    if inputs is None:
        inputs = _StepInputs(graph)
        setattr(graph, _ATTRIBUTE, inputs)
    steps = graph.get_operations()[start:] if steps is None else steps
    inputs.add(_reads(steps, variables))


def _reads(
    steps: Iterable[tf.Operation], variables: Collection[tf.Operation]
) -> Iterator[tuple[tf.Operation, tf.Operation]]:
    """Yields pairs (variable, operation that reads it) of all that a step depends on."""
    # In an order, unlike a set, so that each run of a program makes the same edges.
    step = dict.fromkeys(ancestors(steps))
    for op in step:
        for x in op.inputs:
            source = _source(x)
            if source not in variables or op.type in _ASSIGNMENTS:
                continue
            calls = any(attr.type in ("func", "list(func)") for attr in op.op_def.attr)
            if op.type in _ENTRANCES or calls:
                yield from ((source, after) for after in _first_after(op, step))
            # The old kind is read by whatever takes its memory, except for what passes it on.
            elif op.type in _READS if source.type == "VarHandleOp" else not _is_alias(op):
                yield source, op


def uses_of(x: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the operations that use a tensor, also within the functions that these call."""
    for op in x.consumers():
        yield op
        yield from _uses_within(op, x)


def _uses_within(op: tf.Operation, x: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the operations that use an input of an operation in the functions that it calls."""
    attributes = op.node_def.attr.values()
    names = [a.func.name for a in attributes if a.HasField("func")]
    names += [f.name for a in attributes for f in a.list.func]
    for name in names:
        inside = _inputs_of_function(op.graph, name)
        # The last inputs are those of the function; a condition's first one is the choice.
        first = len(op.inputs) - len(inside)
        for i, y in enumerate(op.inputs):
            if y is x and i >= first:
                yield from uses_of(inside[i - first])


def _inputs_of_function(graph: tf.Graph, name: str) -> list[tf.Tensor]:
    """Returns the inputs of a function that a loop or a branch of a graph calls."""
    # TensorFlow has no public way to it. Where the private one is missing, what is used in a loop
    # or a branch alone is not found.
    find = getattr(graph, "_get_function", None)
    function = None if find is None else find(name)
    return [] if function is None else list(function.graph.inputs)


def _first_after(op: tf.Operation, step: Collection[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields what a step does first after the branch, loop or function that an operation enters."""
    # An operation that calls a function is replaced by the body: it is the results which come after
    # what the body reads.
    outside = _context_before(op)
    pending = [op]
    seen = {op}
    while pending:
        inside = pending.pop()
        users = [user for y in inside.outputs for user in y.consumers()]
        for user in dict.fromkeys([*users, *inside._control_outputs]):
            if user in seen or user not in step:
                continue
            seen.add(user)
            if _context_after(user) is outside:
                yield user
            else:
                pending.append(user)


def _context_before(op: tf.Operation) -> Any:
    """Returns the branch or loop, if any, that the inputs of an operation are in."""
    context = op._get_control_flow_context()
    return context.outer_context if op.type in _ENTRANCES else context


def _context_after(op: tf.Operation) -> Any:
    """Returns the branch or loop, if any, that the outputs of an operation are in."""
    context = op._get_control_flow_context()
    return context.outer_context if op.type in _EXITS else context


def ancestors(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields operations, and all that they depend on."""
    # A list of what is left: graphs are too deep for Python's recursion.
    pending = list(operations)
    seen = set(pending)
    while pending:
        op = pending.pop()
        yield op
        for before in (*(x.op for x in op.inputs), *op.control_inputs):
            if before not in seen:
                seen.add(before)
                pending.append(before)


def _is_alias(op: tf.Operation) -> bool:
    return op.type in _ALIASES and not op.control_inputs


def _source(x: tf.Tensor) -> tf.Operation:
    """Returns the operation that owns the memory of a Tensor."""
    while _is_alias(x.op):
        x = x.op.inputs[0]
    return x.op


class _StepInputs:
    """The reads of a graph's steps, for which increments wait, also those that are made later."""

    def __init__(self, graph: tf.Graph):
        self._reads: dict[tf.Operation, list[tf.Operation]] = {}
        # TensorFlow has no public way to hear of new operations.
        create_op_helper = graph._create_op_helper

        def helper(op: tf.Operation, *args: Any, **kwargs: Any) -> None:
            create_op_helper(op, *args, **kwargs)
            if op.type in _ASSIGNMENTS:
                self._wait(op)
            elif op.type in _CALLS:
                for variable in dict.fromkeys(_source(x) for x in op.inputs):
                    if variable in self._reads and _increments(op, variable.outputs[0]):
                        _wait_for(self._reads[variable], op, op)

        # It is called before a session can run the new operation, so that no step misses the edges.
        graph._create_op_helper = helper

    def add(self, pairs: Iterable[tuple[tf.Operation, tf.Operation]]) -> None:
        """Notes reads; increments that exist wait for them, unless they come after it.

        Args:
          pairs: pairs (variable, operation that reads it).
        """
        new: dict[tf.Operation, list[tf.Operation]] = {}
        for variable, read in pairs:
            if read not in self._reads.get(variable, ()):
                new.setdefault(variable, []).append(read)
        for variable, reads in new.items():
            users = list(_assignments(variable.outputs[0]))
            # What has the variable as its only input waits for no assignment: no walk is needed.
            plain = [op for op in reads if not op.control_inputs and len(op.inputs) == 1]
            others = [op for op in reads if op not in plain]
            # One that waits for an assignment is meant to see it.
            plain += [op for op in others if set(users).isdisjoint(ancestors([op]))]
            self._reads.setdefault(variable, []).extend(plain)
            for op in users:
                if op.type in _CALLS:
                    _wait_for(plain, op, op)
                else:
                    self._wait(op, plain)

    def _wait(self, op: tf.Operation, reads: Optional[list[tf.Operation]] = None) -> None:
        """Makes an assignment wait for reads, if it is an increment."""
        variable, first = _way_to(op)
        reads = self._reads.get(variable, []) if reads is None else reads
        if reads and _is_increment(op, variable):
            _wait_for(reads, op, first)


def _wait_for(reads: Sequence[tf.Operation], op: tf.Operation, first: tf.Operation) -> None:
    """Makes an increment wait for reads.

    Args:
      reads: operations that read the variable.
      op: the increment, or an operation that increments in the functions that it calls.
      first: the first operation that leads there.
    """
    # In a graph of TensorFlow 1, no control edge may cross the border of a loop or a branch: an
    # increment within one waits where the variable enters it, unless the read is in there too.
    before = [read for read in reads if _context_after(read) is _context_before(first)]
    if first is not op or op.type in _CALLS:
        before = [read for read in before if first not in ancestors([read])]
    first._add_control_inputs([read for read in before if read not in first.control_inputs])


def _assignments(x: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the assignments to a variable, also those in branches and loops."""
    for op in x.consumers():
        if op.type in _ASSIGNMENTS or (op.type in _CALLS and _increments(op, x)):
            yield op
        elif op.type in _ENTRANCES:
            for y in op.outputs:
                yield from _assignments(y)


def _way_to(op: tf.Operation) -> tuple[tf.Operation, tf.Operation]:
    """Returns which variable an assignment changes, and the first operation that leads there."""
    first = op
    source = _source(op.inputs[0])
    while source.type in _ENTRANCES:
        first = source
        source = _source(first.inputs[0])
    return source, first


def _increments(op: tf.Operation, x: tf.Tensor) -> bool:
    """Returns whether the functions that an operation calls increment a variable."""
    return any(
        use.type in _ASSIGNMENTS and _is_increment(use, _source(use.inputs[0]))
        for use in _uses_within(op, x)
    )


def _is_increment(op: tf.Operation, variable: tf.Operation) -> bool:
    """Returns whether an assignment changes a value, unlike one that sets or restores it."""
    return op.type in _INCREMENTS or variable in ancestors([op.inputs[1].op])

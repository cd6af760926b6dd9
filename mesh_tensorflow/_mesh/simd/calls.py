"""Calls of a replicated program on its processors, and the results of these calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.apart_in_session import apart_in_session
from mesh_tensorflow._mesh.simd.execution.strategy import ExecutionStrategy
from mesh_tensorflow._mesh.simd.program import SimdProgram

if TYPE_CHECKING:
    from tensorflow.types.experimental import ConcreteFunction

__all__ = ["Results", "call_on_each", "results_of"]

_WAKE_UP_GROUP = 2**30
# How the types of operations on variables begin.
_USES = ("ReadVariableOp", "Assign", "ResourceApply", "ResourceScatter", "ResourceGather")
# What a computation returns: these, in lists, tuples or dictionaries.
Results: TypeAlias = Union[tf.Tensor, tf.Operation, Sequence, Mapping, None]


def call_on_each(
    program: SimdProgram,
    function: ConcreteFunction,
    inputs: Sequence[tf.Tensor],
    strategies: Sequence[ExecutionStrategy],
) -> list[list[tf.Tensor]]:
    """Calls a program on each processor that this process runs.

    Args:
      program: the SimdProgram.
      function: its concrete function.
      inputs: tf.Tensors that each processor gets whole.
      strategies: how to call it; the first one that can run the program does.

    Returns:
      For each processor its outputs; only those of the first processor are used.
    """
    prepared = ((strategy, strategy.prepare(program, function)) for strategy in strategies)
    strategy, call = next((strategy, call) for strategy, call in prepared if call is not None)
    copied = {pnum: _copies(program, function, pnum) for pnum in program.local}
    # The variables were made for sharing before it was known that the program falls back to
    # collectives.
    if not strategy.one_memory:
        for pnum, made in copied.items():
            made.update(_copies_of_shared(program, function, pnum))
    before = [
        *_wake_up(program, strategy),
        *[op for made in copied.values() for _, op in made.values()],
    ]
    arguments = []
    for pnum in program.local:
        own = program.arguments(function.captured_inputs, pnum)
        mine = copied[pnum]
        own = [mine[i][0] if i in mine else tensor for i, tensor in enumerate(own)]
        with tf.device(program.devices[pnum]):
            arguments.append([_number(strategy, pnum), *inputs, *own])
    return call(arguments, before)


def _number(strategy: ExecutionStrategy, pnum: int) -> tf.Tensor:
    """Returns the number of a processor, as an argument of its program."""
    number = tf.constant(pnum)
    if strategy.one_memory:
        return number
    # As a constant, it would let TensorFlow fold a selection by it, and leave out a collective on
    # the processors that do not select its result: the others would wait for them forever.
    return tf.placeholder_with_default(number, [])


def _copies(
    program: SimdProgram, function: ConcreteFunction, pnum: int
) -> dict[int, tuple[tf.Tensor, tf.Operation]]:
    """Copies, in each step, variables from outside that a processor cannot use directly.

    These are variables of other processes, and those that the program assigns to: the first
    processor of the variable's process assigns to the variable itself, the others to a copy. So
    `assign_add(global_step, 1)` adds 1, and all processors read the same value. And scalars that
    the program reads, so that increments outside of it can wait for the reads.

    Returns:
      {index of the captured input: (handle of the copy, operation that sets the copy)}.

    Raises:
      ValueError: a variable is in another process, and each process runs steps of its own.
    """
    copies = {}
    outside = function.captured_inputs
    device = program.devices[pnum]
    for i, (outer, inner) in enumerate(zip(outside, function.inputs[-len(outside) :])):
        if outer.dtype != tf.resource or program.is_own(outer):
            continue
        uses = {op.type: op for op in inner.consumers() if op.type.startswith(_USES)}
        here = _is_at(outer.device, device)
        reads = set(uses) == {"ReadVariableOp"}
        own = here and (pnum == program.local[0] or reads) and not (reads and _is_scalar(outer))
        if not uses or own:
            continue
        if not here and len(program.local) < len(program.devices):
            raise ValueError(
                f"the program uses the variable {outer.op.name} of {outer.device}, but each "
                "process runs its own steps: let each make it on its own device. What processes "
                "share are variables of the mesh"
            )
        kind, op = next(iter(uses.items()))
        dtype = op.get_attr("T" if kind.startswith("ResourceApply") else "dtype")
        copies[i] = _copy(outer, dtype, device, f"{outer.op.name}_of_processor_{pnum}")
    return copies


def _is_scalar(variable: tf.Tensor) -> bool:
    """Returns whether the handle of a variable is that of a scalar."""
    return variable.op.type == "VarHandleOp" and not variable.op.get_attr("shape").dim


def _copies_of_shared(
    program: SimdProgram, function: ConcreteFunction, pnum: int
) -> dict[int, tuple[tf.Tensor, tf.Operation]]:
    """Copies, in each step, variables that processors share, for those that do not store them.

    Only where the program assigns to them, and if each processor assigns itself; what it assigns to
    a copy is equal to what the variable gets. See `_copies`.
    """
    outside = function.captured_inputs
    own = program.arguments(outside, pnum)
    inside = function.inputs[-len(outside) :] if outside else []
    return {
        i: _copy(
            own[i],
            program.dtype(outer),
            program.devices[pnum],
            f"{own[i].op.name}_of_processor_{pnum}",
        )
        for i, (outer, inner) in enumerate(zip(outside, inside))
        if outer.dtype == tf.resource
        and program.is_own(outer)
        and not program.stores(outer, pnum)
        and {op.type for op in inner.consumers()} != {"ReadVariableOp"}
    }


def _copy(
    variable: tf.Tensor, dtype: tf.DType, device: str, name: str
) -> tuple[tf.Tensor, tf.Operation]:
    """Returns the handle of a copy of a variable on a device, and the operation that sets it."""
    with tf.device(variable.device):
        value = tf.raw_ops.ReadVariableOp(resource=variable, dtype=dtype)
    with tf.device(device):
        copy = tf.raw_ops.VarHandleOp(dtype=dtype, shape=tf.TensorShape(None), shared_name=name)
        return copy, tf.raw_ops.AssignVariableOp(resource=copy, value=value)


def _is_at(device: str, processor: str) -> bool:
    """Returns whether a device is in the process of a processor; "" is in every process."""
    spec, own = map(tf.DeviceSpec.from_string, (device, processor))
    return spec.job is None or (spec.job, spec.task) == (own.job, own.task)


def _wake_up(program: SimdProgram, strategy: ExecutionStrategy) -> list[tf.Operation]:
    """Returns collectives that run before a program.

    A session prepares for collectives only if its graph has one outside of functions. With several
    processes, this one also makes all of them begin a step before any of them ends it. Otherwise,
    a process that asks the first process for the step's number after the first one has ended the
    step would wait in another step than the rest of its group, which may not include the first.
    """
    local = [program.devices[pnum] for pnum in program.local]
    mend = f'the session tf.compat.v1.ConfigProto(device_count={{"CPU": {len(local)}}})'
    apart = [] if strategy.one_memory else [apart_in_session(local, f"give {mend}")]
    alone = len(program.local) == len(program.devices)
    found = tf.get_collection_ref(f"mtf_simd_wake_up/{'' if alone else program.devices}")
    if not found:
        first = program.local[0]
        size, key = (
            (1, _WAKE_UP_GROUP + first) if alone else (len(program.devices), program.new_keys())
        )
        for pnum in program.local[:1] if alone else program.local:
            with tf.device(program.devices[pnum]), tf.control_dependencies(apart):
                found.append(
                    tf.raw_ops.CollectiveReduceV2(
                        input=tf.zeros([1]),
                        group_size=size,
                        group_key=key,
                        instance_key=1,
                        ordering_token=[],
                        merge_op="Add",
                        final_op="Id",
                    ).op
                )
    return [*found, *apart]


def results_of(
    program: SimdProgram, structure: Results, calls: Sequence[Sequence[tf.Tensor]]
) -> Results:
    """Returns the results of the first processor, in the structure that the computation returned.

    Each result waits for all processors, so that fetching any one of them runs every processor.

    Args:
      program: the SimdProgram.
      structure: what the computation returned.
      calls: the outputs of each processor.
    """
    if not calls[0]:
        return structure
    everyone = [outputs[0].op for outputs in calls]
    flat = []
    with tf.device(program.devices[program.local[0]]):
        # Without a node that only waits for the calls, TensorFlow would not inline them.
        with tf.control_dependencies(everyone):
            done = tf.no_op()
    with tf.device(program.devices[program.local[0]]), tf.control_dependencies([done]):
        for result, output in zip(tf.nest.flatten(structure), calls[0]):
            if isinstance(result, tf.Operation):
                flat.append(tf.no_op())
                continue
            value = tf.identity(output)
            value.set_shape(result.shape if tf.is_tensor(result) else output.shape)
            flat.append(value)
    return tf.nest.pack_sequence_as(structure, flat)

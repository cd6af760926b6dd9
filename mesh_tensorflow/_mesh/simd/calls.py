"""Calls of a replicated program on its processors, and the results of these calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.devices import memory_domain
from mesh_tensorflow._mesh.simd.program import SimdProgram
from mesh_tensorflow._mesh.simd.sharing import Sharing

__all__ = ["call_on_each", "results_of"]

_WAKE_UP_GROUP = 2**30
# With more processors the functions of each of them would be more to build than they save.
_MOST_SHARING = 8
# Types of operations on variables, by how they begin.
_USES = ("ReadVariableOp", "Assign", "ResourceApply", "ResourceScatter", "ResourceGather")


def call_on_each(
    program: SimdProgram, function: Any, inputs: Sequence[tf.Tensor], share_memory: bool
) -> list[list]:
    """Calls a program on each processor that this process runs.

    Args:
      program: the SimdProgram.
      function: its concrete function.
      inputs: tf.Tensors that each processor gets whole.
      share_memory: whether processors of one memory share what is equal.

    Returns:
      For each processor its outputs; only those of the first processor are used.
    """
    copied = {pnum: _copies(program, function, pnum) for pnum in program.local}
    before = [*_wake_up(program), *[op for made in copied.values() for _, op in made.values()]]
    arguments = []
    for pnum in program.local:
        own = program.arguments(function.captured_inputs, pnum)
        mine = copied[pnum]
        own = [mine[i][0] if i in mine else tensor for i, tensor in enumerate(own)]
        with tf.device(program.devices[pnum]):
            arguments.append([tf.constant(pnum), *inputs, *own])
    addresses = _addresses(program) if share_memory else None
    if addresses is not None:
        library = _library(function)
        if not _loops_communicate(library, function):
            return _call_sharing(program, function, library, arguments, before, addresses)
    function.add_to_graph(tf.get_default_graph())
    call = getattr(function, "_inference_function", None) or function.inference_fn
    calls = []
    for pnum, taken in zip(program.local, arguments):
        with tf.device(program.devices[pnum]), tf.control_dependencies(before):
            calls.append(list(call.call_flat(*taken)))
    return calls


def _addresses(program: SimdProgram) -> Optional[list[str]]:
    """Returns names of processors in one memory, for what they send; None if they are not.

    Nothing is executed on the devices with these names.
    """
    if len(program.local) < len(program.devices) or len(program.devices) > _MOST_SHARING:
        return None
    if len({memory_domain(device) for device in program.devices}) > 1:
        return None
    spec = tf.DeviceSpec.from_string(program.devices[0] or "")
    if spec.device_type not in (None, "CPU"):
        return None
    process = f"/job:{spec.job or 'localhost'}/replica:{spec.replica or 0}/task:{spec.task or 0}"
    return [f"{process}/device:CPU:{pnum}" for pnum in program.local]


def _library(function: Any) -> Any:
    """Returns the FunctionDefLibrary of a function and of what its loops and conditions call."""
    with tf.Graph().as_default() as scratch:
        function.add_to_graph(scratch)
        return scratch.as_graph_def().library


def _loops_communicate(library: Any, function: Any) -> bool:
    """Whether there are collectives within loops or conditions of a program.

    Such loops wait for ever when they are part of the calling graph (TensorFlow 2.21), whatever
    their parallel iterations; in a function that is not inlined they do not.
    """
    return any(
        node.op.startswith("Collective")
        for f in library.function
        if f.signature.name != function.function_def.signature.name
        for node in f.node_def
    )


def _call_sharing(
    program: SimdProgram,
    function: Any,
    library: Any,
    arguments: Sequence[Sequence[tf.Tensor]],
    before: Sequence[tf.Operation],
    addresses: Sequence[str],
) -> list[list]:
    """Calls a function of its own on each processor; see `Sharing`."""
    keys = [
        [
            (pnum,),
            *range(len(taken) - 1 - len(function.captured_inputs)),
            *program.argument_keys(function.captured_inputs, pnum),
        ]
        for pnum, taken in zip(program.local, arguments)
    ]
    sharing = Sharing(function, program.reductions, program.tables, keys, addresses)
    with tf.control_dependencies(before):
        ready = tf.constant(True)
    calls = []
    for pnum, taken, definition in zip(program.local, arguments, sharing.functions()):
        graph_def = tf.GraphDef(library=library)
        graph_def.library.function.append(definition)
        graph_def.versions.CopyFrom(tf.get_default_graph().graph_def_versions)
        feeds = {"^ready": ready, **{f"argument_{i}": x for i, x in enumerate(taken)}}
        graph_def.node.append(_call_node(definition, list(feeds)))
        with tf.device(program.devices[pnum]):
            [call] = tf.import_graph_def(
                graph_def, feeds, return_elements=["call"], name=f"processor_{pnum}"
            )
        calls.append(list(call.outputs))
    return calls


def _call_node(definition: Any, inputs: Sequence[str]) -> Any:
    """Returns the NodeDef of a call of a function."""
    waits = [name for name in inputs if name.startswith("^")]
    node = tf.NodeDef(
        name="call",
        op="StatefulPartitionedCall",
        input=[*[name for name in inputs if name not in waits], *waits],
    )
    node.attr["_lower_as_multi_device_function"].b = True  # whatever optimizers are off
    node.attr["f"].func.name = definition.signature.name
    node.attr["Tin"].list.type.extend(arg.type for arg in definition.signature.input_arg)
    node.attr["Tout"].list.type.extend(arg.type for arg in definition.signature.output_arg)
    return node


def _copies(
    program: SimdProgram, function: Any, pnum: int
) -> dict[int, tuple[tf.Tensor, tf.Operation]]:
    """Makes copies, in each step, of variables from outside that a processor cannot have itself.

    These are variables of other processes, and those that the program assigns to: the first
    processor of the variable's process assigns to the variable itself, the others to a copy. So
    `assign_add(global_step, 1)` adds 1, and all processors read the same.

    Returns:
      {number of what the program uses from outside: (handle of the copy, what sets it)}.

    Raises:
      ValueError: a variable is another process's, whose steps this one has no part in.
    """
    copies = {}
    outside = function.captured_inputs
    device = program.devices[pnum]
    for i, (outer, inner) in enumerate(zip(outside, function.graph.inputs[-len(outside) :])):
        if outer.dtype != tf.resource or program.is_own(outer):
            continue
        uses = {op.type: op for op in inner.consumers() if op.type.startswith(_USES)}
        here = _is_at(outer.device, device)
        if not uses or (here and (pnum == program.local[0] or set(uses) == {"ReadVariableOp"})):
            continue
        if not here and len(program.local) < len(program.devices):
            raise ValueError(
                f"the program uses the variable {outer.op.name} of {outer.device}, but each "
                "process runs its own steps: let each make it on its own device. What processes "
                "share are variables of the mesh"
            )
        kind, op = next(iter(uses.items()))
        dtype = op.get_attr("T" if kind.startswith("ResourceApply") else "dtype")
        with tf.device(outer.device):
            value = tf.raw_ops.ReadVariableOp(resource=outer, dtype=dtype)
        with tf.device(device):
            copy = tf.raw_ops.VarHandleOp(
                dtype=dtype,
                shape=tf.TensorShape(None),
                shared_name=f"{outer.op.name}_of_processor_{pnum}",
            )
            copies[i] = copy, tf.raw_ops.AssignVariableOp(resource=copy, value=value)
    return copies


def _is_at(device: str, processor: str) -> bool:
    """Returns whether a device is of the process that has a processor; "" is of each process."""
    spec, own = map(tf.DeviceSpec.from_string, (device, processor))
    return spec.job is None or (spec.job, spec.task) == (own.job, own.task)


def _wake_up(program: SimdProgram) -> list[tf.Operation]:
    """Returns collectives that come before a program.

    Sessions prepare for collectives only if they see one. Of several processes, all begin a step
    before one of them ends it: one that asks the first one for the step's number only after that
    would wait in another step than its group, if the first one has no part in the group.
    """
    alone = len(program.local) == len(program.devices)
    found = tf.get_collection_ref(f"mtf_simd_wake_up/{'' if alone else program.devices}")
    if not found:
        first = program.local[0]
        size, key = (
            (1, _WAKE_UP_GROUP + first) if alone else (len(program.devices), program.new_keys())
        )
        for pnum in program.local[:1] if alone else program.local:
            with tf.device(program.devices[pnum]):
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
    return list(found)


def results_of(program: SimdProgram, structure: Any, calls: Sequence[Sequence[tf.Tensor]]) -> Any:
    """Returns the results of the first processor, in the structure of the computation's.

    Each waits for all processors, so that whatever is asked for, no processor is left out.

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
        # A node that waits for a call and takes nothing from it has TensorFlow keep all of it.
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

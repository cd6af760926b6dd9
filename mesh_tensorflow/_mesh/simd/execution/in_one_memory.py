"""OneMemoryStrategy: processors of one memory compute equal values once and hand them over."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.devices import memory_domain
from mesh_tensorflow._mesh.simd.execution.function_form import mismatch
from mesh_tensorflow._mesh.simd.execution.sharing import Sharing
from mesh_tensorflow._mesh.simd.execution.strategy import CallProcessors, ExecutionStrategy
from mesh_tensorflow._mesh.simd.private_attributes import warn_of_no_sharing

if TYPE_CHECKING:
    from tensorflow.core.framework.function_pb2 import FunctionDef, FunctionDefLibrary
    from tensorflow.types.experimental import ConcreteFunction

    from mesh_tensorflow._mesh.simd.program import SimdProgram

__all__ = ["OneMemoryStrategy", "addresses_in_one_memory"]

# With more processors, building a function for each takes longer than sharing saves.
_MOST_SHARING = 8


class OneMemoryStrategy(ExecutionStrategy):
    """Calls a function of its own on each processor of one memory; see `Sharing`."""

    one_memory = True

    def __init__(self, addresses: Sequence[str]):
        """Creates a OneMemoryStrategy.

        Args:
          addresses: `addresses_in_one_memory` of the program.
        """
        self._addresses = addresses

    def prepare(self, program: SimdProgram, function: ConcreteFunction) -> Optional[CallProcessors]:
        """Makes the functions of the processors; see `ExecutionStrategy`.

        None for a program with collectives in a loop, or with a loop that uses variables of several
        processors, or if TensorFlow writes functions in a form that is not known, of which it warns
        once.
        """
        library = _library(function)
        variables = _shared_variables(program, function)
        if _loops_communicate(library, function) or _loops_use(variables, function):
            return None
        reason = mismatch(function, program.graph)
        if reason is not None:
            warn_of_no_sharing(reason)
            return None
        keys = _argument_keys(program, function)
        sharing = Sharing(function, program, keys, self._addresses, variables)
        definitions = sharing.functions()
        _remove(library, function)

        def call(
            arguments: Sequence[Sequence[tf.Tensor]], before: Sequence[tf.Operation]
        ) -> list[list[tf.Tensor]]:
            return _call(program, definitions, library, arguments, before)

        return call


def addresses_in_one_memory(program: SimdProgram) -> Optional[list[str]]:
    """Returns a name for each processor of one memory, for Send and Recv; None if there are more.

    They have the form of device names, but nothing is executed on devices of these names.
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


def _library(function: ConcreteFunction) -> FunctionDefLibrary:
    """Returns the library of a function and of the functions that its loops and conditions call."""
    with tf.Graph().as_default() as scratch:
        function.add_to_graph(scratch)
        return scratch.as_graph_def().library


def _loops_communicate(library: FunctionDefLibrary, function: ConcreteFunction) -> bool:
    """Returns whether there are collectives within loops or conditions of a program.

    Such loops deadlock when they are part of the calling graph (TensorFlow 2.21), whatever their
    parallel iterations; in a function that is not inlined they do not.
    """
    return any(
        node.op.startswith("Collective")
        for f in library.function
        if f.signature.name != function.function_def.signature.name
        for node in f.node_def
    )


def _shared_variables(program: SimdProgram, function: ConcreteFunction) -> list[int]:
    """Returns indices of the arguments that are variables which several processors share."""
    captured = function.captured_inputs
    first = len(function.inputs) - len(captured)
    return [
        first + i
        for i, handle in enumerate(captured)
        if handle.dtype == tf.resource
        and program.is_own(handle)
        and not all(program.stores(handle, pnum) for pnum in program.local)
    ]


def _loops_use(variables: Sequence[int], function: ConcreteFunction) -> bool:
    """Returns whether a loop or a condition of a program takes one of some arguments."""
    return any(
        any(attribute.HasField("func") for attribute in op.node_def.attr.values())
        for i in variables
        for op in function.inputs[i].consumers()
    )


def _remove(library: FunctionDefLibrary, function: ConcreteFunction) -> None:
    """Removes a function, which nothing calls, from a library."""
    name = function.function_def.signature.name
    kept = [f for f in library.function if f.signature.name != name]
    del library.function[:]
    library.function.extend(kept)


def _argument_keys(program: SimdProgram, function: ConcreteFunction) -> list[list[Hashable]]:
    """Returns for each processor a key for each argument: equal keys are equal values."""
    captured = function.captured_inputs
    inputs = range(len(function.inputs) - 1 - len(captured))  # all processors get them whole
    return [[(pnum,), *inputs, *program.argument_keys(captured, pnum)] for pnum in program.local]


def _call(
    program: SimdProgram,
    definitions: Sequence[FunctionDef],
    library: FunctionDefLibrary,
    arguments: Sequence[Sequence[tf.Tensor]],
    before: Sequence[tf.Operation],
) -> list[list[tf.Tensor]]:
    """Calls the functions of the processors."""
    with tf.control_dependencies(before):
        # One node to wait for, instead of an edge from each operation to each call.
        ready = tf.constant(True)
    calls = []
    for pnum, taken, definition in zip(program.local, arguments, definitions):
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


def _call_node(definition: FunctionDef, inputs: Sequence[str]) -> tf.NodeDef:
    """Returns the node that calls a function."""
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

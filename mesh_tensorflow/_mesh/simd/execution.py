"""How the processors of a program run: by collectives, or in one memory.

Sharing one memory needs attributes of TensorFlow that it does not document, which `TABLE` has. They
are looked up before a program is traced, so that nothing is left half-built where one is missing.
"""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional, TypeAlias

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.devices import memory_domain
from mesh_tensorflow._mesh.simd.sharing import Sharing

if TYPE_CHECKING:
    from tensorflow.core.framework.function_pb2 import FunctionDef, FunctionDefLibrary
    from tensorflow.types.experimental import ConcreteFunction

    from mesh_tensorflow._mesh.simd.program import SimdProgram


# (arguments of each processor's call, operations that the calls wait for) -> outputs of each call.
CallProcessors: TypeAlias = Callable[
    [Sequence[Sequence[tf.Tensor]], Sequence[tf.Operation]], list[list[tf.Tensor]]
]


class ExecutionStrategy(abc.ABC):
    """A way to call a traced program on each processor that this process runs.

    Tracing does not depend on the strategy, nor does anything but the calls: whichever is used,
    a program has the same results and counters.

    Attributes:
      one_memory: whether it runs programs whose processors store equal slices in one variable.
    """

    one_memory = False

    @abc.abstractmethod
    def prepare(self, program: SimdProgram, function: ConcreteFunction) -> Optional[CallProcessors]:
        """Prepares the calls of a program. Adds nothing to the calling graph.

        Args:
          program: the SimdProgram.
          function: its concrete function; the first argument is the processor's number, the last
            ones are what it captures.

        Returns:
          A function that adds the calls to the default graph; None if this strategy cannot run
          the program.
        """


class CollectivesStrategy(ExecutionStrategy):
    """Calls the traced function itself on each processor: the default, which runs every program."""

    def prepare(self, program: SimdProgram, function: ConcreteFunction) -> CallProcessors:
        """Prepares the calls of a program; see `ExecutionStrategy`."""

        def call(
            arguments: Sequence[Sequence[tf.Tensor]], before: Sequence[tf.Operation]
        ) -> list[list[tf.Tensor]]:
            calls = []
            for pnum, taken in zip(program.local, arguments):
                with tf.device(program.devices[pnum]), tf.control_dependencies(before):
                    calls.append(_call(function, taken))
            return calls

        return call


def _call(function: ConcreteFunction, arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls a function with arguments in place of what it captures."""
    call_flat = getattr(getattr(function, "inference_fn", None), "call_flat", None)
    if call_flat is not None:
        return list(call_flat(*arguments))
    # The same call, with nothing but documented names. It lacks hints for the optimizer.
    outputs = tf.raw_ops.StatefulPartitionedCall(
        args=arguments, Tout=[x.dtype for x in function.outputs], f=function
    )
    return list(outputs)


def mismatch(function: ConcreteFunction, graph: tf.Graph) -> Optional[str]:
    """Returns how the FunctionDef of a function differs from what `Sharing` expects, or None.

    Its nodes have to be named like the operations of the traced graph, with the same number of
    inputs; its arguments and results have to be as many as those of the function.
    """
    definition = function.function_def
    operations = {op.name: op for op in graph.get_operations()}
    arguments = [arg.name for arg in definition.signature.input_arg]
    if len(arguments) != len(function.inputs):
        return "gives functions other arguments than their graphs have"
    results = [arg.name for arg in definition.signature.output_arg]
    if len(results) != len(function.outputs) or set(results) != set(definition.ret):
        return "gives functions other results than their graphs have"
    # FunctionDefs have no documented form, so each thing that `Sharing` relies on is compared.
    nodes = {node.name for node in definition.node_def}
    for node in definition.node_def:
        if node.name not in operations or operations[node.name].type != node.op:
            return f"names nodes of functions otherwise than operations of graphs: {node.name}"
        names = [name.lstrip("^").split(":")[0] for name in node.input]
        if len([n for n in node.input if not n.startswith("^")]) != len(
            operations[node.name].inputs
        ) or not nodes.union(arguments).issuperset(names):
            return f"names inputs in functions otherwise than in graphs: {node.name}"
    return None


class PrivateAttribute(NamedTuple):
    """An attribute that a release of TensorFlow may lack, or have with another signature.

    Attributes:
      needed_by: "programs", all of them; "sharing", programs in one memory; or "extras", which
        have a substitute where they are used.
      owner: what has it: a key of the table of owners.
      name: its name.
      used_for: what it is needed for.
      parameters: what it is called with; None if it is a value.
    """

    needed_by: str
    owner: str
    name: str
    used_for: str
    parameters: Optional[tuple[str, ...]] = None


_TRANSFER = ("tensor_name", "send_device", "send_device_incarnation", "recv_device")

TABLE = (
    PrivateAttribute(
        "programs", "ConcreteFunction", "captured_inputs", "what a program uses from outside"
    ),
    PrivateAttribute("programs", "ConcreteFunction", "inputs", "how a program uses it"),
    PrivateAttribute("programs", "ConcreteFunction", "outputs", "what a program returns"),
    PrivateAttribute("sharing", "ConcreteFunction", "function_def", "the nodes of a program"),
    PrivateAttribute(
        "sharing", "ConcreteFunction", "add_to_graph", "functions that its loops call", ("g",)
    ),
    PrivateAttribute(
        "sharing",
        "raw_ops",
        "Send",
        "the node that hands a value over",
        ("tensor", *_TRANSFER, "client_terminated"),
    ),
    PrivateAttribute(
        "sharing",
        "raw_ops",
        "Recv",
        "the node that takes it",
        ("tensor_type", *_TRANSFER, "client_terminated"),
    ),
    # Without it: tf.raw_ops.StatefulPartitionedCall.
    PrivateAttribute(
        "extras", "AtomicFunction", "call_flat", "a call with chosen captures", ("args",)
    ),
    # Without it: no functions, in an attribute that only informs.
    PrivateAttribute(
        "extras", "Graph", "_device_functions_outer_to_inner", "graph_device_function_stacks"
    ),
    # Without it: none, so that what is used in a loop or a branch alone is not found.
    PrivateAttribute(
        "extras", "Graph", "_get_function", "functions of loops and branches", ("name",)
    ),
)


def _implementation(documented: type) -> type:
    """Returns the class that implements a documented abstract class of tf.types."""
    # The attributes are those of the class that implements it, which has no public name.
    return next(iter(documented.__subclasses__()), documented)


_OWNERS: Mapping[str, Callable[[], object]] = {
    "ConcreteFunction": lambda: _implementation(tf2.types.experimental.ConcreteFunction),
    "AtomicFunction": lambda: _implementation(tf2.types.experimental.AtomicFunction),
    "raw_ops": lambda: tf.raw_ops,
    "Graph": lambda: tf.Graph,
}


def missing_for(needed_by: str) -> list[str]:
    """Returns which private attributes are missing or have another signature.

    Args:
      needed_by: "programs" or "sharing".

    Returns:
      For each a text such as "raw_ops.Send (the node that hands a value over)".
    """
    return [
        f"{a.owner}.{a.name} ({a.used_for})"
        for a in TABLE
        if a.needed_by == needed_by and not _is_as_expected(a)
    ]


def _is_as_expected(attribute: PrivateAttribute) -> bool:
    try:
        found = inspect.getattr_static(_OWNERS[attribute.owner](), attribute.name)
    except AttributeError:
        return False
    if attribute.parameters is None:
        # A value that a release makes a method would be used without a call.
        return not inspect.isroutine(found)
    return callable(found) and _takes(found, attribute.parameters)


def _takes(function: Callable, parameters: Iterable[str]) -> bool:
    """Returns whether a function has these parameters and requires no others."""
    has = inspect.signature(function).parameters
    # A new required parameter is as bad as a missing one: calls would fail after the tracing.
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = {
        name
        for name, parameter in has.items()
        if parameter.default is parameter.empty and parameter.kind not in optional
    }
    return set(parameters) <= set(has) and required <= {"self", *parameters}


def check_programs_can_run() -> None:
    """Raises RuntimeError if TensorFlow lacks what every program needs."""
    missing = missing_for("programs")
    if missing:
        raise RuntimeError(
            f"replicate: TensorFlow {tf.__version__} lacks {', '.join(missing)}, or has it with "
            "another signature; no program of SimdMeshImpl can run on CPUs and GPUs with it. "
            "Use TensorFlow 2.21, or mtf.placement_mesh_impl.PlacementMeshImpl, which does not "
            "need it"
        )


def device_functions(graph: tf.Graph) -> list[Callable]:
    """Returns the device functions in force in a graph, outer ones first.

    TensorFlow has no public name for them; where the private one is missing there are none.
    """
    return list(getattr(graph, "_device_functions_outer_to_inner", ()))


def inputs_of_function(graph: tf.Graph, name: str) -> list[tf.Tensor]:
    """Returns the inputs of a function that a loop or a branch of a graph calls.

    TensorFlow has no public way to it; where the private one is missing there are none.
    """
    find = getattr(graph, "_get_function", None)
    function = None if find is None else find(name)
    return [] if function is None else list(function.graph.inputs)


@functools.cache
def warn_of_no_sharing(reason: str) -> None:
    """Warns, once for each reason, that processors of one memory share nothing."""
    tf.logging.warning(
        "replicate: processors of one memory do not share what is equal on them, as TensorFlow %s "
        "%s. They communicate by TensorFlow's collectives: results are the same, steps may take "
        "longer.",
        tf.__version__,
        reason,
    )


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
        # Nothing calls it any more, and the library goes into the graph of each call.
        _remove(library, function)

        def call(
            arguments: Sequence[Sequence[tf.Tensor]], before: Sequence[tf.Operation]
        ) -> list[list[tf.Tensor]]:
            return _call_in_one_memory(program, definitions, library, arguments, before)

        return call


def addresses_in_one_memory(program: SimdProgram) -> Optional[list[str]]:
    """Returns a name for each processor of one memory, for Send and Recv; None if there are more.

    They have the form of device names, but nothing is executed on devices of these names.
    """
    if len(program.local) < len(program.devices) or len(program.devices) > _MOST_SHARING:
        return None
    if len({memory_domain(device) for device in program.devices}) > 1:
        return None
    # A GPU that is alone in its memory domain has nothing to share, and others are apart.
    spec = tf.DeviceSpec.from_string(program.devices[0] or "")
    if spec.device_type not in (None, "CPU"):
        return None
    process = f"/job:{spec.job or 'localhost'}/replica:{spec.replica or 0}/task:{spec.task or 0}"
    return [f"{process}/device:CPU:{pnum}" for pnum in program.local]


def _library(function: ConcreteFunction) -> FunctionDefLibrary:
    """Returns the library of a function and of the functions that its loops and conditions call."""
    # Not in the calling graph, which stays as it is if another strategy runs the program.
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
        # Those of the program itself become computations; those of what it calls stay collectives.
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


def _call_in_one_memory(
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
        # With "^", an import replaces a control input.
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


def choose_strategies(program: SimdProgram, share_memory: bool) -> list[ExecutionStrategy]:
    """Returns the strategies to try for a program, before it is traced.

    Args:
      program: the SimdProgram.
      share_memory: whether processors of one memory may share what is equal on them.

    Returns:
      Strategies, the preferred one first; the last one runs every program.

    Raises:
      RuntimeError: TensorFlow lacks what every program needs.
    """
    check_programs_can_run()
    collectives: list[ExecutionStrategy] = [CollectivesStrategy()]
    addresses = addresses_in_one_memory(program) if share_memory else None
    if addresses is None:
        return collectives
    missing = missing_for("sharing")
    if missing:
        warn_of_no_sharing(f"lacks {', '.join(missing)}, or has it with another signature")
        return collectives
    # Collectives last: whether the first can run a program is known only when it has been traced.
    return [OneMemoryStrategy(addresses), *collectives]

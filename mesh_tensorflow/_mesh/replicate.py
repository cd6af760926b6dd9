"""replicate: builds one program, and runs it on every processor.

Within `replicate`, the default tf graph is that of a function whose argument is the processor's
number. Tensors that a program captures from outside are passed to each call; for a variable that
has a slice for each processor, each call gets its own slice. While it is traced, its SimdProgram
notes these, and gives out the keys of collectives.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import threading
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, TypeAlias, Union

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._calls import within
from mesh_tensorflow._mesh import random_values
from mesh_tensorflow._mesh.devices import (
    check_devices_exist,
    check_distinct_devices,
    default_devices,
    device_spec,
    host_cpu,
    local_device,
)
from mesh_tensorflow._mesh.program import Program
from mesh_tensorflow._mesh.step_inputs import GlobalSteps, read_before_increments, uses_of
from mesh_tensorflow._watching import collecting, collectors, hand_over, nan_checks_in_force

if TYPE_CHECKING:
    from tensorflow.types.experimental import ConcreteFunction


# -- the program while it is traced

# The program that is being traced, in each thread.
_program: contextvars.ContextVar[Optional[SimdProgram]] = contextvars.ContextVar(
    "program", default=None
)


class SimdProgram(Program):
    """The state of a program while it is traced.

    Attributes:
      devices: a device for each processor, by physical number.
      local: physical numbers of the processors that this process runs.
      graph: the tf graph of the traced function.
      pnum: the physical number of the processor that runs the program, an int32 scalar.
      communicates_inside: whether a loop, a branch or a function in the program communicates.
      around: the graphs of loops, branches and functions around one that communicates.
      binds_masters: whether slices may be the only place of a variable's value.
      orders_operations: whether operations can be made to wait for others, and print.
      is_compiled: whether XLA compiles it, for one device that stands for all processors.
    """

    graph: tf.Graph
    pnum: tf.Tensor

    binds_masters = True
    orders_operations = True

    def __init__(self, devices: Sequence[str], local: Sequence[int], is_compiled: bool = False):
        self.devices = list(devices)
        self.local = list(local)
        self.is_compiled = is_compiled
        self.communicates_inside = False
        self.around: set[tf.Graph] = set()
        self._keys = self._new_block()
        self._own: dict[int, Mapping[int, Optional[tf.Tensor]]] = {}
        self._zeros: dict[Hashable, tf.Tensor] = {}

    def new_keys(self, count: int = 1) -> int:
        """Returns the first of `count` keys that no other group or collective has."""
        if len(self._keys) < count:  # as by many different shifts on a large mesh
            self._keys = self._new_block()
        first, self._keys = self._keys[0], self._keys[count:]
        return first

    def _new_block(self) -> range:
        first = _first_key(self.devices, alone=len(self.local) == len(self.devices))
        return range(first, first + _KEYS_PER_BLOCK)

    def note_collective(self) -> None:
        """Notes where in the program a collective is about to be made."""
        graph = tf.get_default_graph()
        if graph is not self.graph:
            self.communicates_inside = True
            while (graph := graph.outer_graph) is not self.graph:
                self.around.add(graph)

    # -- places to make operations

    def outside(self) -> contextlib.AbstractContextManager:
        """Makes operations outside of the program."""
        return tf.init_scope()

    @contextlib.contextmanager
    def at_beginning(self) -> Iterator[None]:
        """Makes operations at the beginning of the program."""
        # The outermost graph: the body of a loop may be the default one, and runs later.
        with self.graph.as_default(), tf.control_dependencies(None):
            yield

    # -- variables

    def make_slice(
        self, name: str, sizes: Sequence[int], dtype: tf.DType, trainable: bool, host: str
    ) -> tf.Variable:
        """Makes the slice variable of one slice, of zeros, on the device in force.

        Args:
          name: a string, relative to the variable scope.
          sizes: sizes of the slice.
          dtype: a tf.DType.
          trainable: whether it is added to the trainable variables.
          host: the device of the zeros; slices of one shape share them.
        """
        key = (tuple(sizes), dtype)
        if key not in self._zeros:
            # One node for all slices of a shape, not one for each processor and variable.
            with tf.device(host), tf.name_scope(None):
                self._zeros[key] = tf.zeros(sizes, dtype)
        return tf.get_variable(
            name,
            dtype=dtype,  # where it is shared, TensorFlow would ask for float32
            initializer=self._zeros[key],
            trainable=trainable,
            collections=["TPU_VAR"],
            use_resource=True,
        )

    def own_variable(self, name: str, slices: Mapping[int, tf.Variable]) -> tf.Variable:
        """Returns a variable that stands for each processor's own slice within the program.

        Args:
          name: ignored.
          slices: the slice variables of this process, by physical number.
        """
        del name
        # The program captures the first handle; each call gets its own in place of it. Holding the
        # handles keeps their ids from being reused.
        handles = {pnum: slices[pnum].handle for pnum in self.local}
        self._own[id(handles[self.local[0]])] = handles
        return slices[self.local[0]]

    def own_tensor(self, parts: Sequence[Optional[tf.Tensor]]) -> tf.Tensor:
        """Returns a tensor that stands for each processor's own tensor within the program.

        Args:
          parts: tf.Tensors from outside of the program, by physical number, of one shape and each
            for one processor alone; those of other processes' processors may be None.
        """
        # Holding the tensors keeps their ids from being reused.
        self._own[id(parts[self.local[0]])] = dict(enumerate(parts))
        return parts[self.local[0]]

    # -- random values

    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a new key for random numbers, the same on all processors."""
        return self.same_everywhere(lambda: random_values.new_key(seed))

    def same_everywhere(self, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns a value that is computed once for all processors.

        Args:
          make: a function that makes a tf.Tensor.
        """
        # One node, of which all calls get the value; within the program each would draw its own.
        with self.outside():
            return make()

    def is_own(self, handle: tf.Tensor) -> bool:
        """Returns whether the calls of processors get tensors of their own in place of this one."""
        return id(handle) in self._own

    def arguments(self, captured: Sequence[tf.Tensor], pnum: int) -> list[tf.Tensor]:
        """Returns the arguments of one processor's call for the captured inputs."""
        return [
            self._own[id(tensor)][pnum] if id(tensor) in self._own else tensor
            for tensor in captured
        ]


def tracing(program: SimdProgram) -> contextlib.AbstractContextManager[None]:
    """Makes a program the current one of this thread within a `with` block."""
    return within(_program, program)


def current_program() -> Optional[SimdProgram]:
    """Returns the program that is being traced in this thread, or None."""
    return _program.get()


def while_loop(
    cond: Callable[..., tf.Tensor], body: Callable[..., tuple], first: Sequence[Any], **kwargs: Any
) -> Any:
    """Returns the results of a `tf.while_loop`, within which loops of a program may communicate.

    Args:
      cond: that of `tf.while_loop`.
      body: likewise.
      first: the loop variables, of which the first is a tf.Tensor.
      **kwargs: its further arguments.
    """
    graphs = []

    def noted(fn: Callable) -> Callable:
        def call(*args: Any) -> Any:
            graphs.append(tf.get_default_graph())
            return fn(*args)

        return call

    results = tf.while_loop(noted(cond), noted(body), first, **kwargs)
    program = current_program()
    if program is not None and not program.around.isdisjoint(graphs):
        # TensorFlow would put the nodes of this loop into the graph of the call. An inner loop has
        # a number in its name then that processors do not agree on, and so have the keys of its
        # collectives: processors would wait for one another forever. A loop that stays a function
        # has its inner loops' names as they are, and one iteration at a time.
        loop = results[0].op
        while not loop.type.endswith("While"):
            loop = loop.inputs[0].op
        loop._set_attr("_lower_using_switch_merge", tf.AttrValue(b=False))
    return results


# -- its calls

_WAKE_UP_GROUP = 2**30
# Of more processors, TensorFlow takes long to optimize as many copies: for 16, a first step of a
# small transformer took 20 s in place of 9 s.
_MOST_INLINED = 8
# How the types of operations on variables begin.
_USES = ("ReadVariableOp", "Assign", "ResourceApply", "ResourceScatter", "ResourceGather")
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")  # of these, what only reads
# What a computation returns: these, in lists, tuples or dictionaries.
Results: TypeAlias = Union[tf.Tensor, tf.Operation, Sequence, Mapping, None]


# What every program needs of a traced function, and for what. It is not in the documented interface
# of functions, so a release of TensorFlow may lack it.
_NEEDED = {
    "captured_inputs": "what a program uses from outside",
    "inputs": "how a program uses it",
    "outputs": "what a program returns",
}


def _check_programs_can_run() -> None:
    """Raises RuntimeError if TensorFlow lacks what every program needs."""
    documented = tf2.types.experimental.ConcreteFunction
    # The class that implements it has no public name.
    implementation = next(iter(documented.__subclasses__()), documented)
    missing = [
        f"ConcreteFunction.{name} ({used_for})"
        for name, used_for in _NEEDED.items()
        if not hasattr(implementation, name)
    ]
    if missing:
        raise RuntimeError(
            f"replicate: TensorFlow {tf.__version__} lacks {', '.join(missing)}, or has it with "
            "another signature; no program of SimdMeshImpl can run on CPUs and GPUs with it. "
            "Use TensorFlow 2.21, or mtf.placement_mesh_impl.PlacementMeshImpl, which does not "
            "need it"
        )


def _call_on_each(
    program: SimdProgram, function: ConcreteFunction, inputs: Sequence[tf.Tensor]
) -> list[list[tf.Tensor]]:
    """Calls a program on each processor that this process runs.

    Args:
      program: the SimdProgram.
      function: its concrete function; the first argument is the processor's number, the last ones
        are what it captures.
      inputs: tf.Tensors that each processor gets whole.

    Returns:
      For each processor its outputs; only those of the first processor are used.
    """
    outside = function.captured_inputs
    copied = {pnum: _copies(program, function, pnum) for pnum in program.local}
    before = [*_wake_up(program), *[op for made in copied.values() for _, op in made.values()]]
    # A collective's key has a hash of its loop's name, and inlined loops have the names of their
    # calls: processors would wait for one another forever.
    if program.communicates_inside or len(program.local) > _MOST_INLINED:
        function = _not_inlined(function)
    calls = []
    for pnum in program.local:
        own = program.arguments(outside, pnum)
        own = [copied[pnum][i][0] if i in copied[pnum] else x for i, x in enumerate(own)]
        number = _number(pnum, program.devices[pnum])
        with tf.device(program.devices[pnum]), tf.control_dependencies(before):
            calls.append(_call(function, [number, *inputs, *own]))
    return calls


def _number(pnum: int, device: str) -> tf.Tensor:
    """Returns the number of the processor of a device, which TensorFlow cannot know beforehand."""
    # TensorFlow would fold a selection by a constant, and leave out a collective on the processors
    # that do not select its result: the others would wait for them forever. What is drawn is never
    # folded, and there is one number to draw from. It needs a seed where
    # tf.config.experimental.enable_op_determinism() was called.
    with tf.device(host_cpu(device)):
        return tf.raw_ops.RandomUniformInt(
            shape=tf.zeros([0], tf.int32),
            minval=tf.constant(pnum),
            maxval=tf.constant(pnum + 1),
            seed=1,
        )


def _call(function: ConcreteFunction, arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls a function with arguments in place of what it captures."""
    call_flat = getattr(getattr(function, "inference_fn", None), "call_flat", None)
    if call_flat is not None:
        outputs = list(call_flat(*arguments))
    else:
        # The same call, with nothing but documented names. It lacks hints for the optimizer.
        outputs = list(
            tf.raw_ops.StatefulPartitionedCall(
                args=arguments, Tout=[x.dtype for x in function.outputs], f=function
            )
        )
    # Inlined, unless the function says that it is not to be: of an error within a call, a session
    # often tells only what the error cancelled. Without the attribute TensorFlow inlines as well,
    # but not every call.
    set_attribute = getattr(outputs[0].op, "_set_attr", None)
    if set_attribute is not None:
        set_attribute("_lower_as_multi_device_function", tf.AttrValue(b=True))
    return outputs


def _not_inlined(function: ConcreteFunction) -> ConcreteFunction:
    """Returns a function that calls another with its arguments and captures, and is not inlined."""
    return tf2.function(
        lambda *arguments: _call(function, arguments),
        autograph=False,
        experimental_attributes={"_noinline": True},
    ).get_concrete_function(*[tf2.TensorSpec(x.shape, x.dtype) for x in function.inputs])


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
      ValueError: a variable is in another process, and each process runs steps of its own; or the
        program assigns to one that is in no processor's process.
    """
    copies = {}
    outside = function.captured_inputs
    device = program.devices[pnum]
    # What is captured comes last among the inputs, in the same order.
    for i, (outer, inner) in enumerate(zip(outside, function.inputs[-len(outside) :])):
        if outer.dtype != tf.resource or program.is_own(outer):
            continue
        uses = {op.type: op for op in uses_of(inner) if op.type.startswith(_USES)}
        near = [p for p in program.local if _is_at(outer.device, program.devices[p])]
        is_near = pnum in near
        reads = set(uses) == {"ReadVariableOp"}
        own = is_near and (pnum == near[0] or reads) and not (reads and _is_scalar(outer))
        if not uses or own:
            continue
        if not is_near and len(program.local) < len(program.devices):
            raise ValueError(
                f"the program uses the variable {outer.op.name} of {outer.device}, but each "
                "process runs its own steps: let each make it on its own device. What processes "
                "share are variables of the mesh"
            )
        if not near and any(kind not in _READS for kind in uses):
            raise ValueError(
                f"the program assigns to the variable {outer.op.name} of {outer.device}, where no "
                f"processor is: they are {', '.join(program.devices)}. Make it on one of them"
            )
        kind, op = next(iter(uses.items()))
        # Updates of optimizers name their dtype T, all other operations on variables dtype.
        dtype = op.get_attr("T" if kind.startswith("ResourceApply") else "dtype")
        copies[i] = _copy(outer, dtype, device, f"{outer.op.name}_of_processor_{pnum}")
    return copies


def _is_scalar(variable: tf.Tensor) -> bool:
    """Returns whether the handle of a variable is that of a scalar."""
    return variable.op.type == "VarHandleOp" and not variable.op.get_attr("shape").dim


def _copy(
    variable: tf.Tensor, dtype: tf.DType, device: str, name: str
) -> tuple[tf.Tensor, tf.Operation]:
    """Returns the handle of a copy of a variable on a device, and the operation that sets it."""
    # The read is made where the variable is; its value travels to the processor.
    with tf.device(variable.device):
        value = tf.raw_ops.ReadVariableOp(resource=variable, dtype=dtype)
    with tf.device(device):
        copy = tf.raw_ops.VarHandleOp(dtype=dtype, shape=tf.TensorShape(None), shared_name=name)
        return copy, tf.raw_ops.AssignVariableOp(resource=copy, value=value)


def _is_at(device: str, processor: str) -> bool:
    """Returns whether a device is in the process of a processor; "" is in every process."""
    spec, own = map(tf.DeviceSpec.from_string, (device, processor))
    return spec.job is None or (spec.job, spec.task) == (own.job, own.task)


def _wake_up(program: SimdProgram) -> list[tf.Operation]:
    """Returns collectives that run before a program.

    A session prepares for collectives only if its graph has one outside of functions. With several
    processes, this one also makes all of them begin a step before any of them ends it. Otherwise,
    a process that asks the first process for the step's number after the first one has ended the
    step would wait in another step than the rest of its group, which may not include the first.
    """
    local = [program.devices[pnum] for pnum in program.local]
    mend = f'the session tf.compat.v1.ConfigProto(device_count={{"CPU": {len(local)}}})'
    # Before any collective begins, as one between two members in one place would never end.
    device_check = [check_distinct_devices(local, f"give {mend}")]
    alone = len(program.local) == len(program.devices)
    # One for all programs of the graph; with several processes, for those on the same devices.
    collectives = tf.get_collection_ref(f"mtf_simd_wake_up/{'' if alone else program.devices}")
    if not collectives:
        first = program.local[0]
        # A group of one is enough for a session to prepare, and waits for nobody.
        size, key = (
            (1, _WAKE_UP_GROUP + first) if alone else (len(program.devices), program.new_keys())
        )
        for pnum in program.local[:1] if alone else program.local:
            with tf.device(program.devices[pnum]), tf.control_dependencies(device_check):
                collectives.append(
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
    return [*collectives, *device_check]


def _results_of(
    program: SimdProgram, structure: Results, calls: Sequence[Sequence[tf.Tensor]]
) -> Results:
    """Returns the results of the first processor, in the structure that the computation returned.

    Each result waits for all processors, so that fetching any one of them runs every processor.

    Args:
      program: the SimdProgram.
      structure: what the computation returned.
      calls: the outputs of each processor; the last one is there when all others are.
    """
    # The one output is that which waits for all others: the computation has returned nothing.
    if len(calls[0]) == 1:
        return structure
    # By way of an output: of an inlined call nobody can wait but for what it gives.
    everyone = []
    for pnum, outputs in zip(program.local, calls):
        with tf.device(program.devices[pnum]):
            everyone.append(tf.identity(outputs[-1]).op)
    flat = []
    with tf.device(program.devices[program.local[0]]):
        # One node to wait for, instead of an edge from each call to each result.
        with tf.control_dependencies(everyone):
            done = tf.no_op()
    with tf.device(program.devices[program.local[0]]), tf.control_dependencies([done]):
        for result, output in zip(tf.nest.flatten(structure), calls[0]):
            if isinstance(result, tf.Operation):
                # It waits for all processors by the control dependency around it.
                flat.append(tf.no_op())
                continue
            value = tf.identity(output)
            value.set_shape(result.shape if tf.is_tensor(result) else output.shape)
            flat.append(value)
    return tf.nest.pack_sequence_as(structure, flat)


# -- replicate

_count_on: collections.Counter = collections.Counter()  # number of blocks, by processes
_counting = threading.Lock()
# Keys of groups and of collectives; no two programs may have one in common.
_KEYS_PER_BLOCK = 2**16
# Of programs that several processes run, and of those that one runs. All keys stay below 2**30,
# where those of the wake-up collectives begin.
_MOST_BLOCKS = 2**13


def _first_key(devices: Sequence[str], alone: bool) -> int:
    """Returns the first key of the next block of keys for programs on some devices.

    Servers remember keys for as long as they run, across tf graphs. Processes agree on the keys
    because each of them makes the same programs with the same other processes in the same order.

    Args:
      devices: the devices of the program.
      alone: whether this process runs it on all of them.
    """
    # By processes, not by devices: programs on lists that overlap must not share keys.
    processes = "" if alone else ",".join(sorted({_process(device) for device in devices}))
    with _counting:
        number = _count_on[processes]
        _count_on[processes] += 1
    # Only a hash tells the keys of some processes from those of some others without asking them.
    number += zlib.crc32(processes.encode())
    # Keys are int32, so they begin again after so many blocks.
    return 1 + (number % _MOST_BLOCKS + alone * _MOST_BLOCKS) * _KEYS_PER_BLOCK


def _process(device: str) -> str:
    """Returns the name of the process of a device."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type=None, device_index=None).to_string()


def replicate(
    computation: Callable[..., Results],
    inputs: Sequence[object] = (),
    devices: Optional[Sequence[str]] = None,
    local: Optional[Sequence[int]] = None,
    share_memory: bool = True,
    jit_compile: bool = False,
) -> Any:
    """Runs one program on each of several processors, as tpu.rewrite does on a TPU.

    The computation makes a Lowering with a SimdMeshImpl of as many processors. It is traced once,
    however many processors there are. All of it runs whenever one of its results is fetched.
    Processors communicate by TensorFlow's collectives, also those of one process.
    A step waits for all processors; `tf.RunOptions(timeout_in_ms=...)` limits how long.

    Args:
      computation: a function of `inputs` that returns tf.Tensors and tf.Operations, in lists,
        tuples or dictionaries. Its Tensors must be the same on all processors, as exports are.
      inputs: tf.Tensors; each processor gets them whole.
      devices: a device for each processor; in a session of a server, with its job and task. If
        None, the GPUs that TensorFlow finds, else its logical CPUs.
      local: the numbers of the processors that this process runs; all of them if None.
      share_memory: ignored. In earlier releases processors of one process computed what is equal on
        several of them once, unless it was False.
      jit_compile: whether XLA compiles the program, for the only one of `devices`, on which the
        processors of its meshes are merged into one. XLA has no part in TensorFlow's collectives:
        `mtf.pjrt.in_session` compiles programs of several devices.

    Returns:
      What `computation` returns, with a tf.Tensor or tf.Operation of the calling graph for each.

    Raises:
      RuntimeError: TensorFlow lacks what every program needs.
      TypeError: the program assigns to a variable from outside that is no resource variable.
      ValueError: it is called in eager code or within another program, two processors have the
        same device, this process lacks one, `local` names none of the processors, or XLA is to
        compile for several devices.
    """
    del share_memory
    if tf.executing_eagerly_outside_functions():
        raise ValueError(
            "replicate makes programs of tf.compat.v1 graphs: call it within "
            "`with tf.Graph().as_default():` and run its results in a tf.Session"
        )
    if current_program() is not None:
        raise ValueError("replicate was called within a program that is being replicated")
    devices = list(default_devices() if devices is None else devices)
    local = list(range(len(devices)) if local is None else local)
    _check_distinct(devices)
    _check_local(local, devices)
    if jit_compile and len(devices) > 1:
        raise ValueError(
            f"replicate: XLA compiles a program for one device, but there are {len(devices)}. Give "
            "one, leave jit_compile out, or use mtf.pjrt.in_session for several"
        )
    # Soft placement is no help: processors on one device would wait for each other forever.
    check_devices_exist(devices, soft=None, in_session=True, who="replicate")
    _check_programs_can_run()  # before the tracing, so that nothing is left half-built
    program = SimdProgram(devices, local, jit_compile)
    structure: list[Any] = []
    watched = bool(collectors())  # what is collected are further results
    # Each process makes the variables of its program on a device of its own.
    steps = GlobalSteps(_process(devices[local[0]]) or None)

    def traced(pnum: tf.Tensor, *arguments: tf.Tensor) -> list[tf.Tensor]:
        program.graph, program.pnum = tf.get_default_graph(), pnum
        with tracing(program), steps.in_program():
            results = collecting(computation)(*arguments) if watched else computation(*arguments)
        structure.append(results)
        flat = [_as_tensor(result) for result in tf.nest.flatten(results)]
        # What all of the program's results wait for: in an inlined function TensorFlow leaves out
        # sends and receives on which no output depends.
        with tf.control_dependencies(flat):
            return [*flat, tf.constant(True)]

    # In the calling graph, before the tracing: within, they would be constants of the program.
    tensors = [tf.convert_to_tensor(x) for x in inputs]
    try:
        with tf.variable_creator_scope(steps.made):
            # Not to find the first NaN, as XLA checks nothing within.
            is_compiled = jit_compile and nan_checks_in_force() is None
            compiled = is_compiled or None  # False would keep TensorFlow from choosing clusters
            function = tf2.function(
                traced, autograph=False, jit_compile=compiled
            ).get_concrete_function(
                tf2.TensorSpec([], tf.int32), *[tf2.TensorSpec(x.shape, x.dtype) for x in tensors]
            )
    except TypeError as e:
        if "_ref" in str(e):
            raise TypeError(
                "a replicated program assigns to a variable that was made outside of it and is "
                "no resource variable: call tf.compat.v1.enable_resource_variables() first, or "
                f"make it within tf.variable_scope(..., use_resource=True)\n  {e}"
            ) from e
        raise
    calls = _call_on_each(program, function, tensors)
    read_before_increments([output.op for outputs in calls for output in outputs])
    results: Any = _results_of(program, structure[-1], calls)
    del program.graph, program.pnum  # variables refer to the program; they would keep its graph
    if not watched:
        return results
    hand_over(results[1])
    return results[0]


def _check_distinct(devices: Sequence[str]) -> None:
    """Raises ValueError if processors share a device: their collectives would deadlock."""
    counts = collections.Counter(_place(device) for device in devices)
    repeated = [device for device, n in counts.items() if n > 1]
    if repeated:
        raise ValueError(
            f"each processor of a replicated program needs a device of its own, but {devices} "
            f"names {', '.join(map(repr, repeated))} more than once. Logical CPUs are "
            f"{[f'/cpu:{i}' for i in range(len(devices))]}, in a session with "
            f'tf.compat.v1.ConfigProto(device_count={{"CPU": {len(devices)}}})'
        )


def _place(device: str) -> str:
    """Returns one name for all names of a device."""
    # "/cpu:0" and "/job:localhost/device:CPU:0" are one device, and must count as one.
    own = local_device(device)
    return device_spec(device).to_string() if own is None else f"/device:{own[0]}:{own[1]}"


def _check_local(local: Sequence[int], devices: Sequence[str]) -> None:
    """Raises ValueError unless `local` names some of the processors, each once."""
    if not devices:
        raise ValueError(
            "replicate: devices is empty: give one for each processor, or None for those there are"
        )
    if not local or len(set(local)) < len(local) or not set(local) <= set(range(len(devices))):
        raise ValueError(
            f"replicate: local must have numbers from 0 to {len(devices) - 1}, each at most once "
            f"and at least one: those of the {len(devices)} processors ({', '.join(devices)}) that "
            f"this process runs. It is {local}; None means all"
        )


def _as_tensor(result: object) -> tf.Tensor:
    """Returns a result of a computation as a tf.Tensor; functions return no operations."""
    if isinstance(result, tf.Operation):
        # A constant that waits for the operation stands for it.
        with tf.control_dependencies([result]):
            return tf.constant(True)
    return tf.convert_to_tensor(result)

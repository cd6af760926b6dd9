"""mtf.pjrt.in_session: parts of a session's graph that run on devices of JAX.

XLA compiles what is computed. Variables of TensorFlow, such as the global step, stay with the
session: it reads them before the compiled part, and assigns to them after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import jax
import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.layout import TensorLayout
from mesh_tensorflow._mesh.gspmd import annotating, current_compilation
from mesh_tensorflow._mesh.random_values import key_is_of_step, new_key
from mesh_tensorflow._mesh.step_inputs import GlobalSteps, read_before_increments
from mesh_tensorflow._mesh.variables.checkpoint_files import ShardedVariable
from mesh_tensorflow._watching import (
    collecting,
    collectors,
    hand_over,
    nan_checks_in_force,
)
from mesh_tensorflow.pjrt._devices import driving, process_count
from mesh_tensorflow.pjrt._programs import (
    Description,
    Layout,
    Programs,
    VariableOfProgram,
    current_programs,
)
from mesh_tensorflow.pjrt._store import form_of
from mesh_tensorflow.pjrt._trace import Building, ValueOfVariable, operations_of

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.gspmd import GspmdMeshImpl
    from mesh_tensorflow._mesh.variables.store import Form
    from mesh_tensorflow.ops._variable import Variable


class SessionVariable(ValueOfVariable):
    """Stands for the slice of a Variable in a session, and has the methods of one.

    In the program that is built, it is the value at that point. Outside of it, it reads and writes
    an array of JAX, when the session runs.
    """

    def __init__(self, variable: Variable, form: Form, outside: tf.Graph):
        """Creates a SessionVariable, in the tf graph of the session."""
        super().__init__(variable, form)
        self._outside = outside
        self._kept: Optional[tuple[Programs, int]] = None

    def is_kept_by(self, programs: Programs, number: int) -> None:
        """Notes what keeps the array.

        Args:
          programs: the programs of sessions.
          number: that of its own among them.
        """
        self._kept = programs, number

    @property
    def array(self) -> Optional[jax.Array]:
        """The array, once it has a value."""
        if self._kept is None:
            return None
        programs, number = self._kept
        return programs.array(number, self.variable.name)

    def apart(self, dtype: tf.DType) -> Optional[ShardedVariable]:
        """Returns how several processes save it in parts; None if there is one process."""
        if self._kept is None or not self._kept[0].are_apart:
            return None
        return ShardedVariable(*self._kept, self.variable.name, dtype)

    @property
    def _is_outside(self) -> bool:
        return tf.get_default_graph() is self._outside

    def read_value(self) -> tf.Tensor:
        """Returns the value, at this point of the program or when the session runs."""
        if not self._is_outside:
            return self.value
        value = self._called(self._get, [], self.dtype)
        # TensorFlow knows no shape of what a function of Python returns.
        value.set_shape(self.shape)
        return value

    def is_initialized(self) -> tf.Tensor:
        """Returns whether it has a value when the session runs."""
        return self._called(lambda: np.bool_(self.array is not None), [], tf.bool)

    def assign(self, value: Any, read_value: bool = True) -> Any:
        """Sets the value from here on; returns it, or an operation if not `read_value`."""
        value = tf.convert_to_tensor(value, self.dtype)
        if self._is_outside:
            done = self._called(self._set, [value], tf.bool)
            if not read_value:
                return done.op
            # Nothing else tells TensorFlow that the read comes after the assignment.
            with tf.control_dependencies([done]):
                return self.read_value()
        return super().assign(value, read_value)

    def _is_of_program(self, graph: tf.Graph) -> bool:
        # `first` is of the session's graph here, and so does not tell the program. The body of a
        # loop has the program itself as its outer graph.
        return getattr(graph, "outer_graph", None) is self._outside

    def _get(self) -> np.ndarray:
        assert self._kept is not None
        programs, number = self._kept
        return programs.value(number, self.variable.name)

    def _set(self, value: np.ndarray) -> np.bool_:
        assert self._kept is not None
        programs, number = self._kept
        # The memory of `value` is TensorFlow's, which an array of JAX must not refer to.
        programs.assign(number, self.variable.name, np.array(value))
        return np.bool_(True)

    def _called(self, fn: Callable[..., Any], inputs: list[tf.Tensor], dtype: tf.DType) -> Any:
        """Returns what a function returns whenever the session runs."""
        with tf.device("/cpu:0"):
            # Stateful, or TensorFlow may take two reads, with an assignment between them, for one.
            return tf.numpy_function(fn, inputs, dtype, stateful=True)


_RAW: dict[str, Callable[..., tf.Operation]] = {
    "AssignVariableOp": tf.raw_ops.AssignVariableOp,
    "AssignAddVariableOp": tf.raw_ops.AssignAddVariableOp,
    "AssignSubVariableOp": tf.raw_ops.AssignSubVariableOp,
}
_KNOWN = {*_RAW, "ReadVariableOp"}
# What a variable is after an assignment: a function of what it was, and of the operation's value.
_AFTER: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "AssignVariableOp": lambda before, value: value,
    "AssignAddVariableOp": tf.add,
    "AssignSubVariableOp": tf.subtract,
}
# They change nothing, so their place among the assignments does not matter.
_HARMLESS = {"VarIsInitializedOp", "VariableShape"}


@dataclasses.dataclass(frozen=True)
class Update:
    """An assignment to a variable of TensorFlow, which the session does after the program.

    Attributes:
      kind: the type of the operation.
      handle: the handle of the variable, in the session's graph.
      value: what it is assigned, a tensor of the program.
    """

    kind: str
    handle: tf.Tensor
    value: tf.Tensor

    def make(self, value: tf.Tensor) -> tf.Operation:
        """Returns the assignment in the session's graph."""
        return _RAW[self.kind](resource=self.handle, value=value)


@dataclasses.dataclass(frozen=True)
class CompiledPart:
    """The part of a function's graph that XLA compiles.

    Attributes:
      graph_def: the operations, without those whose results are given.
      arguments: the tensors in it that the session gives.
      given: for each of them, the tensor of the session's graph.
      variables: the placeholders of the variables that it reads, by name.
      results: what it computes for the function's results; None for a variable of TensorFlow that
        is read after an assignment to it, which the session does.
      read: the handles of these variables, by the number of the result.
      updates: the assignments to variables of TensorFlow.
      new: the new values of variables.
      assigned: the names of these variables.
    """

    graph_def: tf.GraphDef
    arguments: list[tf.Tensor]
    given: list[tf.Tensor]
    variables: dict[str, tf.Tensor]
    results: list[Optional[tf.Tensor]]
    read: dict[int, tf.Tensor]
    updates: list[Update]
    new: list[tf.Tensor]
    assigned: list[str]

    @property
    def computed(self) -> list[tf.Tensor]:
        """The results that it computes, and the values of updates."""
        return [y for y in self.results if y is not None] + [u.value for u in self.updates]


def cut(
    concrete: Any, inputs: Sequence[tf.Tensor], variables: Mapping[str, SessionVariable]
) -> CompiledPart:
    """Returns what has to be computed for the results of a function, and from what.

    Args:
      concrete: a concrete function.
      inputs: its arguments, in the session's graph.
      variables: the variables of the mesh, by name.

    Raises:
      ValueError: it is computed from a resource other than a variable, or a variable of TensorFlow
        is used in a way that has no place outside of the program.
    """
    graph = concrete.graph
    # The inputs of a concrete function are its arguments, and after them what it captures.
    own = graph.inputs[: len(inputs)]
    outer = {x.ref(): y for x, y in zip(own, inputs)}
    # What it is given and what it captures is both there before the program begins.
    outer.update({inner.ref(): y for y, inner in graph.captures})
    # Placeholders of variables are captured like what the session gives, but their values are
    # arrays on the devices.
    firsts = {v.first.ref(): name for name, v in variables.items()}
    # A variable whose value is still its placeholder was only read.
    assigned = [name for name, v in variables.items() if v.value is not v.first]
    writes = _Updates(graph, outer)
    read = {i: h for i, y in enumerate(graph.outputs) if (h := writes.read_after(y)) is not None}
    with graph.as_default():  # a result may be an argument, which cannot be fed as well
        results = [None if i in read else tf.identity(y) for i, y in enumerate(graph.outputs)]
        updates = [dataclasses.replace(u, value=tf.identity(u.value)) for u in writes.updates]
        new = [tf.identity(variables[name].value) for name in assigned]
    fetches = [*(y for y in results if y is not None), *(u.value for u in updates), *new]
    pairs, needed, again = _reached(fetches, outer, writes)
    arguments, given, read_here = [], [], {}
    for x, inside in pairs:
        name = firsts.get(x.ref())
        if name is not None:
            read_here[name] = inside
        else:
            arguments.append(inside)
            given.append(x)
    graph_def = operations_of(graph.as_graph_def(), needed)
    for node in graph_def.node:
        node.input[:] = [again.get(x, x) for x in node.input]
    return CompiledPart(
        graph_def, arguments, given, read_here, results, read, updates, new, assigned
    )


class _Updates:
    """The assignments of a function to variables of TensorFlow, in order."""

    def __init__(self, graph: tf.Graph, outer: Mapping[Any, tf.Tensor]):
        self._outer = outer
        self.updates: list[Update] = []
        self._operations: dict[str, tf.Operation] = {}
        # In the order in which they were made, which is that of the program's statements.
        self._places = {op.name: i for i, op in enumerate(graph.get_operations())}
        for op in graph.get_operations():
            handles = [x for x in op.inputs if self._is_variable(x)]
            if handles and op.type in _RAW:
                self._operations[op.name] = op
                self.updates.append(Update(op.type, outer[handles[0].ref()], op.inputs[1]))
            elif handles and op.type not in _KNOWN | _HARMLESS:
                raise ValueError(
                    f"a program for devices of JAX uses {outer[handles[0].ref()].name}, a variable "
                    f"of TensorFlow, by {op.type}: it can be read there, and be assigned to, but "
                    "not within a loop or a condition. Do this outside of the program"
                )

    def _is_variable(self, x: tf.Tensor) -> bool:
        outer = self._outer.get(x.ref())
        return outer is not None and outer.op.type == "VarHandleOp"

    def read_after(self, y: tf.Tensor) -> Optional[tf.Tensor]:
        """Returns the outer handle if a tensor is the value of a variable after an update."""
        # Results of a function are identities of what it returns.
        while y.op.type == "Identity":
            y = y.op.inputs[0]
        return self._outer[y.op.inputs[0].ref()] if self.follows(y.op) else None

    def follows(self, op: tf.Operation) -> bool:
        """Whether an operation reads a variable of TensorFlow after it was assigned to."""
        # In a function, TensorFlow lets a read wait for the assignments before it.
        return (
            op.type == "ReadVariableOp"
            and self._is_variable(op.inputs[0])
            and any(
                c.name in self._operations and c.inputs[0] is op.inputs[0]
                for c in op.control_inputs
            )
        )

    def value_after(self, read: tf.Operation) -> tf.Tensor:
        """Returns, in the graph of the function, what an operation reads that `follows` some."""
        handle, value = read.inputs[0], read.outputs[0]
        with handle.graph.as_default():
            current = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
            current.set_shape(value.shape)
            for name, op in self._operations.items():
                if op.inputs[0] is handle and self._places[name] < self._places[read.name]:
                    current = _AFTER[op.type](current, op.inputs[1])
            return tf.identity(current)  # an argument that was assigned is no operation


def _reached(
    fetches: Sequence[tf.Tensor], outer: Mapping[Any, tf.Tensor], updates: _Updates
) -> tuple[list[tuple[tf.Tensor, tf.Tensor]], set[str], dict[str, str]]:
    """Returns what is given, and what is computed of it.

    Returns:
      Pairs (tensor of the session, tensor of the program); the names of the operations; and, by the
      names of reads of variables after assignments, what is taken in their place.
    """
    inputs: dict[Any, tuple[tf.Tensor, tf.Tensor]] = {}
    needed: set[str] = set()
    again: dict[str, str] = {}
    # From the results backwards: what none of them uses, such as names of files, is not computed.
    todo = [y.op for y in fetches]

    def stays(op: tf.Operation) -> bool:
        """Whether it is left to the session."""
        return op.type in _KNOWN and op.inputs[0].ref() in outer

    def is_given(op: tf.Operation) -> bool:
        """Whether it is an argument, which is there before anything is computed."""
        return any(y.ref() in outer for y in op.outputs)

    while todo:
        op = todo.pop()
        if op.name in needed:
            continue
        needed.add(op.name)
        # What is left to the session has its order there; arguments are there before anything runs.
        todo += [c for c in op.control_inputs if not stays(c) and not is_given(c)]
        for x in op.inputs:
            if stays(x.op) and updates.follows(x.op):
                # The session assigns only after the program, which therefore does it for itself.
                if x.op.name not in again:
                    value = updates.value_after(x.op)
                    again[x.op.name] = value.op.name
                    todo.append(value.op)
            elif stays(x.op):
                inputs.setdefault(x.ref(), (_value_before(x, outer[x.op.inputs[0].ref()]), x))
            elif x.ref() in outer:
                _check_value(x, outer[x.ref()])
                inputs.setdefault(x.ref(), (outer[x.ref()], x))
            else:
                todo.append(x.op)
    return list(inputs.values()), needed, again


def _value_before(x: tf.Tensor, handle: tf.Tensor) -> tf.Tensor:
    """Returns what a program reads of a variable of TensorFlow, in the session's graph."""
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=x.dtype)
    value.set_shape(x.shape)
    return value


def _check_value(x: tf.Tensor, given: tf.Tensor) -> None:
    if x.dtype in (tf.resource, tf.variant, tf.string):
        raise ValueError(
            f"a program for devices of JAX is computed from {given.name}, which is a "
            f"{x.dtype.name} of TensorFlow, and not on these devices. Compute what depends on it "
            "outside of the program, and give the program the value"
        )


def in_session(
    computation: Callable[..., Any],
    inputs: Sequence[object] = (),
    devices: Optional[Sequence[Any]] = None,
) -> Any:
    """Runs a program on devices of JAX whenever a session asks for one of its results.

    It is to an `mtf.GspmdMeshImpl` what `replicate` is to a SimdMeshImpl: the computation makes
    a Lowering with one, and its results are tensors of the session's tf graph. Variables are kept
    as arrays of JAX, split by the layout. Initializers, savers, hooks and whatever else has to do
    with tf.global_variables() read and write these arrays. All of the program runs whenever one
    of its results is fetched. Assignments to variables of TensorFlow, such as the global step, are
    left to the session, after the program. In several processes, call it within `run_in_chief`.

    Args:
      computation: a function of `inputs` that returns tf.Tensors, tf.Operations and Nones, in
        lists, tuples or dictionaries.
      inputs: tf.Tensors.
      devices: JAX devices, one for each processor; the first of all if None.

    Returns:
      What `computation` returns, with a tf.Tensor or tf.Operation of the calling graph for each;
      None stays None.

    Raises:
      ValueError: it is called in eager code, within another program, or in several processes
        outside of `run_in_chief`; the computation makes no GspmdMeshImpl or several ones, returns
        nothing, or uses a resource of TensorFlow such as a table.
    """
    if tf.executing_eagerly_outside_functions():
        raise ValueError(
            "mtf.pjrt.in_session makes programs of tf.compat.v1 graphs: call it within "
            "`with tf.Graph().as_default():`. In eager code use mtf.pjrt.function"
        )
    if process_count() > 1 and not driving():
        raise ValueError(
            f"mtf.pjrt.in_session: there are {process_count()} processes, of which the first runs "
            "the session, on the devices of all. In each process, call mtf.pjrt.run_in_chief(main) "
            "with the function that makes the graph and runs the session, or "
            "estimator.run_cluster(main, config). Processes that are not started by "
            "mesh_tensorflow.launch or SLURM need TF_CONFIG and MTF_RUNTIME=pjrt"
        )
    if current_compilation() is not None:
        raise ValueError("mtf.pjrt.in_session was called within a program that XLA compiles")
    building = _Building(tf.get_default_graph())
    structure: list[Any] = []
    steps = GlobalSteps()
    watched = bool(collectors())

    def traced(*arguments: tf.Tensor) -> list[tf.Tensor]:
        with annotating(building), steps.in_program():
            results = (collecting(computation) if watched else computation)(*arguments)
        # Only tensors leave a function. The structure that they are in, and which are operations,
        # leave it by this list.
        structure.append(results)
        return [_as_tensor(y) for y in tf.nest.flatten(results) if y is not None]

    tensors = [tf.convert_to_tensor(x) for x in inputs]
    specs = [tf2.TensorSpec(x.shape, x.dtype) for x in tensors]
    # On the session's graph, where variables are made: the program then knows a global step as soon
    # as it is made.
    with tf.variable_creator_scope(steps.made):
        concrete = tf2.function(traced, autograph=False).get_concrete_function(*specs)
    part = cut(concrete, tensors, building.variables)
    if not concrete.outputs:
        raise ValueError(
            "the computation of mtf.pjrt.in_session returns no tensor and no operation, so no "
            "session could run it: return what is to be fetched, such as the loss and "
            "lowering.lowered_operation(...) of the updates"
        )
    # The session increments a variable of TensorFlow only after the program has read it.
    read_before_increments([x.op for x in part.given])
    results = iter(_results(part, _defined(part, building, devices)))

    def result_of(inside: Any) -> Any:
        """Returns what a session fetches for a result of the computation."""
        if inside is None:
            return None
        y = next(results)
        # For an operation, one is given back, whose run does all of the program.
        return y.op if isinstance(inside, tf.Operation) else y

    returned = tf.nest.map_structure(result_of, structure[-1])
    if watched:
        returned, collected = returned
        hand_over(collected)
    return returned


def _as_tensor(result: Any) -> tf.Tensor:
    """Returns a result as a tensor; for an operation, whose effect is in the variables, True."""
    return tf.constant(True) if isinstance(result, tf.Operation) else tf.convert_to_tensor(result)


class _Building(Building):
    """What is found out about a program while it is built."""

    def __init__(self, outside: tf.Graph):
        super().__init__()
        self.outside = outside
        self.impls: list[GspmdMeshImpl] = []
        self.variables: dict[str, SessionVariable] = {}

    def has_impl(self, mesh_impl: GspmdMeshImpl) -> None:
        """Notes the mesh implementation."""
        if not any(mesh_impl is known for known in self.impls):
            self.impls.append(mesh_impl)

    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a key, which the session draws, unless it depends on a step."""
        if key_is_of_step(seed):
            return new_key(seed)
        with tf.init_scope():
            # Drawn by the session: a program of XLA has no state, and would draw the same again.
            return new_key(seed)

    def slice_of(self, variable: Variable, mesh_impl: GspmdMeshImpl) -> SessionVariable:
        """Returns what stands for the slice of a variable."""
        impl = getattr(mesh_impl, "requested", mesh_impl)
        with self.outside.as_default():
            # The placeholder is one of the session's graph, which the function captures: `cut`
            # finds it so.
            session_variable = SessionVariable(variable, form_of(variable, impl), self.outside)
        self.variables[variable.name] = session_variable
        return session_variable


def _defined(
    part: CompiledPart, building: _Building, devices: Optional[Sequence[Any]]
) -> Callable[..., list[np.ndarray]]:
    """Defines a program in all processes; returns what does a step, in eager mode."""
    impls = building.impls
    if len(impls) != 1:
        raise ValueError(
            f"a program of mtf.pjrt.in_session runs on {len(impls)} meshes: lower it "
            "with one mtf.GspmdMeshImpl"
        )
    programs = current_programs()
    number = programs.define(_description(part, building, impls[0], devices), part.graph_def)
    # Otherwise the arrays of a graph that is gone would stay on the devices.
    weakref.finalize(building.outside, programs.forget, number)
    for v in building.variables.values():
        v.is_kept_by(programs, number)
    return lambda *given: programs.run(number, [x.numpy() for x in given])


def _results(part: CompiledPart, run: Callable[..., list[np.ndarray]]) -> list[tf.Tensor]:
    """Returns the results of a step, as tensors of the session's graph."""
    with tf.device("/cpu:0"):
        # One operation for all results: whichever of them a session fetches, a step is done once.
        outputs = tf.py_function(run, part.given, [y.dtype for y in part.computed])
    outputs = [outputs] if isinstance(outputs, tf.Tensor) else list(outputs)
    for result, y in zip(outputs, part.computed):
        result.set_shape(y.shape)
    count = len(outputs) - len(part.updates)
    values = iter(outputs[:count])
    with contextlib.ExitStack() as stack:
        # Each is made within the dependencies on those before it, so they keep their order.
        for update, value in zip(part.updates, outputs[count:]):
            stack.enter_context(tf.control_dependencies([update.make(value)]))
        return [_result(part, i, values) for i in range(len(part.results))]


def _result(part: CompiledPart, i: int, values: Iterator[tf.Tensor]) -> tf.Tensor:
    """Returns a result, after the assignments of the session."""
    if part.results[i] is not None:
        value = next(values)
        # Made within the control dependencies: a fetch of any result also does the assignments.
        return tf.identity(value) if part.updates else value
    handle = part.read[i]
    dtype = tf.as_dtype(handle.op.get_attr("dtype"))
    value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
    value.set_shape(tf.TensorShape(handle.op.get_attr("shape")))
    return value


def _description(
    part: CompiledPart, building: _Building, impl: GspmdMeshImpl, devices: Optional[Sequence[Any]]
) -> Description:
    """Returns what a program is, as other processes are told."""

    def axes(layout: Optional[TensorLayout]) -> Layout:
        return [] if layout is None else layout.plain()

    read = {name: x.op.name for name, x in part.variables.items()}
    variables = {
        name: VariableOfProgram(read.get(name), v.sizes, v.dtype.name, axes(v.form.layout))
        for name, v in building.variables.items()
    }
    return Description(
        mesh=[(d.name, d.size) for d in impl.shape],
        # By number, as another process has objects of its own for the same devices.
        devices=None if devices is None else [device.id for device in devices],
        arguments=[x.op.name for x in part.arguments],
        layouts=[axes(building.layout(x)) for x in part.arguments],
        variables=variables,
        fetches=[y.name for y in [*part.computed, *part.new]],
        # Of results alone: the new value of a variable is laid out as the variable is.
        result_layouts=[axes(building.layout(y)) for y in part.computed],
        assigned=part.assigned,
        is_checked=nan_checks_in_force() is not None,
    )

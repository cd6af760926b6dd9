"""in_session: a part of a session's graph that runs on devices of JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Optional

import jax
import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.gspmd.sharding import annotating, current_compilation
from mesh_tensorflow._mesh.slices.random_values import key_is_of_step, new_key
from mesh_tensorflow.pjrt._building import Building
from mesh_tensorflow.pjrt._devices import AnyMesh, all_dtypes, device_mesh, sharding
from mesh_tensorflow.pjrt._function import CompiledProgram
from mesh_tensorflow.pjrt._hosts import process_count
from mesh_tensorflow.pjrt._session_variable import SessionVariable
from mesh_tensorflow.pjrt._store import form_of
from mesh_tensorflow.pjrt._trace import Spec, Trace

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.gspmd.mesh_impl import GspmdMeshImpl
    from mesh_tensorflow.ops._variables.variable import Variable

__all__ = ["in_session"]


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
    of its results is fetched.

    Args:
      computation: a function of `inputs` that returns tf.Tensors and tf.Operations, in lists,
        tuples or dictionaries.
      inputs: tf.Tensors.
      devices: JAX devices, one for each processor; the first of all if None.

    Returns:
      What `computation` returns, with a tf.Tensor or tf.Operation of the calling graph for each.

    Raises:
      ValueError: it is called in eager code, within another program or in several processes, the
        computation makes no GspmdMeshImpl or several ones, or it uses a resource of TensorFlow
        such as a table.
    """
    if tf.executing_eagerly_outside_functions():
        raise ValueError(
            "mtf.pjrt.in_session makes programs of tf.compat.v1 graphs: call it within "
            "`with tf.Graph().as_default():`. In eager code use mtf.pjrt.function"
        )
    if process_count() > 1:
        raise ValueError(
            f"mtf.pjrt.in_session runs in one process, but there are {process_count()}: with "
            "several, call mtf.pjrt.function, or leave --runtime pjrt out of the launcher's flags"
        )
    if current_compilation() is not None:
        raise ValueError("mtf.pjrt.in_session was called within a program that XLA compiles")
    building = _Building(tf.get_default_graph())
    structure: list[Any] = []

    def traced(*arguments: tf.Tensor) -> list[tf.Tensor]:
        with annotating(building), tf.variable_creator_scope(_made_outside):
            results = computation(*arguments)
        structure.append(results)
        return [_as_tensor(y) for y in tf.nest.flatten(results)]

    tensors = [tf.convert_to_tensor(x) for x in inputs]
    specs = [tf2.TensorSpec(x.shape, x.dtype) for x in tensors]
    concrete = tf2.function(traced, autograph=False).get_concrete_function(*specs)
    part = _cut(concrete, tensors, building)
    program = _SessionProgram(part, building, devices)
    flat = tf.nest.flatten(structure[-1])
    results = program.results()
    values = [y.op if isinstance(x, tf.Operation) else y for x, y in zip(flat, results)]
    return tf.nest.pack_sequence_as(structure[-1], values)


def _made_outside(next_creator: Callable[..., tf.Variable], **arguments: object) -> tf.Variable:
    """Makes a variable in the calling graph."""
    del next_creator
    with tf.init_scope():
        return tf.Variable(**{**arguments, "use_resource": True})


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
            return new_key(seed)

    def slice_of(self, variable: Variable, mesh_impl: GspmdMeshImpl) -> SessionVariable:
        """Returns what stands for the slice of a variable."""
        impl = getattr(mesh_impl, "requested", mesh_impl)
        self.has_impl(impl)
        with self.outside.as_default():
            made = SessionVariable(variable, form_of(variable, impl), self.outside)
        self.variables[variable.name] = made
        return made


@dataclasses.dataclass(frozen=True)
class _Part:
    """The part of a function's graph that XLA compiles.

    Attributes:
      graph_def: the operations.
      arguments: the tensors in it that the session gives.
      given: for each of them, the tensor of the session's graph.
      fetches: the results, and the new values of variables.
      assigned: the names of these variables.
    """

    graph_def: tf.GraphDef
    arguments: list[tf.Tensor]
    given: list[tf.Tensor]
    variables: dict[str, tf.Tensor]
    fetches: list[tf.Tensor]
    assigned: list[str]


def _cut(concrete: Any, inputs: Sequence[tf.Tensor], building: _Building) -> _Part:
    """Returns what has to be computed for the results of a function, and from what.

    Raises:
      ValueError: it is computed from a resource other than a variable.
    """
    graph = concrete.graph
    own = graph.inputs[: len(inputs)]
    outer = {x.ref(): y for x, y in zip(own, inputs)}
    outer.update({inner.ref(): y for y, inner in graph.captures})
    firsts = {v.first.ref(): name for name, v in building.variables.items()}
    assigned = [name for name, v in building.variables.items() if v.value is not v.first]
    with graph.as_default():  # a result may be an argument, which cannot be fed as well
        fetches = [tf.identity(y) for y in graph.outputs]
        fetches += [tf.identity(building.variables[name].value) for name in assigned]
    cut, needed = _reached(fetches, outer)
    arguments, given, variables = [], [], {}
    for x, inside in cut:
        name = firsts.get(x.ref())
        if name is not None:
            variables[name] = inside
        else:
            arguments.append(inside)
            given.append(x)
    kept = _operations(graph, needed, [*arguments, *variables.values()])
    return _Part(kept, arguments, given, variables, fetches, assigned)


def _operations(
    graph: tf.Graph, needed: Collection[str], given: Sequence[tf.Tensor]
) -> tf.GraphDef:
    """Returns some of a graph's operations, with placeholders for the tensors that are given."""
    whole = graph.as_graph_def()
    kept = tf.GraphDef(versions=whole.versions, library=whole.library)
    for x in given:
        node = kept.node.add(name=x.op.name, op="Placeholder")
        node.attr["dtype"].type = x.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(x.shape.as_proto())
    for node in whole.node:
        if node.name in needed:
            kept.node.append(node)
            left = [x for x in node.input if not x.startswith("^") or x[1:] in needed]
            kept.node[-1].input[:] = left
    return kept


def _reached(
    fetches: Sequence[tf.Tensor], outer: dict[Any, tf.Tensor]
) -> tuple[list[tuple[tf.Tensor, tf.Tensor]], set[str]]:
    """Returns pairs (tensor of the session, tensor of the program), and names of operations."""
    cut: dict[Any, tuple[tf.Tensor, tf.Tensor]] = {}
    needed: set[str] = set()
    todo = [y.op for y in fetches]

    def is_read(op: tf.Operation) -> bool:
        return op.type == "ReadVariableOp" and op.inputs[0].ref() in outer

    while todo:
        op = todo.pop()
        if op.name in needed:
            continue
        needed.add(op.name)
        todo += [c for c in op.control_inputs if not is_read(c)]
        for x in op.inputs:
            if is_read(x.op):
                handle = outer[x.op.inputs[0].ref()]
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=x.dtype)
                value.set_shape(x.shape)
                cut.setdefault(x.ref(), (value, x))
            elif x.ref() in outer:
                _check_value(x, outer[x.ref()])
                cut.setdefault(x.ref(), (outer[x.ref()], x))
            else:
                todo.append(x.op)
    return list(cut.values()), needed


def _check_value(x: tf.Tensor, given: tf.Tensor) -> None:
    if x.dtype in (tf.resource, tf.variant, tf.string):
        raise ValueError(
            f"a program for devices of JAX is computed from {given.name}, which is a "
            f"{x.dtype.name} of TensorFlow, and not on these devices. Compute what depends on it "
            "outside of the program, and give the program the value"
        )


class _SessionProgram:
    """A program that a session calls."""

    def __init__(self, part: _Part, building: _Building, devices: Optional[Sequence[Any]]):
        impls = building.impls
        if len(impls) != 1:
            raise ValueError(
                f"a program of mtf.pjrt.in_session runs on {len(impls)} meshes: lower it "
                "with one mtf.GspmdMeshImpl"
            )
        self._part, self._building = part, building
        self.mesh_shape = impls[0].shape
        self._mesh: AnyMesh = device_mesh(self.mesh_shape, devices)
        for v in building.variables.values():
            v.sharding = sharding(self._mesh, v.form.layout)
        self._num_results = len(part.fetches) - len(part.assigned)
        self._programs: dict[Any, CompiledProgram] = {}

    def results(self) -> list[tf.Tensor]:
        """Returns the results, as tensors of the session's graph."""
        fetches = self._part.fetches[: self._num_results]
        with tf.device("/cpu:0"):
            results = tf.py_function(self._run, self._part.given, [y.dtype for y in fetches])
        for result, y in zip(results, fetches):
            result.set_shape(y.shape)
        return results

    def _run(self, *given: Any) -> list[np.ndarray]:
        """Does a step; called in eager mode by the session."""
        arrays = [x.numpy() for x in given]
        key = tuple(a.shape for a in arrays)
        if key not in self._programs:
            self._programs[key] = CompiledProgram(self._trace(arrays), self._mesh)
        program, variables = self._programs[key], self._building.variables
        with all_dtypes():
            placed = [jax.device_put(a, s) for a, s in zip(arrays, program.arguments)]
            kept = [variables[name].current() for name in program.kept]
            assigned = [variables[name].current() for name in program.assigned]
            results, new = program.step(placed, [], kept, assigned)
        for name, array in zip(program.assigned, new):
            variables[name].array = array
        return [np.asarray(y) for y in results]

    def _trace(self, arrays: Sequence[np.ndarray]) -> Trace:
        part, layout = self._part, self._building.layout
        own = {n: v for n, v in self._building.variables.items() if n in part.variables}
        own.update({n: self._building.variables[n] for n in part.assigned})
        feeds = [*part.arguments, *(part.variables[n] for n in own if n in part.variables)]
        wrapped = tf.wrap_function(
            lambda: tf.graph_util.import_graph_def(part.graph_def, name=""), []
        )
        graph = wrapped.graph
        pruned = wrapped.prune(
            [graph.as_graph_element(x.name) for x in feeds],
            [graph.as_graph_element(y.name) for y in part.fetches],
        )
        number = len(part.arguments)

        def function(*values: Any) -> Any:
            by_name = dict(zip(own, values[number:]))
            used = [by_name[n] for n in own if n in part.variables]
            return pruned(*values[:number], *used)

        return Trace(
            function,
            [Spec(a.shape, tf.as_dtype(a.dtype)) for a in arrays],
            [layout(x) for x in part.arguments],
            [layout(y) for y in part.fetches[: self._num_results]],
            list,
            0,
            own,
            part.assigned,
            None,
        )

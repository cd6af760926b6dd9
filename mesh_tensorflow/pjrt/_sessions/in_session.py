"""in_session: a part of a session's graph that runs on devices of JAX."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional

import jax
import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.layout import TensorLayout
from mesh_tensorflow._mesh.gspmd import annotating, current_compilation
from mesh_tensorflow._mesh.random_values import key_is_of_step, new_key
from mesh_tensorflow._mesh.step_inputs import GlobalSteps, read_before_increments
from mesh_tensorflow._mesh.variables.checkpoint_files import Apart
from mesh_tensorflow.pjrt._building import Building
from mesh_tensorflow.pjrt._hosts import driving, process_count
from mesh_tensorflow.pjrt._sessions.executor import Description, VariableOfProgram
from mesh_tensorflow.pjrt._sessions.part import Part, cut
from mesh_tensorflow.pjrt._sessions.programs import current_programs
from mesh_tensorflow.pjrt._sessions.variable import SessionVariable
from mesh_tensorflow.pjrt._store import form_of

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.gspmd import GspmdMeshImpl
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
    of its results is fetched. Assignments to variables of TensorFlow, such as the global step, are
    left to the session, after the program. In several processes, call it within `run_in_chief`.

    Args:
      computation: a function of `inputs` that returns tf.Tensors and tf.Operations, in lists,
        tuples or dictionaries.
      inputs: tf.Tensors.
      devices: JAX devices, one for each processor; the first of all if None.

    Returns:
      What `computation` returns, with a tf.Tensor or tf.Operation of the calling graph for each.

    Raises:
      ValueError: it is called in eager code, within another program, or in several processes
        outside of `run_in_chief`; the computation makes no GspmdMeshImpl or several ones, or it
        uses a resource of TensorFlow such as a table.
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

    def traced(*arguments: tf.Tensor) -> list[tf.Tensor]:
        made_outside = tf.variable_creator_scope(_made_outside)
        with annotating(building), steps.in_program(), made_outside:
            results = computation(*arguments)
        structure.append(results)
        return [_as_tensor(y) for y in tf.nest.flatten(results)]

    tensors = [tf.convert_to_tensor(x) for x in inputs]
    specs = [tf2.TensorSpec(x.shape, x.dtype) for x in tensors]
    with tf.variable_creator_scope(steps.made):
        concrete = tf2.function(traced, autograph=False).get_concrete_function(*specs)
    part = cut(concrete, tensors, building.variables)
    read_before_increments([x.op for x in part.given])
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


class _SessionProgram:
    """A program that a session calls."""

    def __init__(self, part: Part, building: _Building, devices: Optional[Sequence[Any]]):
        impls = building.impls
        if len(impls) != 1:
            raise ValueError(
                f"a program of mtf.pjrt.in_session runs on {len(impls)} meshes: lower it "
                "with one mtf.GspmdMeshImpl"
            )
        self._part, self._programs = part, current_programs()
        description = _description(part, building, impls[0], devices)
        self._number = self._programs.define(description, part.graph_def)
        # Otherwise the arrays of a graph that is gone would stay on the devices.
        weakref.finalize(self, self._programs.forget, self._number)
        for v in building.variables.values():
            v.is_kept_by(self)

    def results(self) -> list[tf.Tensor]:
        """Returns the results, as tensors of the session's graph."""
        part = self._part
        with tf.device("/cpu:0"):
            made = tf.py_function(self._run, part.given, [y.dtype for y in part.computed])
        made = [made] if isinstance(made, tf.Tensor) else list(made)
        for result, y in zip(made, part.computed):
            result.set_shape(y.shape)
        count = len(made) - len(part.updates)
        values = iter(made[:count])
        with contextlib.ExitStack() as stack:
            for update, value in zip(part.updates, made[count:]):
                stack.enter_context(tf.control_dependencies([update.make(value)]))
            return [self._result(i, y, values) for i, y in enumerate(part.results)]

    def _result(
        self, i: int, computed: Optional[tf.Tensor], values: Iterator[tf.Tensor]
    ) -> tf.Tensor:
        """Returns a result, after the assignments of the session."""
        if computed is not None:
            value = next(values)
            # Made within the control dependencies: a fetch of any result also does the assignments.
            return tf.identity(value) if self._part.updates else value
        handle = self._part.read[i]
        dtype = tf.as_dtype(handle.op.get_attr("dtype"))
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        value.set_shape(tf.TensorShape(handle.op.get_attr("shape")))
        return value

    def _run(self, *given: Any) -> list[np.ndarray]:
        """Does a step; called in eager mode by the session."""
        return self._programs.run(self._number, [x.numpy() for x in given])

    def array(self, name: str) -> Optional[jax.Array]:
        """Returns a variable, or None if it has no value yet."""
        return self._programs.array(self._number, name)

    def value(self, name: str) -> np.ndarray:
        """Returns the whole value of a variable."""
        return self._programs.value(self._number, name)

    def assign(self, name: str, value: np.ndarray) -> None:
        """Sets a variable."""
        self._programs.assign(self._number, name, value)

    def apart(self, name: str, dtype: tf.DType) -> Optional[Apart]:
        """Returns how several processes save a variable; None if there is one process."""
        programs = self._programs
        return Apart(programs, self._number, name, dtype) if programs.are_apart else None


def _description(
    part: Part, building: _Building, impl: GspmdMeshImpl, devices: Optional[Sequence[Any]]
) -> Description:
    """Returns what a program is, as other processes are told."""

    def axes(layout: Optional[TensorLayout]) -> Optional[list[Optional[int]]]:
        return None if layout is None else list(layout)

    read = {name: x.name for name, x in part.variables.items()}
    variables = {
        name: VariableOfProgram(read.get(name), v.sizes, v.dtype.name, axes(v.form.layout))
        for name, v in building.variables.items()
    }
    return Description(
        mesh=[(d.name, d.size) for d in impl.shape],
        devices=None if devices is None else [device.id for device in devices],
        arguments=[x.name for x in part.arguments],
        layouts=[axes(building.layout(x)) for x in part.arguments],
        variables=variables,
        fetches=[y.name for y in [*part.computed, *part.new]],
        result_layouts=[axes(building.layout(y)) for y in part.computed],
        assigned=part.assigned,
    )

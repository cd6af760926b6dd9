"""Assignments to variables, reads at another point than the beginning of the step, and hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.operation import Cost, LaidOutLike, Operation
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.ops._variables.variable import Variable

if TYPE_CHECKING:
    from mesh_tensorflow._lowering.lowering import Lowering

__all__ = [
    "Assign",
    "MtfCheckpointSaverListener",
    "MtfRestoreHook",
    "ReadVariable",
    "assign",
    "assign_add",
    "assign_add_slice",
    "assign_slice",
    "assign_sub",
    "assign_sub_slice",
    "read_variable",
]


def _variable_of(var: Union[Tensor, Variable], what: str) -> Variable:
    """Returns the Variable that a Tensor is computed from by operations of one input each."""
    x: Any = var.value if isinstance(var, Variable) else var
    while not isinstance(x.operation, Variable):
        if len(x.operation.inputs) != 1:
            raise ValueError(
                f"{what}: {var} does not come from a variable by operations of one input: "
                f"{x.operation} has {len(x.operation.inputs)}"
            )
        x = x.operation.inputs[0]
    return x.operation


def earlier_assignments(lowering: Lowering, variables: Sequence[Variable]) -> list[tf.Operation]:
    """Returns the last assignments so far, if a step carries out all of them, in order."""
    graph = variables[0].graph
    # Where only what is asked for runs, to wait for an assignment would carry it out unasked.
    if graph.assigns != "all" or not lowering.mesh_impl(variables[0]).supports_control_dependencies:
        return []  # a program of a compiler is in order by itself
    last = [lowering.assigned.get(v) for v in variables]
    # One operation may be the last assignment to several variables.
    return list(dict.fromkeys(op for op in last if op is not None))


def note_read(lowering: Lowering, variable: Variable, value: LaidOutLike) -> None:
    """Makes later assignments to a variable wait for a read, where `earlier_assignments` orders.

    Args:
      lowering: the Lowering.
      variable: the Variable.
      value: what was read.
    """
    ordered = lowering.mesh_impl(variable).supports_control_dependencies
    # Eager code, like a compiler's program, is done in the order in which it is written.
    if variable.graph.assigns != "all" or not ordered or tf.executing_eagerly():
        return
    before = lowering.assigned.get(variable)
    reads = [t.op for t in value.to_laid_out_tensor().all_slices]
    # The read takes the place of the last assignment: what waits for that waits for both.
    lowering.assigned[variable] = tf.group([*([] if before is None else [before]), *reads])


class ReadVariable(Operation):
    """Reads the value of a variable at this point of the program."""

    takes_padding = True

    def __init__(self, var: Variable, name: Optional[str] = None):
        """Creates the operation; see `read_variable`."""
        # The value of the step's beginning is an input, so that gradients pass through to it.
        super().__init__(var.outputs, name=name or "read_variable")
        self._var = var
        self._outputs = [Tensor(self, var.shape, var.activation_dtype)]

    @property
    def variable(self) -> Variable:
        """The variable that it reads."""
        return self._var

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Passes the gradient on."""
        return list(grad_ys)

    def lower(self, lowering: Lowering) -> None:
        """Reads the slice variables, and casts to the activation dtype."""
        mesh_impl = lowering.mesh_impl(self)
        # Otherwise nothing would say whether this read, or the assignment before it, comes first.
        with tf.control_dependencies(earlier_assignments(lowering, [self._var])):
            read = lowering.variables[self._var].read()
            value = self._var.cast_to_activation(mesh_impl, read)
        note_read(lowering, self._var, read)
        lowering.set_tensor_lowering(self.outputs[0], value)


def read_variable(var: Union[Tensor, Variable]) -> Tensor:
    """Returns the value of a variable, read at this point of the program.

    >>> w = mtf.get_variable(mesh, "w", "d:3", initializer=tf.ones_initializer())
    >>> update = mtf.assign_add(w, mtf.ones_like(w))
    >>> after = mtf.read_variable(w)
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:1", "", [""])
    >>> lowering = mtf.Lowering(graph, {mesh: impl})
    >>> print(lowering.export_to_tf_tensor(after).numpy())
    [2. 2. 2.]

    Args:
      var: a Variable, or a Tensor computed from one by operations of one input each.
    """
    return ReadVariable(_variable_of(var, "read_variable")).outputs[0]


def assign_slice(variable: Variable, slice_var: tf.Variable, val: tf.Tensor) -> tf.Operation:
    """Returns a tf operation that assigns to one slice variable.

    Args:
      variable: a Variable.
      slice_var: one of its slice variables.
      val: a tf.Tensor; cast to the slices' dtype.
    """
    # By default, TensorFlow returns a variable that reads itself when it is used, and no operation.
    return slice_var.assign(tf.cast(val, variable.slice_dtype), read_value=False)


def assign_add_slice(variable: Variable, slice_var: tf.Variable, val: tf.Tensor) -> tf.Operation:
    """Returns a tf operation that adds to one slice variable; see `assign_slice`."""
    return slice_var.assign_add(tf.cast(val, variable.slice_dtype), read_value=False)


def assign_sub_slice(variable: Variable, slice_var: tf.Variable, val: tf.Tensor) -> tf.Operation:
    """Returns a tf operation that subtracts from one slice variable; see `assign_slice`."""
    return slice_var.assign_sub(tf.cast(val, variable.slice_dtype), read_value=False)


class Assign(Operation):
    """Assigns to variables, when its `lowering.lowered_operation` is run."""

    has_effect = True
    takes_padding = True

    def __init__(
        self,
        variables: Sequence[Variable],
        new_values: Sequence[Tensor],
        assign_fn: Callable = assign_slice,
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          variables: Variable operations.
          new_values: for each variable, a Tensor of its shape.
          assign_fn: takes a Variable, a slice variable and a tf value; returns a tf operation.
          name: a string or None.

        Raises:
          ValueError: a Tensor has another shape than its variable.
        """
        for v, x in zip(variables, new_values, strict=True):
            if v.shape != x.shape:
                raise ValueError(
                    f"cannot assign {x.name} {x.shape} to variable {v.name} {v.shape}: the "
                    "shapes must be equal. mtf.transpose or mtf.broadcast may bring it to it"
                )
        # The variables are no inputs: their values of the beginning of the step are not needed.
        super().__init__(new_values, mesh=variables[0].mesh, name=name or "assign")
        self._variables = list(variables)
        self._assign_fn = assign_fn

    @property
    def assign_fn(self) -> Callable:
        """The function that assigns to one slice variable."""
        return self._assign_fn

    @property
    def variables(self) -> list[Variable]:
        """The variables it assigns to."""
        return list(self._variables)

    def lower(self, lowering: Lowering) -> None:
        """Assigns each variable's slices."""
        if self.graph.assigns == "none":
            # There is an operation to run also where nothing is assigned, as in an evaluation.
            lowering.operations[self] = tf.no_op()
            return
        # Outside of the control dependencies: a sum over processors that is pending until now need
        # not wait for earlier assignments.
        values = [lowering.tensors[x].to_laid_out_tensor().all_slices for x in self.inputs]
        operations = []
        with tf.control_dependencies(earlier_assignments(lowering, self._variables)):
            for v, slices in zip(self._variables, values):
                laid_out = lowering.variables[v]
                operations.append(laid_out.assign_to_slices(self._assign_fn, slices))
        done = operations[0] if len(operations) == 1 else tf.group(operations)
        lowering.operations[self] = done
        # They are done as one: what waits for an assignment to one variable waits for all of them.
        lowering.assigned.update(dict.fromkeys(self._variables, done))

    def cost_key(self) -> tuple:
        """The slice dtypes of the variables."""
        return tuple(v.slice_dtype for v in self._variables)

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Bytes read and written."""
        moved = sum(
            # The new value is read, and the slices are written.
            2 * mesh_impl.laid_out_size(v.stored_shape) * v.slice_dtype.size
            for v in self._variables
        )
        return Cost(0, moved)


@leaves_no_node
def assign(
    var: Union[Tensor, Variable],
    new_val: Tensor,
    assign_fn: Callable = assign_slice,
    name: Optional[str] = None,
) -> Operation:
    """Returns an operation that assigns to a variable.

    >>> w = mtf.get_variable(mesh, "w", "d:3", initializer=tf.ones_initializer())
    >>> update = mtf.assign(w, 3.0 * mtf.ones_like(w))
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:1", "", [""])
    >>> lowering = mtf.Lowering(graph, {mesh: impl})
    >>> print(lowering.export_to_tf_tensor(w).numpy())
    [3. 3. 3.]

    Args:
      var: a Variable, or a Tensor computed from one by operations of one input each.
      new_val: a Tensor of its shape.
      assign_fn: takes a Variable, a slice variable and a tf value; returns a tf operation.
      name: a string or None.

    Returns:
      An Assign operation; run `lowering.lowered_operation` of it.

    Raises:
      ValueError: `var` is not computed from a variable, or the shapes differ.
    """
    return Assign([_variable_of(var, "assign")], [new_val], assign_fn=assign_fn, name=name)


def assign_add(var: Union[Tensor, Variable], new_val: Tensor) -> Operation:
    """Returns an operation that adds to a variable; see `assign`.

    >>> w = mtf.get_variable(mesh, "w", "d:3", initializer=tf.ones_initializer())
    >>> update = mtf.assign_add(w, 3.0 * mtf.ones_like(w))
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:1", "", [""])
    >>> lowering = mtf.Lowering(graph, {mesh: impl})
    >>> print(lowering.export_to_tf_tensor(w).numpy())
    [4. 4. 4.]
    """
    return assign(var, new_val, assign_fn=assign_add_slice)


def assign_sub(var: Union[Tensor, Variable], new_val: Tensor) -> Operation:
    """Returns an operation that subtracts from a variable; see `assign`.

    >>> w = mtf.get_variable(mesh, "w", "d:3", initializer=tf.ones_initializer())
    >>> update = mtf.assign_sub(w, 3.0 * mtf.ones_like(w))
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:1", "", [""])
    >>> lowering = mtf.Lowering(graph, {mesh: impl})
    >>> print(lowering.export_to_tf_tensor(w).numpy())
    [-2. -2. -2.]
    """
    return assign(var, new_val, assign_fn=assign_sub_slice)


# -- hooks that copy between masters and slices around checkpoints


class MtfRestoreHook(tf.train.SessionRunHook):
    """Copies masters to slices after a session is created or restored."""

    def __init__(self, lowering: Lowering):
        """Creates the hook.

        Args:
          lowering: a Lowering.
        """
        self._lowering = lowering
        self._copy: Any = None

    def begin(self) -> None:
        """Creates the copy operation, before the graph is finalized."""
        with tf.name_scope("mtf_restore_hook"):
            self._copy = self._lowering.copy_masters_to_slices()

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Copies masters to slices.

        Args:
          session: the new session.
          coord: unused.
        """
        # A session that replaces a lost one is new, too, and its slices lack what was restored.
        session.run(self._copy)


class MtfCheckpointSaverListener(tf.train.CheckpointSaverListener):
    """Copies slices to masters before each save."""

    def __init__(self, lowering: Lowering):
        """Creates the listener and its copy operation, before the graph is finalized.

        Args:
          lowering: a Lowering.
        """
        self._copy = lowering.copy_slices_to_masters()

    def before_save(self, session: tf.Session, global_step_value: int) -> None:
        """Copies slices to masters.

        Args:
          session: the session whose variables are saved.
          global_step_value: the global step.
        """
        # Savers know the masters alone, and training updates the slices.
        session.run(self._copy)
        tf.logging.info("copied slices to masters at step %d", global_step_value)

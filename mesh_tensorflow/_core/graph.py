"""Graph: a list of operations and variables. Mesh: a name for where they run."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Optional, Protocol, TypeVar

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import did_you_mean
from mesh_tensorflow._core.operation import Tensor, needed_operations
from mesh_tensorflow._units import counted

if TYPE_CHECKING:
    from mesh_tensorflow._core.operation import Operation
    from mesh_tensorflow._core.shape import Dimension, Shape
    from mesh_tensorflow._mesh.mesh_impl import MeshImpl
    from mesh_tensorflow._mesh.variables.store import VariableStore
    from mesh_tensorflow.ops._variable import Variable, VariableDType

__all__ = ["Graph", "Mesh", "leaves_no_node"]

F = TypeVar("F", bound=Callable)
T = TypeVar("T")


class StagesLike(Protocol):
    """Gives layers that are applied to all stages of a pipeline at once what they ask for.

    Attributes:
      dims: the dimensions of stages, which layers do not know of and never sum over.
    """

    dims: list[Dimension]

    def variable(self, name: str, shape: Shape, dtype: VariableDType, **kwargs: Any) -> Tensor:
        """Returns the values of a variable in all stages.

        Args:
          name: a string, relative to the variable scope.
          shape: a Shape, that of one stage.
          dtype: a VariableDType.
          **kwargs: further arguments of mtf.get_variable.
        """

    def random(self, shape: Shape, tf_fn: Callable, **kwargs: Any) -> Tensor:
        """Returns random values for all stages.

        Args:
          shape: a Shape.
          tf_fn: a function of a shape, such as tf.random.uniform.
          **kwargs: keyword arguments of `tf_fn`.
        """

    def check_apart(self, operations: Iterable[Operation]) -> None:
        """Checks that operations keep the stages apart.

        Raises:
          ValueError: one of them joins stages.
        """


class VariablePlacer(Protocol):
    """Chooses the devices of variables, as `mtf.utils.BalancedVariablePlacer` does."""

    def device_function(self, var: tf.Operation) -> str:
        """Returns the device of a variable.

        Args:
          var: the tf operation that makes it.
        """


class _ByName(dict):
    """Variables by name; a KeyError names the nearest one."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(f"no variable {name!r} in the graph{did_you_mean(name, self)}")


class GraphMark(NamedTuple):
    """The contents of a Graph at some time: numbers of entries; of names, in their journal."""

    operations: int
    names: int
    variables: int
    trainable: int
    random: int


class Graph:
    """A program: its operations, in order of creation, and its variables.

    It is independent of devices. A `Lowering` turns it into TensorFlow operations.

    Attributes:
      captured_variable_scope: the tf variable scope where the graph was created; gradient
        operations are named under it.
      name_to_variable: Variable operations by their full names.
      stacked_values: from the values of variables that were stacked to their replacements.
      inspected: the Tensors that were given to `mtf.inspect`, by their names there.
      variable_store: the VariableStore of variables that were created in eager code, or None.
      differentiated: the operation whose gradient is being built, or None.
      looked_at: the values of Tensors that eager code has looked at; None if there are none.
      names_lent: dimension names that operations took from a layout, as attention does to be split
        further; a misspelled one is in the program by that alone.
      stages: what gives layers variables and random values while a pipeline is built, and while a
        gradient function that a layer has given is called; else None.
      captured_in: another object within each function whose operations are captured, such as the
        body of a loop or what is recomputed; None outside. Tensors made within one may not have a
        value outside of it.
      assigns: which assignments a step carries out: "asked", those whose lowered operation is run;
        "all", in the order of the program; or "none", as in an evaluation.
    """

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._trainable_variables: list[Variable] = []
        self._all_variables: list[Variable] = []
        # By name without case, the number that is tried first for the next one. To begin at 1 each
        # time would take quadratic time for many layers of one name.
        self._names_in_use: dict[str, int] = {}
        # The previous entry of each name that was taken, so that a failed call can be undone.
        self._name_journal: list[tuple[str, Optional[int]]] = []
        self._scope: Optional[tuple[str, str]] = None
        self._random_operations = 0
        # What holds the values of Tensors that were looked at in eager code; see _lowering/values.
        self.looked_at: Any = None
        self.name_to_variable: dict[str, Variable] = _ByName()
        self.stacked_values: dict[Tensor, Tensor] = {}
        self.inspected: dict[str, Tensor] = {}
        self.names_lent: set[str] = set()
        self.variable_store: Optional[VariableStore] = None
        self.differentiated: Optional[Operation] = None
        self.stages: Optional[StagesLike] = None
        self.captured_in: Optional[object] = None
        self.assigns: Literal["asked", "all", "none"] = "asked"
        self.captured_variable_scope = tf.get_variable_scope()
        # By mesh, the stored layout that its variables have, once it is lowered with one.
        self.stored_layouts: Optional[dict[Mesh, Any]] = None
        # Whether rewrite_stack_variables was called; it is called once.
        self.is_stacked = False

    def __repr__(self) -> str:
        parameters = sum(v.size for v in self._all_variables)
        return (
            f"<Graph: {counted(len(self._operations), 'operation')}, "
            f"{counted(len(self._all_variables), 'variable')} "
            f"({len(self._trainable_variables)} trainable), {counted(parameters, 'parameter')}>"
        )

    def __str__(self) -> str:
        return self.to_string

    @property
    def operations(self) -> list[Operation]:
        """The operations, in order of creation."""
        return self._operations

    @property
    def trainable_variables(self) -> list[Variable]:
        """The Variable operations that optimizers update."""
        return self._trainable_variables

    @property
    def all_variables(self) -> list[Variable]:
        """All Variable operations."""
        return self._all_variables

    @property
    def _name_to_variable(self) -> dict[str, Variable]:
        """The name that `name_to_variable` had in early releases."""
        return self.name_to_variable

    @property
    def to_string(self) -> str:
        """One line for each operation."""
        return "\n".join(op.to_string for op in self._operations)

    # -- registration, called by Operation and Variable

    def register(self, operation: Operation) -> None:
        """Adds an operation, called by its constructor."""
        # Noted here: a Tensor of a tf.function may be asked for its value in eager code afterwards.
        operation.is_eager = tf.executing_eagerly()
        self._operations.append(operation)

    def register_variable(self, variable: Variable, trainable: bool) -> None:
        """Adds a Variable operation to the lists of variables."""
        self._all_variables.append(variable)
        if trainable:
            self._trainable_variables.append(variable)
        self.name_to_variable[variable.name] = variable

    def next_random_operation(self) -> int:
        """Returns a number for a random operation, so that seeds depend on the program alone."""
        self._random_operations += 1
        return self._random_operations

    # -- names

    def unique_name(self, name: str, mark_as_used: bool = True) -> str:
        """Returns `name` under the current variable scope, with _1, _2, ... if it is taken.

        Names are unique ignoring case.

        Args:
          name: a string.
          mark_as_used: whether to mark the result as taken.
        """
        scope = tf.get_variable_scope().name
        if self._scope is not None:
            prefix, outer = self._scope
            # Variable scopes that were entered within `scope` still count; those around it do not.
            # Whole parts of the path: "foobar" is not within "foo".
            within = not outer or scope == outer or scope.startswith(f"{outer}/")
            inner = scope[len(outer) :].strip("/") if within else scope
            scope = f"{prefix}/{inner}" if inner else prefix
        if scope:
            name = f"{scope}/{name}"
        # TensorFlow's own graphs compare names without case, and a name here should be one there.
        key = name.lower()
        count = self._names_in_use.get(key, 0)
        unique = name
        if count:
            while f"{key}_{count}" in self._names_in_use:
                count += 1
            unique = f"{name}_{count}"
        if mark_as_used:
            self._take_name(key, count + 1)
            # A program may itself ask for the name with its number, which is taken from now on.
            if unique != name:
                self._take_name(unique.lower(), 1)
        return unique

    def _take_name(self, key: str, count: int) -> None:
        self._name_journal.append((key, self._names_in_use.get(key)))
        self._names_in_use[key] = count

    @contextlib.contextmanager
    def scope(self, prefix: str) -> Iterator[None]:
        """Names operations created within under `prefix`, regardless of the variable scope outside.

        It is much cheaper than `tf.variable_scope`, and creates no tf name scope.
        """
        # With the variable scope of now, which names made within are not to repeat.
        saved, self._scope = self._scope, (prefix, tf.get_variable_scope().name)
        try:
            yield
        finally:
            self._scope = saved

    @contextlib.contextmanager
    def gradient_scope(self, op: Operation) -> Iterator[None]:
        """Names operations created within under "gradients" of `op`, and records `op` in them."""
        outer, self.differentiated = self.differentiated, op
        try:
            # Outside of stages: the gradients of this package go by shapes that have them.
            with self.scope(f"{op.name}/gradients"), self.within(None):
                yield
        finally:
            self.differentiated = outer

    @contextlib.contextmanager
    def within(self, stages: Optional[StagesLike]) -> Iterator[None]:
        """Lets operations created within be those of layers of a pipeline; of none if None."""
        before, self.stages = self.stages, stages
        try:
            yield
        finally:
            # Also after an error: later operations of the graph would be of these stages otherwise.
            self.stages = before

    # -- rewriting; implemented in _lowering

    @gin.configurable("rewrite_stack_variables", module="mesh_tensorflow.ops")
    def rewrite_stack_variables(
        self,
        max_combined_variable_size: int = 2**29,
        max_combined_slice_size: int = 2**27,
        mesh_to_impl: Optional[Mapping[Mesh, MeshImpl]] = None,
    ) -> None:
        """Replaces similar variables by StackedVariables, in place.

        Args:
          max_combined_variable_size: maximum number of elements of a stacked variable.
          max_combined_slice_size: maximum number of elements of one processor's slice of it.
          mesh_to_impl: a dictionary from Mesh to MeshImpl, or None.

        Raises:
          ValueError: it was called on this graph before.
        """
        # Not at the top of the file: _lowering imports this module.
        from mesh_tensorflow._lowering import rewrites

        rewrites.rewrite_stack_variables(
            self, max_combined_variable_size, max_combined_slice_size, mesh_to_impl
        )

    def combine_assignments(self, assignments: Sequence[Operation]) -> list[Operation]:
        """Joins Assign operations that have the same assign function, and removes the given ones.

        Args:
          assignments: Assign operations.

        Returns:
          A list of Assign operations.
        """
        from mesh_tensorflow._lowering import rewrites

        return rewrites.combine_assignments(self, assignments)

    def make_variables_untrainable(self, variables: Iterable[Variable]) -> None:
        """Removes Variable operations from the trainable ones."""
        variables = list(variables)
        chosen = {id(v) for v in variables}
        self._trainable_variables = [v for v in self._trainable_variables if id(v) not in chosen]
        for v in variables:
            v._trainable = False

    def clone_operations(
        self, ops: Sequence[Operation], input_mapping: Mapping[Tensor, Tensor]
    ) -> tuple[list[Operation], dict[Tensor, Tensor]]:
        """Copies operations with other inputs.

        What has no inputs is not copied: values of variables and random values are reused. Nor are
        operations with effects: an assignment is not done twice.

        Args:
          ops: operations, in topological order.
          input_mapping: a dictionary from Tensor to the Tensor that replaces it.

        Returns:
          (the copies, the mapping extended by the outputs of `ops`).
        """
        mapping = dict(input_mapping)
        clones = []
        for op in ops:
            # A recomputed layer must drop the same elements. All else is copied, also if it reads
            # weights alone: a gradient function walks the copies to find the gradients of these.
            if not op.inputs:
                continue
            if op.has_effect:
                # Its outputs are its first inputs, so readers of them in the copy take those.
                mapping.update((y, mapping.get(x, x)) for x, y in zip(op.inputs, op.outputs))
                continue
            clone = copy.copy(op)
            # Its last part only: the scopes in force now, as of a gradient, come before it.
            clone._name = self.unique_name(op._name.split("/")[-1])
            clone.replace_inputs(mapping)
            clone._copy_outputs(op)
            clone.original, clone.gradient_of = op, self.differentiated
            mapping.update(zip(op.outputs, clone.outputs))
            clone.cloned_from(op, mapping)
            # copy.copy calls no constructor, which would have added it.
            self._operations.append(clone)
            clones.append(clone)
        return clones, mapping

    def capture_operations(self, fn: Callable[[], T]) -> tuple[T, list[Operation]]:
        """Calls `fn` and returns the operations that it creates.

        Args:
          fn: a function of no arguments.

        Returns:
          (the result of `fn`, the operations that it created, which are also in the graph).
        """
        start = len(self._operations)
        before, self.captured_in = self.captured_in, object()
        try:
            return fn(), self._operations[start:]
        finally:
            self.captured_in = before

    def take_operations(self, fn: Callable[[], T]) -> tuple[T, list[Operation]]:
        """Calls `fn` and removes the operations that it creates from the graph.

        Args:
          fn: a function of no arguments.

        Returns:
          (the result of `fn`, the operations that it created).
        """
        result, captured = self.capture_operations(fn)
        del self._operations[len(self._operations) - len(captured) :]
        return result, captured

    def drop_unread(self, start: int, outputs: Sequence[Tensor]) -> None:
        """Removes operations whose results nothing reads.

        Args:
          start: the number of operations of the graph that stay as they are, its first ones.
          outputs: Tensors of later operations that will be read.
        """
        self._operations[start:] = needed_operations(self._operations[start:], outputs)

    # -- undoing a failed call

    def mark(self) -> GraphMark:
        """Returns a mark of the current contents of the graph, for `roll_back`."""
        # Numbers and no copies, since each operation takes a mark.
        return GraphMark(
            len(self._operations),
            len(self._name_journal),
            len(self._all_variables),
            len(self._trainable_variables),
            self._random_operations,
        )

    def roll_back_names(self, length: int) -> None:
        """Releases the names taken since the journal had `length` entries."""
        while len(self._name_journal) > length:
            # Backward, since a name may have been taken several times since the mark.
            key, before = self._name_journal.pop()
            if before is None:
                del self._names_in_use[key]
            else:
                self._names_in_use[key] = before

    def roll_back(self, mark: GraphMark) -> None:
        """Removes everything added since `mark` was taken."""
        del self._operations[mark.operations :]
        self.roll_back_names(mark.names)
        # TensorFlow's own graph takes nothing back, so the tf variables of these stay there.
        for v in self._all_variables[mark.variables :]:
            self.name_to_variable.pop(v.name, None)
        del self._all_variables[mark.variables :]
        del self._trainable_variables[mark.trainable :]
        # So a call that is corrected and made again draws the numbers that it would have drawn.
        self._random_operations = mark.random


class Mesh:
    """A name for a set of processors; a MeshImpl defines them.

    >>> import mesh_tensorflow as mtf
    >>> mtf.Mesh(mtf.Graph(), "mesh")
    Mesh('mesh')

    Attributes:
      mesh_impl: the MeshImpl on which values are computed when eager code looks at a Tensor, as
        `tensor.numpy()` and `print(tensor)` do; one device if None. A Lowering is given its own.
    """

    def __init__(
        self,
        graph: Graph,
        name: str,
        variable_placer: Optional[VariablePlacer] = None,
        mesh_impl: Optional[MeshImpl] = None,
    ):
        """Creates a Mesh.

        Args:
          graph: a Graph.
          name: a string.
          variable_placer: an object with a method `device_function(var)` that returns the device
            of a master; masters are on the CPU if None.
          mesh_impl: the attribute `mesh_impl`; it may also be set later.
        """
        self._graph = graph
        self._name = name
        self._variable_placer = variable_placer
        self.mesh_impl = mesh_impl

    def __repr__(self) -> str:
        where = "" if self.mesh_impl is None else f", {self.mesh_impl!r}"
        return f"Mesh({self._name!r}{where})"

    @property
    def graph(self) -> Graph:
        """The Graph it belongs to."""
        return self._graph

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def variable_placer_fn(self) -> str | Callable[[tf.Operation], str]:
        """The argument of `tf.device` for masters: a device, or a function that returns one."""
        if self._variable_placer is None:
            return "cpu:0"
        return self._variable_placer.device_function


def _graph_of(value: object) -> Optional[Graph]:
    if isinstance(value, (Tensor, Mesh)):
        return value.graph
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((g for g in map(_graph_of, value) if g is not None), None)
    return None


def leaves_no_node(fn: F) -> F:
    """Makes a function remove the operations that it created if it raises."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        graph = next((g for g in map(_graph_of, (*args, *kwargs.values())) if g is not None), None)
        if graph is None:
            return fn(*args, **kwargs)
        mark = graph.mark()
        try:
            return fn(*args, **kwargs)
        # Also if a notebook's cell is interrupted: the graph is used on in the next one.
        except BaseException:
            graph.roll_back(mark)
            raise

    return wrapper  # type: ignore[return-value]

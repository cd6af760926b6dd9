"""Trace: a program as a function of its arguments, its variables and the keys of random numbers.

Both `mtf.pjrt.function` and `mtf.pjrt.in_session` (`_in_session.py`) build a TensorFlow
graph with a placeholder for each variable, which XLA then compiles.
"""

from __future__ import annotations

import contextvars
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import jax
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from jax.sharding import NamedSharding
from tensorflow.python.eager import context

from mesh_tensorflow._calls import within
from mesh_tensorflow._core.layout import TensorLayout
from mesh_tensorflow._mesh.gspmd import Compilation, GspmdMeshImpl, annotating
from mesh_tensorflow._mesh.random_values import key_is_of_step, new_key
from mesh_tensorflow._quiet import not_advised
from mesh_tensorflow._watching import NodeNames, names_in_current_graph, nan_checks_in_force
from mesh_tensorflow.pjrt._devices import AnyMesh, described, sharding

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.variables.store import Form
    from mesh_tensorflow.ops._variable import Variable
    from mesh_tensorflow.pjrt._store import ArrayStore

_NUMBERS = itertools.count()  # of programs that are imported


class Building(Compilation):
    """A program that is built, and the layouts of its values."""

    def __init__(self) -> None:
        self._layouts: dict[Any, TensorLayout] = {}  # of values, by reference

    def has_layout(self, value: tf.Tensor, layout: TensorLayout) -> None:
        """Notes the layout of a value, the first if it is that of several tensors."""
        self._layouts.setdefault(value.ref(), layout)

    def layout(self, value: tf.Tensor) -> Optional[TensorLayout]:
        """Returns the layout of an argument or a result; None if each device has all of it."""
        # Results are identities of the tensors whose layouts were noted.
        while value.ref() not in self._layouts and value.op.type == "Identity":
            value = value.op.inputs[0]
        return self._layouts.get(value.ref())


class ValueOfVariable:
    """A variable within a program that is built: its value then, and after each assignment.

    It has the methods of a tf.Variable that operations call.

    Attributes:
      variable: the Variable.
      form: the form in which it is stored.
      sizes: its shape.
      first: a placeholder for the value at the beginning of the program.
      value: the value at this point of the program.
    """

    device = ""

    def __init__(self, variable: Variable, form: Form):
        """Creates the variable, and the placeholder in the default graph."""
        self.variable, self.form = variable, form
        self.sizes = variable.shape.to_integer_list
        self.first = tf.placeholder(variable.slice_dtype, self.sizes)
        self.value: tf.Tensor = self.first

    @property
    def shape(self) -> tf.TensorShape:
        """Its shape."""
        return tf.TensorShape(self.sizes)

    @property
    def dtype(self) -> tf.DType:
        """Its dtype, that of slices."""
        return self.variable.slice_dtype

    def read_value(self) -> tf.Tensor:
        """Returns the value at this point of the program."""
        return self.value

    def assign(self, value: Any, read_value: bool = True) -> Any:
        """Sets the value from here on; returns it, or an operation if not `read_value`.

        Raises:
          ValueError: it is called within a loop, whose values are not those of the program.
        """
        value = tf.convert_to_tensor(value, self.dtype)
        if not self._is_of_program(value.graph):
            raise ValueError(
                f"variable {self.variable.name!r} is assigned to within a loop of TensorFlow. On "
                "devices of JAX, carry its value through the loop, and assign after it"
            )
        # Reads after this take the new tensor; the last one is what the program gives the variable.
        self.value = value
        return value if read_value else value.op

    def _is_of_program(self, graph: tf.Graph) -> bool:
        return graph is self.first.graph

    def assign_add(self, value: Any, read_value: bool = True) -> Any:
        """Adds to the value; see `assign`."""
        return self.assign(self.read_value() + value, read_value)

    def assign_sub(self, value: Any, read_value: bool = True) -> Any:
        """Subtracts from the value; see `assign`."""
        return self.assign(self.read_value() - value, read_value)


# Each thread has its own, as several may build functions at once.
_current: contextvars.ContextVar[Optional[_Building]] = contextvars.ContextVar(
    "pjrt_trace", default=None
)


def mesh_impl() -> GspmdMeshImpl:
    """Returns the mesh implementation of the `mtf.pjrt.function` that is being built.

    Raises:
      ValueError: it is called elsewhere.
    """
    return current_trace().mesh_impl


def current_trace() -> _Building:
    """Returns the trace that is being made.

    Raises:
      ValueError: there is none.
    """
    building = _current.get()
    if building is None:
        raise ValueError(
            "mtf.pjrt.mesh_impl() is the mesh implementation within a function of "
            "mtf.pjrt.function, and variables of its store are used there: call it while that "
            "function runs. Elsewhere, make an mtf.GspmdMeshImpl"
        )
    return building


class _Building(Building):
    """What is found out about a program while it is built.

    Attributes:
      mesh_impl: the mesh implementation.
      store: where its variables are.
      variables: the variables, by name.
      seeds: those of the keys of random numbers.
      keys: placeholders for these keys.
      results: the tensors that the program returns.
      structure: what it returns, with a number for each result.
    """

    results: list[tf.Tensor]
    structure: Any

    def __init__(self, mesh_impl: GspmdMeshImpl, store: ArrayStore):
        super().__init__()
        self.mesh_impl, self.store = mesh_impl, store
        self.variables: dict[str, ValueOfVariable] = {}
        self.seeds: list[Optional[int]] = []
        self.keys: list[tf.Tensor] = []

    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a key, which is drawn outside of the program, unless it depends on a step."""
        # A function of the step can be computed in the program; what differs from run to run
        # cannot, since XLA's programs have no state.
        if key_is_of_step(seed):
            return new_key(seed)
        self.seeds.append(seed)
        self.keys.append(tf.placeholder(tf.uint32, [4]))
        return self.keys[-1]

    @property
    def assigned(self) -> list[str]:
        """The names of the variables that get new values."""
        # By identity: a program that only reads a variable returns nothing for it, and its memory
        # is not given away.
        return [name for name, v in self.variables.items() if v.value is not v.first]

    def complete(self, returned: Any) -> list[tf.Tensor]:
        """Returns results and new values of variables, in the graph of the program."""
        flat = [_as_tensor(value) for value in tf2.nest.flatten(returned)]
        self.results = [value for value in flat if value is not None]
        numbers = iter(range(len(self.results)))
        # A number stands for each tensor. A call puts the array that the step returned in its
        # place.
        self.structure = tf2.nest.pack_sequence_as(
            returned, [None if value is None else next(numbers) for value in flat]
        )
        fetches = [*self.results, *(self.variables[name].value for name in self.assigned)]
        # An identity of each, since an argument that is returned cannot be fed as well.
        return [tf.identity(fetch) for fetch in fetches]


@dataclasses.dataclass(frozen=True)
class Trace:
    """A program as a function of arrays.

    Attributes:
      function: takes the arguments, the keys and the values of the variables; returns the results
        and the new values of variables.
      arguments: the arguments.
      keys: the keys of random numbers.
      results: the sharding of each result.
      variables: the variables by name.
      assigned: the names of those that get new values.
      draw_keys: returns the keys of a step.
      values: the variables within the program, by name.
      structure: what the function returns, with a number for each result.
      is_checked: whether it has checks for NaNs, for which TensorFlow runs it, and not XLA.
      node_names: the tables by which its errors are told.
    """

    function: Callable[..., Any]
    arguments: list[jax.ShapeDtypeStruct]
    keys: list[jax.ShapeDtypeStruct]
    results: list[NamedSharding]
    variables: Mapping[str, jax.ShapeDtypeStruct]
    assigned: Sequence[str]
    draw_keys: Callable[[], Sequence[Any]] = list
    values: Mapping[str, ValueOfVariable] = dataclasses.field(default_factory=dict)
    structure: Any = None
    is_checked: bool = False
    node_names: Sequence[NodeNames] = ()


def trace(
    program: Callable[..., Any],
    specs: Sequence[tf.TensorSpec],
    mesh_impl: GspmdMeshImpl,
    store: ArrayStore,
    mesh: AnyMesh,
) -> Trace:
    """Builds a program, and returns it as a function.

    Args:
      program: a function of a list of tf.Tensors.
      specs: what the tensors are.
      mesh_impl: the mesh implementation.
      store: where its variables are.
      mesh: the mesh of devices.

    Raises:
      ValueError: the program uses a tf.Variable.
    """
    building = _Building(mesh_impl, store)
    inputs: list[tf.Tensor] = []
    node_names: list[NodeNames] = []

    def build() -> list[tf.Tensor]:
        inputs.extend(tf.placeholder(spec.dtype, spec.shape) for spec in specs)
        with store.scope(), annotating(building):
            returned = program(inputs)
        node_names.extend(names_in_current_graph())
        return building.complete(returned)

    with within(_current, building):
        wrapped = tf.wrap_function(build, [])
    _check_captures(wrapped.graph)
    variables = building.variables
    # In the order in which the function of a Trace takes its values.
    feeds = [*inputs, *building.keys, *(v.first for v in variables.values())]
    return Trace(
        _function_of(wrapped.graph, feeds, wrapped.outputs),
        [described(mesh, x.shape, x.dtype, building.layout(x)) for x in inputs],
        [described(mesh, [4], tf.uint32, None)] * len(building.keys),
        [sharding(mesh, building.layout(y)) for y in building.results],
        # As variables are stored, which with ZeRO is in smaller parts than they are computed with.
        {n: described(mesh, v.sizes, v.dtype, v.form.layout) for n, v in variables.items()},
        building.assigned,
        _key_function(building.seeds),
        variables,
        building.structure,
        nan_checks_in_force() is not None,
        node_names,
    )


def _function_of(
    graph: tf.Graph, feeds: Sequence[tf.Tensor], fetches: Sequence[tf.Tensor]
) -> Callable[..., list[tf.Tensor]]:
    """Returns a function of feeds that makes the operations of a graph in the default one."""
    names = list(dict.fromkeys(fetch.op.name for fetch in fetches))
    with not_advised():
        # What no result depends on stays out, such as a function of Python, for which XLA has no
        # kernel.
        needed = tf.graph_util.extract_sub_graph(graph.as_graph_def(), names)
    fed = [feed.op.name for feed in feeds]
    inside = {node.name for node in needed.node}.difference(fed)
    return imported(operations_of(needed, inside), fed, [fetch.name for fetch in fetches])


def operations_of(whole: tf.GraphDef, names: Collection[str]) -> tf.GraphDef:
    """Returns some of a graph's operations.

    Args:
      whole: the graph.
      names: the names of the operations. What they take from others has to be fed.
    """
    # With the library, in which the bodies of loops and conditions are.
    subgraph = tf.GraphDef(versions=whole.versions, library=whole.library)
    for node in whole.node:
        if node.name in names:
            subgraph.node.append(node)
            # What is fed is there when the program begins, and no operation to wait for.
            inputs = [x for x in node.input if not x.startswith("^") or x[1:] in names]
            subgraph.node[-1].input[:] = inputs
            # Gradients ask to be where other operations are, which may not be kept. XLA compiles
            # all of them into one program.
            subgraph.node[-1].attr.pop("_class", None)
    return subgraph


def imported(
    graph_def: tf.GraphDef, feeds: Sequence[str], fetches: Sequence[str]
) -> Callable[..., list[tf.Tensor]]:
    """Returns a function that makes the operations of a graph in the default one.

    `prune` of a function of TensorFlow copies operations one at a time, and takes as long for it
    as it took to make them. A GraphDef is imported as a whole.

    Args:
      graph_def: the operations, from `operations_of`.
      feeds: the operations whose results the function takes, by name; "" for what is not used.
      fetches: the names of the tensors that it returns.
    """
    # Without those that nothing depends on: an import refuses names that it does not find.
    used = {name for node in graph_def.node for name in node.input}.intersection(feeds)
    whole, functions = _with_own_functions(graph_def)

    def function(*values: Any) -> list[tf.Tensor]:
        fed = zip(feeds, values)
        inputs = {name: tf.convert_to_tensor(value) for name, value in fed if name in used}
        return tf.import_graph_def(whole, inputs, list(fetches), name="program")

    for name in functions:
        weakref.finalize(function, context.context().remove_function, name).atexit = False
    return function


def _with_own_functions(graph_def: tf.GraphDef) -> tuple[tf.GraphDef, list[str]]:
    """Returns a graph whose functions, the bodies of loops, are known to TensorFlow by own names.

    An import leaves them in the graph, where XLA does not look for them. By the names that they
    had, TensorFlow knows them only in the process that made them, until it collects that graph.
    """
    whole = tf.GraphDef()
    whole.CopyFrom(graph_def)
    functions = whole.library.function
    number = next(_NUMBERS)
    names = {f.signature.name: f"{f.signature.name}_of_program_{number}" for f in functions}
    for gradient in whole.library.gradient:
        gradient.function_name = names.get(gradient.function_name, gradient.function_name)
        gradient.gradient_func = names.get(gradient.gradient_func, gradient.gradient_func)
    for node in itertools.chain(whole.node, *(f.node_def for f in functions)):
        node.op = names.get(node.op, node.op)
        for value in node.attr.values():
            for called in [*value.list.func, *([value.func] if value.HasField("func") else [])]:
                called.name = names.get(called.name, called.name)
    for function in functions:
        function.signature.name = names[function.signature.name]
        context.context().add_function_def(function)
    return whole, list(names.values())


def _as_tensor(value: Any) -> Optional[tf.Tensor]:
    """Returns a result as a tensor; None for an operation, whose effect is in the variables."""
    return None if value is None or isinstance(value, tf.Operation) else tf.convert_to_tensor(value)


def _check_captures(graph: Any) -> None:
    """Raises an error if the program uses a tf.Variable, or another resource of TensorFlow."""
    names = {v.handle.ref(): v.name for v in graph.variables}
    resources = [
        names.get(outer.ref(), inner.name)
        for outer, inner in graph.captures
        if inner.dtype == tf.resource
    ]
    if not resources:
        return
    counted = ""
    if any(name.startswith("global_step") for name in resources):
        counted = (
            ". Optimizers and schedules read the global step where nothing else tells the number "
            "of steps: make it an argument of the function, and apply them within `with "
            "mtf.utils.counted_steps(step):`"
        )
    raise ValueError(
        f"a function of mtf.pjrt uses {len(resources)} variables or resources of TensorFlow: "
        f"{', '.join(resources)}. They are not on the devices of JAX. Pass their values as "
        f"arguments, or make the variables by mtf.get_variable{counted}"
    )


def _key_function(seeds: Sequence[Optional[int]]) -> Callable[[], Sequence[Any]]:
    """Returns a function that draws a key for each seed, the same as other implementations do."""
    if not seeds:
        return list
    draw = tf2.function(lambda: [new_key(seed) for seed in seeds], autograph=False)
    draw.get_concrete_function()  # with the seed of the program as it is now
    return lambda: [key.numpy() for key in draw()]

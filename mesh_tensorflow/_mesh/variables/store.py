"""VariableStore and mtf.function: the variables that a function or a training keeps.

The objects of a checkpoint have the path STORE/_slices/NAME, where NAME is that of a variable. Its
value is a tensor that is saved and restored in the slices of the current layout. Checkpoints of
before this was so have the slices themselves, as objects STORE/_slices/NAME/NUMBER. These are
found, too, if the layout is the same.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np
import numpy.typing as npt
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from tensorflow.python.ops.variable_scope import get_variable_scope_store

from mesh_tensorflow._calls import within
from mesh_tensorflow._core.errors import did_you_mean, dims_text, first_names
from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.layout import TensorLayout, slice_coordinates, slice_sizes, storing
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.devices import compiling, is_compiled_whole
from mesh_tensorflow._mesh.random_values import Calls, initial_value, keys_by_call
from mesh_tensorflow._mesh.slice_functions import (
    combine_slices,
    in_own_memory,
    make_slices,
    padded,
)
from mesh_tensorflow._mesh.variables.given_values import fitting, fitting_part, given_parts
from mesh_tensorflow._mesh.variables.storage import (
    PieceSaveable,
    StorageInSlices,
    VariableStorage,
    WholeStorage,
    WholeVariable,
)
from mesh_tensorflow._units import counted
from mesh_tensorflow._watching import (
    NodeNames,
    collecting,
    hand_over,
    names_in_current_graph,
    nan_checks_in_force,
    raise_for_user,
    watch_key,
)

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.gspmd import GspmdMeshImpl
    from mesh_tensorflow.ops._variable import Variable
    from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl


@dataclasses.dataclass(frozen=True)
class Form:
    """The shape, dtype and layout in which a variable is stored.

    Attributes:
      shape: the Shape of the variable.
      dtype: the dtype of the slices.
      layout: the TensorLayout of the variable.
      mesh_shape: the Shape of the mesh.
      owner: for each processor, the number of the processor that stores its slice.
      devices: the device for which each slice was created, by the number of the owner.
    """

    shape: Shape
    dtype: tf.DType
    layout: TensorLayout
    mesh_shape: Shape
    owner: list[int]
    # Two names of one device, or devices in one memory, make no other form; the store compares
    # these itself.
    devices: dict[int, str] = dataclasses.field(compare=False)

    @property
    def sizes(self) -> list[int]:
        """The shape of a slice."""
        return slice_sizes(self.shape, self.layout, self.mesh_shape)

    def begin(self, pnum: int) -> tuple[int, ...]:
        """Returns the index of the first element of a processor's slice."""
        part = slice_coordinates(self.layout, self.mesh_shape, pnum)
        return tuple(n * size for n, size in zip(part, self.sizes))

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype.name} with {self.layout} on mesh {self.mesh_shape}"


def whole_form(shape: Shape, dtype: tf.DType) -> Form:
    """Returns the form of a variable that is not split, on a CPU."""
    return Form(shape, dtype, TensorLayout([None] * len(shape)), Shape([]), [0], {0: "cpu:0"})


def differs(name: str, known: Form, form: Form, same: bool) -> str:
    """Returns the error text for a variable that is stored in another form than requested."""
    why = (
        "A tf.function has its slices, so they stay as they are. Use another VariableStore for "
        "another layout, and move the values with store.value(name) and store.assign(name, value)"
        if same
        else "Use another name or another VariableStore"
    )
    return f"variable {name!r} is stored as {known}, but is asked for as {form}. {why}"


# -- the whole variables of a store, as eager code and checkpoints know them


class _InStore(StorageInSlices):
    """The current slices in a store; another Lowering may change their layout."""

    def __init__(self, store: VariableStore, name: str, sizes: Sequence[int], dtype: tf.DType):
        super().__init__(sizes, dtype)
        self._store, self._name = store, name

    def holders(self) -> tuple[list[int], dict[tuple[int, ...], list[tf.Variable]]]:
        return self._store.parts(self._name)

    def read(self) -> tf.Tensor:
        return tf.cast(self._store.value(self._name), self._dtype)

    def assign(self, value: tf.Tensor) -> tf.Operation:
        value.shape.assert_is_compatible_with(tf.TensorShape(self._whole))
        assignments = []
        for piece in self.pieces():
            part = value[tuple(slice(b, b + n) for b, n in zip(piece.begin, piece.sizes))]
            # A view would hold all of the value in memory for as long as the variable has it.
            assignments.append(piece.assign(in_own_memory(part, value)))
        # In eager code an assignment is done at once, and what it returns is None.
        return tf.group([op for op in assignments if op is not None])

    def is_initialized(self) -> tf.Tensor:
        # A store makes slices with their values, so there are none without.
        return tf.constant(True)


class StoredMaster(WholeVariable):
    """The whole value of a variable that a VariableStore keeps; for eager code.

    It reads, assigns, saves and restores the slices. In a tf.function the slices exist once a
    Lowering has been created.
    """

    # By this, savers of TensorFlow tell variables of eager code from those of a graph.
    _in_graph_mode = False
    # By this, a tf.GradientTape asks for the handle.
    _should_act_as_resource_variable = True

    def __init__(
        self, store: VariableStore, name: str, shape: Shape, dtype: tf.DType, trainable: bool
    ):
        """Creates a StoredMaster.

        Args:
          store: the VariableStore that keeps the variable.
          name: the full name of the variable.
          shape: its Shape.
          dtype: its dtype in checkpoints.
          trainable: whether optimizers update it.
        """
        super().__init__(trainable)
        self._variable_name = name
        self.name = f"{name}:0"  # with an output number, as TensorFlow's variables have
        self.dtype = dtype
        self.shape = tf.TensorShape(shape.to_integer_list)
        self._store = store
        self._storage = _InStore(store, name, shape.to_integer_list, dtype)

    def _at_storage(self) -> VariableStorage:
        if self._variable_name not in self._store.names:
            raise ValueError(
                f"variable {self._variable_name!r} has no value yet: in a tf.function the "
                "Lowering makes its slices. Make the Lowering first"
            )
        return self._storage

    @property
    def device(self) -> str:  # type: ignore[override]
        """The device of the first piece."""
        return self._at_storage().pieces()[0].device

    @property
    def initializer(self) -> None:
        """None: the variable is initialized already."""

    @property
    def handle(self) -> tf.Tensor:
        """The handle of the tf variable that has the whole value, by which a tape knows it.

        Raises:
          ValueError: the value is in several slices.
        """
        self._at_storage()
        slices = list(self._store.slice_variables(self._variable_name).values())
        if len(slices) != 1:
            # A tape that is to join their gradients may end the process: TensorFlow's zeros for
            # what is unconnected count on one variable for each source.
            raise ValueError(
                f"variable {self._variable_name!r} is kept in {len(slices)} slices, which a "
                "tf.GradientTape knows, and not the whole of them. Ask it for the gradients of "
                f"the slices, store.slice_variables({self._variable_name!r}); or make the "
                "gradient in the program: mtf.gradients([loss], [w])"
            )
        return slices[0].handle

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> Mapping[str, Any]:
        """Returns nothing for checkpoints; SavedModels have the slices, by way of the store."""
        if save_type != "checkpoint":
            raise ValueError(
                f"variable {self._variable_name!r} is kept in slices by a VariableStore, and "
                "tf.saved_model.save saves these, and not the whole of them. Let what is saved "
                "hold the store, module.store = store, and nothing of store.masters"
            )
        return super()._trackable_children(save_type, **kwargs)

    def numpy(self) -> np.ndarray:
        """Returns the whole value as a NumPy array; only in eager code."""
        return self.read_value().numpy()

    def __array__(
        self, dtype: Optional[npt.DTypeLike] = None, copy: Optional[bool] = None
    ) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)


SLICES = "_slices"
# Under these paths, a store's variables have their own names in files; under others the path is put
# before them, so that several stores fit into one file.
_USUAL_NAMES = ("", "store")

Trackable: Any = tf2.__internal__.tracking.Trackable


def _name_in_file(name: str, given: str) -> str:
    """Returns the name of a tensor in a checkpoint.

    Args:
      name: the name of the variable.
      given: the name that TensorFlow has for it: the path of the object, and of its value.
    """
    path, separator, _ = given.rpartition(f"{SLICES}/")
    path = path.rstrip("/")
    return name if not separator or path in _USUAL_NAMES else f"{path}/{name}"


class _SavedVariable(StoredMaster):
    """A variable of a store, saved under its own name."""

    def _name_in_file(self, given: str) -> str:
        return _name_in_file(self._variable_name, given)

    def _lookup_dependency(self, name: str, *unused_args: Any, **unused_kwargs: Any) -> Any:
        """Returns a slice, for a checkpoint that has the slices themselves."""
        return self._store.slice_variables(self._variable_name).get(name)


class _TrackedVariable(Trackable):
    """A TensorFlow variable that is saved with those of a store, under its own name."""

    def __init__(self, name: str, variable: tf.Variable):
        self.shape, self.dtype = variable.shape, variable.dtype
        self.name = name
        self.variable = variable

    def _gather_saveables_for_checkpoint(self) -> dict[str, Callable]:
        """Returns a function that makes what saves the variable."""
        pieces = WholeStorage(self.variable).pieces()

        def factory(name: Optional[str] = None) -> PieceSaveable:
            full_name = name or self.name
            return PieceSaveable(
                self.variable, pieces, _name_in_file(self.name, full_name), full_name
            )

        return {"VARIABLE_VALUE": factory}


class SavedVariables(Trackable):
    """The whole variables of a store, by name."""

    _IS_TAKEN = "there is a variable {!r} already; give this one another name"

    def __init__(self) -> None:
        """Creates a SavedVariables without variables."""
        self._by_name: dict[str, Any] = {}

    def add(
        self, store: VariableStore, name: str, shape: Shape, dtype: tf.DType, trainable: bool
    ) -> None:
        """Adds a variable; restores it from a checkpoint that was read before it was made.

        Args:
          store: the VariableStore that has its slices.
          name: its full name.
          shape: its Shape.
          dtype: its dtype in checkpoints.
          trainable: whether optimizers update it.
        """
        saved = _SavedVariable(store, name, shape, dtype, trainable)
        previous = self._by_name.get(name)
        # A new layout makes no other object: checkpoints know a variable by its object.
        if previous is None or (previous.shape, previous.dtype) != (saved.shape, saved.dtype):
            self._by_name[name] = saved
            self._handle_deferred_dependencies(name=name, trackable=self._by_name[name])

    def check_is_free(self, name: str) -> None:
        """Raises ValueError if a TensorFlow variable has the name: checkpoints would have one."""
        if isinstance(self._by_name.get(name), _TrackedVariable):
            raise ValueError(self._IS_TAKEN.format(name))

    def add_beside(self, name: str, variable: tf.Variable) -> None:
        """Adds a TensorFlow variable.

        Args:
          name: its name in checkpoints.
          variable: a tf.Variable.

        Raises:
          ValueError: there is another variable of this name.
        """
        holder = self.masters.get(name)
        if holder is variable:
            return
        if holder is not None:
            raise ValueError(self._IS_TAKEN.format(name))
        self._by_name[name] = _TrackedVariable(name, variable)
        self._handle_deferred_dependencies(name=name, trackable=self._by_name[name])

    @property
    def masters(self) -> dict[str, Any]:
        """The whole variables by name, of the store and beside it."""
        return {name: getattr(v, "variable", v) for name, v in self._by_name.items()}

    @property
    def tracked(self) -> dict[str, tf.Variable]:
        """Those beside the store, by name."""
        entries = self._by_name.items()
        return {name: v.variable for name, v in entries if isinstance(v, _TrackedVariable)}

    def _trackable_children(self, *unused_args: Any, **unused_kwargs: Any) -> dict[str, Any]:
        return dict(self._by_name)

    def _lookup_dependency(self, name: str, *unused_args: Any, **unused_kwargs: Any) -> Any:
        return self._by_name.get(name)


# Mesh implementations with devices, whose slices a store can have.
DeviceMeshImpl = Union["PlacementMeshImpl", "GspmdMeshImpl"]


_SHOWN = 6  # names in a repr


# The store of the innermost scope, in each thread.
_active: contextvars.ContextVar[Optional[VariableStore]] = contextvars.ContextVar(
    "store", default=None
)


def store_of(graph: Graph) -> VariableStore:
    """Returns the store for a variable that is created now, in eager code or in a tf.function.

    Args:
      graph: the Graph of the variable.

    Raises:
      ValueError: the program is built in a tf.function, and no store is active.
    """
    # First the scope, which the user has asked for; the store of a graph is there by default.
    active = _active.get()
    if active is not None:
        return active
    if graph.variable_store is None:
        if not tf.executing_eagerly():
            raise ValueError(
                "mtf variables in a tf.function need a place that outlives the call: decorate the "
                "function with @mtf.function instead of @tf.function, or make "
                "store = mtf.VariableStore() once and build the program within "
                "`with store.scope():`"
            )
        # Freed with the graph: one store for all would keep the weights of all that a process
        # builds.
        graph.variable_store = VariableStore()
    return graph.variable_store


# What the mtf.function that is traced has used, in each thread: stores, names, and whether nothing
# else had used the variable.
_uses: contextvars.ContextVar[Optional[list[tuple[VariableStore, str, bool]]]] = (
    contextvars.ContextVar("uses", default=None)
)


@dataclasses.dataclass
class Stored:
    """What a store records about one of its variables.

    Attributes:
      form: the form of its slices.
      lowered: whether a Lowering has used it.
      captures: how often traces of a tf.function have captured its slices.
      unclaimed: whether a trace made it which then failed, and nothing has used it since.
    """

    form: Form
    lowered: bool = False
    captures: int = 0
    unclaimed: bool = False


class _Known:
    """What a store records about its variables, by name; hidden from TensorFlow's checkpoints."""

    def __init__(self) -> None:
        self.variables: dict[str, Stored] = {}
        self.saved = SavedVariables()
        self.averages: dict[str, str] = {}  # the names of weights by those of their averages
        self.values: Mapping[str, Any] = {}  # what variables that are made later begin with
        self.calls: list[Calls] = []  # of functions that XLA compiles, by which seeds are respected

    def form(self, name: str) -> Optional[Form]:
        """Returns the form in which a variable is stored; None if there is none of the name."""
        return self.variables[name].form if name in self.variables else None


class VariableStore(tf2.Module):
    """Keeps the slices of mtf variables between calls of a tf.function, or between Lowerings.

    Each variable is stored once, in slices in the layout of the last Lowering; there are no
    separate masters. It is a tf.Module: `tf.train.Checkpoint(store=store)` saves and restores it.
    Files have whole variables under their own names, and may be restored in another layout, before
    or after the variables are made.

    >>> import mesh_tensorflow as mtf
    >>> with mtf.VariableStore().scope() as store:
    ...     mesh = mtf.Mesh(mtf.Graph(), "mesh")
    ...     w = mtf.get_variable(mesh, "w", mtf.Shape([("a", 3)]))
    >>> store.assign("w", [1.0, 2.0, 3.0])
    >>> store
    <VariableStore: 1 variable, 3 parameters: w>
    """

    def __init__(self, name: Optional[str] = None):
        super().__init__(name=name or "mtf_variables")
        self._by_name: dict[str, dict[str, tf.Variable]] = {}
        # An object of no TensorFlow class: dictionaries of a tf.Module's own are wrapped and saved.
        self._known = _Known()

    def __repr__(self) -> str:
        forms = [stored.form for stored in self._known.variables.values()]
        parameters = sum(form.shape.size for form in forms)
        meshes = sorted({dims_text(form.mesh_shape) for form in forms if form.mesh_shape})
        where = f", in slices on a mesh {' and '.join(meshes)}" if meshes else ""
        shown = first_names(self.names, _SHOWN)
        return (
            f"<VariableStore: {counted(len(forms), 'variable')}, "
            f"{counted(parameters, 'parameter')}{where}"
            f"{': ' if shown else ''}{shown}>"
        )

    @contextlib.contextmanager
    def scope(self) -> Iterator[VariableStore]:
        """Returns a context in which programs keep their variables in this store.

        Default names of layers are counted from the beginning, so that a program that is built
        again has the same variable names.
        """
        with within(_active, self), _new_default_names():
            yield self

    def begin_with(self, values: Mapping[str, Any]) -> None:
        """Has variables that are made from now on begin with given values.

        >>> import mesh_tensorflow as mtf
        >>> store = mtf.VariableStore()
        >>> store.begin_with({"w": [1.0, 2.0, 3.0]})
        >>> with store.scope():
        ...     mesh = mtf.Mesh(mtf.Graph(), "mesh")
        ...     print(mtf.get_variable(mesh, "w", "a:3").numpy(), store.names)
        [1. 2. 3.] ['w']

        Args:
          values: arrays of the whole variables, by the variables' full names. Each is asked for
            when its variable is made, so that a mapping may read them from files, one by one. If
            the mapping has a method `parts`, which for a name returns a function from a range
            along each dimension to that part, each slice is asked for alone. Variables without a
            value begin with their initializers.
        """
        self._known.values = values

    @property
    def names(self) -> list[str]:
        """Names of the mtf variables in the store, in order of creation."""
        return list(self._known.variables)

    @property
    def masters(self) -> dict[str, Any]:
        """The whole variables by name, as `mtf.checkpoint.Saver` and `init_from_checkpoint` take
        them; those that are tracked too.
        """
        return self._known.saved.masters

    def track(self, variable: tf.Variable, name: Optional[str] = None) -> None:
        """Saves and restores a TensorFlow variable with those of the store, under its own name.

        So a checkpoint has the global step where sessions look for it.

        >>> import tensorflow as tf
        >>> import mesh_tensorflow as mtf
        >>> store = mtf.VariableStore()
        >>> store.track(tf.Variable(0, dtype=tf.int64, name="global_step"))
        >>> sorted(store.masters)
        ['global_step']

        Args:
          variable: a tf.Variable.
          name: its name in checkpoints; its own name if None.

        Raises:
          ValueError: the store has another variable of this name.
        """
        self._known.saved.add_beside(name or variable.name.partition(":")[0], variable)

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> Mapping[str, Any]:
        """Returns the whole variables for checkpoints; for SavedModels, what functions capture."""
        children = dict(super()._trackable_children(save_type, **kwargs))
        if save_type == "checkpoint":
            # Slices would make a file depend on the layout: it gets whole variables in their place.
            del children["_by_name"]
            children[SLICES] = self._known.saved
        else:
            numbers = enumerate(calls.variable for calls in self._known.calls)
            children.update({f"calls_{i}": variable for i, variable in numbers})
        return children

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == SLICES:
            return self._known.saved
        return super()._lookup_dependency(name, *args, **kwargs)

    def slice_variables(self, name: str) -> dict[str, tf.Variable]:
        """Returns the tf variables of a variable's slices, by the number of a processor, as text.

        Args:
          name: the full name of an mtf variable.
        """
        return dict(self._by_name.get(name, {}))

    def declare(self, variable: Variable) -> None:
        """Initializes a variable of eager code, unless a program has used it already.

        In a tf.function, the first Lowering initializes the variable.

        Args:
          variable: the Variable.
        """
        if not tf.executing_eagerly():
            return
        stored = self._known.variables.get(variable.name)
        form = whole_form(variable.shape, variable.slice_dtype)
        # Variables that are left from a failed call are created again.
        persistent = self is not variable.graph.variable_store
        if stored is not None and (stored.lowered or (persistent and stored.form == form)):
            return
        # The name is a full one already, which scopes in force must not extend.
        with tf.device(form.devices[0]), tf.name_scope(None):
            whole = self.first_value(variable, form)
            self._keep(variable, form, {0: _slice_variable(variable, whole, None)})

    def slices(
        self, variable: Variable, mesh_impl: DeviceMeshImpl, owner: Sequence[int]
    ) -> dict[int, tf.Variable]:
        """Returns the slice variables of a Variable; creates them if there are none yet.

        Slices in another layout are converted, unless a tf.function has captured them.

        Args:
          variable: the Variable.
          mesh_impl: a MeshImpl with a device for each processor.
          owner: for each processor, the number of the processor that stores its slice.

        Returns:
          A dictionary from processor number to tf.Variable.

        Raises:
          ValueError: the store has the variable with another shape or dtype, or a tf.function has
            captured it in another layout.
        """
        name, stored_form = variable.name, self._known.form(variable.name)
        form = Form(
            variable.shape,
            variable.slice_dtype,
            mesh_impl.tensor_layout(variable.stored_shape),
            mesh_impl.shape,
            list(owner),
            {pnum: mesh_impl.devices[pnum] for pnum in set(owner)},
        )
        new = stored_form is None or self._known.variables[name].unclaimed
        if (
            stored_form is not None
            and new
            and (stored_form.shape, stored_form.dtype) != (form.shape, form.dtype)
        ):
            stored_form = None  # no more than the mistake of a call is lost
        if stored_form is None:
            # Outside of a function that is traced: its variables outlive the trace.
            with tf.init_scope():
                if name in self._known.values:
                    pieces = self._given_pieces(variable, form, mesh_impl)
                else:
                    pieces = _pieces(variable, mesh_impl, self.first_value(variable, form))
                self._lay_out(variable, form, mesh_impl, pieces, {})
        elif stored_form != form or not all(
            mesh_impl.same_memory(device, form.devices[pnum])
            for pnum, device in stored_form.devices.items()
        ):
            same = (stored_form.shape, stored_form.dtype) == (form.shape, form.dtype)
            # A trace holds its slices, and would go on to read and assign to them while the value
            # is elsewhere.
            if not same or self._known.variables[name].captures:
                # Elsewhere only the devices differ: the slices fit, and are used where they are.
                if stored_form == form:
                    return self._slices_of(name)
                raise ValueError(differs(name, stored_form, form, same))
            # Outside of the function that is traced, which would capture the old slices otherwise.
            with tf.init_scope():
                pieces = _pieces(variable, mesh_impl, self.value(name))
                self._lay_out(variable, form, mesh_impl, pieces, self._slices_of(name))
        stored = self._known.variables[name]
        # From now on a Variable that is made again leaves the value as it is.
        stored.lowered = True
        stored.unclaimed = new
        return self._used(name)

    def first_value(self, variable: Variable, form: Form) -> tf.Tensor:
        """Returns the whole value that a variable begins with: the given one, or its initializer's.

        Args:
          variable: the Variable.
          form: the form that the value is for.
        """
        name, values = variable.name, self._known.values
        if name in values:
            return fitting(name, form, values[name])
        value = initial_value(
            variable.initializer, name, variable.shape.to_integer_list, variable.master_dtype
        )
        return tf.cast(value, form.dtype)

    def _given_pieces(
        self, variable: Variable, form: Form, mesh_impl: DeviceMeshImpl
    ) -> Callable[[int], tf.Tensor]:
        """Returns a function of a processor that returns its slice of a given value."""
        mesh_impl.slice_shape(variable.stored_shape)  # checks that it can be split
        part, sizes = given_parts(self._known.values, variable.name), form.shape.to_integer_list

        def piece(pnum: int) -> tf.Tensor:
            # Behind the end there are copies of the last element.
            begins = [max(0, min(b, n - 1)) for b, n in zip(form.begin(pnum), sizes)]
            ends = [
                max(begin, min(b + size, n))
                for begin, b, size, n in zip(begins, form.begin(pnum), form.sizes, sizes)
            ]
            inside = [end - begin for begin, end in zip(begins, ends)]
            values = fitting_part(variable.name, form, part, begins, inside)
            for axis, (size, inner) in enumerate(zip(form.sizes, inside)):
                values = padded(values, axis, size - inner)
            return values

        return piece

    def _slices_of(self, name: str) -> dict[int, tf.Variable]:
        return {int(pnum): v for pnum, v in self._by_name[name].items()}

    def _used(self, name: str) -> dict[int, tf.Variable]:
        """Returns the slice variables; notes that a tf.function that is traced captures them."""
        stored = self._known.variables[name]
        new, stored.unclaimed = stored.unclaimed, False
        if not tf.executing_eagerly():
            stored.captures += 1
            uses = _uses.get()
            if uses is not None:
                uses.append((self, name, new))
        return self._slices_of(name)

    def _give_back(self, name: str, new: bool) -> None:
        """Takes back a use of a variable by a trace that has failed.

        Args:
          name: the full name of an mtf variable.
          new: whether nothing had used it before.
        """
        # The variable stays, as a checkpoint that was read before gave it its value.
        stored = self._known.variables[name]
        stored.captures -= 1
        if new and not stored.captures:
            stored.unclaimed = True

    def _lay_out(
        self,
        variable: Variable,
        form: Form,
        mesh_impl: DeviceMeshImpl,
        piece: Callable[[int], tf.Tensor],
        old: dict[int, tf.Variable],
    ) -> None:
        """Stores a value in slices, a function of the processor; keeps those that exist already."""
        stored = self._form(variable.name) if old else None
        variables: dict[int, tf.Variable] = {}
        for pnum, device in sorted(form.devices.items()):
            part = form.begin(pnum), form.sizes
            # What stays where it is keeps its tf variable, and is not copied.
            same = [
                number
                for number in old
                if stored is not None
                and part == (stored.begin(number), stored.sizes)
                and mesh_impl.same_memory(stored.devices[number], device)
            ]
            if same:
                # Taken out of `old`, as one tf variable must not become two slices.
                variables[pnum] = old.pop(same[0])
                continue
            with tf.device(device), tf.name_scope(None):
                number = None if len(form.devices) == 1 else pnum
                variables[pnum] = _slice_variable(variable, piece(pnum), number)
        self._keep(variable, form, variables)

    def _keep(self, variable: Variable, form: Form, made: dict[int, tf.Variable]) -> None:
        name = variable.name
        self._known.saved.check_is_free(name)
        slices = {str(pnum): v for pnum, v in made.items()}
        if name in self._by_name:  # a trackable dictionary rejects a new value for a key
            self._by_name = {**self._by_name, name: slices}
        else:
            self._by_name[name] = slices
        self._known.variables.setdefault(name, Stored(form)).form = form
        # Last: it restores a value that a checkpoint has kept for this name, into these slices.
        self._known.saved.add(self, name, variable.shape, variable.master_dtype, variable.trainable)

    def value(self, name: str) -> tf.Tensor:
        """Returns the whole value of a variable.

        Args:
          name: the full name of an mtf variable.
        """
        form = self._form(name)
        slices = {}
        for pnum, v in self._used(name).items():
            with tf.device(v.device):
                slices[pnum] = v.read_value()
        whole = [slices[p] for p in form.owner]
        return combine_slices(whole, form.layout, form.mesh_shape, None, form.shape)

    def assign(self, name: str, value: npt.ArrayLike) -> None:
        """Assigns the whole value of a variable.

        Args:
          name: the full name of an mtf variable.
          value: an array of the shape of the variable. Floats are rounded to its dtype.

        Raises:
          KeyError: there is no such variable.
          ValueError: the value has another shape, or an element would be lost in the dtype.
        """
        form = self._form(name)
        value = fitting(name, form, value)
        pieces = make_slices(value, form.layout, form.mesh_shape)
        for pnum, v in self._used(name).items():
            with tf.device(v.device):
                # A view would hold all of the value in memory for as long as the variable has it.
                v.assign(in_own_memory(pieces[pnum], value))

    def parts(self, name: str) -> tuple[list[int], dict[tuple[int, ...], list[tf.Variable]]]:
        """Returns the shape of a slice, and the tf variables of each slice by its first index.

        Args:
          name: the full name of an mtf variable.
        """
        form = self._form(name)
        holders: dict[tuple[int, ...], list[tf.Variable]] = {}
        for pnum, v in self._used(name).items():
            holders.setdefault(form.begin(pnum), []).append(v)
        return form.sizes, holders

    def _form(self, name: str) -> Form:
        form = self._known.form(name)
        if form is None:
            names = self.names
            few = ", ".join(names) if len(names) <= _SHOWN else f"{counted(len(names), 'variable')}"
            content = f"it has {few}{did_you_mean(name, names)}" if names else "it is empty"
            raise KeyError(f"no variable {name!r} in the store: {content}")
        return form


def _pieces(
    variable: Variable, mesh_impl: DeviceMeshImpl, whole: tf.Tensor
) -> Callable[[int], tf.Tensor]:
    """Returns a function of a processor that returns its slice of a whole value."""
    pieces = mesh_impl.make_slices(whole, variable.stored_shape)
    return lambda pnum: in_own_memory(pieces[pnum], whole)


@contextlib.contextmanager
def _new_default_names() -> Iterator[None]:
    """Returns a context in which tf.variable_scope counts default names from the beginning."""
    if not tf.executing_eagerly_outside_functions():
        yield
        return
    # Leaving a scope that was entered as an object restores the counts.
    with tf.variable_scope(tf.get_variable_scope(), auxiliary_name_scope=False):
        # Else a layer that is built again would be "dense_1", with variables of its own.
        get_variable_scope_store().variable_scopes_count = {}
        yield


def _slice_variable(variable: Variable, value: tf.Tensor, number: Optional[int]) -> tf.Variable:
    # TensorFlow's names have only these characters; the store itself knows the variable by its own.
    safe_name = re.sub(r"[^A-Za-z0-9_./-]", "_", variable.name)
    name = safe_name if number is None else f"{safe_name}_slice_{number}"
    return tf2.Variable(
        value,
        name=name,
        trainable=variable.trainable,
        # Stores make variables outside of traces already. A tf.function that knew of it would trace
        # its first call twice, and would be of no more use if that call failed after this.
        experimental_enable_variable_lifting=False,
    )


# -- mtf.function: traced programs that keep their variables


@contextlib.contextmanager
def _given_back_on_error() -> Iterator[None]:
    """Context of a trace: if it fails, variables are free of it, as of functions without one."""
    uses: list[tuple[VariableStore, str, bool]] = []
    try:
        with within(_uses, uses):
            yield
    except BaseException:
        for used, name, new in uses:
            used._give_back(name, new)
        raise


@contextlib.contextmanager
def _numbering_calls(store: VariableStore) -> Iterator[None]:
    """Context of a trace for XLA, whose seeded random values depend on the number of a call."""
    calls = Calls()
    with keys_by_call(calls):
        yield
    if calls.variable is not None:
        calls.end()
        # A SavedModel has what its functions capture, and the store outlives traces.
        store._known.calls.append(calls)


# A trace is found by its arguments. TensorFlow takes Python values for the same argument if they
# are equal; 1, True and 1.0 are, and 0.0 and -0.0, and programs do different things with them, so
# that the keys here tell them apart.
_SAME_IF_EQUAL = (str, bytes, type(None))


def value_key(value: Any) -> Optional[Hashable]:
    """Returns a key that only equal values of one type share, or None for tensors and objects.

    Args:
      value: a number, a string, None, or a frozen dataclass of these.
    """
    kind = type(value)
    if isinstance(value, (*_SAME_IF_EQUAL, int, range)):
        return kind, value
    # Before floats, of which np.float64 is one: tf.function makes tensors of NumPy's numbers.
    if isinstance(value, np.generic):
        return None
    if isinstance(value, float):
        return kind, value.hex()  # which tells 0.0 and -0.0 apart, and finds a NaN again
    if isinstance(value, complex):
        return kind, value.real.hex(), value.imag.hex()
    if dataclasses.is_dataclass(kind) and _has_value(kind):
        keys = [value_key(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return None if None in keys else (kind, *keys)
    return None


def leaf_key(leaf: Any) -> Hashable:
    """Returns what of an argument a program is made for, which has no tensors in it.

    Args:
      leaf: a value that can be the key of a dictionary.
    """
    # With the type, as objects of two classes may be equal and make different programs.
    key = value_key(leaf)
    return (type(leaf), leaf) if key is None else key


def _has_value(kind: type) -> bool:
    """Returns whether objects of a dataclass are equal if their fields are, and stay it."""
    parameters = getattr(kind, "__dataclass_params__", None)
    return bool(parameters and parameters.frozen and parameters.eq)


@dataclasses.dataclass(frozen=True, eq=False)
class KeyedArgument:
    """An argument of a tf.function that is the same only if its key is."""

    key: Hashable
    value: Any

    def __tf_tracing_type__(self, context: Any) -> _KeyType:
        return _KeyType(self.key, self.value)


class _KeyType(tf2.types.experimental.TraceType):
    """The type of a KeyedArgument: tf.function passes its value to the function that it traces."""

    def __init__(self, key: Hashable, value: Any):
        self._key, self._value = key, value

    def is_subtype_of(self, other: Any) -> bool:
        return bool(self == other)

    def most_specific_common_supertype(self, others: Sequence[Any]) -> Optional[_KeyType]:
        # No value stands for two others, so each has a trace of its own.
        return self if all(self == other for other in others) else None

    def placeholder_value(self, placeholder_context: Any) -> Any:
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _KeyType) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self._value)


def told_apart(value: Any) -> Any:
    """Returns arguments with their numbers told apart by type; in containers, too."""

    def leaf(x: Any) -> Any:
        if isinstance(x, _SAME_IF_EQUAL) and type(x) in _SAME_IF_EQUAL:
            return x
        key = value_key(x)
        return x if key is None else KeyedArgument(key, x)

    return _mapped(leaf, value)


def original(value: Any) -> Any:
    """Returns arguments as they were before `told_apart`."""
    return _mapped(lambda x: x.value if type(x) is KeyedArgument else x, value)


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    kind = type(value)
    # Of exactly these types, since a subclass may be built in another way; it is one leaf.
    if kind is list or kind is tuple:
        return kind(_mapped(fn, x) for x in value)
    if kind is dict or kind is collections.OrderedDict:
        return kind((name, _mapped(fn, x)) for name, x in value.items())
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*(_mapped(fn, x) for x in value))
    return fn(value)


_STORED = ("variable_layout", "zero", "zero_axis")


def function(fn: Optional[Callable[..., Any]] = None, **kwargs: Any) -> Any:
    """Compiles a function that builds and lowers mtf programs, as tf.function does.

    The first call creates the variables of the programs. They are kept in `.store`, a
    VariableStore. Unlike tf.function, it traces anew for 1, True and 1.0, which Python equates.

    >>> import tensorflow as tf
    >>> import mesh_tensorflow as mtf
    >>> @mtf.function
    ... def product(data):
    ...     mesh = mtf.Mesh(mtf.Graph(), "mesh")
    ...     x = mtf.import_tf_tensor(mesh, data, "batch:2,d_in:3")
    ...     w = mtf.get_variable(mesh, "w", mtf.Shape([("d_in", 3)]))
    ...     impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "batch:rows", ["cpu:0"] * 2)
    ...     y = x @ w
    ...     return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)
    >>> product(tf.ones([2, 3])).shape, product.store.names
    (TensorShape([2]), ['w'])

    Args:
      fn: a function of eager tensors; None to use `function` as a decorator with arguments.
      **kwargs: arguments of tf.function; `autograph` is False by default. And `zero`, `zero_axis`
        and `variable_layout`, which say how the mesh implementations that `fn` makes store
        variables, as their own arguments of these names do; and `store`, a VariableStore that
        several functions share, instead of one of its own.

    Returns:
      A function with the arguments and the result of `fn`. Its attributes `store` and
      `tf_function` are the VariableStore and the tf.function.
    """
    if fn is None:
        return functools.partial(function, **kwargs)
    # One for all traces of the function, so that a trace for other shapes has the same weights.
    shared_store = kwargs.pop("store", None)
    store = VariableStore() if shared_store is None else shared_store
    tables: list[NodeNames] = []  # of the traces, by which errors of steps are told
    # Programs are built by Python code, which autograph would rewrite, and take longer to trace.
    kwargs.setdefault("autograph", False)
    stored = {name: kwargs.pop(name) for name in _STORED if name in kwargs}

    @functools.wraps(fn)
    def within_store(*args: object, **named: object) -> Any:
        args, named = original((args, named))  # as they come where functions run eagerly
        # Within a function that is compiled all are; to find the first NaN, none is.
        compiled = is_compiled_whole() or bool(kwargs.get("jit_compile"))
        compiled = compiled and nan_checks_in_force() is None and not tf.executing_eagerly()
        with _given_back_on_error(), store.scope(), storing(**stored), compiling(compiled):
            with _numbering_calls(store) if compiled else contextlib.nullcontext():
                result = fn(*args, **named)
        tables.extend(names_in_current_graph())
        return result

    traced = tf2.function(within_store, **kwargs)
    of_xla = tf2.function(within_store, **kwargs)  # traces within a function that XLA compiles
    # A signature has no place for Python values.
    split_arguments = original if "input_signature" in kwargs else told_apart
    watched: dict[Any, Any] = {}  # the same, with checks and further results; see mtf.debug

    @functools.wraps(fn)
    def call(*args: object, **named: object) -> Any:
        key = watch_key()
        if tf.executing_eagerly():
            Calls.begin_anew_if_seeded()
        args, named = split_arguments((args, named))
        try:
            if key is None:
                return (of_xla if is_compiled_whole() else traced)(*args, **named)
            if key not in watched:
                checked = {} if nan_checks_in_force() is None else {"jit_compile": None}
                watched[key] = tf2.function(collecting(within_store), **{**kwargs, **checked})
            result, collected = watched[key](*args, **named)
        except tf2.errors.OpError as e:
            # Until a trace has been completed there are no tables: then those of all Lowerings are
            # searched.
            raise_for_user(e, tables or None)
        hand_over(collected)
        return result

    call.store = store  # type: ignore[attr-defined]
    call.tf_function = traced  # type: ignore[attr-defined]
    return call

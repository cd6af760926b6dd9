"""VariableStore: variables of programs in tf.function and in eager code."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy.typing as npt
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from tensorflow.python.ops.variable_scope import get_variable_scope_store

from mesh_tensorflow._core.errors import did_you_mean, dims_text
from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._mesh.slices.cutting import combine_slices, in_own_memory, make_slices
from mesh_tensorflow._mesh.variables.form import Form, differs, fitting, whole_form
from mesh_tensorflow._mesh.variables.initial_values import initial_value
from mesh_tensorflow._mesh.variables.saved import SLICES, SavedVariables
from mesh_tensorflow._units import counted

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.gspmd import GspmdMeshImpl
    from mesh_tensorflow.ops._variables.variable import Variable
    from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

    # Mesh implementations with devices, whose slices a store can have.
    DeviceMeshImpl = Union[PlacementMeshImpl, GspmdMeshImpl]

__all__ = ["VariableStore", "store_of"]


_SHOWN = 6  # names in a repr


class _Active(threading.local):
    """The active store scopes of a thread, innermost last."""

    def __init__(self) -> None:
        self.stores: list[VariableStore] = []


_active = _Active()


def store_of(graph: Graph) -> Optional[VariableStore]:
    """Returns the store for a variable that is created now; None in a TensorFlow 1 graph.

    Args:
      graph: the Graph of the variable.

    Raises:
      ValueError: the program is built in a tf.function, and no store is active.
    """
    if not tf.executing_eagerly_outside_functions():
        return None
    if _active.stores:
        return _active.stores[-1]
    if graph.variable_store is None:
        if not tf.executing_eagerly():
            raise ValueError(
                "mtf variables in a tf.function need a place that outlives the call: decorate the "
                "function with @mtf.function instead of @tf.function, or make "
                "store = mtf.VariableStore() once and build the program within "
                "`with store.scope():`"
            )
        graph.variable_store = VariableStore()
    return graph.variable_store


class _Known:
    """What a store records about its variables, by name; hidden from TensorFlow's checkpoints."""

    def __init__(self) -> None:
        self.forms: dict[str, Form] = {}
        self.saved = SavedVariables()
        self.lowered: set[str] = set()  # variables that a Lowering has used
        self.in_functions: set[str] = set()  # variables whose slices a tf.function has captured


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
        self._known = _Known()

    def __repr__(self) -> str:
        forms = self._known.forms
        parameters = sum(form.shape.size for form in forms.values())
        meshes = sorted({dims_text(form.mesh_shape) for form in forms.values() if form.mesh_shape})
        where = f", in slices on a mesh {' and '.join(meshes)}" if meshes else ""
        shown = ", ".join(self.names[:_SHOWN]) + (", ..." if len(forms) > _SHOWN else "")
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
        _active.stores.append(self)
        try:
            with _new_default_names():
                yield self
        finally:
            _active.stores.pop()

    @property
    def names(self) -> list[str]:
        """Names of the mtf variables in the store, in order of creation."""
        return list(self._known.forms)

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
        """Returns the whole variables for checkpoints; the slices for SavedModels."""
        children = dict(super()._trackable_children(save_type, **kwargs))
        if save_type == "checkpoint":
            del children["_by_name"]
            children[SLICES] = self._known.saved
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
        name, known = variable.name, self._known.forms.get(variable.name)
        form = whole_form(variable.shape, variable.slice_dtype)
        # Variables that are left from a failed call are created again.
        kept = self is not variable.graph.variable_store and known == form
        if name in self._known.lowered or kept:
            return
        with tf.device(form.devices[0]), tf.name_scope(None):
            whole = tf.cast(_first_value(variable), form.dtype)
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
        name, known = variable.name, self._known.forms.get(variable.name)
        form = Form(
            variable.shape,
            variable.slice_dtype,
            mesh_impl.tensor_layout(variable.stored_shape),
            mesh_impl.shape,
            list(owner),
            {pnum: mesh_impl.devices[pnum] for pnum in set(owner)},
        )
        if known is None:
            with tf.init_scope():
                whole = tf.cast(_first_value(variable), form.dtype)
                self._lay_out(variable, form, mesh_impl, whole, {})
        elif known != form or not all(
            mesh_impl.same_memory(device, form.devices[pnum])
            for pnum, device in known.devices.items()
        ):
            same = (known.shape, known.dtype) == (form.shape, form.dtype)
            # A trace holds its slices, and would go on to read and assign to them while the value
            # is elsewhere.
            if not same or name in self._known.in_functions:
                if known == form:
                    return self._slices_of(name)
                raise ValueError(differs(name, known, form, same))
            with tf.init_scope():
                self._lay_out(variable, form, mesh_impl, self.value(name), self._slices_of(name))
        self._known.lowered.add(name)
        return self._used(name)

    def _slices_of(self, name: str) -> dict[int, tf.Variable]:
        return {int(pnum): v for pnum, v in self._by_name[name].items()}

    def _used(self, name: str) -> dict[int, tf.Variable]:
        """Returns the slice variables; notes that a tf.function that is traced captures them."""
        if not tf.executing_eagerly():
            self._known.in_functions.add(name)
        return self._slices_of(name)

    def _lay_out(
        self,
        variable: Variable,
        form: Form,
        mesh_impl: DeviceMeshImpl,
        whole: tf.Tensor,
        old: dict[int, tf.Variable],
    ) -> None:
        """Stores a whole value in slices; keeps slices that exist already."""
        pieces = mesh_impl.make_slices(whole, variable.stored_shape)
        there = self._known.forms[variable.name] if old else None
        made: dict[int, tf.Variable] = {}
        for pnum, device in sorted(form.devices.items()):
            part = form.begin(pnum), form.sizes
            # What stays where it is keeps its tf variable, and is not copied.
            same = [
                number
                for number in old
                if there is not None
                and part == (there.begin(number), there.sizes)
                and mesh_impl.same_memory(there.devices[number], device)
            ]
            if same:
                made[pnum] = old.pop(same[0])
                continue
            with tf.device(device), tf.name_scope(None):
                number = None if len(form.devices) == 1 else pnum
                piece = in_own_memory(pieces[pnum], whole)
                made[pnum] = _slice_variable(variable, piece, number)
        self._keep(variable, form, made)

    def _keep(self, variable: Variable, form: Form, made: dict[int, tf.Variable]) -> None:
        name = variable.name
        slices = {str(pnum): v for pnum, v in made.items()}
        if name in self._by_name:  # a trackable dictionary rejects a new value for a key
            self._by_name = {**self._by_name, name: slices}
        else:
            self._by_name[name] = slices
        self._known.forms[name] = form
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
        return combine_slices([slices[p] for p in form.owner], form.layout, form.mesh_shape)

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
        if name not in self._known.forms:
            known = self.names
            few = ", ".join(known) if len(known) <= _SHOWN else f"{counted(len(known), 'variable')}"
            there = f"it has {few}{did_you_mean(name, known)}" if known else "it is empty"
            raise KeyError(f"no variable {name!r} in the store: {there}")
        return self._known.forms[name]


@contextlib.contextmanager
def _new_default_names() -> Iterator[None]:
    """Returns a context in which tf.variable_scope counts default names from the beginning."""
    if not tf.executing_eagerly_outside_functions():
        yield
        return
    # Leaving a scope that was entered as an object restores the counts.
    with tf.variable_scope(tf.get_variable_scope(), auxiliary_name_scope=False):
        get_variable_scope_store().variable_scopes_count = {}
        yield


def _first_value(variable: Variable) -> tf.Tensor:
    return initial_value(
        variable.initializer, variable.name, variable.shape.to_integer_list, variable.master_dtype
    )


def _slice_variable(variable: Variable, value: tf.Tensor, number: Optional[int]) -> tf.Variable:
    safe_name = re.sub(r"[^A-Za-z0-9_./-]", "_", variable.name)
    name = safe_name if number is None else f"{safe_name}_slice_{number}"
    return tf2.Variable(value, name=name, trainable=variable.trainable)

"""ArrayStore: variables as arrays of JAX, split over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import jax
import numpy as np
import numpy.typing as npt
import tensorflow.compat.v1 as tf
from jax.sharding import NamedSharding

from mesh_tensorflow._mesh.variables.form import Form, differs, fitting
from mesh_tensorflow._mesh.variables.store import VariableStore
from mesh_tensorflow.pjrt._building import ValueOfVariable
from mesh_tensorflow.pjrt._devices import all_dtypes
from mesh_tensorflow.pjrt._hosts import gathered, placed
from mesh_tensorflow.pjrt._initial import part_function
from mesh_tensorflow.pjrt._trace import current_trace

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.gspmd.mesh_impl import GspmdMeshImpl
    from mesh_tensorflow.ops._variables.variable import Variable

__all__ = ["ArrayStore", "form_of"]


def form_of(variable: Variable, mesh_impl: GspmdMeshImpl) -> Form:
    """Returns the form in which a program has a variable.

    Args:
      variable: the Variable.
      mesh_impl: the mesh implementation of the program.
    """
    first: dict[tuple[int, ...], int] = {}
    owner = [
        first.setdefault(tuple(mesh_impl.slice_begin(variable.stored_shape, pnum)), pnum)
        for pnum in range(mesh_impl.size)
    ]
    layout = mesh_impl.tensor_layout(variable.stored_shape)
    return Form(variable.shape, variable.slice_dtype, layout, mesh_impl.shape, owner, {})


class _Shard:
    """One part of a variable, with the methods of a tf.Variable that savers call."""

    def __init__(self, store: ArrayStore, name: str, index: tuple[slice, ...]):
        self._store, self._name, self._index = store, name, index
        self.device, self.dtype = "/cpu:0", store._form(name).dtype

    def read_value(self) -> tf.Tensor:
        """Returns the value of the part."""
        shards = self._store.array(self._name).addressable_shards
        return tf.constant(next(np.asarray(s.data) for s in shards if s.index == self._index))

    def assign(self, value: Any, read_value: bool = True) -> None:
        """Sets the value of the part, on each device that has it."""
        self._store._assign_part(self._name, self._index, np.asarray(value))


class ArrayStore(VariableStore):
    """Keeps the variables of functions of `mtf.pjrt.function`, as arrays of JAX.

    It has the methods of an `mtf.VariableStore`. `tf.train.Checkpoint(store=store)` and
    `mtf.checkpoint.Saver(store.masters)` save and restore its variables, part by part, in files
    that any layout and mesh implementation can read.
    """

    def __init__(self, name: Optional[str] = None):
        super().__init__(name=name or "mtf_arrays")
        # Hidden from TensorFlow, which would wrap a dictionary to save what is in it.
        self._arrays = self._no_dependency({})

    def array(self, name: str) -> jax.Array:
        """Returns a variable as it is on the devices.

        Args:
          name: the full name of an mtf variable.
        """
        self._form(name)
        return self._arrays[name]

    def declare(self, variable: Variable) -> None:
        """Does nothing: the function that is built gives the variable its value.

        Args:
          variable: the Variable.
        """
        if tf.executing_eagerly():
            current_trace()  # an error: no function is built

    def slices(
        self, variable: Variable, mesh_impl: GspmdMeshImpl, owner: Sequence[int]
    ) -> dict[int, Any]:
        """Returns a Variable within the function that is built; see VariableStore.

        Raises:
          ValueError: the store has the variable with another shape or dtype, or the program is
            lowered with another mesh implementation than that of the function.
        """
        trace = current_trace()
        if getattr(mesh_impl, "requested", mesh_impl) is not trace.mesh_impl:
            raise ValueError(
                f"variable {variable.name!r} is lowered with {mesh_impl!r}, but the function of "
                f"mtf.pjrt runs on {trace.mesh_impl!r}. Lower programs with mtf.pjrt.mesh_impl()"
            )
        name, known = variable.name, self._known.forms.get(variable.name)
        form = form_of(variable, trace.mesh_impl)
        if known is not None and (known.shape, known.dtype) != (form.shape, form.dtype):
            raise ValueError(differs(name, known, form, False))
        if name not in trace.variables:
            trace.variables[name] = ValueOfVariable(variable, form)
        return {0: trace.variables[name]}

    # -- values

    def prepared(self, traced: ValueOfVariable, wanted: NamedSharding) -> jax.Array:
        """Returns a variable as a function needs it; makes it, or moves it if need be.

        Args:
          traced: the variable in the function.
          wanted: where it has its parts.
        """
        name = traced.variable.name
        if name not in self._arrays:
            self._make(traced, wanted)
        array = self._arrays[name]
        if array.sharding != wanted:
            with all_dtypes():
                array = placed(array, wanted)
            self._arrays[name], self._known.forms[name] = array, traced.form
        return array

    def _make(self, traced: ValueOfVariable, wanted: NamedSharding) -> None:
        """Gives a variable its initial value, or that of a checkpoint that was read before."""
        variable = traced.variable
        part: Any = part_function(variable)
        with all_dtypes():
            self._arrays[variable.name] = jax.make_array_from_callback(
                tuple(traced.sizes), wanted, part
            )
        self._known.forms[variable.name] = traced.form
        self._known.saved.add(
            self, variable.name, variable.shape, variable.master_dtype, variable.trainable
        )

    def _put(self, name: str, value: np.ndarray, wanted: NamedSharding) -> None:
        with all_dtypes():
            self._arrays[name] = jax.make_array_from_callback(
                value.shape, wanted, lambda index: value[index]
            )

    def update(self, names: Sequence[str], arrays: Sequence[jax.Array]) -> None:
        """Sets variables to what a step returned.

        Args:
          names: their names.
          arrays: their new values.
        """
        self._arrays.update(zip(names, arrays))

    def value(self, name: str) -> tf.Tensor:
        """Returns the whole value of a variable, gathered from all devices.

        With several processes, all of them have to call it.

        Args:
          name: the full name of an mtf variable.
        """
        return tf.constant(gathered(self.array(name)))

    def assign(self, name: str, value: npt.ArrayLike) -> None:
        """Assigns the whole value of a variable.

        Args:
          name: the full name of an mtf variable.
          value: an array of the shape of the variable; see VariableStore.
        """
        whole = fitting(name, self._form(name), value)
        self._put(name, whole.numpy(), self._arrays[name].sharding)

    def _assign_part(self, name: str, index: tuple[slice, ...], value: np.ndarray) -> None:
        array = self._arrays[name]
        with all_dtypes():
            parts = [
                jax.device_put(value, s.device) if s.index == index else s.data
                for s in array.addressable_shards
            ]
            self._arrays[name] = jax.make_array_from_single_device_arrays(
                array.shape, array.sharding, parts
            )

    def parts(self, name: str) -> tuple[list[int], dict[tuple[int, ...], list[Any]]]:
        """Returns the shape of a part, and each part by its first index; see VariableStore.

        Args:
          name: the full name of an mtf variable.
        """
        array = self.array(name)
        holders: dict[tuple[int, ...], list[Any]] = {}
        for shard in array.addressable_shards:
            begin = tuple(part.start or 0 for part in shard.index)
            holders.setdefault(begin, [_Shard(self, name, shard.index)])
        return list(array.sharding.shard_shape(array.shape)), holders

    def slice_variables(self, name: str) -> dict[str, tf.Variable]:
        """Returns nothing: there are no variables of TensorFlow."""
        return {}

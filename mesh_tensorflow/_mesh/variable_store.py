"""VariableStore: variables that outlive the program that uses them, for tf.function."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import tensorflow as tf2
import tensorflow.compat.v1 as tf

__all__ = ["VariableStore", "current_store", "function"]

_active: list[VariableStore] = []


def current_store() -> Optional[VariableStore]:
    """Returns the active VariableStore; None in a graph of TensorFlow 1's kind.

    Raises:
      ValueError: a program is built eagerly or in a tf.function, and no store is active.
    """
    if _active:
        return _active[-1]
    if tf.executing_eagerly_outside_functions():
        raise ValueError(
            "mtf variables in eager code or in a tf.function need a place that outlives the "
            "call: decorate the function with @mtf.function instead of @tf.function, or make "
            "store = mtf.VariableStore() once and build the program within `with store.scope():`"
        )
    return None


class _Forms:
    """Shape, dtype, layout, mesh shape and owners by name; kept out of checkpoints."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple] = {}


class VariableStore(tf2.Module):
    """Keeps the slices of mtf variables between calls of a tf.function.

    A tf.Module: `tf.train.Checkpoint(store=store)` saves and restores it. Each weight is kept
    once, in slices laid out as the mesh implementation says; there are no masters.
    """

    def __init__(self, name: Optional[str] = None):
        super().__init__(name=name or "mtf_variables")
        self._slices: dict[str, dict[str, Any]] = {}
        self._forms = _Forms()

    @contextlib.contextmanager
    def scope(self) -> Iterator[VariableStore]:
        """Programs built within keep their variables here."""
        _active.append(self)
        try:
            yield self
        finally:
            _active.pop()

    @property
    def names(self) -> list[str]:
        """Names of the mtf variables in it, in the order in which they were made."""
        return list(self._forms.by_name)

    def slices(self, variable: Any, mesh_impl: Any, owner: Sequence[int]) -> dict[int, Any]:
        """Returns the slice variables of a Variable, which are made if there are none yet.

        Args:
          variable: a Variable operation.
          mesh_impl: a MeshImpl.
          owner: for each processor the number of the one that stores its slice.

        Returns:
          A dictionary from processor number to tf.Variable.

        Raises:
          ValueError: the variable is there with another shape, dtype or layout.
        """
        layout = mesh_impl.tensor_layout(variable.shape)
        form = (variable.shape, variable.slice_dtype, layout, mesh_impl.shape, list(owner))
        known = self._forms.by_name.get(variable.name)
        if known is None:
            with tf.init_scope():
                self._make(variable, mesh_impl, sorted(set(owner)))
            self._forms.by_name[variable.name] = form
        elif known != form:
            raise ValueError(
                f"variable {variable.name!r} is stored as {known[0]} {known[1].name} with "
                f"{known[2]} on mesh {known[3]}, but is asked for as {form[0]} {form[1].name} with "
                f"{form[2]} on mesh {form[3]}. Use another VariableStore for another layout, and "
                "move the values with store.value(name) and store.assign(name, value)"
            )
        stored = self._slices[variable.name]
        return {int(pnum): v for pnum, v in stored.items()}

    def _make(self, variable: Any, mesh_impl: Any, owners: Sequence[int]) -> None:
        from mesh_tensorflow.ops._variable import seeded_initializer

        initializer = seeded_initializer(variable.initializer, variable.name)
        initializer = initializer or tf.glorot_uniform_initializer()
        if isinstance(initializer, type):
            initializer = initializer()
        whole = initializer(variable.shape.to_integer_list, dtype=variable.master_dtype)
        pieces = mesh_impl.make_slices(tf.cast(whole, variable.slice_dtype), variable.shape)
        made = {}
        safe_name = re.sub(r"[^A-Za-z0-9_./-]", "_", variable.name)
        for pnum in owners:
            with tf.device(mesh_impl.devices[pnum]):
                made[str(pnum)] = tf2.Variable(
                    pieces[pnum],
                    name=safe_name if len(owners) == 1 else f"{safe_name}_slice_{pnum}",
                    trainable=variable.trainable,
                )
        self._slices[variable.name] = made

    def value(self, name: str) -> tf.Tensor:
        """Returns the whole value of a variable.

        Args:
          name: full name of an mtf variable.
        """
        from mesh_tensorflow._mesh.slicing import combine_slices

        _, _, layout, mesh_shape, owner = self._form(name)
        slices = [self._slices[name][str(pnum)].read_value() for pnum in owner]
        return combine_slices(slices, layout, mesh_shape)

    def assign(self, name: str, value: Any) -> None:
        """Sets the whole value of a variable.

        Args:
          name: full name of an mtf variable.
          value: an array of its shape.
        """
        from mesh_tensorflow._mesh.slicing import make_slices

        _, dtype, layout, mesh_shape, owner = self._form(name)
        pieces = make_slices(tf.cast(tf.convert_to_tensor(value), dtype), layout, mesh_shape)
        for pnum in set(owner):
            self._slices[name][str(pnum)].assign(pieces[pnum])

    def _form(self, name: str) -> tuple:
        if name not in self._forms.by_name:
            raise KeyError(f"no variable {name!r} in the store; there are {self.names}")
        return self._forms.by_name[name]


def function(fn: Optional[Callable] = None, **kwargs: Any) -> Any:
    """Is tf.function for functions that build and lower mtf programs.

    The variables of the programs are made at the first call and kept in `.store`, a
    VariableStore.

    Args:
      fn: a function of eager tensors.
      **kwargs: arguments of tf.function; autograph is off unless asked for.
    """
    if fn is None:
        return functools.partial(function, **kwargs)
    store = VariableStore()
    kwargs.setdefault("autograph", False)

    @functools.wraps(fn)
    def within_store(*args: Any, **named: Any) -> Any:
        with store.scope():
            return fn(*args, **named)

    traced = tf2.function(within_store, **kwargs)

    @functools.wraps(fn)
    def call(*args: Any, **named: Any) -> Any:
        return traced(*args, **named)

    call.store = store  # type: ignore[attr-defined]
    call.tf_function = traced  # type: ignore[attr-defined]
    return call

"""What tf.train.Checkpoint sees of a VariableStore: whole variables, whatever the layout.

The objects of a checkpoint have the path STORE/_slices/NAME, where NAME is that of a variable. Its
value is a tensor that is saved and restored in the slices of the current layout. Checkpoints of
before this was so have the slices themselves, as objects STORE/_slices/NAME/NUMBER. These are
found, too, if the layout is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.variables.storage import PieceSaveable, WholeStorage
from mesh_tensorflow._mesh.variables.stored_master import StoredMaster

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.variables.store import VariableStore

__all__ = ["SLICES", "SavedVariables"]

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
    path, found, _ = given.rpartition(f"{SLICES}/")
    path = path.rstrip("/")
    return name if not found or path in _USUAL_NAMES else f"{path}/{name}"


class _SavedVariable(StoredMaster):
    """A variable of a store, saved under its own name."""

    def _name_in_file(self, given: str) -> str:
        return _name_in_file(self._variable_name, given)

    def _lookup_dependency(self, name: str, *unused_args: Any, **unused_kwargs: Any) -> Any:
        """Returns a slice, for a checkpoint that has the slices themselves."""
        return self._store.slice_variables(self._variable_name).get(name)


class _SavedBeside(Trackable):
    """A TensorFlow variable that is saved with those of a store, under its own name."""

    def __init__(self, name: str, variable: tf.Variable):
        self.shape, self.dtype = variable.shape, variable.dtype
        self.name = name
        self.variable = variable

    def _gather_saveables_for_checkpoint(self) -> dict[str, Callable]:
        """Returns a function that makes what saves the variable."""
        pieces = WholeStorage(self.variable).pieces()

        def factory(name: Optional[str] = None) -> PieceSaveable:
            given = name or self.name
            return PieceSaveable(self.variable, pieces, _name_in_file(self.name, given), given)

        return {"VARIABLE_VALUE": factory}


class SavedVariables(Trackable):
    """The whole variables of a store, by name."""

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
        made = _SavedVariable(store, name, shape, dtype, trainable)
        known = self._by_name.get(name)
        if known is None or (known.shape, known.dtype) != (made.shape, made.dtype):
            self._by_name[name] = made
            self._handle_deferred_dependencies(name=name, trackable=self._by_name[name])

    def add_beside(self, name: str, variable: tf.Variable) -> None:
        """Adds a TensorFlow variable.

        Args:
          name: its name in checkpoints.
          variable: a tf.Variable.

        Raises:
          ValueError: there is another variable of this name.
        """
        known = self.masters.get(name)
        if known is variable:
            return
        if known is not None:
            raise ValueError(f"there is a variable {name!r} already; give this one another name")
        self._by_name[name] = _SavedBeside(name, variable)
        self._handle_deferred_dependencies(name=name, trackable=self._by_name[name])

    @property
    def masters(self) -> dict[str, Any]:
        """The whole variables by name, of the store and beside it."""
        return {name: getattr(v, "variable", v) for name, v in self._by_name.items()}

    def _trackable_children(self, *unused_args: Any, **unused_kwargs: Any) -> dict[str, Any]:
        return dict(self._by_name)

    def _lookup_dependency(self, name: str, *unused_args: Any, **unused_kwargs: Any) -> Any:
        return self._by_name.get(name)

"""SessionVariable: a variable of a session's program, as an array of JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, Protocol

import jax
import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables.checkpoint_files import Apart
from mesh_tensorflow.pjrt._building import ValueOfVariable

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.variables.store import Form
    from mesh_tensorflow.ops._variables.variable import Variable

__all__ = ["Keeper", "SessionVariable"]


class Keeper(Protocol):
    """What keeps the arrays of a program's variables."""

    def array(self, name: str) -> Optional[jax.Array]:
        """Returns a variable, or None if it has no value yet."""

    def value(self, name: str) -> np.ndarray:
        """Returns the whole value of a variable."""

    def assign(self, name: str, value: np.ndarray) -> None:
        """Sets a variable."""

    def apart(self, name: str, dtype: tf.DType) -> Optional[Apart]:
        """Returns how several processes save a variable; None if there is one process."""


class SessionVariable(ValueOfVariable):
    """Stands for the slice of a Variable in a session, and has the methods of one.

    In the program that is built, it is the value at that point. Outside of it, it reads and writes
    an array of JAX, when the session runs.
    """

    def __init__(self, variable: Variable, form: Form, outside: tf.Graph):
        """Creates a SessionVariable, in the tf graph of the session.

        Args:
          variable: the Variable.
          form: the form in which it is stored.
          outside: the tf graph of the session.
        """
        super().__init__(variable, form)
        self._outside = outside
        self._keeper: Optional[Keeper] = None

    def is_kept_by(self, keeper: Keeper) -> None:
        """Notes the program that keeps the array.

        Args:
          keeper: the program.
        """
        self._keeper = keeper

    @property
    def array(self) -> Optional[jax.Array]:
        """The array, once it has a value."""
        return None if self._keeper is None else self._keeper.array(self.variable.name)

    def apart(self, dtype: tf.DType) -> Optional[Apart]:
        """Returns how several processes save it in parts; None if there is one process.

        Args:
          dtype: its dtype in files.
        """
        return None if self._keeper is None else self._keeper.apart(self.variable.name, dtype)

    @property
    def _is_outside(self) -> bool:
        return tf.get_default_graph() is self._outside

    def read_value(self) -> tf.Tensor:
        """Returns the value, at this point of the program or when the session runs."""
        if not self._is_outside:
            return self.value
        value = self._called(self._get, [], self.dtype)
        value.set_shape(self.shape)
        return value

    def is_initialized(self) -> tf.Tensor:
        """Returns whether it has a value when the session runs."""
        return self._called(lambda: np.bool_(self.array is not None), [], tf.bool)

    def assign(self, value: Any, read_value: bool = True) -> Any:
        """Sets the value from here on; returns it, or an operation if not `read_value`."""
        value = tf.convert_to_tensor(value, self.dtype)
        if self._is_outside:
            done = self._called(self._set, [value], tf.bool)
            if not read_value:
                return done.op
            with tf.control_dependencies([done]):
                return self.read_value()
        return super().assign(value, read_value)

    def _is_of_program(self, graph: tf.Graph) -> bool:
        return getattr(graph, "outer_graph", None) is self._outside

    def _get(self) -> np.ndarray:
        assert self._keeper is not None
        return self._keeper.value(self.variable.name)

    def _set(self, value: np.ndarray) -> np.bool_:
        assert self._keeper is not None
        # The memory of `value` is TensorFlow's, which an array of JAX must not refer to.
        self._keeper.assign(self.variable.name, np.array(value))
        return np.bool_(True)

    def _called(self, fn: Callable[..., Any], inputs: list[tf.Tensor], dtype: tf.DType) -> Any:
        """Returns what a function returns whenever the session runs."""
        with tf.device("/cpu:0"):
            return tf.numpy_function(fn, inputs, dtype, stateful=True)

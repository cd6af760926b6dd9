"""Base classes of programs for devices of JAX while they are built.

Both `mtf.pjrt.function` (`_trace.py`) and `mtf.pjrt.in_session` (`_sessions/in_session.py`) build a
TensorFlow graph with a placeholder for each variable, which XLA then compiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.layout import TensorLayout
from mesh_tensorflow._mesh.gspmd import Compilation

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.variables.store import Form
    from mesh_tensorflow.ops._variables.variable import Variable

__all__ = ["Building", "ValueOfVariable"]


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
        """Creates the variable, and the placeholder in the default graph.

        Args:
          variable: the Variable.
          form: the form in which it is stored.
        """
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

"""Form: the shape, dtype and layout in which a VariableStore has a variable."""

from __future__ import annotations

import dataclasses

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.layout import TensorLayout
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.slices.cutting import slice_coordinates

__all__ = ["Form", "differs", "whole_form"]


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
    devices: dict[int, str] = dataclasses.field(compare=False)

    @property
    def sizes(self) -> list[int]:
        """The shape of a slice."""
        return [
            size if axis is None else size // self.mesh_shape[axis].size
            for size, axis in zip(self.shape.to_integer_list, self.layout)
        ]

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

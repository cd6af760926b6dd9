"""Form: the shape, dtype and layout in which a VariableStore has a variable."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow._core.layout import TensorLayout
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.slices.cutting import slice_coordinates

__all__ = ["Form", "differs", "fitting", "whole_form"]


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


def fitting(name: str, form: Form, value: npt.ArrayLike) -> tf.Tensor:
    """Returns a value that is assigned to a variable, in its dtype.

    Floats are rounded to it. Nothing else of the value may be lost.

    Args:
      name: the full name of the variable.
      form: its Form.
      value: an array of its shape.

    Raises:
      ValueError: the value has another shape, or an element is no number of the dtype.
      WrongTypeError: no number of its dtype is, such as a complex one where that is real.
    """
    what = f"variable {name!r} {form.shape} of {form.dtype.name}"
    try:
        given = tf.convert_to_tensor(value)
    except (TypeError, ValueError, OverflowError) as e:
        raise WrongTypeError(f"{what}: {value!r} is no array of numbers: {e}") from e
    is_number = given.dtype.is_floating or given.dtype.is_integer or given.dtype == tf.bool
    is_same = given.dtype == form.dtype or (given.dtype.is_complex and form.dtype.is_complex)
    if not is_number and not is_same:
        raise WrongTypeError(
            f"{what} cannot be assigned {given.dtype.name} values, such as "
            f"{_element(given, np.zeros(given.shape.rank or 0, int))}. Convert them first"
        )
    if not given.shape.is_compatible_with(form.shape.to_integer_list):
        raise ValueError(
            f"{what} cannot be assigned a value of shape {given.shape}: give one of "
            f"{form.shape.to_integer_list}"
        )
    if given.dtype == form.dtype:
        return given
    cast = tf.cast(given, form.dtype)
    if tf.is_symbolic_tensor(cast):
        if given.dtype.is_floating and not (form.dtype.is_floating or form.dtype.is_complex):
            raise WrongTypeError(f"{what} cannot be assigned {given.dtype.name}: use tf.cast on it")
        return cast
    before, after = given.numpy(), cast.numpy()
    if form.dtype.is_floating or form.dtype.is_complex:
        lost = np.isfinite(before) & ~np.isfinite(after)
    else:
        with np.errstate(invalid="ignore"):
            lost = (after.astype(before.dtype) != before) | ~np.isfinite(before)
    if np.any(lost):
        index = np.argwhere(lost)[0]
        raise ValueError(
            f"{what} cannot be assigned {_element(given, index)}, the element at "
            f"{index.tolist()} of {given.dtype.name}: it would become {after[tuple(index)]!r}. "
            "Round or clip the values first"
        )
    return cast


def _element(x: tf.Tensor, index: np.ndarray) -> str:
    is_there = not tf.is_symbolic_tensor(x) and tf.size(x) > 0
    return repr(np.asarray(x.numpy())[tuple(index)]) if is_there else x.name

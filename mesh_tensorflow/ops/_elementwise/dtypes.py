"""Which dtypes are complex, and which functions are not defined for them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import WrongTypeError, tensors_text
from mesh_tensorflow._core.tensor import Tensor, check_tensors

__all__: list[str] = []

# The dtype of a complex number's parts.
_PARTS = {tf.complex64: tf.float32, tf.complex128: tf.float64}
_COMPLEX = {part: whole for whole, part in _PARTS.items()}


def is_complex(x: Tensor) -> bool:
    """Returns whether a Tensor has complex numbers."""
    check_tensors("complex numbers", [x])
    return x.dtype.is_complex


def part_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype of the parts of complex numbers; that of others as it is."""
    return _PARTS.get(dtype, dtype)


def complex_dtype(what: str, x: Tensor) -> tf.DType:
    """Returns the dtype of complex numbers whose parts are like the numbers of a Tensor.

    Raises:
      WrongTypeError: there is none.
    """
    check_tensors(what, [x])
    if x.dtype not in _COMPLEX:
        raise WrongTypeError(
            f"{what}: the parts of complex numbers are float32 or float64, and not as those of "
            f"{tensors_text([x])}. Write mtf.cast(x, tf.float32)"
        )
    return _COMPLEX[x.dtype]


def check_real(what: str, xs: Sequence[Tensor]) -> None:
    """Checks that Tensors have no complex numbers.

    Raises:
      WrongTypeError: one has.
    """
    check_tensors(what, xs)
    for x in xs:
        if x.dtype.is_complex:
            raise WrongTypeError(
                f"{what} is not defined for complex numbers, such as those of "
                f"{tensors_text([x])}. Real are mtf.abs(x), mtf.real(x), mtf.imag(x), mtf.angle(x)"
            )

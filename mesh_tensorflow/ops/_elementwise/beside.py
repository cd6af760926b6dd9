"""Operands beside a Tensor: another Tensor, a number, or an array of the same shape."""

from __future__ import annotations

from typing import Any, Union

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import tensors_text
from mesh_tensorflow._core.tensor import Operand, Tensor, check_tensors
from mesh_tensorflow.ops._source import import_unchanged

__all__: list[str] = []

# A number: of Python, of NumPy, or a tf.Tensor without dimensions.
Number = Union[float, np.number, tf.Tensor]


def beside(what: str, x: Tensor, value: Operand) -> Union[Tensor, Number]:
    """Returns the other operand of a binary operator, as a Tensor or a number.

    A number is returned as is. An array with the sizes of the Tensor is imported.

    Args:
      what: the operation, for error messages.
      x: a Tensor.
      value: a Tensor, a number, a NumPy array, a tf.Tensor, or a list of numbers.

    Returns:
      A Tensor, a Python or NumPy number, or a tf.Tensor without dimensions.

    Raises:
      ValueError: an array has other sizes.
      TypeError: `value` is none of these.
    """
    if isinstance(value, (Tensor, int, float)):
        return value
    check_tensors(what, [x])
    return _array_beside(what, x, value)


def _array_beside(what: str, x: Tensor, value: Any) -> Union[Tensor, Number]:
    if tf.is_tensor(value):
        if value.shape.rank is None:
            return tf.ensure_shape(value, [])
        sizes = value.shape.as_list()
    else:
        value = _as_array(what, x, value)
        sizes = list(value.shape)
    if not sizes:
        if tf.is_tensor(value):
            _check_integral(what, x, value, repr(value))
            return value
        return value[()]
    found = f"{_kind(value)} of shape {tuple(sizes)}"
    if len(sizes) != len(x.shape) or any(n not in (None, d.size) for n, d in zip(sizes, x.shape)):
        raise ValueError(
            f"{what}: {found} stands beside {x.name} {x.shape}, and its axes have no names. Only "
            "numbers, and arrays of that very shape, can stand beside a Tensor; give it dimensions "
            "with mtf.import_tf_tensor(mesh, array, shape)"
        )
    if not tf.is_tensor(value):
        _check_integral(what, x, value, found)
        value = tf.constant(value.astype(x.dtype.as_numpy_dtype))
    elif value.dtype.base_dtype != x.dtype:
        raise ValueError(
            f"{what}: {found} is {value.dtype.base_dtype.name}, beside {tensors_text([x])}; bring "
            "it to that type with tf.cast"
        )
    return import_unchanged(x.mesh, value, x.shape)


def _as_array(what: str, x: Tensor, value: Operand) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # ragged lists
        array = np.empty([0], object)
    real = array.dtype.kind in "biuf" or array.dtype.name == "bfloat16"
    is_complex = array.dtype.kind == "c"
    if is_complex and not x.dtype.is_complex:
        raise TypeError(
            f"{what}: complex numbers stand beside {tensors_text([x])}. Nothing is converted by "
            "itself; write mtf.cast(x, tf.complex64)"
        )
    if not real and not is_complex:
        raise TypeError(
            f"{what}: {value!r} beside {x.name} {x.shape} is a {type(value).__name__}, neither a "
            "number nor a mtf.Tensor. mtf.import_tf_tensor or mtf.constant makes a Tensor"
        )
    return array


def _kind(value: object) -> str:
    return "a tf.Tensor" if tf.is_tensor(value) else "an array"


def _check_integral(what: str, x: Tensor, value: object, found: str) -> None:
    if not x.dtype.is_integer or isinstance(value, int):
        return
    dtype = getattr(value, "dtype", None)
    if isinstance(value, float) or (dtype is not None and tf.as_dtype(dtype).is_floating):
        raise TypeError(
            f"{what}: {x.name} {x.shape} is {x.dtype.name}, and {found} is no integer. Use "
            "mtf.to_float on the tensor first, or // and % to stay with integers"
        )


def check_scalar(what: str, x: Tensor, scalar: Any) -> None:
    """Checks that a number can be added to a Tensor or multiply it.

    Raises:
      ValueError: `scalar` is a Tensor or an array.
      TypeError: `scalar` is floating and `x` has an integer dtype.
    """
    if isinstance(scalar, Tensor):
        raise ValueError(
            f"{what}: {tensors_text([scalar])} is a Tensor; pass a number or a tf scalar"
        )
    is_tf = tf.is_tensor(scalar)
    _check_integral(what, x, scalar, repr(scalar))
    if is_tf or not isinstance(scalar, (int, float, np.generic)):
        rank = scalar.shape.rank if is_tf else np.ndim(scalar)
        if rank:
            raise ValueError(
                f"{what}: {_kind(scalar)} with {rank} dimensions is no number; "
                "mtf.import_tf_tensor makes a Tensor of it"
            )
    if is_tf and scalar.dtype.base_dtype != x.dtype:
        raise TypeError(
            f"{what}: the tf.Tensor beside {tensors_text([x])} is {scalar.dtype.base_dtype.name}; "
            "bring it to that type with tf.cast"
        )

"""Dtypes of variables, and the precision that a part of a program is computed in."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Optional, TypeVar, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow._core.tensor import Tensor

__all__ = ["Precision", "VariableDType", "precision"]


class VariableDType:
    """The dtypes of a variable: in checkpoints, in memory and in computations."""

    def __init__(
        self,
        master_dtype: tf.DType = tf.float32,
        slice_dtype: Optional[tf.DType] = None,
        activation_dtype: Optional[tf.DType] = None,
    ):
        """Creates a VariableDType.

        Args:
          master_dtype: dtype of the master, and of checkpoints.
          slice_dtype: dtype of the slices, which are stored and updated; `master_dtype` if None.
          activation_dtype: dtype of the value in computations; `master_dtype` if None.
        """
        self._master_dtype = tf.as_dtype(master_dtype)
        self._slice_dtype = tf.as_dtype(slice_dtype or master_dtype)
        self._activation_dtype = tf.as_dtype(activation_dtype or master_dtype)

    @property
    def master_dtype(self) -> tf.DType:
        """Dtype of the master, and of checkpoints."""
        return self._master_dtype

    @property
    def slice_dtype(self) -> tf.DType:
        """Dtype of the slices, which are stored and updated."""
        return self._slice_dtype

    @property
    def activation_dtype(self) -> tf.DType:
        """Dtype of the value in computations."""
        return self._activation_dtype


F = TypeVar("F", bound=Callable)

_NO_FLOAT16 = (
    ". float16 would need a scale of the loss, which is not offered; bfloat16 has the range of "
    "float32, and needs none"
)
_ALLOWED = {
    "activation_dtype": (tf.float32, tf.bfloat16),
    "slice_dtype": (tf.float32, tf.bfloat16),
    "master_dtype": (tf.float32, tf.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of activations and variables of a program; `mtf.precision` applies them.

    >>> print(mtf.Precision("bfloat16"))
    Precision(activation_dtype='bfloat16', slice_dtype='float32', master_dtype='float32')

    Attributes:
      activation_dtype: the dtype in which layers compute, "float32" or "bfloat16".
      slice_dtype: the dtype in which trainable variables are stored and updated. With "bfloat16"
        they take half the memory, but small updates are lost.
      master_dtype: the dtype of trainable variables in checkpoints.
    """

    activation_dtype: Union[str, tf.DType] = "bfloat16"
    slice_dtype: Union[str, tf.DType] = "float32"
    master_dtype: Union[str, tf.DType] = "float32"

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            given = getattr(self, name)
            try:
                dtype = tf.as_dtype(given)
            except TypeError:
                dtype = None
            if dtype not in allowed:
                why = _NO_FLOAT16 if dtype == tf.float16 else ""
                raise ValueError(
                    f"Precision: {name} must be 'float32' or 'bfloat16', not {given!r}{why}"
                )
            # The dataclass is frozen. As names, tf.bfloat16 and "bfloat16" make equal settings.
            object.__setattr__(self, name, dtype.name)

    @property
    def is_mixed(self) -> bool:
        """Whether activations have less precision than float32."""
        return self.activation_dtype != "float32"

    def variable_dtype(self) -> VariableDType:
        """Returns the dtypes of a trainable variable, a VariableDType."""
        return VariableDType(
            tf.as_dtype(self.master_dtype),
            tf.as_dtype(self.slice_dtype),
            tf.as_dtype(self.activation_dtype),
        )


_NAMES = {
    "float32": Precision("float32"),
    "bfloat16": Precision("bfloat16"),
    "mixed_bfloat16": Precision("bfloat16"),
}
# Of each thread, as several may build programs, each in a precision of its own.
_current: contextvars.ContextVar[Optional[Precision]] = contextvars.ContextVar(
    "precision", default=None
)


def as_precision(given: Union[str, Precision]) -> Precision:
    """Returns a Precision, or that of a name.

    Args:
      given: a Precision, "mixed_bfloat16", "bfloat16" (the same) or "float32".

    Raises:
      WrongTypeError: it is none of these.
    """
    if isinstance(given, Precision):
        return given
    if not isinstance(given, str) or given not in _NAMES:
        why = _NO_FLOAT16 if "float16" in str(given) else ""
        raise WrongTypeError(
            f"precision: {given!r} is neither an mtf.Precision nor one of {sorted(_NAMES)}{why}"
        )
    return _NAMES[given]


@contextlib.contextmanager
def precision(setting: Union[str, Precision]) -> Iterator[Precision]:
    """Returns a context in which programs compute in a given precision.

    Within it, when a program is built:

    - trainable variables that are asked for in float32 are stored and saved in float32, and their
      values have the dtype of activations; variables that are not trainable, such as the slots of
      optimizers, stay as they are asked for;
    - `mtf.import_tf_tensor` converts float32 data to the dtype of activations;
    - softmax, normalization and the loss functions of `mtf.layers` compute in float32; losses are
      float32.

    Gradients have the dtype of activations; optimizers convert them to float32.

    >>> with mtf.precision("mixed_bfloat16"):
    ...     x = mtf.import_tf_tensor(mesh, np.ones([4], np.float32), [mtf.Dimension("d", 4)])
    ...     y = mtf.layers.dense(x, [mtf.Dimension("out", 2)], reduced_dims=x.shape.dims)
    >>> print(y.dtype.name, graph.trainable_variables[0].slice_dtype.name)
    bfloat16 float32

    Args:
      setting: a Precision, "mixed_bfloat16", "bfloat16" (the same) or "float32", which restores the
        usual behavior.

    Raises:
      WrongTypeError: the setting is none of these.
    """
    chosen = as_precision(setting)
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)


def current_precision() -> Optional[Precision]:
    """Returns the mixed precision that is in force, or None."""
    chosen = _current.get()
    return chosen if chosen is not None and chosen.is_mixed else None


class InputDType(VariableDType):
    """The dtypes of a variable of a layer whose activations have the dtype of the layer's input."""


def dtype_in_force(dtype: VariableDType, trainable: bool = True) -> VariableDType:
    """Returns the dtypes that a variable gets, by the precision in force.

    Args:
      dtype: the VariableDType that is asked for.
      trainable: whether the variable is trainable.
    """
    chosen = current_precision()
    plain = (dtype.master_dtype, dtype.slice_dtype) == (tf.float32, tf.float32)
    # Slots of optimizers and counts need their digits; who asks for other dtypes gets them.
    if chosen is None or not trainable or not plain:
        return dtype
    other = chosen.variable_dtype()
    # A layer whose variables follow the dtype of its input, or that asks for another one, knows
    # better.
    keeps = isinstance(dtype, InputDType) or dtype.activation_dtype != tf.float32
    activation = dtype.activation_dtype if keeps else other.activation_dtype
    return VariableDType(other.master_dtype, other.slice_dtype, activation)


def imported_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype of imported data, by the precision in force."""
    chosen = current_precision()
    return dtype if chosen is None or dtype != tf.float32 else tf.as_dtype(chosen.activation_dtype)


def widened(x: Any) -> Any:
    """Returns a bfloat16 Tensor in float32 if a mixed precision is in force; all else as it is."""
    is_narrow = isinstance(x, Tensor) and x.dtype == tf.bfloat16
    return mtf.to_float(x) if is_narrow and current_precision() is not None else x


def computed_in_float32(fn: F) -> F:
    """Makes a function of a Tensor compute in float32 if a mixed precision is in force.

    The result has the dtype of the Tensor.
    """

    @functools.wraps(fn)
    def wrapper(x: Any, *args: Any, **kwargs: Any) -> Any:
        wide = widened(x)
        # Without a mixed precision no operation is added, so programs stay those of the classic.
        if wide is x:
            return fn(x, *args, **kwargs)
        named = {name: widened(value) for name, value in kwargs.items()}
        return mtf.cast(fn(wide, *(widened(value) for value in args), **named), x.dtype)

    return wrapper  # type: ignore[return-value]

"""The Case record, input data of cases, and NumPy functions by dimension name."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.ops._variable import adapting

__all__ = [
    "ALL", "FLOATS", "INT", "SIZES", "WIDE", "Case", "aligned", "case", "convolved", "dim", "dims", "given", "input_data", "on", "shape", "wide",
]

# Sizes of the dimensions that cases name by a letter; most are divisible by 8 processors.
SIZES = {
    "a": 8, "b": 16, "c": 24, "d": 8, "e": 16, "f": 8, "g": 32,
    "n": 8, "w": 4, "s": 4, "t": 6, "k": 3, "h": 6, "v": 5,
}
# Sizes may be overridden, for instance by "b:0", to run the cases with other sizes.
SIZES.update(mtf.convert_to_shape(os.environ.get("MTF_CASE_SIZES", "")).dims)


def dim(name: str) -> mtf.Dimension:
    """Returns a dimension with its size in SIZES, or with an explicit size as in "b:4"."""
    name, _, size = name.partition(":")
    return mtf.Dimension(name, int(size) if size else SIZES[name])


def dims(names: str) -> list[mtf.Dimension]:
    """Returns the dimensions of a string such as "a b c:4"."""
    return [dim(name) for name in names.split()]


def shape(names: str) -> mtf.Shape:
    """Returns the shape of a string such as "a b c:4"."""
    return mtf.Shape(dims(names))


class _InputsAsVariables:
    """Inputs of a case as what a layer computes with in place of its variables."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def trains(self, name: str) -> bool:
        """Returns False: a case has the gradients of its inputs."""
        return False

    def adapted(
        self, full_name: str, name: str, value: mtf.Tensor, dtype: mtf.VariableDType
    ) -> mtf.Tensor:
        """Returns the input of a variable's name; without one, the variable's own value."""
        x = self._values.get(full_name.rpartition("/")[2], value)
        # Layers with several variables of one name ask for them one after another.
        x = x.pop(0) if isinstance(x, list) else x
        assert x.shape == value.shape, (full_name, x.shape, value.shape)
        return x


def given(layer: Callable[[], Any], **variables: Any) -> Any:
    """Calls a layer with Tensors in place of its variables, by the last part of their names."""
    with adapting(_InputsAsVariables(variables)):
        return layer()


@dataclasses.dataclass(frozen=True)
class Case:
    """A program and its oracle in NumPy.

    Attributes:
      name: a name, unique in the table.
      inputs: "a b" for normal random numbers with these dimensions, or "a b/kind"; see
        `input_data`.
      build: a function of one mtf.Tensor per input that returns a Tensor or a list of them.
      oracle: the same function on NumPy arrays, in float64.
      grads: indices of the inputs that have a gradient; all floating-point ones if None.
      surrogate: a function of arrays whose derivative is the gradient, if that of `oracle` is
        not. Also takes `at`, the list of the input arrays themselves.
      dtypes: the dtypes to try for the floating-point inputs, and for the parts of complex ones.
      tolerance: the error allowed in float32, relative to the largest element.
      whole: names of dimensions that are not split, although the operations allow it.
      alike: groups of names of dimensions, of which layouts split all or none over a mesh dimension.
      thorough: whether to try every layout; a few are enough if a similar case tries them all.
    """

    name: str
    inputs: Sequence[str]
    build: Callable[..., Any]
    oracle: Callable[..., Any]
    grads: Sequence[int] | None = None
    surrogate: Callable[..., Any] | None = None
    dtypes: Sequence[str] = ("float32",)
    tolerance: float = 1e-5
    whole: Sequence[str] = ()
    alike: Sequence[Sequence[str]] = ()
    thorough: bool = True


def case(
    name: str, inputs: str | Sequence[str], build: Callable, oracle: Callable, **kwargs: Any
) -> Case:
    """Creates a Case; `inputs` may be one string with commas."""
    if isinstance(inputs, str):
        inputs = [part.strip() for part in inputs.split(",")]
    return Case(name, inputs, build, oracle, **kwargs)


ALL = ("float32", "bfloat16", "int32")
FLOATS = ("float32", "bfloat16")
WIDE = ("float32", "float64")
INT = ("int32",)

_KINDS = {
    "normal": lambda rng, size: rng.normal(size=size),
    # complex64, or complex128 if other inputs are float64
    "complex": lambda rng, size: rng.normal(size=size) + 1j * rng.normal(size=size),
    # Complex numbers away from 0, and from the negative real axis.
    "ring": lambda rng, size: rng.uniform(0.5, 2, size) * np.exp(1j * rng.uniform(-3, 3, size)),
    "positive": lambda rng, size: rng.uniform(0.5, 2.0, size),
    # No element is so close to 0 that a finite difference would cross it.
    "away": lambda rng, size: np.where(rng.random(size) < 0.5, -1, 1) * rng.uniform(0.2, 2, size),
    # No two elements are so near that a finite difference would change their order.
    "distinct": lambda rng, size: rng.permutation(int(np.prod(size))).reshape(size) / 16.0,
    # With fewer true elements, hardly any row would be true as a whole.
    "mostly": lambda rng, size: rng.random(size) < 0.9,
    "bool": lambda rng, size: rng.random(size) < 0.5,
    "int": lambda rng, size: rng.integers(-4, 5, size).astype(np.int32),
    "divisor": lambda rng, size: rng.choice([-3, -2, 1, 2, 4], size).astype(np.int32),
    "ties": lambda rng, size: rng.integers(0, 3, size).astype(np.float64),
}


def input_data(case: Case, dtype: str) -> list[np.ndarray]:
    """Returns the input arrays of a case; `dtype` is the dtype of the floating-point ones."""
    # Python's own hash of a string differs from process to process, and so would the data.
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    arrays = []
    for spec in case.inputs:
        names, _, kind = spec.partition("/")
        size = [d.size for d in dims(names)]
        if kind.startswith("below"):  # integers from 0
            x = rng.integers(0, int(kind[5:]), size).astype(np.int32)
        elif dtype == "int32" and kind not in ("bool", "int"):
            x = rng.integers(1 if kind in ("positive", "away") else -4, 6, size).astype(np.int32)
        else:
            x = np.asarray(_KINDS[kind or "normal"](rng, size))
        if x.dtype == np.float64:
            x = x.astype(tf.as_dtype(dtype).as_numpy_dtype)
        if x.dtype == np.complex128 and dtype != "float64":
            x = x.astype(np.complex64)
        arrays.append(x)
    return arrays


def wide(x: np.ndarray) -> np.ndarray:
    """Converts floating-point arrays to float64, complex ones to complex128, integers to int64."""
    if x.dtype == bool:
        return x
    if np.iscomplexobj(x):
        return x.astype(np.complex128)
    # NumPy computes in the dtype that it is given: in float32, the oracle would have the error
    # that it is there to measure.
    return x.astype(np.int64 if np.issubdtype(x.dtype, np.integer) else np.float64)


def aligned(x: np.ndarray, names: str, out: str) -> np.ndarray:
    """Transposes `x` from the dimensions `names` to `out`, adding axes of size 1 for missing ones.
    """
    have, want = names.split(), out.split()
    x = np.transpose(x, [have.index(n) for n in want if n in have])
    sizes = iter(x.shape)
    return np.reshape(x, [next(sizes) if n in have else 1 for n in want])


def convolved(
    x: np.ndarray, f: np.ndarray, strides: Sequence[int], pads: Sequence[tuple[int, int]]
) -> np.ndarray:
    """Returns x [n, spatial..., i] by f [window..., i, o], padded in each spatial dimension."""
    rank = f.ndim - 2
    x = np.pad(x, [(0, 0), *pads, (0, 0)])
    axes = tuple(range(1, rank + 1))
    # The windows at each place; strides leave out those between.
    windows = np.lib.stride_tricks.sliding_window_view(x, f.shape[:rank], axis=axes)
    strided = (slice(None), *(slice(None, None, s) for s in strides))
    places, window = "xyz"[:rank], "XYZ"[:rank]
    return np.einsum(f"n{places}i{window},{window}io->n{places}o", windows[strided], f)


def on(fn: Callable, *specs: str) -> Callable:
    """Returns a function that broadcasts arrays by dimension name and applies `fn`.

    Args:
      fn: a NumPy function.
      *specs: the dimensions of each argument, followed by those of the result.
    """
    *inputs, out = specs
    full = [dim(n).size for n in out.split()]

    def apply(*xs: np.ndarray) -> np.ndarray:
        y = fn(*[aligned(x, names, out) for x, names in zip(xs, inputs, strict=True)])
        # Shapes are compared, too, and outputs have dimensions along which they do not change.
        return np.broadcast_to(y, full)

    return apply

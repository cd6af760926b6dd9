"""Defines the operators of Tensor, such as `+`, `@` and `x[i]`, when `ops` is imported.

Each calls the public function of its operation; what Tensors do not have, such as a length, is an
error that names what there is instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn, Union

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import WrongTypeError, dims_text, tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.operation import Operand, Tensor, bind_methods
from mesh_tensorflow._core.shape import check_sizes_of_names
from mesh_tensorflow.ops._elementwise.binary import (
    add,
    divide,
    floordiv,
    greater,
    greater_equal,
    less,
    less_equal,
    logical_and,
    logical_or,
    mod,
    multiply,
    sub,
)
from mesh_tensorflow.ops._elementwise.unary import logical_not, mtf_abs, negative

__all__: list[str] = []

# Integer powers up to this one are products; others go by way of logarithms.
_MOST_FACTORS = 64


def _reflected(fn: Callable[[Any, Tensor], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    return lambda self, other: fn(other, self)


def _whole(y: object) -> bool:
    """Returns whether an exponent is a small whole number."""
    number = isinstance(y, (int, float, np.number)) and not isinstance(y, bool)
    return number and abs(y) <= _MOST_FACTORS and float(y).is_integer()  # type: ignore[arg-type]


@leaves_no_node
def _power(x: Tensor, y: Union[Tensor, float]) -> Tensor:
    """Returns x ** y: products for small whole numbers `y`, otherwise mtf.pow."""
    _check_exponent(x, y)
    # mtf.pow takes the logarithm of x, which negative numbers do not have; products do for these.
    if not _whole(y):
        # These need no logarithm, which is infinite at 0 and makes the gradient NaN there.
        roots = {0.5: mtf.sqrt, -0.5: mtf.rsqrt}
        has_root = isinstance(y, (int, float, np.number)) and float(y) in roots
        return roots[float(y)](x) if has_root else mtf.mtf_pow(x, y)
    left = abs(int(y))
    if y < 0 and x.dtype.is_integer:
        raise WrongTypeError(
            f"{tensors_text([x])} ** {y} is no integer. Write mtf.to_float(x) ** {y}"
        )
    result = None
    # x ** n is the product of x ** (2 ** k) over the bits k that are set in n.
    while left:
        if left % 2:
            result = x if result is None else result * x
        # By squaring, so that an exponent of n takes about log2(n) products.
        left //= 2
        x = mtf.square(x) if left else x
    if result is None:
        return mtf.ones_like(x)
    return mtf.reciprocal(result) if y < 0 else result


def _check_exponent(x: Tensor, y: object) -> None:
    """Raises a WrongTypeError if an exponent is no number, Tensor or array."""
    numbers = (Tensor, int, float, np.generic, list, tuple)
    if not (isinstance(y, numbers) or tf.is_tensor(y) or hasattr(y, "__array__")):
        raise WrongTypeError(
            f"{tensors_text([x])} ** {y!r}: the exponent is a {type(y).__name__}; it must be a "
            "number, a Tensor or an array"
        )


def _reflected_power(x: Tensor, base: float) -> Tensor:
    """Returns base ** x for a positive number `base`."""
    if not isinstance(base, (int, float, np.number)) or not base > 0:
        raise WrongTypeError(
            f"{base!r} ** x: the base beside the Tensor {tensors_text([x])} must be a positive "
            "number; mtf.pow(y, x) has a Tensor y as its base"
        )
    # base ** x = exp(x log(base)), where the logarithm is that of a number, taken once.
    return mtf.exp(x * math.log(base))


@leaves_no_node
def _matrix_product(x: Tensor, w: object) -> Tensor:
    """Returns x @ w: the einsum that sums over the one dimension that both have."""
    if not isinstance(w, Tensor):
        kind = "a tf.Tensor" if tf.is_tensor(w) else f"a {type(w).__name__}"
        raise WrongTypeError(
            f"@: {kind} stands beside {x.name} {x.shape}, and its axes have no names. Give it "
            "dimensions with mtf.import_tf_tensor(mesh, array, shape)"
        )
    check_sizes_of_names("@", [x.shape, w.shape])
    shared = [d for d in x.shape.dims if d.name in w.shape.dimension_names]
    if len(shared) != 1:
        relation = f"share {dims_text(shared)}" if shared else "share none"
        raise ValueError(
            f"@ sums over the one dimension that both Tensors have, but {x.name} {x.shape} and "
            f"{w.name} {w.shape} {relation}. Say which dimensions the result has: "
            "mtf.einsum([x, w], output_shape=[...]) sums over all others; x * w sums over none"
        )
    return mtf.einsum([x, w], reduced_dims=shared)


def _logical(symbol: str, fn: Callable[..., Tensor], swapped: bool = False) -> Callable:
    def apply(x: Tensor, *others: Operand) -> Tensor:
        for t in (x, *others):
            dtype = t.dtype if isinstance(t, Tensor) else None
            if dtype != tf.bool:
                operand = tensors_text([t]) if isinstance(t, Tensor) else repr(t)
                raise WrongTypeError(
                    f"{symbol} is mtf.{fn.__name__} of boolean Tensors, as comparisons give them, "
                    f"not of {operand}. mtf.cast(x, tf.bool) makes one"
                )
        return fn(*((others[0], x) if swapped else (x, *others)))

    return apply


def _no_index(x: Tensor, key: object) -> NoReturn:
    raise WrongTypeError(
        f"x[{key!r}]: {x.name} {x.shape} has names for its dimensions, and is neither indexed nor "
        'iterated over by position. mtf.slice(x, begin, size, "a") takes a range of dimension a, '
        "mtf.gather(x, index, dim) one or several elements, mtf.unstack(x, dim) makes a list of "
        "all. In eager code x.numpy() is an array"
    )


def _no_length(x: Tensor) -> NoReturn:
    raise WrongTypeError(
        f"len(x): {x.name} {x.shape} has no first dimension that counts more than others. "
        "x.shape.ndims is the number of its dimensions, x.size that of its elements, and "
        'x.shape.get_dim_by_name("a").size the size of dimension a'
    )


# Addition and multiplication commute, so `2 * x` is the same scalar operation as `x * 2`.
_OPERATORS = {
    "__add__": add,
    "__radd__": add,
    "__sub__": sub,
    "__rsub__": _reflected(sub),
    "__mul__": multiply,
    "__rmul__": multiply,
    "__truediv__": divide,
    "__rtruediv__": _reflected(divide),
    "__div__": divide,
    "__rdiv__": _reflected(divide),
    "__floordiv__": floordiv,
    "__rfloordiv__": _reflected(floordiv),
    "__mod__": mod,
    "__rmod__": _reflected(mod),
    "__neg__": negative,
    "__pos__": lambda self: self,
    "__abs__": mtf_abs,
    "__pow__": _power,
    "__rpow__": _reflected_power,
    "__matmul__": _matrix_product,
    # With a Tensor on the left, `__matmul__` is called: this one only refuses what is none.
    "__rmatmul__": _matrix_product,
    # Equality stays that of objects: Tensors are keys of dictionaries.
    "__lt__": less,
    "__le__": less_equal,
    "__gt__": greater,
    "__ge__": greater_equal,
    "__and__": _logical("&", logical_and),
    "__rand__": _logical("&", logical_and, swapped=True),
    "__or__": _logical("|", logical_or),
    "__ror__": _logical("|", logical_or, swapped=True),
    "__invert__": _logical("~", logical_not),
    "__getitem__": _no_index,
    "__len__": _no_length,
}


bind_methods(_OPERATORS)

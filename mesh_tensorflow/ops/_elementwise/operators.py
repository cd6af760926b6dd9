"""Defines the arithmetic operators of Tensor."""

from __future__ import annotations

from typing import Any

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.tensor import Tensor

__all__: list[str] = []


def _reflected(fn_name: str) -> Any:
    return lambda self, other: getattr(mtf, fn_name)(other, self)


def _straight(fn_name: str) -> Any:
    return lambda self, other: getattr(mtf, fn_name)(self, other)


# Addition and multiplication commute, so `2 * x` is the same scalar operation as `x * 2`.
_OPERATORS = {
    "__add__": _straight("add"),
    "__radd__": _straight("add"),
    "__sub__": _straight("sub"),
    "__rsub__": _reflected("sub"),
    "__mul__": _straight("multiply"),
    "__rmul__": _straight("multiply"),
    "__truediv__": _straight("divide"),
    "__rtruediv__": _reflected("divide"),
    "__div__": _straight("divide"),
    "__rdiv__": _reflected("divide"),
    "__floordiv__": _straight("floordiv"),
    "__rfloordiv__": _reflected("floordiv"),
    "__mod__": _straight("mod"),
    "__rmod__": _reflected("mod"),
    "__neg__": lambda self: mtf.negative(self),
}


def bind_operators() -> None:
    """Sets the operators of Tensor."""
    for name, method in _OPERATORS.items():
        method.__name__ = name
        setattr(Tensor, name, method)


bind_operators()

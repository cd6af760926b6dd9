"""Exception classes, and parts of error messages that several modules share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh_tensorflow._core.dimension import Dimension
    from mesh_tensorflow._core.tensor import Tensor

__all__ = [
    "MissingMethodError",
    "NoValueError",
    "NotInLoweringError",
    "WrongTypeError",
    "dims_text",
    "mesh_shapes_that_fit",
    "reason",
    "splittable_hint",
    "tensors_text",
]

# Lines that TensorFlow adds around the reason: where an operation was created, and its name.
_AROUND = re.compile(
    r"Graph execution error:|Detected at node .*|Node: .*|\s+File .*|\s*\[\[.*|\d+ root error.*"
    r"|Hint: .*|Original stack trace .*|\s*\(\d+\)\s*|No OpKernel .*"
)


class WrongTypeError(TypeError, ValueError):
    """An argument has the wrong type.

    It is a TypeError, as in Python, and a ValueError, like errors of other arguments.
    """


class NoValueError(WrongTypeError):
    """A Tensor is used as a number or an array where its value is not known yet."""


class MissingMethodError(NotImplementedError, ValueError):
    """A subclass lacks a method that it must define."""


class NotInLoweringError(KeyError, ValueError):
    """A Lowering does not have the given Tensor, Operation or Mesh."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would quote it


def dims_text(dims: Iterable[Dimension]) -> str:
    """Returns "a=2, b=4"."""
    return ", ".join(f"{d.name}={d.size}" for d in dims)


def tensors_text(tensors: Iterable[Tensor]) -> str:
    """Returns "x:0 Shape[a=2] float32; y:0 ..." of mtf Tensors."""
    return "; ".join(f"{t.name} {t.shape} {t.dtype.name}" for t in tensors)


def divisors(n: int) -> list[int]:
    """Returns the divisors of `n` in increasing order."""
    return [k for k in range(1, n + 1) if n % k == 0] if n < 4096 else [1, n]


def splittable_hint(d: Dimension, mesh_dim: Dimension) -> str:
    """Returns a sentence on how to make a dimension divisible by a mesh dimension."""
    below = d.size // mesh_dim.size * mesh_dim.size
    above = below + mesh_dim.size
    sizes = f"{below} or {above}" if below else f"{above}"
    fits = ", ".join(str(k) for k in divisors(d.size)[:12])
    return (
        f"Make {d.name} a multiple of {mesh_dim.size} (for instance {sizes}), give "
        f"{mesh_dim.name} a size that divides {d.size} ({fits}), or drop the layout rule "
        f"{d.name}:{mesh_dim.name}"
    )


def mesh_shapes_that_fit(mesh_dims: Sequence[Dimension], num_devices: int) -> list[str]:
    """Returns up to eight mesh shapes over the names of `mesh_dims` with `num_devices`."""
    if num_devices < 1 or not mesh_dims:
        return []
    shapes: list[list[int]] = [[]]
    for i in range(len(mesh_dims)):
        last = i == len(mesh_dims) - 1
        grown = []
        for sizes in shapes:
            rest = num_devices
            for s in sizes:
                rest //= s
            grown += [sizes + [k] for k in ([rest] if last else divisors(rest))]
        shapes = grown
    # The ones nearest to the requested shape come first.
    shapes.sort(key=lambda sizes: sum(abs(s - d.size) for s, d in zip(sizes, mesh_dims)))
    return [",".join(f"{d.name}:{s}" for s, d in zip(sizes, mesh_dims)) for sizes in shapes[:8]]


def reason(error: Exception) -> str:
    """Returns one line about why a TensorFlow or file system operation failed.

    Args:
      error: the exception.

    Returns:
      The first line of its message that states the reason, without a period at the end.
    """
    text = str(getattr(error, "message", None) or error)
    lines = [line.strip() for line in text.splitlines() if not _AROUND.fullmatch(line)]
    first = next(filter(None, lines), type(error).__name__)
    return re.sub(r"^\(\d+\) \w+: ", "", first).rstrip(".")

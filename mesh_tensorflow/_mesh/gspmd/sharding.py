"""XLA's shardings of whole values, from layouts.

An annotation is an operation `XlaSharding` with a serialized OpSharding of XLA's data.proto. The
devices are a transposed range of numbers, so that an annotation of 512 devices is as long as that
of 4.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import tensorflow.compat.v1 as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from mesh_tensorflow._core.layout import TensorLayout
from mesh_tensorflow._core.shape import Shape, list_product
from mesh_tensorflow._mesh.slices.random_values import new_key

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.gspmd.mesh_impl import GspmdMeshImpl
    from mesh_tensorflow.ops._variables.variable import Variable

__all__ = ["Compilation", "annotated", "annotating", "current_compilation", "sharding_text"]

# Numbers of the fields of OpSharding, and the type OTHER: tiles over devices.
# They are type, tile_assignment_dimensions, replicate_on_last_tile_dim, iota_reshape_dims and
# iota_transpose_perm.
_TYPE, _TILES, _LAST_IS_COPIES, _RANGE, _TRANSPOSED = 1, 3, 6, 9, 10
_OTHER = 3


class Compilation:
    """A program that XLA compiles, while it is lowered."""

    def has_layout(self, value: tf.Tensor, layout: TensorLayout) -> None:
        """Called with the value of each tensor of the program, and its layout."""

    def has_impl(self, mesh_impl: GspmdMeshImpl) -> None:
        """Called with the mesh implementation of the program, at least once."""

    def slice_of(self, variable: Variable, mesh_impl: GspmdMeshImpl) -> Any:
        """Returns what stands for the only slice of a variable; None for a tf variable.

        It has the methods of one, and `first`: the value at the beginning of the program.
        """
        return None

    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a new key for random numbers; see `random_values.new_key`."""
        return new_key(seed)


_compilation: contextvars.ContextVar[Optional[Compilation]] = contextvars.ContextVar(
    "compilation", default=None
)


@contextlib.contextmanager
def annotating(compilation: Optional[Compilation] = None) -> Iterator[None]:
    """Annotates the values of programs that are lowered within, because XLA compiles them.

    Args:
      compilation: what is told of the program.
    """
    token = _compilation.set(compilation or Compilation())
    try:
        yield
    finally:
        _compilation.reset(token)


def current_compilation() -> Optional[Compilation]:
    """Returns the compilation for which values are annotated; None if they are not."""
    return _compilation.get()


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _numbers(field: int, values: Sequence[int]) -> bytes:
    packed = b"".join(map(_varint, values))
    return _varint(field << 3 | 2) + _varint(len(packed)) + packed


def sharding_text(
    layout: Iterable[Union[int, Sequence[int], None]], mesh_shape: Shape
) -> Optional[bytes]:
    """Returns a layout as a serialized OpSharding, or None if it splits nothing.

    Args:
      layout: the TensorLayout of a tensor; for a dimension that several mesh axes split, their
        sequence, that of the largest parts first.
      mesh_shape: the Shape of the mesh; devices are numbered in row-major order.
    """
    sizes = mesh_shape.to_integer_list
    axes = [[] if a is None else [a] if isinstance(a, int) else list(a) for a in layout]
    split = [axis for of_dim in axes for axis in of_dim if sizes[axis] > 1]
    if not split:
        return None
    # Devices of axes that split nothing hold copies; they vary fastest in the transposed range.
    others = [axis for axis in range(len(sizes)) if axis not in split]
    tiles = [list_product([sizes[axis] for axis in of_dim]) for of_dim in axes]
    copies = list_product([sizes[axis] for axis in others])
    encoded = _number(_TYPE, _OTHER) + _numbers(_TILES, tiles + [copies] * (copies > 1))
    if copies > 1:
        encoded += _number(_LAST_IS_COPIES, 1)
    return encoded + _numbers(_RANGE, sizes) + _numbers(_TRANSPOSED, split + others)


def annotated(value: tf.Tensor, sharding: bytes) -> tf.Tensor:
    """Returns the same value, which XLA's partitioner splits.

    Args:
      value: a whole value in a tf.function or a graph.
      sharding: from `sharding_text`.
    """
    return gen_xla_ops.xla_sharding(value, sharding=sharding, unspecified_dims=[])

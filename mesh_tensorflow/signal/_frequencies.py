"""Frequencies of Fourier transforms, and the order in which they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import Mesh, leaves_no_node
from mesh_tensorflow._core.shape import Dimension, convert_to_dimension
from mesh_tensorflow._core.tensor import Tensor, check_tensors
from mesh_tensorflow.ops._source import given_dimension
from mesh_tensorflow.signal._transforms import frequency_dimension

__all__ = ["fftfreq", "fftshift", "ifftshift", "rfftfreq"]

_Dims = Union[Dimension, Sequence[Dimension], None]


def _check_not_empty(what: str, dim: Dimension) -> Dimension:
    dim = convert_to_dimension(dim)
    if not dim.size:
        raise ValueError(
            f"{what}: {dims_text([dim])} has no frequencies; give a dimension of at least 1"
        )
    return dim


@leaves_no_node
def fftfreq(mesh: Mesh, dim: Dimension, d: float = 1.0, dtype: tf.DType = tf.float32) -> Tensor:
    """Returns the frequencies of `fft` along a dimension, in cycles per unit of length.

    >>> print(mtf.signal.fftfreq(mesh, mtf.Dimension("x", 4)).numpy())
    [ 0.    0.25 -0.5  -0.25]

    Args:
      mesh: a Mesh.
      dim: the Dimension of frequencies, of size n.
      d: the distance of two neighboring points of the signal.
      dtype: a dtype.

    Returns:
      A Tensor of shape [dim]: 0, 1, ..., -2, -1, each divided by n * d.

    Raises:
      ValueError: the dimension is empty.
    """
    dim = _check_not_empty("fftfreq", dim)
    half = dim.size // 2
    k = mtf.mod(mtf.mtf_range(mesh, dim, tf.int32) + half, dim.size) - half
    return mtf.cast(k, dtype) * (1.0 / (dim.size * d))


@leaves_no_node
def rfftfreq(
    mesh: Mesh,
    dim: Dimension,
    d: float = 1.0,
    dtype: tf.DType = tf.float32,
    new_dim: Optional[Dimension] = None,
) -> Tensor:
    """Returns the frequencies of `rfft` along a dimension, in cycles per unit of length.

    >>> y = mtf.signal.rfftfreq(mesh, mtf.Dimension("x", 4))
    >>> print(y.shape, y.numpy())
    Shape[x_frequency=3] [0.   0.25 0.5 ]

    Args:
      mesh: a Mesh.
      dim: the Dimension of the signal, of size n.
      d: the distance of two neighboring points of the signal.
      dtype: a dtype.
      new_dim: the Dimension of frequencies, of size n // 2 + 1, as in `rfft`.

    Returns:
      A Tensor of shape [new_dim]: 0, 1, ..., n // 2, each divided by n * d.

    Raises:
      ValueError: the dimension is empty, or `new_dim` has another size.
    """
    dim = _check_not_empty("rfftfreq", dim)
    own = frequency_dimension(dim)
    new_dim = own if new_dim is None else convert_to_dimension(new_dim)
    if new_dim.size != own.size:
        raise ValueError(
            f"rfftfreq: {dims_text([dim])} has {own.size} frequencies, which do not fit "
            f"{dims_text([new_dim])}. Write mtf.Dimension({new_dim.name!r}, {own.size})"
        )
    return mtf.mtf_range(mesh, new_dim, dtype) * (1.0 / (dim.size * d))


def _shifted(what: str, x: Tensor, dims: _Dims, sign: int) -> Tensor:
    check_tensors(what, [x])
    if dims is None:
        dims = x.shape.dims
    for d in [dims] if isinstance(dims, Dimension) else dims:
        d = given_dimension(what, x, d)
        # Of odd sizes one half has an element more.
        offset = d.size // 2 if sign > 0 else -(d.size // 2)
        x = mtf.shift(x, offset, d, wrap=True, name=what)
    return x


@leaves_no_node
def fftshift(x: Tensor, dims: _Dims = None) -> Tensor:
    """Returns a Tensor with frequency 0 moved to the middle of each dimension.

    Where a dimension is split, neighboring processors exchange parts of their slices.

    >>> k = mtf.signal.fftfreq(mesh, mtf.Dimension("x", 4))
    >>> print(mtf.signal.fftshift(k).numpy())
    [-0.5  -0.25  0.    0.25]

    Args:
      x: a Tensor of any dtype.
      dims: a Dimension or a list of them; all dimensions if None.

    Raises:
      ValueError: a dimension is not there.
    """
    return _shifted("fftshift", x, dims, 1)


@leaves_no_node
def ifftshift(x: Tensor, dims: _Dims = None) -> Tensor:
    """Returns the inverse of `fftshift`; takes the same arguments.

    >>> k = mtf.signal.fftfreq(mesh, mtf.Dimension("x", 4))
    >>> print(mtf.signal.ifftshift(mtf.signal.fftshift(k)).numpy())
    [ 0.    0.25 -0.5  -0.25]
    """
    return _shifted("ifftshift", x, dims, -1)

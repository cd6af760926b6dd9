"""Fourier transforms along named dimensions, of which a layout may split any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import WrongTypeError, dims_text
from mesh_tensorflow._core.graph import Mesh, leaves_no_node
from mesh_tensorflow._core.operation import Tensor, check_tensors
from mesh_tensorflow._core.shape import Dimension, convert_to_dimension
from mesh_tensorflow.ops._source import given_dimension
from mesh_tensorflow.signal._fft import FourierOperation

__all__ = [
    "fft",
    "fft3d",
    "fftfreq",
    "fftn",
    "fftshift",
    "ifft",
    "ifft3d",
    "ifftn",
    "ifftshift",
    "irfft",
    "rfft",
    "rfftfreq",
]


def _dims(what: str, x: Tensor, given: object) -> list[Dimension]:
    """Returns a list of Dimensions."""
    # A Dimension is a tuple as well.
    if not isinstance(given, (list, tuple)) or isinstance(given, Dimension):
        raise WrongTypeError(
            f"{what} takes a list of mtf.Dimensions of {x.name} {x.shape}, not {given!r}"
        )
    return [given_dimension(what, x, d) for d in given]


def _along_one(
    kind: str, x: Tensor, dim: Dimension, new_dim: Optional[Dimension], name: Optional[str]
) -> Tensor:
    return _along_several(kind, x, [dim], None if new_dim is None else [new_dim], name)


def _along_several(
    kind: str,
    x: Tensor,
    dims: Sequence[Dimension],
    new_dims: Optional[Sequence[Dimension]],
    name: Optional[str],
) -> Tensor:
    dims = _dims(kind, x, dims)
    new_dims = dims if new_dims is None else _dims(kind, x, new_dims)
    return FourierOperation(kind, x, dims, new_dims, name).outputs[0]


def fft(
    x: Tensor, dim: Dimension, new_dim: Optional[Dimension] = None, name: Optional[str] = None
) -> Tensor:
    """Returns the discrete Fourier transform along a dimension, as numpy.fft.fft does.

    A dimension that is split is made whole by an all-to-all, in which another one of the Tensor is
    split instead, and is split again by another all-to-all after it was transformed. It is gathered
    if the Tensor has no other dimension that is whole.

    >>> x = mtf.constant(mesh, [1.0, 2.0, 3.0, 4.0], "x:4", tf.complex64)
    >>> print(mtf.signal.fft(x, x.shape[0]).numpy())
    [10.+0.j -2.+2.j -2.+0.j -2.-2.j]

    Args:
      x: a Tensor, complex64 or complex128.
      dim: a Dimension of it.
      new_dim: the Dimension of frequencies, of the same size; `dim` if None.
      name: a string or None.

    Raises:
      ValueError: `dim` is not there, or `new_dim` has another size.
      WrongTypeError: `x` is not complex.
    """
    return _along_one("fft", x, dim, new_dim, name)


def ifft(
    x: Tensor, dim: Dimension, new_dim: Optional[Dimension] = None, name: Optional[str] = None
) -> Tensor:
    """Returns the inverse of `fft`; takes the same arguments.

    >>> x = mtf.constant(mesh, [10, -2 + 2j, -2, -2 - 2j], "x:4", tf.complex64)
    >>> print(mtf.signal.ifft(x, x.shape[0]).numpy())
    [1.+0.j 2.+0.j 3.+0.j 4.+0.j]
    """
    return _along_one("ifft", x, dim, new_dim, name)


def _frequency_dimension(dim: Dimension) -> Dimension:
    """Returns the dimension of the frequencies of a real signal, if none is given."""
    return Dimension(f"{dim.name}_frequency", dim.size // 2 + 1)


def rfft(
    x: Tensor, dim: Dimension, new_dim: Optional[Dimension] = None, name: Optional[str] = None
) -> Tensor:
    """Returns the Fourier transform of real numbers: the n // 2 + 1 frequencies from 0.

    The others are the conjugates of these. It communicates as `fft` does.

    >>> x = mtf.constant(mesh, [1.0, 2.0, 3.0, 4.0], "x:4")
    >>> y = mtf.signal.rfft(x, x.shape[0])
    >>> print(y.shape, y.numpy())
    Shape[x_frequency=3] [10.+0.j -2.+2.j -2.+0.j]

    Args:
      x: a Tensor, float32 or float64.
      dim: a Dimension of it, of size n.
      new_dim: the Dimension of frequencies, of size n // 2 + 1; if None, its name is that of `dim`
        with "_frequency" appended, since a layout that splits `dim` seldom fits its size.
      name: a string or None.

    Returns:
      A complex Tensor.

    Raises:
      ValueError: `dim` is not there, or `new_dim` has another size.
      WrongTypeError: `x` is neither float32 nor float64.
    """
    dim = given_dimension("rfft", x, dim)
    return _along_one("rfft", x, dim, new_dim or _frequency_dimension(dim), name)


def irfft(x: Tensor, dim: Dimension, new_dim: Dimension, name: Optional[str] = None) -> Tensor:
    """Returns the inverse of `rfft`: real numbers, from the frequencies from 0.

    >>> x = mtf.constant(mesh, [10, -2 + 2j, -2], "frequency:3", tf.complex64)
    >>> print(mtf.signal.irfft(x, x.shape[0], mtf.Dimension("x", 4)).numpy())
    [1. 2. 3. 4.]

    Args:
      x: a Tensor, complex64 or complex128.
      dim: a Dimension of it, of size m.
      new_dim: the Dimension of the result, of size 2 m - 2 or 2 m - 1.
      name: a string or None.

    Returns:
      A Tensor of real numbers.

    Raises:
      ValueError: `dim` is not there, or `new_dim` has another size.
      WrongTypeError: `x` is not complex.
    """
    return _along_one("irfft", x, dim, new_dim, name)


def fftn(
    x: Tensor,
    dims: Sequence[Dimension],
    new_dims: Optional[Sequence[Dimension]] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the discrete Fourier transform along several dimensions, as numpy.fft.fftn does.

    Of all orders in which the dimensions can be made whole and transformed, it takes one that
    communicates the least. With `new_dims` the layout can split the result otherwise than `x`,
    which saves the all-to-alls at the end.

    >>> x = mtf.ones(mesh, "x:2,y:2", tf.complex64)
    >>> print(mtf.signal.fftn(x, x.shape.dims).numpy())
    [[4.+0.j 0.+0.j]
     [0.+0.j 0.+0.j]]

    Args:
      x: a Tensor, complex64 or complex128.
      dims: a list of its Dimensions, in any order.
      new_dims: the Dimensions of frequencies that take their places; `dims` if None.
      name: a string or None.

    Raises:
      ValueError: one of `dims` is not there, or `new_dims` have other sizes.
      WrongTypeError: `x` is not complex.
    """
    return _along_several("fft", x, dims, new_dims, name)


def ifftn(
    x: Tensor,
    dims: Sequence[Dimension],
    new_dims: Optional[Sequence[Dimension]] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the inverse of `fftn`; takes the same arguments.

    >>> x = mtf.ones(mesh, "x:2,y:2", tf.complex64)
    >>> print(mtf.signal.ifftn(x, x.shape.dims).numpy())
    [[1.+0.j 0.+0.j]
     [0.+0.j 0.+0.j]]
    """
    return _along_several("ifft", x, dims, new_dims, name)


def _check_three(what: str, x: Tensor, dims: Sequence[Dimension]) -> None:
    if len(_dims(what, x, dims)) != 3:
        raise ValueError(
            f"{what} transforms three dimensions of {x.name} {x.shape}, not "
            f"{dims_text(dims) or 'none'}; mtf.signal.{what[:-2]}n takes any number"
        )


def fft3d(
    x: Tensor,
    dims: Sequence[Dimension],
    new_dims: Optional[Sequence[Dimension]] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the discrete Fourier transform along three dimensions; see `fftn`.

    >>> x = mtf.ones(mesh, "x:2,y:2,z:2", tf.complex64)
    >>> k = mtf.convert_to_shape("kx:2,ky:2,kz:2").dims
    >>> print(mtf.signal.fft3d(x, x.shape.dims, k).shape)
    Shape[kx=2, ky=2, kz=2]
    """
    _check_three("fft3d", x, dims)
    return fftn(x, dims, new_dims, name)


def ifft3d(
    x: Tensor,
    dims: Sequence[Dimension],
    new_dims: Optional[Sequence[Dimension]] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the inverse of `fft3d`; takes the same arguments.

    >>> x = mtf.ones(mesh, "kx:2,ky:2,kz:2", tf.complex64)
    >>> r = mtf.convert_to_shape("x:2,y:2,z:2").dims
    >>> print(mtf.signal.ifft3d(x, x.shape.dims, r).shape)
    Shape[x=2, y=2, z=2]
    """
    _check_three("ifft3d", x, dims)
    return ifftn(x, dims, new_dims, name)


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
    # 0, 1, ..., and from the middle on -(n // 2), ..., -1: a function of the index, so that no
    # processor needs more than its part.
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
    own = _frequency_dimension(dim)
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
    # A Dimension is a tuple as well.
    several = isinstance(dims, (list, tuple)) and not isinstance(dims, Dimension)
    several_dims: Any = dims if several else [dims]
    for d in several_dims:
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

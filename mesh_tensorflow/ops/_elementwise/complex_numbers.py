"""Complex numbers: their parts, conjugates, absolute values and angles.

Gradients follow TensorFlow's convention: that of a real function of z = x + i y is
d/dx + i d/dy, so that the gradient through a holomorphic function is multiplied by the conjugate of
its derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.operation import gradient_of_output
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow.ops._elementwise.binary import BinaryOpWithBroadcasting
from mesh_tensorflow.ops._elementwise.dtypes import complex_dtype, is_complex, part_dtype
from mesh_tensorflow.ops._elementwise.slicewise import SlicewiseOperation, cwise

__all__ = ["ComplexOperation", "angle", "conj", "imag", "mtf_complex", "real"]


class ComplexOperation(BinaryOpWithBroadcasting):
    """Complex numbers with given real and imaginary parts."""

    def __init__(self, real: Tensor, imag: Tensor, name: Optional[str] = None):
        """Creates the operation; see `mtf_complex`."""
        dtype = complex_dtype(name or "complex", real)
        super().__init__(tf.complex, real, imag, None, dtype, name=name or "complex")

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Sums the parts of dy to the shapes of the inputs."""
        dy, (x1, x2) = gradient_of_output(grad_ys), self.inputs
        parts = [real(dy), imag(dy)]
        return [mtf.reduce_sum(d, output_shape=x.shape) for d, x in zip(parts, (x1, x2))]


def mtf_complex(real: Tensor, imag: Tensor, name: Optional[str] = "complex") -> Tensor:
    """Returns complex numbers with given real and imaginary parts; exported as mtf.complex.

    The two are broadcast by dimension name, as in `add`.

    >>> x = mtf.constant(mesh, [1.0, 2.0], "d:2")
    >>> print(mtf.complex(x, x * 3.0).numpy())
    [1.+3.j 2.+6.j]

    Args:
      real: a Tensor of float32 or float64.
      imag: a Tensor of the same dtype.
      name: a string or None.

    Raises:
      WrongTypeError: the dtype is another one.
      ValueError: the dtypes differ.
    """
    complex_dtype(name or "complex", real)
    complex_dtype(name or "complex", imag)
    return ComplexOperation(real, imag, name).outputs[0]


def real(x: Tensor, name: Optional[str] = "real") -> Tensor:
    """Returns the real part of each element of `x`; `x` itself if it is real.

    >>> x = mtf.constant(mesh, [1 + 2j, 3 - 4j], "d:2", tf.complex64)
    >>> print(mtf.real(x).numpy())
    [1. 3.]
    """
    if not is_complex(x):
        return x
    return cwise(
        tf.math.real, [x], part_dtype(x.dtype), lambda op, dy: [mtf.cast(dy, x.dtype)], name
    )


def imag(x: Tensor, name: Optional[str] = "imag") -> Tensor:
    """Returns the imaginary part of each element of `x`; zeros if it is real.

    >>> x = mtf.constant(mesh, [1 + 2j, 3 - 4j], "d:2", tf.complex64)
    >>> print(mtf.imag(x).numpy())
    [ 2. -4.]
    """
    if not is_complex(x):
        return mtf.zeros_like(x)
    return cwise(
        tf.math.imag, [x], part_dtype(x.dtype), lambda op, dy: [mtf.cast(dy, x.dtype) * 1j], name
    )


def conj(x: Tensor, name: Optional[str] = "conj") -> Tensor:
    """Returns the complex conjugate of each element of `x`; `x` itself if it is real.

    >>> x = mtf.constant(mesh, [1 + 2j, 3 - 4j], "d:2", tf.complex64)
    >>> print(mtf.conj(x).numpy())
    [1.-2.j 3.+4.j]
    """
    if not is_complex(x):
        return x
    return cwise(tf.math.conj, [x], name=name, grad_function=lambda op, dy: [conj(dy)])


def angle(x: Tensor, name: Optional[str] = "angle") -> Tensor:
    """Returns the argument of each element of `x`, from -pi to pi; its gradient at 0 is 0.

    >>> x = mtf.constant(mesh, [1j, -2 + 0j], "d:2", tf.complex64)
    >>> print(np.round(mtf.angle(x).numpy(), 3))
    [1.571 3.142]

    Args:
      x: a Tensor of complex numbers, float32 or float64.
      name: a string or None.

    Raises:
      WrongTypeError: the dtype is another one.
    """
    if not is_complex(x):
        complex_dtype(name or "angle", x)
    return cwise(tf.math.angle, [x], part_dtype(x.dtype), _angle_grad, name)


def _angle_grad(op: SlicewiseOperation, dy: Tensor) -> list[Optional[Tensor]]:
    """The angle grows along i x, by 1 / |x| for each unit of length."""
    x = op.inputs[0]
    if not is_complex(x):
        return [None]

    def kernel(x: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        squared = tf.square(tf.math.real(x)) + tf.square(tf.math.imag(x))
        # At 0 the angle has no slope in any direction; 0 stands for none, as in TensorFlow.
        length = tf.math.divide_no_nan(dy, squared)
        return tf.complex(-tf.math.imag(x) * length, tf.math.real(x) * length)

    return [cwise(kernel, [x, dy], name="angle_grad")]


def modulus(x: Tensor) -> Tensor:
    """Returns the absolute value of complex numbers, which is real."""

    def kernel(x: tf.Tensor, y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        length = tf.math.divide_no_nan(dy, y)
        return tf.complex(tf.math.real(x) * length, tf.math.imag(x) * length)

    def grad_function(op: SlicewiseOperation, dy: Tensor) -> list[Tensor]:
        return [cwise(kernel, [op.inputs[0], op.outputs[0], dy], name="abs_grad")]

    return cwise(tf.abs, [x], part_dtype(x.dtype), grad_function, "abs")

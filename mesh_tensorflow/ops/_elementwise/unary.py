"""Operations of one value, of complex numbers too.

Gradients follow TensorFlow's convention: that of a real function of z = x + i y is
d/dx + i d/dy, so that the gradient through a holomorphic function is multiplied by the conjugate of
its derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.operation import (
    Operation,
    Tensor,
    check_booleans,
    check_fractions,
    check_numbers,
    check_real,
    gradient_of_output,
    is_differentiable,
)
from mesh_tensorflow._mesh.slice_functions import constant
from mesh_tensorflow.ops._elementwise.binary import BinaryOpWithBroadcasting, add_n
from mesh_tensorflow.ops._elementwise.slicewise import (
    SlicewiseOperation,
    complex_dtype,
    cwise,
    is_complex,
)

__all__ = [
    "ComplexOperation",
    "angle",
    "cast",
    "conj",
    "cos",
    "elu",
    "exp",
    "gelu",
    "identity",
    "imag",
    "leaky_relu",
    "log",
    "logical_not",
    "mtf_abs",
    "mtf_complex",
    "mtf_pow",
    "negative",
    "real",
    "reciprocal",
    "relu",
    "rsqrt",
    "selu",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "softplus",
    "sqrt",
    "square",
    "squared_relu",
    "swish",
    "tanh",
    "to_bfloat16",
    "to_float",
    "to_int32",
]


class ComplexOperation(BinaryOpWithBroadcasting):
    """Complex numbers with given real and imaginary parts."""

    def __init__(self, real: Tensor, imag: Tensor, name: Optional[str] = None):
        """Creates the operation; see `mtf_complex`."""
        dtype = complex_dtype(name or "complex", real)
        complex_dtype(name or "complex", imag)
        super().__init__(tf.complex, real, imag, None, dtype, name=name or "complex")

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Sums the parts of dy to the shapes of the inputs."""
        dy, (x1, x2) = gradient_of_output(grad_ys), self.inputs
        # z = a + i b: by the convention, dz = dL/da + i dL/db for a real L.
        real_and_imag = [real(dy), imag(dy)]
        return [mtf.reduce_sum(d, output_shape=x.shape) for d, x in zip(real_and_imag, (x1, x2))]


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
        tf.math.real, [x], x.dtype.real_dtype, lambda op, dy: [mtf.cast(dy, x.dtype)], name
    )


def imag(x: Tensor, name: Optional[str] = "imag") -> Tensor:
    """Returns the imaginary part of each element of `x`; zeros if it is real.

    >>> x = mtf.constant(mesh, [1 + 2j, 3 - 4j], "d:2", tf.complex64)
    >>> print(mtf.imag(x).numpy())
    [ 2. -4.]
    """
    if not is_complex(x):
        return mtf.zeros_like(x)
    # y = Im(a + i b) has dy/da + i dy/db = i.
    return cwise(
        tf.math.imag, [x], x.dtype.real_dtype, lambda op, dy: [mtf.cast(dy, x.dtype) * 1j], name
    )


def conj(x: Tensor, name: Optional[str] = "conj") -> Tensor:
    """Returns the complex conjugate of each element of `x`; `x` itself if it is real.

    >>> x = mtf.constant(mesh, [1 + 2j, 3 - 4j], "d:2", tf.complex64)
    >>> print(mtf.conj(x).numpy())
    [1.-2.j 3.+4.j]
    """
    if not is_complex(x):
        return x
    # conj(a + i b) = a - i b, so dL/db changes its sign, and the gradient is the conjugate of dy.
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
    return cwise(tf.math.angle, [x], x.dtype.real_dtype, _angle_grad, name)


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
        # d|x|/da + i d|x|/db = x / |x| for x = a + i b; 0 at 0, where there is no slope.
        length = tf.math.divide_no_nan(dy, y)
        return tf.complex(tf.math.real(x) * length, tf.math.imag(x) * length)

    def grad_function(op: SlicewiseOperation, dy: Tensor) -> list[Tensor]:
        return [cwise(kernel, [op.inputs[0], op.outputs[0], dy], name="abs_grad")]

    return cwise(tf.abs, [x], x.dtype.real_dtype, grad_function, "abs")


def _from_output(
    grad_kernel: Callable, name: str, of_complex: Optional[Callable] = None
) -> Callable:
    """Returns a gradient function that applies a kernel to the output and its gradient.

    The kernel conjugates complex outputs. For those that do not so in XLA, `of_complex` takes the
    conjugate instead.
    """

    def kernel(y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        if of_complex is not None and y.dtype.is_complex:
            return of_complex(tf.math.conj(y), dy)
        return grad_kernel(y, dy)

    def grad_function(op: SlicewiseOperation, dy: Tensor) -> list[Tensor]:
        # From the output, so that the input need not be kept.
        return [cwise(kernel, [op.outputs[0], dy], name=name)]

    return grad_function


def _from_input(grad_kernel: Callable, name: str) -> Callable:
    """Returns a gradient function that applies a kernel to the input and the output's gradient.

    A complex input is conjugated for it, as in TensorFlow's gradients.
    """

    def kernel(x: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        return grad_kernel(tf.math.conj(x), dy)  # which leaves real ones alone

    def grad_function(op: SlicewiseOperation, dy: Tensor) -> list[Tensor]:
        return [cwise(kernel, [op.inputs[0], dy], name=name)]

    return grad_function


_raw = tf.raw_ops


def sin(x: Tensor, name: Optional[str] = "sin") -> Tensor:
    """Returns the sine of each element of `x`, a floating Tensor.

    >>> x = mtf.constant(mesh, [1.0, 2.0, 4.0], "d:3")
    >>> print(np.round(mtf.sin(x).numpy(), 3))
    [ 0.841  0.909 -0.757]
    """
    check_fractions("sin", [x], of_complex=True)
    kernel = _from_input(lambda x, dy: dy * tf.cos(x), "sin_grad")
    return cwise(tf.sin, [x], name=name, grad_function=kernel)


def cos(x: Tensor, name: Optional[str] = "cos") -> Tensor:
    """Returns the cosine of each element of `x`, a floating Tensor.

    >>> x = mtf.constant(mesh, [1.0, 2.0, 4.0], "d:3")
    >>> print(np.round(mtf.cos(x).numpy(), 3))
    [ 0.54  -0.416 -0.654]
    """
    check_fractions("cos", [x], of_complex=True)
    kernel = _from_input(lambda x, dy: dy * -tf.sin(x), "cos_grad")
    return cwise(tf.cos, [x], name=name, grad_function=kernel)


def identity(x: Tensor, name: Optional[str] = "identity") -> Tensor:
    """Returns a Tensor with the same values as `x`.

    >>> x = mtf.constant(mesh, [1.0, 2.0, 4.0], "d:3")
    >>> print(np.round(mtf.identity(x).numpy(), 3))
    [1. 2. 4.]
    """
    return cwise(tf.identity, [x], name=name, grad_function=lambda op, dy: [dy])


def square(x: Tensor, name: Optional[str] = "square") -> Tensor:
    """Returns the square of each element of `x`.

    >>> x = mtf.constant(mesh, [1.0, 2.0, 4.0], "d:3")
    >>> print(np.round(mtf.square(x).numpy(), 3))
    [ 1.  4. 16.]
    """
    check_numbers("square", [x])
    # y = z^2 has dz = dy conj(2 z); conj leaves real numbers alone.
    return cwise(
        tf.square, [x], name=name, grad_function=lambda op, dy: [dy * (conj(op.inputs[0]) * 2.0)]
    )


def sqrt(x: Tensor, name: Optional[str] = "sqrt") -> Tensor:
    """Returns the square root of each element of `x`, a floating Tensor.

    >>> x = mtf.constant(mesh, [1.0, 2.0, 4.0], "d:3")
    >>> print(np.round(mtf.sqrt(x).numpy(), 3))
    [1.    1.414 2.   ]
    """
    check_fractions("sqrt", [x], of_complex=True)
    # y = sqrt(x) has dy/dx = 1 / (2 y).
    kernel = _from_output(
        lambda y, dy: _raw.SqrtGrad(y=y, dy=dy), "sqrt_grad", lambda y, dy: dy * 0.5 / y
    )
    return cwise(tf.sqrt, [x], name=name, grad_function=kernel)


def rsqrt(x: Tensor, name: Optional[str] = "rsqrt") -> Tensor:
    """Returns the reciprocal square root of each element of `x`, a floating Tensor.

    >>> x = mtf.constant(mesh, [1.0, 2.0, 4.0], "d:3")
    >>> print(np.round(mtf.rsqrt(x).numpy(), 3))
    [1.    0.707 0.5  ]
    """
    check_fractions("rsqrt", [x], of_complex=True)
    # y = 1 / sqrt(x) has dy/dx = -y^3 / 2.
    kernel = _from_output(
        lambda y, dy: _raw.RsqrtGrad(y=y, dy=dy), "rsqrt_grad", lambda y, dy: dy * -0.5 * y * y * y
    )
    return cwise(tf.math.rsqrt, [x], name=name, grad_function=kernel)


def log(x: Tensor, name: Optional[str] = "log") -> Tensor:
    """Returns the natural logarithm of each element of `x`, a floating Tensor.

    >>> x = mtf.constant(mesh, [1.0, 2.0, 4.0], "d:3")
    >>> print(np.round(mtf.log(x).numpy(), 3))
    [0.    0.693 1.386]
    """
    check_fractions("log", [x], of_complex=True)
    # y = log(x) has dy/dx = 1 / x.
    kernel = _from_input(lambda x, dy: dy / x, "log_grad")
    return cwise(tf.math.log, [x], name=name, grad_function=kernel)


def exp(x: Tensor, name: Optional[str] = "exp") -> Tensor:
    """Returns e to the power of each element of `x`, a floating Tensor.

    >>> x = mtf.constant(mesh, [1.0, 2.0, 4.0], "d:3")
    >>> print(np.round(mtf.exp(x).numpy(), 3))
    [ 2.718  7.389 54.598]
    """
    check_fractions("exp", [x], of_complex=True)
    # y = exp(x) has dy/dx = y.
    return cwise(tf.exp, [x], name=name, grad_function=lambda op, dy: [dy * conj(op.outputs[0])])


def sigmoid(x: Tensor, name: Optional[str] = "sigmoid") -> Tensor:
    """Returns 1 / (1 + exp(-x)), elementwise.

    >>> x = mtf.constant(mesh, [-1.0, 0.0, 2.0], "d:3")
    >>> print(np.round(mtf.sigmoid(x).numpy(), 3))
    [0.269 0.5   0.881]
    """
    check_fractions("sigmoid", [x], of_complex=True)
    # This kernel does not conjugate, unlike SqrtGrad: TensorFlow's own gradient does so before it.
    kernel = _from_output(lambda y, dy: _raw.SigmoidGrad(y=tf.math.conj(y), dy=dy), "sigmoid_grad")
    return cwise(tf.sigmoid, [x], name=name, grad_function=kernel)


def tanh(x: Tensor, name: Optional[str] = "tanh") -> Tensor:
    """Returns the hyperbolic tangent of each element of `x`.

    >>> x = mtf.constant(mesh, [-1.0, 0.0, 2.0], "d:3")
    >>> print(np.round(mtf.tanh(x).numpy(), 3))
    [-0.762  0.     0.964]
    """
    check_fractions("tanh", [x], of_complex=True)
    # y = tanh(x) has dy/dx = 1 - y^2.
    kernel = _from_output(lambda y, dy: _raw.TanhGrad(y=tf.math.conj(y), dy=dy), "tanh_grad")
    return cwise(tf.tanh, [x], name=name, grad_function=kernel)


def negative(x: Tensor, name: Optional[str] = "negative") -> Tensor:
    """Returns -x, elementwise.

    >>> x = mtf.constant(mesh, [-1.0, 0.0, 2.0], "d:3")
    >>> print(np.round(mtf.negative(x).numpy(), 3))
    [ 1. -0. -2.]
    """
    check_numbers("negative", [x])
    # Modulo 2 ** bits, as subtraction from 0: TensorFlow has no negatives of unsigned numbers.
    fn = (lambda t: tf.zeros_like(t) - t) if x.dtype.is_unsigned else tf.negative
    return cwise(fn, [x], name=name, grad_function=lambda op, dy: [negative(dy)])


def logical_not(x: Tensor, name: Optional[str] = "logical_not") -> Tensor:
    """Returns the negation of each element of `x`, a boolean Tensor.

    >>> x = mtf.constant(mesh, [True, False], "d:2", tf.bool)
    >>> print(mtf.logical_not(x).numpy())
    [False  True]
    """
    check_booleans("logical_not", [x])
    return cwise(tf.logical_not, [x], name=name)


def swish(x: Tensor) -> Tensor:
    """Returns x * sigmoid(x), elementwise (https://arxiv.org/abs/1710.05941).

    >>> x = mtf.constant(mesh, [-1.0, 0.0, 2.0], "d:3")
    >>> print(np.round(mtf.swish(x).numpy(), 3))
    [-0.269  0.     1.762]
    """
    return _with_saved(x, _swish_forward, _swish_grad, _sigmoid_grad, "swish")


def silu(x: Tensor) -> Tensor:
    """Returns x * sigmoid(x), elementwise: `swish` by its other name.

    >>> x = mtf.constant(mesh, [-1.0, 0.0, 2.0], "d:3")
    >>> print(np.round(mtf.silu(x).numpy(), 3))
    [-0.269  0.     1.762]
    """
    return swish(x)


def _swish_forward(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    # The second output, as the gradient would otherwise compute the exponential again.
    s = tf.sigmoid(x)
    # The shape keeps TensorFlow's optimizer from making one kernel of both, which takes threads for
    # however few elements.
    return x * tf.ensure_shape(s, s.shape), s


def _swish_grad(x: tf.Tensor, s: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    # y = x s with s = sigmoid(x), so dy/dx = s + x s (1 - s).
    return dy * (s + x * s * (1.0 - s))


def _sigmoid_grad(x: tf.Tensor, s: tf.Tensor, ds: tf.Tensor) -> tf.Tensor:
    # s = sigmoid(x) has ds/dx = s (1 - s).
    return ds * s * (1.0 - s)


_GELU_SCALE = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


@leaves_no_node
def gelu(x: Tensor, approximate: bool = True) -> Tensor:
    """Returns the Gaussian error linear unit of `x` (https://arxiv.org/abs/1606.08415).

    x * P(X <= x) for a normal X, elementwise; or its tanh form,
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))).

    >>> x = mtf.constant(mesh, [-1.0, 0.0, 2.0], "d:3")
    >>> print(np.round(mtf.gelu(x).numpy(), 4), np.round(mtf.gelu(x, approximate=False).numpy(), 4))
    [-0.1588  0.      1.9546] [-0.1587  0.      1.9545]

    Args:
      x: a floating Tensor.
      approximate: whether to take the tanh form, as T5 and most language models do; False for the
        error function, as BERT in PyTorch and torch.nn.GELU.
    """
    if approximate:
        return _with_saved(x, _gelu_forward, _gelu_grad, _gelu_tanh_grad, "gelu")
    return x * _normal_cdf(x)


def _normal_cdf(x: Tensor) -> Tensor:
    check_fractions("gelu", [x])

    def probability(t: tf.Tensor) -> tf.Tensor:
        half, scale = (constant(c, t.dtype) for c in (0.5, math.sqrt(0.5)))
        # P(X <= t) = (1 + erf(t / sqrt(2))) / 2.
        return half * tf.math.erf(t * scale) + half

    def gradient(op: Operation, dy: Tensor) -> list[Tensor]:
        # d P(X <= x) / dx = exp(-x^2 / 2) / sqrt(2 pi).
        density = exp(square(op.inputs[0]) * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))
        return [dy * density]

    return cwise(probability, [x], name="normal_cdf", grad_function=gradient)


def _gelu_forward(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    scale, cubic = (constant(c, x.dtype) for c in (_GELU_SCALE, _GELU_SCALE * _GELU_CUBIC))
    half = constant(0.5, x.dtype)
    # The sqrt(2 / pi) is multiplied out, and x taken out of x + 0.044715 x^3: no power is computed.
    t = tf.tanh(x * (cubic * tf.square(x) + scale))
    return x * (half * t + half), t


def _gelu_grad(x: tf.Tensor, t: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    scale, cubic = (constant(c, x.dtype) for c in (_GELU_SCALE, 3.0 * _GELU_SCALE * _GELU_CUBIC))
    half_dy = dy * constant(0.5, x.dtype)
    # y = x (1 + t) / 2 has dy/dx = (1 + t) / 2 + x (1 - t^2) (scale + cubic x^2) / 2, where cubic
    # is thrice that of the forward function.
    through_tanh = _raw.TanhGrad(y=t, dy=half_dy * x)
    return (half_dy * t + half_dy) + through_tanh * (cubic * tf.square(x) + scale)


def _gelu_tanh_grad(x: tf.Tensor, t: tf.Tensor, dt: tf.Tensor) -> tf.Tensor:
    scale, cubic = (constant(c, x.dtype) for c in (_GELU_SCALE, 3.0 * _GELU_SCALE * _GELU_CUBIC))
    # t = tanh(scale x + cubic x^3 / 3) has dt/dx = (1 - t^2) (scale + cubic x^2).
    return _raw.TanhGrad(y=t, dy=dt) * (cubic * tf.square(x) + scale)


def _with_saved(
    x: Tensor, forward: Callable, grad: Callable, saved_grad: Callable, name: str
) -> Tensor:
    """Applies a function with a second output that is saved for its gradient."""
    check_fractions(name, [x])

    def grad_function(
        op: SlicewiseOperation, dy: Optional[Tensor], dsaved: Optional[Tensor]
    ) -> list:
        # What is saved has a gradient where that of `dy` is differentiated again.
        parts = [
            cwise(fn, [op.inputs[0], op.outputs[1], d], name=f"{name}_grad")
            for fn, d in ((grad, dy), (saved_grad, dsaved))
            if d is not None
        ]
        return [add_n(parts) if parts else None]

    op = SlicewiseOperation(
        forward, [x], [x.shape] * 2, [x.dtype] * 2, x.shape.dims, grad_function, name
    )
    return op.outputs[0]


def elu(x: Tensor) -> Tensor:
    """Returns the exponential linear unit of `x`, elementwise (https://arxiv.org/abs/1511.07289).

    >>> x = mtf.constant(mesh, [-1.0, 0.0, 2.0], "d:3")
    >>> print(np.round(mtf.elu(x).numpy(), 3))
    [-0.632  0.     2.   ]
    """
    check_fractions("elu", [x])
    # Below 0, y = exp(x) - 1 has dy/dx = y + 1, so the kernel needs no exponential.
    kernel = _from_output(lambda y, dy: _raw.EluGrad(gradients=dy, outputs=y), "elu_grad")
    return cwise(tf.nn.elu, [x], name="elu", grad_function=kernel)


def selu(x: Tensor) -> Tensor:
    """Returns the scaled exponential linear unit, elementwise (https://arxiv.org/abs/1706.02515).

    >>> x = mtf.constant(mesh, [-1.0, 0.0, 2.0], "d:3")
    >>> print(np.round(mtf.selu(x).numpy(), 3))
    [-1.111  0.     2.101]
    """
    check_fractions("selu", [x])
    # Below 0, y = s (exp(x) - 1) has dy/dx = y + s, for s the product of its two constants.
    kernel = _from_output(lambda y, dy: _raw.SeluGrad(gradients=dy, outputs=y), "selu_grad")
    return cwise(tf.nn.selu, [x], name="selu", grad_function=kernel)


def softplus(x: Tensor) -> Tensor:
    """Returns log(1 + exp(x)), elementwise.

    >>> x = mtf.constant(mesh, [-1.0, 0.0, 2.0], "d:3")
    >>> print(np.round(mtf.softplus(x).numpy(), 3))
    [0.313 0.693 2.127]
    """
    check_fractions("softplus", [x])
    # y = log(1 + exp(x)) has dy/dx = sigmoid(x).
    kernel = _from_input(lambda x, dy: _raw.SoftplusGrad(gradients=dy, features=x), "softplus_grad")
    return cwise(tf.math.softplus, [x], name="softplus", grad_function=kernel)


def reciprocal(x: Tensor, name: Optional[str] = "reciprocal") -> Tensor:
    """Returns 1 / x, elementwise.

    >>> x = mtf.constant(mesh, [1.0, 2.0, 4.0], "d:3")
    >>> print(np.round(mtf.reciprocal(x).numpy(), 3))
    [1.   0.5  0.25]
    """
    check_fractions("reciprocal", [x], of_complex=True)
    # y = 1 / x has dy/dx = -y^2.
    kernel = _from_output(
        lambda y, dy: _raw.ReciprocalGrad(y=y, dy=dy), "reciprocal_grad", lambda y, dy: -dy * y * y
    )
    return cwise(tf.math.reciprocal, [x], name=name, grad_function=kernel)


def relu(x: Tensor, name: Optional[str] = "relu") -> Tensor:
    """Returns max(x, 0), elementwise; its gradient at 0 is 0.

    >>> x = mtf.constant(mesh, [-1.0, 0.0, 2.0], "d:3")
    >>> print(np.round(mtf.relu(x).numpy(), 3))
    [0. 0. 2.]
    """
    check_real("relu", [x])
    # The kernel asks only whether features are above 0, and y is where x is.
    kernel = _from_output(lambda y, dy: _raw.ReluGrad(gradients=dy, features=y), "relu_grad")
    return cwise(tf.nn.relu, [x], name=name, grad_function=kernel)


@leaves_no_node
def squared_relu(x: Tensor) -> Tensor:
    """Returns max(x, 0) ** 2, elementwise (https://arxiv.org/abs/2109.08668).

    >>> x = mtf.constant(mesh, [-1.0, 0.0, 2.0], "d:3")
    >>> print(np.round(mtf.squared_relu(x).numpy(), 3))
    [0. 0. 4.]
    """
    return square(relu(x))


def leaky_relu(x: Tensor, alpha: float = 0.2, name: Optional[str] = "leaky_relu") -> Tensor:
    """Returns x where it is positive and alpha * x elsewhere.

    >>> x = mtf.constant(mesh, [-1.0, 0.0, 2.0], "d:3")
    >>> print(np.round(mtf.leaky_relu(x).numpy(), 3))
    [-0.2  0.   2. ]
    """
    check_fractions("leaky_relu", [x])

    def kernel(x: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        return _raw.LeakyReluGrad(gradients=dy, features=x, alpha=alpha)

    return cwise(
        lambda x: tf.nn.leaky_relu(x, alpha),
        [x],
        name=name,
        # From x, as y has the sign of x only if alpha is above 0.
        grad_function=_from_input(kernel, "leaky_relu_grad"),
    )


def sign(x: Tensor, name: Optional[str] = "sign") -> Tensor:
    """Returns the sign of each element of `x`: -1, 0 or 1; has no gradient.

    >>> x = mtf.constant(mesh, [-1.0, 0.0, 2.0], "d:3")
    >>> print(np.round(mtf.sign(x).numpy(), 3))
    [-1.  0.  1.]
    """
    check_real("sign", [x])
    # TensorFlow has no signs of unsigned numbers.
    fn = (lambda t: tf.cast(tf.not_equal(t, 0), t.dtype)) if x.dtype.is_unsigned else tf.sign
    # It has the slope 0 everywhere but at 0, so nothing flows back through it.
    return cwise(fn, [x], name=name, grad_function=lambda op, dy: [None])


@leaves_no_node
def mtf_abs(x: Tensor) -> Tensor:
    """Returns the absolute value of each element of `x`, real if `x` is complex.

    Its gradient at 0 is 0.

    >>> x = mtf.constant(mesh, [-1.0, 0.0, 2.0], "d:3")
    >>> print(np.round(mtf.abs(x).numpy(), 3))
    [1. 0. 2.]
    """
    # As sign has no gradient, that of the product is sign(x), which is 0 at 0.
    return modulus(x) if is_complex(x) else x * sign(x)


@leaves_no_node
def mtf_pow(x: Tensor, y: Union[Tensor, float]) -> Tensor:
    """Returns x to the power of y, as exp(log(x) * y); NaN for negative `x`.

    >>> x = mtf.constant(mesh, [1.0, 2.0, 4.0], "d:3")
    >>> print(np.round(mtf.pow(x, 2.0).numpy(), 3))
    [ 1.  4. 16.]

    Args:
      x: a Tensor with positive values.
      y: a Tensor or a number.
    """
    check_fractions("pow", [x], of_complex=True)
    # Of functions with known gradients, so that x and y both get theirs.
    return exp(log(x) * y)


def _cast_grad(op: SlicewiseOperation, dy: Tensor) -> list[Optional[Tensor]]:
    x = op.inputs[0]
    # Integers lie apart, so through a cast to them the slope is 0 or none.
    passes = is_differentiable(x.dtype) and is_differentiable(dy.dtype)
    return [cast(dy, x.dtype) if passes else None]


def cast(x: Tensor, dtype: tf.DType, name: Optional[str] = "cast") -> Tensor:
    """Returns `x` cast to `dtype`; `x` itself if it has that dtype already.

    The real part of complex numbers is cast to other dtypes; to booleans, whether they are not 0.

    >>> x = mtf.constant(mesh, [1.5, 2.5], "d:2")
    >>> print(mtf.cast(x, tf.int32).numpy())
    [1 2]
    """
    dtype = tf.as_dtype(dtype)
    if dtype == x.dtype:
        return x
    # TensorFlow's cast to real numbers takes the real part, too, but with a warning each time.
    real_part = is_complex(x) and not dtype.is_complex and not dtype.is_bool
    return cwise(
        lambda t: tf.cast(tf.math.real(t) if real_part else t, dtype),
        [x],
        output_dtype=dtype,
        name=name,
        grad_function=_cast_grad,
    )


def is_cast(op: Operation) -> bool:
    """Returns whether an operation is one of `cast`."""
    return isinstance(op, SlicewiseOperation) and op._grad_function is _cast_grad


def to_float(x: Tensor, name: Optional[str] = "to_float") -> Tensor:
    """Returns `x` as float32.

    >>> x = mtf.constant(mesh, [1, 2], "d:2", tf.int32)
    >>> print(mtf.to_float(x).numpy())
    [1. 2.]
    """
    return cast(x, tf.float32, name=name)


def to_bfloat16(x: Tensor, name: Optional[str] = "to_bfloat16") -> Tensor:
    """Returns `x` as bfloat16.

    >>> x = mtf.constant(mesh, [1.0, 1.001], "d:2")
    >>> print(mtf.to_float(mtf.to_bfloat16(x)).numpy())
    [1. 1.]
    """
    return cast(x, tf.bfloat16, name=name)


def to_int32(x: Tensor, name: Optional[str] = "to_int32") -> Tensor:
    """Returns `x` as int32.

    >>> x = mtf.constant(mesh, [1.5, -2.5], "d:2")
    >>> print(mtf.to_int32(x).numpy())
    [ 1 -2]
    """
    return cast(x, tf.int32, name=name)

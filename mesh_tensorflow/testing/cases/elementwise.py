"""Cases of single elements: functions of one value, of two, and of complex numbers."""

import math

import numpy as np
import tensorflow.compat.v1 as tf
from scipy import special

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import (
    ALL,
    FLOATS,
    INT,
    WIDE,
    aligned,
    case,
    dim,
    on,
    shape,
)

__all__ = ["CASES"]


def _gelu(x):
    # By tanh, as mtf.gelu is by default; "gelu_exact" below is by the normal distribution.
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _elu(x):
    return np.where(x > 0, x, np.expm1(x))


def _selu(x):
    # Klambauer et al., "Self-normalizing neural networks" (2017).
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    return scale * np.where(x > 0, x, alpha * np.expm1(x))


def _leaky(alpha):
    return lambda x: np.where(x > 0, x, alpha * x)


def _bfloat16(x):
    # Rounded to 8 bits, then back to what oracles compute in.
    return x.astype(tf.bfloat16.as_numpy_dtype).astype(np.float64)


# (function, its oracle, kind of input, dtypes)
_TABLE = [
    (mtf.sin, np.sin, "", FLOATS),
    (mtf.cos, np.cos, "", FLOATS),
    (mtf.identity, lambda x: x, "", ALL),
    (mtf.square, np.square, "", ALL),
    (mtf.sqrt, np.sqrt, "positive", FLOATS),
    (mtf.rsqrt, lambda x: 1 / np.sqrt(x), "positive", FLOATS),
    (mtf.log, np.log, "positive", FLOATS),
    (mtf.exp, np.exp, "", FLOATS),
    (mtf.sigmoid, special.expit, "", FLOATS),
    (mtf.tanh, np.tanh, "", FLOATS),
    (mtf.negative, np.negative, "", ALL),
    (mtf.swish, lambda x: x * special.expit(x), "", FLOATS),
    (mtf.silu, lambda x: x * special.expit(x), "", FLOATS),
    (mtf.gelu, _gelu, "", FLOATS),
    (mtf.elu, _elu, "away", FLOATS),
    (mtf.selu, _selu, "away", FLOATS),
    (mtf.softplus, lambda x: np.log1p(np.exp(x)), "", FLOATS),
    (mtf.reciprocal, lambda x: 1 / x, "positive", FLOATS),
    (mtf.relu, lambda x: np.maximum(x, 0), "away", ALL),
    (mtf.squared_relu, lambda x: np.maximum(x, 0) ** 2, "away", FLOATS),
    (mtf.leaky_relu, _leaky(0.2), "away", FLOATS),
    (mtf.abs, np.abs, "away", ALL),
]

_UNARY = [
    case(fn.__name__, [f"a b/{kind}"], fn, oracle, dtypes=dtypes)
    for fn, oracle, kind, dtypes in _TABLE
] + [
    case("leaky_relu_alpha", "a b/away", lambda x: mtf.leaky_relu(x, alpha=0.05), _leaky(0.05)),
    case("gelu_exact", "a b", lambda x: mtf.gelu(x, approximate=False),
         lambda x: x * special.ndtr(x), dtypes=FLOATS),
    case("sign", "a b/away", mtf.sign, np.sign, grads=(), dtypes=ALL),
    case("logical_not", "a b/bool", mtf.logical_not, np.logical_not),
    case("pow_number", "a b/positive", lambda x: mtf.pow(x, 2.5), lambda x: x**2.5),
    case("pow_tensor", "a b/positive, b", mtf.pow, on(np.power, "a b", "b", "a b")),
    case("cast_to_int", "a b", lambda x: mtf.cast(x * 3.0, tf.int32), lambda x: np.trunc(3 * x),
         grads=()),
    case("to_int32", "a b/away", mtf.to_int32, np.trunc, grads=()),
    case("to_float_int", "a b/int", mtf.to_float, lambda x: x),
    case("to_float_bool", "a b/bool", mtf.to_float, lambda x: x),
    case("cast_same", "a b", lambda x: mtf.cast(x, x.dtype) * 2.0, lambda x: 2 * x, dtypes=FLOATS),
    # Rounding makes steps of it, in which finite differences see no slope: no gradient is tried.
    case("to_bfloat16_and_back", "a b", lambda x: mtf.to_float(mtf.to_bfloat16(x)) * 2.0,
         lambda x: 2 * _bfloat16(x), surrogate=lambda x, at: 2 * x, grads=()),
    case("cast_int_to_bool", "a b/int", lambda x: mtf.cast(x, tf.bool), lambda x: x != 0),
    case("sign_of_int", "a b/int", lambda x: mtf.sign(x) * x, np.abs),
    case("composition", "a b", lambda x: mtf.tanh(mtf.exp(x * 0.5) - mtf.sin(x)) * mtf.sigmoid(x),
         lambda x: np.tanh(np.exp(x * 0.5) - np.sin(x)) * special.expit(x)),
]


# name -> (dimensions of both inputs, of the output, output_shape as given); one input may have to be
# broadcast, transposed, or both, at any place.
_FORMS = {
    "same": ("a b", "a b", "a b", None),
    "suffix": ("a b", "b", "a b", None),
    "prefix": ("a b", "a", "a b", None),
    "subset_first": ("b", "a b c", "a b c", None),
    "middle": ("a c", "a b c", "a b c", None),
    "crossed": ("a b", "b c", "a b c", None),
    "disjoint": ("a", "b", "a b", None),
    "permuted": ("a b", "b a", "a b", None),
    "scalar": ("a b", "", "a b", None),
    "scalar_first": ("", "a b", "a b", None),
    "output_given": ("a b", "b", "b a", "b a"),
    "output_larger": ("a b", "b", "c b a", "c b a"),
    "output_from_disjoint": ("a", "c", "c b a", "c b a"),
}


def _form_case(fn, oracle, form, kind="", second="", **kwargs):
    left, right, out, output_shape = _FORMS[form]
    output_shape = None if output_shape is None else shape(output_shape)
    return case(
        f"{fn.__name__}_{form}",
        [f"{left}/{kind}", f"{right}/{second or kind}"],
        lambda x, y: fn(x, y, output_shape=output_shape),
        on(oracle, left, right, out),
        # Additions may be delayed as partial sums; other functions all lower in the same way.
        thorough=fn is mtf.add or form == "crossed",
        **kwargs,
    )


def _numbers(x):
    """Returns an array of the shape of a Tensor or of an array."""
    sizes = getattr(x.shape, "to_integer_list", x.shape)
    return np.linspace(-1.0, 1.0, x.size).reshape(sizes).round(3)


_COMPARISONS = [
    (mtf.less, np.less),
    (mtf.less_equal, np.less_equal),
    (mtf.greater, np.greater),
    (mtf.greater_equal, np.greater_equal),
    (mtf.equal, np.equal),
    (mtf.not_equal, np.not_equal),
]

_ARITHMETIC = (
    [_form_case(mtf.add, np.add, f, dtypes=ALL) for f in _FORMS]
    + [_form_case(mtf.multiply, np.multiply, f, dtypes=ALL) for f in _FORMS]
    + [_form_case(mtf.sub, np.subtract, f) for f in _FORMS]
    + [_form_case(mtf.maximum, np.maximum, f) for f in _FORMS]
    + [_form_case(mtf.minimum, np.minimum, f) for f in ("same", "suffix", "crossed", "scalar")]
    + [_form_case(mtf.divide, np.divide, f, "", "positive")
       for f in ("same", "suffix", "crossed", "scalar_first", "output_larger")]
    + [_form_case(mtf.floordiv, np.floor_divide, f, "int", "divisor")
       for f in ("same", "suffix", "crossed")]
    + [_form_case(mtf.mod, np.mod, f, "int", "divisor") for f in ("same", "suffix", "crossed")]
    + [_form_case(fn, oracle, f, "ties", dtypes=("float32", "int32"), grads=())
       for fn, oracle in _COMPARISONS for f in ("suffix", "crossed")]
    + [_form_case(fn, oracle, f, "bool")
       for fn, oracle in [(mtf.logical_and, np.logical_and), (mtf.logical_or, np.logical_or)]
       for f in ("same", "crossed", "output_larger")]
)

# (name, on a tensor, on an array, kind, dtypes)
_NUMBERS = [
    ("x+2", lambda x: x + 2, lambda x: x + 2, "", ALL),
    ("2+x", lambda x: 2 + x, lambda x: 2 + x, "", ALL),
    ("x-2", lambda x: x - 2, lambda x: x - 2, "", ALL),
    ("2-x", lambda x: 2 - x, lambda x: 2 - x, "", ALL),
    ("x*2", lambda x: x * 2, lambda x: x * 2, "", ALL),
    ("2*x", lambda x: 2 * x, lambda x: 2 * x, "", ALL),
    ("x/2", lambda x: x / 2, lambda x: x / 2, "", FLOATS),
    ("2/x", lambda x: 2 / x, lambda x: 2 / x, "positive", FLOATS),
    ("-x", lambda x: -x, lambda x: -x, "", ALL),
    ("x//3", lambda x: x // 3, lambda x: x // 3, "", INT),
    ("7//x", lambda x: 7 // x, lambda x: 7 // x, "positive", INT),
    ("x%3", lambda x: x % 3, lambda x: x % 3, "", INT),
    ("7%x", lambda x: 7 % x, lambda x: 7 % x, "positive", INT),
    ("add(2,x)", lambda x: mtf.add(2.0, x), lambda x: 2 + x, "", FLOATS),
    ("sub(2,x)", lambda x: mtf.sub(2.0, x), lambda x: 2 - x, "", FLOATS),
    ("multiply(2,x)", lambda x: mtf.multiply(2.0, x), lambda x: 2 * x, "", FLOATS),
    ("divide(2,x)", lambda x: mtf.divide(2.0, x), lambda x: 2 / x, "positive", FLOATS),
    ("maximum(x,0.5)", lambda x: mtf.maximum(x, 0.5), lambda x: np.maximum(x, 0.5), "", FLOATS),
    ("minimum(0.5,x)", lambda x: mtf.minimum(0.5, x), lambda x: np.minimum(0.5, x), "", FLOATS),
    ("x+numpy", lambda x: x + np.float32(1.5), lambda x: x + 1.5, "", FLOATS),
    # Tensors of TensorFlow are not converted to another dtype, as numbers are.
    ("x*tf", lambda x: x * tf.constant(1.5), lambda x: x * 1.5, "", ("float32",)),
    ("x+tf", lambda x: x + tf.constant(1.5), lambda x: x + 1.5, "", ("float32",)),
    ("add_n", lambda x: mtf.add_n([x, x * 2, x * 3]), lambda x: 6 * x, "", ALL),
    ("not_equal(x,1)", lambda x: mtf.not_equal(x, 1), lambda x: x != 1, "", INT),
]

_BINARY = (
    _ARITHMETIC
    + [case(name, [f"a b/{kind}"], build, oracle, dtypes=dtypes, thorough=name == "x+2")
       for name, build, oracle, kind, dtypes in _NUMBERS]
    + [
        # Unsigned numbers wrap around at 0.
        case("sub_unsigned", "a b/below200, b/below200",
             lambda x, y: mtf.to_int32(mtf.cast(x, tf.uint8) - mtf.cast(y, tf.uint8)),
             lambda x, y: (x - y) % 256),
        case("array_of_its_shape", "a b", lambda x: _numbers(x) * x - _numbers(x),
             lambda x: x * _numbers(x) - _numbers(x)),
        # The gradient at equal elements is that of the first input alone.
        case("maximum_ties", "a b/ties, b/ties", mtf.maximum, on(np.maximum, "a b", "b", "a b"),
             surrogate=lambda x, y, at: np.where(at[0] >= at[1], x, 0) + np.where(
                 at[1] > at[0], y, 0)),
        case("minimum_ties", "a b/ties, b/ties", mtf.minimum, on(np.minimum, "a b", "b", "a b"),
             surrogate=lambda x, y, at: np.where(at[0] <= at[1], x, 0) + np.where(
                 at[1] < at[0], y, 0)),
        case("maximum_of_itself", "a b", lambda x: mtf.maximum(x, x) * mtf.minimum(x, x),
             lambda x: x * x),
        case("where", "a b/bool, a b, b", mtf.where, on(np.where, "a b", "a b", "b", "a b")),
        case("where_mask_smaller", "b/bool, a b, a b", mtf.where,
             on(np.where, "b", "a b", "a b", "a b")),
        case("where_output_given", "b/bool, a, c",
             lambda m, x, y: mtf.where(m, x, y, output_shape=shape("c b a")),
             on(np.where, "b", "a", "c", "c b a")),
        case("where_number", "a b/bool, a b", lambda m, x: mtf.where(m, x, 3.0),
             lambda m, x: np.where(m, x, 3.0)),
        case("where_bool", "a b/bool, a b/bool, b/bool", mtf.where,
             on(np.where, "a b", "a b", "b", "a b"), thorough=False),
        case("where_zero", "a b/bool, a b", lambda m, x: mtf.where(m, x, 0),
             lambda m, x: np.where(m, x, 0)),
        case("binary_op_with_broadcasting", "a b/away, b/away",
             lambda x, y: mtf.binary_op_with_broadcasting(tf.atan2, x, y),
             on(np.arctan2, "a b", "b", "a b"), grads=()),
        case("binary_op_number", "a b", lambda x: mtf.binary_op_with_broadcasting(tf.pow, x, 2.0),
             np.square, grads=()),
        # Sums over split dimensions may stay pending, and then be summed as one.
        case("sum_of_lazy_sums", "a b, a c",
             lambda x, y: mtf.reduce_sum(x, output_shape=shape("b"))
             + mtf.reduce_sum(mtf.reshape(y, shape("a c")) * 2.0, output_shape=shape("c")),
             lambda x, y: x.sum(0)[:, None] + 2 * y.sum(0)[None, :]),
        case("sum_of_like_lazy_sums", "a b, a b",
             lambda x, y: mtf.reduce_sum(x, output_shape=shape("b"))
             + mtf.reduce_sum(y, output_shape=shape("b")),
             lambda x, y: (x + y).sum(0)),
    ]
)


def _row(x):
    return aligned(x, "b", "a b")


def _abs_or_angle(x):
    return [mtf.abs(x), mtf.angle(x)]


def _parts(x):
    return [mtf.real(x) * 2.0, mtf.imag(x) * 3.0, mtf.conj(x) * (1 - 2j)]


def _split_up(x):
    first, second = mtf.split(x, dim("a"), 2)
    return mtf.concat([mtf.shift(second, 1, dim("b"), wrap=True), first * 1j], "a")


def _split_up_oracle(x):
    return np.concatenate([np.roll(x[4:], 1, 1), x[:4] * 1j])


def _turned(x):
    """Turns `x` three times by its own angle, in a loop."""
    i = mtf.zeros(x.mesh, [], tf.int32)
    return mtf.while_loop(
        lambda i, y: mtf.less(i, 3), lambda i, y: [i + 1, y * x + 1j], [i, x]
    )[1]


def _turned_oracle(x):
    y = x
    for _ in range(3):
        y = y * x + 1j
    return y


# (function, its oracle); holomorphic, away from singular points.
_HOLOMORPHIC = [
    (mtf.sin, np.sin),
    (mtf.cos, np.cos),
    (mtf.exp, np.exp),
    (mtf.square, np.square),
    (mtf.negative, np.negative),
    (mtf.identity, lambda x: x),
    (mtf.reciprocal, lambda x: 1 / x),
    (mtf.sqrt, np.sqrt),
    (mtf.rsqrt, lambda x: 1 / np.sqrt(x)),
    (mtf.log, np.log),
    (mtf.tanh, np.tanh),
    (mtf.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
]

_COMPLEX = [
    case("complex_from_parts", "a b, b", lambda x, y: mtf.complex(x, y) * 2.0,
         lambda x, y: 2 * (x + 1j * _row(y)), dtypes=WIDE),
    case("complex_parts", "a b/complex", _parts,
         lambda x: [x.real * 2, x.imag * 3, x.conj() * (1 - 2j)], dtypes=WIDE),
    case("complex_abs_angle", "a b/ring", _abs_or_angle, lambda x: [np.abs(x), np.angle(x)]),
    case("real_as_complex", "a b", lambda x: [mtf.real(x) + mtf.imag(x) + mtf.conj(x), mtf.angle(x)],
         lambda x: [2 * x, np.angle(x)], dtypes=WIDE),
    case("complex_functions", "a b/ring", lambda x: [fn(x) for fn, _ in _HOLOMORPHIC],
         lambda x: [fn(x) for _, fn in _HOLOMORPHIC], tolerance=3e-5),
    case("complex_arithmetic", "a b/ring, b/ring",
         lambda x, y: x * y / (x + 5j) - mtf.pow(y, 2.0) * (2 + 1j) + 1.5,
         lambda x, y: x * _row(y) / (x + 5j) - _row(y) ** 2 * (2 + 1j) + 1.5, dtypes=WIDE),
    case("complex_casts", "a b, a b/complex",
         lambda x, z: [mtf.cast(x, tf.complex64) * 1j, mtf.cast(z, tf.float32),
                       mtf.cast(z, tf.complex128), mtf.cast(z, tf.bool)],
         lambda x, z: [x * 1j, z.real, z, np.ones(z.shape, bool)]),
    case("complex_einsum", "a b/complex, b c/complex, c/complex",
         lambda x, y, w: [mtf.einsum([x, y], shape("a c")), mtf.einsum([x, y, w], shape("a"))],
         lambda x, y, w: [x @ y, x @ y @ w], dtypes=WIDE),
    case("complex_reductions", "a b/complex",
         lambda x: [mtf.reduce_sum(x, reduced_dim=dim("a")) * 1j,
                    mtf.square(mtf.reduce_mean(x, output_shape=shape("a"))), mtf.reduce_sum(x)],
         lambda x: [x.sum(0) * 1j, x.mean(1) ** 2, x.sum()]),
    case("complex_movement", "a b/complex", _split_up, _split_up_oracle),
    case("complex_reshape", "a b/complex",
         lambda x: mtf.reshape(x * 1j, shape("a n:4 w")) * 1j,
         lambda x: -np.reshape(x, [8, 4, 4]), dtypes=WIDE),
    case("complex_where", "a b/bool, a b/complex",
         lambda c, x: mtf.where(c, x, x * 1j), lambda c, x: np.where(c, x, x * 1j)),
    case("complex_gather", "b a/complex, c/below16",
         lambda x, i: mtf.gather(x, i, dim("b")), lambda x, i: x[i]),
    case("complex_slicewise", "a b/complex",
         lambda x: mtf.slicewise(lambda t: tf.math.cumsum(t * t, 1), [x], splittable_dims=[dim("a")]),
         lambda x: np.cumsum(x * x, 1)),
    case("complex_loop", "a/complex", _turned, _turned_oracle),
    case("complex_recompute", "a b/complex",
         lambda x: mtf.recompute_grad(lambda y: mtf.exp(y * y * 0.2), [x]),
         lambda x: np.exp(x * x * 0.2)),
]


CASES = [*_UNARY, *_BINARY, *_COMPLEX]

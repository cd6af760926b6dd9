"""Elementwise functions of one tensor."""

import math

import numpy as np
import tensorflow.compat.v1 as tf
from scipy import special

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import ALL, FLOATS, case, on

__all__ = ["CASES"]


def _gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _elu(x):
    return np.where(x > 0, x, np.expm1(x))


def _selu(x):
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    return scale * np.where(x > 0, x, alpha * np.expm1(x))


def _leaky(alpha):
    return lambda x: np.where(x > 0, x, alpha * x)


def _bfloat16(x):
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

CASES = [
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
    case("to_bfloat16_and_back", "a b", lambda x: mtf.to_float(mtf.to_bfloat16(x)) * 2.0,
         lambda x: 2 * _bfloat16(x), surrogate=lambda x, at: 2 * x, grads=()),
    case("cast_int_to_bool", "a b/int", lambda x: mtf.cast(x, tf.bool), lambda x: x != 0),
    case("sign_of_int", "a b/int", lambda x: mtf.sign(x) * x, np.abs),
    case("composition", "a b", lambda x: mtf.tanh(mtf.exp(x * 0.5) - mtf.sin(x)) * mtf.sigmoid(x),
         lambda x: np.tanh(np.exp(x * 0.5) - np.sin(x)) * special.expit(x)),
]


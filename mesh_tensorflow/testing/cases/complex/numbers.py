"""Complex numbers: their parts, and operations that also work on them."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import WIDE, aligned, case, dim, shape

__all__ = ["CASES"]


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

CASES = [
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

"""Loops with fixed and data-dependent iteration counts, accumulators, and gradients."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import case, dim, shape

__all__ = ["CASES"]


def _counted(times, body, *xs, **kwargs):
    """Runs a loop with a counter in front of the loop variables `xs`; drops the counter."""
    zero = mtf.constant(xs[0].mesh, 0, dtype=tf.int32)
    return mtf.while_loop(
        lambda i, *_: mtf.less(i, times),
        lambda i, *values: [i + 1, *body(*values)],
        [zero, *xs],
        **kwargs,
    )[1:]


def _iterated(fn, x, times):
    for _ in range(times):
        x = fn(x)
    return x


def _with_sums(x, w):
    def body(x):
        y = mtf.tanh(mtf.einsum([x, w], shape("a c")) * 0.1)
        x = mtf.einsum([y, w], shape("a b")) * 0.3
        return [x, mtf.reduce_sum(y, output_shape=shape("c")), y]

    return _counted(3, body, x, has_accumulators=True)


def _np_with_sums(x, w):
    sums, totals = 0, 0
    for _ in range(3):
        y = np.tanh(x @ w * 0.1)
        x = y @ w.T * 0.3
        sums, totals = sums + y.sum(0), totals + y
    return [x, sums, totals]


def _until(x):
    return mtf.while_loop(
        lambda x: mtf.less(mtf.reduce_sum(x), 1000.0), lambda x: [x * 1.5 + 0.1], [x])


def _np_until(x):
    while x.sum() < 1000.0:
        x = x * 1.5 + 0.1
    return x


def _nested(x):
    def outer(x):
        return _counted(2, lambda y: [mtf.sin(y) + x * 0.1], x)

    return _counted(3, outer, x)


def _np_nested(x):
    for _ in range(3):
        y = x
        for _ in range(2):
            y = np.sin(y) + x * 0.1
        x = y
    return x


def _two_variables(x, y):
    return _counted(4, lambda x, y: [mtf.sin(y) + x * 0.5, x * y], x, y)


def _np_two_variables(x, y):
    for _ in range(4):
        x, y = np.sin(y) + x * 0.5, x * y
    return [x, y]


def _reducing(x):
    """A loop whose iterations sum over a dimension that layouts split."""
    def body(x):
        mean = mtf.reduce_mean(x, output_shape=shape("b"))
        return [mtf.tanh(x - mean) * 1.2]

    return _counted(3, body, x)


CASES = [
    case("while_fixed", "a b", lambda x: _counted(3, lambda x: [mtf.sin(x) * 1.1], x),
         lambda x: _iterated(lambda x: np.sin(x) * 1.1, x, 3)),
    case("while_no_iteration", "a b", lambda x: _counted(0, lambda x: [x * 2.0], x), lambda x: x),
    case("while_dynamic", "a b/positive", _until, _np_until),
    case("while_external", "a b, b", lambda x, w: _counted(3, lambda x: [mtf.sin(x * w)], x),
         lambda x, w: _iterated(lambda x: np.sin(x * w), x, 3)),
    case("while_einsum", "a b, b f:16",
         lambda x, w: _counted(3, lambda x: [mtf.tanh(mtf.rename_dimension(
             mtf.einsum([x, w], shape("a f:16")), "f", "b"))], x),
         lambda x, w: _iterated(lambda x: np.tanh(x @ w), x, 3)),
    case("while_accumulators", "a b, b c", _with_sums, _np_with_sums),
    case("while_accumulators_only", "a b",
         lambda x: mtf.while_loop(
             lambda i: mtf.less(i, 3),
             lambda i: [i + 1, mtf.reduce_sum(x * 2.0, output_shape=shape("b"))],
             [mtf.constant(x.mesh, 0, dtype=tf.int32)], has_accumulators=True)[1],
         lambda x: 6 * x.sum(0)),
    case("while_counter_in_body", "a b",
         lambda x: mtf.while_loop(
             lambda i, x: mtf.less(i, 3),
             lambda i, x: [i + 1, x * mtf.to_float(i + 1) + 1.0],
             [mtf.constant(x.mesh, 0, dtype=tf.int32), x])[1],
         lambda x: ((x + 1) * 2 + 1) * 3 + 1),
    case("while_two_variables", "a b, a b", _two_variables, _np_two_variables),
    case("while_reducing", "a b", _reducing,
         lambda x: _iterated(lambda x: np.tanh(x - x.mean(0)) * 1.2, x, 3)),
    case("while_nested", "a b", _nested, _np_nested),
    case("while_num_loop_vars", "a b",
         lambda x: mtf.while_loop(
             lambda x, i: mtf.less(i, 3), lambda x, i: [mtf.sin(x), i + 1],
             [x, mtf.constant(x.mesh, 0, dtype=tf.int32)], num_loop_vars=1),
         lambda x: np.sin(np.sin(np.sin(x)))),
    case("while_maximum_iterations", "a b",
         lambda x: mtf.while_loop(
             lambda x: mtf.less(mtf.reduce_sum(x * 0.0), 1.0), lambda x: [x * 2.0], [x],
             maximum_iterations=3),
         lambda x: 8 * x),
    case("while_recompute", "a b, b",
         lambda x, w: _counted(3, lambda x: [mtf.recompute_grad(
             lambda x: mtf.sin(x * w) + x * 0.2, [x])], x),
         lambda x, w: _iterated(lambda x: np.sin(x * w) + x * 0.2, x, 3)),
    case("while_integer", "a b/int",
         lambda x: _counted(4, lambda x: [x * 2 + 1], x),
         lambda x: x * 16 + 15),
    case("while_shift", "s b",
         lambda x: _counted(3, lambda x: [mtf.shift(x, 1, dim("b"), wrap=True) * 0.5 + x], x),
         lambda x: _iterated(lambda x: np.roll(x, 1, 1) * 0.5 + x, x, 3)),
]

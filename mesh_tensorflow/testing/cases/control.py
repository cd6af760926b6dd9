"""Cases of control: order, recomputation, gradients by hand, loops."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import ALL, case, dim, dims, shape

__all__ = ["CASES"]


def _custom(fn, factor):
    """Returns a build function of `fn` with gradients `factor` times the output gradients."""

    # These are no derivatives, as the true ones would not show which function made them.
    def grad_fn(explicit_inputs, all_inputs, forward_operations, outputs, output_grads):
        return [factor * mtf.reduce_sum(output_grads[0], output_shape=x.shape) for x in all_inputs]

    return lambda *xs: mtf.custom_gradient(fn, grad_fn, list(xs))


def _custom_pair(x):
    def fn(x):
        return x * 2.0, mtf.square(x)

    def grad_fn(explicit_inputs, all_inputs, forward_operations, outputs, output_grads):
        return [output_grads[0] * 5.0 + output_grads[1] * outputs[1]]

    return mtf.custom_gradient(fn, grad_fn, [x])


def _custom_external(x, w):
    """A function with a custom gradient that captures `w`."""

    def grad_fn(explicit_inputs, all_inputs, forward_operations, outputs, output_grads):
        return [output_grads[0] * 3.0, mtf.reduce_sum(output_grads[0], output_shape=w.shape)]

    return mtf.custom_gradient(lambda x: x * w, grad_fn, [x])


def _layer(x, w):
    return mtf.tanh(mtf.einsum([x, w], shape("a c")) + 0.1)


def _np_layer(x, w):
    return np.tanh(x @ w + 0.1)


def _recompute_pair(x, w):
    def fn(x):
        y = _layer(x, w)
        return y, mtf.exp(y) * mtf.reduce_sum(x, output_shape=[dim("a")])

    return mtf.recompute_grad(fn, [x])


def _two_outputs(x):
    return mtf.slicewise(
        lambda t: (tf.sort(t, 1), tf.reduce_sum(t * t, 1)), [x],
        output_shape=[x.shape, shape("a")], output_dtype=[x.dtype, x.dtype],
        splittable_dims=dims("a"))


def _with_grad_function(x):
    return mtf.cwise(lambda t: t * t, [x], grad_function=lambda op, dy: [dy * 7.0])


_ORDERED = [
    case("depend", "a b, b", lambda x, y: mtf.depend(x, [y]) * 2.0, lambda x, y: x * 2,
         grads=(0,), dtypes=ALL[:2]),
    case("depend_lazy", "a b",
         lambda x: mtf.depend(mtf.reduce_sum(x, output_shape=shape("b")), [mtf.exp(x)]) * 2.0,
         lambda x: 2 * x.sum(0)),
    case("depend_on_lazy", "a b",
         lambda x: mtf.depend(x, [mtf.reduce_sum(x, output_shape=shape("b"))]) * 2.0,
         lambda x: x * 2),
    # `at` is the input itself, which finite differences of the surrogate do not move.
    case("stop_gradient", "a b", lambda x: x * mtf.stop_gradient(mtf.exp(x)),
         lambda x: x * np.exp(x), surrogate=lambda x, at: x * np.exp(at[0])),
    case("stop_gradient_lazy", "a b",
         lambda x: x * mtf.stop_gradient(mtf.reduce_sum(x, output_shape=shape("b"))),
         lambda x: x * x.sum(0), surrogate=lambda x, at: x * at[0].sum(0)),
    case("custom_gradient", "a b", _custom(mtf.square, 3.0), np.square,
         surrogate=lambda x, at: 3 * x),
    case("custom_gradient_two_inputs", "a b, b", _custom(lambda x, y: x * y, 3.0),
         lambda x, y: x * y, surrogate=lambda x, y, at: 3 * x + 3 * y),
    case("custom_gradient_tuple", "a b", _custom_pair, lambda x: [2 * x, x * x],
         surrogate=lambda x, at: [5 * x, at[0] ** 2 * x]),
    case("custom_gradient_external", "a b, b", _custom_external, lambda x, w: x * w,
         surrogate=lambda x, w, at: 3 * x + w),
    case("custom_gradient_lazy", "a b, b c",
         lambda x, w: mtf.custom_gradient(
             lambda x, w: mtf.einsum([x, w]),
             lambda output_grads, all_inputs, **_: [
                 mtf.einsum([output_grads[0], all_inputs[1]], shape("a b")),
                 mtf.einsum([output_grads[0], all_inputs[0]], shape("b c"))], [x, w]),
         lambda x, w: x @ w),
    case("recompute_grad", "a b, b c", lambda x, w: mtf.recompute_grad(_layer, [x, w]), _np_layer),
    case("recompute_grad_external", "a b, b c",
         lambda x, w: mtf.recompute_grad(lambda x: _layer(x, w), [x]), _np_layer),
    case("recompute_grad_no_dependencies", "a b, b c",
         lambda x, w: mtf.recompute_grad(_layer, [x, w], control_dependencies=False), _np_layer),
    case("recompute_grad_tuple", "a b, b c", _recompute_pair,
         lambda x, w: [_np_layer(x, w), np.exp(_np_layer(x, w)) * x.sum(1)[:, None]]),
    case("recompute_grad_nested", "a b, b c",
         lambda x, w: mtf.recompute_grad(
             lambda x, w: mtf.sin(mtf.recompute_grad(_layer, [mtf.exp(x * 0.3), w])), [x, w]),
         lambda x, w: np.sin(_np_layer(np.exp(x * 0.3), w))),
    case("slicewise", "a b",
         lambda x: mtf.slicewise(lambda t: tf.cumsum(t * t, 1), [x], splittable_dims=dims("a")),
         lambda x: np.cumsum(x * x, 1)),
    case("slicewise_output_shape", "a b, b s",
         lambda x, y: mtf.slicewise(tf.matmul, [x, y], output_shape=shape("a s"),
                                    splittable_dims=dims("a s")),
         lambda x, y: x @ y),
    case("slicewise_two_outputs", "a b/distinct", _two_outputs,
         lambda x: [np.sort(x, 1), (x * x).sum(1)]),
    case("slicewise_one_output_used", "a b/distinct", lambda x: _two_outputs(x)[1] * 2.0,
         lambda x: 2 * (x * x).sum(1)),
    case("slicewise_int_input", "a b, a/below16",
         lambda x, i: mtf.slicewise(
             lambda t, i: tf.gather(t * t, i, batch_dims=1, axis=1), [x, i],
             output_shape=shape("a"), splittable_dims=dims("a")),
         lambda x, i: np.take_along_axis(x * x, i[:, None], 1)[:, 0]),
    case("slicewise_not_splittable", "a b", lambda x: mtf.slicewise(lambda t: t * 2.0, [x]),
         lambda x: 2 * x),
    case("cwise", "a b, a b", lambda x, y: mtf.cwise(lambda t, u: tf.sin(t) * u, [x, y]),
         lambda x, y: np.sin(x) * y),
    case("cwise_other_shapes", "a b, b, a",
         lambda x, y, z: mtf.cwise(
             lambda t, u, v: tf.sin(t * u) + tf.reshape(v * v, [-1, 1]), [x, y, z]),
         lambda x, y, z: np.sin(x * y) + (z * z)[:, None]),
    case("cwise_dimension_of_others", "a b, s",
         lambda x, y: mtf.cwise(lambda t, u: t * tf.reduce_max(u), [x, y]),
         lambda x, y: x * y.max(), whole=("s",)),
    case("cwise_grad_function", "a b", _with_grad_function, np.square,
         surrogate=lambda x, at: 7 * x),
    case("cwise_of_lazy", "a b, b c",
         lambda x, w: mtf.cwise(lambda t: tf.sin(t), [mtf.einsum([x, w])]),
         lambda x, w: np.sin(x @ w)),
    case("cwise_output_dtype", "a b",
         lambda x: mtf.cwise(lambda t: t > 0, [x], output_dtype=tf.bool), lambda x: x > 0,
         grads=()),
    case("import_fully_replicated", "a b", lambda x: x * mtf.import_fully_replicated(
        x.mesh, np.arange(16, dtype=np.float32), shape("b")), lambda x: x * np.arange(16)),
    case("import_anonymous", "a b", lambda x: [mtf.import_tf_tensor(
        x.mesh, np.arange(6, dtype=np.float32).reshape(2, 3)), x * 2.0],
        lambda x: [np.arange(6.0).reshape(2, 3), 2 * x]),
    case("constants_bool", "a b/bool",
         lambda m: mtf.logical_or(mtf.zeros_like(m), mtf.logical_and(m, mtf.ones_like(m))),
         lambda m: m, thorough=False),
    case("constants", "a b", lambda x: x * mtf.constant(x.mesh, 3.0, shape("b")) + mtf.ones_like(x)
         + mtf.zeros(x.mesh, shape("a")) + mtf.ones(x.mesh, shape("a b")) * mtf.zeros_like(x),
         lambda x: 3 * x + 1),
    # Nothing of it is written, as `first_n` is 0.
    case("print", "a b", lambda x: mtf.Print(x, [], "case ", first_n=0) * 2.0, lambda x: 2 * x),
    case("branches_share_a_value", "a b, b c",
         lambda x, w: (lambda y: [mtf.reduce_sum(y), mtf.reduce_max(y, output_shape=shape("c"))])(
             _layer(x, w)),
         lambda x, w: [_np_layer(x, w).sum(), _np_layer(x, w).max(0)]),
]


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
        # One sum that may be left pending in an iteration, and one that is complete there.
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
    # How often it iterates depends on values, which all processors have to agree on.
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


def _waiting(x):
    """Iterations that wait for a value of their own, and for sums from outside, used after them."""
    total = mtf.reduce_sum(x, output_shape=shape("b"))

    def body(x):
        x = mtf.depend(x * 0.5, [total, mtf.exp(x), mtf.reduce_max(x)])
        return [mtf.sin(mtf.depend(x, [x]))]

    return [*_counted(3, body, x), total * 2.0]


_LOOPS = [
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
    case("while_depend", "a b", _waiting,
         lambda x: [_iterated(lambda x: np.sin(x * 0.5), x, 3), 2 * x.sum(0)]),
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


CASES = [*_ORDERED, *_LOOPS]

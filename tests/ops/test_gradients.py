"""Gradients of functions of which two arguments are one Tensor, or one made from the other."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf

A = mtf.Dimension("a", 4)
VALUE = np.array([1.0, 2.0, 3.0, 4.0], np.float32)


def _product(*xs):
    product = xs[0]
    for x in xs[1:]:
        product = product * x
    return product


def _both(a, b):
    return a * b, a + b


def _slicewise(x, outputs):
    ys = mtf.slicewise(
        _both, [x, x], output_shape=[x.shape] * 2, output_dtype=[x.dtype] * 2, splittable_dims=[A]
    )
    return mtf.add_n(list(ys[:outputs]))


def _renamed_twice(x):
    return mtf.rename_dimension(mtf.rename_dimension(x, "a", "b"), "b", "a")


def _loop(body):
    def run(x):
        zero = mtf.constant(x.mesh, 0, dtype=tf.int32)
        done = mtf.while_loop(
            lambda i, *_: mtf.less(i, 2), lambda i, a, b: [i + 1, *body(x, a, b)], [zero, x, x]
        )
        return done[1] + done[2]

    return run


def _nested(x):
    return mtf.recompute_grad(
        lambda u, w: (
            mtf.cwise(_product, [u, w]) * mtf.recompute_grad(lambda p, q: p * q * u, [w, w])
        ),
        [x, x],
    )


def _nested_thrice(x):
    def inner(u, p):
        return mtf.recompute_grad(lambda q, r: q * r * p * u, [p, p])

    return mtf.recompute_grad(lambda u: mtf.recompute_grad(lambda p: inner(u, p), [u]), [x])


def _by_gradients(explicit_inputs, forward_operations, outputs, output_grads, **_):
    return mtf.gradients(outputs, explicit_inputs, output_grads, operations=forward_operations)


def _serialized(x):
    weight = mtf.get_variable(x.mesh, "w", [], initializer=tf.constant_initializer(1.0))

    def model(features):
        loss = mtf.recompute_grad(_product, [weight, weight]) * features["x"] * features["again"]
        return {"loss": mtf.reduce_sum(loss)}

    # The gradient of the sum of x^2 w^2 for w = 1, on each element of x.
    grads, _ = mtf.serialize_training_step({"x": x, "again": x}, model, A, 2)
    return mtf.stop_gradient(grads[0]) * x


# A function of x, and its gradient at VALUE; the sum of x^2 is 30.
CASES = {
    "cwise": (lambda x: mtf.cwise(_product, [x, x]), lambda v: 2 * v),
    "cwise, one stopped": (lambda x: mtf.cwise(_product, [x, mtf.stop_gradient(x)]), lambda v: v),
    "cwise, one renamed": (lambda x: mtf.cwise(_product, [x, _renamed_twice(x)]), lambda v: 2 * v),
    "cwise of what is made from the other": (
        lambda x: mtf.cwise(_product, [x, mtf.sin(x)]),
        lambda v: np.sin(v) + v * np.cos(v),
    ),
    "cwise of three": (lambda x: mtf.cwise(_product, [x, x * 2.0, x]), lambda v: 6 * v**2),
    "cwise that returns an argument": (lambda x: mtf.cwise(lambda a, b: a, [x, x]), np.ones_like),
    "slicewise": (lambda x: _slicewise(x, 2), lambda v: 2 * v + 2),
    "slicewise, one output": (lambda x: _slicewise(x, 1), lambda v: 2 * v),
    "recompute_grad": (lambda x: mtf.recompute_grad(_product, [x, x]), lambda v: 2 * v),
    "recompute_grad without control dependencies": (
        lambda x: mtf.recompute_grad(_product, [x, x], control_dependencies=False),
        lambda v: 2 * v,
    ),
    "recompute_grad that uses it by itself, too": (
        lambda x: mtf.recompute_grad(lambda u: u * x, [x]),
        lambda v: 2 * v,
    ),
    "recompute_grad that returns an argument": (
        lambda x: _product(*mtf.recompute_grad(lambda u, w: (u, u * w), [x, x])),
        lambda v: 3 * v**2,
    ),
    "recompute_grad that returns one value twice": (
        lambda x: _product(*mtf.recompute_grad(lambda u: [u * u] * 2, [x])),
        lambda v: 4 * v**3,
    ),
    "recompute_grad in recompute_grad": (_nested, lambda v: 5 * v**4),
    "recompute_grad thrice": (_nested_thrice, lambda v: 4 * v**3),
    "custom_gradient": (
        lambda x: mtf.custom_gradient(_product, _by_gradients, [x, x]),
        lambda v: 2 * v,
    ),
    "while_loop": (_loop(lambda x, a, b: [a * b, b * 2.0]), lambda v: 6 * v**2 + 4),
    "while_loop, one value for both": (_loop(lambda x, a, b: [a * b] * 2), lambda v: 8 * v**3),
    "recompute_grad in while_loop": (
        _loop(lambda x, a, b: [mtf.recompute_grad(_product, [a, a]) * 0.1, b * x]),
        lambda v: 0.004 * v**3 + 3 * v**2,
    ),
    "serialize_training_step": (_serialized, lambda v: np.full_like(v, 60)),
    "einsum": (lambda x: mtf.einsum([x, x, x], output_shape=[A]), lambda v: 3 * v**2),
}


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("mesh_shape, layout", [("", ""), ("x:2", "a:x")])
def test_repeated_inputs(mesh_shape, layout):
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.constant(VALUE), [A])
        grads = {name: mtf.gradients([fn(x)], [x])[0] for name, (fn, _) in CASES.items()}
        # A constant is made anew at each use, also for its gradient.
        ones = mtf.ones(mesh, x.shape)
        grads["constant"] = mtf.gradients([mtf.cwise(_product, [x, ones])], [ones])[0]
        devices = [""] * mtf.convert_to_shape(mesh_shape).size
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, devices)
        lowering = mtf.Lowering(graph, {mesh: impl})
        exports = {name: lowering.export_to_tf_tensor(dx) for name, dx in grads.items()}
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            found = session.run(exports)
    expected = {name: dx(VALUE) for name, (_, dx) in CASES.items()}
    for name, value in {**expected, "constant": VALUE}.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)


def test_joining_and_cutting_one_of_two_dimensions_of_a_name(tf_graph):
    """As kernels of convolutions have them: the other one keeps its size."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    two, three = mtf.Dimension("d", 2), mtf.Dimension("d", 3)
    x = mtf.ones(mesh, mtf.Shape([two, three]))
    assert mtf.concat([x, x], "d").shape == mtf.Shape([mtf.Dimension("d", 4), three])
    [dx] = mtf.gradients([mtf.reduce_sum(y) for y in mtf.split(x, three, 3)], [x])
    assert dx.shape == x.shape


def test_of_integers_by_themselves():
    """Nothing is differentiated: the gradient is what it starts from, ones of that dtype."""
    x = mtf.constant(mtf.Mesh(mtf.Graph(), "mesh"), 5, [A], tf.int32)
    [dx] = mtf.gradients([x], [x])
    assert dx.dtype == tf.int32 and dx.numpy().tolist() == [1] * 4

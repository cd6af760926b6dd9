"""Programs: functions and gradients of one's own, assignments, loops."""

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import table

PROGRAMS, program = table("a:x,b:y", "a:y", "")


@program("a:x", "a:y", "")
def slicewise_and_cwise(p):
    x, y = p.input("x", "a:4,b:6"), p.input("y", "a:4,b:6")
    a, b = x.shape.dims
    return {
        "cwise": mtf.cwise(lambda u, v: u * tf.sin(v), [x, y]),
        "cwise_grad": mtf.cwise(tf.tanh, [x], grad_function=lambda op, dy: [dy * 3.0]),
        "cwise_dtype": mtf.cwise(lambda u: tf.cast(u > 0, tf.int32), [x], output_dtype=tf.int32),
        "slicewise": mtf.slicewise(lambda u: tf.exp(-u), [x], splittable_dims=[a, b]),
        "slicewise_shape": mtf.slicewise(
            lambda u, v: tf.einsum("ab,ab->a", u, v), [x, y],
            output_shape=mtf.Shape([a]), output_dtype=tf.float32, splittable_dims=[a],
        ),
    }


@program()
def custom_gradient(p):
    x, y = p.input("x", "a:4,b:6"), p.input("y", "b:6")
    w = p.variable("w", "b:6")

    def fn(x, y):
        return mtf.tanh(x * w) + y, x * y

    def grad_fn(explicit_inputs, all_inputs, forward_operations, outputs, output_grads):
        x, y = explicit_inputs
        others = all_inputs[2:]
        return [output_grads[0] * 2.0, mtf.reduce_sum(output_grads[1], output_shape=y.shape)] + [
            mtf.reduce_sum(output_grads[0], output_shape=o.shape) * 5.0 for o in others
        ]

    u, v = mtf.custom_gradient(fn, grad_fn, [x, y])
    return {"u": u + v, "single": mtf.custom_gradient(
        lambda z: z * z, lambda output_grads, **_: [output_grads[0]], [x])}


@program()
def recompute_grad(p):
    x, w, v = p.input("x", "a:4,b:6"), p.variable("w", "b:6,c:4"), p.variable("v", "c:4,b:6")

    def block(x):
        return x + mtf.einsum([mtf.relu(mtf.einsum([x, w], output_shape=[x.shape.dims[0], w.shape.dims[1]])), v], output_shape=x.shape)

    y = x
    for _ in range(3):
        y = mtf.recompute_grad(block, [y])
    return {"y": y, "plain": block(x)}


@program()
def stop_gradient_and_depend(p):
    x = p.input("x", "a:4,b:6")
    y = mtf.square(x)
    return {"stop": mtf.stop_gradient(y) * x, "depend": mtf.depend(y, [mtf.exp(x)])}


@program(gradients=False)
def assignments(p):
    x, v = p.input("x", "a:4,b:6"), p.variable("v", "a:4,b:6")
    first = mtf.assign(v, x)
    read = mtf.depend(v, [first])
    w = p.variable("w", "b:6")
    add = mtf.assign_add(w, mtf.reduce_mean(x, output_shape=w.shape))
    sub = mtf.assign_sub(w, mtf.ones_like(w))
    p.update_ops = []
    return {"read": read, "w": mtf.depend(mtf.read_variable(w.operation), []), "names": mtf.zeros_like(mtf.depend(w, [add, sub]))}


@program(gradients=False)
def while_loop(p):
    x = p.input("x", "a:4,b:6")
    w = p.variable("w", "b:6,c:6", scale=0.3)
    n = mtf.constant(p.mesh, 0, dtype=tf.int32)

    def body(i, y):
        z = mtf.einsum([y, w], output_shape=[y.shape.dims[0], w.shape.dims[1]])
        return [i + 1, mtf.tanh(mtf.rename_dimension(z, "c", "b"))]

    i, y = mtf.while_loop(lambda i, y: mtf.less(i, 4), body, [n, x])
    none, same = mtf.while_loop(lambda i, y: mtf.less(i, 0), body, [n, x])
    (t,) = mtf.while_loop(
        lambda v: mtf.less(mtf.reduce_sum(v), 100.0), lambda v: [v + 1.0], [mtf.zeros_like(x)]
    )
    return {"i": i, "y": y, "none": none, "same": same, "t": t}


@program(gradients=False)
def while_loop_that_makes_variables(p):
    x = p.input("x", "a:4,b:6")

    def body(i, y):
        return [i + 1, y * p.variable("inside", "b:6")]

    n = mtf.constant(p.mesh, 0, dtype=tf.int32)
    _, y = mtf.while_loop(lambda i, y: mtf.less(i, 3), body, [n, x])
    return {"y": y}


def _accumulate(p, with_dimension):
    x = p.input("x", "a:4,b:6")
    b = x.shape.dims[1]

    def body(i, y):
        z = y * 0.5
        total = mtf.reduce_sum(z, output_shape=[b] if with_dimension else [])
        return [i + 1, z, total]

    n = mtf.constant(p.mesh, 0, dtype=tf.int32)
    i, z, total = mtf.while_loop(
        lambda i, y: mtf.less(i, 3), body, [n, x], has_accumulators=True
    )
    return {"i": i, "z": z, "total": total, "later": mtf.tanh(total) + 1.0}


@program(gradients=False)
def while_loop_accumulator(p):
    return _accumulate(p, True)


@program(gradients=False)
def while_loop_scalar_accumulator(p):
    return _accumulate(p, False)


@program("batch:x,d:y", "d:x", "batch:x", gradients=False)
def serialize_training_step(p):
    x, t = p.input("x", "batch:8,d:4"), p.input("t", "batch:8")
    w = p.variable("w", "d:4,h:6")
    v = p.variable("v", "h:6")

    def model(features):
        h = mtf.tanh(mtf.einsum([features["x"], w], output_shape=[features["x"].shape.dims[0], w.shape.dims[1]]))
        y = mtf.einsum([h, v], output_shape=[h.shape.dims[0]])
        return {"loss": mtf.reduce_sum(mtf.square(y - features["t"])), "y": y}

    grads, outputs = mtf.serialize_training_step({"x": x, "t": t}, model, x.shape.dims[0], 4)
    return {"loss": outputs["loss"], "y": outputs["y"], "dw": grads[0], "dv": grads[1]}

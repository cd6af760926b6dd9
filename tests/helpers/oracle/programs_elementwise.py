"""Programs: elementwise functions, binary operations."""

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import dims, table

PROGRAMS, program = table("a:x,b:y", "a:y", "")


# -- elementwise


@program()
def elementwise(p):
    x = p.input("x", "a:4,b:6")
    names = "identity sin cos square exp sigmoid tanh negative swish gelu elu selu softplus relu"
    names += " squared_relu leaky_relu sign abs"
    return {n: getattr(mtf, n)(x) for n in names.split()}


@program()
def elementwise_positive(p):
    x = p.input("x", "a:4,b:6", "positive")
    outputs = {n: getattr(mtf, n)(x) for n in "sqrt rsqrt log reciprocal".split()}
    outputs["pow_2.5"] = mtf.pow(x, 2.5)
    outputs["pow_tensor"] = mtf.pow(x, p.input("y", "a:4,b:6"))
    return outputs


@program()
def elementwise_at_ties(p):
    x = mtf.import_tf_tensor(p.mesh, tf.constant([[-1.0, 0.0], [0.0, 2.0]]), mtf.Shape(dims("a:2,b:2")))
    p.inputs["x"] = x
    return {n: getattr(mtf, n)(x) for n in "relu abs leaky_relu squared_relu sign elu".split()}


@program(gradients=False)
def casts(p):
    x, i, b = p.input("x", "a:4,b:6"), p.input("i", "a:4,b:6", 10), p.input("c", "a:4,b:6", "bool")
    return {
        "to_int32": mtf.to_int32(x * 10.0),
        "to_float": mtf.to_float(i),
        "to_bfloat16": mtf.to_bfloat16(x),
        "cast_bool": mtf.cast(b, tf.float32),
        "cast_to_bool": mtf.cast(i, tf.bool),
        "logical_not": mtf.logical_not(b),
        "same": mtf.cast(x, tf.float32),
        "negative_int": mtf.negative(i),
        "identity_int": mtf.identity(i),
    }


@program(tolerance=1e-2)
def bfloat16(p):
    x = mtf.cast(p.input("x", "a:4,b:6"), tf.bfloat16)
    y = mtf.cast(p.input("y", "b:6"), tf.bfloat16)
    return {"add": x + y, "mul": x * y, "tanh": mtf.tanh(x), "scalar": x * 2.0 + 1.0}


# -- binary


@program()
def binary(p):
    x, y = p.input("x", "a:4,b:6"), p.input("y", "a:4,b:6", "positive")
    return {
        "add": x + y,
        "sub": x - y,
        "mul": x * y,
        "div": x / y,
        "truediv": mtf.divide(x, y),
        "minimum": mtf.minimum(x, y),
        "maximum": mtf.maximum(x, y),
        "neg": -x,
        "add_n": mtf.add_n([x, y, x]),
        "where": mtf.where(mtf.greater(x, y), x, y),
    }


@program("a:x,b:y", "b:x,c:y", "a:x,c:y")
def binary_broadcast(p):
    x, y, z = p.input("x", "a:4,b:6"), p.input("y", "b:6", "positive"), p.input("z", "b:6,c:2")
    s = p.input("s", "", "positive")
    return {
        "add": x + y,
        "add_reversed": y + x,
        "sub": x - y,
        "sub_reversed": y - x,
        "mul": x * y,
        "div": x / y,
        "outer_add": x + z,
        "outer_mul": x * z,
        "output_shape": mtf.add(x, z, output_shape=dims("c:2,a:4,b:6")),
        "sub_output_shape": mtf.sub(x, z, output_shape=dims("c:2,b:6,a:4")),
        "scalar_tensor": (x + s) * s,
        "scalar_tensor_left": s - x,
        "where": mtf.where(mtf.greater(y, 1.0), x, mtf.zeros_like(x)),
        "broadcast": mtf.broadcast(y, dims("c:2,b:6,a:4")),
    }


@program("a:x,b:y")
def maximum_broadcast(p):
    x, y = p.input("x", "a:4,b:6"), p.input("y", "b:6")
    return {"maximum": mtf.maximum(x, y), "minimum": mtf.minimum(y, x)}


@program()
def scalars(p):
    x = p.input("x", "a:4,b:6", "positive")
    return {
        "x+2": x + 2,
        "2+x": 2 + x,
        "x-2": x - 2,
        "2-x": 2 - x,
        "x*3": x * 3,
        "3*x": 3 * x,
        "x/4": x / 4,
        "4/x": 4 / x,
        "x+1.5": x + 1.5,
        "maximum": mtf.maximum(x, 1.0),
        "minimum": mtf.minimum(1.0, x),
        "add": mtf.add(2.0, x),
        "mul": mtf.multiply(x, tf.constant(2.5)),
    }


@program(gradients=False)
def binary_without_gradient(p):
    x, z = p.input("x", "a:4,b:6", "positive"), p.input("z", "b:6,c:2")
    return {
        "mod": x % 0.7,
        "floordiv": x // 0.7,
        "with_broadcasting": mtf.binary_op_with_broadcasting(tf.subtract, x, z, output_dtype=tf.float32),
    }


@program()
def ties(p):
    x, y = p.input("x", "a:4,b:6", 3), p.input("y", "a:4,b:6", 3)
    x, y = mtf.to_float(x), mtf.to_float(y)
    p.inputs = {"x": x, "y": y}
    (b,) = dims("b:6")
    return {
        "maximum": mtf.maximum(x, y),
        "minimum": mtf.minimum(x, y),
        "reduce_max": mtf.reduce_max(x, reduced_dim=b),
        "reduce_min": mtf.reduce_min(x, reduced_dim=b),
    }


@program(gradients=False)
def integers_and_comparisons(p):
    x, y = p.input("x", "a:4,b:6", 5), p.input("y", "a:4,b:6", 5)
    z = p.input("z", "b:6", 5) + 1
    f, b = p.input("f", "a:4,b:6"), mtf.greater(x, 2)
    c = mtf.less(y, 3)
    return {
        "add": x + z,
        "sub": x - y,
        "rsub": 7 - x,
        "mul": x * y,
        "neg": -x,
        "floordiv": x // z,
        "mod": x % z,
        "floordiv_scalar": x // 2,
        "mod_scalar": x % 3,
        "minimum": mtf.minimum(x, z),
        "maximum": mtf.maximum(x, 2),
        "less": mtf.less(x, y),
        "greater": mtf.greater(x, z),
        "less_equal": mtf.less_equal(x, y),
        "greater_equal": mtf.greater_equal(x, y),
        "equal": mtf.equal(x, y),
        "not_equal": mtf.not_equal(x, z),
        "less_float": mtf.less(f, 0.0),
        "and": mtf.logical_and(b, c),
        "or": mtf.logical_or(b, c),
        "where": mtf.where(b, x, y),
        "where_scalar": mtf.where(b, f, 0.0),
        "one_like": mtf.ones_like(x),
        "einsum": mtf.einsum([x, y], output_shape=dims("b:6")),
    }

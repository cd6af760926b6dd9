"""The texts of errors: what is wrong with gradients, loops and variables."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.errors import After, check_building, check_name_is_free, strictly
from helpers.world import A, B

import mesh_tensorflow as mtf

V, T = ValueError, TypeError


def _loop(body, cond=lambda i: mtf.less(i, 3), **kwargs):
    return lambda w: mtf.while_loop(cond, body, [w.zero], **kwargs)


def _custom(returned):
    return After(
        lambda w: mtf.custom_gradient(lambda x: x * w.w, lambda **_: returned(w), [w.x]),
        lambda w, y: mtf.gradients([y], [w.x]),
    )


def _serialized(model, splits=2):
    return lambda w: mtf.serialize_training_step({"x": w.x}, model, A, splits)


BUILD = {
    # control
    "gradients_none": (lambda w: mtf.gradients([None], [w.x]), V, "ys: input None is a NoneType"),
    "gradients_tensor": (lambda w: mtf.gradients(w.x, [w.x]), V, "ys must be a list .*not Tensor"),
    "gradients_of_too_many": (
        lambda w: mtf.gradients([w.x], [w.x], [w.x, None]),
        V,
        r"gradients: grad_ys has 2 gradients for 1 Tensor of ys\. Give one for each, None for ones",
    ),
    "gradients_nothing": (lambda w: mtf.gradients([], [w.x]), V, "at least one mtf.Tensor"),
    "while_nothing": (lambda w: mtf.while_loop(None, None, []), V, "at least one loop variable"),
    "while_count": (
        _loop(lambda i: [i, i]),
        V,
        r"2 Tensors for 1 loop variables; pass has_accumulators",
    ),
    "while_booleans": (
        _loop(lambda i: [i, mtf.less(i, 3)], has_accumulators=True),
        V,
        r"no sum of .*bool.*; mtf.to_int32 converts it",
    ),
    "while_too_few": (_loop(lambda i: [], has_accumulators=True), V, "0 Tensors for 1"),
    "while_shape": (
        lambda w: mtf.while_loop(
            lambda x: mtf.less(mtf.reduce_sum(x), 3.0),
            lambda x: [mtf.reduce_sum(x, reduced_dim=A)],
            [w.x],
        ),
        V,
        r"keep its shape and dtype: .*\[a=8, b=16\] float32 became .*\[b=16\]",
    ),
    "while_dtype": (_loop(lambda i: [mtf.to_float(i)]), V, r"int32 became .*float32"),
    "while_cond_shape": (
        lambda w: mtf.while_loop(lambda x: mtf.less(x, 1.0), lambda x: [x], [w.x]),
        V,
        r"boolean scalar, not .*mtf.reduce_any",
    ),
    "while_cond_dtype": (_loop(lambda i: [i], cond=lambda i: i), V, "boolean scalar"),
    "while_cond_number": (_loop(lambda i: [i], cond=lambda i: True), V, r"a mtf.Tensor, not True"),
    "while_cond_assigns": (
        lambda w: mtf.while_loop(
            lambda i: (mtf.assign(w.w, w.x), mtf.less(i, 3))[1], lambda i: [i + 1], [w.zero]
        ),
        V,
        r"cond_fn assigns to w, .* assign in body_fn",
    ),
    "while_body_number": (_loop(lambda i: [3]), V, r"not a mtf.Tensor"),
    "while_body_raises": (_loop(lambda i: [mtf.reshape(i + 1, [A])]), V, "cannot reshape"),
    "custom_count": (
        _custom(lambda w: [None]),
        V,
        r"each of 2 inputs \(import:0, w:0\), but returned 1",
    ),
    "custom_variable": (
        _custom(lambda w: [mtf.get_variable(w.mesh, "v", [A, B]), None]),
        V,
        r"new variables \['v'\]",
    ),
    "custom_shape": (
        _custom(lambda w: [w.y, None]),
        V,
        r"import:0 .*a=8, b=16.*another shape: .*b=16, c=24",
    ),
    "depend": (
        lambda w: mtf.depend(w.x, [tf.no_op]),
        V,
        "neither a mtf.Tensor nor a mtf.Operation",
    ),
    "grad_ys_shape": (
        After(lambda w: w.x * 2, lambda w, y: mtf.gradients([y], [w.x], [w.y])),
        V,
        r"a=8, b=16.*b=16, c=24",
    ),
    "serialize_batch": (
        _serialized(lambda f: {}, 3),
        V,
        r"a=8 is not divisible by num_splits=3; .*divisor of 8",
    ),
    "serialize_no_gradient": (
        _serialized(lambda f: {"loss": mtf.reduce_sum(f["x"])}),
        V,
        r"no gradient reaches the trainable variables \['w'\].*trainable=False",
    ),
    # variables
    "variable_none": (
        lambda w: mtf.get_variable(w.mesh, None, [A]),
        V,
        "name must be a string .*not None",
    ),
    "variable_unnamed": (lambda w: mtf.get_variable(w.mesh, "", [A]), V, "not ''"),
    "variable_sizes": (
        lambda w: mtf.get_variable(w.mesh, "w", [A]),
        V,
        r"'w' is Shape\[a=8, b=16\], and is asked for as Shape\[a=8\]. Use another name",
    ),
    "variable_dims": (
        strictly(lambda w: mtf.get_variable(w.mesh, "w", [("c", 8), B])),
        V,
        r"'w' is Shape\[a=8, b=16\], and is asked for as Shape\[c=8, b=16\]",
    ),
    "variable_dtype": (
        strictly(lambda w: mtf.get_variable(w.mesh, "w", [A, B], activation_dtype=tf.bfloat16)),
        V,
        r"'w' is of float32, and is asked for as master float32, slice float32, activation bfloa",
    ),
    "initializer_none": (
        lambda w: mtf.get_variable(w.mesh, "v", [A], initializer=lambda *_, **__: None),
        V,
        r"initializer of variable 'v' returned None; it must return .*float32 \(8,\)",
    ),
    "initializer_shape": (
        lambda w: mtf.get_variable(w.mesh, "v", [A], initializer=lambda *_, **__: np.ones([3])),
        V,
        r"initializer of variable 'v' returned float32 \(3,\)",
    ),
    "assign_shape": (
        lambda w: mtf.assign(w.w, w.y),
        V,
        r"Shape\[b=16, c=24\] to variable w Shape\[a=8, b=16\]",
    ),
    "assign_no_variable": (
        After(lambda w: w.x + w.x, lambda w, y: mtf.assign(y, w.x)),
        V,
        "does not come from a variable",
    ),
    "assign_import": (lambda w: mtf.assign(w.x, w.x), V, "does not come from a variable"),
    "read_no_variable": (
        After(lambda w: w.x * w.x, lambda w, y: mtf.read_variable(y)),
        V,
        "does not come from a variable",
    ),
    "splittability": (
        lambda w: w.x.operation._initialize_splittable_and_unsplittable_dims("maybe"),
        V,
        "'maybe'",
    ),
}


@pytest.mark.parametrize("name", BUILD)
def test_building(name, tf_graph):
    check_building(*BUILD[name])


GOOD = {
    "while_body_raises": lambda w: (_loop(lambda i: [i + 1])(w)[0], "while_loop"),
    "assign_shape": lambda w: (mtf.assign(w.w, w.x), "assign"),
}


@pytest.mark.parametrize("name", GOOD)
def test_name_is_free_after_a_failed_call(name, tf_graph):
    wrong, kind, _ = BUILD[name]
    check_name_is_free(wrong, kind, GOOD[name])

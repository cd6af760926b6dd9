"""What is wrong raises where it is written, says what and how to mend it, and leaves no trace."""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.world import A, B, C, World

import mesh_tensorflow as mtf


def _loop(body, cond=lambda i: mtf.less(i, 3), **kwargs):
    return lambda w: mtf.while_loop(cond, body, [w.zero], **kwargs)


def _custom(returned):
    return After(
        lambda w: mtf.custom_gradient(lambda x: x * w.w, lambda **_: returned(w), [w.x]),
        lambda w, y: mtf.gradients([y], [w.x]),
    )


def _serialized(model, splits=2):
    return lambda w: mtf.serialize_training_step({"x": w.x}, model, A, splits)


def _strict(call):
    """Makes what is hardly meant an error."""

    def strictly(world):
        with mtf.strict():
            return call(world)

    return strictly


def _strict_pool(world, x):
    return _strict(lambda w: mtf.layers.max_pool2d(x))(world)


class After(NamedTuple):
    """A call that is prepared by one that is right."""

    prepare: Callable
    call: Callable


V, T = ValueError, TypeError

BUILD = {
    # shapes
    "reshape": (
        lambda w: mtf.reshape(w.x, [A, ("b", 15)]),
        V,
        r"Shape\[a=8, b=16\] of 128 elements to Shape\[a=8, b=15\] of 120",
    ),
    "broadcast": (lambda w: mtf.broadcast(w.x, [B, C]), V, r"lacks a=8; mtf.reduce_sum"),
    "transpose": (
        lambda w: mtf.transpose(w.x, [B, C]),
        V,
        r"Shape\[a=8, b=16\] cannot become Shape\[b=16, c=24\]. mtf.reshape changes",
    ),
    "rename": (
        lambda w: mtf.rename_dimension(w.x, "z", "y"),
        V,
        r"'z' not found in Shape\[a=8, b=16\]",
    ),
    "replace_dimensions": (
        lambda w: mtf.replace_dimensions(w.x, [B, A], C),
        V,
        r"b=16, a=8 do not stand side by side.*mtf.transpose",
    ),
    "replace_no_tensor": (
        lambda w: mtf.replace_dimensions("x", A, B),
        V,
        "a Tensor or a Shape, not str",
    ),
    "add_output_shape": (
        lambda w: mtf.add(w.x, w.y, output_shape=[A, B]),
        V,
        r"to Shape\[a=8, b=16\]: it lacks c=24",
    ),
    "concat_shapes": (
        lambda w: mtf.concat([w.x, w.y], "b"),
        V,
        r"agree except for the size of 'b': .*a=8, b=16.*b=16, c=24",
    ),
    "concat_unknown": (
        lambda w: mtf.concat([w.x, w.x], "z"),
        V,
        r"'z' not found in Shape\[a=8, b=16\]",
    ),
    "concat_nothing": (lambda w: mtf.concat([], "a"), V, "at least one tensor"),
    "split_sizes": (lambda w: mtf.split(w.x, B, [3, 4]), V, r"\[3, 4\] add up to 7, not to b=16"),
    "split_negative": (
        lambda w: mtf.split(w.x, B, [17, -1]),
        V,
        r"\[17, -1\] must be 0 or more, of b=16 of .*a=8, b=16",
    ),
    "split_number": (
        lambda w: mtf.split(w.x, B, 3),
        V,
        r"b=16 .* into 3 equal parts.*divisor of 16",
    ),
    "split_dim": (lambda w: mtf.split(w.x, C, 3), V, r"Shape\[a=8, b=16\] has no dimension c=24"),
    "stack": (lambda w: mtf.stack([w.x, w.y], "new"), V, r"shapes must be equal: .*a=8.*c=24"),
    "stack_axis": (
        lambda w: mtf.stack([w.x, w.x], "new", axis=7),
        V,
        r"axis=7 is no place in Shape\[a=8, b=16\]: .* at 0 to 2, or at -3 to -1",
    ),
    "stack_axis_before": (
        lambda w: mtf.stack([w.x, w.x], "new", axis=-4),
        V,
        "axis=-4 is no place",
    ),
    "negative_size": (
        lambda w: mtf.zeros(w.mesh, [("a", -1)]),
        V,
        "dimension 'a' cannot have the size -1: a size is a number of elements",
    ),
    "stack_nothing": (lambda w: mtf.stack([], "new"), V, "at least one tensor"),
    "unstack": (
        lambda w: mtf.unstack(w.x, C),
        V,
        r"has no dimension c=24; both the name and the size",
    ),
    "slice_range": (lambda w: mtf.slice(w.x, 10, 8, "b"), V, r"10 .. 18 is not within b=16"),
    "slice_unknown": (lambda w: mtf.slice(w.x, 0, 1, "z"), V, r"'z' not found in Shape"),
    "pad_negative": (lambda w: mtf.pad(w.x, [-1, 0], "b"), V, r"0 or more, got \[-1, 0\] for b=16"),
    "pad_one_number": (lambda w: mtf.pad(w.x, [1], "b"), V, r"two numbers \[before, after\]"),
    "repeated_dim": (
        lambda w: mtf.reshape(w.x, [("a", 8), ("a", 8), ("d", 2)]),
        V,
        r"repeated dimensions: Shape\[a=8, a=8, d=2\] repeats a=8.*mtf.rename_dimension",
    ),
    "numpy_size": (
        lambda w: mtf.reshape(w.x, [("a", np.int64(128))]),
        V,
        r"passed through int\(\)",
    ),
    "import_sizes": (
        lambda w: mtf.import_tf_tensor(w.mesh, tf.zeros([8, 15]), [A, B]),
        V,
        r"\(8, 15\), which does not fit Shape\[a=8, b=16\]",
    ),
    "import_rank": (
        lambda w: mtf.import_tf_tensor(w.mesh, tf.zeros([8]), [A, B]),
        V,
        "does not fit",
    ),
    "import_replicated": (
        lambda w: mtf.import_fully_replicated(w.mesh, tf.zeros([8]), [B]),
        V,
        r"\(8,\), which does not fit",
    ),
    "scalar_summary": (
        lambda w: mtf.scalar_summary("loss", w.x),
        V,
        r"'loss': .*Shape\[a=8, b=16\] is no scalar; reduce it with mtf.reduce_mean",
    ),
    "import_none": (
        lambda w: mtf.import_tf_tensor(w.mesh, None, [A]),
        V,
        r"None is a NoneType from which no tf.Tensor can be made. Pass a tf.Tensor",
    ),
    "import_ragged": (
        lambda w: mtf.import_tf_tensor(w.mesh, [[1, 2], [3]], [A]),
        V,
        r"\[\[1, 2\], \[3\]\] is a list from which .* lists whose rows are of one length",
    ),
    "constant_array": (
        lambda w: mtf.constant(w.mesh, [1, 2], [A]),
        V,
        r"one number, or an array of the sizes of Shape\[a=8\], not one of \(2,\)",
    ),
    # contraction and reduction
    "einsum_reduced_unknown": (
        lambda w: mtf.einsum([w.x, w.y], reduced_dims=[("z", 3)]),
        V,
        r"reduced_dims z=3 are in none of the inputs .*a=8, b=16",
    ),
    "einsum_disagree": (
        lambda w: mtf.einsum([w.x, w.y], output_shape=[A, C], reduced_dims=[A]),
        V,
        r"reduced_dims a=8 do not agree .*reduces b=16.*Give one of the two",
    ),
    "einsum_nothing": (lambda w: mtf.einsum([], output_shape=[]), V, "at least one input"),
    "einsum_dtypes": (
        lambda w: mtf.einsum([w.x, w.i]),
        V,
        r"dtypes must be equal: .*float32; .*int32.*mtf.cast",
    ),
    "reduce_dim": (lambda w: mtf.reduce_sum(w.x, reduced_dim=C), V, r"has no dimension c=24"),
    "reduce_shape": (
        lambda w: mtf.reduce_max(w.x, output_shape=[A, C]),
        V,
        r"dimensions that no input has: c=24.*mtf.broadcast",
    ),
    "reduce_disagree": (
        lambda w: mtf.reduce_sum(w.x, output_shape=[A], reduced_dim=A),
        V,
        r"reduced_dim a=8 does not agree .*reduces b=16",
    ),
    "reduce_positional": (
        lambda w: mtf.reduce_sum(w.x, [A]),
        AssertionError,
        "keyword arguments only",
    ),
    "softmax_dim": (lambda w: mtf.softmax(w.x, C), V, r"softmax: .*has no dimension c=24"),
    "softmax_name": (lambda w: mtf.softmax(w.x, "b"), V, r"'b' .*mtf.Dimension"),
    "softmax_ints": (
        lambda w: mtf.softmax(w.i, A),
        T,
        r"softmax: .*Shape\[a=8\] is int32, and exponentials along a=8 .* mtf.to_float",
    ),
    "logsumexp_ints": (lambda w: mtf.reduce_logsumexp(w.i, A), T, r"is int32, .* mtf.to_float"),
    "cumsum_bools": (lambda w: mtf.cumsum(w.m, w.m.shape[0]), T, r"is bool, .* mtf.to_int32"),
    "logsumexp_dim": (lambda w: mtf.reduce_logsumexp(w.x, C), V, r"no dimension c=24"),
    "top_k_large": (
        lambda w: mtf.top_k(w.x, A, mtf.Dimension("k", 9)),
        V,
        r"k=9 must be between 1 and a=8",
    ),
    "top_1_dim": (lambda w: mtf.top_1(w.x, C), V, r"no dimension c=24"),
    "nth_largest": (lambda w: mtf.nth_largest_element(w.x, 8, A), V, r"between 1 and a=8"),
    "cumsum_dim": (lambda w: mtf.cumsum(w.x, C), V, r"cumsum: .*no dimension c=24"),
    "gather_dim": (_strict(lambda w: mtf.gather(w.x, w.i, C)), V, r"gather: .*no dimension c=24"),
    "gather_float": (
        lambda w: mtf.gather(w.y, w.x, B),
        V,
        r"must be integers: .*float32; mtf.to_int32",
    ),
    "one_hot_float": (lambda w: mtf.one_hot(w.x, C), V, r"must be integers"),
    "shift_dim": (lambda w: mtf.shift(w.x, 1, C, True), V, r"shift: .*no dimension c=24"),
    "dynamic_shift": (
        lambda w: mtf.dynamic_shift(w.x, w.i, A, True),
        V,
        r"Shape\[a=8\] must not have the shifted dimension a=8",
    ),
    "halo_dim": (
        lambda w: mtf.halo_exchange(w.x, C, B, 1),
        V,
        r"halo_exchange: .*no dimension c=24",
    ),
    "halo_negative": (lambda w: mtf.left_halo_exchange(w.x, A, B, -1), V, r"0 or more, got -1"),
    "pool_1d": (
        lambda w: mtf.pool_tensor_1d(w.x, B, pool_size=5),
        V,
        r"b=16 .*pool_size=5.*divisor of 16",
    ),
    "conv_channels": (
        After(
            lambda w: [
                w.tensor([A, ("h", 6), ("w", 6), B]),
                w.tensor([("fh", 3), ("fw", 3), C, ("o", 4)]),
            ],
            lambda w, xs: mtf.Conv2dOperation(*xs, [1, 1, 1, 1], "SAME"),
        ),
        V,
        r"b=16.*c=24|c=24.*b=16",
    ),
    # dtypes and numbers
    "add_dtypes": (lambda w: w.x + w.i, V, r"dtypes must be equal: .*float32; .*int32.*mtf.cast"),
    "concat_dtypes": (
        After(lambda w: mtf.cast(w.x, tf.bfloat16), lambda w, y: mtf.concat([w.x, y], "b")),
        V,
        "dtypes must be equal",
    ),
    "where_dtypes": (lambda w: mtf.where(w.m, w.x, w.i), V, "dtypes must be equal"),
    "int_plus_float": (
        lambda w: w.i + 1.5,
        T,
        r"Shape\[a=8\] is int32, and 1.5 is no integer. Use mtf.to_float",
    ),
    "int_minus_float": (lambda w: w.i - 0.5, T, r"-0.5 is no integer"),
    "int_times_float": (lambda w: 2.5 * w.i, T, r"2.5 is no integer"),
    "int_divided": (lambda w: w.i / 2, T, r"0.5 is no integer.*// and % to stay with integers"),
    "mean_of_ints": (lambda w: mtf.reduce_mean(w.i), T, r"int32, and 0.125 is no integer"),
    "array_beside": (
        lambda w: w.x * np.arange(3),
        V,
        r"an array of shape \(3,\) stands beside import:0 Shape\[a=8, b=16\].*import_tf_tensor",
    ),
    "array_before": (lambda w: np.arange(3) + w.x, V, r"an array of shape \(3,\) stands beside"),
    "array_of_one": (lambda w: w.x - np.ones([1]), V, r"an array of shape \(1,\) stands beside"),
    "array_broadcast": (lambda w: mtf.maximum(w.x, np.ones([16])), V, r"mtf.import_tf_tensor"),
    "array_chosen": (lambda w: mtf.where(w.m, w.x, np.ones([16])), V, r"mtf.import_tf_tensor"),
    "array_compared": (lambda w: mtf.less(np.ones([16]), w.x), V, r"mtf.import_tf_tensor"),
    "array_exponent": (lambda w: mtf.pow(w.x, np.ones([16])), V, r"mtf.import_tf_tensor"),
    "list_beside": (lambda w: w.x / [1.0, 2.0], V, r"an array of shape \(2,\) stands beside"),
    "tf_beside": (lambda w: w.x * tf.zeros([16]), V, r"a tf.Tensor of shape \(16,\) stands"),
    "tf_before": (lambda w: tf.zeros([16]) * w.x, T, r"no value .* mtf.import_tf_tensor"),
    "tf_dtype_beside": (lambda w: w.x * tf.zeros([8, 16], tf.int32), V, r"is int32, .* tf.cast"),
    "tf_number_dtype": (lambda w: w.x * tf.constant(2), T, r"is int32; .* tf.cast"),
    "fractions_beside_ints": (lambda w: w.i * np.full([8], 0.5), T, r"int32, and .* no integer"),
    "fraction_compared": (lambda w: mtf.less(w.i, tf.constant(0.5)), T, r"is no integer"),
    "none_beside": (lambda w: w.x + None, T, r"None beside import:0 .* neither a number nor"),
    "scalar_operation": (
        lambda w: mtf.ScalarMultiplyOperation(w.x, np.ones([16])),
        V,
        r"an array with 1 dimensions is no number",
    ),
    "no_tensor": (
        lambda w: mtf.binary_op_with_broadcasting(tf.add, 1, 2),
        V,
        "must be a mtf.Tensor, got 1 and 2",
    ),
    "number_for_tensor": (
        lambda w: mtf.exp(3.0),
        V,
        r"3.0 is a float, not a mtf.Tensor.*mtf.constant",
    ),
    "array_for_tensor": (
        lambda w: mtf.einsum([w.x, np.zeros([16])]),
        V,
        r"ndarray, not a mtf.Tensor",
    ),
    "tf_for_tensor": (lambda w: mtf.concat([w.x, tf.zeros([8, 16])], "b"), V, r"not a mtf.Tensor"),
    "number_reduced": (lambda w: mtf.reduce_sum(3.0), V, r"3.0 is a float, not a mtf.Tensor"),
    "number_reshaped": (lambda w: mtf.reshape(3.0, []), V, r"3.0 is a float, not a mtf.Tensor"),
    "meshes": (lambda w: w.x + w.other, V, r"must be on one mesh: .*'mesh'.*'other'"),
    "bad_dtype": (lambda w: mtf.random_uniform(w.mesh, [A], dtype="no such"), T, "no such"),
    # random
    "dropout_neither": (
        lambda w: mtf.dropout(w.x, True),
        V,
        r"exactly one of keep_prob and rate.*rate=0.1",
    ),
    "dropout_both": (lambda w: mtf.dropout(w.x, True, keep_prob=0.9, rate=0.1), V, "exactly one"),
    "dropout_legacy_both": (
        lambda w: mtf.dropout(w.x, 0.9, rate=0.1),
        V,
        "exactly one .* besides 0.9",
    ),
    "dropout_zero": (
        lambda w: mtf.dropout(w.x, True, keep_prob=0.0),
        V,
        r"above 0 and at most 1, got 0.0",
    ),
    "dropout_range": (lambda w: mtf.dropout(w.x, rate=-0.5), V, r"above 0 and at most 1, got 1.5"),
    "dropout_noise": (lambda w: mtf.dropout(w.x, rate=0.5, noise_shape=[A, C]), V, r"c=24"),
    "dense_twice": (
        lambda w: mtf.layers.dense(w.x, [A], reduced_dims=[B]),
        V,
        r"a=8 twice: import:0 Shape\[a=8, b=16\] keeps it, reducing b=16.*mtf.rename_dimension",
    ),
    "dropout_ints": (
        _strict(lambda w: mtf.dropout(w.i, rate=0.5)),
        V,
        r"Shape\[a=8\] is int32: .* cannot be scaled by 1 / 0.5. Use mtf.to_float",
    ),
    "pool_rest": (
        After(lambda w: w.tensor([("h", 5), ("w", 4), A]), _strict_pool),
        V,
        r"windows of \(2, 2\) leave out the end of h=5 of .*h=5, w=4, a=8.*mtf.pad",
    ),
    # control
    "gradients_none": (lambda w: mtf.gradients([None], [w.x]), V, "ys: input None is a NoneType"),
    "gradients_tensor": (lambda w: mtf.gradients(w.x, [w.x]), V, "ys must be a list .*not Tensor"),
    "gradients_nothing": (lambda w: mtf.gradients([], [w.x]), V, "at least one mtf.Tensor"),
    "while_nothing": (lambda w: mtf.while_loop(None, None, []), V, "at least one loop variable"),
    "while_count": (
        _loop(lambda i: [i, i]),
        V,
        r"2 Tensors for 1 loop variables; pass has_accumulators",
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
        _strict(lambda w: mtf.get_variable(w.mesh, "w", [("c", 8), B])),
        V,
        r"'w' is Shape\[a=8, b=16\], and is asked for as Shape\[c=8, b=16\]",
    ),
    "variable_dtype": (
        _strict(lambda w: mtf.get_variable(w.mesh, "w", [A, B], activation_dtype=tf.bfloat16)),
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
    call, kind, text = BUILD[name]
    world = World()
    prepared = []
    if isinstance(call, After):
        prepared, call = [call.prepare(world)], call.call
    before = world.state()
    with pytest.raises(kind) as caught:
        call(world, *prepared)
    assert re.search(text, str(caught.value)), str(caught.value)
    assert world.state() == before


GOOD = {
    "reshape": lambda w: (mtf.reshape(w.x, [("all", 128)]), "reshape"),
    "einsum_dtypes": lambda w: (mtf.einsum([w.x, w.y]), "einsum"),
    "add_dtypes": lambda w: (w.x + w.x, "add"),
    "concat_shapes": lambda w: (mtf.concat([w.x, w.x], "b"), "concat"),
    "softmax_dim": lambda w: (mtf.softmax(w.x, B), "softmax"),
    "while_body_raises": lambda w: (_loop(lambda i: [i + 1])(w)[0], "while_loop"),
    "assign_shape": lambda w: (mtf.assign(w.w, w.x), "assign"),
    "dynamic_shift": lambda w: (mtf.dynamic_shift(w.x, w.i, B, True), "einsum"),
}


@pytest.mark.parametrize("name", GOOD)
def test_name_is_free_after_a_failed_call(name, tf_graph):
    call, kind, _ = BUILD[name]
    world = World()
    with pytest.raises(kind):
        call(world)
    made, expected = GOOD[name](world)
    assert getattr(made, "operation", made).name == expected

"""The texts of errors: what is wrong with numbers: dtypes, arrays beside tensors, random numbers."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.errors import After, check_building, check_name_is_free, strictly
from helpers.world import A, B, C

import mesh_tensorflow as mtf

V, T = ValueError, TypeError


def strict_pool(world, x):
    return strictly(lambda w: mtf.layers.max_pool2d(x))(world)


def _of_booleans(name, call):
    text = (
        rf"^{name} is not defined for booleans, such as those of import_\d:0 "
        r"Shape\[a=8, b=16\] bool\. Numbers are mtf\.to_int32\(x\)"
    )
    return lambda w: call(w.m), T, text


def _of_integers(name, call):
    text = (
        rf"^{name} is not defined for integers, such as those of import_2:0 Shape\[a=8\] int32, "
        r"since its values are fractions\. Write mtf\.to_float\(x\)"
    )
    return lambda w: call(w.i), T, text


_TURNED = mtf.layers.RotaryEmbedding()

BUILD = {
    **{
        f"{name}_{i}_of_integers": _of_integers(name, call)
        for i, (name, call) in enumerate(
            [
                *[
                    (fn.__name__, fn)
                    for fn in [
                        *[mtf.sin, mtf.cos, mtf.sqrt, mtf.rsqrt, mtf.log, mtf.exp, mtf.sigmoid],
                        *[mtf.tanh, mtf.reciprocal, mtf.swish, mtf.gelu, mtf.elu, mtf.selu],
                        *[mtf.softplus, mtf.leaky_relu],
                    ]
                ],
                ("swish", mtf.silu),
                ("gelu", lambda i: mtf.gelu(i, approximate=False)),
                ("pow", lambda i: mtf.pow(i, 2)),
                ("reduce_mean", mtf.reduce_mean),
                ("softmax", lambda i: mtf.softmax(i, A)),
                ("log_softmax", lambda i: mtf.log_softmax(i, A)),
                ("reduce_logsumexp", lambda i: mtf.reduce_logsumexp(i, A)),
                ("layer_norm", lambda i: mtf.layers.layer_norm(i, A)),
                ("batch_norm", lambda i: mtf.layers.batch_norm(i, True, 0.9, dims_idx_end=None)),
                ("corr", lambda i: mtf.layers.corr(i, A)),
                (
                    "sigmoid_cross_entropy_with_logits",
                    lambda i: mtf.layers.sigmoid_cross_entropy_with_logits(i, i),
                ),
                ("RotaryEmbedding", lambda i: _TURNED(i, i, A)),
            ]
        )
    },
    **{
        f"{name}_{i}_of_booleans": _of_booleans(name, call)
        for i, (name, call) in enumerate(
            [
                ("add", lambda m: m + m),
                ("add", lambda m: m + 1),
                ("sub", lambda m: m - m),
                ("sub", lambda m: 1 - m),
                ("multiply", lambda m: m * m),
                ("multiply", lambda m: 2 * m),
                ("divide", lambda m: m / m),
                ("einsum", lambda m: mtf.einsum([m, m], reduced_dims=[A])),
                ("einsum", lambda m: mtf.einsum([m], reduced_dims=[A])),
                ("floordiv", lambda m: m // m),
                ("floor_mod", lambda m: m % 2),
                ("negative", lambda m: -m),
                ("square", mtf.square),
                ("sign", mtf.abs),
                ("relu", mtf.relu),
                ("less", lambda m: mtf.less(m, m)),
                ("less", lambda m: mtf.less(m, 1.0)),
                ("maximum", lambda m: mtf.maximum(m, m)),
                ("reduce_sum", mtf.reduce_sum),
                ("reduce_mean", mtf.reduce_mean),
                ("reduce_max", mtf.reduce_max),
                ("top_k", lambda m: mtf.argmax(m, A)),
                ("sort", lambda m: mtf.sort(m, A)),
                ("exp", mtf.exp),
                ("gelu", mtf.gelu),
                ("softmax", lambda m: mtf.softmax(m, A)),
            ]
        )
    },
    **{
        f"{name}_of_numbers": (
            call,
            T,
            rf"^{what} is defined for booleans alone, and not for numbers, such as those of "
            r"import:0 Shape.* float32\. .*mtf\.not_equal\(x, 0\)",
        )
        for name, what, call in [
            ("logical_not", "logical_not", lambda w: mtf.logical_not(w.x)),
            ("logical_and", "logical_and", lambda w: mtf.logical_and(w.x, w.m)),
            ("logical_or", "logical_or", lambda w: mtf.logical_or(w.m, w.x)),
            ("where", "where: the condition", lambda w: mtf.where(w.x, w.x, 0.0)),
        ]
    },
    "random_integers": (
        lambda w: mtf.random_uniform(w.mesh, [A], dtype=tf.int32),
        V,
        r"random_uniform of int32 needs maxval: pass maxval=n for 0 \.\. n-1",
    ),
    "random_argument": (
        lambda w: mtf.random_uniform(w.mesh, [A], mean=1.0),
        V,
        r"random_uniform does not take mean; it takes dtype, seed, minval, maxval",
    ),
    **{
        f"random_{dtype}": (
            lambda w, draw=draw, dtype=dtype: draw(w.mesh, [A], dtype=dtype),
            T,
            rf"^{draw.__name__}: there are no values of dtype {dtype}\. Random integers are .*maxval",
        )
        for draw, dtype in [
            (mtf.random_normal, "int32"),
            (mtf.random_normal, "bool"),
            (mtf.random_uniform, "string"),
        ]
    },
    **{
        f"random_range_{i}": (
            lambda w, ends=ends, dtype=dtype: mtf.random_uniform(w.mesh, [A], dtype=dtype, **ends),
            V,
            rf"^random_uniform of {dtype}: there are no integers from minval={ends['minval']} to "
            rf"below maxval={ends['maxval']}; give whole numbers, minval < maxval",
        )
        for i, (dtype, ends) in enumerate(
            [
                ("int32", {"minval": 5, "maxval": 2}),
                ("int32", {"minval": 5, "maxval": 5}),
                ("int32", {"minval": 0, "maxval": 2.5}),
                ("uint8", {"minval": 0, "maxval": 300}),
                ("int8", {"minval": -200, "maxval": 5}),
                ("uint64", {"minval": 0, "maxval": 2**64}),
            ]
        )
    },
    "random_mean_of_each": (
        lambda w: mtf.random_normal(w.mesh, [A], mean=np.arange(8.0)),
        T,
        r"^random_normal: mean is a number or a tf scalar, not array.*multiplied by, or added to",
    ),
    "random_end_in_words": (
        lambda w: mtf.random_uniform(w.mesh, [A], maxval="1"),
        T,
        r"^random_uniform: maxval is a number or a tf scalar, not '1'",
    ),
    "looked_up_booleans": (
        lambda w: mtf.GatherOperation(w.m, w.i, B, mtf.Shape([A])),
        T,
        r"gather is not defined for booleans",
    ),
    "looked_up_by_fractions": (
        lambda w: mtf.GatherOperation(w.y, w.x, B, mtf.Shape([A, C])),
        T,
        r"gather: indices are int32 or int64, and not import:0 .* float32\. Write mtf\.to_int32",
    ),
    "looked_up_in_another_shape": (
        lambda w: mtf.GatherOperation(w.y, w.i, B, mtf.Shape([C])),
        V,
        r"gather: output_shape Shape\[c=24\] must have each dimension of the indices "
        r"Shape\[a=8\] and each of the table but b=16, Shape\[c=24\], once",
    ),
    "looked_up_with_a_shared_dimension": (
        lambda w: mtf.GatherOperation(w.x, w.i, B, mtf.Shape([A])),
        V,
        r"once\. mtf\.gather takes indices that share dimensions with the table",
    ),
    "cross_entropy_of_integers": (
        After(
            lambda w: mtf.argmax(w.i, A),
            lambda w, ids: mtf.layers.softmax_cross_entropy_with_logits(w.i, ids, A),
        ),
        T,
        r"cross_entropy is not defined for integers.* int32, .*mtf\.to_float",
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
    "int_beside_float": (lambda w: mtf.less(w.i, 1.5), T, r"int32, and 1.5 is no integer"),
    "int_constant": (
        lambda w: mtf.constant(w.mesh, 1.5, [A], tf.int32),
        T,
        r"constant: 1.5 is no integer, and the dtype is int32; write dtype=tf.float32",
    ),
    "word_constant": (
        lambda w: mtf.constant(w.mesh, "one", [A]),
        T,
        r"^constant: 'one' is no number",
    ),
    "parts_in_a_fraction": (
        lambda w: mtf.split(w.x, B, 2.0),
        V,
        r"^split: num_or_size_splits=2\.0 must be an integer of at least 1, or a list of sizes",
    ),
    "temperature_below_0": (
        lambda w: mtf.sample_with_temperature(w.x, A, temperature=-0.5),
        V,
        r"^sample_with_temperature: temperature=-0\.5 must be 0\.0, for the argmax, or above",
    ),
    "number_chosen": (lambda w: mtf.where(w.m, 1.0, 2.0), T, r"where: input 1.0 is a float"),
    "int_minus_float": (lambda w: w.i - 0.5, T, r"-0.5 is no integer"),
    "int_times_float": (lambda w: 2.5 * w.i, T, r"2.5 is no integer"),
    "int_divided": (lambda w: w.i / 2, T, r"0.5 is no integer.*// and % to stay with integers"),
    "ints_divided": (lambda w: w.i / w.i, T, r"divide: .*int32.*// and % to stay with integers"),
    "array_beside": (
        lambda w: w.x * np.arange(3),
        V,
        r"an array of shape \(3,\) stands beside import:0 Shape\[a=8, b=16\].*import_tf_tensor",
    ),
    "array_before": (lambda w: np.arange(3) + w.x, V, r"an array of shape \(3,\) stands beside"),
    "array_of_two": (lambda w: w.x - np.ones([2]), V, r"an array of shape \(2,\) stands beside"),
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
    "one_element_of_floats": (lambda w: w.i * np.array([0.5]), T, r"is int32, .* is no integer"),
    "indices_of_several": (
        lambda w: mtf.gather(w.x, [0, 1], w.x.shape[0]),
        V,
        r"not one of \(2,\)",
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
    "letters": (
        lambda w: mtf.einsum("ab,bc->ac", w.x),
        V,
        r"einsum: the inputs are a list of Tensors, such as \[x, w\], not 'ab,bc->ac'",
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
    "dense_number": (
        lambda w: mtf.layers.dense(w.x, 16),
        T,
        r'dense: new_dims is 16; it takes a Dimension .*mtf.Dimension\("hidden", 16\)',
    ),
    "dense_activation": (
        lambda w: mtf.layers.dense(w.x, [C], [B], activation="relu"),
        T,
        r"^dense: activation is a function of a Tensor, such as mtf\.relu, not 'relu'",
    ),
    "none_compared": (lambda w: w.x < None, T, r"^less: None beside import:0"),
    "dropout_ints": (
        strictly(lambda w: mtf.dropout(w.i, rate=0.5)),
        V,
        r"Shape\[a=8\] is int32: .* cannot be scaled by 1 / 0.5. Use mtf.to_float",
    ),
    "pool_rest": (
        After(lambda w: w.tensor([("h", 5), ("w", 4), A]), strict_pool),
        V,
        r"windows of \(2, 2\) leave out the end of h=5 of .*h=5, w=4, a=8.*mtf.pad",
    ),
}


@pytest.mark.parametrize("name", BUILD)
def test_building(name, tf_graph):
    check_building(*BUILD[name])


GOOD = {
    "add_dtypes": lambda w: (w.x + w.x, "add"),
}


@pytest.mark.parametrize("name", GOOD)
def test_name_is_free_after_a_failed_call(name, tf_graph):
    wrong, kind, _ = BUILD[name]
    check_name_is_free(wrong, kind, GOOD[name])

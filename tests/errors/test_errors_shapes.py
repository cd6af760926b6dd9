"""The texts of errors: what is wrong with shapes: of what is moved and joined, of contractions and reductions."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.errors import After, check_building, check_name_is_free, strictly
from helpers.world import A, B, C

import mesh_tensorflow as mtf

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
        r"\[17, -1\] must be integers of 0 or more, of b=16 of .*a=8, b=16",
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
    "slice_fraction": (
        lambda w: mtf.slice(w.x, 1.5, 8, "b"),
        V,
        r"^slice: begin=1\.5 must be an integer of at least 0",
    ),
    "slice_unknown": (lambda w: mtf.slice(w.x, 0, 1, "z"), V, r"'z' not found in Shape"),
    "pad_negative": (lambda w: mtf.pad(w.x, [-1, 0], "b"), V, r"0 or more, got \[-1, 0\] for b=16"),
    "pad_mode": (
        lambda w: mtf.pad(w.x, [1, 1], "b", mode="wrap"),
        V,
        "pad: mode='wrap' is none of 'constant', 'reflect', 'edge'",
    ),
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
    "softmax_name": (
        lambda w: mtf.softmax(w.x, "bb"),
        V,
        r"softmax: import:0 Shape\[a=8, b=16\] has no dimension 'bb'; did you mean b\?",
    ),
    "softmax_ints": (
        lambda w: mtf.softmax(w.i, A),
        T,
        r"softmax is not defined for integers.* Shape\[a=8\] int32, .*mtf.to_float",
    ),
    "logsumexp_ints": (
        lambda w: mtf.reduce_logsumexp(w.i, A),
        T,
        r"Shape\[a=8\] int32, .*mtf.to_float",
    ),
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
    "gather_dim": (strictly(lambda w: mtf.gather(w.x, w.i, C)), V, r"gather: .*no dimension c=24"),
    "gather_float": (
        lambda w: mtf.gather(w.y, w.x, B),
        V,
        r"must be integers: .*float32; mtf.to_int32",
    ),
    "one_hot_float": (lambda w: mtf.one_hot(w.x, C), V, r"must be integers"),
    "shift_fraction": (
        lambda w: mtf.shift(w.x, 1.5, A, True),
        T,
        r"shift: the offset 1.5 along a=8 of import:0 .* is a float, not an int.*dynamic_shift",
    ),
    "shift_tensor": (lambda w: mtf.shift(w.x, w.zero, A, True), T, r"mtf.dynamic_shift takes"),
    "cwise_nothing": (lambda w: mtf.cwise(tf.add, []), V, "cwise: the list of Tensors is empty"),
    "slicewise_nothing": (lambda w: mtf.slicewise(tf.add, []), V, "list of Tensors is empty"),
    "slicewise_names": (
        lambda w: mtf.slicewise(tf.abs, [w.x], splittable_dims=["a"]),
        T,
        r"could not convert 'a' to Dimension: it takes a Dimension",
    ),
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
    "halo_negative": (
        lambda w: mtf.left_halo_exchange(w.x, A, B, -1),
        V,
        r"halo_size=-1 .*at least 0",
    ),
    "halo_fraction": (
        lambda w: mtf.halo_exchange(w.x, A, B, 1.5),
        V,
        r"^halo_exchange: halo_size=1\.5 must be an integer of at least 0",
    ),
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
}


@pytest.mark.parametrize("name", BUILD)
def test_building(name, tf_graph):
    check_building(*BUILD[name])


GOOD = {
    "reshape": lambda w: (mtf.reshape(w.x, [("all", 128)]), "reshape"),
    "concat_shapes": lambda w: (mtf.concat([w.x, w.x], "b"), "concat"),
    "einsum_dtypes": lambda w: (mtf.einsum([w.x, w.y]), "einsum"),
    "softmax_dim": lambda w: (mtf.softmax(w.x, B), "softmax"),
    "dynamic_shift": lambda w: (mtf.dynamic_shift(w.x, w.i, B, True), "einsum"),
}


@pytest.mark.parametrize("name", GOOD)
def test_name_is_free_after_a_failed_call(name, tf_graph):
    wrong, kind, _ = BUILD[name]
    check_name_is_free(wrong, kind, GOOD[name])

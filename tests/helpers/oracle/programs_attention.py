"""Programs: attention, its masks, and decoding step by step."""

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import dims, table, with_variables

ATTENTION, attention = table("batch:x,heads:y", "io:x,heads:y", "heads:x", "batch:y,kv:x", "")


def kv_and_heads():
    return dims("kv:4,heads:2")


def weights_of(p, names):
    """Returns weights so small that no softmax is saturated."""
    return [p.input(name, "heads:2,io:6,kv:4") * 0.3 for name in names.split()]


def with_loss_gradients(p, outputs):
    """Adds the gradients of the sum of all squares, for inputs and variables together."""
    with_variables(p, outputs)
    loss = mtf.add_n([mtf.reduce_sum(mtf.square(y)) for y in outputs.values()])
    xs = {n: x for n, x in p.inputs.items() if x.dtype.is_floating}
    grads = mtf.gradients([loss], list(xs.values()))
    return {**outputs, **{f"d_{n}": dx for n, dx in zip(xs, grads)}}


@attention("batch:x,length:y", "batch:y", "", gradients=False)
def attention_masks(p):
    ids, positions = p.input("ids", "batch:4,length:6", 3), p.input("positions", "length:6", 6)
    segments = p.input("segments", "batch:4,length:6", 3)
    others = p.input("others", "batch:4,length:4", 3)
    layers = mtf.layers
    return {
        "padding": layers.attention_mask_ignore_padding(ids),
        "padding_bfloat16": layers.attention_mask_ignore_padding(ids, dtype=tf.bfloat16),
        "autoregressive": layers.attention_mask_autoregressive(positions),
        "autoregressive_batch": layers.attention_mask_autoregressive(ids),
        "segment": layers.attention_mask_same_segment(segments),
        "two_segments": layers.attention_mask_same_segment(segments, others),
        "block": layers.attention_bias_local_block(p.mesh, *dims("w:3,memory:6")),
        "block_other_size": layers.attention_bias_local_block(
            p.mesh, *dims("w:4,memory:5"), dtype=tf.float32
        ),
        "renamed": layers.rename_length_to_memory_length(ids) * 2,
        "renamed_other": layers.rename_length_to_memory_length(positions, "length", "m") * 2,
    }


@attention("batch:x,heads:y", "length:x,heads:y", "memory:x,length:y", "")
def dot_product_attention(p):
    q, k = p.input("q", "batch:4,heads:2,length:6,kv:3"), p.input("k", "batch:4,heads:2,memory:4,kv:3")
    v, shared = p.input("v", "batch:4,heads:2,memory:4,c:5"), p.input("shared", "batch:4,memory:4,kv:3")
    bias = p.input("bias", "length:6,memory:4")
    attend = mtf.layers.dot_product_attention
    return {
        "plain": attend(q, k, k, None, True),
        "biased": attend(q, k, v, bias, True),
        "one_head_memory": attend(q, shared, shared, bias, False),
        "extra_logit": attend(q, k, v, None, True, extra_logit=0.0),
        "no_dropout": attend(q, k, v, bias, False, dropout=0.5),
    }


@attention("batch:x,memory:y", "")
def dot_product_attention_two_memory_dims(p):
    q, k = p.input("q", "batch:4,length:6,kv:3"), p.input("k", "batch:4,rows:2,memory:4,kv:3")
    v = p.input("v", "batch:4,rows:2,memory:4,c:5")
    return {"y": mtf.layers.dot_product_attention(q, k, v, None, True)}


# A part of an unstacked variable alone has no gradient in the classic.
@attention(gradients=False)
def attention_params(p):
    heads, io, kv = dims("heads:2,io:6,kv:4")
    dtype = mtf.VariableDType(tf.bfloat16, tf.float32, tf.float32)
    layers = mtf.layers
    outputs = {}
    for name, combine in (("apart", False), ("combined", True)):
        with tf.variable_scope(name):
            weights = layers.multihead_attention_params(p.mesh, heads, io, kv, dtype, combine)
        outputs.update({f"{name}_{i}": w * 2.0 for i, w in enumerate(weights)})
    with tf.variable_scope("vars"):
        weights = layers.multihead_attention_vars(
            p.mesh, heads, io, kv, tf.float32, tf.float32, tf.bfloat16
        )
    outputs.update({f"vars_{i}": mtf.cast(w, tf.float32) * 2.0 for i, w in enumerate(weights)})
    return with_loss_gradients(p, outputs)


@attention(
    "batch:x,heads:y", "io:x,heads:y", "heads:x", "length:x,heads:y", "length:x,memory_length:y",
    "batch:x,memory_length:y", "batch:x,kv:y", "",
)  # fmt: skip
def multihead_attention(p):
    x, memory = p.input("x", "batch:2,length:4,io:6"), p.input("memory", "batch:2,memory_length:8,io:6")
    ids = p.input("ids", "batch:2,length:4", 2)
    causal = mtf.layers.attention_mask_autoregressive(mtf.range(p.mesh, x.shape.dims[1], tf.int32))
    padding = mtf.layers.attention_mask_ignore_padding(ids)
    attend = mtf.layers.multihead_attention
    return with_variables(p, {
        "self": attend(x, None, causal, *kv_and_heads(), True, name="self"),
        "padded": attend(x, None, padding + causal, *kv_and_heads(), True, name="padded"),
        "memory": attend(x, memory, None, *kv_and_heads(), False, dropout=0.1),
    })  # fmt: skip


@attention("batch:x,heads:y", "rows:x,io:y", "")
def multihead_attention_rows(p):
    """Two batch dimensions, lengths of another name."""
    x, memory = p.input("x", "batch:2,rows:2,foo:4,io:6"), p.input("memory", "batch:2,rows:2,bar:5,io:6")
    attend = mtf.layers.multihead_attention
    return with_variables(p, {
        "self": attend(x, None, None, *kv_and_heads(), True),
        "memory": attend(x, memory, None, *kv_and_heads(), True, name=None),
    })  # fmt: skip


@attention(
    "batch:x,heads:y", "io:x,heads:y", "memory_length:x", "batch:x,kv:y", "", gradients=False
)
def self_attention_incremental(p):
    k, v = (p.input(name, "batch:4,heads:2,memory_length:4,kv:4") for name in "kv")
    x = p.input("x", "batch:4,io:6")
    outputs = {}
    for step in (0, 2, 3):
        n = mtf.constant(p.mesh, step, dtype=tf.int32)
        outputs[f"y_{step}"], outputs[f"k_{step}"], outputs[f"v_{step}"] = (
            mtf.layers.multihead_self_attention_incremental(x, k, v, n, tf.float32, tf.float32)
        )
    steps = p.input("steps", "batch:4", 4)
    outputs["y"], _, _ = mtf.layers.multihead_self_attention_incremental(
        x, k, v, steps, tf.float32, tf.float32, name="step_by_row"
    )
    return with_loss_gradients(p, outputs)


@attention()
def encdec_attention_incremental(p):
    k, v = (p.input(name, "batch:4,heads:2,memory_length:4,kv:4") for name in "kv")
    wq, wo = weights_of(p, "wq wo")
    x, beams = p.input("x", "batch:4,io:6"), p.input("beams", "batch:4,beam:2,io:6")
    bias = p.input("bias", "batch:4,memory_length:4")
    attend = mtf.layers.multihead_encdec_attention_incremental
    return {
        "y": attend(x, wq, wo, k, v, None),
        "biased": attend(x, wq, wo, k, v, bias),
        "beams": attend(beams, wq, wo, k, v, bias, name="beams"),
    }


@attention("batch:x,heads:y", "io:x,heads:y", "window:x", "batch:x,kv:y", "", gradients=False)
def local_attention_incremental(p):
    k, v = (p.input(name, "batch:4,heads:2,window:4,kv:4") for name in "kv")
    weights = weights_of(p, "wq wk wv wo")
    x = p.input("x", "batch:4,io:6")
    attend = mtf.layers.masked_local_attention_1d_incremental
    outputs = {}
    for step in (0, 3, 6):
        n = mtf.constant(p.mesh, step, dtype=tf.int32)
        outputs[f"y_{step}"], outputs[f"k_{step}"], outputs[f"v_{step}"] = attend(
            x, k, v, n, params=weights
        )
    outputs["variables"], _, _ = attend(x, k, v, n, tf.float32, tf.float32)
    return with_loss_gradients(p, outputs)


@attention("batch:x,heads:y", "io:x,heads:y", "length:x", "memory_length:x,heads:y", "")
def memory_compressed_attention(p):
    x, foo = p.input("x", "batch:2,length:8,io:6"), p.input("foo", "batch:2,foo:6,io:6")
    attend = mtf.layers.multihead_self_attention_memory_compressed
    outputs = {
        f"{factor}_{mask}": attend(x, mask, factor, *kv_and_heads(), True, name=f"by_{factor}_{mask}")
        for factor, mask in ((1, True), (2, True), (4, True), (2, False))
    }
    outputs["no_name"] = attend(x, True, 2, *kv_and_heads(), False, dropout=0.5, name=None)
    outputs["mean"] = mtf.layers.compress_mean(foo, foo.shape.dims[1], 3)
    return with_variables(p, outputs)


@attention("batch:x,heads:y", "io:x,heads:y", "heads:x", "batch:x,kv:y", "", gradients=False)
def masked_local_attention(p):
    x = p.input("x", "batch:2,length:8,io:6")
    attend = mtf.layers.masked_local_attention_1d
    keys = []
    outputs = {
        f"window_{window}": attend(x, *kv_and_heads(), True, window, name=f"window_{window}")
        for window in (0, 1, 3, 8, 12)
    }
    outputs["y"] = attend(x, *kv_and_heads(), True, 4, return_kv=keys)
    outputs["k"], outputs["v"] = keys
    weights = weights_of(p, "wq wk wv wo")
    outputs["params"] = attend(x, *kv_and_heads(), True, 4, params=weights)
    return with_loss_gradients(p, outputs)


@attention("length:x,heads:y", "batch:x,length:y", "batch:x,heads:y", "length:x", "")
def masked_local_attention_blocks(p):
    x = p.input("x", "batch:2,length:16,io:6")
    attend = mtf.layers.masked_local_attention_1d
    return with_variables(p, {
        f"y_{window}_{split}": attend(
            x, *kv_and_heads(), True, window, length_per_split=split, name=f"local_{window}_{split}"
        )
        for window, split in ((4, 4), (2, 4), (6, 4), (3, 8), (2, 1), (0, 2))
    })  # fmt: skip


@attention("length:x,heads:y", "batch:x,length:y", "", tolerance=1e-4)
def masked_local_attention_long(p):
    x = p.input("x", "batch:2,length:384,io:4")
    attend = mtf.layers.masked_local_attention_1d
    return with_variables(p, {
        "default": attend(x, *kv_and_heads(), True, length_per_split=192),
        "wide": attend(x, *kv_and_heads(), True, 160, length_per_split=192),
    })  # fmt: skip


@attention("blocks:x,heads:y", "batch:x,blocks:y", "io:x,heads:y", "")
def local_attention_blocks(p):
    x = p.input("x", "batch:2,blocks:4,w:4,io:6")
    attend = mtf.layers.local_self_attention_spatial_blocks
    [named] = dims("m:3")
    return with_variables(p, {
        "y": attend(x, *kv_and_heads(), True),
        "masked": attend(x, *kv_and_heads(), True, mask_right=True, name="masked"),
        "named": attend(x, *kv_and_heads(), True, named, name="named"),
        "named_masked": attend(x, *kv_and_heads(), True, named, mask_right=True, name="nm"),
    })  # fmt: skip


@attention("h_blocks:x,w_blocks:y", "batch:x,w_blocks:y", "h_blocks:x,heads:y", "")
def local_attention_2d_blocks(p):
    x = p.input("x", "batch:2,h_blocks:2,w_blocks:4,h:2,w:3,io:6")
    attend = mtf.layers.local_2d_self_attention_spatial_blocks
    return with_variables(p, {
        "y": attend(x, *kv_and_heads(), True),
        "named": attend(x, *kv_and_heads(), True, *dims("mh:2,mw:3"), name="named"),
    })  # fmt: skip


@attention("h_blocks:x,w_blocks:y", "w_blocks:x", "")
def attention_halos(p):
    k, v = p.input("k", "h_blocks:2,w_blocks:4,h:2,w:3"), p.input("v", "h_blocks:2,w_blocks:4,h:2,w:3,c:2")
    h_blocks, w_blocks, h, w = k.shape.dims
    outputs = {}
    for mask_right in (True, False):
        one = mtf.layers.local_1d_halo_exchange(k, v, w_blocks, w, mask_right)
        two = mtf.layers.local_2d_halo_exchange(k, v, h_blocks, h, w_blocks, w, mask_right)
        outputs.update({f"k1_{mask_right}": one[0], f"v1_{mask_right}": one[1]})
        outputs.update({f"k2_{mask_right}": two[0], f"v2_{mask_right}": two[1]})
    return outputs

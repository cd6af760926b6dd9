"""What is wrong with a call of attention raises before a variable or an operation is made."""

import re

import pytest
import tensorflow.compat.v1 as tf
from helpers.world import World

import mesh_tensorflow as mtf

layers = mtf.layers
KV, HEADS, IO = (mtf.Dimension(n, s) for n, s in (("kv", 4), ("heads", 2), ("io", 6)))


def dims(text):
    return mtf.convert_to_shape(text).dims


def t(text):
    """Returns a function of a World that makes the Tensor of "b:2,io:6" or "io:6/bfloat16"."""
    shape, _, dtype = text.partition("/")
    return lambda w: w.tensor(dims(shape), tf.as_dtype(dtype or "float32"))


def attend(query, memory=None, mask=None):
    return [query, memory, mask], lambda w, x, m, b: layers.multihead_attention(
        x, m, b, KV, HEADS, True
    )


def dot(q, k, v=None, mask=None):
    return [q, k, v or k, mask], lambda w, *args: layers.dot_product_attention(*args, True)


def compressed(x, factor):
    return [x], lambda w, x: layers.multihead_self_attention_memory_compressed(
        x, True, factor, KV, HEADS, True
    )


def local(x, *args, **kwargs):
    return [x], lambda w, x: layers.masked_local_attention_1d(x, KV, HEADS, True, *args, **kwargs)


def step(fn, x, k, v):
    return [x, k, v], lambda w, *args: fn(*args, 0, tf.float32, tf.float32)


def blocks(fn, x):
    return [x], lambda w, x: fn(x, KV, HEADS, True)


X = "b:2,length:8,io:6"
STATE = "b:2,heads:2,memory_length:4,kv:4"
SELF_STEP = layers.multihead_self_attention_incremental
LOCAL_STEP = layers.masked_local_attention_1d_incremental
BLOCKS = layers.local_self_attention_spatial_blocks
BLOCKS_2D = layers.local_2d_self_attention_spatial_blocks

ERRORS = {
    "keys_without_kv": (dot("b:2,l:4,kv:3", "b:2,m:4,other:3"), r"the last dimension of q, kv=3, must"),
    "same_length": (dot("b:2,l:4,kv:3", "b:2,l:4,kv:3"),
        r"l=4, the last but one of k, must not be in q.*rename_length_to_memory_length"),
    "transposed_keys": (dot("b:2,l:4,h:2,kv:3", "b:2,m:5,h:2,kv:3"),
        r"h=2, the last but one of k.*transpose k to \[..., memory, kv\]"),
    "values_without_memory": (dot("b:2,l:4,kv:3", "b:2,m:4,kv:3", "b:2,n:4,kv:3"),
        r"v must have the memory dimension of k, m=4"),
    "unknown_mask": (dot("b:2,l:4,kv:3", "b:2,m:4,kv:3", None, "l:4,n:4"),
        r"the mask .* has n=4, which is not among the dimensions of the logits, b=2, l=4, m=4"),
    "no_memory_dim": (dot("kv:3", "kv:3"), r"k \[..., memory, kv\]"),
    "query_without_length": (attend("io:6"), r"the query must be \[..., length, io\]"),
    "query_and_memory_same": (attend(X, X), r"query's dimension length=8; rename it.*give None"),
    "memory_batch": (attend(X, "b:4,m:8,io:6"), r"must be \[b=2, memory_length, io=6\]"),
    "memory_channels": (attend(X, "b:2,m:8,io:8"), r"must be \[b=2, memory_length, io=6\]"),
    "named_memory_length": (attend("b:2,memory_length:8,io:6"), r"renamed to memory_length.*Rename"),
    "attention_mask": (attend(X, None, "length:8,memory:8"),
        r"has memory=8, which is not among.*heads=2, length=8, memory_length=8"),
    "mask_dtype": (attend(X, None, "length:8/bfloat16"),
        r"mask .* is bfloat16, the logits are float32; .*dtype=tf.float32"),
    "dropout": (([X], lambda w, x: layers.multihead_attention(
        x, None, None, KV, HEADS, True, dropout=1.0)), r"less than 1, not 1.0"),
    "compressed_dropout": (([X], lambda w, x: layers.multihead_self_attention_memory_compressed(
        x, True, 2, KV, HEADS, True, dropout=-0.5)), r"from 0 to less than 1, not -0.5"),
    "factor": (compressed(X, 3), r"compression factor 3 must divide length=8"),
    "factor_zero": (compressed(X, 0), r"compression factor 0 must divide length=8"),
    "compress_mean": (([X], lambda w, x: layers.compress_mean(x, x.shape.dims[1], 5)),
        r"compress_mean: the compression factor 5 must divide length=8.*pad"),
    "compress_mean_dim": (([X], lambda w, x: layers.compress_mean(x, KV, 2)), r"no dimension kv=4"),
    "compressed_length": (compressed("io:6", 2), r"must be \[batch..., length, io\]"),
    "compressed_name": (compressed("b:2,memory_length:8,io:6", 2), r"has a dimension of that name"),
    "window": (local(X, -1), r"window_size must be 0 or more, got -1"),
    "length_per_split": (local(X, 4, length_per_split=3),
        r"length=8 cannot be cut into blocks of 3.*length_per_split=3.*must divide the length"),
    "length_per_split_long": (local(X, 4, length_per_split=16), r"into blocks of 16"),
    "length_per_split_zero": (local(X, 4, length_per_split=0), r"must be 1 or more, got 0"),
    "local_length": (local("io:6"), r"must be \[batch..., length, io\]"),
    "state_batch": (step(SELF_STEP, "b:4,io:6", STATE, STATE), r"must both be \[b=4, heads"),
    "state_values": (step(SELF_STEP, "b:2,io:6", STATE, STATE.replace("4,kv", "5,kv")),
        r"memory_length=4, kv=4\] and values .*memory_length=5"),
    "local_state": (step(LOCAL_STEP, "b:2,io:6", "window:4,kv:4", "window:4,kv:4"),
        r"masked_local_attention_1d_incremental: keys .* must both be"),
    "encdec_keys": ((["b:2,io:6", "heads:2,io:6,kv:4", STATE.replace("heads:2", "heads:3")],
        lambda w, x, wq, k: layers.multihead_encdec_attention_incremental(x, wq, wq, k, k, None)),
        r"weights .* \[heads, io, kv\]"),
    "blocks": (blocks(BLOCKS, "w:4,io:6"), r"must be \[batch..., num_w_blocks, w, io\]"),
    "blocks_name": (blocks(BLOCKS, "memory_w:2,w:4,io:6"), r"has a dimension 'memory_w'.*w=4"),
    "blocks_2d": (blocks(BLOCKS_2D, "n:2,h:2,w:2,io:6"), r"num_h_blocks, num_w_blocks, h, w, io\]"),
    "blocks_2d_name": (blocks(BLOCKS_2D, "memory_h:2,n:2,h:2,w:2,io:6"),
        r"has a dimension 'memory_h'.*h=2"),
    "halo": (([X], lambda w, x: layers.local_1d_halo_exchange(x, x, None, KV, True)),
        r"no dimension kv=4"),
    "bias_names": (([], lambda w: layers.attention_bias_local_block(w.mesh, IO, IO)),
        r"queries \(io=6\) and of the memory \(io=6\) must have different names"),
    "bias_2d_names": (([], lambda w: layers.attention_bias_local_2d_block(w.mesh, IO, KV, HEADS, KV)),
        r"queries \(io=6, kv=4\) and of the memory \(heads=2, kv=4\)"),
    "no_length": ((["b:2,other:4"], lambda w, x: layers.attention_mask_autoregressive(x)),
        r"'length' not found in Shape\[b=2, other=4\]"),
    "no_length_padding": ((["b:2,other:4"], lambda w, x: layers.attention_mask_ignore_padding(x)),
        r"'length' not found"),
    "no_length_segment": ((["b:2,length:4", "b:2,other:4"],
        lambda w, *args: layers.attention_mask_same_segment(*args)), r"'length' not found"),
    "rename": (([X], lambda w, x: layers.rename_length_to_memory_length(x, "len")), r"'len' not found"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_error(name, tf_graph):
    (inputs, call), text = ERRORS[name]
    world = World()
    tensors = [None if spec is None else t(spec)(world) for spec in inputs]
    before, masters = world.state(), tf.global_variables()
    with pytest.raises(ValueError, match=re.compile(text, re.DOTALL)):
        call(world, *tensors)
    assert world.state() == before
    assert tf.global_variables() == masters

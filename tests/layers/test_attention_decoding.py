"""Decoding step by step gives what attention to the whole sequence gives."""

import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import run

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import WHOLE, Placing

KV, HEADS = mtf.Dimension("kv", 4), mtf.Dimension("heads", 4)
layers = mtf.layers


def causal(mesh, length):
    return layers.attention_mask_autoregressive(mtf.range(mesh, length, tf.int32))


def steps_of_attention(mesh, given):
    """Returns the whole sequence's result, and that of its positions one by one."""
    x = given("batch:4,length:6,io:8")
    batch, length, io = x.shape.dims
    whole = layers.multihead_attention(x, None, causal(mesh, length), KV, HEADS, True)
    state = [mtf.zeros(mesh, [batch, HEADS, mtf.Dimension("memory_length", 6), KV])] * 2
    rows = []
    for step, row in enumerate(mtf.unstack(x, length)):
        y, *state = layers.multihead_self_attention_incremental(
            row, *state, step, tf.float32, tf.float32
        )
        rows.append(y)
    return [whole, mtf.stack(rows, "length", 1)]


def steps_of_local_attention(mesh, given):
    x = given("batch:4,length:12,io:8")
    batch, length, io = x.shape.dims
    whole = layers.masked_local_attention_1d(
        x, KV, HEADS, True, 4, length_per_split=4, name="local"
    )
    state = [mtf.zeros(mesh, [batch, HEADS, mtf.Dimension("window", 4), KV])] * 2
    rows = []
    for step, row in enumerate(mtf.unstack(x, length)):
        n = mtf.constant(mesh, step, dtype=tf.int32)
        y, *state = layers.masked_local_attention_1d_incremental(row, *state, n, name="local")
        rows.append(y)
    return [whole, mtf.stack(rows, "length", 1)]


def steps_from_encoder(mesh, given):
    x, memory = given("batch:4,length:6,io:8"), given("batch:4,memory_length:8,io:8", 1)
    mask = layers.attention_mask_ignore_padding(
        mtf.cast(mtf.greater(given("batch:4,length:8", 2), 0.0), tf.int32)
    )
    whole = layers.multihead_attention(x, memory, mask, KV, HEADS, True, name="shared")
    with tf.variable_scope("shared"):
        wq, wk, wv, wo = layers.multihead_attention_vars(
            mesh, HEADS, x.shape.dims[2], KV, tf.float32, tf.float32, tf.float32
        )
    batch, memory_length = memory.shape.dims[:2]
    k, v = (
        mtf.einsum([memory, w], output_shape=[batch, HEADS, memory_length, KV]) for w in (wk, wv)
    )
    rows = [
        layers.multihead_encdec_attention_incremental(row, wq, wo, k, v, mask)
        for row in mtf.unstack(x, x.shape.dims[1])
    ]
    return [whole, mtf.stack(rows, "length", 1)]


DECODERS = [steps_of_attention, steps_of_local_attention, steps_from_encoder]


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("placing", [
    WHOLE, Placing("x:2", "heads:x"), Placing("x:2,y:2", "batch:x,heads:y"),
    Placing("x:2,y:2", "io:x,memory_length:y"), Placing("x:2,y:2", "batch:x,window:y"),
])  # fmt: skip
@pytest.mark.parametrize("build", DECODERS)
@pytest.mark.slips
def test_steps_equal_the_whole_sequence(build, placing):
    (whole, rows), masters = run(build, placing)
    assert len(masters) == 1
    for position in range(whole.shape[1]):
        harness.assert_close(rows[:, position], whole[:, position], 1e-5, f"position {position}")


def test_steps_in_a_loop():
    """The step is a Tensor of the loop, and keys and values are its state."""

    def build(mesh, given):
        x = given("batch:4,length:6,io:8")
        batch, length, io = x.shape.dims
        whole = layers.multihead_attention(x, None, causal(mesh, length), KV, HEADS, True)
        state = [mtf.zeros(mesh, [batch, HEADS, mtf.Dimension("memory_length", 6), KV])] * 2

        def body(step, result, k, v):
            row = mtf.gather(x, step, length)
            y, k, v = layers.multihead_self_attention_incremental(
                row, k, v, step, tf.float32, tf.float32
            )
            here = mtf.one_hot(step, length, dtype=tf.float32)
            return [step + 1, result + mtf.multiply(y, here, output_shape=x.shape), k, v]

        start = [mtf.zeros(mesh, [], tf.int32), mtf.zeros_like(x), *state]
        _, result, _, _ = mtf.while_loop(lambda step, *_: mtf.less(step, 6), body, start)
        return [whole, result]

    for placing in (WHOLE, Placing("x:2,y:2", "batch:x,heads:y")):
        (whole, rows), _ = run(build, placing)
        harness.assert_close(rows, whole, 1e-5)

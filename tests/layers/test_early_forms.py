"""Layers called as before release 0.1.19, without `is_training`, give what they give in training."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import layers

BATCH, LENGTH, D = mtf.Dimension("batch", 2), mtf.Dimension("length", 8), mtf.Dimension("d", 4)
HIDDEN, KEYS, HEADS = mtf.Dimension("hidden", 8), mtf.Dimension("k", 4), mtf.Dimension("heads", 2)
MEMORY = mtf.Dimension("memory", 8)


def sequences(mesh):
    return mtf.random_normal(mesh, [BATCH, LENGTH, D], seed=1)


def blocks(mesh):
    """The image with its dimensions of blocks, one block of each."""
    return mtf.random_normal(
        mesh, [BATCH, mtf.Dimension("wb", 1), mtf.Dimension("w", 8), D], seed=1
    )


def q_k_v(mesh):
    q, k, v = ([BATCH, LENGTH, KEYS], [BATCH, MEMORY, KEYS], [BATCH, MEMORY, D])
    return [mtf.random_normal(mesh, s, seed=i) for i, s in enumerate((q, k, v))]


# name: (the early call, the same call now)
FORMS = {
    "dense_relu_dense": (
        lambda m: layers.dense_relu_dense(sequences(m), HIDDEN, 0.5, [LENGTH]),
        lambda m: layers.dense_relu_dense(sequences(m), HIDDEN, True, 0.5, [LENGTH]),
    ),
    "dense_relu_dense of a rate": (
        lambda m: layers.dense_relu_dense(sequences(m), HIDDEN, 0.5, name="ff"),
        lambda m: layers.dense_relu_dense(sequences(m), HIDDEN, True, 0.5, name="ff"),
    ),
    "dense_relu_dense by name": (
        lambda m: layers.dense_relu_dense(sequences(m), HIDDEN, dropout=0.5),
        lambda m: layers.dense_relu_dense(sequences(m), HIDDEN, is_training=True, dropout=0.5),
    ),
    "multihead_attention": (
        lambda m: layers.multihead_attention(sequences(m), None, None, KEYS, HEADS, 0.5, [BATCH]),
        lambda m: layers.multihead_attention(
            sequences(m), None, None, KEYS, HEADS, True, 0.5, [BATCH]
        ),
    ),
    "multihead_attention without dropout": (
        lambda m: layers.multihead_attention(sequences(m), None, None, KEYS, HEADS, name="a"),
        lambda m: layers.multihead_attention(sequences(m), None, None, KEYS, HEADS, True, name="a"),
    ),
    "dot_product_attention": (
        lambda m: layers.dot_product_attention(*q_k_v(m), None, 0.5),
        lambda m: layers.dot_product_attention(*q_k_v(m), None, True, 0.5),
    ),
    "memory_compressed": (
        lambda m: layers.multihead_self_attention_memory_compressed(
            sequences(m), False, 2, KEYS, HEADS, 0.5
        ),
        lambda m: layers.multihead_self_attention_memory_compressed(
            sequences(m), False, 2, KEYS, HEADS, True, 0.5
        ),
    ),
    "masked_local_attention_1d": (
        lambda m: layers.masked_local_attention_1d(sequences(m), KEYS, HEADS, 4),
        lambda m: layers.masked_local_attention_1d(sequences(m), KEYS, HEADS, True, 4),
    ),
    "masked_local_attention_1d by name": (
        lambda m: layers.masked_local_attention_1d(sequences(m), KEYS, HEADS, window_size=4),
        lambda m: layers.masked_local_attention_1d(sequences(m), KEYS, HEADS, True, window_size=4),
    ),
    "local_self_attention_spatial_blocks": (
        lambda m: layers.local_self_attention_spatial_blocks(blocks(m), KEYS, HEADS),
        lambda m: layers.local_self_attention_spatial_blocks(blocks(m), KEYS, HEADS, True),
    ),
    "dropout": (
        lambda m: mtf.dropout(sequences(m), 0.5, noise_shape=[BATCH]),
        lambda m: mtf.dropout(sequences(m), True, 0.5, noise_shape=[BATCH]),
    ),
}


def value(call):
    """Returns the value of a call in a graph of its own, with the same seeds."""
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(3)
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        y = call(mesh)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        whole = lowering.export_to_tf_tensor(y)
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        return session.run(whole), [op.name for op in mesh.graph.operations]


@pytest.mark.slow_but(7)
@pytest.mark.parametrize("name", FORMS)
def test_early_forms(name):
    early, now = map(value, FORMS[name])
    np.testing.assert_array_equal(early[0], now[0])
    assert early[1] == now[1]


def test_a_flag_stays_a_flag():
    """No number that says whether it is training is taken for a rate."""
    for flag in (False, 0, np.False_):
        found, names = value(
            lambda m, f=flag: layers.dense_relu_dense(sequences(m), HIDDEN, f, 0.5)
        )
        expected, _ = value(lambda m: layers.dense_relu_dense(sequences(m), HIDDEN, False, 0.5))
        np.testing.assert_array_equal(found, expected)
        assert not any("dropout" in n for n in names)

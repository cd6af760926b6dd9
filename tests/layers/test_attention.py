"""Attention with variables of its own: names, initial values, layouts, dropout."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import dims, run

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import WHOLE, Placing

KV, HEADS = mtf.Dimension("kv", 4), mtf.Dimension("heads", 4)
SPLIT = [
    Placing("x:2", "batch:x"),
    Placing("x:2", "heads:x"),
    Placing("x:2", "io:x"),
    Placing("x:2,y:2", "batch:x,heads:y"),
    Placing("x:2,y:2", "heads:x,io:y"),
    Placing("x:2,y:2", "batch:x,io:y", apart=True),
    Placing("x:2,y:2", "batch:y,heads:x", merge="device"),
]
layers = mtf.layers


def causal(mesh, length):
    return layers.attention_mask_autoregressive(mtf.range(mesh, length, tf.int32))


def self_attention(mesh, given, **kwargs):
    x = given("batch:4,length:6,io:8")
    mask = causal(mesh, x.shape.dims[1])
    return layers.multihead_attention(x, None, mask, KV, HEADS, True, **kwargs)


LAYERS = {
    "multihead_attention": self_attention,
    "memory": lambda mesh, given: layers.multihead_attention(
        given("batch:4,length:6,io:8"), given("batch:4,m:8,io:8", 1), None, KV, HEADS, True),
    "compressed": lambda mesh, given: layers.multihead_self_attention_memory_compressed(
        given("batch:4,length:8,io:8"), True, 2, KV, HEADS, True),
    "local": lambda mesh, given: layers.masked_local_attention_1d(
        given("batch:4,length:8,io:8"), KV, HEADS, True, 4, length_per_split=4),
    "blocks": lambda mesh, given: layers.local_self_attention_spatial_blocks(
        given("batch:4,blocks:4,w:2,io:8"), KV, HEADS, True, mask_right=True),
    "blocks_2d": lambda mesh, given: layers.local_2d_self_attention_spatial_blocks(
        given("batch:4,rows:2,columns:2,h:2,w:2,io:8"), KV, HEADS, True),
    "blocks_2d_masked": lambda mesh, given: layers.local_2d_self_attention_spatial_blocks(
        given("batch:4,rows:2,columns:2,h:2,w:2,io:8"), KV, HEADS, True, mask_right=True),
    "step": lambda mesh, given: layers.multihead_self_attention_incremental(
        given("batch:4,io:8"), given("batch:4,heads:4,m:8,kv:4", 1),
        given("batch:4,heads:4,m:8,kv:4", 2), 3, tf.float32, tf.float32)[0],
    "local_step": lambda mesh, given: layers.masked_local_attention_1d_incremental(
        given("batch:4,io:8"), given("batch:4,heads:4,m:8,kv:4", 1),
        given("batch:4,heads:4,m:8,kv:4", 2), 11)[0],
}  # fmt: skip


def with_gradients(name):
    """Returns a builder of a layer's output and its gradients for all variables."""

    def build(mesh, given):
        y = LAYERS[name](mesh, given)
        variables = [v.value for v in mesh.graph.trainable_variables]
        return [y, *mtf.gradients([mtf.reduce_sum(mtf.square(y))], variables)]

    return build


@pytest.mark.slow_but(1)
@pytest.mark.slow("blocks_2d", "blocks_2d_masked", "compressed*", "local*", "memory", "step*")
@pytest.mark.parametrize("name", LAYERS)
def test_split_equals_whole(name):
    """Values and gradients, with variables and what they start from."""
    expected, masters = run(with_gradients(name))
    assert len(expected) == 2 and len(masters) == 1
    [qkvo] = masters.values()
    assert qkvo.shape == (4, 4, 8, 4)
    assert np.abs(expected[1]).max(axis=(1, 2, 3)).min() > 0, "no gradient of some weights"
    more = []
    if name == "local":
        more = [Placing("x:2", "length:x"), Placing("x:2,y:2", "length:y,heads:x", apart=True)]
    if name.startswith("blocks"):
        blocks = "columns" if "2d" in name else "blocks"
        more = [Placing("x:2", f"{blocks}:x"), Placing("x:2,y:2", f"{blocks}:y,batch:x")]
    for placing in SPLIT + more:
        values, split_masters = run(with_gradients(name), placing)
        np.testing.assert_array_equal(split_masters[next(iter(masters))], qkvo)
        for value, e in zip(values, expected, strict=True):
            harness.assert_close(value, e, 1e-5, f"{name} {placing}")


NAMES = {
    "multihead_attention": "multihead_attention/qkvo",
    "memory": "multihead_attention/qkvo",
    "compressed": "multihead_attention/qkvo",
    "local": "masked_local_attention_1d/qkvo",
    "blocks": "multihead_attention/qkvo",
    "blocks_2d": "multihead_attention/qkvo",
    "step": "multihead_attention/qkvo",
    "local_step": "masked_local_attention_1d/qkvo",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_variables(name):
    _, masters = run(LAYERS[name])
    assert list(masters) == [NAMES[name]]


@pytest.mark.parametrize("combine", [True, False])
def test_initial_values(combine):
    """Normal; variances 1 / (io sqrt(kv)) of q and k, 1 / io of v, 1 / (io heads) of o."""

    def build(mesh, given):
        heads, io, kv = dims("heads:8,io:64,kv:32")
        return layers.multihead_attention_params(mesh, heads, io, kv, mtf.VariableDType(), combine)

    values, masters = run(build)
    assert list(masters) == (["qkvo"] if combine else ["q", "k", "v", "o"])
    deviations = [64**-0.5 * 32**-0.25] * 2 + [64**-0.5, (64 * 8) ** -0.5]
    for value, deviation in zip(values, deviations, strict=True):
        assert value.std() == pytest.approx(deviation, rel=0.03)
        assert abs(value.mean()) < 0.03 * deviation
        assert np.abs(value).max() > 3 * deviation  # not truncated
    assert np.abs(values[0] / values[1] - 1).min() > 0  # q and k are not the same numbers
    others, _ = run(build, seed=2)
    assert np.abs(others[0] - values[0]).max() > 0
    if combine:
        np.testing.assert_array_equal(np.stack(values), masters["qkvo"])


def test_dtypes_of_variables():
    def build(mesh, given):
        x = mtf.cast(given("batch:4,length:6,io:8"), tf.bfloat16)
        y = layers.multihead_attention(
            x, None, None, KV, HEADS, True, master_dtype=tf.bfloat16, slice_dtype=tf.float32
        )
        assert y.dtype == tf.bfloat16 and y.shape == x.shape
        [v] = mesh.graph.all_variables
        assert (v.master_dtype, v.slice_dtype) == (tf.bfloat16, tf.float32)
        assert v.activation_dtype == tf.bfloat16
        return y

    [y], masters = run(build)
    assert masters["multihead_attention/qkvo"].dtype == tf.bfloat16.as_numpy_dtype
    [exact], _ = run(lambda mesh, given: layers.multihead_attention(
        given("batch:4,length:6,io:8"), None, None, KV, HEADS, True))  # fmt: skip
    assert np.abs(y.astype(np.float32) - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("name", ["local", "blocks", "blocks_2d_masked", "compressed"])
def test_bfloat16(name):
    """Also where masks are made inside."""
    [exact], _ = run(LAYERS[name])
    [y], _ = run(lambda mesh, given: LAYERS[name](
        mesh, lambda *args: mtf.cast(given(*args), tf.bfloat16)))  # fmt: skip
    assert np.abs(y.astype(np.float32) - exact).max() < 0.1 * np.abs(exact).max()


# -- dropout


def dropped(mesh, given, is_training=True, broadcast=None, rate=0.3):
    """Attends to equal keys and values 1: the result is the sum of the weights."""
    q = given("batch:64,length:16,kv:2")
    ones = mtf.ones(mesh, mtf.convert_to_shape("batch:64,m:32,kv:2"))
    return layers.dot_product_attention(
        q, ones * 0.0, ones, None, is_training, rate, broadcast
    )  # fmt: skip


@pytest.mark.parametrize("placing", [WHOLE, Placing("x:2,y:2", "batch:x,length:y")])
def test_dropout_keeps_the_scale(placing):
    [y], _ = run(dropped, placing)
    assert y.mean() == pytest.approx(1.0, abs=0.01)
    # A sum of 32 weights, of which 0.7 are kept: each is 1 / 32 / 0.7.
    assert y.std() == pytest.approx(np.sqrt(0.3 / 0.7 / 32), rel=0.1)
    np.testing.assert_allclose(y * 32 * 0.7, np.round(y * 32 * 0.7), atol=1e-3)


def test_dropout_is_shared():
    shared = dims("length:16")
    [y], _ = run(lambda mesh, given: dropped(mesh, given, broadcast=shared))
    np.testing.assert_allclose(y, np.broadcast_to(y[:, :1], y.shape), rtol=1e-6)
    assert len(np.unique(y[:, 0, 0])) > 5


def test_no_dropout_outside_of_training():
    [y], _ = run(lambda mesh, given: dropped(mesh, given, is_training=False))
    np.testing.assert_allclose(y, 1.0, rtol=1e-6)


@pytest.mark.parametrize("compressed", [True, False])
def test_dropout_of_layers(compressed):
    """Changes the result in training, and leaves gradients; the mean over noise is near."""

    def build(mesh, given, is_training=True):
        x = given("batch:4,length:8,io:8")
        kwargs = {"dropout": 0.2, "dropout_broadcast_dims": [x.shape.dims[1]]}
        if compressed:
            y = layers.multihead_self_attention_memory_compressed(
                x, True, 2, KV, HEADS, is_training, **kwargs
            )
        else:
            y = layers.multihead_attention(x, None, None, KV, HEADS, is_training, **kwargs)
        [w] = [v.value for v in mesh.graph.trainable_variables]
        return [y, *mtf.gradients([mtf.reduce_sum(mtf.square(y))], [w])]

    (expected, _), _ = run(lambda mesh, given: build(mesh, given, False))
    (y, grad), _ = run(build)
    assert np.abs(y - expected).max() > 0.01
    assert np.abs(grad).max(axis=(1, 2, 3)).min() > 0
    assert np.all(np.isfinite(grad))

"""Functions of attention against NumPy, with and without a Context, and what they refuse."""

import types
import warnings
from unittest import mock

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import dims
from helpers.transformer import attention_layers as base
from helpers.transformer.attention_layers import FLOAT, ROWS, normal, run, softmax, tensor

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.harness import Placing, assert_close
from mesh_tensorflow.transformer import attention as A
from mesh_tensorflow.transformer import transformer_layers as T
from mesh_tensorflow.transformer.attention import _dot_product

QUERIES, MEMORY, KEY, VALUE = 6, 5, 4, 3
Q, K, V = (
    normal(ROWS, QUERIES, 2, KEY),
    normal(ROWS, MEMORY, 2, KEY, seed=1),
    normal(ROWS, MEMORY, 2, VALUE, seed=2),
)
BIAS = normal(QUERIES, MEMORY, seed=3)
ARGUMENTS = tuple(dims(f"memory_length:{MEMORY},d_kv:{KEY},d_v:{VALUE}"))


def operands(mesh):
    return (
        tensor(mesh, Q, f"batch:{ROWS},length:{QUERIES},heads:2,d_kv:{KEY}"),
        tensor(mesh, K, f"batch:{ROWS},memory_length:{MEMORY},heads:2,d_kv:{KEY}"),
        tensor(mesh, V, f"batch:{ROWS},memory_length:{MEMORY},heads:2,d_v:{VALUE}"),
    )


def logits():
    return np.einsum("blhk,bmhk->blhm", Q, K) + BIAS[None, :, None]


def attended(weights):
    return np.einsum("blhm,bmhv->blhv", weights, V)


def test_attention_without_a_context():
    def build(mesh):
        bias = tensor(mesh, BIAS, f"length:{QUERIES},memory_length:{MEMORY}")
        return [
            A.attention(*operands(mesh), *ARGUMENTS, bias),
            A.attention(*operands(mesh), *ARGUMENTS, bias, extra_logit=0.5),
            A.attention(*operands(mesh), *ARGUMENTS, bias, 0.5),
        ]

    plain, extra, dropped = run(build).values()
    assert_close(plain, attended(softmax(logits())), 1e-5)
    e = np.exp(logits())
    assert_close(extra, attended(e / (e.sum(-1, keepdims=True) + np.exp(0.5))), 1e-5)
    assert np.abs(dropped - plain).max() > 0.01  # callers that train gave a rate, others none


@pytest.mark.parametrize("z_loss, extra", [(0.1, None), (None, 0.5)])
def test_blocks(z_loss, extra):
    """Blocks, asked for or because of the length, give the same values, losses and gradients."""

    def build(mesh):
        found = []
        for length, blocked in ((10**6, None), (10**6, True), (MEMORY, None), (MEMORY, False)):
            xs = operands(mesh)
            bias = tensor(mesh, BIAS, f"length:{QUERIES},memory_length:{MEMORY}")
            context = types.SimpleNamespace(train=True, losses=[], nonpadding=1, model=None)
            with mock.patch.object(_dot_product, "LEAST_LENGTH", length):
                y = A.attention(*xs, *ARGUMENTS, bias, extra_logit=extra, context=context,
                                z_loss_coeff=z_loss, blocked=blocked)  # fmt: skip
            kinds = [type(op).__name__ for op in mesh.graph.operations]
            assert kinds.count("BlockedAttentionOperation") == min(2, len(found))
            loss = mtf.add_n([mtf.reduce_sum(mtf.square(y)), *context.losses])
            found.append([y, *mtf.gradients([loss], [*xs, bias])])
        return [x for results in found for x in results]

    results = list(run(build).values())
    n = len(results) // 4
    for i in range(n, 4 * n):
        assert_close(results[i], results[i % n], 1e-5)


def test_blocks_that_are_not_possible():
    rate = "dropout_rate is a tensor, and blocks need a number. Leave blocked out"
    loss = "z_loss_coeff leaves an extra_logit out"
    length = "has no dimension of its own"

    def build(mesh):
        q, k, v = operands(mesh)
        one = mtf.gather(q, 0, q.shape.dims[1])
        context = types.SimpleNamespace(train=True, losses=[], nonpadding=1, model=None)
        for text, x, kwargs in (
            (rate, q, {"dropout_rate": tf.constant(0.5)}),
            (loss, q, {"extra_logit": 0.5, "z_loss_coeff": 0.1}),
            (length, one, {}),
        ):
            with pytest.raises(ValueError, match=f"blocked=True is not possible: .*{text}"):
                A.attention(x, k, v, *ARGUMENTS, context=context, blocked=True, **kwargs)
        return [q]

    run(build)


@pytest.mark.slips
def test_a_ring_that_is_not_possible_is_told():
    """Otherwise the memory of a long sequence would be missed only when it is used up."""

    def build(mesh):
        q, k, v = operands(mesh)
        with pytest.warns(mtf.MeshTensorFlowWarning, match="ring=True is not possible: dropout"):
            y = A.attention(q, k, v, *ARGUMENTS, dropout_rate=tf.constant(0.5), ring=True)
        step = types.SimpleNamespace(mode="incremental", train=False, losses=None, model=None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            A.attention(
                mtf.gather(q, 0, q.shape.dims[1]), k, v, *ARGUMENTS, context=step, ring=True
            )
        return [y]

    run(build)


def test_dropout_keeps_the_mean():
    """Of many rows, each of which has one memory position more than enough."""
    rows = 4096

    def build(mesh):
        q = mtf.zeros(mesh, f"batch:{rows},length:2,d_kv:2")
        k = mtf.zeros(mesh, f"batch:{rows},memory_length:3,d_kv:2")
        v = mtf.ones(mesh, f"batch:{rows},memory_length:3,d_v:1")
        shared = dims("length:2")
        arguments = dims("memory_length:3,d_kv:2,d_v:1")
        train = types.SimpleNamespace(train=True)
        return [A.attention(q, k, v, *arguments, None, 0.25, shared, context=train)]

    y = run(build)[0]
    np.testing.assert_array_equal(y[:, 0], y[:, 1])
    assert abs(y.mean() - 1) < 5 * np.sqrt(1 / 0.75 - 1) / np.sqrt(3 * rows)
    assert set(np.unique(np.round(y / (4 / 9), 3))) == {0, 1, 2, 3}


def test_z_loss():
    nonpadding = np.array([[1, 1, 1, 0, 0, 0]] * ROWS)

    def build(mesh, mode, losses, ids=True):
        sequence_id = tensor(mesh, nonpadding, f"batch:{ROWS},length:{QUERIES}") if ids else None
        context = base.context(mesh, mode, losses=losses, sequence_id=sequence_id)
        bias = tensor(mesh, BIAS, f"length:{QUERIES},memory_length:{MEMORY}")
        y = A.attention(*operands(mesh), *ARGUMENTS, bias, context=context, z_loss_coeff=0.1)
        return [y, *(losses or [])]

    squares = np.log(np.exp(logits()).sum(-1)) ** 2
    losses = []
    found = run(lambda mesh: build(mesh, "train", losses))
    assert_close(found[1], 0.1 * (squares * nonpadding[..., None]).mean(), 1e-5)
    assert_close(
        run(lambda mesh: build(mesh, "train", [], ids=False))[1], 0.1 * squares.mean(), 1e-5
    )
    assert len(run(lambda mesh: build(mesh, "eval", []))) == 1
    assert len(run(lambda mesh: build(mesh, "train", None))) == 1


@pytest.mark.slips
def test_z_loss_where_a_mesh_dimension_is_idle():
    """Logits are then cut along the batch twice; the padding is not."""
    placing = Placing("x:2,y:2", "batch:x,d_ff:y")

    def build(mesh, placing):
        sequence_id = tensor(
            mesh, np.tile([1, 1, 1, 0, 0, 0], [ROWS, 1]), f"batch:{ROWS},length:{QUERIES}"
        )
        context = base.context(mesh, "train", placing=placing, sequence_id=sequence_id)
        y = A.attention(*operands(mesh), *ARGUMENTS, context=context, z_loss_coeff=0.1)
        assert y.shape.to_integer_list == [ROWS, QUERIES, 2, VALUE]
        return [y, *context.losses]

    expected = run(lambda mesh: build(mesh, None))
    for key, values in run(lambda mesh: build(mesh, placing), placing).items():
        assert_close(values, expected[key], 1e-5)


def test_visibility():
    def build(mesh):
        visible = tensor(mesh, [[1, 0], [0, 1]], "length:2,memory_length:2")
        return [A.visibility_mask_to_attention_bias(mtf.equal(visible, 1), tf.float32)]

    np.testing.assert_array_equal(run(build)[0], np.float32([[0, -1e9], [-1e9, 0]]))


SPLITS = [
    ("batch:x,heads:y", "x:2,y:2", "batch:8,length:8,heads:4,d_kv:4"),  # none is idle
    ("batch:x,d_ff:y", "x:2,y:2", "batch:2,d_ff:4,length:8,heads:4,d_kv:4"),
    ("batch:x,d_ff:y", "x:2,y:3", "batch:8,length:8,heads:4,d_kv:4"),  # not divisible
    ("batch:x,d_ff:y", "x:2,y:1", "batch:8,length:8,heads:4,d_kv:4"),
    ("batch:x,d_kv:y", "x:2,y:2", "batch:8,length:8,heads:4,d_kv:4"),
    ("d_ff:y", "y:2", "batch:1,d_ff:8,length:8,heads:4,d_kv:4"),
    (None, None, "batch:8,length:8,heads:4,d_kv:4"),
]


@pytest.mark.parametrize("layout, mesh_shape, expected", SPLITS)
def test_second_split(layout, mesh_shape, expected):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    q = mtf.zeros(mesh, "batch:8,length:8,heads:4,d_kv:4")
    k = mtf.zeros(mesh, "batch:8,memory_length:6,heads:4,d_kv:4")
    context = types.SimpleNamespace(
        model=types.SimpleNamespace(layout=layout, mesh_shape=mesh_shape)
    )
    found = A.maybe_reshape_attention_input_for_2d_sharding(context, q, k, k, None, dims("d_kv:4"))
    assert found[0].shape == mtf.convert_to_shape(expected)
    assert found[1].shape.size == k.shape.size and found[3] is None
    same = A.maybe_reshape_attention_input_for_2d_sharding(None, q, k, k, None, [])
    assert same == (q, k, k, None)


def test_simple_params():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    io, kv, heads = dims("io:6,kv:4,heads:2")
    with tf.Graph().as_default():
        params = A.attention_params_simple(mesh, io, kv, heads, FLOAT)
        assert params.wq.shape == mtf.convert_to_shape("io:6,heads:8")
        assert (params.q_dims, params.k_dims, params.v_dims, params.o_dims) == ([heads, kv],) * 4
        x = mtf.zeros(mesh, "batch:2,length:3,io:6")
        assert params.compute_q(x).shape == mtf.convert_to_shape("batch:2,length:3,heads:2,kv:4")
        # Dimensions of what was found may stand in any order.
        o = mtf.zeros(mesh, "heads:2,batch:2,kv:4,length:3")
        assert params.compute_output(o).shape == x.shape


def raises(text, fn):
    with tf.Graph().as_default(), pytest.raises(ValueError, match=text):
        fn(mtf.Mesh(mtf.Graph(), "mesh"))


def params(mesh, key="d_kv:4", value="d_kv:4", **kwargs):
    [io], [heads] = dims("io:6"), dims("heads:2")
    return A.AttentionParams(
        mesh, io, io, io, *dims(key), *dims(value), [heads], [heads], FLOAT, **kwargs
    )


def test_errors():
    def attend(mesh, which=(0, 1, 2), arguments=ARGUMENTS, **kwargs):
        found = operands(mesh)
        return A.attention(*(found[i] for i in which), *arguments, **kwargs)

    other = (*dims("memory_length:9,d_kv:4,d_v:3"),)
    raises(
        r"k .* has no memory_length_dim memory_length=9; rename",
        lambda m: attend(m, arguments=other),
    )
    raises(
        r"q .* has the dimension of the memory, memory_length=5",
        lambda m: attend(m, which=(1, 1, 2)),
    )
    raises(r"v .* has no value_dim d_v=3", lambda m: attend(m, which=(0, 1, 1)))
    raises(r"from 0 to less than 1, not 1.5", lambda m: attend(m, dropout_rate=1.5))
    raises(r"z_loss_coeff adds to context.losses", lambda m: attend(m, z_loss_coeff=0.1))
    raises(
        r"key_dim d_kv=4 and value_dim d_v=3 must be equal",
        lambda m: params(m, value="d_v:3", shared_kv=True),
    )
    raises(r"set combine_dims=False", lambda m: params(m, keep_query_heads_dims=True))
    x = "batch:2,length:3,io:6"
    raises(r"no weight for queries", lambda m: params(m, no_query=True).compute_q(mtf.zeros(m, x)))
    raises(r"use compute_kv", lambda m: params(m, shared_kv=True).compute_k(mtf.zeros(m, x)))
    raises(r"use compute_kv", lambda m: params(m, shared_kv=True).compute_v(mtf.zeros(m, x)))
    raises(r"use compute_k and compute_v", lambda m: params(m).compute_kv(mtf.zeros(m, x)))

    def local(mesh, **kwargs):
        q = mtf.zeros(mesh, "batch:2,length:8,d_kv:4")
        return A.local_attention_1d(q, q, q, *dims("length:8,d_kv:4"), *dims("d_kv:4"), **kwargs)

    raises(
        r"length=8 cannot be cut into length_dim_num_splits=3",
        lambda m: local(m, length_dim_num_splits=3),
    )
    raises(r"radius must be 1 or more, got 0", lambda m: local(m, radius=0))


@gin.configurable(module="test_attention_functions")
def halved_attention(*args, **kwargs):
    return 0.5 * A.attention(*args, **kwargs)


class OfItsOwn:
    """Says itself which function attends."""

    attention_fn = staticmethod(halved_attention)


def test_who_says_which_function_attends_to_an_encoder():
    """A layer does; of branches it is the configuration of `enc_dec_attention`."""
    whole, half = 1.0, 0.5
    expected = {
        # Neither, the configuration, the layer, both.
        T.EncDecAttention: [whole, whole, half, half],
        T.BranchedEncDecAttention: [whole, half, whole, half],
    }
    for kind, factors in expected.items():
        own = type("Own", (OfItsOwn, kind), {})

        def output(cls, binding):
            def build(mesh):
                encoded = tensor(
                    mesh,
                    normal(ROWS, 6, base.DEPTH, seed=4),
                    f"batch:{ROWS},memory_length:6,d_model:{base.DEPTH}",
                )
                context = base.context(mesh, encoder_output=encoded)
                return [base.called(cls(**base.SMALL), context, base.layer_input(mesh))]

            gin.parse_config(binding)
            try:
                return run(build)[0]
            finally:
                gin.clear_config()

        bound = "enc_dec_attention.attention_fn = @halved_attention"
        found = [output(cls, binding) for cls in (kind, own) for binding in ("", bound)]
        for value, factor in zip(found, factors, strict=True):
            assert_close(value, factor * found[0], 1e-5)
        assert np.abs(found[0]).max() > 0.1

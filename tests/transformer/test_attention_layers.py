"""Layers of attention: decoding equals whole sequences, in every layout; what each one promises."""

import functools

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import dims
from helpers.transformer import attention_layers as base
from helpers.transformer.attention_layers import (
    BEGINS,
    DEPTH,
    LENGTH,
    MEMORY,
    ROWS,
    SMALL,
    STEPS,
    called,
    normal,
    run,
    softmax,
    tensor,
)

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.harness import WHOLE, Placing, assert_close
from mesh_tensorflow.transformer import transformer_layers as T

X = normal(ROWS, LENGTH, DEPTH)
EXPERTS = {
    **SMALL, "num_experts": 2, "hidden_size": 6, "group_size": 8, "shared_kv": True,
    "switch_policy_eval": "argmax", "capacity_factor_eval": 4.0,
}  # fmt: skip
TALKING = {
    "key_heads_dims": (("key_heads", 2),), "softmax_heads_dims": (("heads", 4),),
    "value_heads_dims": (("value_heads", 2),), "key_size": 4, "value_size": 3,
}  # fmt: skip
ALL_DYNAMIC = ["x2l", "m2l", "x2w", "m2w"]
MIXED = {
    "layers_per_encoder_module": 1, "layers_per_decoder_module": 1, "encoder_num_modules": 1,
    "decoder_num_modules": 1,
}  # fmt: skip
SELF = {
    "plain": lambda: T.SelfAttention(**SMALL),
    "bias": lambda: T.SelfAttention(**SMALL, relative_attention_type="bias", relative_attention_num_buckets=8),
    "contextual": lambda: T.SelfAttention(**SMALL, relative_attention_type="contextual"),
    "shared_kv": lambda: T.SelfAttention(**SMALL, shared_kv=True, fold_scaling_into_initializer=False),
    "multi_query": lambda: T.SelfAttention(**SMALL, num_memory_heads=1),
    "grouped": lambda: T.SelfAttention(4, 2, 2, combine_dims=False),
    "rotary": lambda: T.SelfAttention(**SMALL, rotary=mtf.layers.RotaryEmbedding(base=10.0)),
    "rotary_grouped": lambda: T.SelfAttention(
        4, 2, 4, combine_dims=False, rotary=mtf.layers.RotaryEmbedding(fraction=0.5, interleaved=True)
    ),
    "rotary_local": lambda: T.LocalSelfAttention(radius=3, **SMALL, rotary=mtf.layers.RotaryEmbedding()),
    "biases": lambda: T.SelfAttention(**SMALL, biases="qkvo"),
    "qk_norm": lambda: T.SelfAttention(4, 2, 4, combine_dims=False, biases="qkv", qk_norm_epsilon=1e-6),
    "local": lambda: T.LocalSelfAttention(radius=3, **SMALL),
    "local_wide": lambda: T.LocalSelfAttention(radius=20, **SMALL, shared_kv=True),
    "talking": lambda: T.TalkingHeadsSelfAttention(**TALKING, relative_attention_type="bias"),
    "talking_dynamic": lambda: T.TalkingHeadsSelfAttention(**TALKING, dynamic_projections=ALL_DYNAMIC),
    "bilinear": lambda: T.GeneralBilinearSelfAttention((("heads", 2),), relative_attention_type="bias"),
    "branched": lambda: T.BranchedSelfAttention(**SMALL),
    **{
        mode: lambda mode=mode: T.Synthesizer(
            **SMALL, synthesize_mode=mode, attention_kwargs={"max_length": LENGTH}
        )
        for mode in ("random", "random_plus", "random_plus_alpha", "dense_minus", "dense_plus", "dense_plus_alpha", "factorized")
    },
    **{
        f"experts_{computation}_{attend}": lambda computation=computation, attend=attend: T.ExpertsSelfAttention(
            **EXPERTS, expert_computation=computation, attend_to_memory=attend
        )
        for computation in ("qkv", "q", "kv") for attend in (False, True)
    },
}  # fmt: skip
FROM_ENCODER = {
    "plain": lambda: T.EncDecAttention(**SMALL),
    "spans": lambda: T.EncDecAttention(
        **SMALL, relative_attention_type="bias", relative_attention_num_buckets=8
    ),
    "talking": lambda: T.TalkingHeadsEncDecAttention(**TALKING, dynamic_projections=ALL_DYNAMIC),
    "bilinear": lambda: T.GeneralBilinearEncDecAttention(heads_dims=(("heads", 2),)),
    "branched": lambda: T.BranchedEncDecAttention(**SMALL),
    "transparent": lambda: T.TransparentEncDecAttention(**MIXED, **SMALL),
    "experts": lambda: T.ExpertsEncDecAttention(**EXPERTS),
    "experts_attending": lambda: T.ExpertsEncDecAttention(**EXPERTS, attend_to_memory=True),
}
IDS = np.random.RandomState(4).randint(7, 12, (ROWS, LENGTH))
ENCODER_IDS = np.random.RandomState(5).randint(7, 12, (ROWS, MEMORY))


def assert_steps_are_rows(found, tolerance=1e-5, begins=BEGINS):
    """Checks that outputs of one position each are those of whole sequences."""
    whole, steps = found[0], [found[1 + i] for i in range(STEPS)]
    for step, values in enumerate(steps):
        expected = whole[np.arange(ROWS), np.array(begins) + step]
        assert_close(values, expected, tolerance)


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("name", SELF)
def test_decoding_equals_whole_sequences(name):
    found = run(lambda mesh: base.decoded(mesh, SELF[name](), X), scale=0.4)
    assert np.abs(found[0]).max() > 0.1
    assert_steps_are_rows(found)


@pytest.mark.parametrize("name", ["plain", "local", "talking_dynamic", "experts_qkv_True"])
def test_decoding_from_nothing_equals_whole_sequences(name):
    """Samplers begin with states of zeros then, not with what the first part has recorded."""
    found = run(lambda mesh: base.decoded(mesh, SELF[name](), X, begins=None), scale=0.4)
    assert_steps_are_rows(found, begins=[0] * ROWS)


def from_encoder(context):
    """Adds an encoder's output, its layers and ids to a Context."""
    mesh = context.mesh
    shape = f"batch:{ROWS},memory_length:{MEMORY},d_model:{DEPTH}"
    encoded = tensor(mesh, normal(ROWS, MEMORY, DEPTH, seed=1), shape)
    context.encoder_output = encoded
    context.encoder_layer_outputs = [encoded * 0.5, encoded]
    here = np.where(np.arange(MEMORY) < 5, 1, 0) * np.ones([ROWS, 1])
    context.encoder_sequence_id = tensor(
        mesh, here.astype(int), f"batch:{ROWS},memory_length:{MEMORY}"
    )
    context.encoder_inputs = tensor(mesh, ENCODER_IDS, f"batch:{ROWS},memory_length:{MEMORY}")
    ids, shape = IDS, f"batch:{ROWS},length:{LENGTH}"
    if context.mode == "incremental":
        ids, shape = IDS[np.arange(ROWS), context.at], f"batch:{ROWS}"
    context.inputs = tensor(mesh, ids, shape)


@pytest.fixture
def sentinels():
    gin.bind_parameter("relative_position_spans.num_sentinels", 2)


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("name", FROM_ENCODER)
def test_decoding_from_an_encoder_equals_whole_sequences(name, sentinels):
    found = run(lambda mesh: base.decoded(mesh, FROM_ENCODER[name](), X, from_encoder), scale=0.4)
    assert_steps_are_rows(found)


PLACINGS = {
    "data": Placing("x:2", "batch:x"),
    "data_heads": Placing("x:2,y:2", "batch:x,heads:y"),
    "memory_heads": Placing("x:2,y:2", "memory_length:x,heads:y"),
    "channels": Placing("x:2", "d_model:x"),
    "length": Placing("x:2", "length:x"),
    "one_device": Placing("x:2,y:2", "batch:x,heads:y", merge="device"),
    "simd": Placing("x:2,y:2", "batch:x,heads:y", simd=True),
    "idle": Placing("x:2,y:2", "batch:x,d_ff:y"),
}
IN_LAYOUTS = [
    *[("bias", placing) for placing in PLACINGS],
    *[("talking_dynamic", placing) for placing in ("memory_heads", "simd", "idle")],
    *[("local", placing) for placing in ("data_heads", "length", "simd", "idle")],
    *[("random_plus_alpha", placing) for placing in ("data_heads", "length")],
    *[("dense_plus", placing) for placing in ("memory_heads", "length")],
    *[(name, "data_heads") for name in ("grouped", "bilinear", "branched", "experts_qkv_True")],
]


def training_step(mesh, layer, placing):
    """Returns the decoding of a layer, and gradients of its whole output."""
    outputs = base.decoded(mesh, layer, X, placing=placing)
    loss = mtf.reduce_sum(mtf.square(outputs[0]))
    variables = [v.outputs[0] for v in mesh.graph.trainable_variables]
    return [*outputs, *mtf.gradients([loss], variables)]


@functools.cache
def on_one_processor(name):
    return run(lambda mesh: training_step(mesh, SELF[name](), None), scale=0.4)


@pytest.mark.slow
@pytest.mark.parametrize("name, placing", IN_LAYOUTS)
def test_the_same_in_every_layout(name, placing):
    placing = PLACINGS[placing]
    found = run(lambda mesh: training_step(mesh, SELF[name](), placing), placing, scale=0.4)
    for key, values in on_one_processor(name).items():
        assert_close(found[key], values, 2e-5)


def weights_of(mesh):
    return [v.outputs[0] for v in mesh.graph.all_variables]


@pytest.mark.parametrize("mode, sizes", [
    ("random", {8}), ("dense_minus", {8}), ("random_plus", {512}), ("random_plus_alpha", {512}),
    ("dense_plus", {512}), ("dense_plus_alpha", {512}), ("factorized", {512}),
])  # fmt: skip
def test_lengths_of_synthesized_weights_are_the_classics(tf_graph, mode, sizes):
    """With the max_length 8, which it asks for in two modes only: so they are in checkpoints."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    called(SELF[mode](), base.context(mesh), base.layer_input(mesh))
    found = {
        v.shape.get_dim_by_name("memory_length").size
        for v in mesh.graph.trainable_variables
        if "memory_length" in v.shape.dimension_names
    }
    assert LENGTH == 8 and found == sizes


def test_local_attention_takes_no_options_of_other_layers():
    """Which gin binds for all of them; what shapes its weights, it takes."""

    def found(*bindings):
        gin.parse_config([f"SelfAttention.{binding}" for binding in bindings])
        try:
            layer = SELF["local"]()
        finally:
            gin.clear_config()
        return run(lambda mesh: [called(layer, base.context(mesh), base.layer_input(mesh))])[0]

    bound = ("keep_query_heads_dims = True", "attention_func = 'hybrid'", "z_loss_coeff = None")
    np.testing.assert_array_equal(found(*bound), found())
    assert np.abs(found("fold_scaling_into_initializer = False") - found()).max() > 1e-3


def test_local_attention_sees_the_last_positions():
    layer = T.LocalSelfAttention(radius=3, num_heads=1, key_value_size=DEPTH)
    found = run(
        lambda mesh: [called(layer, base.context(mesh), base.layer_input(mesh)), *weights_of(mesh)],
        scale=0.4,
    )
    y, wq, wk, wv, wo = (found[i] for i in range(5))
    logits = np.einsum("bld,bmd->blm", X @ wq, X @ wk)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    logits = np.where((distance >= 0) & (distance < 3), logits, -1e9)
    assert_close(y, softmax(logits) @ (X @ wv) @ wo, 1e-5)


def test_local_attention_of_an_encoder_sees_both_sides():
    layer = T.LocalSelfAttention(radius=2, num_heads=1, key_value_size=DEPTH)
    sequence = np.array([[1, 1, 1, 1, 2, 2, 2, 2]] * ROWS)

    def build(mesh):
        ids = tensor(mesh, sequence, f"batch:{ROWS},length:{LENGTH}")
        context = base.context(mesh, causal=False, sequence_id=ids)
        return [called(layer, context, base.layer_input(mesh)), *weights_of(mesh)]

    found = run(build, scale=0.4)
    y, wq, wk, wv, wo = (found[i] for i in range(5))
    logits = np.einsum("bld,bmd->blm", X @ wq, X @ wk)
    distance = np.arange(LENGTH) - np.arange(LENGTH)[:, None]
    same = sequence[:, :, None] == sequence[:, None]
    logits = np.where((distance > -2) & (distance <= 2) & same, logits, -1e9)
    assert_close(y, softmax(logits) @ (X @ wv) @ wo, 1e-5)


def doubly_normalized(logits, hidden, mix):
    """Returns weights of hybrid attention, of logits [rows, queries, memory]."""
    visible = np.where(hidden, -1e9, logits)
    top = visible.max(1, keepdims=True)
    sums = top + np.log(np.exp(visible - top).sum(1, keepdims=True))
    twice = softmax(np.where(hidden, -1e9, logits - sums))
    return (1 - mix) * softmax(visible) + mix * twice


@pytest.mark.parametrize("begins", [BEGINS, None])
def test_hybrid_attention(begins):
    layer = T.SelfAttention(num_heads=1, key_value_size=DEPTH, attention_func="hybrid")
    found = run(
        lambda mesh: [*base.decoded(mesh, layer, X, begins=begins), *weights_of(mesh)], scale=0.4
    )
    wq, wk, wv, wo, mix = (found[i] for i in range(1 + STEPS, 6 + STEPS))
    logits = np.einsum("bld,bmd->blm", X @ wq, X @ wk)
    hidden = np.arange(LENGTH)[:, None] < np.arange(LENGTH)
    mix = np.clip(mix, 0, 1)
    values = X @ wv
    assert_close(found[0], doubly_normalized(logits, hidden[None], mix) @ values @ wo, 1e-5)
    # In decoding the sums are over the positions so far.
    for step in range(STEPS):
        for row, begin in enumerate(begins or [0] * ROWS):
            n = begin + step + 1
            weights = doubly_normalized(logits[row : row + 1, :n, :n], hidden[None, :n, :n], mix)
            expected = weights[0, -1] @ values[row, :n] @ wo
            assert_close(found[1 + step][row], expected, 1e-5)


@pytest.mark.parametrize("computation", ["qkv", "q", "kv"])
def test_experts_attention(computation):
    """With one expert queries and keys are two layers, and attention is as it always is."""
    options = {**EXPERTS, "num_heads": 1, "key_value_size": DEPTH, "num_experts": 1}
    layer = T.ExpertsSelfAttention(**options, expert_computation=computation, attend_to_memory=True)
    names = []

    def build(mesh):
        y = called(layer, base.context(mesh), base.layer_input(mesh))
        names.extend(v.name.split("layer_000/")[1] for v in mesh.graph.all_variables)
        return [y, *weights_of(mesh)]

    found = run(build, scale=0.4)
    w = {name: found[1 + i] for i, name in enumerate(names)}
    inner = np.maximum(np.einsum("bld,edh->blh", X, w["wi/kernel"]), 0)

    def made(*tries):
        name = next(n for n in tries if n in w)
        return np.einsum("blh,ehd->bld", inner, w[name]) if name.endswith("kernel") else X @ w[name]

    q, k = made("q", "q_wo/kernel", "wo/kernel"), made("kv", "k_wo/kernel", "wo/kernel")
    logits = np.einsum("bld,bmd->blm", q, k) * DEPTH**-0.5
    logits = np.where(np.arange(LENGTH)[:, None] >= np.arange(LENGTH), logits, -1e9)
    assert_close(found[0], softmax(logits) @ k @ w["o"], 1e-5)


def test_prompts_when_decoding():
    layer = T.SelfAttention(
        **SMALL, hyperprompt_hidden_dim=3, hyperprompt_task_num=2, hyperprompt_length_decoder=2,
        relative_attention_type="bias",
    )  # fmt: skip

    def prepare(context):
        prompts = tensor(
            context.mesh, normal(2, 2, DEPTH, seed=9), f"task_num:2,memory_length:2,d_model:{DEPTH}"
        )
        context.shared_params = {"decoder": {"prompts": prompts}}
        context.cache["task-id"] = tensor(context.mesh, [[1], [0], [1], [1]], "batch:4,one:1")

    assert_steps_are_rows(run(lambda mesh: base.decoded(mesh, layer, X, prepare), scale=0.4))


def test_prompts_of_split_embeddings():
    """Those of task and layer are joined, whatever splits their channels."""
    layer = T.SelfAttention(
        **SMALL, use_hyperprompt=True, hyperprompt_hidden_dim=3, hyperprompt_task_num=2,
        hyperprompt_length_decoder=2,
    )  # fmt: skip
    sizes = {
        "prompts": f"task_num:2,memory_length:2,d_model:{DEPTH}",
        "task_raw_embedding": "task_num:2,d_task:4",
        "layer_embedding": "layers:2,d_task:4",
        "task_projector_layer_one": "d_task:8,inner:6",
        "task_projector_layer_two": "inner:6,d_task_out:4",
        **{f"hypernet_w_{part}_up": f"d_task_out:4,d_model:{DEPTH},prefix_hidden:3" for part in "kv"},
        **{f"hypernet_w_{part}_down": "d_task_out:4,prefix_hidden:3,heads:2,d_kv:4" for part in "kv"},
    }  # fmt: skip

    def build(mesh):
        context = base.context(mesh)
        context.shared_params["decoder"] = {
            name: tensor(mesh, normal(*mtf.convert_to_shape(s).to_integer_list, seed=i), s)
            for i, (name, s) in enumerate(sizes.items())
        }
        context.cache["task-id"] = tensor(mesh, [[1], [0], [1], [1]], "batch:4,one:1")
        with tf.variable_scope("decoder"):
            return [called(layer, context, base.layer_input(mesh))]

    expected = run(build, scale=0.4)[0]
    assert_close(run(build, Placing("x:2", "d_task:x"), scale=0.4)[0], expected, 1e-5)


def test_prompts_are_seen_and_padding_is_not():
    layer = T.SelfAttention(
        **SMALL, hyperprompt_hidden_dim=3, hyperprompt_task_num=2, hyperprompt_length_decoder=2
    )
    sequence = np.array([[1, 1, 1, 1, 1, 0, 0, 0]] * ROWS)

    def build(mesh, x, prompts):
        ids = tensor(mesh, sequence, f"batch:{ROWS},length:{LENGTH}")
        context = base.context(mesh, causal=False, sequence_id=ids)
        prompts = tensor(mesh, prompts, f"task_num:2,memory_length:2,d_model:{DEPTH}")
        context.shared_params = {"decoder": {"prompts": prompts}}
        context.cache["task-id"] = tensor(mesh, [[1], [0], [1], [1]], "batch:4,one:1")
        x = tensor(mesh, x, f"batch:{ROWS},length:{LENGTH},d_model:{DEPTH}")
        return [called(layer, context, x)]

    prompts = normal(2, 2, DEPTH, seed=9)
    one = run(lambda mesh: build(mesh, X, prompts), scale=0.4)[0]
    padding = np.where(sequence[..., None] == 0, 5.0, X)
    assert_close(
        run(lambda mesh: build(mesh, padding, prompts), scale=0.4)[0][:, :5], one[:, :5], 1e-6
    )
    other = run(lambda mesh: build(mesh, X, prompts[::-1].copy()), scale=0.4)[0]
    assert np.abs(other - one).max() > 1e-3


@pytest.mark.parametrize("kwargs", [{}, {"relative_attention_type": "bias"}])
def test_initial_values(kwargs):
    """Deviations by which logits, and what each weight makes, have variance 1."""
    found = {}
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        context = base.context(mesh)
        context.model.model_dim = dims("d_model:128")[0]
        x = mtf.zeros(mesh, f"batch:{ROWS},length:{LENGTH},d_model:128")
        T.SelfAttention(num_heads=8, key_value_size=32, **kwargs).call(context, x)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            found = {v.op.name: session.run(v).std() for v in tf.global_variables()}
    expected = {"q": (128 * 32) ** -0.5, "k": 128**-0.5, "v": 128**-0.5, "o": (8 * 32) ** -0.5}
    for name, deviation in expected.items():
        assert abs(found[name] / deviation - 1) < 0.03, name


def test_dropout_is_shared_along_queries():
    layer = T.SelfAttention(**SMALL, dropout_rate=0.5)
    kwargs = {}

    def build(mesh):
        context = base.context(mesh, "train")
        kwargs.update(layer.attention_kwargs_from_context(context))
        return [called(layer, context, base.layer_input(mesh))]

    assert np.isfinite(run(build, scale=0.4)[0]).all()
    assert kwargs["dropout_rate"] == 0.5
    assert kwargs["dropout_broadcast_dims"] == dims(f"length:{LENGTH}")


def test_write_at():
    """Rows whose position is out of range keep their state; gradients are those of a choice."""
    state, new = normal(ROWS, LENGTH, 2, 3), normal(ROWS, 2, 3, seed=1)
    at = np.array([0, 7, 8, 3])

    def build(mesh):
        from mesh_tensorflow.ops._movement.gather import write_at

        s = tensor(mesh, state, f"batch:{ROWS},m:{LENGTH},heads:2,kv:3")
        n = tensor(mesh, np.moveaxis(new, 1, 2), f"batch:{ROWS},kv:3,heads:2")
        y = write_at(s, n, tensor(mesh, at, f"batch:{ROWS}"), s.shape.dims[1])
        dy = tensor(mesh, state * 2, y.shape)
        return [y, *mtf.gradients([y], [s, n], grad_ys=[dy])]

    expected, into_new = state.copy(), np.zeros_like(new)
    into_state = 2 * state
    for row, position in enumerate(at):
        if position < LENGTH:
            expected[row, position] = new[row]
            into_new[row] = 2 * state[row, position]
            into_state[row, position] = 0
    for placing in (
        WHOLE,
        Placing("x:2,y:2", "batch:x,m:y"),
        Placing("x:2,y:2", "heads:x,m:y", simd=True),
    ):
        y, ds, dn = run(build, placing).values()
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(ds, into_state)
        np.testing.assert_array_equal(dn, np.moveaxis(into_new, 1, 2))


def raises(text, make, mode="eval", **kwargs):
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        with pytest.raises(ValueError, match=text):
            context = base.context(mesh, mode, **kwargs)
            make().call(context, base.layer_input(mesh))


def test_errors():
    raises(
        r"num_memory_heads=3 must divide num_heads=2",
        lambda: T.SelfAttention(**SMALL, num_memory_heads=3),
    )
    raises(
        r'unrecognized relative_attention_type "near"',
        lambda: T.SelfAttention(relative_attention_type="near"),
    )
    raises(
        r"attention_func='hybird' is none of None, 'hybrid', 'all_to_all'",
        lambda: T.SelfAttention(attention_func="hybird"),
    )
    raises(
        r"rotary turns keys, and with shared_kv they are the values, too; set shared_kv=False",
        lambda: T.SelfAttention(shared_kv=True, rotary=mtf.layers.RotaryEmbedding()),
    )
    raises(
        r"biases='qx' has other letters than q, k, v and o", lambda: T.SelfAttention(biases="qx")
    )
    raises(
        r"biases='k' and norm_epsilon=None are for queries, keys and values with weights of their",
        lambda: T.SelfAttention(shared_kv=True, biases="k"),
    )
    raises(r"has no z-loss", lambda: T.SelfAttention(attention_func="hybrid", z_loss_coeff=1e-4))
    raises(
        r"Set num_memory_heads to 0", lambda: T.BranchedSelfAttention(**SMALL, num_memory_heads=1)
    )
    raises(r"radius must be 1 or more, got 0", lambda: T.LocalSelfAttention(radius=0))
    raises(r"no encoder_output; use the layer in the decoder", lambda: T.EncDecAttention(**SMALL))
    raises(r"set combine_dims=False", lambda: T.SelfAttention(**SMALL, keep_query_heads_dims=True))
    raises(r"set shared_kv=True", lambda: T.ExpertsSelfAttention(**{**EXPERTS, "shared_kv": False}))
    raises(
        r"is none of 'qkv', 'q', 'kv'",
        lambda: T.ExpertsSelfAttention(**EXPERTS, expert_computation="k"),
    )
    raises(r"'mean' is none of 'dense_minus'", lambda: T.Synthesizer(synthesize_mode="mean"))
    raises(
        r"longer than max_length=4",
        lambda: T.Synthesizer(
            **SMALL, synthesize_mode="random", attention_kwargs={"max_length": 4}
        ),
    )
    raises(
        r"context.cache has no 'task-id'|has no 'prompts'",
        lambda: _in_decoder(
            T.SelfAttention(**SMALL, hyperprompt_hidden_dim=2, hyperprompt_length_decoder=2)
        ),
    )


class _in_decoder:
    """A layer called in the variable scope of a decoder."""

    def __init__(self, layer):
        self.layer = layer

    def call(self, *args):
        return called(self.layer, *args)

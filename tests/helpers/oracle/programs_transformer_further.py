"""Programs: vocabulary embeddings, and the less common layers and stacks of transformers."""

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import dims, table
from mesh_tensorflow.transformer import (
    adaptive_softmax,
    evolved_transformer,
    fixup_layers,
    funnel_transformer,
    memory_layers,
    transformer,
    transformer_layers,
    universal_transformer,
    vocab_embeddings,
)

FURTHER, further = table(
    "batch:x,vocab:y,d_ff:y,heads:y", "d_model:x", gradients=False, tolerance=1e-4
)

VOCAB = 24
D_MODEL = 8
LENGTH = 8
FLOAT = mtf.VariableDType(tf.float32)


class Mix(transformer.TransformerLayer):
    """A dense layer that sees the positions up to its own."""

    def call(self, context, x, losses=None):
        summed = mtf.cumsum(x, context.length_dim) * (1.0 / LENGTH)
        return mtf.layers.dense(
            x + summed, x.shape.dims[-1:], x.shape.dims[-1:], activation=mtf.tanh,
            variable_dtype=context.variable_dtype, name="mix",
        )  # fmt: skip


def attention(**kwargs):
    return transformer_layers.SelfAttention(num_heads=2, key_value_size=4, **kwargs)


def feed_forward():
    return transformer_layers.DenseReluDense(hidden_size=12)


SUBLAYERS = {
    "sublayers_initial": [],
    "sublayers_per_layer": [
        transformer.sublayer_rms_norm,
        transformer.sublayer_call_layer,
        transformer.sublayer_residual,
    ],
    "sublayers_final": [transformer.sublayer_rms_norm],
}


def named(*layers):
    for i, layer in enumerate(layers):
        layer.set_name(f"layer_{i:03d}")
    return list(layers)


def stack(*layers, **kwargs):
    return transformer.LayerStack(named(*layers), **{**SUBLAYERS, **kwargs})


def unitransformer(layer_stack, **kwargs):
    arguments = {
        "d_model": D_MODEL, "input_vocab_size": VOCAB, "output_vocab_size": VOCAB,
        "autoregressive": True, "max_length": LENGTH, "vocab_divisor": 8,
        "shared_embedding_and_softmax_weights": True, **kwargs,
    }  # fmt: skip
    return transformer.Unitransformer(layer_stack, **arguments)


def ids(p, name="ids", rows="batch:2"):
    """Returns ids from 1, of which the last three of each row are padding."""
    length = dims(f"length:{LENGTH}")[0]
    given = mtf.to_int32(mtf.less(mtf.range(p.mesh, length, tf.int32), LENGTH - 3))
    x = p.input(name, f"{rows},length:{LENGTH}", VOCAB - 1) + 1
    return mtf.multiply(x, given, output_shape=x.shape)


def language_model(p, layer_stack, embedding=None, mode="train", **kwargs):
    """Returns logits and loss of a language model, with gradients of its variables."""
    model = unitransformer(layer_stack, **kwargs)
    targets = ids(p)
    shared = None
    if embedding is not None:
        with tf.variable_scope("shared"):
            made = embedding(
                p.mesh, model.input_vocab_dim, model.model_dim, FLOAT, "embedding", None
            )
        shared = {"embedding": made}
    logits, loss = model.call_simple(
        inputs=transformer.autoregressive_inputs(targets),
        targets=targets,
        compute_loss=True,
        mode=mode,
        sequence_id=mtf.minimum(targets, 1),
        shared_params=shared,
    )
    return finished(p, logits, loss)


def finished(p, logits, loss):
    p.fill_variables()
    # Dimensions of vocabularies have names of their own here where a layout must not split them.
    gradients = {k: mtf.anonymize(g) for k, g in p.loss_gradients(loss).items()}
    return {"logits": logits * 2.0, "loss": loss * 2.0, **gradients}


def with_embedding(cls, mode="train", **kwargs):
    def program(p):
        return language_model(
            p, stack(Mix()), lambda *a: cls(*a, **kwargs), mode=mode, positional_embedding=False
        )

    return program


CLUSTERS = [
    {"token_count": 6, "embedding_size": D_MODEL},
    {"token_count": 8, "embedding_size": 4},
    {"token_count": 10, "embedding_size": 2},
]


@further()
def embedding_factorized(p):
    return with_embedding(vocab_embeddings.FactorizedVocabEmbedding, inner_dimension_size=3)(p)


@further("batch:x,vocab:y")
def embedding_adaptive(p):
    return with_embedding(vocab_embeddings.AdaptiveVocabEmbedding, clusters=CLUSTERS)(p)


@further()
def embedding_mixture(p):
    return with_embedding(vocab_embeddings.MixtureOfSoftmaxes, num_softmaxes=3)(p)


@further()
def embedding_mixtape(p):
    return with_embedding(
        vocab_embeddings.Mixtape, gate_embedding_size=3, frequent_token_fraction=0.25
    )(p)


@further("batch:x")
def embedding_mixtape_extra_ids(p):
    return with_embedding(
        vocab_embeddings.Mixtape, mode="eval", gate_embedding_size=3, extra_ids=5,
        frequent_token_fraction=0.5, noise_std_dev=0.5, dropout_rate=0.5,
    )(p)  # fmt: skip


def adaptive(p, mode, loss_fn):
    return language_model(
        p,
        stack(Mix()),
        lambda *a: adaptive_softmax.AdaptiveSoftmaxVocabEmbedding(*a, clusters=CLUSTERS),
        mode=mode,
        loss_fn=loss_fn,
    )


@further("batch:x,vocab:y", "d_model:x")
def adaptive_softmax_loss(p):
    return adaptive(p, "train", adaptive_softmax.adaptive_softmax_loss_fn)


@further("batch:x,vocab:y", "d_model:x")
def adaptive_softmax_probabilities(p):
    return adaptive(p, "eval", None)


@further("batch:x,n_values:y", "d_model:x", "n_heads:y")
def product_key_memory(p):
    layer = memory_layers.ProductKeyValueMemory(key_size=6, n_keys=4, n_heads=2, knn=3)
    return language_model(p, stack(Mix(), layer))


@further()
def fixup(p):
    layers = [
        fixup_layers.SelfAttentionFixup(
            num_blocks=3, num_heads=2, key_value_size=4, fold_scaling_into_initializer=False
        ),
        fixup_layers.DenseReluDenseFixup(
            hidden_size=12, num_blocks=3, activation=["relu", "linear"], use_bias=True
        ),
    ]
    per_layer = [
        fixup_layers.sublayer_fixup_shift,
        transformer.sublayer_call_layer,
        fixup_layers.sublayer_fixup_scale,
        transformer.sublayer_residual,
    ]
    return language_model(p, stack(*layers, sublayers_per_layer=per_layer))


@further("batch:x,vocab:y,d_ff:y")
def fixup_grouped_heads(p):
    layer = fixup_layers.SelfAttentionFixup(
        num_blocks=3, num_heads=4, num_memory_heads=2, key_value_size=4, shared_kv=True,
        combine_dims=False, fold_scaling_into_initializer=False,
    )  # fmt: skip
    return language_model(p, stack(layer))


def bitransformer(p, encoder, decoder, cls=transformer.Bitransformer):
    model = cls(
        unitransformer(encoder, output_vocab_size=None, autoregressive=False, name="encoder"),
        unitransformer(decoder, name="decoder"),
    )
    logits, loss = model.call_simple(ids(p, "inputs"), ids(p, "targets"), compute_loss=True)
    return finished(p, logits, loss)


@further("batch:x,vocab:y,d_ff:y,heads:y", tolerance=2e-4)
def evolved(p):
    small = {"d_model": D_MODEL, "dropout_rate": 0.0}
    encoder = stack(
        evolved_transformer.GatedLinearUnitLayer(),
        evolved_transformer.EncoderConvolutionalLayer(**small),
    )
    decoder = stack(
        fixup_layers.EncDecAttentionFixup(num_heads=2, key_value_size=4),
        evolved_transformer.DecoderConvolutionalLayer(**small),
    )
    return bitransformer(p, encoder, decoder)


@further("batch:x,d_ff:y,heads:y")
def evolved_decoder_attention(p):
    encoder = stack(feed_forward())
    decoder = stack(evolved_transformer.DecoderAttentionLayer(base_num_heads=2))
    return bitransformer(p, encoder, decoder)


def funnel(p, num_modules, **kwargs):
    layers = [make() for _ in range(num_modules) for make in (attention, feed_forward)]
    encoder = funnel_transformer.FunnelTransformerLayerStack(
        named(*layers), **{**SUBLAYERS, **kwargs}
    )
    decoder = stack(transformer_layers.EncDecAttention(num_heads=2, key_value_size=4), Mix())
    return bitransformer(p, encoder, decoder, funnel_transformer.BitransformerFunnel)


@further("batch:x,vocab:y,d_ff:y,heads:y")
def funnel_mean(p):
    return funnel(
        p, 3, n_blocks=3, block_param_size=[1, 1, 1], block_repeat_size=[1, 1, 1], pooling_size=2
    )


@further("batch:x,vocab:y")
def funnel_max(p):
    return funnel(
        p, 3, n_blocks=2, block_param_size=[2, 1], block_repeat_size=[1, 1], pooling_size=4,
        pooling_type="max",
    )  # fmt: skip


@further("batch:x,vocab:y")
def funnel_min(p):
    return funnel(
        p, 3, n_blocks=3, block_param_size=[1, 1, 1], block_repeat_size=[1, 1, 1], pooling_size=2,
        pooling_type="min",
    )  # fmt: skip


UNIVERSAL = {
    "act_type": "basic", "recurrence_type": "basic", "act_max_steps": 2, "act_epsilon": 0.4,
    "num_rec_steps": 2, "num_inrecurrence_layers": 1, "position_start_index": None,
    "add_or_concat_timing_signal": "add", "step_timing_signal_type": "learned",
    "add_position_timing_signal": False, "add_step_timing_signal": True,
    "mix_with_transformer_before_ut": False, "mix_with_transformer_after_ut": False,
    "gates_inputs": "its", "gate_ffn_layer": "dense", "use_gated_transformer": False,
    "gating_type": "highway",
}  # fmt: skip


def universal(p, *layers, **kwargs):
    layer_stack = universal_transformer.UTLayerStack(
        named(*(layers or [Mix()])), **{**UNIVERSAL, **kwargs}
    )
    return language_model(p, layer_stack)


@further()
def universal_basic(p):
    return universal(
        p, attention(), feed_forward(), num_inrecurrence_layers=2,
        mix_with_transformer_before_ut=True, num_vanilla_transformer_layers=1,
    )  # fmt: skip


@further("batch:x,vocab:y")
def universal_highway(p):
    return universal(p, recurrence_type="highway", mix_with_transformer_after_ut=True)


@further("batch:x,vocab:y")
def universal_highway_uncoupled(p):
    return universal(
        p, recurrence_type="highway", couple_carry_transform_gates=False, gates_inputs="s"
    )


@further("batch:x,vocab:y", "d_model:x")
def universal_act(p):
    return universal(p, recurrence_type="act")


@further("batch:x,vocab:y")
def universal_act_accumulated(p):
    return universal(p, recurrence_type="act", act_type="accumulated")


@further("batch:x,vocab:y")
def universal_gated(p):
    return universal(p, Mix(), Mix(), use_gated_transformer=True)


@further("batch:x,vocab:y")
def universal_gru(p):
    return universal(p, use_gated_transformer=True, gating_type="gru")

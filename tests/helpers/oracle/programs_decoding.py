"""Programs: sampling and beam search of models, one position at a time."""

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import dims, table
from mesh_tensorflow.transformer import transformer, transformer_layers

DECODING, decoding = table("batch:x,vocab:y", "d_model:x", gradients=False)
ATTENDING, attending = table("batch:x,heads:y,d_ff:y,vocab:y", gradients=False)

VOCAB = 12


class Unchanged(transformer.TransformerLayer):
    """Hands on its input, so that an id depends on the one before it and on the position."""

    def call(self, context, x, losses=None):
        return x


def stack(*layers):
    return transformer.LayerStack(
        list(layers) or [Unchanged()],
        sublayers_initial=[],
        sublayers_per_layer=[
            transformer.sublayer_rms_norm,
            transformer.sublayer_call_layer,
            transformer.sublayer_residual,
        ],
        sublayers_final=[transformer.sublayer_rms_norm],
    )


def unitransformer(*layers, **kwargs):
    arguments = {
        "d_model": 16, "input_vocab_size": VOCAB, "output_vocab_size": VOCAB,
        "autoregressive": True, "max_length": 16, "vocab_divisor": 4, **kwargs,
    }  # fmt: skip
    return transformer.Unitransformer(stack(*layers), **arguments)


def prefixes(p, rows="batch:4", end=False):
    """Returns ids of which each row has more at its beginning than the one before."""
    batch, length = dims(rows) + dims("length:8")
    count = mtf.range(p.mesh, batch, tf.int32) * 2
    given = mtf.to_int32(mtf.less(mtf.range(p.mesh, length, tf.int32), count))
    ids = p.input("ids", f"{rows},length:8", VOCAB - 2) + 2
    if end:  # an end symbol in the second place
        second = mtf.one_hot(mtf.constant(p.mesh, 1, dtype=tf.int32), length, dtype=tf.int32)
        ids = ids * (1 - second) + second
    return mtf.multiply(ids, given, output_shape=ids.shape)


def sampled(p, model, ids, settings):
    outputs = {}
    for name, kwargs in settings.items():
        with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
            outputs[name] = 2 * model.sample_autoregressive(ids, **kwargs)
    p.fill_variables(scale=1.0)
    return outputs


@decoding()
def sample_prefixes(p):
    settings = {
        "plain": {}, "removed": {"remove_partial_sequences": True}, "stop": {"stop_at_token": 7},
        "steps": {"max_steps": 2}, "endless": {"never_end": True}, "one": {"sampling_keep_top_k": 1},
        "endless_7": {"never_end": True, "stop_at_token": 7},
        "bos": {"bos_id": 5}, "removed_steps": {"remove_partial_sequences": True, "max_steps": 3},
    }  # fmt: skip
    return sampled(p, unitransformer(), prefixes(p), settings)


@decoding()
def sample_prefixes_with_end(p):
    settings = {"plain": {}, "stop": {"stop_at_token": 2}, "removed": {"remove_partial_sequences": True}}
    return sampled(p, unitransformer(), prefixes(p, end=True), settings)


@decoding()
def sample_from_the_beginning(p):
    ids = mtf.zeros(p.mesh, "batch:4,length:8", tf.int32)
    settings = {
        "plain": {}, "steps": {"max_steps": 3}, "endless": {"never_end": True},
        **{f"bos_{n}": {"bos_id": n} for n in (2, 5, 7, 9)},
    }  # fmt: skip
    settings = {name: {"has_partial_sequences": False, **kwargs} for name, kwargs in settings.items()}
    settings["zeros"] = {}
    return sampled(p, unitransformer(positional_embedding=False), ids, settings)


@decoding()
def beam_search_by_model(p):
    model, outputs = unitransformer(), {}
    ids = mtf.zeros(p.mesh, "batch:4,beam:3,length:8", tf.int32)
    settings = {
        "plain": {}, "a0": {"alpha": 0.0}, "a4": {"alpha": 4.0}, "bos": {"bos_id": 5}, "short": {"decode_length": 4},
    }  # fmt: skip
    for name, kwargs in settings.items():
        with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
            kwargs = {"decode_length": 8, **kwargs}
            outputs[name] = 2 * model.beam_search(ids, **kwargs)
    p.fill_variables(scale=1.0)
    return outputs


def layers_of(*kinds):
    sizes = {
        "SelfAttention": {"num_heads": 4, "key_value_size": 4, "dropout_rate": 0.0},
        "EncDecAttention": {"num_heads": 4, "key_value_size": 4, "dropout_rate": 0.0},
        "DenseReluDense": {"hidden_size": 32, "dropout_rate": 0.0},
    }
    made = [getattr(transformer_layers, kind)(**sizes[kind]) for kind in kinds]
    for number, layer in enumerate(made):
        layer.set_name(f"layer_{number:03d}")
    return made


@attending()
def sample_with_attention(p):
    model = unitransformer(*layers_of("SelfAttention", "DenseReluDense"))
    settings = {
        "plain": {}, "removed": {"remove_partial_sequences": True}, "stop": {"stop_at_token": 7},
        "bos": {"bos_id": 5, "has_partial_sequences": False}, "steps": {"max_steps": 3},
    }  # fmt: skip
    ids = prefixes(p)
    blank = mtf.zeros_like(ids)
    outputs = sampled(p, model, ids, {k: s for k, s in settings.items() if k != "bos"})
    return {**outputs, **sampled(p, model, blank, {"bos": settings["bos"]})}


@attending()
def sample_with_full_attention(p):
    model = unitransformer(*layers_of("SelfAttention", "DenseReluDense"), input_full_attention=True)
    return sampled(p, model, prefixes(p), {"plain": {}, "endless": {"never_end": True}})


@attending()
def beam_search_with_attention(p):
    model = unitransformer(*layers_of("SelfAttention", "DenseReluDense"))
    outputs = {}
    ids = mtf.zeros(p.mesh, "batch:4,beam:3,length:8", tf.int32)
    for name, kwargs in {"plain": {}, "a3": {"alpha": 3.0}, "bos": {"bos_id": 5}}.items():
        with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
            outputs[name] = 2 * model.beam_search(ids, decode_length=8, **kwargs)
    p.fill_variables(scale=1.0)
    return outputs


@attending()
def decode_from_encoder(p):
    encoder = unitransformer(
        *layers_of("SelfAttention", "DenseReluDense"),
        name="encoder", autoregressive=False, output_vocab_size=None,
    )  # fmt: skip
    decoder = unitransformer(
        *layers_of("SelfAttention", "EncDecAttention", "DenseReluDense"), name="decoder"
    )
    model = transformer.Bitransformer(encoder, decoder)
    inputs = prefixes(p)
    settings = {
        "greedy": {}, "short": {"max_decode_length": 4}, "beams": {"beam_size": 4},
        "beams_long": {"beam_size": 4, "alpha": 3.0, "max_decode_length": 12},
        "beams_limited": {"beam_size": 3, "alpha": 3.0, "decode_length_multiplier": 0.5, "decode_length_constant": 1},
    }  # fmt: skip
    outputs = {}
    for name, kwargs in settings.items():
        with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
            outputs[name] = 2 * model.decode(inputs, **kwargs)
    p.fill_variables(scale=1.0)
    return outputs

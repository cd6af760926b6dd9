"""Small models to be decoded, with weights made from names, in any placing."""

import zlib

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.layer_runs import dims
from mesh_tensorflow.simd_mesh_impl import replicate
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import WHOLE, Placing
from mesh_tensorflow.transformer import transformer, transformer_layers

VOCAB, LENGTH, ROWS = 12, 8, 4
EOS = 1
PLACINGS = [
    Placing("x:2", "batch:x"), Placing("x:2", "vocab:x,heads:x,d_ff:x"),
    Placing("x:2,y:2", "batch:x,vocab:y,heads:y,d_ff:y"),
    Placing("x:2,y:2", "batch:x,vocab:y,d_ff:y", merge="device"),
    Placing("x:2,y:2", "batch:x,vocab:y,heads:y", simd=True),
]  # fmt: skip


class RunningSum(transformer.TransformerLayer):
    """Adds up what came before: its state is the sum so far."""

    def call(self, context, x, losses=None):
        length = context.length_dim
        if context.mode == "incremental":
            (total,) = context.get_states(1)
            context.record_new_states([total + x])
            return (total + x) * 0.3
        if context.mode == "first_part":
            there = mtf.less(context.get_position(), context.initial_position)
            given = x * mtf.cast(there, x.dtype)
            context.record_new_states([mtf.reduce_sum(given, reduced_dim=length)])
        return mtf.cumsum(x, length) * 0.3


class FromEncoder(transformer.TransformerLayer):
    """Adds the mean of the encoder's output: a constant state."""

    def call(self, context, x, losses=None):
        if context.mode == "incremental":
            return x + context.get_constant_state()
        mask = mtf.cast(mtf.not_equal(context.encoder_sequence_id, 0), x.dtype)
        summed = mtf.reduce_sum(
            context.encoder_output * mask, reduced_dim=context.encoder_length_dim
        )
        if context.mode == "first_part":
            context.record_constant_state(summed)
        return x + summed


def stack(layers, **kwargs):
    for number, layer in enumerate(layers):
        layer.set_name(f"layer_{number:03d}")
    return transformer.LayerStack(
        layers,
        sublayers_initial=[],
        sublayers_per_layer=[
            transformer.sublayer_rms_norm,
            transformer.sublayer_call_layer,
            transformer.sublayer_residual,
        ],
        sublayers_final=[transformer.sublayer_rms_norm],
        **kwargs,
    )


def unitransformer(layers, **kwargs):
    arguments = {
        "d_model": 16, "input_vocab_size": VOCAB, "output_vocab_size": VOCAB,
        "autoregressive": True, "max_length": 16, "vocab_divisor": 4, **kwargs,
    }  # fmt: skip
    return transformer.Unitransformer(stack(layers), **arguments)


def bitransformer(encoder_layers, decoder_layers, **kwargs):
    encoder = unitransformer(
        encoder_layers, name="encoder", autoregressive=False, output_vocab_size=None, **kwargs
    )
    return transformer.Bitransformer(
        encoder, unitransformer(decoder_layers, name="decoder", **kwargs)
    )


def attention():
    return transformer_layers.SelfAttention(num_heads=4, key_value_size=4)


def from_encoder():
    return transformer_layers.EncDecAttention(num_heads=4, key_value_size=4)


def feed_forward():
    return transformer_layers.DenseReluDense(hidden_size=32)


LAYERS = {
    "sums": lambda: [RunningSum()],
    "attention": lambda: [attention(), feed_forward()],
}
DECODER_LAYERS = {
    "sums": lambda: [RunningSum(), FromEncoder()],
    "attention": lambda: [attention(), from_encoder(), feed_forward()],
}


def language_model(kind="sums", **kwargs):
    return unitransformer(LAYERS[kind](), **kwargs)


def encoder_and_decoder(kind="sums"):
    return bitransformer(
        [feed_forward()] if kind == "attention" else [RunningSum()], DECODER_LAYERS[kind]()
    )


def prefixes(counts=(0, 2, 4, 7), seed=0):
    """Returns ids, of which row i has counts[i] and then zeros."""
    ids = np.random.RandomState(seed).randint(2, VOCAB, (len(counts), LENGTH))
    return np.where(np.arange(LENGTH) < np.array(counts)[:, None], ids, 0).astype("int32")


def imported(mesh, ids, rows="batch"):
    shape = mtf.Shape(dims(f"{rows}:{ids.shape[0]},length:{ids.shape[1]}"))
    return mtf.import_tf_tensor(mesh, tf.constant(ids, tf.int32), shape)


def weights(name, sizes, scale):
    return scale * np.random.RandomState(zlib.crc32(name.encode())).normal(size=sizes)


def run(build, placing=WHOLE, scale=1.0, seed=3, draft_noise=0.0):
    """Returns the values of the Tensors that `build` makes of a mesh, a dictionary or a list.

    The weights of a draft are those of the model of the same names, and so much noise.
    """

    def getter(getter, name, shape, **kwargs):
        values = weights(name.removeprefix("draft/"), shape, scale)
        if name.startswith("draft/"):
            values += weights(name, shape, draft_noise)
        kwargs["initializer"] = tf.constant_initializer(values)
        return getter(name, shape, **kwargs)

    with tf.Graph().as_default():
        tf.set_random_seed(seed)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        with tf.variable_scope("", custom_getter=getter):
            outputs = build(mesh)
        keys = list(outputs) if isinstance(outputs, dict) else range(len(outputs))

        def program():
            lowering = mtf.Lowering(graph, {mesh: placing.impl()})
            exports = [lowering.export_to_tf_tensor(outputs[k]) for k in keys]
            return exports, lowering.copy_masters_to_slices()

        exports, copy = replicate(program, devices=placing.cpus) if placing.simd else program()
        with harness.session() as session:
            session.run(tf.global_variables_initializer())
            session.run(copy)
            return dict(zip(keys, session.run(exports)))


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def steps_until_all_end(ids, given, stop):
    """Returns after how many steps every row has ended or is full."""
    counts = (given != 0).sum(1)
    steps = []
    for row, n in zip(ids, counts):
        ends = np.flatnonzero(row[n:] == stop)
        steps.append(ends[0] + 1 if len(ends) else LENGTH - n)
    return max(steps)


def assert_best(found, given, steps):
    """Checks that the ids after the given ones are those with the largest logits, for so many."""
    ids, best = found["ids"], found["logits"].argmax(-1)
    for row, (n, original) in enumerate(zip((given != 0).sum(1), given)):
        end = min(n + steps, LENGTH)
        np.testing.assert_array_equal(ids[row, :n], original[:n])
        np.testing.assert_array_equal(ids[row, n:end], best[row, n:end])
        assert (ids[row, end:] == 0).all()

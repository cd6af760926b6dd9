"""Layers of the Evolved Transformer against NumPy, in decoding and in layouts."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import decoding_models as models
from helpers.transformer import further_models as further
from helpers.transformer.further_models import LENGTH, ROWS, weights

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import evolved_transformer as evolved
from mesh_tensorflow.transformer import transformer, transformer_layers

D = 8
X = np.random.RandomState(3).normal(size=(ROWS, LENGTH, D)).astype("float32")
SMALL = {"d_model": D, "dropout_rate": 0.0}


class Model:
    """What layers ask of a model."""

    model_dim = mtf.Dimension("d_model", D)
    ensemble_dim, ensemble_dims = None, ()


def called(layer, mode="eval"):
    def build(mesh):
        rows, length = mtf.Dimension("batch", ROWS), mtf.Dimension("length", LENGTH)
        x = mtf.import_tf_tensor(mesh, tf.constant(X), mtf.Shape([rows, length, Model.model_dim]))
        context = transformer.Context(
            Model(), mesh, [rows], length, further.FLOAT, mode=mode, position_is_default=True,
            inputs=mtf.ones(mesh, mtf.Shape([rows, length]), tf.int32),
        )  # fmt: skip
        return [layer.call(context, x)]

    return build


def shifted(x, offset):
    """Returns x[t + offset] at t, zero beyond the ends."""
    result = np.zeros_like(x)
    for t in range(LENGTH):
        if 0 <= t + offset < LENGTH:
            result[:, t] = x[:, t + offset]
    return result


def separable(x, scope, first, last, size):
    scope += "/separable_conv1d/"
    depth = x.shape[-1]
    prefix = scope + "depthwise_conv_hack/depthwise_dense_"
    y = sum(
        shifted(x, first + i) * weights(f"{prefix}{i}/kernel", depth)
        for i in range(last - first + 1)
    ) + weights(f"{prefix}0/bias", depth)
    return y @ weights(scope + "pointwise_dense/kernel", depth, size) + weights(
        scope + "pointwise_dense/bias", size
    )


def norm(x, epsilon=1e-6):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    prefix = "layer_prepostprocess/layer_norm/layer_norm_"
    return x * weights(prefix + "scale", x.shape[-1]) + weights(prefix + "bias", x.shape[-1])


def padded(x, size):
    return np.concatenate([x, np.zeros((*x.shape[:2], size - x.shape[-1]))], -1)


def close(layer, expected):
    [found] = models.run(called(layer), scale=0.5).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_gated_linear_unit():
    linear, gate = (
        X @ weights(f"glu_{i}/kernel", D, D) + weights(f"glu_{i}/bias", D) for i in (0, 1)
    )
    close(evolved.GatedLinearUnitLayer(), linear / (1 + np.exp(-gate)))


def test_encoder_convolutions():
    wide = np.maximum(X @ weights("conv1x1/dense/kernel", D, 4 * D), 0)
    filters = weights("conv3x1/conv2d/kernel", 1, 3, D, D // 2)[0]
    narrow = np.maximum(sum(shifted(X, i - 1) @ filters[i] for i in range(3)), 0)
    hidden = norm(wide + padded(narrow, 4 * D), 1e-3)
    expected = padded(separable(hidden, "sep_conv9x1", -4, 4, D // 2), D)
    close(evolved.EncoderConvolutionalLayer(**SMALL, norm_epsilon=1e-3), expected)


def test_decoder_convolutions():
    wide = np.maximum(separable(X, "sep_conv11x1", -10, 0, 2 * D), 0)
    narrow = separable(X, "sep_conv7x1_1", -6, 0, D // 2)
    hidden = norm(wide + padded(narrow, 2 * D))
    close(evolved.DecoderConvolutionalLayer(**SMALL), separable(hidden, "sep_conv7x1_2", -6, 0, D))


def test_heads_of_the_decoders_attention():
    layer = evolved.DecoderAttentionLayer(base_num_heads=4)
    heads = {type(v).__name__: v.num_heads for v in vars(layer).values()}
    assert heads == {"SelfAttention": 8, "EncDecAttention": 4}


@pytest.mark.slow("Decoder*")
@pytest.mark.parametrize(
    "make", [evolved.EncoderConvolutionalLayer, evolved.DecoderConvolutionalLayer]
)
def test_dropout_in_training_only(make):
    layer = make(d_model=D, dropout_rate=0.5)
    for mode, number in [("train", 2), ("eval", 1)]:
        values = {float(models.run(called(layer, mode), seed=s)[0].sum()) for s in (1, 2)}
        assert len(values) == number


def model(*decoder_layers):
    common = {
        "d_model": D, "input_vocab_size": models.VOCAB, "max_length": 16, "vocab_divisor": 4,
    }  # fmt: skip
    encoder = transformer.Unitransformer(
        models.stack([evolved.GatedLinearUnitLayer(), evolved.EncoderConvolutionalLayer(**SMALL)]),
        output_vocab_size=None, autoregressive=False, name="encoder", **common,
    )  # fmt: skip
    decoder = transformer.Unitransformer(
        models.stack([*decoder_layers, transformer_layers.DenseReluDense(hidden_size=12)]),
        output_vocab_size=models.VOCAB, autoregressive=True, name="decoder", **common,
    )  # fmt: skip
    return transformer.Bitransformer(encoder, decoder)


INPUTS = models.prefixes((8, 5, 3, 1), seed=1)


@pytest.mark.slow
def test_equal_in_layouts():
    def build(mesh):
        inputs, targets = (
            models.imported(mesh, a) for a in (INPUTS, models.prefixes((7, 8, 2, 4)))
        )
        layers = [evolved.DecoderAttentionLayer(2), evolved.DecoderConvolutionalLayer(**SMALL)]
        logits, loss = model(*layers).call_simple(inputs, targets, compute_loss=True)
        some = [v for v in mesh.graph.trainable_variables if "conv" in v.name or "glu" in v.name][
            ::4
        ]
        grads = mtf.gradients([loss], [v.outputs[0] for v in some])
        named = {f"d_{v.name}": g for v, g in zip(some, grads)}
        return {k: mtf.anonymize(v) for k, v in {"logits": logits, "loss": loss, **named}.items()}

    further.equal_in_placings(build, further.PLACINGS[1:], scale=0.3)


def chosen_by_logits(ids, logits, free):
    """Checks that every free id, up to the end of its row, is the one with the largest logit."""
    for row, best, chosen in zip(ids, logits.argmax(-1), free):
        end = np.flatnonzero((row == 1) & chosen)
        count = end[0] + 1 if len(end) else LENGTH
        assert chosen[:count].any()
        np.testing.assert_array_equal(row[:count][chosen[:count]], best[:count][chosen[:count]])


@pytest.mark.slow
def test_decoding_with_attention_equals_the_whole_sequence():
    def build(mesh):
        inputs = models.imported(mesh, INPUTS)
        made = model(evolved.DecoderAttentionLayer(base_num_heads=2))
        ids = made.decode(inputs)
        with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
            logits, _ = made.call_simple(inputs, ids, compute_loss=False, mode="eval")
        return [ids, logits]

    ids, logits = models.run(build, scale=0.5).values()
    chosen_by_logits(ids, logits, np.ones_like(ids, bool))


@pytest.mark.slow
def test_decoding_with_convolutions_equals_the_whole_sequence():
    """With a start symbol that is no padding."""
    start, given = 3, models.prefixes((0, 2, 4, 7))

    def build(mesh):
        made = models.unitransformer([
            evolved.DecoderConvolutionalLayer(d_model=16, dropout_rate=0.0),
            transformer_layers.SelfAttention(num_heads=2, key_value_size=4),
        ])  # fmt: skip
        ids = made.sample_autoregressive(models.imported(mesh, given), never_end=True, bos_id=start)
        first = mtf.one_hot(
            mtf.constant(mesh, 0, dtype=tf.int32), ids.shape.dims[1], dtype=tf.int32
        )
        inputs = transformer.autoregressive_inputs(ids) + first * start
        with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
            logits, _ = made.call_simple(inputs, ids, compute_loss=False, mode="eval")
        return [ids, logits]

    ids, logits = models.run(build, scale=0.5).values()
    assert ids.all()
    chosen_by_logits(ids, logits, given == 0)

"""The Universal Transformer: its recurrences, halting, signals and gates; decoding; layouts."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import decoding_models as models
from helpers.transformer import further_models as further
from helpers.transformer.further_models import LENGTH, ROWS, Mix, weights

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.universal_transformer import UTLayerStack

D = 8
BASE = {
    "act_type": "basic", "recurrence_type": "basic", "act_max_steps": 3, "act_epsilon": 0.3,
    "num_rec_steps": 3, "num_inrecurrence_layers": 1, "position_start_index": None,
    "add_or_concat_timing_signal": "add", "step_timing_signal_type": "learned",
    "add_position_timing_signal": False, "add_step_timing_signal": False,
    "mix_with_transformer_before_ut": False, "mix_with_transformer_after_ut": False,
    "gates_inputs": "its", "gate_ffn_layer": "dense", "use_gated_transformer": False,
    "gating_type": "highway",
}  # fmt: skip
X = np.random.RandomState(3).normal(size=(ROWS, LENGTH, D)).astype("float32")


def stack(*layers, **kwargs):
    layers = list(layers) or [Mix()]
    for i, layer in enumerate(layers):
        layer.set_name(f"layer_{i:03d}")
    return UTLayerStack(layers, **{**BASE, **kwargs})


class Model:
    """What layers ask of a model."""

    model_dim = mtf.Dimension("d_model", D)
    ensemble_dims = ()


def in_context(fn, mode="eval", **kwargs):
    """Returns what a function makes of a Context and X."""

    def build(mesh):
        shape = mtf.convert_to_shape(f"batch:{ROWS},length:{LENGTH},d_model:{D}")
        x = mtf.import_tf_tensor(mesh, tf.constant(X), shape)
        context = transformer.Context(
            Model(), mesh, shape.dims[:1], shape.dims[1], further.FLOAT, mode=mode, **kwargs
        )
        return [fn(context, x)]

    [value] = models.run(build, scale=0.5).values()
    return value


def mix(x):
    summed = np.cumsum(x, 1) / LENGTH
    return np.tanh(
        (x + summed) @ weights("layer_000/Mix/mix/kernel", D, D)
        + weights("layer_000/Mix/mix/bias", D)
    )


def norm(x, scope=""):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    prefix = scope + "layer_prepostprocess/layer_norm/layer_norm_"
    return x * weights(prefix + "scale", D) + weights(prefix + "bias", D)


def step(x):
    return x + mix(norm(x, "layer_000/"))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_basic():
    found = in_context(stack(num_inrecurrence_layers=2, num_rec_steps=2).call)
    close(found, norm(step(step(step(step(X))))))


def test_highway():
    """Gates see the state, what became of it, and the inputs."""
    found = in_context(stack(recurrence_type="highway", num_rec_steps=1).call)
    new = step(X)
    seen = np.concatenate([norm(X), norm(new), norm(X)], -1)
    transform = sigmoid(seen @ weights("dense/kernel", 3 * D, D) + weights("dense_1/bias", D))
    close(found, norm(X * (1 - transform) + new * transform))


def halted(x, epsilon=0.3, max_steps=3):
    """Graves (2016): each position stops when its probabilities sum to 1 - epsilon."""
    scope = "sigmoid_activation_for_pondering/"
    output, steps = np.zeros_like(x), np.zeros(x.shape[:2])
    states, halting = [x], []
    for _ in range(max_steps + 1):
        logit = states[-1] @ weights(scope + "dense/kernel", D, 1) + weights(
            scope + "dense_1/bias", 1
        )
        halting.append(sigmoid(logit[..., 0]))
        states.append(step(states[-1]))
    for place in np.ndindex(x.shape[:2]):
        total = 0.0
        for n, p in enumerate(halting):
            last = total + p[place] > 1 - epsilon
            weight = 1 - total if last else p[place]
            output[place] = states[n + 1][place] * weight + output[place] * (1 - weight)
            total, steps[place] = total + weight, n + 1
            if last:
                break
    return output, steps


def test_adaptive_computation_time():
    found = in_context(stack(recurrence_type="act").call)
    output, steps = halted(X)
    assert len(np.unique(steps)) > 1
    close(found, norm(output))


@pytest.mark.parametrize("act_type", ["global", "random", "accumulated"])
def test_further_kinds_of_halting(act_type):
    """The classic cannot build the first two; a global probability is one for the row."""
    found = in_context(stack(recurrence_type="act", act_type=act_type, act_max_steps=0).call)
    scope = "sigmoid_activation_for_pondering/"
    assert found.shape == X.shape and np.isfinite(found).all()
    if act_type == "global":
        p = sigmoid(X @ weights(scope + "dense/kernel", D, 1) + weights(scope + "dense_1/bias", 1))
        p = p.mean(1, keepdims=True)
        weight = np.where(p > 0.7, 1.0, p)
        close(found, norm(step(X) * weight))


def sinusoids(positions, channels):
    rates = np.exp(-np.log(1e4) * np.arange(channels // 2) / (channels // 2 - 1))
    angles = np.asarray(positions, float)[..., None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], -1)


def test_position_signals():
    def signal(**kwargs):
        ut = stack(position_start_index=kwargs.pop("start", None), num_rec_steps=4)
        return in_context(lambda c, x: ut.add_position_timing_signal_func(c, x, 2), **kwargs) - X

    positions = np.arange(LENGTH)
    close(signal(), np.broadcast_to(sinusoids(positions, D), X.shape))
    close(signal(start="step"), np.broadcast_to(sinusoids(positions + LENGTH // 2, D), X.shape))
    close(signal(start="random"), np.broadcast_to(sinusoids(positions, D), X.shape))
    random = signal(start="random", mode="train")
    begins = [
        i for i in range(LENGTH) if np.allclose(random[0], sinusoids(positions + i, D), atol=1e-4)
    ]
    assert len(begins) == 1


def test_timing_signal_of_odd_channels_and_scales():
    length = mtf.Dimension("length", LENGTH)
    found = in_context(lambda c, x: stack().get_timing_signal_1d(c, length, mtf.Dimension("d", 5)))
    close(found, np.concatenate([sinusoids(np.arange(LENGTH), 4), np.zeros((LENGTH, 1))], -1))
    found = in_context(
        lambda c, x: stack().get_timing_signal_1d(
            c, length, mtf.Dimension("d", 4), min_timescale=2.0, max_timescale=50.0, start_index=3
        )
    )
    angles = np.arange(3, 3 + LENGTH)[:, None] / np.array([2.0, 50.0])
    close(found, np.concatenate([np.sin(angles), np.cos(angles)], -1))


def test_step_signals():
    def signal(number, **kwargs):
        ut = stack(num_rec_steps=4, **kwargs)
        return in_context(lambda c, x: ut.add_step_timing_signal_func(c, x, number)) - X

    table = weights("layer_embedding", 4, D) * D**0.5
    close(signal(2), np.broadcast_to(table[2], X.shape))
    close(signal(4), np.zeros_like(X))  # adaptive computation may take more steps
    close(signal(2, step_timing_signal_type="sinusoid"), np.broadcast_to(sinusoids(2, D), X.shape))


def test_concatenated_signals_are_projected():
    signals = {"add_position_timing_signal": True, "add_step_timing_signal": True}
    ut = stack(num_rec_steps=4, add_or_concat_timing_signal="concat", **signals)
    found = in_context(lambda c, x: ut.step_preprocess(c, x, 1))
    shape = (ROWS, LENGTH, D)
    with_position = [X, np.broadcast_to(sinusoids(np.arange(LENGTH), D), shape)]
    table = weights("layer_embedding", 4, 2 * D) * (2 * D) ** 0.5
    channels = np.concatenate([*with_position, np.broadcast_to(table[1], (*shape[:2], 2 * D))], -1)
    close(found, channels @ weights("timing_projection/kernel", 4 * D, D))


KINDS = {
    "basic": {"mix_with_transformer_before_ut": True, "num_vanilla_transformer_layers": 1},
    "highway": {"recurrence_type": "highway", "add_step_timing_signal": True},
    "act": {"recurrence_type": "act", "add_position_timing_signal": True},
    "gated": {
        "use_gated_transformer": True,
        "add_or_concat_timing_signal": "concat",
        "add_step_timing_signal": True,
    },
    "gru": {
        "use_gated_transformer": True,
        "gating_type": "gru",
        "gate_ffn_layer": "dense_relu_dense",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slips
def test_equal_in_layouts(kind):
    settings = {"num_rec_steps": 2, "act_max_steps": 1, **KINDS[kind]}
    build = further.language_model(lambda: stack(**settings))
    further.equal_in_placings(build, further.PLACINGS[1:], scale=0.4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_equals_the_whole_sequence(kind):
    """Every id is the best one by the logits of all positions."""
    given = models.prefixes()

    def build(mesh):
        layers = stack(models.RunningSum(), **{"num_rec_steps": 2, **KINDS[kind]})
        model = transformer.Unitransformer(
            layers, d_model=D, input_vocab_size=models.VOCAB, output_vocab_size=models.VOCAB,
            autoregressive=True, max_length=16, vocab_divisor=4,
        )  # fmt: skip
        ids = model.sample_autoregressive(models.imported(mesh, given), never_end=True)
        with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
            logits, _ = model.call_simple(
                transformer.autoregressive_inputs(ids), ids, compute_loss=False, mode="eval"
            )
        return {"ids": ids, "logits": logits}

    found = models.run(build)
    free = given == 0
    np.testing.assert_array_equal(found["ids"][~free], given[~free])
    np.testing.assert_array_equal(found["logits"].argmax(-1)[free], found["ids"][free])


def test_dropout_in_training():
    def build(mesh):
        return further.language_model(lambda: stack(dropout_rate=0.5), gradients=False)(mesh)

    assert models.run(build, seed=1)["loss"] != models.run(build, seed=2)["loss"]


@pytest.mark.parametrize("wrong, text", [
    ({"recurrence_type": "rnn"}, "recurrence_type='rnn' is none of 'basic', 'highway', 'act'"),
    ({"recurrence_type": "act", "act_type": "no"}, "act_type='no' is none of"),
    ({"recurrence_type": "highway", "gates_inputs": "x"}, "a gate has no inputs; gates_inputs"),
    ({"recurrence_type": "highway", "gate_ffn_layer": "x"}, "gate_ffn_layer='x' is none of"),
    ({"use_gated_transformer": True, "gating_type": "x"}, "gating_type='x' is none of"),
    ({"add_step_timing_signal": True, "step_timing_signal_type": "x"}, "step_timing_signal_type='x'"),
    ({"add_step_timing_signal": True, "add_or_concat_timing_signal": "x"}, "is none of 'add', 'concat'"),
    ({"add_position_timing_signal": True, "position_start_index": "x"}, "position_start_index='x'"),
])  # fmt: skip
def test_errors(wrong, text):
    with pytest.raises(ValueError, match=text):
        in_context(stack(**wrong).call)

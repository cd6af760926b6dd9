"""Feed-forward layers and convolutions: NumPy, layouts, decoding, padding, dropout, errors."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import numbers
from helpers.transformer import decoding_models as models
from helpers.transformer.decoding_models import LENGTH, RunningSum, imported, prefixes, run
from helpers.transformer.expert_layers import TOKENS, context_for, given

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.harness import WHOLE, Placing, assert_close
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer import transformer_layers as T

SHAPE = TOKENS + ",d_model:8"
WINDOW = {"min_relative_pos": -2, "max_relative_pos": 0, "output_size": 8}
LAYERS = {
    "dense": lambda: T.DenseReluDense(hidden_size=12, use_bias=True),
    "gated": lambda: T.DenseReluDense(hidden_size=12, activation=["gelu", "linear", "sigmoid"]),
    "conv": lambda: T.Conv1DLayer(3, 8, activation="relu"),
    "separable": lambda: T.SeparableConv1DLayer(**WINDOW),
    "lightweight": lambda: T.LightweightConv1DLocalAttn(**WINDOW, num_unique_depth_filters=2),
    "dynamic": lambda: T.DynamicConv1DLocalAttn(**WINDOW),
    "block": lambda: T.LocalConvAttnBlock(**WINDOW, activation="tanh"),
    "parallel": lambda: T.ParallelLayer(
        [
            lambda: T.DenseReluDense(hidden_size=12),
            lambda: T.SelfAttention(num_heads=2, key_value_size=4),
        ]
    ),
}


def trained(name, placing=WHOLE, mode="eval"):
    def build(mesh):
        x, target = given(mesh, SHAPE), given(mesh, SHAPE, 1)
        ids = imported(mesh, prefixes((8, 3, 5, 0), seed=2))
        context = context_for(
            mesh, placing, mode=mode, sequence_id=mtf.minimum(ids, 1), inputs=ids,
            position=mtf.range(mesh, ids.shape.dims[-1], tf.int32), position_is_default=True,
        )  # fmt: skip
        y = LAYERS[name]().call(context, x)
        variables = mesh.graph.trainable_variables
        grads = mtf.gradients([mtf.reduce_sum(y * target)], [x] + [v.value for v in variables])
        return {"y": y, "x": grads[0], **{v.name: g for v, g in zip(variables, grads[1:])}}

    return build


@pytest.mark.slow("block*", "dynamic*", "lightweight*", "parallel*", "separable*")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.slips
def test_equal_under_layouts(name):
    placings = [
        Placing("x:2,y:2", "batch:x,d_ff:y,heads:y"),
        Placing("x:2", "d_model:x"),
        Placing("x:2,y:2", "batch:x,d_ff:y,heads:y", simd=True),
    ]
    if name in ("separable", "lightweight", "dynamic", "block"):
        placings.append(Placing("x:2,y:2", "length:x,batch:y"))
    expected = run(trained(name))
    for placing in placings[:: 1 if name in ("dense", "dynamic", "block") else 2]:
        for key, value in run(trained(name, placing), placing).items():
            assert_close(value, expected[key], 2e-5, f"{placing} {key}")


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def weights(name, *sizes):
    return models.weights(name, sizes, 1.0)


def test_feed_forward_against_numpy():
    x = numbers(SHAPE)
    gates = [x @ weights(f"wi_{i}/kernel", 8, 12) for i in range(3)]
    expected = (gelu(gates[0]) * gates[1] * sigmoid(gates[2])) @ weights("wo/kernel", 12, 8)
    assert_close(run(trained("gated"))["y"], expected.astype("float32"), 1e-5)
    h = np.maximum(x @ weights("wi/kernel", 8, 12) + weights("wi/bias", 12), 0)
    expected = h @ weights("wo/kernel", 12, 8) + weights("wo/bias", 8)
    assert_close(run(trained("dense"))["y"], expected.astype("float32"), 1e-5)


def convolved(x, kernels):
    """Sums x[t - n + 1], ..., x[t], times kernels that broadcast against x."""
    n = len(kernels)
    padded = np.pad(x, [(0, 0), (n - 1, 0), (0, 0)])
    return sum(k * padded[:, i : i + x.shape[1]] for i, k in enumerate(kernels))


def softmaxed(kernels):
    exps = np.exp(np.stack(kernels))
    return exps / exps.sum(0)


def test_convolutions_against_numpy():
    """Padding is 0 for its neighbours; kernels are softmaxed over positions and shared."""
    x = numbers(SHAPE)
    masked = x * (prefixes((8, 3, 5, 0), seed=2) != 0)[..., None]
    scope = "separable_conv1d/depthwise_conv_hack/depthwise_dense_"
    bias = weights(scope + "0/bias", 8)
    pointwise = weights("separable_conv1d/pointwise_dense/kernel", 8, 8)
    last = weights("separable_conv1d/pointwise_dense/bias", 8)
    kernels = {
        "separable": [weights(f"{scope}{i}/kernel", 8) for i in range(3)],
        "lightweight": softmaxed(
            [np.tile(weights(f"lightwt_depthwise_dense_{i}/kernel", 4), 2) for i in range(3)]
        ),
        "dynamic": softmaxed(
            [
                x @ weights(f"dyn_conv_depthwise_dense_{i}/kernel", 8, 8)
                + weights(f"dyn_conv_depthwise_dense_{i}/bias", 8)
                for i in range(3)
            ]
        ),
    }
    for name, of_positions in kernels.items():
        expected = (convolved(masked, of_positions) + bias) @ pointwise + last
        assert_close(run(trained(name))["y"], expected.astype("float32"), 1e-5, name)
    kernel = weights("conv2d/kernel", 1, 3, 8, 8)[0]
    around = np.pad(masked, [(0, 0), (1, 1), (0, 0)])
    expected = sum(around[:, i : i + LENGTH] @ kernel[i] for i in range(3))
    assert_close(run(trained("conv"))["y"], np.maximum(expected, 0).astype("float32"), 1e-5)


def test_dropout_is_the_same_at_all_positions():
    layer = T.DenseReluDense(hidden_size=64, dropout_rate=0.5, activation="linear")

    def build(mode):
        def made(mesh):
            x = mtf.ones(mesh, mtf.convert_to_shape(SHAPE))
            return {"y": layer.call(context_for(mesh, mode=mode), x)}

        return made

    noisy, plain = run(build("train"))["y"], run(build("eval"))["y"]
    assert_close(noisy, np.broadcast_to(noisy[:, :1], noisy.shape), 1e-6)
    assert np.abs(noisy[0] - noisy[1]).max() > 0.1 and np.abs(noisy - plain).max() > 0.1
    assert_close(plain, np.broadcast_to(plain[:1, :1], plain.shape), 1e-6)


def test_parallel_layers():
    """The sum over the root of the number, with scopes or with shared variables."""

    def build(use_scope):
        def made(mesh):
            x = given(mesh, SHAPE)
            layer_classes = [lambda: T.DenseReluDense(hidden_size=4)] * 2
            layer = T.ParallelLayer(layer_classes, use_scope=use_scope)
            y = layer.call(context_for(mesh, mode="eval"), x)
            names.append([v.name for v in mesh.graph.all_variables])
            return {
                "y": y,
                "one": T.DenseReluDense(hidden_size=4).call(context_for(mesh, mode="eval"), x),
            }

        return made

    names = []
    shared = run(build(False))
    assert_close(shared["y"], shared["one"] * np.sqrt(2).astype("float32"), 1e-5)
    run(build(True))
    kernels = ["wi/kernel", "wo/kernel"]
    assert names == [kernels, [f"parallel_layer_{i}/{k}" for i in range(2) for k in kernels]]


DECODED = ("dense", "separable", "lightweight", "dynamic", "block")


@pytest.mark.slow("*dynamic*", "*lightweight*", "*separable*")
@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("start", [3, 0])
def test_decoding(name, start, monkeypatch):
    """One position at a time gives what all at once do, up to an id that means padding.

    The id 0 at the beginning is padding too, unless decoding masks it.
    """
    monkeypatch.setattr(T.Conv1D, "masks_decoded_padding", start == 0)
    ids = prefixes((0, 2, 4, 6) if start == 0 else (1, 2, 4, 6))

    def build(mesh):
        def layer():
            found = LAYERS[name]()
            for sized in (found, getattr(found, "conv_local_attn_layer", None)):
                if hasattr(sized, "_output_size"):
                    sized._output_size = 16
            return found

        model = models.unitransformer([RunningSum(), layer()])
        sampled = model.sample_autoregressive(imported(mesh, ids), bos_id=start)
        inputs = transformer.autoregressive_inputs(sampled)
        if start:
            first = mtf.constant(mesh, 0, dtype=tf.int32)
            inputs += mtf.one_hot(first, inputs.shape.dims[-1], start, 0, tf.int32)
        logits, _ = model.call_simple(inputs, sampled, compute_loss=False, mode="eval")
        return {"ids": sampled, "logits": logits}

    found = run(build)
    best, compared = found["logits"].argmax(-1), 0
    for row, n, expected in zip(found["ids"], (ids != 0).sum(1), best):
        ends = np.flatnonzero(row[n:] <= 1)
        last = n + ends[0] + 1 if len(ends) else LENGTH
        np.testing.assert_array_equal(row[n:last], expected[n:last])
        compared += last - n
    assert ((found["ids"] == ids) | (ids == 0)).all() and compared > 8


def test_state_of_convolutions():
    """The inputs before the beginning, zeros before the first; then moved by one."""
    x, new = numbers("batch:4,length:8,d_model:8"), numbers("batch:4,d_model:8", 5)
    begin = [0, 2, 6, 8]

    def build(mesh):
        tokens = given(mesh, SHAPE)
        initial = mtf.import_tf_tensor(mesh, tf.constant(begin), mtf.Shape(tokens.shape.dims[:1]))
        context = context_for(mesh, mode="first_part", new_states=[], initial_position=initial)
        T.SeparableConv1DLayer(-3, 0, 8).call(context, tokens)
        [state] = context.new_states
        later = context_for(mesh, mode="incremental", states=[state], new_states=[])
        moved = T.Conv1D().record_states_incremental_mode(
            later, given(mesh, "batch:4,d_model:8", 5), 4
        )
        assert later.new_states == [moved]
        return {"state": state, "moved": moved}

    found = run(build)
    padded = np.pad(x, [(0, 0), (4, 0), (0, 0)])
    expected = np.stack([row[n : n + 4] for row, n in zip(padded, begin)])
    assert_close(found["state"], expected, 1e-6)
    assert_close(found["moved"], np.concatenate([expected[:, 1:], new[:, None]], 1), 1e-6)


def test_errors():
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.zeros(mesh, mtf.convert_to_shape(SHAPE))
        with pytest.raises(ValueError, match="num_unique_depth_filters=3 must divide the channels"):
            T.DynamicConv1DLocalAttn(**WINDOW, num_unique_depth_filters=3).call(
                context_for(mesh), x
            )
        with pytest.raises(
            NotImplementedError, match="Conv1DLocalAttn has no get_kernel_wt; use Lightweight"
        ):
            T.Conv1DLocalAttn(**WINDOW).call(context_for(mesh), x)
        with pytest.raises(
            NotImplementedError,
            match=r"attention_type='wide' is none of lightweight_conv, dynamic_conv",
        ):
            T.LocalConvAttnBlock(**WINDOW, attention_type="wide")

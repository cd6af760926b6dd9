"""Fixup: initial values by the depth, learned scalars, and layers against NumPy and in layouts."""

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import decoding_models as models
from helpers.transformer import further_models as further
from helpers.transformer.further_models import LENGTH, ROWS, softmax, weights

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import fixup_layers as fixup
from mesh_tensorflow.transformer import transformer, transformer_layers

D, KV, HEADS, HIDDEN = 16, 8, 4, 24
X = np.random.RandomState(3).normal(size=(ROWS, LENGTH, D)).astype("float32")
ATTENTION = {"num_heads": HEADS, "key_value_size": KV, "fold_scaling_into_initializer": False}


class Model:
    """What layers ask of a model."""

    ensemble_dim, ensemble_dims = None, ()
    fully_autoregressive = True
    layout, mesh_shape = mtf.LayoutRules(()), mtf.Shape([])

    def __init__(self, d_model=D):
        self.model_dim = mtf.Dimension("d_model", d_model)


def called(fn, mode="eval", x=X):
    """Returns a function that builds what `fn` makes of a Context and a Tensor."""

    def build(mesh):
        model = Model(x.shape[-1])
        rows, length = mtf.Dimension("batch", x.shape[0]), mtf.Dimension("length", x.shape[1])
        given = mtf.import_tf_tensor(
            mesh, tf.constant(x), mtf.Shape([rows, length, model.model_dim])
        )
        position = mtf.range(mesh, length, tf.int32)
        context = transformer.Context(
            model, mesh, [rows], length, further.FLOAT, mode=mode, position=position,
            position_is_default=True, read_priority=position, write_priority=position,
        )  # fmt: skip
        return [fn(context, given)]

    return build


def initial(fn, x=X):
    """Returns the initial values of the variables, by name, and the result of `fn` with them."""
    with tf.Graph().as_default():
        tf.set_random_seed(5)
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        [y] = called(fn, x=x)(mesh)
        lowering = mtf.Lowering(
            mesh.graph, {mesh: mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])}
        )
        exported = lowering.export_to_tf_tensor(y)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            return session.run([{v.op.name: v for v in tf.global_variables()}, exported])


def check_uniform(value, variance):
    limit = np.sqrt(3 * variance)
    assert np.abs(value).max() <= limit
    np.testing.assert_allclose(value.std(), np.sqrt(variance), rtol=0.05)


@pytest.mark.parametrize("num_blocks", [1, 3, 12])
def test_initial_values_of_the_feed_forward_layer(num_blocks):
    """He's variance over the number of blocks; the second layer begins at 0."""
    x = np.ones((2, 2, 64), "float32")
    layer = fixup.DenseReluDenseFixup(hidden_size=128, num_blocks=num_blocks)
    values, y = initial(layer.call, x)
    check_uniform(values["wi/kernel"], 2.0 / 64 / num_blocks)
    assert not values["wo/kernel"].any() and not values["shift"].any() and not y.any()
    assert values["shift"].shape == (1,)


@pytest.mark.parametrize("kind, variance", [("he", 2.0 / 64), ("glorot", 2.0 / (64 + 128))])
def test_initial_values_of_attention(kind, variance):
    """The variance is scaled by the cube root of the number of blocks."""
    x = np.ones((2, 2, 64), "float32")
    layer = fixup.SelfAttentionFixup(
        num_blocks=8, default_init=kind, num_heads=4, key_value_size=32,
        fold_scaling_into_initializer=False,
    )  # fmt: skip
    values, y = initial(layer.call, x)
    assert set(values) == {"q_fixup", "k_fixup", "v_fixup", "o_fixup"}
    for name in "qkv":
        check_uniform(values[f"{name}_fixup"], variance / 2)
    assert not values["o_fixup"].any() and not y.any()


def test_normal_initial_values():
    layer = fixup.DenseReluDenseFixup(hidden_size=256, num_blocks=2, init_distribution="normal")
    values, _ = initial(layer.call, np.ones((2, 2, 64), "float32"))
    np.testing.assert_allclose(values["wi/kernel"].std(), (2.0 / 64 / 2) ** 0.5, rtol=0.05)


def test_learned_scalars():
    values, y = initial(lambda c, x: fixup.sublayer_fixup_scale(x, None, c))
    assert values == {"fixup_scale_weight": [1.0]} and np.array_equal(y, X)
    values, y = initial(lambda c, x: fixup.sublayer_fixup_shift(x, None, c))
    assert values == {"fixup_bias": [0.0]} and np.array_equal(y, X)
    for fn, expected in [
        (fixup.sublayer_fixup_scale, X * weights("fixup_scale_weight", 1)),
        (fixup.sublayer_fixup_shift, X + weights("fixup_bias", 1)),
    ]:
        [y] = models.run(called(lambda c, x, fn=fn: fn(x, None, c)), scale=0.5).values()
        np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_feed_forward_layer():
    layer = fixup.DenseReluDenseFixup(
        hidden_size=HIDDEN, num_blocks=2, activation=["relu", "linear"], use_bias=True
    )
    [y] = models.run(called(layer.call), scale=0.5).values()
    factors = [
        X @ weights(f"wi_{i}/kernel", D, HIDDEN) + weights(f"wi_{i}/bias", HIDDEN) for i in (0, 1)
    ]
    hidden = np.maximum(factors[0], 0) * factors[1] + weights("shift", 1)
    expected = hidden @ weights("wo/kernel", HIDDEN, D) + weights("wo/bias", D)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_self_attention():
    layer = fixup.SelfAttentionFixup(num_blocks=2, **ATTENTION)
    [y] = models.run(called(layer.call), scale=0.5).values()
    q, k, v = (
        (X @ weights(f"{n}_fixup", D, HEADS * KV)).reshape(ROWS, LENGTH, HEADS, KV) for n in "qkv"
    )
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * KV**-0.5
    logits = np.where(np.tri(LENGTH), logits, -1e9)
    mixed = np.einsum("bhqk,bkhd->bqhd", softmax(logits), v).reshape(ROWS, LENGTH, -1)
    np.testing.assert_allclose(y, mixed @ weights("o_fixup", HEADS * KV, D), rtol=1e-4, atol=1e-4)


def test_dense_product_takes_an_initializer():
    values, _ = initial(lambda c, x: fixup.dense_product_fixup(
        x, x.shape.dims[-1:], mtf.Dimension("new", 3), tf.constant_initializer(0.25), ["relu", "linear"],
        name="made", use_bias=False,
    ))  # fmt: skip
    assert set(values) == {"made_0/kernel", "made_1/kernel"}
    assert all((v == 0.25).all() for v in values.values())


def stack():
    layers = [
        fixup.SelfAttentionFixup(num_blocks=2, num_memory_heads=2, **ATTENTION),
        fixup.DenseReluDenseFixup(hidden_size=HIDDEN, num_blocks=2),
    ]
    for i, layer in enumerate(layers):
        layer.set_name(f"layer_{i:03d}")
    return transformer.LayerStack(
        layers, sublayers_initial=[], sublayers_final=[], sublayers_per_layer=[
            fixup.sublayer_fixup_shift, transformer.sublayer_call_layer,
            fixup.sublayer_fixup_scale, transformer.sublayer_residual,
        ],
    )  # fmt: skip


@pytest.mark.slow
def test_equal_in_layouts():
    further.equal_in_placings(further.language_model(stack, d_model=D))


def test_dropout_in_training_only():
    layer = fixup.DenseReluDenseFixup(hidden_size=HIDDEN, num_blocks=2, dropout_rate=0.5)
    same = {mode: len({models.run(called(layer.call, mode), seed=s)[0].sum() for s in (1, 2)})
            for mode in ("train", "eval")}  # fmt: skip
    assert same == {"train": 2, "eval": 1}


def test_encoder_decoder_attention_is_as_usual():
    assert issubclass(fixup.EncDecAttentionFixup, transformer_layers.EncDecAttention)
    layer = fixup.EncDecAttentionFixup(relative_attention_type=None, num_heads=3)
    assert layer.num_heads == 3 and layer.relative_attention_type is None


def test_errors():
    with pytest.raises(ValueError, match="set fold_scaling_into_initializer = False"):
        models.run(called(fixup.SelfAttentionFixup(num_blocks=2, num_heads=2).call))
    with pytest.raises(ValueError, match="default_init='lecun' is none of 'he', 'glorot'"):
        fixup.DenseReluDenseFixup(num_blocks=2, default_init="lecun")
    with pytest.raises(ValueError, match="num_blocks=0 must be the number of residual blocks"):
        fixup.DenseReluDenseFixup(num_blocks=0)
    gin.bind_parameter("mesh_tensorflow.layers.unit_scaling_convention.value", True)
    with pytest.raises(ValueError, match="unit_scaling_convention scales products instead"):
        models.run(called(fixup.SelfAttentionFixup(num_blocks=2, **ATTENTION).call))

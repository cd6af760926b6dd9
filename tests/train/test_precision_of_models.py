"""Models of the package in a mixed precision, trained by mtf.train.fit with several optimizers."""

import types

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import bert
from mesh_tensorflow.bert.bert import layer_norm
from mesh_tensorflow.transformer import adaptive_softmax, transformer, transformer_layers

BATCH, LENGTH = mtf.Dimension("batch", 4), mtf.Dimension("length", 8)
SEQ, MASKED = mtf.Dimension("seq", 8), mtf.Dimension("masked", 2)
IDS = (np.arange(64).reshape(8, 8) * 7 % 21 + 3).astype(np.int32)
DATA = {"ids": IDS, "mask": (IDS < 20).astype(np.int32), "next": IDS[:, 0] % 2}
CLUSTERS = [{"token_count": 12, "embedding_size": 8}, {"token_count": 12, "embedding_size": 4}]
MESH = "rows:2,cols:2"
BERT_LAYOUT = "batch:rows,num_heads:cols,vocab:cols,experts:rows"
BERT = bert.BertConfig(
    vocab_size=24,
    d_model=8,
    num_blocks=1,
    attention_num_heads=2,
    type_vocab_size=2,
    feedforward_intermediate_size=8,
    max_position_embeddings=8,
    moe_num_experts=2,
    moe_intermediate_size=8,
    block_layers="attention,moe",
)


def bert_model(mesh, features, training):
    """The losses of hidden tokens and of the next sentence, and that of a mixture of experts."""
    ids = features["ids"]
    model = bert.BertModel(
        BERT, training, ids, features["mask"], mesh_shape=MESH, layout=BERT_LAYOUT
    )
    positions = mtf.import_tf_tensor(
        mesh, tf.constant([[1, 5]] * 4, tf.int32), [ids.shape[0], MASKED]
    )
    weights = mtf.import_tf_tensor(mesh, tf.ones([4, 2]), [ids.shape[0], MASKED])
    hidden, _, _ = model.get_masked_lm_output(positions, mtf.gather(ids, positions, SEQ), weights)
    following, _, _ = model.get_next_sentence_output(features["next"])
    return hidden + following + model.get_extra_loss()


def adaptive_model(mesh, ids, training):
    """The loss of a language model with an adaptive softmax."""
    norm = transformer.sublayer_rms_norm
    model = transformer.Unitransformer(
        transformer.LayerStack(
            [transformer_layers.SelfAttention(num_heads=2, key_value_size=4)],
            sublayers_initial=[norm],
            sublayers_per_layer=[transformer.sublayer_call_layer, transformer.sublayer_residual],
            sublayers_final=[norm],
        ),
        d_model=8,
        input_vocab_size=24,
        output_vocab_size=24,
        autoregressive=True,
        max_length=8,
        vocab_divisor=24,
        shared_embedding_and_softmax_weights=True,
        loss_fn=adaptive_softmax.adaptive_softmax_loss_fn,
    )
    _, loss = model.call_simple(ids, ids, compute_loss=True, mode="train")
    return loss


@pytest.fixture(autouse=True)
def adaptive():
    """Makes transformers have an adaptive softmax."""
    gin.parse_config(
        [
            "transformer.get_vocab_embedding_cls.cls = @AdaptiveSoftmaxVocabEmbedding",
            f"AdaptiveSoftmaxVocabEmbedding.clusters = {CLUSTERS}",
        ]
    )


MODELS = {
    "bert": (
        bert_model,
        DATA,
        {"ids": [BATCH, SEQ], "mask": [BATCH, SEQ], "next": [BATCH]},
        BERT_LAYOUT,
    ),
    "adaptive": (adaptive_model, IDS, [BATCH, LENGTH], "batch:rows,heads:cols"),
}
OPTIMIZERS = {
    "adafactor": lambda: mtf.optimize.AdafactorOptimizer(learning_rate=0.02),
    "adamw": lambda: mtf.optimize.AdamWOptimizer(0.01),
    "lion": lambda: mtf.optimize.LionOptimizer(0.003),
    "momentum": lambda: mtf.optimize.SgdOptimizer(0.05, 0.9),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, optimizer, simd",
    [
        ("bert", "adafactor", False),
        pytest.param("bert", "lion", True, marks=pytest.mark.slow),
        ("adaptive", "adamw", False),
        pytest.param("adaptive", "momentum", True, marks=pytest.mark.slow),
    ],
)
def test_losses_are_nearly_those_of_float32(name, optimizer, simd):
    model_fn, data, dims, layout = MODELS[name]
    found = {}
    for precision in ("float32", "mixed_bfloat16"):
        result = mtf.train.fit(
            model_fn,
            data,
            6,
            dims=dims,
            optimizer=OPTIMIZERS[optimizer],
            clip_norm=1.0,
            precision=precision,
            mesh_shape=MESH,
            layout=layout,
            simd=simd,
            log_every=1,
            progress=False,
        )
        found[precision] = result.losses
        assert {value.dtype for value in result.variables.values()} <= {
            np.dtype(np.float32),
            np.dtype(np.int64),
        }
    exact, mixed = found.values()
    assert exact[-1] < exact[0] and exact != mixed
    np.testing.assert_allclose(mixed, exact, rtol=0.03)


@pytest.mark.parametrize("norm", ["bert", "bert without a mean", "transformer"])
def test_norms_are_computed_in_float32(norm):
    """Those of bfloat16 are rounded once: sums of many squares lose nothing."""
    channels = mtf.Dimension("d_model", 512)
    x = np.random.RandomState(0).randn(4, 512).astype(np.float32) + 2
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    with mtf.precision("mixed_bfloat16"):
        tensor = mtf.import_tf_tensor(mesh, x, [BATCH, channels])
        if norm == "transformer":
            model = types.SimpleNamespace(model_dim=channels, ensemble_dims=[])
            context = types.SimpleNamespace(
                model=model, mesh=mesh, variable_dtype=mtf.VariableDType()
            )
            y = transformer.sublayer_rms_norm(tensor, None, context)
        else:
            y = layer_norm(tensor, channels, subtract_mean=norm == "bert")
    assert y.dtype == tf.bfloat16
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "d_model:x", [""] * 2)
    found = mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)
    exact = tf.cast(tf.cast(x, tf.bfloat16), tf.float32).numpy().astype(np.float64)
    if norm == "bert":
        exact -= exact.mean(1, keepdims=True)
    exact /= np.sqrt(np.mean(exact**2, axis=1, keepdims=True))
    np.testing.assert_allclose(tf.cast(found, tf.float32), exact, rtol=2**-8, atol=1e-6)

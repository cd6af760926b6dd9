"""Models built by gin of the less common layers, stacks, embeddings and schedules."""

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import decoding_models as models

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import (
    adaptive_softmax,
    evolved_transformer,
    fixup_layers,
    funnel_transformer,
    learning_rate_schedules,
    memory_layers,
    transformer,
    transformer_layers,
    universal_transformer,
    vocab_embeddings,
)

REGISTERED = (
    adaptive_softmax, evolved_transformer, fixup_layers, funnel_transformer, memory_layers,
    transformer_layers, universal_transformer, vocab_embeddings,
)  # fmt: skip

COMMON = """
transformer.Unitransformer.d_model = 16
transformer.Unitransformer.max_length = 16
transformer.Unitransformer.vocab_divisor = 4
transformer.Unitransformer.shared_embedding_and_softmax_weights = True
transformer.make_layer_stack.num_layers = 2
transformer_layers.SelfAttention.num_heads = 2
transformer_layers.SelfAttention.key_value_size = 4
transformer_layers.DenseReluDense.hidden_size = 12
SUBLAYERS = [
    @transformer.sublayer_rms_norm, @transformer.sublayer_call_layer,
    @transformer.sublayer_residual,
]
transformer.LayerStack.sublayers_initial = []
transformer.LayerStack.sublayers_per_layer = %SUBLAYERS
transformer.LayerStack.sublayers_final = []
transformer.make_layer_stack.layers = [
    @transformer_layers.SelfAttention, @transformer_layers.DenseReluDense,
]
decoder/transformer.make_layer_stack.layers = [
    @transformer_layers.SelfAttention, @transformer_layers.EncDecAttention,
]
"""
CONFIGS = {
    "funnel": """
        transformer.make_bitransformer.bitransformer_cls = @funnel_transformer.BitransformerFunnel
        encoder/transformer.make_layer_stack.layer_stack_cls = @FunnelTransformerLayerStack
        FunnelTransformerLayerStack.n_blocks = 2
        FunnelTransformerLayerStack.block_param_size = [1, 1]
        FunnelTransformerLayerStack.block_repeat_size = [1, 2]
        FunnelTransformerLayerStack.sublayers_initial = []
        FunnelTransformerLayerStack.sublayers_per_layer = %SUBLAYERS
        FunnelTransformerLayerStack.sublayers_final = []
        BitransformerFunnel.decode.max_decode_length = 5
    """,
    "universal": """
        transformer.make_layer_stack.layer_stack_cls = @universal_transformer.UTLayerStack
        UTLayerStack.act_type = "basic"
        UTLayerStack.recurrence_type = "act"
        UTLayerStack.act_max_steps = 1
        UTLayerStack.act_epsilon = 0.1
        UTLayerStack.num_rec_steps = 2
        UTLayerStack.num_inrecurrence_layers = 1
        UTLayerStack.position_start_index = None
        UTLayerStack.add_or_concat_timing_signal = "add"
        UTLayerStack.step_timing_signal_type = "learned"
        UTLayerStack.add_position_timing_signal = True
        UTLayerStack.add_step_timing_signal = True
        UTLayerStack.mix_with_transformer_before_ut = False
        UTLayerStack.mix_with_transformer_after_ut = False
        UTLayerStack.gates_inputs = "its"
        UTLayerStack.gate_ffn_layer = "dense"
        UTLayerStack.use_gated_transformer = True
        UTLayerStack.gating_type = "highway"
        Bitransformer.decode.max_decode_length = 5
    """,
    "adaptive": """
        transformer.get_vocab_embedding_cls.cls = @AdaptiveSoftmaxVocabEmbedding
        AdaptiveSoftmaxVocabEmbedding.clusters = [
            {"token_count": 4, "embedding_size": 16}, {"token_count": 8, "embedding_size": 4},
        ]
        decoder/transformer.Unitransformer.loss_fn = @adaptive_softmax_loss_fn
        Bitransformer.decode.max_decode_length = 5
    """,
    "mixtape": """
        transformer.get_vocab_embedding_cls.cls = @vocab_embeddings.Mixtape
        Mixtape.gate_embedding_size = 3
        Mixtape.frequent_token_fraction = 0.5
        encoder/transformer.make_layer_stack.layers = [
            @memory_layers.ProductKeyValueMemory, @fixup_layers.SelfAttentionFixup,
        ]
        ProductKeyValueMemory.key_size = 4
        ProductKeyValueMemory.n_keys = 3
        ProductKeyValueMemory.n_heads = 2
        ProductKeyValueMemory.knn = 2
        fixup_layers.SelfAttentionFixup.num_blocks = 2
        fixup_layers.SelfAttentionFixup.fold_scaling_into_initializer = False
        transformer.get_vocab_embedding_cls.cls = @vocab_embeddings.Mixtape
        Bitransformer.decode.max_decode_length = 5
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_trains_and_decodes(name):
    gin.parse_config(COMMON + CONFIGS[name])

    def build(mesh):
        model = transformer.make_bitransformer(models.VOCAB, models.VOCAB)
        inputs = models.imported(mesh, models.prefixes((8, 5, 3, 1), seed=1))
        targets = models.imported(mesh, models.prefixes((7, 8, 2, 4)))
        _, loss = model.call_simple(inputs, targets, compute_loss=True)
        variables = [v.outputs[0] for v in mesh.graph.trainable_variables]
        grads = mtf.gradients([loss], variables)
        norms = [mtf.reduce_sum(mtf.square(g)) for g in grads if g is not None]
        with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
            ids = model.decode(inputs)
        return {"loss": loss, "norm": mtf.add_n(norms), "ids": ids}

    found = models.run(build, scale=0.3)
    assert np.isfinite(found["loss"]) and found["loss"] > 0 and 0 < found["norm"] < np.inf
    assert found["ids"].shape == (models.ROWS, 5)


def test_schedule_of_references():
    gin.parse_config("""
        learning_rate_schedules.product_learning_rate.factors = [
            0.5, @learning_rate_schedules.linear_warmup, @learning_rate_schedules.truncated_rsqrt,
        ]
        learning_rate_schedules.linear_warmup.steps_or_fraction = 10
        learning_rate_schedules.truncated_rsqrt.warmup_steps = 4
    """)
    with tf.Graph().as_default(), tf.Session() as session:
        rate = learning_rate_schedules.product_learning_rate(tf.constant(5), 100)
        np.testing.assert_allclose(session.run(rate), 0.5 * 0.5 * 5**-0.5, rtol=1e-6)

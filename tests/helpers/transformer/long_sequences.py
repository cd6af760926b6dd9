"""An encoder and a decoder of which processors have parts of both lengths."""

import functools

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.transformer import transformer, transformer_layers

STEPS, ROWS, LENGTH, MEMORY = 2, 2, 16, 24
HEADS = {"num_heads": 4, "key_value_size": 4, "dropout_rate": 0.2}
RING, ALL_TO_ALL = "ring", "all_to_all"
FUNCTIONS = {
    None: {},
    RING: {"attention_kwargs": {"ring": True}},
    ALL_TO_ALL: {"attention_func": "all_to_all"},
}
LAYOUTS = {
    RING: "length:all,memory_length:all",
    ALL_TO_ALL: "length:all,memory_length:all,attention_heads:all",
}


def some_ids(length):
    """Returns ids that end with padding."""
    ids = np.random.RandomState(length).randint(1, 30, [ROWS, length]).astype(np.int32)
    ids[0, -3:] = 0
    return ids


def bitransformer(function):
    """Returns a model with a block of layers on each side."""
    options = {**HEADS, **FUNCTIONS[function]}
    to_itself = (transformer_layers.SelfAttention, options)
    dense = (transformer_layers.DenseReluDense, {"hidden_size": 32})
    around = {
        "sublayers_initial": [], "sublayers_final": [transformer.sublayer_rms_norm],
        "sublayers_per_layer": [transformer.sublayer_call_layer, transformer.sublayer_residual],
    }  # fmt: skip

    def side(layers, name, causal):
        stack = transformer.make_layer_stack(
            layers, functools.partial(transformer.LayerStack, **around), 1
        )
        return transformer.Unitransformer(
            stack, 16, 30, 30 if causal else None, autoregressive=causal, max_length=MEMORY,
            vocab_divisor=32, name=name,
        )  # fmt: skip

    to_encoder = (transformer_layers.EncDecAttention, options)
    return transformer.Bitransformer(
        side([to_itself, dense], "encoder", False),
        side([to_itself, to_encoder, dense], "decoder", True),
    )


def step_of(impl, function):
    """Returns what a training step gives: the loss.

    Raises:
      AssertionError: it does not communicate what is predicted.
    """
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")

    def given(length):
        shape = mtf.convert_to_shape(f"batch:{ROWS},length:{length}")
        return mtf.import_tf_tensor(mesh, tf.constant(some_ids(length)), shape)

    inputs, targets = given(MEMORY), given(LENGTH)
    _, loss = bitransformer(function).call_simple(
        inputs, targets, True,
        encoder_sequence_id=mtf.minimum(inputs, 1), decoder_sequence_id=mtf.minimum(targets, 1),
    )  # fmt: skip
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.value for v in variables])
    updates = mtf.optimize.AdamWeightDecayOptimizer(1e-2).apply_grads(gradients, variables)
    lowering = mtf.Lowering(graph, {mesh: impl})
    train = tf.group([lowering.lowered_operation(op) for op in updates])
    exported = lowering.export_to_tf_tensor(loss)
    counted, predicted = harness.counted_and_predicted(lowering, [loss])
    assert counted == predicted
    return {"loss": exported, "train": train}

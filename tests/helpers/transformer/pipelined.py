"""A small model that trains in stages of a pipeline, or with its layers in a row."""

import functools

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.transformer import transformer, transformer_layers

STEPS, ROWS, LENGTH = 3, 8, 8
IDS = np.random.RandomState(5).randint(1, 30, [ROWS, LENGTH]).astype(np.int32)
LAYERS = [
    (transformer_layers.SelfAttention, {"num_heads": 2, "key_value_size": 8, "dropout_rate": 0.2}),
    (transformer_layers.DenseReluDense, {"hidden_size": 32, "dropout_rate": 0.2}),
]
ARGUMENTS = {
    "sublayers_initial": [],
    "sublayers_per_layer": [
        transformer.sublayer_rms_norm, transformer.sublayer_call_layer, transformer.sublayer_residual,
    ],
    "sublayers_final": [transformer.sublayer_rms_norm],
}  # fmt: skip


def step_of(impl, blocks, in_stages):
    """Returns what a training step gives: the loss; with a block of layers in each stage if `in_stages`.

    Raises:
      AssertionError: it does not communicate what is predicted.
    """
    arguments = dict(ARGUMENTS)
    cls = transformer.LayerStack
    if in_stages:
        cls = transformer.PipelinedLayerStack
        arguments.update(num_stages=blocks, num_microbatches=blocks)
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    stack = transformer.make_layer_stack(LAYERS, functools.partial(cls, **arguments), blocks)
    model = transformer.Unitransformer(
        stack, 16, 30, 30, autoregressive=True, max_length=LENGTH, vocab_divisor=32
    )
    shape = mtf.convert_to_shape(f"batch:{ROWS},length:{LENGTH}")
    ids = mtf.import_tf_tensor(mesh, tf.constant(IDS), shape)
    _, loss = model.call_simple(transformer.autoregressive_inputs(ids), ids, True)
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.value for v in variables])
    updates = mtf.optimize.AdamWeightDecayOptimizer(1e-2).apply_grads(gradients, variables)
    lowering = mtf.Lowering(graph, {mesh: impl})
    train = tf.group([lowering.lowered_operation(op) for op in updates])
    exported = lowering.export_to_tf_tensor(loss)
    counted, predicted = harness.counted_and_predicted(lowering, [loss])
    assert counted == predicted
    return {"loss": exported, "train": train}

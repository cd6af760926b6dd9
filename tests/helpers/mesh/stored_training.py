"""A small training whose variables are stored in parts, in one process or several."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf

STEPS = 3
BATCH, MODEL, HIDDEN = (
    mtf.Dimension("batch", 8),
    mtf.Dimension("model", 16),
    mtf.Dimension("ff", 24),
)


def step_of(impl):
    """Returns the loss and the update of a step on a mesh, and its Lowering."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    data = np.random.RandomState(0).randn(BATCH.size, MODEL.size).astype(np.float32)
    x = mtf.import_tf_tensor(mesh, tf.constant(data), [BATCH, MODEL])
    y = mtf.layers.layer_norm(x, MODEL)
    for name, dim in (("wi", HIDDEN), ("wo", MODEL)):
        y = mtf.layers.dense(mtf.relu(y), [dim], reduced_dims=y.shape.dims[-1:], name=name)
    loss = mtf.reduce_mean(mtf.square(x - y))
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.value for v in variables])
    updates = mtf.optimize.AdamWeightDecayOptimizer(0.01).apply_grads(gradients, variables)
    lowering = mtf.Lowering(graph, {mesh: impl})
    train = tf.group([lowering.lowered_operation(op) for op in updates])
    return {"loss": lowering.export_to_tf_tensor(loss), "train": train}, lowering


def stored_elements(lowering, stage, processors):
    """Returns how many elements of weights and slots a processor should store.

    Args:
      lowering: a Lowering of `step_of`.
      stage: the stage of ZeRO.
      processors: how many there are; they divide a dimension of each variable.
    """
    found = 0
    for variable in lowering.variables:
        is_slot = "adam" in variable.name
        in_parts = stage >= (1 if is_slot else 3)
        found += variable.shape.size // (processors if in_parts else 1)
    return found

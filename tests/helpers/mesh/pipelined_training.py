"""A small training in a pipeline of stages, in one process or several."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf

STEPS = 3
BATCH, MODEL, HIDDEN = mtf.convert_to_shape("batch:8,model:4,hidden:6").dims
DATA = np.random.RandomState(0).randn(BATCH.size, MODEL.size).astype(np.float32)


def step_of(impl, stages):
    """Returns the loss and the update of a step on a mesh, and its Lowering.

    Args:
      impl: a MeshImpl.
      stages: how many stages there are, each with two weights; what follows has one more.
    """
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    dim = mtf.Dimension("stages", stages)
    x = mtf.import_tf_tensor(mesh, tf.constant(DATA), [BATCH, MODEL])
    wi = mtf.get_variable(mesh, "wi", [dim, MODEL, HIDDEN])
    wo = mtf.get_variable(mesh, "wo", [dim, HIDDEN, MODEL])
    head = mtf.get_variable(mesh, "head", [MODEL])

    def stage(x, wi, wo):
        h = mtf.relu(mtf.einsum([x, wi], reduced_dims=[MODEL]))
        return x + mtf.einsum([h, wo], output_shape=x.shape)

    y = mtf.layers.pipeline(stage, x, [wi, wo], dim, BATCH, num_microbatches=4) * head
    loss = mtf.reduce_mean(mtf.square(y - 1.0))
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.value for v in variables])
    updates = mtf.optimize.AdamWeightDecayOptimizer(0.01).apply_grads(gradients, variables)
    lowering = mtf.Lowering(graph, {mesh: impl})
    train = tf.group([lowering.lowered_operation(op) for op in updates])
    return {"loss": lowering.export_to_tf_tensor(loss), "train": train}, lowering

"""A small network that trains, for placement and SIMD alike."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf

BATCH, WIDTH, STEPS = 8, 16, 4
DATA = np.random.RandomState(0).randn(BATCH, WIDTH).astype(np.float32)


def new_session():
    return tf.Session(config=tf.ConfigProto(device_count={"CPU": 8}))


def network(make_impl, width=WIDTH, layers=1, dropout=0.75):
    """A residual network with dropout and Adam; returns what a step gives."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, d = mtf.Dimension("batch", BATCH), mtf.Dimension("width", width)
    hidden = mtf.Dimension("hidden", 2 * width)
    data = DATA if width == WIDTH else np.ones([BATCH, width], np.float32)
    y = x = mtf.import_tf_tensor(mesh, tf.constant(data), [batch, d])
    for i in range(layers):
        h = mtf.layers.dense(y, [hidden], reduced_dims=[d], activation=mtf.relu, name=f"in{i}")
        h = mtf.dropout(h, True, dropout)
        y += mtf.layers.dense(h, [d], reduced_dims=[hidden], name=f"out{i}")
    loss = mtf.reduce_mean(mtf.square(y - mtf.sin(x)))
    variables = graph.trainable_variables
    grads = mtf.gradients([loss], [v.value for v in variables])
    updates = mtf.optimize.AdamWeightDecayOptimizer(0.01).apply_grads(grads, variables)
    lowering = mtf.Lowering(graph, {mesh: make_impl()})
    return {
        "loss": lowering.export_to_tf_tensor(loss),
        "y": lowering.export_to_tf_tensor(y),
        "train": tf.group([lowering.lowered_operation(op) for op in updates]),
    }


def train(step):
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        losses = [session.run(step)["loss"] for _ in range(STEPS)]
        return losses, session.run({v.op.name: v for v in tf.global_variables()})

"""A program that is trained on devices of JAX and, to compare, on placed devices."""

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf

MESH, LAYOUT = "rows:2,cols:2", "batch:rows,hidden:cols"
DATA = np.eye(8, 4, dtype="float32")


def placed(mesh_shape=MESH, layout=LAYOUT):
    """Returns a PlacementMeshImpl."""
    n = mtf.convert_to_shape(mesh_shape).size
    return mtf.placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, ["cpu:0"] * n)


def training(make_impl, keep_prob=0.75, trains=True):
    """Returns a function of a batch: a step of two layers with dropout and momentum, and its loss."""

    def step(data):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        batch, d, hidden = (mtf.Dimension(*s) for s in [("batch", 8), ("d", 4), ("hidden", 16)])
        x = mtf.import_tf_tensor(mesh, data, mtf.Shape([batch, d]))
        h = mtf.layers.dense(x, [hidden], reduced_dims=[d], activation=mtf.relu, name="first")
        h = mtf.dropout(h, keep_prob=keep_prob)
        y = mtf.layers.dense(h, [d], reduced_dims=[hidden], name="second")
        loss = mtf.reduce_mean(mtf.square(y - x))
        updates = []
        if trains:
            variables = mesh.graph.trainable_variables
            grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
            updates = mtf.optimize.MomentumOptimizer(0.5, 0.9).apply_grads(grads, variables)
        lowering = mtf.Lowering(mesh.graph, {mesh: make_impl()})
        for update in updates:
            lowering.lowered_operation(update)
        return lowering.export_to_tf_tensor(loss)

    return step


def on_placed_devices(**options):
    """Returns the step as an mtf.function, with the random values of seed 3."""
    tf.random.set_seed(3)
    return mtf.function(training(placed, **options))


def on_jax(mesh_shape=MESH, layout=LAYOUT, store=None, devices=None, **options):
    """Returns the step as a function of mtf.pjrt, with the random values of seed 3."""
    tf.random.set_seed(3)
    compiled = mtf.pjrt.function(mesh_shape=mesh_shape, layout=layout, store=store, devices=devices)
    return compiled(training(mtf.pjrt.mesh_impl, **options))


def losses(step, steps=4):
    """Returns the losses of steps."""
    return [float(step(tf.constant(DATA))) for _ in range(steps)]

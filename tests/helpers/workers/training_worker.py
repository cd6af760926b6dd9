"""A training program that is killed: saves after every step, and notes the loss of each."""

import os

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf

WIDTH, BATCH, DATA = 256, 8, 64


def build(mesh_shape, layout):
    """Returns the loss and the train operation of a small network with momentum."""
    data = np.random.RandomState(0).randn(DATA, WIDTH).astype(np.float32)
    step = tf.train.get_or_create_global_step()
    first = tf.cast(step * BATCH % DATA, tf.int32)  # the data follow the step
    batch = tf.slice(tf.constant(data), [first, 0], [BATCH, WIDTH])
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    width, hidden = mtf.Dimension("width", WIDTH), mtf.Dimension("hidden", 4 * WIDTH)
    x = mtf.import_tf_tensor(mesh, batch, [mtf.Dimension("batch", BATCH), width])
    h = mtf.layers.dense(x, [hidden], reduced_dims=[width], activation=mtf.relu, name="a")
    y = mtf.layers.dense(h, [width], reduced_dims=[hidden], name="b")
    loss = mtf.reduce_mean(mtf.square(y - x))
    variables = graph.trainable_variables
    grads = mtf.gradients([loss], [v.value for v in variables])
    updates = mtf.optimize.MomentumOptimizer(0.1, 0.9).apply_grads(grads, variables)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, [""] * 4, merge="none")
    lowering = mtf.Lowering(graph, {mesh: impl})
    updates = [lowering.lowered_operation(op) for op in updates]
    tf_loss = lowering.export_to_tf_tensor(loss)
    with tf.control_dependencies([*updates, tf_loss]):
        train = tf.assign_add(step, 1)
    return lowering, step, tf_loss, train


def run(directory, log, last_step, mesh_shape="x:2,y:2", layout="batch:x,hidden:y"):
    """Trains until a step, going on from the last checkpoint; writes "step loss" lines to a file."""
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        lowering, step, loss, train = build(mesh_shape, layout)
        saver = mtf.checkpoint.Saver(sharded=True)
        hooks = [
            mtf.MtfRestoreHook(lowering),
            tf.train.CheckpointSaverHook(
                directory,
                save_steps=1,
                saver=saver,
                listeners=[mtf.MtfCheckpointSaverListener(lowering)],
            ),
        ]
        scaffold = tf.train.Scaffold(saver=saver)
        with (
            open(log, "a", buffering=1) as lines,
            tf.train.MonitoredTrainingSession(
                checkpoint_dir=directory,
                scaffold=scaffold,
                hooks=hooks,
                save_checkpoint_secs=None,
                save_summaries_steps=None,
                log_step_count_steps=None,
            ) as session,
        ):
            done = session.run(step)
            while done < last_step:
                value, done = session.run([loss, train])
                lines.write(f"{done} {float(value).hex()}\n")
                os.fsync(lines.fileno())

"""Small models for estimators: of plain TensorFlow, and of a mesh."""

import glob
import os

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator

X = np.random.RandomState(0).randn(32, 2).astype(np.float32)
Y = X @ np.array([[1], [2]], np.float32)
BATCH = 8


def dataset(batch_size=BATCH, repeat=True, skip=0):
    data = tf.data.Dataset.from_tensor_slices(({"x": X}, Y))
    if repeat:
        data = data.repeat()
    return data.batch(batch_size, drop_remainder=repeat).skip(skip)


def train_data():
    return dataset()


def eval_data():
    return dataset(repeat=False)


def linear_model(features, labels, mode, params):
    """Linear regression by gradient descent, from zeros."""
    weights = tf.get_variable("w", [2, 1], initializer=tf.zeros_initializer())
    outputs = tf.matmul(features["x"], weights)
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={"p": outputs})
    loss = tf.reduce_mean((outputs - labels) ** 2)
    if mode == estimator.ModeKeys.EVAL:
        return estimator.EstimatorSpec(
            mode,
            loss=loss,
            predictions={"p": outputs},
            eval_metric_ops={"mae": tf.metrics.mean(tf.abs(outputs - labels))},
        )
    train_op = tf.train.GradientDescentOptimizer(params["lr"]).minimize(
        loss, global_step=tf.train.get_global_step()
    )
    tf.summary.scalar("user", loss)
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def descent(steps, weights=(0.0, 0.0), lr=0.1, start=0):
    """The same in NumPy; returns (losses, weights)."""
    w, losses = np.array(weights, np.float64).reshape(2, 1), []
    for i in range(start, start + steps):
        rows = slice(i * BATCH % 32, i * BATCH % 32 + BATCH)
        error = X[rows] @ w - Y[rows]
        losses.append(np.mean(error**2))
        w = w - lr * 2 * X[rows].T @ error / BATCH
    return losses, w


def mesh_model(features, labels, mode, params):
    """Linear regression on a mesh, written as for the estimator of old."""
    global_step = tf.train.get_global_step()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    size = features["x"].shape[0] or params.get("predict_batch", BATCH)
    batch, d_in, d_out = (
        mtf.Dimension("batch", size),
        mtf.Dimension("d_in", 2),
        mtf.Dimension("out", 1),
    )
    x = mtf.import_tf_tensor(mesh, features["x"], [batch, d_in])
    y = mtf.layers.dense(
        x,
        [d_out],
        reduced_dims=[d_in],
        use_bias=False,
        name="linear",
        kernel_initializer=tf.zeros_initializer(),
    )
    if mode != estimator.ModeKeys.PREDICT:
        loss = mtf.reduce_mean(mtf.square(y - mtf.import_tf_tensor(mesh, labels, [batch, d_out])))
    if mode == estimator.ModeKeys.TRAIN:
        grads = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
        make = params.get("optimizer", lambda: mtf.optimize.SgdOptimizer(params["lr"]))
        updates = make().apply_grads(grads, graph.trainable_variables)
    shape = mtf.convert_to_shape(params["mesh_shape"])
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        shape, params["layout"], ["cpu:0"] * shape.size
    )
    lowering = mtf.Lowering(graph, {mesh: impl})
    restore_hook = mtf.MtfRestoreHook(lowering)
    tf_y = lowering.export_to_tf_tensor(y)
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(
            mode,
            predictions={"p": tf_y},
            prediction_hooks=[restore_hook],
            export_outputs={"out": estimator.export.PredictOutput({"p": tf_y})},
        )
    tf_loss = lowering.export_to_tf_tensor(loss)
    if mode == estimator.ModeKeys.EVAL:
        return estimator.EstimatorSpec(
            mode,
            loss=tf_loss,
            evaluation_hooks=[restore_hook],
            eval_metric_ops={"mae": tf.metrics.mean(tf.abs(tf_y - labels))},
        )
    train_op = tf.group(
        [lowering.lowered_operation(op) for op in updates] + [tf.assign_add(global_step, 1)]
    )
    saver = tf.train.Saver(
        tf.global_variables(),
        sharded=True,
        max_to_keep=10,
        keep_checkpoint_every_n_hours=2,
        defer_build=False,
        save_relative_paths=True,
    )
    tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
    saver_hook = tf.train.CheckpointSaverHook(
        params["model_dir"],
        save_steps=params.get("save_steps", 4),
        saver=saver,
        listeners=[mtf.MtfCheckpointSaverListener(lowering)],
    )
    return estimator.EstimatorSpec(
        mode, loss=tf_loss, train_op=train_op, training_chief_hooks=[restore_hook, saver_hook]
    )


def events(directory):
    """Returns [(step, tag or "log", value)] of all event files of a directory."""
    found = []
    for path in sorted(glob.glob(os.path.join(directory, "events.out*"))):
        for event in tf.train.summary_iterator(path):
            for value in event.summary.value:
                number = value.simple_value
                if value.metadata.plugin_data.plugin_name == "scalars":
                    number = float(tf.make_ndarray(value.tensor))
                found.append((event.step, value.tag, number))
    return found


class Losses(tf.train.SessionRunHook):
    """Collects the losses of a training."""

    def __init__(self):
        self.losses = []
        self.steps = []

    def before_run(self, run_context):
        graph = run_context.session.graph
        loss = [op for op in graph.get_operations() if op.type == "ScalarSummary"][-1].inputs[1]
        step = graph.get_tensor_by_name("step_done:0")
        return tf.train.SessionRunArgs([loss, step])

    def after_run(self, run_context, run_values):
        self.losses.append(float(run_values.results[0]))
        self.steps.append(int(run_values.results[1]))

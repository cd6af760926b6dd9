"""One process of a cluster that trains a small model; started by test_cluster.py.

Arguments: the model directory, the number of steps, and how long a step takes at least; as long
it waits before it saves.
"""

import sys
import time

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.estimator import estimator_models as models
from mesh_tensorflow import estimator


def model_fn(features, labels, mode, config):
    """Two layers by SGD; `hidden` is split over the processes, if there are several."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, d_in = mtf.Dimension("batch", models.BATCH), mtf.Dimension("d_in", 2)
    hidden, d_out = mtf.Dimension("hidden", 4), mtf.Dimension("out", 1)
    x = mtf.import_tf_tensor(mesh, features["x"], [batch, d_in])
    h = mtf.layers.dense(x, [hidden], reduced_dims=[d_in], activation=mtf.tanh, name="first")
    y = mtf.layers.dense(h, [d_out], reduced_dims=[hidden], name="second")
    loss = mtf.reduce_mean(mtf.square(y - mtf.import_tf_tensor(mesh, labels, [batch, d_out])))
    grads = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
    updates = mtf.optimize.SgdOptimizer(0.05).apply_grads(grads, graph.trainable_variables)
    devices = [f"/job:{job}/task:0/device:CPU:0" for job in config.cluster_spec.jobs] or [""] * 2
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "hidden:all", devices)
    lowering = mtf.Lowering(graph, {mesh: impl})
    tf_loss = lowering.export_to_tf_tensor(loss)
    restore = mtf.MtfRestoreHook(lowering)
    if mode == estimator.ModeKeys.EVAL:
        return estimator.EstimatorSpec(mode, loss=tf_loss, evaluation_hooks=[restore])
    step = tf.assign_add(tf.train.get_global_step(), 1)
    train_op = tf.group([step, *(lowering.lowered_operation(op) for op in updates)])
    return estimator.EstimatorSpec(
        mode, loss=tf_loss, train_op=train_op, training_chief_hooks=[restore]
    )


class Tell(tf.train.SessionRunHook):
    """Prints each step's loss."""

    def __init__(self, seconds):
        self.seconds = seconds

    def before_run(self, run_context):
        graph = run_context.session.graph
        loss = [op for op in graph.get_operations() if op.type == "ScalarSummary"][-1].inputs[1]
        return tf.train.SessionRunArgs([graph.get_tensor_by_name("step_done:0"), loss])

    def after_run(self, run_context, run_values):
        step, loss = run_values.results
        print(f"step {step} {loss:.8f}", flush=True)
        time.sleep(self.seconds)


class TellOfSaving(tf.train.CheckpointSaverListener):
    """Prints each step at which a checkpoint is about to be written."""

    def __init__(self, seconds):
        self.seconds = seconds

    def before_save(self, session, global_step_value):
        print(f"saving {global_step_value}", flush=True)
        time.sleep(self.seconds)


def main():
    directory, steps, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    config = estimator.RunConfig(
        model_dir=directory, save_checkpoints_steps=5, session_creation_timeout_secs=60
    )
    est = estimator.Estimator(model_fn, config=config)

    def train():
        step = 0
        if est.latest_checkpoint():
            step = int(est.get_variable_value("global_step"))
        est.train(
            lambda: models.dataset(skip=step),
            [Tell(seconds)],
            max_steps=steps,
            saving_listeners=[TellOfSaving(seconds)],
        )
        results = est.evaluate(lambda: models.dataset().take(4))
        print(f"evaluated {results['global_step']} {results['loss']:.8f}", flush=True)
        return "trained"

    print(f"result {estimator.run_cluster(train, config)}", flush=True)


if __name__ == "__main__":
    main()

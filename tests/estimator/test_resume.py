"""A training that is resumed goes on as if it had not been interrupted, or says why it cannot."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow.checkpoint import CheckpointError

DATA = np.random.RandomState(0).randn(8, 16).astype(np.float32)


class Record(tf.train.SessionRunHook):
    """Notes the loss of each step."""

    def __init__(self, loss, losses):
        self._loss, self._losses = loss, losses

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(self._loss)

    def after_run(self, run_context, run_values):
        self._losses.append(float(run_values.results))


OPTIMIZERS = {
    "momentum": lambda: mtf.optimize.MomentumOptimizer(0.1, 0.9),
    "adafactor": lambda: mtf.optimize.AdafactorOptimizer(min_dim_size_to_factor=4, beta1=0.9),
}


def make_model_fn(losses, width=4, own_saver=False, optimizer="momentum"):
    """A linear model with dropout and random noise."""

    def model_fn(features, labels, mode):
        del labels
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        d_in, d_out = mtf.Dimension("d_in", 16), mtf.Dimension("d_out", width)
        x = mtf.import_tf_tensor(mesh, features, [mtf.Dimension("batch", 8), d_in])
        y = mtf.layers.dense(mtf.dropout(x, True, 0.5), [d_out], reduced_dims=[d_in], name="a")
        loss = mtf.reduce_mean(mtf.square(y - mtf.random_normal(mesh, y.shape)))
        variables = graph.trainable_variables
        grads = mtf.gradients([loss], [v.value for v in variables])
        updates = OPTIMIZERS[optimizer]().apply_grads(grads, variables)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "batch:x", [""] * 2)
        lowering = mtf.Lowering(graph, {mesh: impl})
        tf_loss = lowering.export_to_tf_tensor(loss)
        count = tf.assign_add(tf.train.get_global_step(), 1)
        train = tf.group([lowering.lowered_operation(op) for op in updates] + [count])
        if own_saver:
            tf.add_to_collection(tf.GraphKeys.SAVERS, tf.train.Saver(sharded=True))
        return estimator.EstimatorSpec(
            mode,
            loss=tf_loss,
            train_op=train,
            training_hooks=[mtf.MtfRestoreHook(lowering), Record(tf_loss, losses)],
        )

    return model_fn


def input_fn():
    return tf.data.Dataset.from_tensors(DATA).repeat()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_random_values_and_rates_go_on_as_they_would_have(optimizer, tmp_path):
    curves = []
    for name, parts in [("whole", [6]), ("resumed", [2, 1, 3])]:
        losses = []
        for steps in parts:
            model_fn = make_model_fn(losses, optimizer=optimizer)
            model = estimator.Estimator(model_fn, str(tmp_path / name))
            model.train(input_fn, steps=steps)
        curves.append(losses)
    assert curves[0] == curves[1]
    assert len(set(curves[0])) == 6


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("own_saver", [False, True])
def test_a_checkpoint_of_another_model(own_saver, tmp_path):
    estimator.Estimator(make_model_fn([]), str(tmp_path)).train(input_fn, steps=1)
    other = estimator.Estimator(make_model_fn([], 8, own_saver), str(tmp_path))
    with pytest.raises(CheckpointError, match=r"model.ckpt-1 is not of this program") as error:
        other.train(input_fn, steps=1)
    assert "a/kernel: float32 [16, 4] in the file, float32 [16, 8] in the program" in str(
        error.value
    )

"""A TPUEstimator whose model function is one program on devices of JAX."""

import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.paths import EXAMPLES

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow.estimator import tpu

sys.path.append(str(EXAMPLES))

import toy_model_tpu

PARAMS = {
    "batch_size": 8, "io_size": 8, "hidden_size": 8, "num_hidden_layers": 2, "seed": 1,
    "mesh_shape": "rows:2;cols:2", "layout": "batch:rows;hidden:cols", "optimizer": "adafactor",
    "lr": 0.0, "master_dtype": "float32", "slice_dtype": "float32", "activation_dtype": "float32",
    "iterations": 2, "train_steps": 4, "eval_steps": 2, "steps_per_checkpoint": 2,
    "step_with_nan": 0,
}  # fmt: skip


def trained(directory, mesh_impl, steps=4):
    params = {**PARAMS, "mesh_impl": mesh_impl, "train_steps": steps}
    on_jax = mesh_impl == "pjrt"
    return toy_model_tpu.run(params, toy_model_tpu.config_of(params, directory, on_jax), on_jax)


@pytest.mark.slow
def test_trains_and_resumes_as_on_placed_devices(tmp_path):
    expected = trained(str(tmp_path / "placed"), "")
    found = trained(str(tmp_path / "jax"), "pjrt")
    assert found["global_step"] == 4
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    # Either goes on from what the other wrote.
    one = trained(str(tmp_path / "placed"), "pjrt", steps=6)
    other = trained(str(tmp_path / "jax"), "", steps=6)
    np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-5)


def model_fn(features, labels, mode, params):
    """A model with metrics, a host call and predictions."""
    del labels
    mesh, batch = mtf.Mesh(mtf.Graph(), "mesh"), mtf.Dimension("batch", params["batch_size"])
    x = mtf.import_tf_tensor(mesh, features, [batch, mtf.Dimension("io", 4)])
    y = x * mtf.get_variable(mesh, "w", x.shape[1:], initializer=tf.ones_initializer())
    loss = mtf.reduce_mean(mtf.square(y - 2.0))
    weights = mesh.graph.trainable_variables
    updates = []
    if mode == estimator.ModeKeys.TRAIN:
        grads = mtf.gradients([loss], [v.outputs[0] for v in weights])
        updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, weights)
    lowering = mtf.Lowering(mesh.graph, {mesh: mtf.GspmdMeshImpl("rows:2", "batch:rows")})
    values = lowering.export_to_tf_tensor(y)
    with mtf.utils.outside_all_rewrites():
        restore = mtf.MtfRestoreHook(lowering)
    if mode == estimator.ModeKeys.PREDICT:
        return tpu.TPUEstimatorSpec(mode, predictions={"y": values}, prediction_hooks=[restore])
    spec = {"mode": mode, "loss": lowering.export_to_tf_tensor(loss)}
    if mode == estimator.ModeKeys.EVAL:
        mean = (lambda y: {"mean": tf.metrics.mean(y)}), [values]
        return tpu.TPUEstimatorSpec(**spec, eval_metrics=mean, evaluation_hooks=[restore])
    done = [lowering.lowered_operation(update) for update in updates]
    train_op = tf.group(done, tf.assign_add(tf.train.get_global_step(), 1))
    seen = (lambda y: CALLS.append(y.shape) or [tf.no_op()]), [values]
    return tpu.TPUEstimatorSpec(**spec, train_op=train_op, host_call=seen, training_hooks=[restore])


CALLS = []


@pytest.mark.slow
def test_metrics_host_calls_and_predictions(tmp_path):
    def input_fn(params):
        return tf.data.Dataset.from_tensors(tf.ones([params["batch_size"], 4])).repeat(2)

    config = tpu.RunConfig(
        model_dir=str(tmp_path),
        save_checkpoints_steps=1,
        tpu_config=tpu.TPUConfig(mesh_impl="pjrt"),
    )
    sizes = {f"{name}_batch_size": 8 for name in ("train", "eval", "predict")}
    model = tpu.TPUEstimator(model_fn, config=config, **sizes)
    model.train(input_fn, steps=2)
    assert [shape.as_list() for shape in CALLS] == [[8, 4]]
    weight = model.get_variable_value("w")
    found = model.evaluate(input_fn)
    assert found["global_step"] == 2 and 1 < weight[0] < 2
    np.testing.assert_allclose(found["mean"], weight[0], rtol=1e-6)
    predicted = list(model.predict(input_fn))
    assert len(predicted) == 16
    np.testing.assert_allclose(predicted[0]["y"], weight, rtol=1e-6)


def test_an_unknown_implementation():
    with pytest.raises(ValueError, match=r"mesh_impl='gspmd' is none of 'simd', 'p"):
        tpu.TPUConfig(mesh_impl="gspmd")

"""A model function of a mesh in an estimator: trained, resumed on another mesh, evaluated, used."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers.estimator import estimator_models as models

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator

MESHES = [("x:1", ""), ("x:2", "batch:x"), ("x:2,y:2", "batch:x,d_in:y"), ("x:2", "d_in:x")]


def make(tmp_path, mesh, **params):
    mesh_shape, layout = mesh
    params = {
        "lr": 0.1,
        "mesh_shape": mesh_shape,
        "layout": layout,
        "model_dir": str(tmp_path),
        **params,
    }
    config = estimator.RunConfig(save_checkpoints_steps=3, log_step_count_steps=None)
    return estimator.Estimator(models.mesh_model, str(tmp_path), config, params)


def adam():
    return mtf.optimize.AdamWeightDecayOptimizer(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_trained_evaluated_and_used(mesh, tmp_path):
    est = make(tmp_path, mesh)
    losses = models.Losses()
    est.train(models.train_data, hooks=[losses], max_steps=6)
    expected, weights = models.descent(6)
    np.testing.assert_allclose(losses.losses, expected, rtol=1e-5)
    np.testing.assert_allclose(est.get_variable_value("linear/kernel"), weights, rtol=1e-5)
    assert est.latest_checkpoint() == str(tmp_path / "model.ckpt-6")
    error = models.X @ weights - models.Y
    results = est.evaluate(lambda: models.dataset().take(4))
    assert results["global_step"] == 6
    np.testing.assert_allclose(results["loss"], np.mean(error**2), rtol=1e-4)
    np.testing.assert_allclose(results["mae"], np.mean(np.abs(error)), rtol=1e-4)
    found = [p["p"] for p in est.predict(lambda: models.dataset().take(4))]
    np.testing.assert_allclose(found, models.X @ weights, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_resumed_on_another_mesh(mesh, tmp_path):
    whole = models.Losses()
    make(tmp_path / "whole", MESHES[0], optimizer=adam).train(
        models.train_data, hooks=[whole], max_steps=8
    )
    parts = [models.Losses(), models.Losses()]
    make(tmp_path / "parts", MESHES[2], optimizer=adam).train(
        models.train_data, hooks=[parts[0]], steps=3
    )
    make(tmp_path / "parts", mesh, optimizer=adam).train(
        lambda: models.dataset(skip=3), hooks=[parts[1]], max_steps=8
    )
    assert parts[0].steps + parts[1].steps == whole.steps == list(range(1, 9))
    np.testing.assert_allclose(parts[0].losses + parts[1].losses, whole.losses, rtol=1e-5)


def test_checkpoints_are_those_of_the_model_function(tmp_path):
    est = make(tmp_path, MESHES[2], save_steps=2)
    est.train(models.train_data, steps=5)
    state = tf.train.get_checkpoint_state(str(tmp_path))
    names = [path.rsplit("-", 1)[-1] for path in state.all_model_checkpoint_paths]
    assert names == ["0", "2", "4", "5"]
    assert set(est.get_variable_names()) == {"global_step", "linear/kernel"}
    first = tf.train.load_checkpoint(str(tmp_path / "model.ckpt-0"))
    np.testing.assert_array_equal(first.get_tensor("linear/kernel"), np.zeros([2, 1]))


@pytest.mark.slow_but(1)
@pytest.mark.slow("mesh[12]*")
@pytest.mark.parametrize("mesh", MESHES)
def test_exported(mesh, tmp_path):
    est = make(tmp_path / "model", mesh)
    est.train(models.train_data, steps=6)
    weights = est.get_variable_value("linear/kernel")
    with tf.Graph().as_default():
        receiver = estimator.export.build_raw_serving_input_receiver_fn(
            {"x": tf.placeholder(tf.float32, [None, 2])}, default_batch_size=models.BATCH
        )
    path = est.export_saved_model(str(tmp_path / "export"), receiver).decode()
    x = models.X[: models.BATCH]
    with tf.Graph().as_default(), tf.Session() as session:
        loaded = tf.saved_model.load(session, ["serve"], path)
        signature = loaded.signature_def["serving_default"]
        output = session.run(signature.outputs["p"].name, {signature.inputs["x"].name: x})
    np.testing.assert_allclose(output, x @ weights, rtol=1e-5)
    loaded = tf2.saved_model.load(path)
    output = loaded.signatures["serving_default"](x=tf2.constant(x))
    np.testing.assert_allclose(output["p"].numpy(), x @ weights, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_warm_started_from_another_mesh(mesh, tmp_path):
    make(tmp_path / "a", MESHES[2]).train(models.train_data, max_steps=4)
    losses, weights = models.Losses(), models.descent(4)[1]
    est = make(tmp_path / "b", mesh)
    est = estimator.Estimator(
        models.mesh_model, est.model_dir, est.config, est.params, str(tmp_path / "a")
    )
    results = est.evaluate(lambda: models.dataset().take(4))
    error = models.X @ weights - models.Y
    np.testing.assert_allclose(results["loss"], np.mean(error**2), rtol=1e-4)
    est.train(models.train_data, hooks=[losses], max_steps=2)
    np.testing.assert_allclose(losses.losses, models.descent(2, weights)[0], rtol=1e-5)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("mesh", MESHES)
def test_exported_for_any_number_of_rows(mesh, tmp_path):
    est = make(tmp_path / "model", mesh)
    est.train(models.train_data, steps=2)
    weights = est.get_variable_value("linear/kernel")
    with tf.Graph().as_default():
        receiver = estimator.export.build_raw_serving_input_receiver_fn(
            {"x": tf.placeholder(tf.float32, [None, 2])}, default_batch_size=models.BATCH
        )
    path = est.export_saved_model(
        str(tmp_path / "export"), receiver, rows_at_a_time=models.BATCH
    ).decode()
    with tf.Graph().as_default(), tf.Session() as session:
        signature = tf.saved_model.load(session, ["serve"], path).signature_def["serving_default"]
        fed, output = signature.inputs["x"].name, signature.outputs["p"].name
        for rows in (0, 1, models.BATCH, models.BATCH + 3):
            x = models.X[:rows]
            np.testing.assert_allclose(session.run(output, {fed: x}), x @ weights, rtol=1e-5)
    served = tf2.saved_model.load(path).signatures["serving_default"]
    x = models.X[: 2 * models.BATCH]
    np.testing.assert_allclose(served(x=tf2.constant(x))["p"].numpy(), x @ weights, rtol=1e-5)
    with pytest.raises(
        ValueError, match=r"export: the signature .* 'x' has the shape \(8, 2\), but .* 3 at a time"
    ):
        est.export_saved_model(str(tmp_path / "other"), receiver, rows_at_a_time=3)
    with pytest.raises(ValueError, match="rows_at_a_time=0 must be an integer of at least 1"):
        est.export_saved_model(str(tmp_path / "other"), receiver, rows_at_a_time=0)
    with pytest.raises(ValueError, match="rows_at_a_time is for predictions alone"):
        est.export_saved_model(
            str(tmp_path / "other"), receiver, rows_at_a_time=4, experimental_mode="eval"
        )
    assert not (tmp_path / "other").exists() or not any((tmp_path / "other").iterdir())

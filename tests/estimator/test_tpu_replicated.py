"""TPUEstimator with use_tpu: one program on several processors, without a TPU."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.estimator import estimator_models as models

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow.estimator import tpu
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, auto_logical_to_physical_tpu

SHAPE, LAYOUT = mtf.convert_to_shape("x:2;y:2"), "batch:x;hidden:y"


def input_fn(params):
    return models.dataset(params["batch_size"])


def mesh_impl_of(params):
    """The mesh as programs for TPUs make it, or a placed one."""
    if not params["use_tpu"]:
        cpus = [f"cpu:{i}" for i in range(4)]
        return mtf.placement_mesh_impl.PlacementMeshImpl(SHAPE, LAYOUT, cpus)
    context = params["context"]
    assert context.num_hosts == 1 and context.tpu_host_placement_function(host_id=0) == "/cpu:0"
    assignment = context.device_assignment
    physical = list(assignment.topology.mesh_shape)
    order = auto_logical_to_physical_tpu(
        SHAPE.to_integer_list, physical, device_assignment=assignment
    )
    return SimdMeshImpl(SHAPE, LAYOUT, [""] * 4, assignment, logical_to_physical=order)


def model_fn(features, labels, mode, params, config):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    size = params["batch_size"]
    batch, d_in = mtf.Dimension("batch", size), mtf.Dimension("in", 2)
    hidden, out = mtf.Dimension("hidden", 8), mtf.Dimension("out", 1)
    x = mtf.import_tf_tensor(mesh, features["x"], [batch, d_in])
    h = mtf.layers.dense(x, [hidden], reduced_dims=[d_in], activation=mtf.tanh, name="hidden")
    h = mtf.dropout(h, mode == "train", rate=0.25)
    y = mtf.layers.dense(h, [out], reduced_dims=[hidden], name="out")
    updates = []
    if mode != "infer":
        target = mtf.import_tf_tensor(mesh, labels, [batch, out])
        loss = mtf.reduce_mean(mtf.square(y - target))
    if mode == "train":
        mtf.scalar_summary("mean_output", mtf.reduce_mean(y))
        gradients = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
        updates = mtf.optimize.AdafactorOptimizer(learning_rate=0.1).apply_grads(
            gradients, graph.trainable_variables
        )
    lowering = mtf.Lowering(graph, {mesh: mesh_impl_of(params)})
    outputs = lowering.export_to_tf_tensor(y)
    with mtf.utils.outside_all_rewrites():
        restore = mtf.MtfRestoreHook(lowering)
    if mode == "infer":
        return tpu.TPUEstimatorSpec(
            mode, predictions={"y": outputs, "x": features["x"]}, prediction_hooks=[restore]
        )
    tf_loss = lowering.export_to_tf_tensor(loss)
    if mode == "eval":

        def metric_fn(outputs, labels):
            return {"mae": tf.metrics.mean(tf.abs(outputs - labels))}

        return tpu.TPUEstimatorSpec(
            mode,
            loss=tf_loss,
            eval_metrics=(metric_fn, [outputs, labels]),
            evaluation_hooks=[restore],
        )
    host_call = mtf.utils.create_host_call(config.model_dir)
    mtf.utils.remove_summaries()
    step = tf.train.get_global_step()
    train = [lowering.lowered_operation(op) for op in updates] + [tf.assign_add(step, 1)]
    with mtf.utils.outside_all_rewrites():
        saver = tf.train.Saver(tf.global_variables(), save_relative_paths=True)
        tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
        save = tf.train.CheckpointSaverHook(
            config.model_dir,
            save_steps=3,
            saver=saver,
            listeners=[mtf.MtfCheckpointSaverListener(lowering)],
        )
    return tpu.TPUEstimatorSpec(
        mode,
        loss=tf_loss,
        train_op=tf.group(train),
        host_call=host_call,
        training_hooks=[restore, save],
    )


def make(directory, use_tpu, num_shards=4, model_fn=model_fn):
    config = tpu.RunConfig(
        model_dir=str(directory),
        save_checkpoints_steps=4,
        tf_random_seed=1,
        session_config=None if use_tpu else tf.ConfigProto(device_count={"CPU": 4}),
        tpu_config=tpu.TPUConfig(num_shards=num_shards),
    )
    return tpu.TPUEstimator(
        model_fn,
        config=config,
        use_tpu=use_tpu,
        params={},
        train_batch_size=8,
        eval_batch_size=16,
        predict_batch_size=4,
    )


def steps_of(directory):
    return int(tf.train.load_variable(str(directory), "global_step"))


@pytest.mark.slow
def test_trains_evaluates_and_predicts_as_a_placed_mesh_does(tmp_path):
    losses, results, outputs = {}, {}, {}
    for use_tpu in (False, True):
        directory = tmp_path / str(use_tpu)
        est = make(directory, use_tpu)
        seen = models.Losses()
        est.train(input_fn, hooks=[seen], max_steps=4)
        est.train(input_fn, hooks=[seen], max_steps=7)
        losses[use_tpu] = seen.losses
        assert steps_of(directory) == 7
        results[use_tpu] = est.evaluate(input_fn, steps=2)
        predictions = est.predict(input_fn)
        outputs[use_tpu] = [next(predictions)["y"] for _ in range(6)]
        predictions.close()
    assert len(losses[True]) == 7
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-5)
    np.testing.assert_allclose(outputs[True], outputs[False], rtol=1e-4)
    assert set(results[True]) == {"loss", "mae", "global_step"}
    for name, value in results[False].items():
        np.testing.assert_allclose(results[True][name], value, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_scalar_summaries_are_written_by_the_host_call(tmp_path):
    make(tmp_path, True).train(input_fn, max_steps=3)
    tags = {
        (value.tag, event.step)
        for path in tmp_path.glob("events*")
        for event in tf.train.summary_iterator(str(path))
        for value in event.summary.value
    }
    assert {step for tag, step in tags if tag == "mean_output"} >= {1, 2}


@pytest.mark.slow
def test_either_kind_of_mesh_goes_on_where_the_other_stopped(tmp_path):
    whole, parts = models.Losses(), models.Losses()
    make(tmp_path / "whole", False).train(input_fn, hooks=[whole], max_steps=6)
    for use_tpu, stop in [(True, 2), (False, 4), (True, 6)]:
        make(tmp_path / "parts", use_tpu).train(input_fn, hooks=[parts], max_steps=stop)
    # Each call of train begins with the first batch again, so only the first two steps agree.
    np.testing.assert_allclose(parts.losses[:2], whole.losses[:2], rtol=1e-5)
    assert len(parts.losses) == 6 and steps_of(tmp_path / "parts") == 6


@pytest.mark.slow
def test_an_export_is_of_a_model_for_one_device(tmp_path):
    def one_device(features, labels, mode, params, config):
        if not params["use_tpu"]:
            params = {**params, "batch_size": 4}
        return model_fn(features, labels, mode, params, config)

    est = make(tmp_path / "model", True, model_fn=one_device)
    est.train(input_fn, max_steps=2)

    def receiver_fn():
        x = tf.placeholder(tf.float32, [4, 2], name="x")
        return estimator.export.ServingInputReceiver({"x": x}, {"x": x})

    path = est.export_saved_model(str(tmp_path / "export"), receiver_fn)
    assert tf.saved_model.contains_saved_model(path.decode())


class OwnSpec(tpu.TPUEstimatorSpec):
    """A spec of a user, which adds a prediction that is not of rows."""

    def as_estimator_spec(self):
        made = super().as_estimator_spec()
        return made._replace(predictions={**made.predictions, "one": tf.constant(1)})


def test_predictions_of_batches_that_are_not_full(tmp_path):
    """Every batch has the same static size; what fills it up is in no prediction."""
    seen = []

    def checked(features, labels, mode, params, config):
        if mode == "infer":
            seen.append({k: v.shape.as_list() for k, v in features.items()})
            assert labels is None and features["id"].dtype == tf.int64
        spec = model_fn(features, labels, mode, params, config)
        return OwnSpec(**spec._asdict())

    def rows(count, batch=4):
        def input_fn(params):
            data = {"x": models.X[:count], "id": np.arange(count)}
            return tf.data.Dataset.from_tensor_slices((data, models.Y[:count])).batch(batch)

        return input_fn

    trained = make(tmp_path, False)
    trained.train(input_fn, max_steps=2)
    expected = trained.predict(rows(12))
    expected = [next(expected)["y"] for _ in range(12)]
    for count in (10, 3, 8):
        batches = list(
            make(tmp_path, True, model_fn=checked).predict(rows(count), yield_single_examples=False)
        )
        assert seen.pop() == {"x": [4, 2], "id": [4]}
        assert all(batch["one"] == 1 for batch in batches)
        found = np.concatenate([batch["y"] for batch in batches])
        np.testing.assert_allclose(found, expected[:count], rtol=1e-4)
    fed = make(tmp_path, True).predict(rows(9), predict_keys=["x"])
    np.testing.assert_array_equal([p["x"] for p in fed], models.X[:9])
    with pytest.raises(tf.errors.InvalidArgumentError, match="more rows than predict_batch_size=4"):
        next(make(tmp_path, True).predict(rows(10, batch=5)))


def test_errors(tmp_path):
    def too_large(features, labels, mode, params, config):
        del features, labels, config
        SimdMeshImpl("x:8", "", [""] * 8, params["context"].device_assignment)

    with pytest.raises(ValueError, match="the mesh x=8 needs 8 devices, but there are 4"):
        make(tmp_path, True, model_fn=too_large).train(input_fn, max_steps=1)

    def plain_spec(features, labels, mode, params, config):
        spec = model_fn(features, labels, mode, params, config)
        return estimator.EstimatorSpec(mode, loss=spec.loss, train_op=spec.train_op)

    with pytest.raises(TypeError, match="the model_fn has to return a TPUEstimatorSpec"):
        make(tmp_path, True, model_fn=plain_spec).train(input_fn, max_steps=1)

"""Evaluation and prediction."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.estimator import estimator_models as models

from mesh_tensorflow import estimator

ERROR = models.X @ models.descent(6)[1] - models.Y


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("model"))
    config = estimator.RunConfig(save_checkpoints_steps=2)
    est = estimator.Estimator(models.linear_model, directory, config, {"lr": 0.1})
    return est.train(models.train_data, max_steps=6)


def with_model(trained, model_fn):
    return estimator.Estimator(model_fn, trained.model_dir, params={"lr": 0.1})


def test_evaluate(trained):
    results = trained.evaluate(models.eval_data)
    assert results["global_step"] == 6 and set(results) == {"global_step", "loss", "mae"}
    np.testing.assert_allclose(results["loss"], np.mean(ERROR**2), rtol=1e-5)
    np.testing.assert_allclose(results["mae"], np.mean(np.abs(ERROR)), rtol=1e-5)


def test_evaluate_some_batches_under_a_name(trained):
    results = trained.evaluate(models.train_data, steps=2, name="two")
    np.testing.assert_allclose(results["loss"], np.mean(ERROR[:16] ** 2), rtol=1e-5)
    found = {(step, tag): value for step, tag, value in models.events(trained.eval_dir("two"))}
    assert set(found) == {(6, "loss"), (6, "mae"), (6, "checkpoint_path")}
    np.testing.assert_allclose(found[6, "loss"], results["loss"])


def test_evaluate_an_older_checkpoint(trained):
    path = f"{trained.model_dir}/model.ckpt-4"
    results = trained.evaluate(models.eval_data, checkpoint_path=path, name="old")
    error = models.X @ models.descent(4)[1] - models.Y
    assert results["global_step"] == 4
    np.testing.assert_allclose(results["loss"], np.mean(error**2), rtol=1e-5)


def test_metrics_of_all_kinds(trained):
    def model_fn(features, labels, mode, params):
        spec = models.linear_model(features, labels, mode, params)
        histogram = tf.get_local_variable("h", [3], initializer=tf.zeros_initializer())
        text = tf.summary.merge([tf.summary.scalar("s", 3.5)])
        # Of the data, so that it is not run once more when they have ended.
        step = tf.constant([1.0, 2.0, 3.0]) * tf.ones_like(labels)[0]
        metrics = {
            "vector": (histogram.read_value(), histogram.assign_add(step)),
            "summary": (text, tf.no_op()),
        }
        return spec._replace(eval_metric_ops={**spec.eval_metric_ops, **metrics})

    est = with_model(trained, model_fn)
    results = est.evaluate(models.eval_data, name="kinds")
    np.testing.assert_array_equal(results["vector"], [4, 8, 12])
    found = {tag: value for _, tag, value in models.events(est.eval_dir("kinds"))}
    assert {"vector", "summary/0", "mae"} <= set(found) and found["summary/0"] == 3.5


def test_hooks_run_in_evaluation_and_prediction(trained):
    class Count(tf.train.SessionRunHook):
        runs = 0

        def after_run(self, run_context, run_values):
            self.runs += 1

    counts = [Count() for _ in range(4)]

    def model_fn(features, labels, mode, params):
        spec = models.linear_model(features, labels, mode, params)
        return spec._replace(evaluation_hooks=[counts[0]], prediction_hooks=[counts[1]])

    est = with_model(trained, model_fn)
    est.evaluate(models.eval_data, hooks=[counts[2]])
    list(est.predict(models.eval_data, hooks=[counts[3]]))
    # A run that finds the end of the data does not come back.
    assert [count.runs for count in counts] == [4, 4, 4, 4]


def test_predict(trained):
    outputs = models.X @ models.descent(6)[1]
    found = list(trained.predict(models.eval_data))
    np.testing.assert_allclose([p["p"] for p in found], outputs, rtol=1e-5, atol=1e-6)
    batches = list(trained.predict(models.eval_data, yield_single_examples=False))
    assert [b["p"].shape for b in batches] == [(8, 1)] * 4


def test_predict_tensors_and_chosen_keys(trained):
    def model_fn(features, labels, mode, params):
        assert labels is None
        spec = models.linear_model(features, labels, mode, params)
        predictions = spec.predictions["p"]
        if params.get("several"):
            predictions = {
                "p": predictions,
                "q": 2 * predictions,
                "all": tf.reduce_sum(predictions),
            }
        return estimator.EstimatorSpec(mode, predictions=predictions)

    one = list(with_model(trained, model_fn).predict(models.eval_data))
    assert len(one) == 32 and one[0].shape == (1,)
    est = estimator.Estimator(model_fn, trained.model_dir, params={"several": True})
    chosen = next(est.predict(models.eval_data, predict_keys=["q", "p"]))
    np.testing.assert_allclose(chosen["q"], 2 * chosen["p"])
    with pytest.raises(ValueError, match=r"differ in their first dimension.*all: \[\]\): pass yie"):
        next(est.predict(models.eval_data))
    with pytest.raises(ValueError, match="predict_keys has 'x', but the model predicts 'p', 'q', "):
        next(est.predict(models.eval_data, predict_keys="x"))
    with pytest.raises(
        ValueError, match="the model's prediction is one tensor: leave predict_keys"
    ):
        next(with_model(trained, model_fn).predict(models.eval_data, predict_keys=["p"]))


def test_graphs_between_predictions(trained):
    """A graph that is made while predictions are received does not disturb them."""
    found = []
    with tf.Graph().as_default() as outer:
        for prediction in trained.predict(models.eval_data):
            found.append(prediction)
            assert tf.get_default_graph() is outer
            with tf.Graph().as_default():
                tf.constant(1)
            if len(found) == 10:
                break
    assert len(found) == 10


def test_no_checkpoint(tmp_path):
    est = estimator.Estimator(models.linear_model, str(tmp_path), params={"lr": 0.1})
    text = f": there is no checkpoint in {tmp_path}, so the variables would have initial values. Tr"
    with pytest.raises(ValueError, match="evaluate" + text):
        est.evaluate(models.eval_data)
    with pytest.raises(ValueError, match="predict" + text):
        next(est.predict(models.eval_data))
    with pytest.raises(
        ValueError, match="evaluate: there is no checkpoint at checkpoint_path='/x'"
    ):
        est.evaluate(models.eval_data, checkpoint_path="/x")


def test_no_checkpoint_and_a_saver(tmp_path):
    """A saver of the model function reads files, but none of these."""

    def model_fn(features, labels, mode, params):
        spec = models.linear_model(features, labels, mode, params)
        return spec._replace(scaffold=tf.train.Scaffold(saver=tf.train.Saver()))

    est = estimator.Estimator(model_fn, str(tmp_path), params={"lr": 0.1})
    with pytest.raises(ValueError, match="predict: there is no checkpoint in"):
        next(est.predict(models.eval_data))


def test_values_that_are_not_from_a_checkpoint(trained, tmp_path):
    """A model function that fills its variables needs none."""

    def from_another(features, labels, mode, params):
        spec = models.linear_model(features, labels, mode, params)
        tf.train.init_from_checkpoint(trained.model_dir, {"w": "w"})
        return spec

    def from_scaffold(features, labels, mode, params):
        spec = models.linear_model(features, labels, mode, params)
        fill = tf.trainable_variables()[0].assign(models.descent(6)[1].astype(np.float32))
        return spec._replace(scaffold=tf.train.Scaffold(init_fn=lambda _, s: s.run(fill)))

    for model_fn in (from_another, from_scaffold):
        est = estimator.Estimator(model_fn, str(tmp_path), params={"lr": 0.1})
        results = est.evaluate(models.eval_data)
        np.testing.assert_allclose(results["loss"], np.mean(ERROR**2), rtol=1e-5)
    est = estimator.Estimator(
        models.linear_model, str(tmp_path), None, {"lr": 0.1}, warm_start_from=trained.model_dir
    )
    np.testing.assert_allclose(est.evaluate(models.eval_data)["loss"], np.mean(ERROR**2), rtol=1e-5)


def test_mistakes(trained):
    with pytest.raises(ValueError, match="evaluate: steps=0 must be"):
        trained.evaluate(models.eval_data, steps=0)
    with pytest.raises(ValueError, match="evaluate: input_fn gave no batch"):
        trained.evaluate(lambda: models.eval_data().take(0))
    with pytest.raises(TypeError, match="predict: input_fn should be a function"):
        trained.predict(models.X)

    def model_fn(features, labels, mode, params):
        spec = models.linear_model(features, labels, mode, params)
        return spec._replace(eval_metric_ops={"loss": tf.metrics.mean(spec.loss)})

    with pytest.raises(
        ValueError, match="has a metric 'loss', the name of a result that is always"
    ):
        with_model(trained, model_fn).evaluate(models.eval_data)


@pytest.mark.parametrize("called", ["evaluate", "predict"])
def test_training_that_goes_on_replaces_the_checkpoint(called, tmp_path):
    """As in a process that evaluates what another one trains."""
    config = estimator.RunConfig(keep_checkpoint_max=1, log_step_count_steps=None)
    est = estimator.Estimator(models.linear_model, str(tmp_path), config, {"lr": 0.1})
    est.train(models.train_data, max_steps=2)
    gone = est.latest_checkpoint()

    def slow_data():
        with tf.Graph().as_default():
            est.train(models.train_data, max_steps=4)
        return models.eval_data()

    if called == "evaluate":
        results = est.evaluate(slow_data, name="late")
        assert results["global_step"] == 4
        written = models.events(est.eval_dir("late"))
        assert {step for step, _, _ in written} == {4}
    else:
        found = next(iter(est.predict(slow_data)))
        np.testing.assert_array_equal(found["p"], next(iter(est.predict(models.eval_data)))["p"])
    with pytest.raises(ValueError, match=r"no checkpoint at .*model.ckpt-2"):
        est.evaluate(models.eval_data, checkpoint_path=gone)

"""SavedModels: written, and loaded as TensorFlow 1 and as TensorFlow 2 load them."""

import os
import shutil

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers.estimator import estimator_models as models

from mesh_tensorflow import estimator
from mesh_tensorflow.estimator import export
from mesh_tensorflow.estimator.experimental import build_raw_supervised_input_receiver_fn
from mesh_tensorflow.estimator.export import any_batch

WEIGHTS = models.descent(6)[1]


def model_fn(features, labels, mode, params):
    spec = models.linear_model(features, labels, mode, params)
    if mode != "infer":
        return spec
    outputs = spec.predictions["p"]
    labels = tf.as_string(tf.argmax(tf.concat([outputs, -outputs], 1), 1))
    return estimator.EstimatorSpec(
        mode,
        predictions=spec.predictions,
        export_outputs={
            "serving_default": export.PredictOutput({"p": outputs}),
            "regress": export.RegressionOutput(outputs),
            "classify": export.ClassificationOutput(tf.sigmoid(outputs), labels[:, None]),
        },
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    est = estimator.Estimator(
        model_fn,
        str(tmp_path_factory.mktemp("model")),
        estimator.RunConfig(save_checkpoints_steps=2),
        {"lr": 0.1},
    )
    return est.train(models.train_data, max_steps=6)


def raw_receiver():
    with tf.Graph().as_default():
        return export.build_raw_serving_input_receiver_fn({"x": tf.placeholder(tf.float32, [5, 2])})


def run_v1(path, name, feed):
    with tf.Graph().as_default(), tf.Session() as session:
        signature = tf.saved_model.load(session, ["serve"], path).signature_def[name]
        outputs = {key: info.name for key, info in signature.outputs.items()}
        return session.run(
            outputs, {signature.inputs[key].name: value for key, value in feed.items()}
        )


def test_features_as_they_are(trained, tmp_path):
    path = trained.export_saved_model(str(tmp_path), raw_receiver())
    assert isinstance(path, bytes)
    path = path.decode()
    assert os.path.dirname(path) == str(tmp_path) and os.path.basename(path).isdigit()
    assert os.listdir(tmp_path) == [os.path.basename(path)]
    x = models.X[:3]
    np.testing.assert_allclose(
        run_v1(path, "serving_default", {"x": x})["p"], x @ WEIGHTS, rtol=1e-5
    )
    loaded = tf2.saved_model.load(path)
    # The two others need one string.
    assert list(loaded.signatures) == ["serving_default"]
    np.testing.assert_allclose(
        loaded.signatures["serving_default"](x=tf2.constant(x))["p"], x @ WEIGHTS, rtol=1e-5
    )


def examples(x):
    def one(row):
        feature = tf.train.Feature(float_list=tf.train.FloatList(value=row))
        return tf.train.Example(features=tf.train.Features(feature={"x": feature}))

    return [one(row).SerializeToString() for row in x]


def test_serialized_examples(trained, tmp_path):
    receiver = export.build_parsing_serving_input_receiver_fn(
        {"x": tf.io.FixedLenFeature([2], tf.float32)}
    )
    path = trained.export_savedmodel(str(tmp_path), receiver).decode()
    x = models.X[:3]
    serialized = examples(x)
    outputs = run_v1(path, "serving_default", {"examples": serialized})
    np.testing.assert_allclose(outputs["p"], x @ WEIGHTS, rtol=1e-5)
    outputs = run_v1(path, "regress", {"inputs": serialized})
    np.testing.assert_allclose(outputs["outputs"], x @ WEIGHTS, rtol=1e-5)
    outputs = run_v1(path, "classify", {"inputs": serialized})
    np.testing.assert_allclose(outputs["scores"], 1 / (1 + np.exp(-x @ WEIGHTS)), rtol=1e-5)
    assert [c[0] for c in outputs["classes"]] == [
        b"0" if y > 0 else b"1" for y in (x @ WEIGHTS)[:, 0]
    ]


def test_alternatives(trained, tmp_path):
    def receiver():
        text = tf.placeholder(tf.string, [None])
        x = tf.io.parse_example(text, {"x": tf.io.FixedLenFeature([2], tf.float32)})["x"]
        return export.ServingInputReceiver({"x": x}, text, {"raw": {"x": x}})

    path = trained.export_saved_model(str(tmp_path), receiver).decode()
    x = models.X[:3]
    outputs = run_v1(path, "serving_default", {"input": examples(x)})
    np.testing.assert_allclose(outputs["p"], x @ WEIGHTS, rtol=1e-5)
    outputs = run_v1(path, "raw:serving_default", {"x": x})
    np.testing.assert_allclose(outputs["p"], x @ WEIGHTS, rtol=1e-5)


def test_a_single_tensor_as_features(tmp_path):
    def of_one_tensor(features, labels, mode, params):
        return models.linear_model({"x": features}, labels, mode, params)

    est = estimator.Estimator(of_one_tensor, str(tmp_path / "model"), params={"lr": 0.1})
    est.train(lambda: (tf.constant(models.X), tf.constant(models.Y)), steps=1)

    def receiver():
        x = tf.placeholder(tf.float32, [None, 2])
        return export.TensorServingInputReceiver(x, x)

    path = est.export_saved_model(str(tmp_path / "export"), receiver).decode()
    outputs = run_v1(path, "serving_default", {"input": models.X})
    np.testing.assert_allclose(outputs["p"], models.X @ est.get_variable_value("w"), rtol=1e-5)


def test_older_checkpoint_text_and_further_files(trained, tmp_path):
    (tmp_path / "words.txt").write_text("a b")
    path = trained.export_saved_model(
        str(tmp_path / "export"),
        raw_receiver(),
        as_text=True,
        assets_extra={"lists/words.txt": str(tmp_path / "words.txt")},
        checkpoint_path=f"{trained.model_dir}/model.ckpt-2",
    ).decode()
    assert os.path.exists(os.path.join(path, "saved_model.pbtxt"))
    with open(os.path.join(path, "assets.extra", "lists", "words.txt")) as file:
        assert file.read() == "a b"
    expected = models.X @ models.descent(2)[1]
    outputs = run_v1(path, "serving_default", {"x": models.X})["p"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


def test_for_evaluation_and_prediction(trained, tmp_path):
    with tf.Graph().as_default():
        supervised = build_raw_supervised_input_receiver_fn(
            {"x": tf.placeholder(tf.float32, [None, 2])},
            {"y": tf.placeholder(tf.float32, [None, 1])},
        )
    path = trained.experimental_export_all_saved_models(
        str(tmp_path), {"infer": raw_receiver(), "eval": lambda: with_one_label(supervised())}
    ).decode()
    with tf.Graph().as_default(), tf.Session() as session:
        signature = tf.saved_model.load(session, ["eval"], path).signature_def["eval"]
        assert set(signature.outputs) == {
            "loss",
            "predictions/p",
            "metrics/mae/value",
            "metrics/mae/update_op",
        }
        feed = {signature.inputs["x"].name: models.X, signature.inputs["y"].name: models.Y}
        loss = session.run(signature.outputs["loss"].name, feed)
        session.run(signature.outputs["metrics/mae/update_op"].name, feed)
        mae = session.run(signature.outputs["metrics/mae/value"].name)
    error = models.X @ WEIGHTS - models.Y
    np.testing.assert_allclose([loss, mae], [np.mean(error**2), np.mean(np.abs(error))], rtol=1e-5)
    run_v1(path, "serving_default", {"x": models.X})


def test_a_metric_that_an_operation_updates(trained, tmp_path):
    def counting(features, labels, mode, params):
        spec = models.linear_model(features, labels, mode, params)
        rows = tf.get_local_variable("rows", [], tf.int32, tf.zeros_initializer())
        update = tf.group(tf.assign_add(rows, tf.shape(labels)[0]))
        return spec._replace(eval_metric_ops={"rows": (rows.read_value(), update)})

    est = estimator.Estimator(counting, trained.model_dir, params={"lr": 0.1})
    with tf.Graph().as_default():
        supervised = build_raw_supervised_input_receiver_fn(
            {"x": tf.placeholder(tf.float32, [None, 2])},
            {"y": tf.placeholder(tf.float32, [None, 1])},
        )
    path = est.export_saved_model(
        str(tmp_path), lambda: with_one_label(supervised()), experimental_mode="eval"
    ).decode()
    with tf.Graph().as_default(), tf.Session() as session:
        signature = tf.saved_model.load(session, ["eval"], path).signature_def["eval"]
        feed = {signature.inputs["x"].name: models.X, signature.inputs["y"].name: models.Y}
        session.run(signature.outputs["metrics/rows/update_op"].name, feed)
        assert session.run(signature.outputs["metrics/rows/value"].name) == len(models.X)


def with_one_label(receiver):
    return receiver._replace(labels=receiver.labels["y"])


def test_a_checkpoint_that_is_deleted_meanwhile(trained, tmp_path):
    """By training that goes on elsewhere, and has saved another."""
    shutil.copytree(trained.model_dir, tmp_path / "model")

    def slow_model_fn(features, labels, mode, params):
        for file in (tmp_path / "model").glob("model.ckpt-6.*"):
            file.unlink()
        newer = os.path.join(tmp_path, "model", "model.ckpt-4")
        tf.train.update_checkpoint_state(str(tmp_path / "model"), newer)
        return model_fn(features, labels, mode, params)

    est = estimator.Estimator(slow_model_fn, str(tmp_path / "model"), params={"lr": 0.1})
    path = est.export_saved_model(str(tmp_path / "out"), raw_receiver()).decode()
    x, weights = models.X[:3], models.descent(4)[1]
    found = run_v1(path, "serving_default", {"x": x})["p"]
    np.testing.assert_allclose(found, x @ weights, rtol=1e-5)
    assert len(os.listdir(tmp_path / "out")) == 1


def test_names_do_not_clash(trained, tmp_path):
    paths = {trained.export_saved_model(str(tmp_path), raw_receiver()) for _ in range(2)}
    assert len(paths) == 2


def test_mistakes(trained, tmp_path):
    new = estimator.Estimator(model_fn, str(tmp_path / "new"))
    with pytest.raises(
        ValueError, match=r"export_saved_model: there is no checkpoint in .*: train f"
    ):
        new.export_saved_model(str(tmp_path), raw_receiver())
    with pytest.raises(TypeError, match="serving_input_receiver_fn should be a function"):
        trained.export_saved_model(str(tmp_path), {"x": 1})
    with pytest.raises(
        ValueError, match="serving_input_receiver_fn returned 3; it should return a S"
    ):
        trained.export_saved_model(str(tmp_path), lambda: 3)
    with pytest.raises(
        ValueError, match="the mode 'test' is not known; it should be one of 'train'"
    ):
        trained.export_saved_model(str(tmp_path), raw_receiver(), experimental_mode="test")
    with pytest.raises(ValueError, match="features and labels are both called x: rename them"):
        build_raw_supervised_input_receiver_fn({"x": 1}, {"x": 2})

    def only_regression(features, labels, mode, params):
        spec = models.linear_model(features, labels, mode, params)
        return estimator.EstimatorSpec(
            mode,
            predictions=spec.predictions,
            export_outputs={"r": export.RegressionOutput(spec.predictions["p"])},
        )

    est = estimator.Estimator(only_regression, trained.model_dir, params={"lr": 0.1})
    with pytest.raises(
        ValueError, match="no default signature: a regression signature takes one st"
    ):
        est.export_saved_model(str(tmp_path), raw_receiver())


def test_loops_that_cannot_be_computed_in_pieces():
    """Those that TensorFlow makes without control flow v2, as after tf.disable_v2_behavior()."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [4, 2])
        tf.disable_control_flow_v2()
        try:
            y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), [0, x])[1]
        finally:
            tf.enable_control_flow_v2()
        signature = tf.saved_model.predict_signature_def({"x": x}, {"y": y})
        with pytest.raises(
            ValueError, match=r"export: the model has loops of .* 1, .*control_flow"
        ):
            any_batch(signature, 4, "export")
        sparse = tf.sparse.placeholder(tf.float32, [4, 2])
        signature = tf.saved_model.predict_signature_def({"x": sparse}, {"y": x})
        with pytest.raises(
            ValueError, match="export: sparse tensors have no rows that could be cut"
        ):
            any_batch(signature, 4, "export")

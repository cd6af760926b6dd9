"""EstimatorSpec and export outputs: what they take and what they refuse."""

import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow.estimator import ModeKeys, export


@pytest.fixture(autouse=True)
def in_a_graph(tf_graph):
    return tf_graph


def test_mode_keys():
    assert (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT) == ("train", "eval", "infer")


def test_fields():
    loss, hook = tf.constant([2.0]), tf.train.SessionRunHook()
    spec = estimator.EstimatorSpec(
        ModeKeys.TRAIN, loss=loss, train_op=tf.no_op(), training_hooks=[hook]
    )
    assert spec.loss.shape == [] and spec.training_hooks == (hook,)
    assert spec.training_chief_hooks == spec.evaluation_hooks == spec.prediction_hooks == ()
    assert spec.predictions == spec.eval_metric_ops == {} and spec.export_outputs is None
    assert isinstance(spec.scaffold, tf.train.Scaffold)
    assert spec._replace(mode="eval").mode == "eval"
    assert estimator.EstimatorSpec._fields == (
        "mode",
        "predictions",
        "loss",
        "train_op",
        "eval_metric_ops",
        "export_outputs",
        "training_chief_hooks",
        "training_hooks",
        "scaffold",
        "evaluation_hooks",
        "prediction_hooks",
    )


def test_a_variable_as_train_op():
    step = tf.train.get_or_create_global_step()
    updated = tf.assign_add(step, 1)
    spec = estimator.EstimatorSpec("train", loss=tf.constant(1.0), train_op=updated)
    assert isinstance(spec.train_op, tf.Operation) or tf.is_tensor(spec.train_op)


LOSS = 1.0


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        (
            {"mode": "test"},
            ValueError,
            r"mode is 'test'; it should be one of ModeKeys.TRAIN \('train'\), ModeKeys.EVAL",
        ),
        (
            {"mode": "train", "train_op": "op"},
            ValueError,
            "for mode 'train' has no loss: give loss=, a scalar tf tensor such as lowering.export",
        ),
        (
            {"mode": "train", "loss": LOSS},
            ValueError,
            "for mode 'train' has no train_op: give train_op=",
        ),
        (
            {"mode": "train", "loss": LOSS, "train_op": [1]},
            TypeError,
            r"train_op is of type list; .* several operations go into one by tf.group",
        ),
        ({"mode": "eval"}, ValueError, "for mode 'eval' has no loss"),
        ({"mode": "infer"}, ValueError, "for mode 'infer' has no predictions: give predictions="),
        (
            {"mode": "infer", "predictions": {"a": 1}},
            TypeError,
            "'a' in predictions is of type int",
        ),
        (
            {"mode": "eval", "loss": [1.0, 2.0]},
            ValueError,
            r"loss has shape \(2,\), but should be a scalar: reduce it",
        ),
        (
            {"mode": "eval", "loss": LOSS, "eval_metric_ops": {"a": 3}},
            TypeError,
            r"'a' in eval_metric_ops is 3; it should be a pair \(value, update operation\)",
        ),
        (
            {"mode": "eval", "loss": LOSS, "eval_metric_ops": [3]},
            TypeError,
            "eval_metric_ops should be a dict .* but is of type list",
        ),
        (
            {"mode": "eval", "loss": LOSS, "evaluation_hooks": [3]},
            TypeError,
            "evaluation_hooks should hold tf.train.SessionRunHooks, but one is of type int",
        ),
        (
            {"mode": "eval", "loss": LOSS, "scaffold": 3},
            TypeError,
            "scaffold should be a tf.train.Scaffold, but is of type int",
        ),
    ],
)
def test_mistakes(arguments, error, text):
    with pytest.raises(error, match=text):
        estimator.EstimatorSpec(**arguments)


def test_tensors_of_a_mesh():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.zeros(mesh, mtf.Shape([]))
    with pytest.raises(
        TypeError, match=r"a tensor of a mesh; give what lowering.export_to_tf_tensor"
    ):
        estimator.EstimatorSpec("eval", loss=x)
    with pytest.raises(TypeError, match=r"'predictions' in predictions is of type Tensor; .* mesh"):
        estimator.EstimatorSpec("infer", predictions=x)


def test_export_outputs():
    tensors = {"a": tf.zeros([2])}
    spec = estimator.EstimatorSpec("infer", predictions=tensors)
    assert spec.export_outputs["serving_default"].outputs == tensors
    only = export.PredictOutput(tensors["a"])
    spec = estimator.EstimatorSpec("infer", predictions=tensors, export_outputs={"one": only})
    assert spec.export_outputs == {"one": only, "serving_default": only}
    assert only.outputs == {"output": tensors["a"]}
    with pytest.raises(ValueError, match="has 'x', 'y', but none of them is the default: give one"):
        estimator.EstimatorSpec("infer", predictions=tensors, export_outputs={"x": only, "y": only})
    with pytest.raises(
        TypeError, match=r"'x' in export_outputs is of type .*; it should be an Exp"
    ):
        estimator.EstimatorSpec("infer", predictions=tensors, export_outputs={"x": tensors["a"]})
    with pytest.raises(TypeError, match="export_outputs should be a dict of ExportOutputs"):
        estimator.EstimatorSpec("infer", predictions=tensors, export_outputs=[only])


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: export.PredictOutput({1: tf.zeros([])}), "the name 1 should be a string"),
        (lambda: export.PredictOutput({"a": 1}), "'a' should be a tensor, but is 1"),
        (lambda: export.RegressionOutput(tf.zeros([2], tf.int32)), "value should be floats"),
        (lambda: export.ClassificationOutput(), "give scores=, classes= or both"),
        (
            lambda: export.ClassificationOutput(scores=tf.zeros([2], tf.int32)),
            "scores should be floats",
        ),
        (lambda: export.ClassificationOutput(classes=tf.zeros([2])), "tf.as_string makes them so"),
        (lambda: export.ServingInputReceiver(None, {}), "features is None"),
        (
            lambda: export.ServingInputReceiver({"a": 1}, {}),
            "features: 'a' should be a tensor, but is 1",
        ),
        (
            lambda: export.ServingInputReceiver(tf.zeros([]), {1: tf.zeros([])}),
            "receiver_tensors: the name 1 should be a string",
        ),
        (
            lambda: export.ServingInputReceiver(tf.zeros([]), tf.zeros([]), 3),
            "receiver_tensors_alternatives should be a dict of dicts",
        ),
        (
            lambda: export.TensorServingInputReceiver({"a": tf.zeros([])}, tf.zeros([])),
            "features should be one tensor, but are a dict: use ServingInputReceiver",
        ),
    ],
)
def test_mistakes_of_outputs_and_receivers(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: estimator.TrainSpec(3), TypeError, "TrainSpec: input_fn should be a function"),
        (
            lambda: estimator.TrainSpec(max, 0),
            ValueError,
            "TrainSpec: max_steps is 0; it should be 1",
        ),
        (lambda: estimator.EvalSpec(max, steps=0), ValueError, "EvalSpec: steps is 0"),
        (lambda: estimator.EvalSpec(max, throttle_secs=-1), ValueError, "throttle_secs is -1"),
        (lambda: estimator.EvalSpec(max, name=3), TypeError, "EvalSpec: name is 3"),
        (
            lambda: estimator.EvalSpec(max, exporters=[3]),
            TypeError,
            "exporters should be Exporters",
        ),
        (
            lambda: estimator.EvalSpec(
                max,
                exporters=[estimator.FinalExporter("a", max), estimator.LatestExporter("a", max)],
            ),
            ValueError,
            "the exporters are called 'a', 'a': each needs a name of its own",
        ),
        (lambda: estimator.LatestExporter("", max), ValueError, "LatestExporter: name is ''"),
        (
            lambda: estimator.LatestExporter("a", max, exports_to_keep=0),
            ValueError,
            "exports_to_keep is 0",
        ),
        (
            lambda: estimator.BestExporter("a"),
            TypeError,
            "serving_input_receiver_fn should be a function",
        ),
        (
            lambda: estimator.BestExporter("a", max, compare_fn=3),
            TypeError,
            "compare_fn should be a func",
        ),
    ],
)
def test_mistakes_of_specs_and_exporters(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_what_is_not_here():
    with pytest.raises(
        AttributeError, match=r"has no DNNClassifier: of tf.estimator it has what run"
    ):
        estimator.DNNClassifier  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'Spec'"):
        estimator.Spec  # noqa: B018
    assert issubclass(estimator.NanLossError, estimator.NanLossDuringTrainingError)
    assert estimator.CheckpointSaverHook is tf.train.CheckpointSaverHook

"""TPUEstimator and its kin, on CPUs."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers.estimator import estimator_models as models

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow.estimator import tpu


def input_fn(params):
    return models.dataset(params["batch_size"])


def eval_input_fn(params):
    return models.dataset(params["batch_size"], repeat=False)


class Tpu:
    """A linear model in the forms of TPUEstimator, which notes what it is given."""

    def __init__(self, host_call=None):
        self.params = []
        self.host_call = host_call

    def __call__(self, features, labels, mode, params):
        self.params.append((mode, {k: v for k, v in params.items() if k != "lr"}))
        weights = tf.get_variable("w", [2, 1], initializer=tf.zeros_initializer())
        outputs = tf.matmul(features["x"], weights)
        if mode == "infer":
            return tpu.TPUEstimatorSpec(mode, predictions={"p": outputs})
        loss = tf.reduce_mean((outputs - labels) ** 2)
        if mode == "eval":

            def metric_fn(outputs, labels):
                return {"mae": tf.metrics.mean(tf.abs(outputs - labels))}

            return tpu.TPUEstimatorSpec(
                mode, loss=loss, eval_metrics=(metric_fn, [outputs, labels])
            )
        step = tf.train.get_global_step()
        call = None
        if self.host_call:
            call = (self.host_call, [tf.reshape(step, [1]), tf.reshape(loss, [1])])
        train_op = tf.train.GradientDescentOptimizer(params["lr"]).minimize(loss, global_step=step)
        return tpu.TPUEstimatorSpec(mode, loss=loss, train_op=train_op, host_call=call)


def make(directory, model_fn, use_tpu=False, every=1, **kwargs):
    config = tpu.RunConfig(
        model_dir=str(directory),
        save_checkpoints_steps=4,
        tpu_config=tpu.TPUConfig(iterations_per_loop=4, experimental_host_call_every_n_steps=every),
    )
    kwargs = {
        "params": {"lr": 0.1},
        "train_batch_size": 8,
        "eval_batch_size": 16,
        "predict_batch_size": 4,
        **kwargs,
    }
    return tpu.TPUEstimator(model_fn, config=config, use_tpu=use_tpu, **kwargs)


def test_trained_evaluated_and_used(tmp_path):
    model = Tpu()
    est = make(tmp_path, model)
    losses = models.Losses()
    est.train(input_fn, hooks=[losses], max_steps=6)
    expected, weights = models.descent(6)
    np.testing.assert_allclose(losses.losses, expected, rtol=1e-5)
    error = models.X @ weights - models.Y
    results = est.evaluate(eval_input_fn, steps=1)
    np.testing.assert_allclose(results["mae"], np.mean(np.abs(error[:16])), rtol=1e-5)
    results = est.evaluate(eval_input_fn)
    np.testing.assert_allclose(results["loss"], np.mean(error**2), rtol=1e-5)
    batches = list(est.predict(eval_input_fn, yield_single_examples=False))
    assert [len(b["p"]) for b in batches] == [4] * 8
    found = [p["p"] for p in est.predict(eval_input_fn)]
    np.testing.assert_allclose(found, models.X @ weights, rtol=1e-5, atol=1e-6)
    assert model.params[0] == ("train", {"batch_size": 8, "use_tpu": False})
    assert model.params[1] == ("eval", {"batch_size": 16, "use_tpu": False})
    assert model.params[3] == ("infer", {"batch_size": 4, "use_tpu": False})
    assert est.params == {"lr": 0.1}


class OwnSpec(tpu.TPUEstimatorSpec):
    """A spec of a user, which overrides the method as TensorFlow declares it."""

    def as_estimator_spec(self):
        return super().as_estimator_spec()


@pytest.mark.parametrize("spec_class", [tpu.TPUEstimatorSpec, OwnSpec])
@pytest.mark.parametrize("every", [1, 2])
def test_host_call(every, spec_class, tmp_path):
    calls = []

    def host_call(step, loss):
        assert step.shape == loss.shape == [1]
        return tf.py_func(lambda x: calls.append(float(x[0])) or np.int64(0), [loss], tf.int64)

    def model_fn(features, labels, mode, params):
        return spec_class(**Tpu(host_call)(features, labels, mode, params)._asdict())

    make(tmp_path, model_fn, every=every).train(input_fn, max_steps=6)
    np.testing.assert_allclose(calls, models.descent(6)[0][every - 1 :: every], rtol=1e-5)


def test_host_call_that_writes_summaries(tmp_path):
    """With the writers of TensorFlow 2 in a graph, as create_host_call of old made them."""

    def host_call(step, loss):
        writer = tf2.summary.create_file_writer(str(tmp_path / "host"))
        with writer.as_default(), tf2.summary.record_if(True):
            tf2.summary.write("host_loss", loss[0], step=step[0])
            return tf.summary.all_v2_summary_ops()

    make(tmp_path / "model", Tpu(host_call)).train(input_fn, max_steps=3)
    found = []
    for path in (tmp_path / "host").glob("events*"):
        for event in tf.train.summary_iterator(str(path)):
            found += [
                float(tf.make_ndarray(value.tensor))
                for value in event.summary.value
                if value.tag == "host_loss"
            ]
    np.testing.assert_allclose(found, models.descent(3)[0], rtol=1e-5)


def mesh_tpu_model(features, labels, mode, params):
    spec = models.mesh_model(features, labels, mode, params)
    if mode == "train":
        return tpu.TPUEstimatorSpec(
            mode,
            loss=spec.loss,
            train_op=spec.train_op,
            training_hooks=list(spec.training_chief_hooks),
        )
    if mode == "eval":

        def metric_fn(loss):
            return {"mean_loss": tf.metrics.mean(loss)}

        return tpu.TPUEstimatorSpec(
            mode,
            loss=spec.loss,
            evaluation_hooks=list(spec.evaluation_hooks),
            eval_metrics=(metric_fn, {"loss": spec.loss}),
        )
    return tpu.TPUEstimatorSpec(
        mode, predictions=spec.predictions, prediction_hooks=list(spec.prediction_hooks)
    )


def test_a_mesh(tmp_path):
    params = {"lr": 0.1, "mesh_shape": "x:2", "layout": "d_in:x", "model_dir": str(tmp_path)}
    est = make(tmp_path, mesh_tpu_model, params=params, eval_batch_size=8, predict_batch_size=8)
    est.train(input_fn, max_steps=3)
    est.train(lambda params: models.dataset(params["batch_size"], skip=3), max_steps=6)
    expected, weights = models.descent(6)
    np.testing.assert_allclose(est.get_variable_value("linear/kernel"), weights, rtol=1e-5)
    error = models.X @ weights - models.Y
    results = est.evaluate(input_fn, steps=4)
    np.testing.assert_allclose(
        [results["loss"], results["mean_loss"]], np.mean(error**2), rtol=1e-4
    )
    found = [p["p"] for p in est.predict(lambda params: input_fn(params).take(4))]
    np.testing.assert_allclose(found, models.X @ weights, rtol=1e-4, atol=1e-6)


def test_scaffold_and_specs_of_the_other_kind(tmp_path):
    made = []

    def model_fn(features, labels, mode, params):
        spec = Tpu()(features, labels, mode, params)

        def scaffold_fn():
            made.append(tf.train.Scaffold())
            return made[-1]

        spec = spec._replace(scaffold_fn=scaffold_fn).as_estimator_spec()
        assert isinstance(spec, estimator.EstimatorSpec) and spec.scaffold is made[-1]
        return spec

    make(tmp_path, model_fn).train(input_fn, max_steps=1)
    assert len(made) == 1


def test_exported_and_warm_started(tmp_path):
    est = make(tmp_path / "a", Tpu(), export_to_tpu=False)
    est.train(input_fn, max_steps=6)

    def receiver():
        x = tf.placeholder(tf.float32, [None, 2])
        return estimator.export.ServingInputReceiver({"x": x}, {"x": x})

    path = est.export_saved_model(str(tmp_path / "export"), receiver).decode()
    loaded = tf2.saved_model.load(path).signatures["serving_default"]
    weights = models.descent(6)[1]
    np.testing.assert_allclose(
        loaded(x=tf2.constant(models.X))["p"], models.X @ weights, rtol=1e-5, atol=1e-6
    )
    other = make(tmp_path / "b", Tpu(), warm_start_from=str(tmp_path / "a"))
    other.train(input_fn, max_steps=1)
    np.testing.assert_allclose(
        other.get_variable_value("w"), models.descent(1, weights)[1], rtol=1e-5
    )


class HParams:
    """As the HParams of old."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def __contains__(self, name):
        return name in self.__dict__

    def add_hparam(self, name, value):
        assert name not in self
        self.__dict__[name] = value

    def set_hparam(self, name, value):
        assert name in self
        self.__dict__[name] = value

    def items(self):
        return self.__dict__.items()

    def __getitem__(self, name):
        return self.__dict__[name]


def test_params_that_are_no_dict(tmp_path):
    model = Tpu()
    make(tmp_path, model, params=HParams(lr=0.1, use_tpu=True)).train(input_fn, max_steps=1)
    assert model.params == [("train", {"batch_size": 8, "use_tpu": False})]


def test_without_batch_sizes(tmp_path):
    model = Tpu()
    est = make(
        tmp_path, model, train_batch_size=None, eval_batch_size=None, predict_batch_size=None
    )
    est.train(models.train_data, max_steps=1)
    assert model.params == [("train", {"use_tpu": False})]


def test_tpus(tmp_path):
    est = make(tmp_path, Tpu(), use_tpu=True)
    text = (
        "use_tpu is True, but there is no TPU, and this estimator runs on CPUs and GPUs: pass "
        "use_tpu=False, for a model_fn with a PlacementMeshImpl; or, for one with a SimdMeshImpl, give "
        "TPUConfig\\(num_shards=N\\), N being the number of processors of the mesh"
    )
    for name, call in [
        ("train", lambda: est.train(input_fn, max_steps=1)),
        ("evaluate", lambda: est.evaluate(input_fn)),
        ("predict", lambda: est.predict(input_fn)),
    ]:
        with pytest.raises(RuntimeError, match=f"TPUEstimator.{name}: {text}"):
            call()
    make(tmp_path, Tpu()).train(input_fn, max_steps=1)
    make(tmp_path, Tpu(), use_tpu=True, eval_on_tpu=False).evaluate(eval_input_fn)


def test_config():
    config = tpu.TPUConfig()
    assert config.iterations_per_loop == 2 and config.per_host_input_for_training == 2
    assert tpu.TPUConfig(per_host_input_for_training=False).per_host_input_for_training == 1
    assert tpu.TPUConfig(iterations_per_loop="60m").iterations_per_loop == "60m"
    pipeline = tpu.InputPipelineConfig
    assert (
        pipeline.PER_SHARD_V1,
        pipeline.PER_HOST_V1,
        pipeline.PER_HOST_V2,
        pipeline.BROADCAST,
        pipeline.SLICED,
    ) == (1, 2, 3, 4, 5)

    class Resolver:
        def master(self):
            return "grpc://somewhere"

    config = tpu.RunConfig(cluster=Resolver())
    assert config.master == config.evaluation_master == "grpc://somewhere"
    assert config.cluster.master() == "grpc://somewhere" and config.tpu_config == tpu.TPUConfig()


@pytest.mark.parametrize(
    "make_it, error, text",
    [
        (
            lambda: tpu.TPUConfig(iterations_per_loop=0),
            ValueError,
            "iterations_per_loop is 0; it should",
        ),
        (
            lambda: tpu.TPUConfig(iterations_per_loop="1d"),
            ValueError,
            "iterations_per_loop is '1d'",
        ),
        (
            lambda: tpu.TPUConfig(num_shards=0),
            ValueError,
            "num_shards is 0; it should be 1 or more",
        ),
        (
            lambda: tpu.TPUConfig(num_cores_per_replica=3),
            ValueError,
            "num_cores_per_replica=3 is none of None, 1, 2, 4",
        ),
        (
            lambda: tpu.RunConfig(tpu_config=3),
            TypeError,
            "tpu_config should be a TPUConfig, but is 3",
        ),
        (
            lambda: tpu.RunConfig(cluster=1, master=""),
            ValueError,
            "cluster and master are both given",
        ),
        (
            lambda: make("/x", Tpu(), params={"batch_size": 1}),
            ValueError,
            "params has 'batch_size', which the estimator sets: leave it out, and give train_batch_size",
        ),
        (
            lambda: make("/x", Tpu(), params=[1]),
            TypeError,
            "params should be a dict, to which batch_siz",
        ),
        (
            lambda: make("/x", Tpu(), train_batch_size=0),
            ValueError,
            "train_batch_size=0 must be an integer",
        ),
        (
            lambda: make("/x", Tpu(), predict_batch_size="a"),
            ValueError,
            "predict_batch_size='a' must be an integer",
        ),
        (
            lambda: make("/x", Tpu(), embedding_config_spec=1),
            ValueError,
            "embedding_config_spec should be",
        ),
        (
            lambda: tpu.TPUEstimator(Tpu(), config=estimator.RunConfig()),
            TypeError,
            "config should be an estimator.tpu.RunConfig",
        ),
        (
            lambda: tpu.TPUEstimatorSpec("x"),
            ValueError,
            "TPUEstimatorSpec: mode is 'x'; it should be one of ModeKeys",
        ),
        (
            lambda: tpu.TPUEstimatorSpec("train", loss=1.0),
            ValueError,
            "for mode 'train' has no train_op",
        ),
        (lambda: tpu.TPUEstimatorSpec("infer"), ValueError, "for mode 'infer' has no predictions"),
        (lambda: tpu.TPUEstimatorSpec("eval"), ValueError, "for mode 'eval' has no loss"),
        (
            lambda: tpu.TPUEstimatorSpec("eval", loss=1.0, eval_metrics={"a": 1}),
            ValueError,
            r"eval_metrics should be a pair \(function, tensors\), but is",
        ),
        (
            lambda: tpu.TPUEstimatorSpec("eval", loss=1.0, eval_metrics=(lambda a: 1, [1, 2])),
            ValueError,
            "the function of eval_metrics cannot take 2 tensors: too many positional arguments",
        ),
        (
            lambda: tpu.TPUEstimatorSpec("train", loss=1.0, host_call=3),
            ValueError,
            "host_call should be a pair",
        ),
        (
            lambda: tpu.TPUEstimatorSpec("eval", loss=1.0, host_call=(max, 3)),
            ValueError,
            "the tensors of host_call should be a list or a dict, but are 3",
        ),
        (
            lambda: tpu.TPUEstimatorSpec("eval", loss=1.0, scaffold_fn=3),
            TypeError,
            "scaffold_fn should be a function, but is 3",
        ),
        (
            lambda: tpu.TPUEstimatorSpec(
                "eval", loss=1.0, eval_metrics=(lambda: 3, [])
            ).as_estimator_spec(),
            ValueError,
            r"the function of eval_metrics should return a dict of \(value, update operation\), but return",
        ),
    ],
)
def test_mistakes(make_it, error, text, tf_graph):
    with pytest.raises(error, match=text):
        make_it()


def test_an_input_function_without_params(tmp_path):
    with pytest.raises(
        ValueError, match="input_fn train_data takes no argument `params`, in which"
    ):
        make(tmp_path, Tpu()).train(models.train_data, max_steps=1)


def test_random_numbers_of_a_mesh(tmp_path):
    """Random numbers of a mesh program are there in training, under the seed of the RunConfig."""

    def model_fn(features, labels, mode, params):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.reduce_sum(mtf.random_uniform(mesh, mtf.Shape([mtf.Dimension("d", 4)])))
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "d:x", ["cpu:0"] * 2)
        lowering = mtf.Lowering(graph, {mesh: impl})
        loss = lowering.export_to_tf_tensor(x)
        return tpu.TPUEstimatorSpec(
            mode, loss=loss, train_op=tf.assign_add(tf.train.get_global_step(), 1)
        )

    found = []
    for name in ("a", "b"):
        losses = models.Losses()
        make(tmp_path / name, model_fn).train(input_fn, hooks=[losses], max_steps=3)
        found.append(losses.losses)
    assert found[0] == found[1] and len(set(found[0])) == 3

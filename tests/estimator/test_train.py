"""Training: numbers, where it ends, what it writes, and from where it goes on."""

import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from google.protobuf import text_format
from helpers.estimator import estimator_models as models

from mesh_tensorflow import estimator


def make(directory, model_fn=models.linear_model, params=None, warm_start_from=None, **config):
    config = {"save_checkpoints_steps": 4, "log_step_count_steps": 3, **config}
    return estimator.Estimator(
        model_fn,
        str(directory),
        estimator.RunConfig(**config),
        params or {"lr": 0.1},
        warm_start_from,
    )


def checkpoints(directory):
    state = tf.train.get_checkpoint_state(str(directory))
    return [int(path.rsplit("-", 1)[-1]) for path in state.all_model_checkpoint_paths]


def test_numbers(tmp_path):
    losses = models.Losses()
    est = make(tmp_path)
    assert est.train(models.train_data, hooks=[losses], max_steps=10) is est
    expected, weights = models.descent(10)
    np.testing.assert_allclose(losses.losses, expected, rtol=1e-5)
    assert losses.steps == list(range(1, 11))
    np.testing.assert_allclose(est.get_variable_value("w"), weights, rtol=1e-5)
    assert sorted(est.get_variable_names()) == ["global_step", "w"]
    assert checkpoints(tmp_path) == [0, 4, 8, 10]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_graph_is_written_as_text(wanted, tmp_path):
    graphs = []
    scaffold = tf.train.Scaffold(init_fn=lambda *_: graphs.append(tf.get_default_graph()))

    def model_fn(features, labels, mode, params):
        return models.linear_model(features, labels, mode, params)._replace(scaffold=scaffold)

    make(tmp_path, model_fn, checkpoint_save_graph_def=wanted).train(models.train_data, steps=1)
    path = tmp_path / "graph.pbtxt"
    assert path.exists() == wanted
    metas = sorted(found.name for found in tmp_path.glob("*.meta"))
    assert metas == (["model.ckpt-0.meta", "model.ckpt-1.meta"] if wanted else [])
    if wanted:
        written = text_format.Parse(path.read_text(), tf.GraphDef())
        assert written == graphs[0].as_graph_def(add_shapes=True)


def test_steps_go_on_and_max_steps_is_where_it_ends(tmp_path):
    est = make(tmp_path)
    est.train(models.train_data, steps=3)
    est.train(models.train_data, steps=3)
    assert est.get_variable_value("global_step") == 6
    est.train(models.train_data, max_steps=8)
    assert est.get_variable_value("global_step") == 8
    calls = []
    est.train(lambda: calls.append(1), max_steps=8)
    est.train(lambda: calls.append(1), max_steps=5)
    assert not calls


def test_resumed_in_the_same_data(tmp_path):
    """`skip(global_step)` goes on in the data where training stands."""

    def data():
        return models.dataset().skip(tf.train.get_global_step())

    whole, parts = models.Losses(), [models.Losses() for _ in range(3)]
    make(tmp_path / "whole").train(data, hooks=[whole], max_steps=9)
    for i, part in enumerate(parts):
        make(tmp_path / "parts").train(data, hooks=[part], max_steps=3 * i + 3)
    assert [loss for part in parts for loss in part.losses] == whole.losses


def random_model(features, labels, mode):
    weights = tf.get_variable("w", [2, 1])
    loss = tf.reduce_mean((tf.matmul(features["x"], weights) - labels) ** 2)
    loss += tf.random.uniform([])
    train_op = tf.assign_add(tf.train.get_global_step(), 1)
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


@pytest.mark.slow
def test_seeds(tmp_path):
    def losses(name, **config):
        hook = models.Losses()
        make(tmp_path / name, random_model, **config).train(
            models.train_data, hooks=[hook], steps=3
        )
        return hook.losses

    first = losses("a")
    assert first == losses("b") == losses("c", tf_random_seed=1) != losses("d", tf_random_seed=2)


def test_data_that_end_end_the_training(tmp_path):
    est = make(tmp_path)
    est.train(models.eval_data)
    assert est.get_variable_value("global_step") == 4
    assert checkpoints(tmp_path) == [0, 4]


def test_no_data(tmp_path, caplog):
    est = make(tmp_path)
    with caplog.at_level("WARNING", logger="tensorflow"):
        est.train(lambda: models.eval_data().take(0))
    assert "input_fn gave no data" in caplog.text


def test_inputs_of_all_forms(tmp_path):
    def tensors():
        return {"x": tf.constant(models.X)}, tf.constant(models.Y)

    def with_arguments(mode, params, config):
        assert mode == "train" and params == {"lr": 0.1} and config.model_dir == str(tmp_path)
        return tensors()

    est = make(tmp_path)
    est.train(tensors, steps=1)
    est.train(with_arguments, steps=1)
    assert est.get_variable_value("global_step") == 2


def test_a_model_function_without_labels_and_a_callable_object(tmp_path):
    class Model:
        def __call__(self, features, mode, config):
            assert mode == "train" and config.save_checkpoints_steps == 4
            return estimator.EstimatorSpec(
                mode,
                loss=tf.reduce_mean(features),
                train_op=tf.assign_add(tf.train.get_global_step(), 1),
            )

    make(tmp_path, Model()).train(lambda: tf.zeros([3]), steps=2)
    assert checkpoints(tmp_path) == [0, 2]


def test_params_are_copies(tmp_path):
    def model_fn(features, labels, mode, params):
        params["nested"]["lr"] = 5.0
        return models.linear_model(features, labels, mode, {"lr": 0.1})

    given = {"nested": {"lr": 1.0}}
    est = make(tmp_path, model_fn, given)
    est.params["nested"]["lr"] = 3.0
    est.train(models.train_data, steps=1)
    assert given == est.params == {"nested": {"lr": 1.0}}


def test_summaries(tmp_path):
    make(tmp_path, save_summary_steps=5).train(models.train_data, max_steps=10)
    found = models.events(tmp_path)
    assert {tag for _, tag, _ in found} == {"user", "loss", "global_step/sec"}
    steps = [step for step, tag, _ in found if tag == "loss"]
    assert steps == [1, 6]
    assert steps == [step for step, tag, _ in found if tag == "user"]
    losses, _ = models.descent(10)
    values = [value for _, tag, value in found if tag == "loss"]
    np.testing.assert_allclose(values, [losses[step - 1] for step in steps], rtol=1e-5)


def test_no_summaries_and_no_checkpoints(tmp_path):
    make(
        tmp_path,
        save_summary_steps=None,
        save_checkpoints_steps=None,
        log_step_count_steps=None,
    ).train(models.train_data, max_steps=10)
    assert models.events(tmp_path) == [] and tf.train.latest_checkpoint(str(tmp_path)) is None


def test_two_trainings_in_one_directory(tmp_path, caplog):
    """The one whose newest checkpoint is no longer the newest says so, once."""

    class Another(tf.train.SessionRunHook):
        """Copies a checkpoint to another name, as if another program had got further."""

        def after_run(self, run_context, run_values):
            if checkpoints(tmp_path)[-1] != 0:
                manager = tf.train.get_checkpoint_state(str(tmp_path))
                for path in tmp_path.glob("model.ckpt-4.*"):
                    path.with_name(path.name.replace("-4.", "-100.")).write_bytes(path.read_bytes())
                tf.train.update_checkpoint_state(
                    str(tmp_path),
                    "model.ckpt-100",
                    [*manager.all_model_checkpoint_paths, "model.ckpt-100"],
                )

    make(tmp_path / "alone").train(models.train_data, max_steps=12)
    assert "another program" not in caplog.text
    make(tmp_path).train(models.train_data, max_steps=20, hooks=[Another()])
    [told] = [r.getMessage() for r in caplog.records if "another program" in r.getMessage()]
    assert "model.ckpt-100 was written since this training wrote model.ckpt-4: " in told
    assert "give it a model_dir of its own" in told


def test_how_many_checkpoints_are_kept(tmp_path):
    make(tmp_path, save_checkpoints_steps=1, keep_checkpoint_max=2).train(
        models.train_data, max_steps=6
    )
    assert checkpoints(tmp_path) == [5, 6]


class Recorder(tf.train.CheckpointSaverListener):
    def __init__(self):
        self.calls = []

    def before_save(self, session, global_step_value):
        self.calls.append(("before", int(global_step_value)))

    def end(self, session, global_step_value):
        self.calls.append(("end", int(global_step_value)))


def test_listeners(tmp_path):
    recorder = Recorder()
    make(tmp_path).train(models.train_data, max_steps=6, saving_listeners=[recorder])
    assert recorder.calls == [("before", 0), ("before", 4), ("before", 6), ("end", 6)]


class Fill(tf.train.SessionRunHook):
    """Sets a variable once there is a session, as MtfRestoreHook does."""

    def begin(self):
        self.op = tf.trainable_variables()[0].assign([[5.0], [6.0]])

    def after_create_session(self, session, coord):
        session.run(self.op)


@pytest.mark.parametrize("which", ["training_hooks", "training_chief_hooks"])
def test_savers_come_after_hooks_that_fill_variables(which, tmp_path):
    def model_fn(features, labels, mode, params):
        spec = models.linear_model(features, labels, mode, params)
        return spec._replace(**{which: [Fill()]})

    make(tmp_path, model_fn).train(models.train_data, max_steps=2)
    first = tf.train.load_checkpoint(str(tmp_path / "model.ckpt-0"))
    np.testing.assert_array_equal(first.get_tensor("w"), [[5.0], [6.0]])


# -- warm start


def test_warm_start(tmp_path):
    make(tmp_path / "a").train(models.train_data, max_steps=4)
    _, weights = models.descent(4)
    losses = models.Losses()
    est = make(tmp_path / "b", warm_start_from=str(tmp_path / "a"))
    est.train(models.train_data, hooks=[losses], max_steps=2)
    expected, after = models.descent(2, weights)
    np.testing.assert_allclose(losses.losses, expected, rtol=1e-5)
    # Not a second time: now there is a checkpoint.
    est.train(models.train_data, max_steps=3)
    expected, _ = models.descent(1, after)
    np.testing.assert_allclose(est.get_variable_value("w"), models.descent(1, after)[1], rtol=1e-5)


def renamed_model(features, labels, mode, params):
    with tf.variable_scope("new"):
        tf.get_variable("bias", [3], initializer=tf.ones_initializer())
        return models.linear_model(features, labels, mode, params)


def test_warm_start_of_chosen_and_renamed_variables(tmp_path):
    make(tmp_path / "a").train(models.train_data, max_steps=4)
    settings = estimator.WarmStartSettings(
        str(tmp_path / "a"), vars_to_warm_start="new/w", var_name_to_prev_var_name={"new/w": "w"}
    )
    est = make(tmp_path / "b", renamed_model, warm_start_from=settings)
    est.train(models.train_data, max_steps=1)
    expected = models.descent(1, models.descent(4)[1])[1]
    np.testing.assert_allclose(est.get_variable_value("new/w"), expected, rtol=1e-5)
    np.testing.assert_array_equal(est.get_variable_value("new/bias"), [1, 1, 1])


def two_weights_model(features, labels, mode, params):
    tf.get_variable("copy", [2, 1], initializer=tf.zeros_initializer())
    return models.linear_model(features, labels, mode, params)


@pytest.mark.parametrize("end", ["", ":0", "$"])
def test_warm_start_of_two_weights_that_were_one(end, tmp_path):
    make(tmp_path / "a").train(models.train_data, max_steps=4)
    settings = estimator.WarmStartSettings(
        str(tmp_path / "a"), [f"w{end}", f"copy{end}"], var_name_to_prev_var_name={"copy": "w"}
    )
    est = make(tmp_path / "b", two_weights_model, warm_start_from=settings)
    est.train(models.train_data, max_steps=1)
    _, weights = models.descent(4)
    np.testing.assert_allclose(est.get_variable_value("copy"), weights, rtol=1e-5)
    expected = models.descent(1, weights)[1]
    np.testing.assert_allclose(est.get_variable_value("w"), expected, rtol=1e-5)


def test_warm_start_of_what_is_not_there(tmp_path):
    make(tmp_path / "a").train(models.train_data, max_steps=1)
    est = make(tmp_path / "b", renamed_model, warm_start_from=str(tmp_path / "a"))
    with pytest.raises(ValueError, match=r"has no new/bias, new/w; it has global_step, w\. Choose"):
        est.train(models.train_data, max_steps=1)
    est = make(tmp_path / "b", warm_start_from=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"warm start: there is no checkpoint at .*nowhere"):
        est.train(models.train_data, max_steps=1)
    with pytest.raises(ValueError, match="var_name_to_vocab_info should be empty"):
        estimator.WarmStartSettings("a", var_name_to_vocab_info={"w": 1})
    with pytest.raises(TypeError, match="warm_start_from should be a path or a WarmStartSettings"):
        make(tmp_path / "b", warm_start_from=3)


# -- mistakes


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"steps": 0}, ValueError, "train: steps=0 must be an integer of at least 1, or None"),
        ({"max_steps": -1}, ValueError, "train: max_steps=-1 must be"),
        ({"steps": 2.5}, ValueError, "train: steps=2.5 must be"),
        (
            {"steps": 1, "max_steps": 2},
            ValueError,
            "train: steps is 1 and max_steps is 2: give steps to go on from where training stands",
        ),
        (
            {"hooks": [3]},
            TypeError,
            "hooks should hold tf.train.SessionRunHooks, but one is of type int",
        ),
        (
            {"steps": 1, "saving_listeners": [3]},
            TypeError,
            "saving_listeners should hold tf.train.CheckpointSaverListeners",
        ),
        ({"input_fn": "data"}, TypeError, "train: input_fn should be a function .*but is 'data'"),
        (
            {"input_fn": lambda needed: None},
            ValueError,
            "input_fn <lambda> needs needed, but is given only mode, params and config",
        ),
        ({"input_fn": lambda: None}, ValueError, r"input_fn gives no features \(but None\)"),
        ({"input_fn": lambda: ({}, 1)}, ValueError, "input_fn gives no features"),
        (
            {"input_fn": lambda: (1, 2, 3)},
            ValueError,
            "input_fn gives a tuple of 3; it should give",
        ),
    ],
)
def test_arguments(arguments, error, text, tmp_path):
    arguments = {"input_fn": models.train_data, **arguments}
    with pytest.raises(error, match=text):
        make(tmp_path).train(**arguments)


@pytest.mark.parametrize(
    "model_fn, error, text",
    [
        (lambda labels: 0, ValueError, "model_fn <lambda> takes no argument `features`"),
        (
            lambda features, more: 0,
            ValueError,
            "model_fn <lambda> takes more, but is given only features, labels, mode, params, config",
        ),
        (
            lambda features, labels, /: 0,
            ValueError,
            "model_fn <lambda> takes no argument `features`: it is called by names",
        ),
        (
            lambda labels, /, features: 0,
            ValueError,
            "model_fn <lambda> takes labels by position, but is given only features, labels",
        ),
        (3, TypeError, "model_fn should be a function"),
    ],
)
def test_model_functions_that_cannot_be_called(model_fn, error, text, tmp_path):
    with pytest.raises(error, match=text):
        make(tmp_path, model_fn)


@pytest.mark.parametrize(
    "model_fn, error, text",
    [
        (
            lambda features, labels: None,
            ValueError,
            "model_fn returned None in mode 'train'; it should",
        ),
        (
            lambda features: None,
            ValueError,
            "takes no argument `labels`, but input_fn returns labels in mode 'train'",
        ),
        (
            lambda features, labels, mode: estimator.EstimatorSpec(
                "infer", predictions=tf.zeros([1])
            ),
            ValueError,
            "called with mode 'train', but returned an EstimatorSpec of mode 'infer'",
        ),
    ],
)
def test_model_functions_that_return_something_else(model_fn, error, text, tmp_path):
    with pytest.raises(error, match=text):
        make(tmp_path, model_fn).train(models.train_data, steps=1)


def test_listeners_without_checkpoints(tmp_path):
    est = make(tmp_path, save_checkpoints_steps=None)
    with pytest.raises(ValueError, match="there are saving_listeners, such as that of train_and_"):
        est.train(models.train_data, steps=1, saving_listeners=[Recorder()])


def test_directories(tmp_path, monkeypatch):
    config = estimator.RunConfig(model_dir=str(tmp_path))
    assert estimator.Estimator(models.linear_model, config=config).model_dir == str(tmp_path)
    assert estimator.Estimator(models.linear_model, tmp_path, config).model_dir == str(tmp_path)
    with pytest.raises(ValueError, match="model_dir is '/b', but the RunConfig says"):
        estimator.Estimator(models.linear_model, "/b", config)
    with pytest.raises(ValueError, match="model_dir is empty"):
        estimator.Estimator(models.linear_model, "")
    with pytest.raises(TypeError, match=r"config should be a RunConfig, but is \{\}"):
        estimator.Estimator(models.linear_model, "/b", {})
    monkeypatch.setenv("TF_CONFIG", json.dumps({"model_dir": str(tmp_path)}))
    assert estimator.Estimator(models.linear_model).model_dir == str(tmp_path)
    est = estimator.Estimator(models.linear_model, str(tmp_path))
    assert est.eval_dir() == str(tmp_path / "eval")
    assert est.eval_dir("x") == str(tmp_path / "eval_x")


def test_without_a_checkpoint(tmp_path):
    est = make(tmp_path)
    assert est.latest_checkpoint() is None
    for call in (est.get_variable_names, lambda: est.get_variable_value("w")):
        with pytest.raises(ValueError, match=f"there is no checkpoint in {tmp_path}: train first"):
            call()
    est.train(models.train_data, steps=1)
    with pytest.raises(ValueError, match="there is no 'v'; there are global_step, w"):
        est.get_variable_value("v")

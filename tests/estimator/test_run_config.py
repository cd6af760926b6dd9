"""RunConfig, and what it reads from TF_CONFIG; values as tf.estimator of TensorFlow 2.15 had them."""

import json

import pytest
import tensorflow.compat.v1 as tf

from mesh_tensorflow import estimator
from mesh_tensorflow.estimator._run import device_fn

CLUSTER = {"chief": ["a:1"], "ps": ["p:1"], "worker": ["w:1", "w:2"]}
FIELDS = (
    "task_type",
    "task_id",
    "is_chief",
    "master",
    "evaluation_master",
    "num_ps_replicas",
    "num_worker_replicas",
    "global_id_in_cluster",
)
READ = [
    ({}, ("worker", 0, True, "", "", 0, 1, 0)),
    ({"task": {"type": "worker", "index": 0}}, ("worker", 0, True, "", "", 0, 1, 0)),
    (
        {"session_master": "sm", "eval_session_master": "em"},
        ("worker", 0, True, "sm", "em", 0, 1, 0),
    ),
    (
        {"cluster": CLUSTER, "task": {"type": "chief", "index": 0}},
        ("chief", 0, True, "grpc://a:1", "", 1, 3, 0),
    ),
    (
        {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}},
        ("worker", 1, False, "grpc://w:2", "", 1, 3, 2),
    ),
    (
        {"cluster": CLUSTER, "task": {"type": "ps", "index": 0}},
        ("ps", 0, False, "grpc://p:1", "", 1, 3, 3),
    ),
    (
        {"cluster": CLUSTER, "task": {"type": "evaluator", "index": 1}},
        ("evaluator", 1, False, "", "", 0, 0, None),
    ),
    (
        {"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0}},
        ("chief", 0, True, "", "", 0, 1, 0),
    ),
    (
        {"cluster": {"master": ["a:1"], "ps": ["p:1"]}, "task": {"type": "master", "index": 0}},
        ("master", 0, True, "grpc://a:1", "", 1, 1, 0),
    ),
]


@pytest.mark.parametrize("tf_config, expected", READ)
def test_tf_config(tf_config, expected, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(tf_config))
    config = estimator.RunConfig()
    assert tuple(getattr(config, name) for name in FIELDS) == expected
    is_evaluator = expected[0] == "evaluator"
    assert config.cluster_spec.as_dict() == ({} if is_evaluator else tf_config.get("cluster", {}))


@pytest.mark.parametrize(
    "master, expected",
    [({}, "grpc://w:2"), ({"master": "m"}, "m"), ({"master": "m", "evaluation_master": "e"}, "e")],
)
def test_tpu_config_evaluates_where_it_trains(master, expected, monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}})
    )
    config = estimator.tpu.RunConfig(**master)
    assert config.evaluation_master == expected
    assert config.master == master.get("master", "grpc://w:2")


def test_a_worker_sees_its_own_devices_and_those_of_servers(monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}})
    )
    session_config = estimator.RunConfig().effective_session_config
    assert list(session_config.device_filters) == ["/job:ps", "/job:worker/task:1"]
    monkeypatch.delenv("TF_CONFIG")
    session_config = estimator.RunConfig().effective_session_config
    assert list(session_config.device_filters) == [] and session_config.allow_soft_placement


@pytest.mark.parametrize(
    "tf_config, text",
    [
        ("{", "TF_CONFIG is not JSON .* Unset it for a run of one process"),
        ("[1]", "TF_CONFIG should be a JSON object"),
        (
            {"task": {"type": "chief", "index": 0}},
            'has no "cluster", so its "task" should be worker 0, but it is chief 0',
        ),
        ({"cluster": CLUSTER}, 'has a "cluster", so it needs "task"'),
        ({"cluster": CLUSTER, "task": {"type": "worker"}}, 'has a "cluster", so it needs "task"'),
        (
            {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}},
            '"cluster" should have one "chief" with one address',
        ),
        (
            {"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief", "index": 0}},
            '"cluster" should have one "chief" with one address',
        ),
        (
            {"cluster": CLUSTER, "task": {"type": "zz", "index": 0}},
            'the "type" of "task" is \'zz\', but "cluster" has chief, ps, worker',
        ),
        (
            {"cluster": CLUSTER, "task": {"type": "worker", "index": 2}},
            '"task" is worker 2, but "cluster" has only 2 of worker, counted from 0',
        ),
        *[
            (
                {"cluster": CLUSTER, "task": {"type": kind, "index": index}},
                f'the "index" of "task" is {index}; it should be a whole number',
            )
            for kind, index in (("worker", -1), ("worker", 0.5), ("evaluator", 0.5))
        ],
        (
            {
                "cluster": {"chief": ["a:1"], "worker": ["b:1", "a:1"]},
                "task": {"type": "worker", "index": 0},
            },
            "a:1 is the address of several tasks",
        ),
        ({"service": 3}, '"service" should be an object'),
    ],
)
def test_tf_config_that_makes_no_sense(tf_config, text, monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG", tf_config if isinstance(tf_config, str) else json.dumps(tf_config)
    )
    with pytest.raises(ValueError, match=text):
        estimator.RunConfig()


def test_defaults():
    config = estimator.RunConfig()
    expected = {
        "model_dir": None,
        "tf_random_seed": None,
        "save_summary_steps": 100,
        "save_checkpoints_steps": None,
        "save_checkpoints_secs": 600,
        "session_config": None,
        "keep_checkpoint_max": 5,
        "keep_checkpoint_every_n_hours": 10000,
        "log_step_count_steps": 100,
        "train_distribute": None,
        "device_fn": None,
        "protocol": None,
        "eval_distribute": None,
        "experimental_max_worker_delay_secs": None,
        "session_creation_timeout_secs": 7200,
        "checkpoint_save_graph_def": True,
        "service": None,
    }
    assert {name: getattr(config, name) for name in expected} == expected


def saving(config):
    return config.save_checkpoints_steps, config.save_checkpoints_secs


def test_how_often_to_save():
    make = estimator.RunConfig
    assert saving(make(save_checkpoints_steps=5)) == (5, None)
    assert saving(make(save_checkpoints_secs=5)) == (None, 5)
    assert saving(make(save_checkpoints_steps=None)) == (None, None)
    assert saving(make(save_checkpoints_steps=None, save_checkpoints_secs=7)) == (None, 7)
    assert saving(make().replace(save_checkpoints_steps=3)) == (3, None)
    assert saving(make(save_checkpoints_steps=5).replace(model_dir="/x")) == (5, None)
    with pytest.raises(
        ValueError, match="save_checkpoints_steps is 1 and save_checkpoints_secs is 2"
    ):
        make(save_checkpoints_steps=1, save_checkpoints_secs=2)


def test_replace():
    config = estimator.tpu.RunConfig(tpu_config=estimator.tpu.TPUConfig(iterations_per_loop=7))
    new = config.replace(model_dir="/new", tf_random_seed=3)
    assert (new.model_dir, new.tf_random_seed, new.tpu_config.iterations_per_loop) == ("/new", 3, 7)
    assert config.model_dir is None
    with pytest.raises(
        ValueError, match=r"RunConfig.replace: task_id cannot be replaced; what can: "
    ):
        config.replace(task_id=1)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"tf_random_seed": "a"}, "tf_random_seed is 'a'; it should be an integer"),
        ({"save_summary_steps": -1}, "save_summary_steps is -1; it should be 0 or more"),
        ({"log_step_count_steps": 0}, "log_step_count_steps is 0; it should be 1 or more"),
        ({"keep_checkpoint_max": -1}, "keep_checkpoint_max is -1"),
        ({"session_config": 3}, "session_config should be a tf.ConfigProto, but is 3"),
        ({"device_fn": 3}, "device_fn should be a function, but is 3"),
        ({"train_distribute": 3}, "train_distribute should be None: a mesh and a layout say how"),
        ({"model_dir": ""}, "model_dir is empty"),
    ],
)
def test_mistakes(arguments, text):
    with pytest.raises(ValueError, match="RunConfig: " + text):
        estimator.RunConfig(**arguments)


def test_two_directories(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"model_dir": "/a"}))
    assert estimator.RunConfig().model_dir == estimator.RunConfig("/a").model_dir == "/a"
    with pytest.raises(ValueError, match="model_dir is '/b', but TF_CONFIG says '/a'"):
        estimator.RunConfig("/b")


def test_device_fn(tmp_path):
    devices = []

    def model_fn(features, labels, mode):
        devices.append(tf.zeros([]).device)
        step = tf.assign_add(tf.train.get_global_step(), 1)
        return estimator.EstimatorSpec(mode, loss=tf.constant(1.0), train_op=step)

    config = estimator.RunConfig(device_fn=lambda op: "/device:CPU:0")
    estimator.Estimator(model_fn, str(tmp_path), config).train(lambda: tf.zeros([1]), steps=1)
    assert devices == ["/device:CPU:0"]


def test_variables_on_parameter_servers(monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 1}})
    )
    with tf.Graph().as_default(), tf.device(device_fn(estimator.RunConfig())):
        variable = tf.get_variable("v", [2])
        value = tf.zeros([2])
    assert variable.device == "/job:ps/task:0" and value.device == "/job:worker/task:1"


def test_a_subclass_that_changes_a_property():
    class Config(estimator.RunConfig):
        is_chief = estimator.RunConfig.is_chief.getter(lambda self: False)

        @estimator.RunConfig.model_dir.setter
        def model_dir(self, path):
            self._values["model_dir"] = path

    config = Config(model_dir="a")
    config.model_dir = "b"
    assert (config.model_dir, config.is_chief) == ("b", False)

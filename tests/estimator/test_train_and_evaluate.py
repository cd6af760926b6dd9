"""Training with evaluations of checkpoints, and exporters."""

import json
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.estimator import estimator_models as models

from mesh_tensorflow import estimator


def make(directory, **config):
    config = {"save_checkpoints_steps": 4, **config}
    return estimator.Estimator(
        models.linear_model, str(directory), estimator.RunConfig(**config), {"lr": 0.1}
    )


def receiver():
    x = tf.placeholder(tf.float32, [None, 2])
    return estimator.export.ServingInputReceiver({"x": x}, {"x": x})


class Recorder(estimator.Exporter):
    """Notes what it is told."""

    def __init__(self):
        self.calls = []

    @property
    def name(self):
        return "recorder"

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        self.calls.append(
            (
                os.path.relpath(export_path, estimator.model_dir),
                os.path.basename(checkpoint_path),
                int(eval_result["global_step"]),
                is_the_final_export,
            )
        )
        return str(len(self.calls)).encode()


def run(est, max_steps, exporters=None, **spec):
    spec = {"throttle_secs": 0, **spec}
    return estimator.train_and_evaluate(
        est,
        estimator.TrainSpec(models.train_data, max_steps=max_steps),
        estimator.EvalSpec(models.eval_data, exporters=exporters, **spec),
    )


def call(step, final=False):
    return ("export/recorder", f"model.ckpt-{step}", step, final)


@pytest.mark.slow
def test_an_evaluation_after_each_checkpoint(tmp_path):
    recorder = Recorder()
    metrics, exported = run(make(tmp_path), 10, recorder)
    assert recorder.calls == [call(4), call(8), call(10, True)]
    assert exported == [b"3"]
    error = models.X @ models.descent(10)[1] - models.Y
    assert metrics["global_step"] == 10
    np.testing.assert_allclose(metrics["loss"], np.mean(error**2), rtol=1e-4)
    steps = [step for step, tag, _ in models.events(tmp_path / "eval") if tag == "loss"]
    assert steps == [4, 8, 10]


def test_the_last_checkpoint_is_evaluated_once(tmp_path):
    recorder = Recorder()
    run(make(tmp_path), 8, recorder)
    assert recorder.calls == [call(4), call(8, True)]


@pytest.mark.slow
def test_resumed_and_then_done(tmp_path):
    run(make(tmp_path), 6)
    recorder = Recorder()
    run(make(tmp_path), 10, recorder)
    assert recorder.calls == [call(10, True)]
    assert run(make(tmp_path), 10, recorder) is None


def test_throttled(tmp_path):
    recorder = Recorder()
    run(make(tmp_path, save_checkpoints_steps=2), 10, recorder, throttle_secs=600)
    assert recorder.calls == [call(2), call(10, True)]


def test_until_the_data_end(tmp_path):
    recorder = Recorder()
    estimator.train_and_evaluate(
        make(tmp_path),
        estimator.TrainSpec(lambda: models.train_data().take(4)),
        estimator.EvalSpec(models.eval_data, exporters=[recorder], throttle_secs=0),
    )
    assert recorder.calls == [call(4), call(4, True)]


def directories(path):
    return sorted(os.listdir(path)) if os.path.exists(path) else []


@pytest.mark.slow
def test_exporters(tmp_path):
    exporters = [
        estimator.LatestExporter("latest", receiver, exports_to_keep=2),
        estimator.FinalExporter("final", receiver),
        estimator.BestExporter("best", receiver, exports_to_keep=1),
    ]
    _, exported = run(make(tmp_path), 12, exporters)
    assert len(directories(tmp_path / "export" / "latest")) == 2
    for name, result in zip(["latest", "final", "best"], exported):
        assert directories(tmp_path / "export" / name)[-1] == os.path.basename(result.decode())
    assert len(directories(tmp_path / "export" / "final")) == 1
    assert len(directories(tmp_path / "export" / "best")) == 1


@pytest.mark.slow
def test_best_is_compared_with_earlier_runs(tmp_path):
    def best(compare_fn):
        return estimator.BestExporter("best", receiver, compare_fn=compare_fn)

    def larger(best_eval_result, current_eval_result):
        return current_eval_result["loss"] > best_eval_result["loss"]

    run(make(tmp_path), 8, best(larger))
    # The loss falls, so the first was the largest.
    assert len(directories(tmp_path / "export" / "best")) == 1
    _, exported = run(make(tmp_path), 12, best(larger))
    assert exported == [None] and len(directories(tmp_path / "export" / "best")) == 1


@pytest.mark.parametrize("task", [("chief", 0), ("evaluator", 0)])
def test_several_processes(task, tmp_path, monkeypatch):
    cluster = {"chief": ["a:1"], "worker": ["b:1"]}
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": task[0], "index": task[1]}})
    )
    with pytest.raises(
        ValueError, match=f"one process, but TF_CONFIG makes this {task[0]} 0 of sev"
    ):
        run(make(tmp_path), 2)


@pytest.mark.parametrize("hooks", ["training_chief_hooks", "training_hooks"])
def test_a_saver_of_the_model_function(hooks, tmp_path):
    """Model functions of a mesh save by a hook of their own, and their RunConfig saves nothing."""

    def model_fn(features, labels, mode, params):
        spec = models.linear_model(features, labels, mode, params)
        if mode != estimator.ModeKeys.TRAIN:
            return spec
        saver = tf.train.Saver(tf.global_variables())
        hook = tf.train.CheckpointSaverHook(str(tmp_path), save_steps=4, saver=saver)
        return spec._replace(**{hooks: [hook]})

    recorder = Recorder()
    config = estimator.RunConfig(save_checkpoints_steps=None, save_checkpoints_secs=None)
    run(estimator.Estimator(model_fn, str(tmp_path), config, {"lr": 0.1}), 8, recorder)
    assert recorder.calls == [call(4), call(8, final=True)]


def test_mistakes(tmp_path):
    with pytest.raises(ValueError, match="such as that of train_and_evaluate, but nothing is save"):
        run(make(tmp_path, save_checkpoints_steps=None), 2)
    with pytest.raises(TypeError, match="saving_listeners should hold"):
        estimator.TrainSpec(models.train_data, saving_listeners=[3])
    with pytest.raises(TypeError, match="train_spec should be of type TrainSpec, but is 3"):
        estimator.train_and_evaluate(make(tmp_path), 3, 4)

"""Trainings that are stopped: by signals, and by a loss that is not a number."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.estimator import estimator_models as models
from helpers.paths import environment

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow._stop_signals import StopSignals, tell_of_other

PROGRAM = """
    import tensorflow.compat.v1 as tf
    from helpers.estimator import estimator_models as models
    from mesh_tensorflow import estimator

    class Tell(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            print("step", flush=True)

    config = estimator.RunConfig(save_checkpoints_steps=1000000)
    params = dict(lr=1e-6, mesh_shape="x:2", layout="d_in:x", model_dir={directory!r},
                  save_steps=1000000)
    est = estimator.Estimator(models.mesh_model, {directory!r}, config, params)
    est.train(models.train_data, hooks=[Tell()])
    print("not reached")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_saves_and_ends(number, code, tmp_path):
    program = textwrap.dedent(PROGRAM).format(directory=str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    for _ in range(5):
        assert process.stdout.readline() == "step\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode in (code, 128 + number), err
    assert "not reached" not in out
    path = tf.train.latest_checkpoint(str(tmp_path))
    step = int(path.rsplit("-", 1)[-1])
    assert step >= 5
    name = signal.Signals(number).name
    assert f"{name}: training stops after this step and saves." in err
    assert f"training stopped by {name} after step {step}; the latest checkpoint is {path}" in err
    # What was trained is what was saved.
    values = tf.train.load_checkpoint(path)
    assert values.get_tensor("global_step") == step
    expected = models.descent(step, lr=1e-6)[1]
    np.testing.assert_allclose(values.get_tensor("linear/kernel"), expected, rtol=1e-3)


class Send(tf.train.SessionRunHook):
    """Sends signals to this process after a step."""

    def __init__(self, *signals):
        self.signals = signals

    def after_run(self, run_context, run_values):
        for number in self.signals:
            os.kill(os.getpid(), number)


def linear(directory, lr=0.1, model_fn=models.linear_model):
    config = estimator.RunConfig(save_checkpoints_steps=100)
    return estimator.Estimator(model_fn, str(directory), config, {"lr": lr})


def test_handlers_are_put_back(tmp_path):
    def mine(number, frame):
        pass

    old = signal.signal(signal.SIGTERM, mine)
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        est = linear(tmp_path)
        est.train(models.train_data, max_steps=2)
        assert signal.getsignal(signal.SIGTERM) is mine
        with pytest.raises(SystemExit) as stopped:
            est.train(models.train_data, hooks=[Send(signal.SIGTERM)], max_steps=20)
        assert stopped.value.code == 143
        assert str(stopped.value).startswith("training stopped by SIGTERM after step 3; the latest")
        assert est.latest_checkpoint().endswith("model.ckpt-3")
        assert signal.getsignal(signal.SIGTERM) is mine
        with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT after step 4"):
            est.train(models.train_data, hooks=[Send(signal.SIGINT)], max_steps=20)
        assert signal.getsignal(signal.SIGINT) is interrupt
        est.train(models.train_data, max_steps=6)
        assert est.get_variable_value("global_step") == 6
    finally:
        signal.signal(signal.SIGTERM, old)


def test_a_second_signal_ends_at_once(tmp_path):
    est = linear(tmp_path)
    with pytest.raises(SystemExit, match="stopped at once by a second SIGTERM"):
        est.train(models.train_data, hooks=[Send(signal.SIGTERM, signal.SIGTERM)], max_steps=20)
    assert est.latest_checkpoint().endswith("model.ckpt-0")


def test_training_in_another_thread(tmp_path):
    """There Python takes no signals, and training leaves them alone."""
    est = linear(tmp_path)
    thread = threading.Thread(target=lambda: est.train(models.train_data, max_steps=3))
    thread.start()
    thread.join()
    assert est.get_variable_value("global_step") == 3


@pytest.mark.parametrize("own_first", [True, False])
def test_a_signal_that_another_process_received_too_is_no_second_one(own_first):
    """A cluster's manager sends one to each process, and these tell each other."""
    noted = []
    send = [lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: tell_of_other(signal.SIGTERM)]
    with StopSignals(noted.append) as signals:
        for call in send if own_first else send[::-1]:
            call()
        assert noted == [signal.SIGTERM] == [signals.received] and not signals.is_of_other
        with pytest.raises(SystemExit, match="stopped at once by a second SIGTERM"):
            send[0]()


# -- loss


def nan_model(features, labels, mode, params):
    """Of a mesh; the loss is NaN from step 3 on."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    dim = mtf.Dimension("d", 4)
    weights = mtf.get_variable(mesh, "w", [dim], initializer=tf.zeros_initializer())
    update = mtf.assign_add(weights, mtf.ones_like(weights))
    step = tf.train.get_global_step()
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "d:x", ["cpu:0"] * 2)
    lowering = mtf.Lowering(graph, {mesh: impl})
    loss = tf.where(step < 2, 1.0, float("nan"))
    with tf.control_dependencies([loss, lowering.lowered_operation(update)]):
        train_op = tf.assign_add(step, 1)
    saver = tf.train.Saver(tf.global_variables())
    tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
    saver_hook = tf.train.CheckpointSaverHook(
        params["model_dir"],
        save_steps=2,
        saver=saver,
        listeners=[mtf.MtfCheckpointSaverListener(lowering)],
    )
    hooks = [mtf.MtfRestoreHook(lowering), saver_hook]
    if params.get("warn"):
        hooks.append(tf.train.NanTensorHook(loss, fail_on_nan_loss=False))
    return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_chief_hooks=hooks)


def test_nan_saves_apart_and_raises(tmp_path):
    est = estimator.Estimator(nan_model, str(tmp_path), params={"model_dir": str(tmp_path)})
    with pytest.raises(estimator.NanLossDuringTrainingError) as raised:
        est.train(models.train_data, max_steps=10)
    error = raised.value
    kept = str(tmp_path / "nan" / "model.ckpt-3")
    assert isinstance(error, estimator.NanLossError) and error.step == 3
    assert str(error).startswith(
        f"the loss is NaN in step 3. The variables after it were saved as {kept}. Training resumes "
        f"from {tmp_path / 'model.ckpt-2'}. Look for"
    )
    values = tf.train.load_checkpoint(kept)
    np.testing.assert_array_equal(values.get_tensor("w"), [3, 3, 3, 3])
    # Training starts from before.
    assert est.latest_checkpoint().endswith("model.ckpt-2")
    np.testing.assert_array_equal(est.get_variable_value("w"), [2, 2, 2, 2])


def test_nan_with_a_hook_that_only_warns(tmp_path, caplog):
    params = {"model_dir": str(tmp_path), "warn": True}
    est = estimator.Estimator(nan_model, str(tmp_path), params=params)
    with caplog.at_level("WARNING", logger="tensorflow"):
        est.train(models.train_data, max_steps=10)
    kept = str(tmp_path / "nan" / "model.ckpt-3")
    assert f"the loss is NaN in step 3. The variables after it were saved as {kept}" in caplog.text
    assert f"Training resumes from {tmp_path / 'model.ckpt-2'}" in caplog.text
    assert est.latest_checkpoint().endswith("model.ckpt-2")


def test_nan_without_checkpoints(tmp_path):
    def model_fn(features, labels, mode):
        step = tf.assign_add(tf.train.get_global_step(), 1)
        return estimator.EstimatorSpec(mode, loss=tf.constant(float("nan")), train_op=step)

    config = estimator.RunConfig(save_checkpoints_steps=None)
    est = estimator.Estimator(model_fn, str(tmp_path), config)
    with pytest.raises(
        estimator.NanLossError, match=r"step 1\. The variables .*ckpt-1\. Look for a"
    ):
        est.train(models.train_data, max_steps=10)

"""A program as users of tf.estimator wrote it runs with one import changed, and resumes."""

import re

import pytest
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.paths import WORKERS

SCRIPT = WORKERS / "classic_mnist_script.py"


def run(model_dir, *flags):
    sizes = ["--batch_size=100", "--hidden_size=32"]
    done = processes.python(SCRIPT, f"--model_dir={model_dir}", *sizes, *flags)
    steps = [int(s) for s in re.findall(r"'global_step': (?:np\.int64\()?(\d+)", done.stdout)]
    accuracies = [
        float(a) for a in re.findall(r"'accuracy': (?:np\.float32\()?([\d.]+)", done.stdout)
    ]
    assert "predicted 300" in done.stdout
    return steps, accuracies, done.stderr


@pytest.mark.slow
def test_trained_evaluated_and_resumed(tmp_path):
    # 1437 images for training, so 14 steps an epoch. The script counts a step even when the data
    # end, as nothing makes the count wait for data.
    steps, accuracies, log = run(tmp_path, "--train_epochs=8", "--epochs_between_evals=4")
    assert steps[0] in (56, 57) and steps[1] in (112, 113, 114)
    assert accuracies[0] > 0.5 and accuracies[1] > 0.8
    assert "accuracy = " in log and "Loss for final step" in log
    again, more, _ = run(
        tmp_path,
        "--train_epochs=2",
        "--epochs_between_evals=2",
        "--mesh_shape=all:2",
        "--layout=batch:all",
    )
    assert again[0] - steps[1] in (28, 29) and more[0] > accuracies[0]
    names = {name for name, _ in tf.train.list_variables(str(tmp_path))}
    assert {"global_step", "conv0/kernel", "hidden1/kernel", "logits/bias"} <= names
    assert not any("_slice_" in name for name in names)

"""The MNIST example: what it prints, how it resumes, what it refuses."""

import re
import sys

import pytest
from helpers import noise, processes
from helpers.paths import EXAMPLES

sys.path.append(str(EXAMPLES))

import mnist

SMALL = ["--hidden_size=16", "--batch_size=300"]


def run(*flags, code=0):
    done = processes.run(EXAMPLES / "mnist.py", *SMALL, *flags)
    assert done.returncode == code, done.stderr
    noise.check(done)
    return done.stdout if code == 0 else done.stderr


def epochs(text):
    """Returns the lines of epochs, without the seconds."""
    return [line.rsplit("  ", 1)[0] for line in text.splitlines() if line.startswith("epoch ")]


@pytest.mark.slow
def test_prints_the_layout_and_a_line_for_each_epoch(tmp_path):
    text = run("--train_epochs=3", "--epochs_between_evals=2", f"--plot={tmp_path / 'mnist.png'}")
    assert "scikit-learn digits" in text
    assert re.search(
        r"hidden1/kernel +4x4x7x7x16 +2x2x7x7x16 +row_blocks over b1, col_blocks ov", text
    )
    assert re.search(r"Conv2dOperation +shift +b1=2 ", text)
    lines = epochs(text)
    assert [line[:10] for line in lines] == ["epoch 1/3 ", "epoch 2/3 ", "epoch 3/3 "]
    assert ["test accuracy" in line for line in lines] == [False, True, True]
    assert re.search(r"final test accuracy [\d.]+% after [\d.]+ s of training", text)
    assert (tmp_path / "mnist.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_resumes_on_another_mesh_as_if_it_had_not_stopped(tmp_path):
    whole = epochs(run("--train_epochs=2", f"--model_dir={tmp_path / 'whole'}", "--seed=3"))
    parts = tmp_path / "parts"
    run("--train_epochs=2", "--eval_steps=1", f"--model_dir={parts}", "--seed=3")
    (parts / "checkpoint").write_text(
        'model_checkpoint_path: "model.ckpt-4"\nall_model_checkpoint_paths: "model.ckpt-4"\n'
    )
    again = run(
        "--train_epochs=2",
        f"--model_dir={parts}",
        "--seed=3",
        "--mesh_shape=all:2",
        "--layout=batch:all",
    )
    assert epochs(again) == whole[1:]
    done = run("--train_epochs=2", f"--model_dir={parts}")
    assert f"{parts} has been trained for 2 epochs already" in done
    other = run("--train_epochs=3", f"--model_dir={parts}", "--hidden_size=32", code=2)
    assert "is of another network: hidden1/kernel should be of shape [4, 4, 7, 7, 32]" in other


@pytest.mark.slow
def test_the_layout_that_is_the_fastest_gives_the_same_results(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = ["--train_epochs=2", "--seed=3"]
    done = processes.run(EXAMPLES / "mnist.py", *SMALL, *flags, "--layout=auto")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^layout .*: the fastest of \d that were tried$", done.stderr, re.M)
    assert done.stdout.count("hidden1/kernel ") == 1  # the table of the chosen layout alone
    assert epochs(done.stdout) == epochs(run(*flags))


@pytest.mark.parametrize(
    "flag, text",
    [
        (
            {"layout": "rows:b1"},
            "--layout splits 'rows' over 'b1', but the network has no dimension",
        ),
        ({"batch_size": 9999}, "--batch_size is 9999: there are 1438 examples"),
        ({"train_epochs": 0}, "--train_epochs is 0: it has to be 1 or more"),
        ({"mesh_impl": "gspmd"}, "--mesh_impl is 'gspmd': choose one of placement, pjrt"),
        ({"optimizer": "lion"}, "--optimizer is 'lion': choose one of adafactor, adam, sgd"),
        ({"plot": "/none/such.png"}, "--plot is /none/such.png: there is no such directory"),
    ],
)
def test_mistakes(flag, text):
    with pytest.raises(ValueError) as raised:
        mnist.run(mnist.Options(hidden_size=16, **flag))
    assert text in str(raised.value)

"""What programs write serves their users: no more than some lines of others, in pipes and terminals."""

import re
import time

import pytest
from helpers import noise, processes
from helpers.paths import EXAMPLES

SMALL_TRANSFORMER = [
    "--gin_param=d_model = 16",
    "--gin_param=d_ff = 32",
    "--gin_param=num_layers = 1",
    "--batch_size=4",
    "--train_steps=4",
    "--mesh_shape=all:2",
    "--layout=batch:all",
]
# Of each example: arguments with which it is short, and what its last lines are like.
ROWS = {
    "gaussian_random_field": (["--quick"], r"^measured and given spectrum differ by \d\.\d+ "),
    "mesh_impl_of_your_own": ([], r"rows:2,cols:3 +d_in:rows,d_out:cols"),
    "mnist": (
        ["--train_epochs=2", "--hidden_size=8", "--batch_size=600", "--mesh_shape=b1:2;b2:1"],
        r"^final test accuracy",
    ),
    "pick_a_layout": (
        ["--model=mnist", "--layouts=2", "--runs=1", "--rounds=1", "--placement=shared"],
        r"^rank correlation",
    ),
    "toy_model_tpu": (["--train_steps=4", "--mesh_shape=all:2"], r"^step 4  test loss"),
    "train_with_fit": (["--steps=4", "--hidden_size=8"], r"^test accuracy"),
    "transformer_lm": (SMALL_TRANSFORMER, r"^held out, by the model: "),
    "transformer_seq2seq": (SMALL_TRANSFORMER, r"^exact match"),
    "unet_3d": (
        [
            "--quick",
            "--num_data_aug=4",
            "--num_training_loops=1",
            "--num_train_iterations_per_loop=2",
            "--network_depth=1",
        ],
        r"^lesion Dice",
    ),
}
SHORT = {("toy_model_tpu", True)}


@pytest.mark.every("*-True*")
@pytest.mark.slow("toy_model_tpu*")
@pytest.mark.parametrize(
    "name, terminal",
    [
        pytest.param(name, terminal, marks=[] if (name, terminal) in SHORT else [pytest.mark.slow])
        for name in ROWS
        for terminal in (False, True)
    ],
)
def test_examples(name, terminal):
    arguments, last = ROWS[name]
    lines = noise.run(EXAMPLES / f"{name}.py", *arguments, terminal=terminal)
    assert any(re.search(last, line) for line in lines), lines


def test_every_example_is_here():
    programs = {
        path.stem for path in EXAMPLES.glob("*.py") if '__name__ == "__main__"' in path.read_text()
    }
    # Run by test_finetune_fact.py, where a real model is, and by test_pjrt_export.py.
    assert programs == {*ROWS, "finetune_fact", "run_exported"}


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    "name",
    sorted({*ROWS, "finetune_fact"} - {"mesh_impl_of_your_own"}),  # without flags
)
def test_help_and_mistakes(name):
    # argparse ends with 0 after help and 2 after a mistake, absl with 1 after both.
    for argument, codes, text in [
        ("--help", (0, 1), f"python examples/{name}.py"),
        ("--nonsense=3", (1, 2), "nonsense"),
    ]:
        done = processes.run(str(EXAMPLES / f"{name}.py"), argument)
        assert done.returncode in codes
        assert text in done.stdout + done.stderr
        assert not noise.noise_in(done.stderr.splitlines())


# A first program: in eager code, and in a session; TensorFlow is imported by the package.
FIRST = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
import mesh_tensorflow as mtf
mesh = mtf.Mesh(mtf.Graph(), "mesh")
print(mtf.ones(mesh, "a:4").numpy())
import sys
import tensorflow as tf
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    print(session.run(tf.constant(7)))
print("of the program", file=sys.stderr)
"""


def python(program, **variables):
    names = {"TF_CPP_MIN_LOG_LEVEL", "TF_CPP_VMODULE", "CUDA_VISIBLE_DEVICES"}
    without = names - set(variables)
    return processes.python("-W", "error", "-c", program, code=None, without=without, **variables)


@pytest.mark.slow
def test_a_script_of_ones_own():
    done = python(FIRST)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1. 1. 1. 1.]", "7"]
    assert done.stderr == "of the program\n"


@pytest.mark.slow
def test_messages_that_are_asked_for_and_errors_are_shown():
    done = python("import mesh_tensorflow", TF_CPP_MIN_LOG_LEVEL="0")
    assert done.returncode == 0 and "cpu_feature_guard" in done.stderr
    # What is written while TensorFlow is imported, and is not about the machine.
    done = python(
        "import os, sys\nclass Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'tensorflow':\n            os.write(2, b'E0000 x.cc:1] of others\\n')\n"
        "sys.meta_path.insert(0, Finder())\nimport mesh_tensorflow\nraise ValueError('wrong')"
    )
    assert done.returncode == 1 and "E0000 x.cc:1] of others" in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: wrong")


# --- What counts them ---

NOISY = """
print("a result")
import sys, warnings, logging
import tensorflow as tf
print("WARNING: All log messages before absl::InitializeLog() is called", file=sys.stderr)
print("2026-01-01 00:00:00.000001: W tensorflow/core/x.cc:3] End", file=sys.stderr)
print("I0000 00:00:1795406556.979286   24074 cudart_stub.cc:31] Could not", file=sys.stderr)
warnings.warn("is old")
tf.compat.v1.logging.warning("of TensorFlow")
logging.error("of Python")
print("train: 3/4 steps, 2 steps/s, 1 s left", file=sys.stderr)
print("something", file=sys.stderr)
"""


def test_lines_that_do_not_serve_are_counted():
    done = processes.run("-c", NOISY)
    found = noise.noise_in(done.stdout.splitlines())
    found += noise.noise_in(done.stderr.splitlines(), everything=True)
    kinds = [kind for kind, _ in found]
    assert kinds.count("C++ log line") == 3 and kinds.count("unknown") == 1, found
    assert "warning" in kinds and kinds.count("Python log line") == 2, found
    with pytest.raises(
        AssertionError, match=r"lines do not serve the user(.|\n)*unknown: something"
    ):
        noise.check(done, most=3)
    noise.check(done, most=10)


def test_lines_that_run_into_each_other_are_found():
    shown, mixed = noise.lines_of("first\r\n\r\x1b[Kstep 1\r\r\x1b[Klog\r\nstep 2 of many\rlog\r\n")
    assert shown == ["first", "log", "logp 2 of many", ""]
    assert mixed == ["logp 2 of many"]
    with pytest.raises(AssertionError, match="runs into"):
        noise.screen("a live line\rlog\n")


def test_a_program_in_a_terminal_may_not_hang():
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        noise.run("-c", "import time; time.sleep(60)", terminal=True, timeout=1)
    assert time.monotonic() - begin < 30

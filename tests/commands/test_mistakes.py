"""Mistakes in gin files, bindings and data end a program with one message and exit code 2."""

import os
import pathlib
from unittest import mock

import pytest
from helpers import processes

MAIN = "mesh_tensorflow.transformer.main"
AUTO_MTF = "mesh_tensorflow.auto_mtf"
FILES = {
    "good.gin": """
utils.run.mesh_shape = "a:1"
utils.run.layout_rules = ""
utils.run.vocabulary = @vocabulary.ByteVocabulary()
utils.run.sequence_length = 8
""",
    "no_value.gin": "utils.run.mesh_shape = 'a:1'\nutils.run.layout_rules =\n",
    "open.gin": "utils.run.mesh_shape = 'a:1'\nutils.run.train_steps = [3\n",
    "name.gin": "utils.run.mesh_shape = 'a:1'\nutils.rum.layout_rules = ''\n",
    "users.py": "raise ValueError('of the user')\n",
}

# By name: program, arguments, parts of the message.
MISTAKES = {
    "no_file": (MAIN, ["--gin_file=none.gin"], ["Unable to open file: none.gin. Searched"]),
    "no_value": (
        MAIN,
        ["--gin_file=no_value.gin"],
        ["no_value.gin, line 2: Unable to parse value.", "utils.run.layout_rules ="],
    ),
    "open": (MAIN, ["--gin_file=open.gin"], ["open.gin: a bracket or a string is not closed"]),
    "name": (
        MAIN,
        ["--gin_file=name.gin"],
        ["No configurable matching 'utils.rum'", 'In file "name.gin", line 2', "utils.run"],
    ),
    "parameter": (
        MAIN,
        ["--gin_param=utils.run.trian_steps = 3"],
        ["'utils.run' doesn't have a parameter named 'trian_steps'", "names are train_steps"],
    ),
    "statement": (MAIN, ["--gin_param=nothing"], ["--gin_param: Couldn't parse statement"]),
    "kind": (
        MAIN,
        ["--gin_param=utils.run.optimizer = 'adam'"],
        ["utils.run: optimizer is 'adam'; it should be a class such as @optimize.Adafactor"],
    ),
    "mode": (MAIN, ["--gin_param=utils.run.mode = 'evl'"], ["unknown mode 'evl'", "'eval'"]),
    "shape": (MAIN, ["--gin_param=utils.run.mesh_shape = 'a:b'"], ["malformed shape 'a:b'"]),
    "module": (
        MAIN,
        ["--module_import=nowhere.at_all"],
        ["--module_import=nowhere.at_all: there is no module nowhere"],
    ),
    "auto_mtf": (
        AUTO_MTF,
        ["--mesh_shape=a:2", "--gin_param=language_model.layer = 3"],
        ["'language_model' doesn't have a parameter named 'layer'", "The nearest names are layers"],
    ),
}
MOST_LINES = 5


@pytest.fixture
def directory(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(program, arguments, directory):
    given = [f"--model_dir={directory}/model"] if program == MAIN else []
    if program == MAIN and not any(a.startswith("--gin_file") for a in arguments):
        given.append("--gin_file=good.gin")
    return processes.run("-m", program, *given, *arguments, cwd=directory)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("name", MISTAKES)
def test_one_message(name, directory):
    program, arguments, parts = MISTAKES[name]
    done = run(program, arguments, directory)
    assert done.returncode == 2, done.stderr
    for part in parts:
        assert part in done.stderr
    assert len(done.stderr.splitlines()) <= MOST_LINES, done.stderr
    assert "Traceback" not in done.stderr
    assert "In call to configurable" not in done.stderr


def test_traceback_if_wanted(directory):
    with mock.patch.dict(os.environ, MTF_TRACEBACK="1"):
        done = run(*MISTAKES["mode"][:2], directory)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr and "unknown mode" in done.stderr


def test_errors_of_the_users_code_keep_their_traceback(directory):
    done = run(MAIN, ["--module_import=users"], directory)
    assert done.returncode == 1
    assert str(pathlib.Path(directory, "users.py")) in done.stderr
    assert "ValueError: of the user" in done.stderr


_INTERRUPTED_WITHIN_TENSORFLOW = """
import os, signal, sys
import tensorflow as tf
from mesh_tensorflow._programs import mistakes_told

def interrupt_while_an_error_is_made(frame, event, _):
    if frame.f_code.co_name == "__init__" and frame.f_code.co_filename.endswith("errors_impl.py"):
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)

with mistakes_told("waiting"):
    sys.setprofile(interrupt_while_an_error_is_made)
    while True:
        tf.train.latest_checkpoint("none_such")
"""


def test_ctrl_c_within_tensorflows_bindings(tmp_path):
    """Where pybind11 makes a RuntimeError of it."""
    done = processes.run("-c", _INTERRUPTED_WITHIN_TENSORFLOW, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "waiting: stopped by Ctrl-C\n")


@pytest.mark.parametrize(
    ("folder", "code", "before"),
    [("site-packages", 2, "program: [Errno 2]"), ("programs", 1, "Traceback (most recent call")],
)
def test_libraries_are_wherever_packages_are_installed(folder, code, before, tmp_path):
    """A virtual environment may use packages of the system, or of a user."""
    program = tmp_path / folder / "program.py"
    program.parent.mkdir()
    program.write_text(
        "from mesh_tensorflow._programs import mistakes_told\n"
        "with mistakes_told('program'):\n    open('none_such')\n"
    )
    done = processes.run(str(program), cwd=tmp_path)
    assert done.returncode == code
    assert before in done.stderr
    assert done.stderr.endswith("[Errno 2] No such file or directory: 'none_such'\n")

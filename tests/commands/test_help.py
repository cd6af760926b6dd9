"""Programs answer `--help`, and tell mistakes in flags in a line."""

import re

import pytest
from helpers import processes
from helpers.paths import TESTS

from mesh_tensorflow import __main__ as programs
from mesh_tensorflow.transformer import main
from mesh_tensorflow.transformer.utils import _run

# By program: a flag that it has, arguments that are wrong, and what is said about them.
PROGRAMS = {
    "auto_mtf": ("--mesh_shape", ["--mesh_shape=a:2", "--layuot=b:a"], "--layuot=b:a"),
    "auto_mtf.measure": (
        "--runs",
        ["--output=x", "--runs=0"],
        "--runs is 0: it has to be 1 or more",
    ),
    "bert.run_classifier": (
        "--task_name",
        ["--eval_batch_size=many"],
        "flag --eval_batch_size=many",
    ),
    "bert.run_pretraining": (
        "--max_predictions_per_seq",
        ["--bert_config_file=c", "--output_dir=o", "--mode=trian"],
        "Unknown mode: 'trian'",
    ),
    "bert.run_squad": (
        "--train_file",
        ["--vocab_file=v", "--do_train"],
        "--bert_config_file, --output_dir must be given",
    ),
    "experimental.model_executor": (
        "--lr_drop_rate",
        ["lr = 0.1"],
        "unexpected arguments 'lr = 0.1': flags begin with --",
    ),
    "experimental.offline_data_aug": (
        "--process_no",
        ["--process_no=0"],
        "--input_file_pattern, --output_folder must be given",
    ),
    "finetune": (
        "--save_adapters",
        ["--model=m", "--train_file=a", "--steps=1"],
        "give --output, a folder for the model, or --save_adapters",
    ),
    "generate": (
        "--repetition_penalty",
        ["--model=m", "--prompt=a", "--batch_size=0"],
        "--batch_size is 0: it has to be 1 or more",
    ),
    "launch": ("--runtime", ["--processes", "0", "x.py"], "--processes must be at least 1, got 0"),
    "report": (
        "--module_import",
        ["--gin_file=x.gin", "--output=x.pdf"],
        "--output=x.pdf: the report is a file that ends in .html",
    ),
    "testing.conformance": (
        "--only",
        ["a:b", "--layouts", "-1"],
        "--layouts is -1: it has to be 0 or more",
    ),
    "transformer.convert": (
        "to-huggingface",
        ["to-huggingface", "a"],
        "the following arguments are required: directory",
    ),
    "transformer.main": ("--gin_param", ["--gin_fil=x.gin"], "Did you mean: gin_file"),
}
MOST_LINES = 30  # argparse repeats the usage, with a line for each flag or two


def run(*command):
    """Returns exit code, stdout and stderr of a new process of Python."""
    return processes.python(*command, code=None, timeout=400)


def test_every_program_is_here():
    assert set(PROGRAMS) == set(programs.PROGRAMS)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_help(program):
    _, out, err = run("-m", f"mesh_tensorflow.{program}", "--help")
    assert PROGRAMS[program][0] in out and not err


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_mistakes_in_flags(program):
    _, arguments, message = PROGRAMS[program]
    code, out, err = run("-m", f"mesh_tensorflow.{program}", *arguments)
    assert (code, out) == (2, "")
    assert message in err and f"mesh_tensorflow.{program}" in err
    assert "Traceback" not in err and len(err.splitlines()) <= MOST_LINES


@pytest.mark.slow
def test_the_package_lists_its_programs():
    code, out, err = run("-m", "mesh_tensorflow")
    assert (code, err) == (0, "")
    assert {line.split()[0] for line in out.splitlines() if line.startswith("  ")} == set(PROGRAMS)


@pytest.mark.slow
def test_installed_commands(tmp_path):
    project = (TESTS.parent / "pyproject.toml").read_text(encoding="utf-8")
    section = project.split("[project.scripts]\n")[1].split("\n\n")[0]
    installed = dict(re.findall(r'^([\w-]+) = "(.*)"$', section, re.MULTILINE))
    assert set(installed) == {command for command, _ in programs.PROGRAMS.values()} - {""}
    assert set(installed.values()) == {"mesh_tensorflow.__main__:run_command"}
    script = tmp_path / "mtf-launch"
    script.write_text("from mesh_tensorflow.__main__ import run_command\nrun_command()\n")
    code, out, err = run(script, "--help")
    assert code == 0 and "--processes" in out and not err
    code, _, err = run(script, "--processes=0")
    assert code == 2 and "must be at least 1, got 0" in err
    (tmp_path / "one.py").write_text("print('one of them')")
    assert run(script, "--processes=1", tmp_path / "one.py") == (0, "one of them\n", "")
    # As with `python -m`, modules of the current directory are found.
    (tmp_path / "mine.py").write_text("def build():\n    raise ValueError('found')\n")
    (tmp_path / "bin").mkdir()
    script = script.rename(tmp_path / "bin" / "mtf-auto")
    command = [script, "--mesh_shape=a:2", "--model=mine:build"]
    done = processes.python(*command, code=None, timeout=400, cwd=tmp_path)
    assert done.stderr == "found\n"


@pytest.mark.slow
def test_help_has_examples_as_they_are_and_defaults_that_say_something():
    _, out, _ = run("-m", "mesh_tensorflow.auto_mtf", "--help")
    assert "\npython -m mesh_tensorflow.auto_mtf --mesh_shape=rows:4,cols:8 \\\n    --gin" in out
    assert "(default: 4)" in out and "(default: None)" not in out and "(default: [])" not in out


def test_every_mode_of_the_transformers_program_is_in_its_help():
    assert all(f"\n  {mode} " in main.__doc__ for mode in _run._MODES)

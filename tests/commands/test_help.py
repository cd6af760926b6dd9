"""Programs answer `--help`, and mistakes in flags, before they import TensorFlow."""

import importlib
import os
import re
import subprocess
import sys

import pytest
from absl import flags
from helpers.paths import TESTS, environment

from mesh_tensorflow import _command_lines
from mesh_tensorflow._command_lines import transformer
from mesh_tensorflow._command_lines.flag_table import FlagProgram
from mesh_tensorflow.auto_mtf import measure
from mesh_tensorflow.transformer.convert import _weights
from mesh_tensorflow.transformer.utils import _run

PROGRAMS = sorted(_command_lines.PROGRAMS)
MOST_SECONDS = 0.5

# By program: arguments that are wrong, and what is said about them.
MISTAKES = {
    "mesh_tensorflow.transformer.main": (
        ["--gin_fil=x.gin"],
        "unknown flag --gin_fil; did you mean --gin_file?",
    ),
    "mesh_tensorflow.bert.run_classifier": (
        ["--eval_batch_size=many"],
        "--eval_batch_size=many: the value should be an integer",
    ),
    "mesh_tensorflow.bert.run_squad": (
        ["--vocab_file=v", "--do_train"],
        "--bert_config_file, --output_dir must be given",
    ),
    "mesh_tensorflow.bert.run_pretraining": (
        ["--bert_config_file=c", "--output_dir=o", "--mode=trian"],
        "--mode=trian is none of train_and_eval, train, eval; did you mean train?",
    ),
    "mesh_tensorflow.experimental.model_executor": (
        ["lr = 0.1"],
        "unexpected arguments 'lr = 0.1': flags begin with --",
    ),
    "mesh_tensorflow.experimental.offline_data_aug": (
        ["--process_no=0"],
        "--input_file_pattern, --output_folder must be given",
    ),
    "mesh_tensorflow.auto_mtf": (
        ["--mesh_shape=a:2", "--layuot=b:a"],
        "unknown: --layuot=b:a; did you mean --layout?",
    ),
    "mesh_tensorflow.auto_mtf.measure": (
        ["--output=x", "--runs=0"],
        "--runs is 0: it has to be 1 or more",
    ),
    "mesh_tensorflow.report": (
        ["--gin_file=x.gin", "--output=x.pdf"],
        "--output=x.pdf: the report is a file that ends in .html",
    ),
    "mesh_tensorflow.launch": (
        ["--processes", "0", "x.py"],
        "--processes must be at least 1, got 0",
    ),
    "mesh_tensorflow.testing.conformance": (
        ["a:b", "--layouts", "-1"],
        "--layouts is -1: it has to be 0 or more",
    ),
    "mesh_tensorflow.transformer.convert": (
        ["to-huggingface", "a"],
        "the following arguments are required: directory",
    ),
}


def run(program, *arguments):
    """Returns exit code, stdout, stderr and the processor seconds of a new process."""
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        capture_output=True,
        text=True,
        env={**environment(), "COLUMNS": "100"},
        timeout=120,
    )
    after = os.times()
    seconds = after.children_user - before.children_user
    seconds += after.children_system - before.children_system
    return done.returncode, done.stdout, done.stderr, seconds


def description(program):
    file, name = _command_lines.PROGRAMS[program]
    return getattr(importlib.import_module(f"mesh_tensorflow._command_lines.{file}"), name)


def listed_flags(program):
    """Returns pairs of a flag and its default as text, of what the program defines."""
    described = description(program)
    if isinstance(described, FlagProgram):
        values = flags.FlagValues()
        for make, name, default, text in described.table:
            make(name, default, text, flag_values=values)
        for name in values:
            default = values[name].default
            if isinstance(default, list):
                default = ",".join(default)
            if isinstance(default, bool):
                default = str(default).lower()
            yield name, None if default in (None, "") else str(default)
    else:
        for action in described.make_parser()._actions:
            for name in action.option_strings:
                if name.startswith("--") and name != "--help":
                    yield name[2:], action.default and str(action.default)


@pytest.mark.slow_but(7)
@pytest.mark.parametrize("program", PROGRAMS)
def test_help(program):
    code, out, err, seconds = run(program, "--help")
    assert (code, err) == (0, "")
    assert seconds < MOST_SECONDS, seconds
    assert program in out
    text = " ".join(re.split("^(?:Flags|options):", out, maxsplit=1, flags=re.MULTILINE)[1].split())
    for name, default in listed_flags(program):
        found = re.search(rf"--(\[no\])?{name}\b", text)
        assert found, name
        if default:
            told = re.search(r"\(default: (.*?)\)(?: |$)", text[found.start() :])
            assert told and told[1] == default, (name, told)
    assert out.count("default: ") + out.count("(required)") > 0 or program.endswith("convert")


@pytest.mark.slow_but(7)
@pytest.mark.parametrize("program", PROGRAMS)
def test_mistakes_in_flags(program):
    arguments, message = MISTAKES[program]
    code, out, err, seconds = run(program, *arguments)
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert lines[0].startswith(f"{program}") and message in lines[0]
    assert lines[1:] == [f"Its flags are listed by: python -m {program} --help"] or (
        program.endswith("convert") and len(lines) == 2
    )
    assert seconds < MOST_SECONDS, seconds


def test_the_package_lists_its_programs():
    for arguments in ((), ("--help",)):
        code, out, err, seconds = run("mesh_tensorflow", *arguments)
        assert (code, err) == (0, "") and seconds < MOST_SECONDS
        lines = [line.split(None, 1) for line in out.splitlines() if line.startswith("  ")]
        assert sorted(name for name, _ in lines) == PROGRAMS
        assert dict(lines)["mesh_tensorflow.auto_mtf"].startswith("Chooses the layout of a program")
    code, out, err, _ = run("mesh_tensorflow", "lauch", "--processes=2")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "mesh_tensorflow: unknown: lauch; did you mean python -m mesh_tensorflow.launch?",
        "Its programs are listed by: python -m mesh_tensorflow",
    ]


def test_installed_commands(tmp_path):
    """They are the programs of their names, also where flags are read before TensorFlow."""
    project = (TESTS.parent / "pyproject.toml").read_text(encoding="utf-8")
    section = project.split("[project.scripts]\n")[1].split("\n\n")[0]
    installed = dict(re.findall(r'^([\w-]+) = "(.*)"$', section, re.MULTILINE))
    assert set(installed) == set(_command_lines.SCRIPTS)
    assert set(installed.values()) == {"mesh_tensorflow._command_lines:run_script"}
    assert set(_command_lines.SCRIPTS.values()) <= set(PROGRAMS)
    script = tmp_path / "mtf-launch"
    script.write_text("from mesh_tensorflow._command_lines import run_script\nrun_script()\n")
    start = [sys.executable, script]
    kwargs = {"capture_output": True, "text": True, "env": environment(), "timeout": 400}
    told = subprocess.run([*start, "--help"], **kwargs)
    assert told.returncode == 0 and "--processes" in told.stdout and not told.stderr
    wrong = subprocess.run([*start, "--processes=0"], **kwargs)
    assert wrong.returncode == 2 and "must be at least 1, got 0" in wrong.stderr
    (tmp_path / "one.py").write_text("print('one of them')")
    done = subprocess.run([*start, "--processes=1", tmp_path / "one.py"], **kwargs)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one of them\n", "")


def test_lists_of_names_are_those_of_the_programs():
    assert [*transformer.MODES] and set(transformer.MODES) == set(_run._MODES)
    assert set(transformer.CONVERT_DTYPES) == set(_weights.DTYPES)
    assert set(transformer.CONVERT_NORMS) == set(_weights.NORM_NAMES)
    assert set(_command_lines.auto_mtf.PLACEMENTS) == set(measure._PLACEMENTS)


def test_all_flags_of_absl_are_known_in_advance():
    """The flags that a program has after its imports, TensorFlow's aside, are in its table."""
    program = "mesh_tensorflow.bert.run_classifier"
    importlib.import_module(program)
    table = {flag[1] for flag in description(program).table}
    own = {flag.name for flag in flags.FLAGS.flags_by_module_dict().get(program, [])}
    assert own <= table


@pytest.mark.slow
def test_other_processes_are_left_alone():
    """A script that is given --help, and imports the package, parses its own flags."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = '-c'; "
         "from mesh_tensorflow import _command_lines as c; print(c._program() == '', sys.argv)",
         "--help"],
        capture_output=True, text=True, env=environment(), timeout=120,
    )  # fmt: skip
    assert done.stdout == "True ['-c', '--help']\n", done.stderr

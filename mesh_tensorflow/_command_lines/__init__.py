"""Command lines of the package's programs, which are read before TensorFlow is imported.

`python -m mesh_tensorflow.NAME` imports `mesh_tensorflow`, and with it TensorFlow, before the
program. `begin` comes first of all: it answers `--help` and tells mistakes in flags at once.
Nothing in this folder imports TensorFlow, nor anything else of the package.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from typing import NoReturn

from mesh_tensorflow._command_lines import chatter

__all__ = ["PROGRAMS", "SCRIPTS", "begin", "check", "run_script", "show_programs"]

# Programs, as they are named after `python -m`: the file here and the object in it that describe
# the command line of each. They have a method `check(arguments)`.
PROGRAMS = {
    "mesh_tensorflow.auto_mtf": ("auto_mtf", "AUTO_MTF"),
    "mesh_tensorflow.auto_mtf.measure": ("auto_mtf", "MEASURE"),
    "mesh_tensorflow.bert.run_classifier": ("bert", "RUN_CLASSIFIER"),
    "mesh_tensorflow.bert.run_pretraining": ("bert", "RUN_PRETRAINING"),
    "mesh_tensorflow.bert.run_squad": ("bert", "RUN_SQUAD"),
    "mesh_tensorflow.experimental.model_executor": ("experimental", "MODEL_EXECUTOR"),
    "mesh_tensorflow.experimental.offline_data_aug": ("experimental", "OFFLINE_DATA_AUG"),
    "mesh_tensorflow.launch": ("launch", "LAUNCH"),
    "mesh_tensorflow.report": ("report", "REPORT"),
    "mesh_tensorflow.testing.conformance": ("conformance", "CONFORMANCE"),
    "mesh_tensorflow.transformer.convert": ("transformer", "CONVERT"),
    "mesh_tensorflow.transformer.main": ("transformer", "MAIN"),
}

# The commands that are installed with the package, and the program that each is.
SCRIPTS = {
    "mtf-auto": "mesh_tensorflow.auto_mtf",
    "mtf-convert": "mesh_tensorflow.transformer.convert",
    "mtf-launch": "mesh_tensorflow.launch",
    "mtf-measure": "mesh_tensorflow.auto_mtf.measure",
    "mtf-report": "mesh_tensorflow.report",
    "mtf-train": "mesh_tensorflow.transformer.main",
}


def _program() -> str:
    """Returns the name after `python -m` while Python locates that module, or that of a command.

    In other processes it is "".
    """
    if sys.argv[:1] != ["-m"]:  # replaced by the module's path before the module runs
        return SCRIPTS.get(_command(), "")
    name = sys.orig_argv[len(sys.orig_argv) - len(sys.argv)]
    if name.startswith("-"):  # -mNAME, and perhaps other options before the m
        name = name.partition("m")[2]
    return name.removesuffix(".__main__")


def _command() -> str:
    return os.path.basename(sys.argv[0]).removesuffix(".exe") if sys.argv else ""


def run_script() -> None:
    """Runs the program whose command the process is, as `python -m` does."""
    # By now the package has been imported, and so the flags have been read.
    runpy.run_module(SCRIPTS[_command()], run_name="__main__", alter_sys=True)


def check(program: str, arguments: list[str]) -> None:
    """Answers `--help` and ends the process, or tells a mistake in the flags and ends it.

    Args:
      program: a key of `PROGRAMS`.
      arguments: the command-line arguments, without the program.

    Raises:
      SystemExit: with 0 after help, and 2 after a mistake.
    """
    file, name = PROGRAMS[program]
    getattr(importlib.import_module(f"{__name__}.{file}"), name).check(arguments)


def show_programs(arguments: list[str]) -> NoReturn:
    """Lists the programs, and ends the process.

    Args:
      arguments: the command-line arguments; there should be none.

    Raises:
      SystemExit: with 0; with 2 after a mistake.
    """
    importlib.import_module(f"{__name__}.listing").show(PROGRAMS, arguments)
    raise AssertionError("it ends the process")


def begin() -> None:
    """If the process is one of `PROGRAMS`, reads its flags; then imports TensorFlow quietly.

    Likewise for a script whose main module has a function `before_tensorflow`, which is called to
    read the flags. `python -m mesh_tensorflow` lists the programs, and every other process, such as
    a script that imports the package, imports TensorFlow with all that it imports itself.
    """
    program = _program()
    script = getattr(sys.modules.get("__main__"), "before_tensorflow", None)
    if program in PROGRAMS:
        check(program, sys.argv[1:])
    elif script is not None:
        script()
    elif program == "mesh_tensorflow":
        show_programs(sys.argv[1:])
    known = program in PROGRAMS or script is not None
    chatter.import_quietly("tensorflow", whole=not known)

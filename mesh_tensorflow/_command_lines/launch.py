"""The command line of `mesh_tensorflow.launch`."""

from __future__ import annotations

import argparse
import os

from mesh_tensorflow._command_lines.parser import Parser, ParserProgram

__all__ = ["LAUNCH"]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m mesh_tensorflow.launch",
        description="Starts several processes of a script on this machine, which find each other "
        "by\nmesh_tensorflow.launch.processes(). Ends all if one fails.",
    )
    parser.add_argument("--processes", type=int, required=True, help="how many")
    parser.add_argument(
        "--show_all",
        action="store_true",
        help="show what every process writes, not the first alone",
    )
    parser.add_argument(
        "--runtime",
        choices=("tensorflow", "pjrt"),
        default="tensorflow",
        help="what connects them: TensorFlow's servers, or JAX, for mesh_tensorflow.pjrt",
    )
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        default=[],
        help="a module in place of a script, and its arguments",
    )
    parser.add_argument("script", nargs="?", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, got {options.processes}")
    if not options.script and not options.module:
        parser.error("name a script, or a module by -m")
    if options.script and not os.path.exists(options.script):
        parser.error(f"there is no script {options.script}")


LAUNCH = ParserProgram(_parser, _check)

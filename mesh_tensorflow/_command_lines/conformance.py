"""The command line of `mesh_tensorflow.testing.conformance`."""

from __future__ import annotations

import argparse

from mesh_tensorflow._command_lines.parser import Parser, ParserProgram

__all__ = ["CONFORMANCE", "MOST_LAYOUTS"]

MOST_LAYOUTS = 4


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m mesh_tensorflow.testing.conformance",
        description="Conformance of mesh implementations to the contract of MeshImpl.",
    )
    parser.add_argument("make_impl", help="module:function(mesh_shape, layout) -> MeshImpl")
    parser.add_argument("--only", default="", help="a part of the names of the cases to check")
    parser.add_argument(
        "--layouts",
        type=int,
        default=MOST_LAYOUTS,
        help="the most layouts of a case, besides the empty one",
    )
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.layouts < 0:
        parser.error(f"--layouts is {options.layouts}: it has to be 0 or more")


CONFORMANCE = ParserProgram(_parser, _check)

"""The command line of `mesh_tensorflow.report`."""

from __future__ import annotations

import argparse

from mesh_tensorflow._command_lines.parser import Parser, ParserProgram

__all__ = ["REPORT"]

_EXAMPLES = """\
  python -m mesh_tensorflow.report --gin_file=models/lm_base.gin \\
      --gin_param="utils.run.model_type = 'lm'" \\
      --mesh_shape="rows:2,cols:4" --layout="batch:rows,d_ff:cols,heads:cols,vocab:cols"
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m mesh_tensorflow.report",
        description=(
            "Builds the training step of a transformer as mesh_tensorflow.transformer.main would, "
            "and writes a report of it to one HTML file. Nothing is trained, and no data is read."
        ),
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--gin_file",
        action="append",
        default=[],
        help="file of bindings, also one of the package's; may be repeated",
    )
    parser.add_argument(
        "--gin_param", action="append", default=[], help="a binding; may be repeated"
    )
    parser.add_argument(
        "--gin_location_prefix", action="append", default=[], help="where to search for gin files"
    )
    parser.add_argument(
        "--module_import",
        action="append",
        default=[],
        help="module that registers names for gin files; may be repeated",
    )
    parser.add_argument(
        "--mesh_shape", help='such as "rows:2,cols:4"; utils.run.mesh_shape of the files if none'
    )
    parser.add_argument(
        "--layout", help='such as "batch:rows,d_ff:cols"; utils.run.layout_rules if none'
    )
    parser.add_argument(
        "--vocab_size",
        type=int,
        default=32128,
        help="ids of inputs and of targets, if the files bind no utils.run.vocabulary",
    )
    parser.add_argument("--output", default="report.html", help="the HTML file")
    parser.add_argument("--title", help="its title; the names of the gin files if none")
    parser.add_argument("--hardware", help="name or file of a profile, for times (default: tpu_v3)")
    parser.add_argument(
        "--no_explanation",
        action="store_true",
        help="leave out the comparison with other layouts, which may take seconds",
    )
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not options.gin_file and not options.gin_param:
        parser.error("--gin_file or --gin_param must say what the model is")
    if options.vocab_size < 3:
        parser.error(f"--vocab_size is {options.vocab_size}: it has to be 3 or more")
    if not options.output.endswith((".html", ".htm")):
        parser.error(f"--output={options.output}: the report is a file that ends in .html")


REPORT = ParserProgram(_parser, _check)

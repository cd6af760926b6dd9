"""The command lines of `mesh_tensorflow.auto_mtf` and `mesh_tensorflow.auto_mtf.measure`."""

from __future__ import annotations

import argparse

from mesh_tensorflow._command_lines.parser import Parser, ParserProgram

__all__ = ["AUTO_MTF", "DEFAULT_MODEL", "MEASURE", "PLACEMENTS"]

DEFAULT_MODEL = "mesh_tensorflow.auto_mtf.models:language_model"
PLACEMENTS = ("simd", "shared")
_EXAMPLES = """\
  python -m mesh_tensorflow.auto_mtf --mesh_shape=rows:4,cols:8 \\
      --gin_param=language_model.layers=12 --gin_param=language_model.d_model=1024

A transformer of gin files:

  python -m mesh_tensorflow.auto_mtf --mesh_shape=rows:4,cols:8 \\
      --model=mesh_tensorflow.auto_mtf.gin_models:gin_transformer \\
      --gin_file=defaults.gin --gin_file=models/lm_base.gin
"""


def _auto_mtf_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m mesh_tensorflow.auto_mtf",
        description="Chooses the layout of a program, and says why.",
        epilog=_EXAMPLES,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--mesh_shape", help='such as "rows:4,cols:8"')
    where.add_argument("--processors", type=int, help="choose a mesh of so many processors, too")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="module:function")
    parser.add_argument(
        "--gin_file", action="append", default=[], help="file of bindings; may be repeated"
    )
    parser.add_argument(
        "--gin_param", action="append", default=[], help="a binding; may be repeated"
    )
    parser.add_argument("--layout", help="explain this one")
    parser.add_argument(
        "--objective", default="time", choices=["time", "memory"], help="what to minimize"
    )
    parser.add_argument("--memory_limit_bytes", type=float, help="of one processor")
    parser.add_argument("--hardware", help="name or file of a profile (default: tpu_v3)")
    parser.add_argument("--alternatives", type=int, default=4, help="other layouts to show")
    parser.add_argument(
        "--max_mesh_shape_dimensions",
        type=int,
        default=2,
        help="the most dimensions of a mesh chosen by --processors",
    )
    parser.add_argument("--plot", help="PNG file")
    return parser


def _measure_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m mesh_tensorflow.auto_mtf.measure",
        description="Measures this machine, and writes a profile of it for auto_mtf.",
    )
    parser.add_argument("--output", required=True, help="JSON file for the profile")
    parser.add_argument("--processors", type=int, default=4, help="processors of the mesh")
    parser.add_argument(
        "--placement",
        choices=PLACEMENTS,
        default="simd",
        help="simd: a SIMD mesh; shared: processors placed on one device",
    )
    parser.add_argument("--runs", type=int, default=10, help="how often each step is timed")
    return parser


def _check_measure(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name in ("processors", "runs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}: it has to be 1 or more")


AUTO_MTF = ParserProgram(_auto_mtf_parser)
MEASURE = ParserProgram(_measure_parser, _check_measure)

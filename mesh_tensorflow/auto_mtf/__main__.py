r"""Chooses a layout from the command line, and explains it.

python -m mesh_tensorflow.auto_mtf --mesh_shape=rows:4,cols:8 \
    --gin_param=language_model.layers=12 --gin_param=language_model.d_model=1024

`--model` names a function, as module:function, that returns a Program or (graph, outputs). Gin
binds its arguments, and those of all functions that it calls. For a transformer in gin files:

python -m mesh_tensorflow.auto_mtf --mesh_shape=rows:4,cols:8 \
    --model=mesh_tensorflow.auto_mtf.gin_models:gin_transformer \
    --gin_file=defaults.gin --gin_file=models/lm_base.gin --gin_param=gin_transformer.batch_size=128
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, Optional

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.shape import convert_to_shape
from mesh_tensorflow._programs import explained_errors, parser_of, run_with_parser
from mesh_tensorflow.auto_mtf import api, explanation
from mesh_tensorflow.auto_mtf.layout_optimizer import SolverError
from mesh_tensorflow.auto_mtf.step_time import MemoryLimitError, ProgramParts

__all__ = ["main"]

DEFAULT_MODEL = "mesh_tensorflow.auto_mtf.models:language_model"
_GIN_FILES = str(pathlib.Path(__file__).resolve().parent.parent / "transformer" / "gin")


def model_function(name: str) -> Callable[[], Any]:
    """Imports a function by its name.

    Args:
      name: a string, "package.module:function".

    Raises:
      ValueError: there is no function of that name.
    """
    module, colon, function = name.partition(":")
    try:
        imported = getattr(importlib.import_module(module), function, None) if colon else None
    except ImportError as e:
        raise ValueError(f"--model={name}: {e}") from e
    if not callable(imported):
        raise ValueError(
            f"--model={name} is no function: write it as package.module:function, such as "
            f"{DEFAULT_MODEL}"
        )
    return imported


def _options(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Returns what the command line says."""
    parser = parser_of("auto_mtf", "Chooses the layout of a program, and says why.", __doc__)
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
    parser.add_argument("--hardware", help="name or file of a profile; tpu_v3 if none")
    parser.add_argument("--alternatives", type=int, default=4, help="other layouts to show")
    parser.add_argument(
        "--max_mesh_shape_dimensions",
        type=int,
        default=2,
        help="the most dimensions of a mesh chosen by --processors",
    )
    parser.add_argument(
        "--joint",
        action="store_true",
        help="also layouts that join mesh dimensions, as batch:rows+cols",
    )
    parser.add_argument(
        "--parts",
        action="store_true",
        help="also look for a part with names of its own for dimensions, and say what to rename",
    )
    parser.add_argument("--plot", help="PNG file")
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the command.

    Args:
      argv: the arguments; those of the process if None.

    Returns:
      0; or 1 if there is no such layout, and 2 after a mistake in flags or files; then the reason
      is printed to stderr.
    """
    options = _options(argv)
    try:
        with tf.Graph().as_default():
            build = model_function(options.model)  # imports what gin is to bind
            # Where it searches for files that are not in the current directory.
            gin.add_config_file_search_path(_GIN_FILES)
            with gin.unlock_config(), explained_errors(options.gin_file, [_GIN_FILES]):
                gin.parse_config_files_and_bindings(options.gin_file, options.gin_param)
            print(_explained(build, options))
    except (ValueError, SyntaxError, OSError, SolverError) as e:
        print(e, file=sys.stderr)
        return 1 if isinstance(e, (SolverError, MemoryLimitError)) else 2
    return 0


def _explained(build: Callable[[], Any], options: argparse.Namespace) -> explanation.Explanation:
    parts = ProgramParts.of(build())
    chosen = {
        "objective": options.objective,
        "memory_limit_bytes": options.memory_limit_bytes,
        "hardware": options.hardware,
        "joint": options.joint,
    }
    mesh_shape = options.mesh_shape and convert_to_shape(options.mesh_shape)
    if mesh_shape is None:
        _, mesh_shape = api.layout_and_mesh_shape(
            parts.graph,
            options.processors,
            parts.outputs,
            options.max_mesh_shape_dimensions,
            **chosen,
        )
    explained = explanation.explain(
        parts.graph,
        mesh_shape,
        parts.outputs,
        options.layout,
        alternatives=options.alternatives,
        parts=options.parts,
        **chosen,
    )
    if options.plot:
        explained.plot(options.plot)
    return explained


if __name__ == "__main__":
    run_with_parser(main, "mesh_tensorflow.auto_mtf")

"""The command line of the converter."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, Optional

from mesh_tensorflow.transformer import convert
from mesh_tensorflow.transformer.convert._models import DTYPES
from mesh_tensorflow.transformer.convert._weights import NORM_NAMES

__all__ = ["main"]


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Runs the command line.

    Args:
      argv: a list of strings; by default, those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mesh_tensorflow.transformer.convert",
        description=(convert.__doc__ or "").partition("\n")[0],
    )
    commands = parser.add_subparsers(dest="command", required=True)
    there = commands.add_parser("to-huggingface", help="a checkpoint to model.safetensors")
    there.add_argument("checkpoint", help="a checkpoint, or a directory: its latest")
    there.add_argument("directory", help="where to write")
    there.add_argument("--feed_forward", help="activation; by default relu or gated-gelu")
    back = commands.add_parser("from-huggingface", help="model.safetensors to a checkpoint")
    back.add_argument("path", help="a directory or a safetensors file")
    back.add_argument("directory", help="the model directory, where to write")
    back.add_argument("--step", type=int, default=0, help="the global step")
    back.add_argument(
        "--tied",
        action=argparse.BooleanOptionalAction,
        help="whether the softmax uses the embedding; by default what config.json says",
    )
    back.add_argument("--norm_name", choices=list(NORM_NAMES), default="layer_norm")
    for command in (there, back):
        command.add_argument("--vocab_size", type=int, help="rows of the embedding")
        command.add_argument("--dtype", choices=list(DTYPES), help="by default unchanged")
    args = vars(parser.parse_args(argv))
    functions: dict[str, Callable[..., Any]] = {
        "to-huggingface": convert.to_huggingface,
        "from-huggingface": convert.from_huggingface,
    }
    functions[args.pop("command")](**args)


if __name__ == "__main__":
    main()

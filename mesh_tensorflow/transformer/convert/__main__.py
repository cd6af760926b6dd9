"""The command line of the converter."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, Optional

from mesh_tensorflow._programs import run_with_parser
from mesh_tensorflow.transformer import convert
from mesh_tensorflow.transformer.convert import _weights

__all__ = ["main"]


def _options(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        prog="python -m mesh_tensorflow.transformer.convert",
        description="Converts checkpoints of T5 models to and from Hugging Face's format; joins "
        "checkpoints of a model and its draft.",
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
    back.add_argument(
        "--norm_name", choices=_weights.NORM_NAMES, default="layer_norm", help="names of norms"
    )
    both = commands.add_parser("with-draft", help="two checkpoints to one, for decoding")
    both.add_argument("checkpoint", help="a checkpoint, or a directory: its latest")
    both.add_argument("draft", help="the same, of the draft")
    both.add_argument("directory", help="the model directory, where to write")
    for command in (there, back):
        command.add_argument("--vocab_size", type=int, help="rows of the embedding")
        command.add_argument("--dtype", choices=_weights.DTYPES, help="by default unchanged")
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Runs the command line.

    Args:
      argv: a list of strings; by default, those of the process.
    """
    args = vars(_options(argv))
    functions: dict[str, Callable[..., Any]] = {
        "to-huggingface": convert.to_huggingface,
        "from-huggingface": convert.from_huggingface,
        "with-draft": convert.with_draft,
    }
    functions[args.pop("command")](**args)
    source = args.get("path") or args["checkpoint"]
    print(f"converted {source}; the result is in {args['directory']}")


if __name__ == "__main__":
    run_with_parser(main, "mesh_tensorflow.transformer.convert")

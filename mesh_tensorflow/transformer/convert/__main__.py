"""The command line of the converter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

from mesh_tensorflow._command_lines.transformer import CONVERT
from mesh_tensorflow._programs import run_with_parser
from mesh_tensorflow.transformer import convert

__all__ = ["main"]


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Runs the command line.

    Args:
      argv: a list of strings; by default, those of the process.
    """
    args = vars(CONVERT.parse(argv))
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

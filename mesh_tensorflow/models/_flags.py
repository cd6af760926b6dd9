"""Flags of the commands that open a language model: where it is, and how it is split."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mesh_tensorflow import _programs, models
from mesh_tensorflow._mesh.mesh_impl import MESH_IMPLS

# Flags of a command that are arguments of a function: type, default and help, by name.
Arguments = Mapping[str, tuple[type, Any, str]]


def parser_of(command: str, description: str) -> argparse.ArgumentParser:
    """Returns the parser of a command, which has the flags of a model.

    Args:
      command: the name of its module in the package.
      description: what it does, a sentence.
    """
    parser = _programs.parser_of(command, description)
    parser.add_argument("--model", required=True, help="the folder, or the .gguf file")
    parser.add_argument("--mesh_shape", help='such as "rows:2,cols:4"; one processor if not given')
    parser.add_argument("--layout", help='such as "batch:rows,d_ff:cols,vocab:cols"')
    parser.add_argument(
        "--ways",
        help='in place of these two, names such as "data:2,tensor:2" or "zero3:4"; others are '
        f"{', '.join(models.layouts.WAYS)}",
    )
    parser.add_argument("--zero", type=int, help="stage of ZeRO: 3 stores weights in parts")
    parser.add_argument("--zero_axis", help="the mesh dimension of ZeRO")
    text = "simd runs one program on each processor; pjrt computes on devices of JAX"
    parser.add_argument("--mesh_impl", choices=MESH_IMPLS, default="placement", help=text)
    text = "of the weights; those that are trained have masters in float32"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help=text)
    return parser


def add_arguments(parser: argparse.ArgumentParser, arguments: Arguments) -> None:
    """Adds flags that are arguments of a function.

    Args:
      parser: the parser of a command.
      arguments: the flags.
    """
    for name, (kind, default, text) in arguments.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)


def opened(options: argparse.Namespace, **further: Any) -> models.LanguageModel:
    """Returns the model that flags name.

    Args:
      options: what the command line says.
      **further: arguments of `from_pretrained` that are flags of one command.

    Raises:
      ValueError: there is none, or it is an encoder.
    """
    place = {name: getattr(options, name) for name in ("mesh_shape", "layout", "zero", "zero_axis")}
    arguments = {name: value for name, value in place.items() if value is not None}
    if options.ways is not None:
        if arguments:
            raise ValueError(
                f"--ways={options.ways} says what {', '.join('--' + n for n in arguments)} would; "
                "give one or the other"
            )
        arguments = models.layouts.of(options.model, options.ways)
    model = models.from_pretrained(
        options.model,
        dtype=options.dtype,
        mesh_impl=options.mesh_impl,
        **{"mesh_shape": "all:1", "layout": "", **arguments, **further},
    )
    if not isinstance(model, models.LanguageModel):
        raise ValueError(
            f"{options.model} has an encoder, which continues no texts; it makes vectors of them: "
            "mtf.models.from_pretrained(...).embed(texts)"
        )
    return model

r"""Continues texts by a language model of a Hugging Face folder, split over a mesh.

python -m mesh_tensorflow.generate --model=SmolLM2-135M --prompt="Once upon a time"
python -m mesh_tensorflow.generate --model=SmolLM2-135M --chat --temperature=0.7 --top_p=0.9 \
        --ways=tensor:4
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Optional

from mesh_tensorflow import models
from mesh_tensorflow._programs import run_with_parser
from mesh_tensorflow.models import _flags

__all__ = ["main"]

# The arguments of `LanguageModel.generate` that are flags.
_SAMPLING: _flags.Arguments = {
    "max_new_tokens": (int, 256, "how many ids are added at most"),
    "temperature": (float, 0.0, "0.0 takes the best id, 1.0 draws from the model's distribution"),
    "top_k": (int, -1, "draw from so many of the best ids; -1 for all"),
    "top_p": (float, 1.0, "draw from the fewest ids with this probability together"),
    "min_p": (float, 0.0, "draw from ids with this share of the best one's probability"),
    "repetition_penalty": (float, 1.0, "divide the logits of ids that are there already"),
    "seed": (int, None, "the same ids are drawn with the same seed"),
}
_SEARCH: _flags.Arguments = {
    "num_beams": (int, 1, "search with so many beams; then nothing is drawn"),
    "length_penalty": (float, 1.0, "of a search: larger ones prefer longer texts"),
}


def _options(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """Returns what the command line says."""
    parser = _flags.parser_of(
        "generate", "Continues texts by a language model of a Hugging Face folder or GGUF file."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="a text to continue")
    what.add_argument("--chat", action="store_true", help="answer what is typed, line by line")
    what.add_argument(
        "--prompts_file", help="a text to continue in each line; the results are lines of JSON"
    )
    parser.add_argument("--system", help="what the model is told before a conversation")
    parser.add_argument("--batch_size", type=int, default=8, help="lines of a file at once")
    parser.add_argument(
        "--stop", action="append", help="a text, or an id, that ends a text; may be repeated"
    )
    _flags.add_arguments(parser, {**_SAMPLING, **_SEARCH})
    options = parser.parse_args(arguments)
    if options.system is not None and not options.chat:
        parser.error("--system is of conversations: give --chat, too")
    if options.length_penalty != 1.0 and options.num_beams == 1:
        parser.error("--length_penalty is of a search: give --num_beams above 1, too")
    if options.batch_size < 1:
        parser.error(f"--batch_size is {options.batch_size}: it has to be 1 or more")
    # Before the model is read, which takes minutes for a large one.
    if options.prompts_file and not os.path.isfile(options.prompts_file):
        parser.error(f"--prompts_file: there is no file {options.prompts_file!r}")
    return options


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `LanguageModel.generate`."""
    arguments = {name: getattr(options, name) for name in _SAMPLING}
    if options.stop:
        arguments["stop"] = [int(x) if x.lstrip("-").isdigit() else x for x in options.stop]
    if options.num_beams != 1:
        arguments.update({name: getattr(options, name) for name in _SEARCH})
    return arguments


def _pieces(model: models.LanguageModel, prompt: Any, arguments: dict[str, Any]) -> Iterator[str]:
    """Yields a continuation: as it comes, or at its end if nothing can be told before."""
    if "num_beams" in arguments or not model._place.can_listen:
        return iter(model.generate([prompt], **arguments))
    return model.stream(prompt, **arguments)


def _write(pieces: Iterator[str]) -> str:
    """Writes a continuation, and returns it."""
    text = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        text += piece
    print(flush=True)
    return text


def _converse(
    model: models.LanguageModel, system: Optional[str], arguments: dict[str, Any]
) -> None:
    """Answers each line of the standard input, up to its end."""
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        messages.append({"role": "user", "content": line})
        answer = _write(_pieces(model, messages, arguments))
        messages.append({"role": "assistant", "content": answer})


def _lines(path: str) -> list[str]:
    """Returns the lines of a file that have something in them."""
    try:
        # Editors of Windows begin a text with a mark, which is no part of the first line.
        with open(path, encoding="utf-8-sig") as f:
            return [line.rstrip("\n") for line in f if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts_file={path} is not in UTF-8: {error}") from error


def _continue_lines(
    model: models.LanguageModel, prompts: list[str], batch_size: int, arguments: dict[str, Any]
) -> None:
    """Writes the continuation of each of some texts."""
    for i in range(0, len(prompts), batch_size):
        batch = prompts[i : i + batch_size]
        for prompt, text in zip(batch, model.generate(batch, **arguments)):
            line = json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False)
            print(line, flush=True)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command.

    Args:
      arguments: the command-line arguments; `sys.argv[1:]` if None.

    Returns:
      0.
    """
    options = _options(arguments)
    prompts = _lines(options.prompts_file) if options.prompts_file else []
    model = _flags.opened(options)
    settings = _arguments(options)
    if options.chat:
        _converse(model, options.system, settings)
    elif options.prompts_file:
        _continue_lines(model, prompts, options.batch_size, settings)
    else:
        _write(_pieces(model, options.prompt, settings))
    return 0


if __name__ == "__main__":
    run_with_parser(main, "mesh_tensorflow.generate", eager=True)

"""Files that grow by parts, so that a program that was killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow.transformer.utils._text import write_lines_to_file

__all__ = ["write_resumably"]

_LEAST_ROWS = 64


def _fingerprint(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _read_part(path: str) -> list[str]:
    with tf.io.gfile.GFile(path) as f:
        return json.loads(f.read())


def _write_part(path: str, lines: Sequence[str]) -> None:
    with tf.io.gfile.GFile(f"{path}.tmp", "w") as f:
        f.write(json.dumps(list(lines)))
    tf.io.gfile.rename(f"{path}.tmp", path, overwrite=True)


def _finished_parts(directory: str) -> list[str]:
    """Returns the lines of all parts up to the first one that is not there."""
    lines: list[str] = []
    number = 0
    while tf.io.gfile.exists(path := os.path.join(directory, f"{number:06d}")):
        lines += _read_part(path)
        number += 1
    return lines


def write_resumably(
    filename: str,
    inputs: Sequence[str],
    batch_size: int,
    outputs_from: Callable[[int], Iterator[str]],
    about: Any = None,
) -> list[str]:
    """Writes an output for each input, one a line, and loses nothing that is finished if killed.

    Parts are written beside the file, in a directory that is called after it and after the inputs;
    the file itself comes to be when all are there.

    Args:
      filename: the path of the file.
      inputs: strings.
      batch_size: how many are computed together.
      outputs_from: a function of the number of the first input that yields the outputs from there.
      about: what else the outputs depend on; anything that JSON can write.

    Returns:
      The lines.
    """
    rows = -(-_LEAST_ROWS // batch_size) * batch_size
    mark = _fingerprint(list(inputs), rows, about)
    directory = f"{filename}.parts-{mark}"
    lines = _finished_parts(directory) if tf.io.gfile.isdir(directory) else []
    if lines:
        tf.logging.info("%d of %d lines were there already", len(lines), len(inputs))
    tf.io.gfile.makedirs(directory)
    if len(lines) < len(inputs):
        part: list[str] = []
        for line in outputs_from(len(lines)):
            part.append(line)
            if len(part) == rows or len(lines) + len(part) == len(inputs):
                _write_part(os.path.join(directory, f"{len(lines) // rows:06d}"), part)
                lines, part = lines + part, []
            if len(lines) == len(inputs):
                break
    write_lines_to_file(lines, filename)
    tf.io.gfile.rmtree(directory)
    return lines

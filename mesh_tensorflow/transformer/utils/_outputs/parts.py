"""Output files written in parts, so that a program that was killed can resume."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow.transformer.utils._data.text import as_text, write_lines_to_file, write_text

__all__ = ["finishing_together", "write_resumably"]

_LEAST_ROWS = 64
_MOST_SECONDS = 10.0
_FINISHED = ".finished"

_unfinished: contextvars.ContextVar[Optional[list[str]]] = contextvars.ContextVar(
    "unfinished", default=None
)


@contextlib.contextmanager
def finishing_together() -> Iterator[None]:
    """Context manager that keeps the parts of finished files until all files are finished.

    So a run that is killed in its second file does not compute the first one again. Nested contexts
    have no effect.
    """
    if _unfinished.get() is not None:
        yield
        return
    directories: list[str] = []
    token = _unfinished.set(directories)
    try:
        yield
    finally:
        _unfinished.reset(token)
    _remove(directories)


def _remove(directories: Sequence[str]) -> None:
    """Removes the parts of finished files.

    They are renamed first: if killed in between, no remaining parts look like an unfinished run.
    """
    finished = [directory + _FINISHED for directory in directories]
    for directory, new in zip(directories, finished):
        if not tf.io.gfile.isdir(new):
            tf.io.gfile.rename(directory, new)
    for directory in finished:
        tf.io.gfile.rmtree(directory)


def _fingerprint(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _part(directory: str, start: int) -> str:
    """Returns the path of the part that begins at input number `start`."""
    return os.path.join(directory, f"{start:09d}")


def _read_part(path: str) -> Optional[list[str]]:
    """Returns the lines of a part, or None if it is missing or incomplete."""
    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path, "rb") as f:
        text = f.read()
    try:
        return json.loads(text)
    except ValueError:
        tf.logging.warning("%s is damaged, and computed again", path)
        return None


def _finished_parts(directory: str) -> list[str]:
    """Returns the lines of all parts up to the first missing one."""
    lines: list[str] = []
    while part := _read_part(_part(directory, len(lines))):
        lines += part
    return lines


def _batches(outputs: Iterator[str], batch_size: int, missing: int) -> Iterator[list[str]]:
    """Yields outputs in batches; the last batch has only the missing ones.

    Raises:
      RuntimeError: there are too few.
    """
    batch: list[str] = []
    while missing:
        output = next(outputs, None)
        if output is None:
            raise RuntimeError(f"there were no outputs for the last {missing} inputs")
        batch.append(as_text(output))
        missing -= 1
        if len(batch) == batch_size or not missing:
            yield batch
            batch = []


def _compute_missing(
    directory: str,
    inputs: Sequence[str],
    batch_size: int,
    outputs_from: Callable[[int], Iterator[str]],
) -> list[str]:
    """Returns an output for each input; writes new ones to parts."""
    tf.io.gfile.makedirs(directory)
    lines = _finished_parts(directory)
    if lines:
        tf.logging.info("%d of %d lines were there already", len(lines), len(inputs))
    missing = len(inputs) - len(lines)
    part: list[str] = []
    since = time.monotonic()
    for batch in _batches(outputs_from(len(lines)), batch_size, missing) if missing else ():
        part += batch
        whole = len(lines) + len(part) == len(inputs)
        if whole or len(part) >= _LEAST_ROWS or time.monotonic() - since > _MOST_SECONDS:
            path = _part(directory, len(lines))
            write_text(json.dumps(part), path, f"{path}.tmp")
            lines, part, since = lines + part, [], time.monotonic()
    return lines


def write_resumably(
    filename: str,
    inputs: Sequence[str],
    batch_size: int,
    outputs_from: Callable[[int], Iterator[str]],
    about: object = None,
) -> None:
    """Writes an output for each input, one per line; if killed, finished outputs are not lost.

    Parts are written to a directory beside the file, named after the file and a fingerprint of the
    inputs: one part for every 64 outputs, or for the batches of 10 seconds. The file itself is
    written when all outputs are done; the parts are removed then, or at the end of
    `finishing_together`. If there are no inputs, no file is written.

    Args:
      filename: the path of the file.
      inputs: strings.
      batch_size: the number of outputs computed together.
      outputs_from: a function of the number of an input that yields the outputs from that one on.
      about: whatever else the outputs depend on; any value that JSON can represent.

    Raises:
      RuntimeError: `outputs_from` yields too few outputs.
    """
    if not inputs:
        write_lines_to_file([], filename)
        return
    directory = f"{filename}.parts-{_fingerprint(list(inputs), batch_size, about)}"
    # Killed while the parts of a finished file were being removed.
    finished = tf.io.gfile.isdir(directory + _FINISHED)
    if finished and not tf.io.gfile.exists(filename):
        tf.io.gfile.rmtree(directory + _FINISHED)
        finished = False
    if not finished:
        lines = _compute_missing(directory, inputs, batch_size, outputs_from)
        text = "".join(f"{line}\n" for line in lines)
        write_text(text, filename, os.path.join(directory, "whole.tmp"))
    together = _unfinished.get()
    if together is None:
        _remove([directory])
    elif directory not in together:
        together.append(directory)

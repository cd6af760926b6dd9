"""Files that grow by parts, so that a program that was killed goes on where it was."""

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
    """Within it, parts of finished files stay until all are finished.

    So a run that is killed in its second file does not compute the first one again. Within another
    one it adds nothing.
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
    """Removes parts of files that are whole.

    They get another name first: killed in between, there are none that look like a beginning.
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
    """Returns the path of the part that begins with an input of a number."""
    return os.path.join(directory, f"{start:09d}")


def _read_part(path: str) -> Optional[list[str]]:
    """Returns the lines of a part, or None if it is not there or was not written to its end."""
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
    """Returns the lines of all parts up to the first one that is not there."""
    lines: list[str] = []
    while part := _read_part(_part(directory, len(lines))):
        lines += part
    return lines


def _batches(outputs: Iterator[str], batch_size: int, missing: int) -> Iterator[list[str]]:
    """Yields outputs in batches, the last one of as many as are missing then.

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
    """Returns an output for each input; those that are new are written to parts."""
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
    """Writes an output for each input, one a line, and loses nothing that is finished if killed.

    Parts are written beside the file, in a directory that is called after it and after the inputs:
    one when 64 outputs are there, or those of the batches of 10 seconds. The file itself comes to
    be when all are there, and the parts are removed then, or at the end of `finishing_together`.
    Without inputs there is no file.

    Args:
      filename: the path of the file.
      inputs: strings.
      batch_size: how many are computed together.
      outputs_from: a function of the number of the first input that yields the outputs from there.
      about: what else the outputs depend on; anything that JSON can write.

    Raises:
      RuntimeError: `outputs_from` yields too few outputs.
    """
    if not inputs:
        write_lines_to_file([], filename)
        return
    directory = f"{filename}.parts-{_fingerprint(list(inputs), batch_size, about)}"
    # Killed while parts of a file that is whole were removed.
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

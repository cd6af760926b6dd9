"""Texts of files as ids for a model, and ids as texts."""

from __future__ import annotations

import itertools
import os
import re
import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import gin
import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow.transformer.utils._settings import (
    MODULE,
    Lengths,
    inputs_length,
    inputs_vocabulary,
    targets_vocabulary,
)

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset._features import Vocabularies
    from mesh_tensorflow.transformer.vocabulary import Vocabulary


_MOST_NUMBERS = 10


# -- files


def as_text(value: object) -> str:
    """Converts bytes, or any other value, to a string.

    Args:
      value: anything.

    Returns:
      A string.
    """
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def lines_text(lines: Iterable[Any]) -> str:
    """Returns the text of a file with one line for each value; within a value, breaks are spaces.

    Args:
      lines: values of any type, converted by `as_text`.
    """
    # Byte vocabularies and pieces of SentencePiece decode to breaks, after which the lines of
    # outputs would no longer be those of inputs.
    return "".join(re.sub(r"\r\n|[\r\n]", " ", as_text(line)) + "\n" for line in lines)


def _numbers(numbers: Sequence[int]) -> str:
    more = "..." if len(numbers) > _MOST_NUMBERS else ""
    return ", ".join(map(str, numbers[:_MOST_NUMBERS])) + more


def _check_no_line_is_empty(input_filename: str, lines: Sequence[str]) -> None:
    empty = [number for number, line in enumerate(lines, 1) if not line]
    if not empty:
        return
    which = f"line {empty[0]} is" if len(empty) == 1 else f"lines {_numbers(empty)} are"
    raise ValueError(
        f"{input_filename}: {which} empty, but each line is a text with a result of its own. Fill "
        f"or remove {'it' if len(empty) == 1 else 'them'}; or, if empty texts are meant, bind "
        "utils.get_inputs_from_file.keep_empty_lines = True by gin, or pass keep_empty_lines=True"
    )


@gin.configurable(module=MODULE)
def get_inputs_from_file(
    input_filename: str, ignore_comments: bool = False, keep_empty_lines: bool = False
) -> list[str]:
    """Reads the lines of a file, without trailing white space.

    Args:
      input_filename: the path of a file of UTF-8 text.
      ignore_comments: whether to skip lines that begin with "#".
      keep_empty_lines: whether to keep lines of only white space, except one at the end of the
        file; if False, they are an error.

    Returns:
      A list of strings.

    Raises:
      ValueError: lines are empty, or a line is not valid UTF-8; the message names file and lines.
    """
    with tf.io.gfile.GFile(input_filename, "rb") as f:
        # Not splitlines, which also splits at characters such as U+2028, nor text mode, whose
        # errors name no line.
        raw = f.read().split(b"\n")
    lines = []
    # The end of the last line begins no other line.
    for number, line in enumerate(raw[:-1] if not raw[-1] else raw, 1):
        try:
            lines.append(line.decode("utf-8").rstrip())
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{input_filename}: line {number} is no UTF-8 text ({error}); mend the line, or "
                "convert the file"
            ) from error
    if not keep_empty_lines:
        _check_no_line_is_empty(input_filename, lines)
    if lines and not lines[-1]:
        lines.pop()
    return [line for line in lines if not (ignore_comments and line.startswith("#"))]


def temporary_name(filename: str) -> str:
    """Returns an unpredictable temporary name beside a file."""
    return f"{filename}.{uuid.uuid4().hex}.tmp"


def write_text(text: str, filename: str, temporary: str) -> None:
    """Writes a file atomically, under a temporary name and then renamed.

    Args:
      text: a string.
      filename: the path of the file.
      temporary: a path on the same file system.
    """
    with tf.io.gfile.GFile(temporary, "w") as f:
        f.write(text)
    # Otherwise the renamed file could be empty after a crash of the machine.
    if os.path.exists(temporary):
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    tf.io.gfile.rename(temporary, filename, overwrite=True)


def write_lines_to_file(lines: Iterable[Any], filename: str) -> None:
    """Writes lines to a file, replacing its contents.

    The file is written atomically. If there are no lines, no file is written. A line break within a
    value is written as a space.

    Args:
      lines: values of any type, converted by `as_text`.
      filename: the path of the file.
    """
    text = lines_text(lines)
    if not text:
        # An older file would look like a result of this run.
        if tf.io.gfile.exists(filename):
            tf.io.gfile.remove(filename)
        return
    directory = os.path.dirname(filename)
    if directory:
        tf.io.gfile.makedirs(directory)
    write_text(text, filename, temporary_name(filename))


# -- texts as ids


def _encode(vocabulary: Vocabulary, line: str, number: int, what: str) -> list[int]:
    """Returns the ids of a line; errors name the line number."""
    try:
        ids = [int(i) for i in vocabulary.encode(line)]
    except Exception as error:
        raise ValueError(
            f"{what}: line {number} cannot be encoded: {line[:80]!r}: {error}"
        ) from error
    size = vocabulary.vocab_size
    # A lookup of an id beyond the table gives zeros, without an error.
    if ids and max(ids) >= size:
        raise ValueError(
            f"{what}: line {number} has the id {max(ids)}, but the vocabulary is too small, with "
            f"vocab_size {size}: {line[:80]!r}"
        )
    return ids


def _rows(rows: Sequence[Sequence[int]], batch_size: int, length: int, what: str) -> np.ndarray:
    """Truncates and pads rows to a length; fills the last batch with copies of the first row."""
    if not rows:
        raise ValueError(f"{what}: there are no lines to encode")
    empty = [i for i, ids in enumerate(rows, 1) if not ids]
    cut = [i for i, ids in enumerate(rows, 1) if len(ids) > length]
    for numbers, problem in ((empty, "are empty"), (cut, f"are cut to {length} ids")):
        if numbers:
            tf.logging.warning(
                "%s: %d lines %s, number %s", what, len(numbers), problem, _numbers(numbers)
            )
    result = np.zeros([-(-len(rows) // batch_size) * batch_size, length], np.int32)
    for row, ids in zip(result, itertools.chain(rows, itertools.repeat(rows[0]))):
        row[: len(ids)] = ids[:length]
    return result


def encoded_inputs(
    inputs: Sequence[str],
    vocabulary: Vocabularies,
    model_type: str,
    batch_size: int,
    length: int,
    eos_id: int,
    sources: Sequence[str],
    prefixes: Optional[Sequence[str]] = None,
) -> np.ndarray:
    """Returns the ids of lines; see `encode_inputs`.

    Args:
      inputs: strings.
      vocabulary: a Vocabulary, or a pair of them, the first of which is used.
      model_type: no EOS is appended for "lm".
      batch_size: the number of lines is padded to a multiple of it, with copies of the first one.
      length: the length that lines are truncated or padded to.
      eos_id: the id of EOS.
      sources: the names in errors of the lines and of prefixes, such as file names.
      prefixes: strings that are put before the lines with negative ids.

    Returns:
      An int32 array [lines, length].

    Raises:
      ValueError: there are no lines, or one cannot be encoded; the message has its number.
    """
    vocabulary = inputs_vocabulary(vocabulary)
    prefixes = prefixes or [""] * len(inputs)
    if len(prefixes) != len(inputs):
        raise ValueError(
            f"{sources[0]}: there are {len(inputs)} lines, but {len(prefixes)} of {sources[1]}"
        )
    end = [] if model_type == "lm" else [eos_id]
    rows = []
    for number, (line, prefix) in enumerate(zip(inputs, prefixes), 1):
        before = _encode(vocabulary, prefix, number, sources[1]) if prefix else []
        ids = _encode(vocabulary, line, number, sources[0])
        # Negative ids are read and not predicted, so they have no score.
        rows.append([-i for i in before] + ids + end)
    return _rows(rows, batch_size, length, sources[0])


def encode_inputs(
    inputs: Sequence[str],
    vocabulary: Vocabularies,
    model_type: str,
    batch_size: int,
    sequence_length: Lengths,
    eos_id: int = 1,
    unscored_prefix: Optional[Sequence[str]] = None,
) -> np.ndarray:
    """Returns the ids of lines, padded with 0.

    Args:
      inputs: strings.
      vocabulary: a Vocabulary, or a pair of them, the first of which is used.
      model_type: no EOS is appended for "lm".
      batch_size: the number of lines is padded to a multiple of it, with copies of the first one.
      sequence_length: the length that lines are truncated or padded to; of a dictionary, that of
        inputs.
      eos_id: the id of EOS.
      unscored_prefix: strings that are prepended to the lines with negative ids, which are inputs
        of the model but are not scored.

    Returns:
      An int32 array [lines, length].

    Raises:
      ValueError: there are no lines, or one cannot be encoded; the message has its number.
    """
    return encoded_inputs(
        inputs,
        vocabulary,
        model_type,
        batch_size,
        inputs_length(sequence_length),
        eos_id,
        ("encode_inputs", "unscored_prefix"),
        unscored_prefix,
    )


def encoded_pairs(
    inputs: Sequence[str],
    targets: Sequence[str],
    vocabulary: Vocabularies,
    batch_size: int,
    length: int,
    eos_id: int,
    include_final_eos: bool,
    sources: tuple[str, str],
) -> np.ndarray:
    """Returns the ids of pairs of lines; see `encode_delimited_lm`.

    Args:
      inputs: strings.
      targets: strings, as many as inputs.
      vocabulary: a Vocabulary, or a pair of them.
      batch_size: the number of pairs is padded to a multiple of it, with copies of the first one.
      length: the length that they are truncated or padded to.
      eos_id: the id of EOS.
      include_final_eos: whether EOS follows the targets.
      sources: the names of inputs and targets in errors, such as file names.

    Returns:
      An int32 array [pairs, length].

    Raises:
      ValueError: there are no lines, or not as many inputs as targets, or one cannot be encoded.
    """
    if len(inputs) != len(targets):
        raise ValueError(
            f"encode_delimited_lm: there are {len(inputs)} inputs, but {len(targets)} targets"
        )
    end = [eos_id] if include_final_eos else []
    # An EOS ends the inputs: by how many came before, models tell inputs from targets.
    rows = [
        [
            *_encode(inputs_vocabulary(vocabulary), a, n, sources[0]),
            eos_id,
            *_encode(targets_vocabulary(vocabulary), b, n, sources[1]),
            *end,
        ]
        for n, (a, b) in enumerate(zip(inputs, targets), 1)
    ]
    return _rows(rows, batch_size, length, sources[1])


def encode_delimited_lm(
    inputs: Sequence[str],
    targets: Sequence[str],
    vocabulary: Vocabularies,
    batch_size: int,
    sequence_length: Lengths,
    eos_id: int = 1,
    include_final_eos: bool = True,
) -> np.ndarray:
    """Returns the ids of pairs of lines: inputs, EOS, targets, EOS.

    Args:
      inputs: strings.
      targets: strings, as many as inputs.
      vocabulary: a Vocabulary, or a pair of them.
      batch_size: the number of pairs is padded to a multiple of it, with copies of the first one.
      sequence_length: the length that they are truncated or padded to; of a dictionary, the sum of
        inputs and targets.
      eos_id: the id of EOS.
      include_final_eos: whether EOS follows the targets.

    Returns:
      An int32 array [pairs, length].

    Raises:
      ValueError: there are no lines, or not as many inputs as targets, or one cannot be encoded.
    """
    length = (
        sequence_length
        if isinstance(sequence_length, int)
        else sum(sequence_length[key] for key in ("inputs", "targets"))
    )
    return encoded_pairs(
        inputs,
        targets,
        vocabulary,
        batch_size,
        length,
        eos_id,
        include_final_eos,
        ("inputs", "targets"),
    )


# -- ids as texts


@gin.configurable(module=MODULE)
def clean_decodes(
    ids: tf.Tensor, eos_id: int = 1, pad_id: int = 0, length_axis: int = -1
) -> tf.Tensor:
    """Replaces the ids after the first EOS by padding.

    Args:
      ids: an integer tf Tensor [..., length].
      eos_id: the id of EOS.
      pad_id: the id of padding.
      length_axis: the axis of the length.

    Returns:
      A tf Tensor of the same shape.
    """
    ids = tf.convert_to_tensor(ids)
    ends = tf.cast(tf.equal(ids, eos_id), tf.int32)
    # The number of EOS before each position: exclusive, so that the first EOS itself stays.
    after = tf.cumsum(ends, axis=length_axis, exclusive=True)
    return tf.where_v2(tf.greater(after, 0), tf.cast(pad_id, ids.dtype), ids)


def decode_ids(vocabulary: Vocabulary, ids: Iterable[int]) -> str:
    """Decodes a row of ids, without trailing padding.

    Args:
      vocabulary: a Vocabulary.
      ids: integers.

    Returns:
      A string.
    """
    ids = [int(i) for i in ids]
    while ids and not ids[-1]:
        ids.pop()
    return as_text(vocabulary.decode(ids))

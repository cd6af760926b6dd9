"""Decoding of files and data sets, into files that a killed program can resume."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow import estimator as mtf_estimator
from mesh_tensorflow._calls import within
from mesh_tensorflow._paths import write_whole
from mesh_tensorflow.transformer.utils._data import (
    arrays_input_fn,
    as_text,
    call_dataset_fn,
    call_with_known,
    combined_input_fn,
    decode_ids,
    encode_inputs,
    examples_of,
    get_inputs_from_file,
    lines_text,
    write_lines_to_file,
)
from mesh_tensorflow.transformer.utils._settings import (
    MODULE,
    Lengths,
    Steps,
    get_checkpoint_iterator,
    get_step_from_checkpoint_path,
    inputs_vocabulary,
    targets_vocabulary,
)

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset import EvalDataset, Vocabularies
    from mesh_tensorflow.transformer.vocabulary import Vocabulary


_LEAST_ROWS = 64
_MOST_SECONDS = 10.0
_FINISHED = ".finished"

_unfinished: contextvars.ContextVar[Optional[list[str]]] = contextvars.ContextVar(
    "unfinished", default=None
)


# -- files that a killed program can resume


@contextlib.contextmanager
def finishing_together() -> Iterator[None]:
    """Context manager that keeps the parts of finished files until all files are finished.

    So a run that is killed in its second file does not compute the first one again. Nested contexts
    have no effect.
    """
    # Within another one, it is that one which removes the parts of all files.
    if _unfinished.get() is not None:
        yield
        return
    directories: list[str] = []
    with within(_unfinished, directories):
        yield
    # Not within `finally`: after an error, parts remain for a run that resumes.
    _remove(directories)


def _remove(directories: Sequence[str]) -> None:
    """Removes the parts of finished files.

    They are renamed first: if killed in between, no remaining parts look like an unfinished run.
    """
    finished = [directory + _FINISHED for directory in directories]
    for directory, new in zip(directories, finished):
        # A run that was killed below has renamed it already.
        if not tf.io.gfile.isdir(new):
            tf.io.gfile.rename(directory, new)
    for directory in finished:
        tf.io.gfile.rmtree(directory)


def _fingerprint(*parts: object) -> str:
    # In JSON, lists of texts differ that would be equal if they were joined.
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
    # A part is named after its first input, so the lines so far are the name of the next one.
    while part := _read_part(_part(directory, len(lines))):
        lines += part
    return lines


def _compute_missing(
    directory: str,
    inputs: Sequence[str],
    batch_size: int,
    outputs_from: Callable[[int], Iterator[str]],
) -> list[str]:
    """Returns an output for each input; writes new ones to parts.

    Raises:
      RuntimeError: there are too few.
    """
    tf.io.gfile.makedirs(directory)
    lines = _finished_parts(directory)
    if lines:
        tf.logging.info("%d of %d lines were there already", len(lines), len(inputs))
    outputs = outputs_from(len(lines)) if len(lines) < len(inputs) else iter(())
    part: list[str] = []
    since = time.monotonic()
    while missing := len(inputs) - len(lines) - len(part):
        # Parts consist of whole batches, so that a run that resumes begins where a batch does.
        batch = [as_text(x) for x in itertools.islice(outputs, min(batch_size, missing))]
        if len(batch) < min(batch_size, missing):
            missing -= len(batch)
            raise RuntimeError(f"there were no outputs for the last {missing} inputs")
        part += batch
        # Few files where decoding is fast, and little to compute again where it is slow.
        if (
            missing == len(batch)
            or len(part) >= _LEAST_ROWS
            or time.monotonic() - since > _MOST_SECONDS
        ):
            path = _part(directory, len(lines))
            # As JSON: outputs may have line breaks, and their number says where a run goes on.
            write_whole(path, json.dumps(part), f"{path}.tmp")
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

    A line break within an output is written as a space.

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
    # Other inputs, weights or settings have another directory, so that their parts are never mixed.
    directory = f"{filename}.parts-{_fingerprint(list(inputs), batch_size, about)}"
    # Killed while the parts of a finished file were being removed.
    finished = tf.io.gfile.isdir(directory + _FINISHED)
    if finished and not tf.io.gfile.exists(filename):
        tf.io.gfile.rmtree(directory + _FINISHED)
        finished = False
    if not finished:
        lines = _compute_missing(directory, inputs, batch_size, outputs_from)
        text = lines_text(lines)
        # Beside the parts, so that what a killed run leaves of it is removed with them.
        write_whole(filename, text, os.path.join(directory, "whole.tmp"))
    together = _unfinished.get()
    if together is None:
        _remove([directory])
    elif directory not in together:
        together.append(directory)


# -- decoding of files


_LOGGED = 5


def _text(value: Union[bytes, str, Iterable[int]], vocabulary: Vocabulary) -> str:
    """Returns the text of a prediction, which is ids or text."""
    return as_text(value) if isinstance(value, (bytes, str)) else decode_ids(vocabulary, value)


@gin.configurable(module=MODULE)
def decode(
    estimator: mtf_estimator.tpu.TPUEstimator,
    input_fn: Callable[..., Any],
    vocabulary: Vocabularies,
    checkpoint_path: Optional[str] = None,
) -> Iterator[str]:
    """Yields a model's output text for each example.

    Args:
      estimator: what `get_estimator` returns.
      input_fn: an input function of features.
      vocabulary: a Vocabulary, or a pair of them.
      checkpoint_path: a checkpoint; the latest if None.

    Yields:
      Strings.
    """
    for number, prediction in enumerate(
        estimator.predict(input_fn, checkpoint_path=checkpoint_path)
    ):
        output = _text(prediction["outputs"], targets_vocabulary(vocabulary))
        if number < _LOGGED and "inputs" in prediction:
            # Ids that are given, as prefixes are, are negative.
            source = _text(abs(prediction["inputs"]), inputs_vocabulary(vocabulary))
            tf.logging.info("decoded %r from %r", output, source)
        yield output


def _latest(estimator: mtf_estimator.tpu.TPUEstimator, checkpoint_path: Optional[str]) -> str:
    path = checkpoint_path or estimator.latest_checkpoint()
    if path is None:
        raise ValueError(f"there is no checkpoint in {estimator.model_dir}")
    return path


def _weights_of(path: str) -> list[str]:
    """Returns a fingerprint of a checkpoint, from its index, which holds checksums."""
    # Training anew in the same directory writes other weights under the same name.
    digest, index = "", f"{path}.index"
    if tf.io.gfile.exists(index):
        with tf.io.gfile.GFile(index, "rb") as f:
            digest = hashlib.sha256(f.read()).hexdigest()
    return [os.path.abspath(path), digest]


@gin.configurable(module=MODULE)
def decode_from_file(
    estimator: mtf_estimator.tpu.TPUEstimator,
    vocabulary: Vocabularies,
    model_type: str,
    batch_size: int,
    sequence_length: Lengths,
    checkpoint_path: Optional[str] = None,
    input_filename: str = gin.REQUIRED,
    output_filename: str = gin.REQUIRED,
    eos_id: int = 1,
    repeats: int = 1,
) -> None:
    """Decodes the lines of a file to another file, `output_filename`-<checkpoint step>.

    If killed and restarted with the same inputs, checkpoint and gin parameters, it resumes where it
    stopped. Finished outputs are kept in <file>.parts-<fingerprint> until all are done.

    Args:
      estimator: what `get_estimator` returns.
      vocabulary: a Vocabulary, or a pair of them.
      model_type: such as "lm".
      batch_size: the number of lines decoded together.
      sequence_length: an integer, or a dictionary of them by feature.
      checkpoint_path: a checkpoint; the latest if None.
      input_filename: the path of the inputs, one per line.
      output_filename: the path of the outputs, one per line, without the step.
      eos_id: the id of EOS.
      repeats: the number of outputs for each input, on consecutive lines.

    Raises:
      ValueError: there are no inputs, or a line is empty (see `get_inputs_from_file`), not valid
        UTF-8 or cannot be encoded; the message names the file and the line number.
    """
    lines = get_inputs_from_file(input_filename)
    if not lines:
        raise ValueError(f"decode_from_file: there are no lines in {input_filename}")
    inputs = [line for line in lines for _ in range(repeats)]
    # Before the lines are repeated, so that errors have the line numbers of the file.
    ids = encode_inputs(
        lines, vocabulary, model_type, 1, sequence_length, eos_id, sources=[input_filename]
    )
    ids = np.repeat(ids, repeats, axis=0)
    # A program has a fixed batch: copies of a line fill it up, and their outputs are dropped.
    ids = np.concatenate([ids, np.repeat(ids[:1], -len(ids) % batch_size, axis=0)])
    # Chosen once: the name of the file, its parts and the outputs have to be of one checkpoint.
    path = _latest(estimator, checkpoint_path)

    def outputs_from(start: int) -> Iterator[str]:
        # Finished parts are of whole batches, so the rest is too, and no input is dropped.
        input_fn = arrays_input_fn({"inputs": ids[start:]}, batch_size)
        # The rest are the lines that fill the last batch.
        outputs = decode(estimator, input_fn, vocabulary, checkpoint_path=path)
        return itertools.islice(outputs, len(inputs) - start)

    step = get_step_from_checkpoint_path(path)
    write_resumably(
        f"{output_filename}-{step}",
        inputs,
        batch_size,
        outputs_from,
        # Beams, temperatures and lengths are bound by gin: all of it is in the fingerprint.
        [_weights_of(path), model_type, eos_id, ids.shape[1], gin.config_str()],
    )


# -- decoding of data sets


def text_of_feature(example: Mapping[str, Any], key: str, vocabulary: Vocabulary) -> str:
    """Returns the text of a feature: the text before encoding if present, or decoded ids.

    Args:
      example: a dictionary of arrays.
      key: the feature, such as "inputs".
      vocabulary: its Vocabulary.

    Returns:
      A string.
    """
    for suffix in ("_pretokenized", "_plaintext"):
        if f"{key}{suffix}" in example:
            return as_text(example[f"{key}{suffix}"])
    return _text(example[key], vocabulary)


def dataset_of(dataset: EvalDataset, sequence_length: Lengths) -> tf.data.Dataset:
    """Returns the examples of an EvalDataset.

    Args:
      dataset: the EvalDataset, whose function need not take a length.
      sequence_length: a number, or a dictionary by feature.
    """
    return call_with_known(dataset.dataset_fn, sequence_length=sequence_length)


def postprocessed(dataset: Any, text: Any, **about: Any) -> Any:
    """Returns what `postprocess_fn` of an EvalDataset makes of a text; the text if it is None.

    Args:
      dataset: an EvalDataset.
      text: a decoded string, an output or a target.
      **about: further arguments of `postprocess_fn`: `example` and perhaps `is_target`.
    """
    return text if dataset.postprocess_fn is None else dataset.postprocess_fn(text, **about)


def texts_of_inputs(examples: Iterable[Mapping], vocabulary: Vocabularies) -> list[str]:
    """Returns the text of inputs of each example that has some.

    Args:
      examples: dictionaries of arrays.
      vocabulary: a Vocabulary, or a pair of them.
    """
    own = inputs_vocabulary(vocabulary)
    return [text_of_feature(e, "inputs", own) for e in examples if "inputs" in e]


def postprocessed_targets(
    dataset: EvalDataset, examples: Iterable[Mapping], vocabulary: Vocabularies
) -> list[Any]:
    """Returns the targets of examples, in the form in which metrics compare them.

    Args:
      dataset: the EvalDataset of the examples.
      examples: dictionaries of arrays.
      vocabulary: a Vocabulary, or a pair of them.
    """
    own = targets_vocabulary(vocabulary)
    return [
        postprocessed(dataset, text_of_feature(e, "targets", own), example=e, is_target=True)
        for e in examples
    ]


@gin.configurable(module=MODULE)
def decode_from_dataset(
    estimator: mtf_estimator.tpu.TPUEstimator,
    vocabulary: Vocabularies,
    model_type: str,
    batch_size: int,
    sequence_length: Lengths,
    checkpoint_path: Optional[str] = None,
    infer_dataset_fn: Callable[..., Sequence[Any]] = gin.REQUIRED,
    dataset_split: str = "validation",
    decode_output_dir: str = gin.REQUIRED,
) -> None:
    """Decodes the inputs of data sets to files <task>_<step>_predictions.

    It also writes <task>_inputs and <task>_targets. If killed and restarted, it resumes where it
    stopped, like `decode_from_file`.

    Args:
      estimator: what `get_estimator` returns.
      vocabulary: a Vocabulary, or a pair of them.
      model_type: such as "lm".
      batch_size: the number of examples decoded together.
      sequence_length: an integer, or a dictionary of them by feature.
      checkpoint_path: a checkpoint; the latest if None.
      infer_dataset_fn: a function of `sequence_length`, `vocabulary` and `dataset_split` that
        returns a list of EvalDatasets.
      dataset_split: such as "validation".
      decode_output_dir: the directory to write to.

    Raises:
      ValueError: there are no data sets.
    """
    del model_type
    path = _latest(estimator, checkpoint_path)
    step = get_step_from_checkpoint_path(path)
    datasets = call_dataset_fn(
        infer_dataset_fn, "infer_dataset_fn", sequence_length, vocabulary, dataset_split
    )
    if not datasets:
        raise ValueError(f"decode_from_dataset: there are no data for the split {dataset_split!r}")
    about = [_weights_of(path), sequence_length, gin.config_str()]
    with finishing_together():
        for dataset in datasets:
            examples = list(examples_of(functools.partial(dataset_of, dataset, sequence_length)))
            with_targets = [e for e in examples if "targets" in e]
            targets = postprocessed_targets(dataset, with_targets, vocabulary)
            texts = {
                "inputs": texts_of_inputs(examples, vocabulary),
                "targets": [as_text(t) for t in targets],
            }
            for name, lines in texts.items():
                write_lines_to_file(
                    lines, os.path.join(decode_output_dir, f"{dataset.name}_{name}")
                )

            def outputs_from(
                start: int, dataset: EvalDataset = dataset, count: int = len(examples)
            ) -> Iterator[str]:
                # It relies on the order of examples, which is in the fingerprint of the parts.
                rest = [lambda: dataset_of(dataset, sequence_length).skip(start)]
                input_fn = combined_input_fn(rest, batch_size)
                outputs = decode(estimator, input_fn, vocabulary, path)
                return itertools.islice(outputs, count - start)

            write_resumably(
                os.path.join(decode_output_dir, f"{dataset.name}_{step}_predictions"),
                # By their texts the parts are those of these examples, and of no others.
                ["\n".join(x[i] for x in texts.values() if x) for i in range(len(examples))],
                batch_size,
                outputs_from,
                about,
            )


@gin.configurable(module=MODULE)
def infer_model(
    estimator: mtf_estimator.tpu.TPUEstimator,
    vocabulary: Vocabularies,
    sequence_length: Lengths,
    batch_size: int,
    model_type: str,
    model_dir: str,
    eval_checkpoint_step: Steps,
    checkpoint_paths: Optional[Sequence[str]] = None,
    decode_fn: Callable[..., None] = decode_from_file,
) -> None:
    """Decodes with each of several checkpoints.

    Args:
      estimator: what `get_estimator` returns.
      vocabulary: a Vocabulary, or a pair of them.
      sequence_length: an integer, or a dictionary of them by feature.
      batch_size: the number of examples decoded together.
      model_type: such as "lm".
      model_dir: the directory of checkpoints.
      eval_checkpoint_step: which checkpoints; see `get_checkpoint_iterator`.
      checkpoint_paths: paths of checkpoints, to use instead of `eval_checkpoint_step`.
      decode_fn: the function to call for each.
    """
    paths = checkpoint_paths or get_checkpoint_iterator(eval_checkpoint_step, model_dir)
    # Around all checkpoints: a run that is killed does not decode with the first ones again. Where
    # it waits for new ones without an end, parts of finished files would never be removed.
    endless = not checkpoint_paths and eval_checkpoint_step is None
    with contextlib.nullcontext() if endless else finishing_together():
        for path in paths:
            decode_fn(
                estimator,
                vocabulary=vocabulary,
                model_type=model_type,
                batch_size=batch_size,
                sequence_length=sequence_length,
                checkpoint_path=path,
            )

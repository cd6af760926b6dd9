"""Data of models: lines of files and data sets as ids, ids as texts, and features on a mesh."""

from __future__ import annotations

import itertools
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import gin
import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._calls import arguments_of
from mesh_tensorflow._elements import Elements
from mesh_tensorflow._paths import write_whole
from mesh_tensorflow.estimator import ModeKeys
from mesh_tensorflow.transformer import dataset as transformer_dataset
from mesh_tensorflow.transformer.utils._settings import (
    MODULE,
    Lengths,
    inputs_length,
    inputs_vocabulary,
    length_of_feature,
    targets_vocabulary,
)

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset import Vocabularies
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
    empty = [] if keep_empty_lines else [n for n, line in enumerate(lines, 1) if not line]
    if empty:
        which = f"line {empty[0]} is" if len(empty) == 1 else f"lines {_numbers(empty)} are"
        raise ValueError(
            f"{input_filename}: {which} empty, but each line is a text with a result of its own. "
            f"Fill or remove {'it' if len(empty) == 1 else 'them'}; or, if empty texts are meant, "
            "bind utils.get_inputs_from_file.keep_empty_lines = True by gin, or pass "
            "keep_empty_lines=True"
        )
    if lines and not lines[-1]:
        lines.pop()
    return [line for line in lines if not (ignore_comments and line.startswith("#"))]


def temporary_name(filename: str) -> str:
    """Returns an unpredictable temporary name beside a file."""
    return f"{filename}.{uuid.uuid4().hex}.tmp"


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
    write_whole(filename, text, temporary_name(filename))


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


def encode_inputs(
    inputs: Sequence[str],
    vocabulary: Vocabularies,
    model_type: str,
    batch_size: int,
    sequence_length: Lengths,
    eos_id: int = 1,
    unscored_prefix: Optional[Sequence[str]] = None,
    sources: Sequence[str] = ("encode_inputs", "unscored_prefix"),
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
      sources: what errors call the lines and the prefixes, such as the names of their files.

    Returns:
      An int32 array [lines, length].

    Raises:
      ValueError: there are no lines, or one cannot be encoded; the message has its number.
    """
    vocabulary = inputs_vocabulary(vocabulary)
    prefixes = unscored_prefix or [""] * len(inputs)
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
    return _rows(rows, batch_size, inputs_length(sequence_length), sources[0])


def encode_delimited_lm(
    inputs: Sequence[str],
    targets: Sequence[str],
    vocabulary: Vocabularies,
    batch_size: int,
    sequence_length: Lengths,
    eos_id: int = 1,
    include_final_eos: bool = True,
    sources: Sequence[str] = ("inputs", "targets"),
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
      sources: what errors call inputs and targets, such as the names of their files.

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
    length = sequence_length
    if not isinstance(length, int):
        length = sum(length[key] for key in ("inputs", "targets"))
    return _rows(rows, batch_size, length, sources[1])


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


# -- data sets and input functions


# The features that models take; an example may have others, for postprocessing functions.
_MODEL_FEATURES = (
    "inputs",
    "inputs_position",
    "inputs_segmentation",
    "targets",
    "targets_position",
    "targets_segmentation",
    "targets_subsegmentation",
)


def call_with_known(function: Callable[..., Any], **given: object) -> Any:
    """Calls a function with the subset of arguments that it accepts.

    Args:
      function: the function.
      **given: arguments by name.

    Returns:
      What the function returns.
    """
    return function(**arguments_of(function, given))


def call_dataset_fn(
    function: Optional[Callable[..., Any]],
    name: str,
    sequence_length: Optional[Lengths],
    vocabulary: Vocabularies,
    dataset_split: str,
) -> Any:
    """Calls a user's dataset function.

    Args:
      function: a function of `sequence_length`, `vocabulary` and `dataset_split`.
      name: its name in gin.
      sequence_length: an integer, or a dictionary of them by feature; None for whole examples.
      vocabulary: a Vocabulary, or a pair of them.
      dataset_split: such as "train".

    Returns:
      What the function returns.

    Raises:
      ValueError: the function is None.
    """
    if function is None:
        raise ValueError(f"there are no data: bind utils.run.{name} to a function, or pass {name}=")
    return function(
        sequence_length=sequence_length, vocabulary=vocabulary, dataset_split=dataset_split
    )


def examples_of(make_dataset: Callable[[], tf.data.Dataset]) -> Iterator[dict[str, Any]]:
    """Yields the examples of a data set as NumPy arrays.

    Args:
      make_dataset: a function that returns the data set, called in a separate tf graph.

    Yields:
      Dictionaries.
    """
    # In a graph of its own, which is freed with its data set, also where the caller is eager.
    with tf.Graph().as_default() as graph:
        elements = Elements(make_dataset())
        # After the data set is made, as the tables of its vocabularies are created with it.
        tables = tf.tables_initializer()
    with tf.Session(graph=graph) as session:
        session.run([elements.initializer, tables])
        while elements.advance(session):
            yield session.run(elements.current)


def in_vocabulary(dataset: tf.data.Dataset, vocab_sizes: Mapping[str, int]) -> tf.data.Dataset:
    """Returns a data set that raises an error at ids outside the vocabulary.

    Args:
      dataset: a Dataset of dictionaries.
      vocab_sizes: the sizes of vocabularies by feature.

    Returns:
      A Dataset of the same elements.
    """

    def checked(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        checks = [
            # A lookup of an id beyond the table gives zeros, without an error.
            tf.debugging.assert_less(
                tf.reduce_max(example[key]),
                tf.cast(size, example[key].dtype),
                message=f"the feature {key!r} has an id that the vocabulary does not: it is too "
                f"small, with vocab_size {size}",
            )
            for key, size in vocab_sizes.items()
            if key in example
        ]
        with tf.control_dependencies(checks):
            # Only what is made here waits for the checks: hence the identities.
            return {k: tf.identity(v) for k, v in example.items()}

    return dataset.map(checked)


def combined_input_fn(
    dataset_fns: Sequence[Callable[[], tf.data.Dataset]], batch_size: int
) -> Callable[..., tf.data.Dataset]:
    """Returns an input function that concatenates several data sets.

    Args:
      dataset_fns: functions that return data sets.
      batch_size: the number of examples in a batch; the last one is padded with zeros.

    Returns:
      A function of `params`.
    """

    def input_fn(params: object = None) -> tf.data.Dataset:
        del params
        combined: Any = None
        for make in dataset_fns:
            ds = make().map(model_features)
            combined = ds if combined is None else combined.concatenate(ds)
        # The last batch is filled up and not dropped: each example has to have an output.
        combined = combined.batch(batch_size, drop_remainder=False)
        # Along the batch, whose size is static then, as programs on a mesh need it.
        combined = transformer_dataset.trim_and_pad_dataset(combined, length=batch_size)
        return combined.prefetch(tf.data.AUTOTUNE)

    return input_fn


def arrays_input_fn(
    features: Mapping[str, np.ndarray], batch_size: int
) -> Callable[..., tf.data.Dataset]:
    """Returns an input function over arrays.

    Args:
      features: arrays [rows, length], where rows is a multiple of the batch size.
      batch_size: the number of rows in a batch.

    Returns:
      A function of `params`.
    """

    def input_fn(params: object = None) -> tf.data.Dataset:
        del params
        # Nothing is dropped, as rows are a multiple of the batch; it makes the batch's size static.
        return tf.data.Dataset.from_tensor_slices(dict(features)).batch(
            batch_size, drop_remainder=True
        )

    return input_fn


# -- features as Tensors


def model_features(example: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the features of an example that models take.

    Args:
      example: a dictionary.

    Returns:
      A dictionary.
    """
    return {key: example[key] for key in example if key in _MODEL_FEATURES}


def has_inputs_feature(model_type: str, mode: str, scoring: bool) -> bool:
    """Returns whether a model type needs the feature "inputs" in a mode.

    Args:
      model_type: such as "lm".
      mode: a ModeKeys value.
      scoring: whether prediction computes scores of given targets.

    Returns:
      A bool.
    """
    if mode == ModeKeys.PREDICT and not scoring:
        return True
    return model_type not in ("lm", "delimited_lm") or (
        model_type == "delimited_lm" and mode != ModeKeys.PREDICT
    )


def check_features(
    features: Mapping[str, Any], model_type: str, mode: str, scoring: bool = False
) -> None:
    """Checks that all features that a model type needs in a mode are present.

    Args:
      features: a dictionary.
      model_type: such as "lm".
      mode: a ModeKeys value.
      scoring: whether prediction computes scores of given targets.

    Raises:
      ValueError: one is missing, or there is one that the model would ignore.
    """
    needed = has_inputs_feature(model_type, mode, scoring)
    problem = None
    if needed and "inputs" not in features:
        problem = "should have feature inputs"
    elif model_type == "lm" and not (needed or scoring) and "inputs" in features:
        problem = "should not have feature inputs"
    elif (mode != ModeKeys.PREDICT or scoring) and "targets" not in features:
        problem = "should have feature targets"
    if problem:
        raise ValueError(
            f"mode={mode} model_type={model_type} {problem}, and has {', '.join(features)}.\n"
            'Examples of inputs and targets are for model_type="delimited_lm" or "bitransformer", '
            'and those of targets alone for model_type="lm", which predicts what follows inputs'
        )


def import_features(
    mesh: mtf.Mesh,
    features: Mapping[str, tf.Tensor],
    batch_dims: Sequence[mtf.Dimension],
    sequence_length: Lengths,
) -> dict[str, mtf.Tensor]:
    """Imports the features that models take as Tensors.

    Args:
      mesh: a Mesh.
      features: integer tf Tensors [rows, length] by name.
      batch_dims: the dimensions of the rows.
      sequence_length: an integer, or a dictionary of them by feature.

    Returns:
      A dictionary of int32 Tensors with the dimensions [batch_dims..., length].

    Raises:
      ValueError: the shape of a feature does not match.
    """
    rows = mtf.Shape(list(batch_dims)).size
    result = {}
    for key, x in model_features(features).items():
        length = mtf.Dimension("length", length_of_feature(sequence_length, key))
        if not x.shape.is_compatible_with([rows, length.size]):
            raise ValueError(
                f"the feature {key!r} has shape {x.shape.as_list()}, but should be of {rows} rows "
                f"(utils.run.batch_size) of length {length.size} (utils.run.sequence_length): the "
                "data set should pad and cut its examples, as trim_and_pad_dataset does"
            )
        shape = mtf.Shape([*batch_dims, length])
        x = tf.reshape(tf.cast(x, tf.int32), shape.to_integer_list)
        result[key] = mtf.import_tf_tensor(mesh, x, shape)
    return result


# -- inputs and targets in one sequence


def _rank(token: mtf.Tensor) -> mtf.Tensor:
    """Returns the number of tokens before each position of the row."""
    return mtf.cumsum(token, token.shape.dims[-1], exclusive=True)


class _Segment(NamedTuple):
    """Inputs or targets, to be joined to one sequence."""

    ids: mtf.Tensor
    token: mtf.Tensor  # 1 at tokens, 0 at padding
    segment: mtf.Tensor
    length_dim: mtf.Dimension


def _part(features: Mapping[str, mtf.Tensor], key: str) -> _Segment:
    """Returns a feature as a part, with its length dimension named after it."""
    ids = features[key]
    length = ids.shape.dims[-1]
    # Both are named `length`, with sizes that may differ, and stand in one product below.
    own = mtf.Dimension(f"{key}_length", length.size)
    ids = mtf.rename_dimension(ids, length.name, own.name)
    token = mtf.cast(mtf.not_equal(ids, 0), tf.int32)
    segments = features.get(f"{key}_segmentation")
    # Without packing all tokens are of example 1, and padding of none.
    segment = token if segments is None else mtf.rename_dimension(segments, length.name, own.name)
    return _Segment(ids, token, segment, own)


def _count(
    of: _Segment, at: _Segment, compare: Callable[[mtf.Tensor, mtf.Tensor], mtf.Tensor]
) -> mtf.Tensor:
    """Counts, at each position of `at`, the tokens of `of` whose segments satisfy `compare`."""
    other = mtf.Dimension("other_length", of.length_dim.size)
    segment = mtf.rename_dimension(of.segment, of.length_dim.name, other.name)
    token = mtf.rename_dimension(of.token, of.length_dim.name, other.name)
    shape = mtf.Shape(at.ids.shape.dims + [other])
    chosen = compare(mtf.broadcast(segment, shape), mtf.broadcast(at.segment, shape))
    return mtf.reduce_sum(mtf.cast(chosen, tf.int32) * token, reduced_dim=other)


def _joined(
    parts: Sequence[_Segment],
    values: Sequence[mtf.Tensor],
    places: Sequence[mtf.Tensor],
    length: mtf.Dimension,
) -> mtf.Tensor:
    """Returns the values of both parts, each at its position in the joined sequence."""
    joined = []
    for part, value, place in zip(parts, values, places):
        # A product with a one-hot, which any layout can split, unlike a scatter; padding adds 0.
        at = mtf.one_hot(place, length, dtype=tf.int32)
        shape = mtf.Shape(part.ids.shape.dims[:-1] + [length])
        joined.append(mtf.einsum([value * part.token, at], output_shape=shape))
    return mtf.add_n(joined)


def dynamic_text2self(mtf_features: Mapping[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
    """Concatenates inputs and targets to one sequence of targets, without padding in between.

    In packed rows, the inputs of each example are followed by its targets.

    Args:
      mtf_features: "inputs" [..., length], "targets" [..., length], and with packing
        "inputs_segmentation" and "targets_segmentation"; lengths may differ.

    Returns:
      "targets" [..., length], where the length is the sum of both, and with packing
      "targets_segmentation" and "targets_position".
    """
    inputs, targets = _part(mtf_features, "inputs"), _part(mtf_features, "targets")
    length = mtf.Dimension(
        mtf_features["targets"].shape.dims[-1].name,
        inputs.length_dim.size + targets.length_dim.size,
    )
    texts = [inputs, targets]
    # The inputs of an example follow the targets of earlier examples; its targets follow its
    # inputs.
    places = [
        _rank(inputs.token) + _count(targets, inputs, mtf.less),
        _rank(targets.token) + _count(inputs, targets, mtf.less_equal),
    ]
    result = {"targets": _joined(texts, [part.ids for part in texts], places, length)}
    if {"inputs_segmentation", "targets_segmentation"} <= set(mtf_features):
        # An example begins after all tokens of earlier ones, inputs and targets.
        starts = [_count(inputs, p, mtf.less) + _count(targets, p, mtf.less) for p in texts]
        result["targets_segmentation"] = _joined(
            texts, [part.segment for part in texts], places, length
        )
        result["targets_position"] = _joined(
            texts, [place - start for place, start in zip(places, starts)], places, length
        )
    return result

"""Where examples come from: files of text and of TFRecords, and TensorFlow Datasets."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow.transformer import vocabulary as vocabularies
from mesh_tensorflow.transformer.dataset._features import (
    MODULE,
    Lengths,
    Vocabularies,
    checked_int32,
    encode_all_features,
    mapped,
    pack_dataset,
    pack_or_pad,
    supervised_to_dict,
)

# -- text


_SHUFFLE_BUFFER = 100000
_PREFETCH = 1000

Glob = Union[str, Sequence[str]]


def matching_files(name: str, glob: Glob) -> list[str]:
    """Returns the files that match a pattern or one of several, in order.

    Args:
      name: a string, the name of the calling function.
      glob: a string or a list of strings.

    Raises:
      ValueError: no file matches.
    """
    files = checkpoint_files.matching(glob)
    if not files:
        raise ValueError(f"{name}: no file matches {glob!r}")
    return files


@gin.configurable(module=MODULE)
def simple_text_line_dataset(
    glob: Glob = gin.REQUIRED, shuffle_buffer_size: int = _SHUFFLE_BUFFER
) -> tf.data.Dataset:
    """Returns the lines of text files, each once, shuffled.

    Args:
      glob: a string, a pattern of file names, or a list of them.
      shuffle_buffer_size: an integer, the size of the shuffle buffer in lines; 1 keeps the order.

    Returns:
      A Dataset of tf scalars of type string.

    Raises:
      ValueError: no file matches.
    """
    return _lines("simple_text_line_dataset", glob, shuffle_buffer_size)


def _lines(name: str, glob: Glob, shuffle_buffer_size: int) -> tf.data.Dataset:
    dataset = tf.data.TextLineDataset(matching_files(name, glob))
    return dataset.shuffle(shuffle_buffer_size) if shuffle_buffer_size > 1 else dataset


@gin.configurable(module=MODULE)
def make_text_line_dataset(glob: Glob = gin.REQUIRED) -> tf.data.Dataset:
    """Returns the lines of text files, shuffled and repeated.

    Args:
      glob: a string, a pattern of file names, or a list of them.

    Returns:
      An infinite Dataset of tf scalars of type string.

    Raises:
      ValueError: no file matches.
    """
    dataset = _lines("make_text_line_dataset", glob, _SHUFFLE_BUFFER)
    # Repeated after it is shuffled, so that each pass has every line once.
    return dataset.repeat().prefetch(_PREFETCH)


@gin.configurable(module=MODULE)
def sample_from_text_line_datasets(
    glob_weight_list: Sequence[tuple[Glob, float]],
    shuffle_buffer_size: int = _SHUFFLE_BUFFER,
    prefetch: int = _PREFETCH,
) -> tf.data.Dataset:
    """Returns a mixture of text files: each line comes from files sampled by weight.

    Args:
      glob_weight_list: a list of pairs (glob, weight). The lines of each glob are shuffled and
        repeated; weights are positive numbers that need not sum to 1.
      shuffle_buffer_size: an integer, the size of each glob's shuffle buffer in lines.
      prefetch: an integer, the number of lines to prefetch.

    Returns:
      An infinite Dataset of tf scalars of type string.

    Raises:
      ValueError: there are no globs, no file matches one, or a weight is not positive.
    """
    name = "sample_from_text_line_datasets"
    if not glob_weight_list:
        raise ValueError(f"{name}: the list of pairs (glob, weight) is empty")
    bad = [(glob, weight) for glob, weight in glob_weight_list if not weight > 0]
    if bad:
        raise ValueError(f"{name}: weights must be positive numbers, got {bad}")
    total = sum(weight for _, weight in glob_weight_list)
    mixture = tf.data.experimental.sample_from_datasets(
        # Each repeats, since a mixture whose smallest part has ended has other weights.
        [_lines(name, glob, shuffle_buffer_size).repeat() for glob, _ in glob_weight_list],
        [weight / total for _, weight in glob_weight_list],
    )
    return mixture.prefetch(prefetch)


@gin.configurable(module=MODULE)
def packed_parallel_tsv_dataset(
    dataset: tf.data.Dataset = gin.REQUIRED,
    dataset_split: str = gin.REQUIRED,
    batch_size: Optional[int] = None,
    sequence_length: Lengths = gin.REQUIRED,
    vocabulary: Vocabularies = gin.REQUIRED,
    append_eos: bool = True,
    eos_id: int = 1,
    max_encoded_len: int = 0,
) -> tf.data.Dataset:
    """Returns the packed examples of lines with two columns, inputs and targets.

    A tab separates the columns; quotation marks have no meaning. Examples that are too long for a
    row are truncated, which removes their EOS; `max_encoded_len` drops them instead. An empty
    column is an empty sequence.

    Args:
      dataset: a Dataset of lines, tf scalars of type string.
      dataset_split: ignored, like `batch_size`; both are arguments of every dataset function.
      batch_size: ignored.
      sequence_length: an integer, or a dictionary of them by feature.
      vocabulary: a Vocabulary, or a pair of them, of inputs and of targets.
      append_eos: a boolean, whether to append `eos_id` to both columns.
      eos_id: an integer.
      max_encoded_len: an integer; examples with more ids in one column, EOS included, are dropped.
        0 keeps all.

    Returns:
      A Dataset as returned by `pack_dataset`, read once, in order. Reading a line that does not
      have two columns raises tf.errors.InvalidArgumentError.
    """
    del dataset_split, batch_size

    def encode(line: tf.Tensor) -> dict[str, tf.Tensor]:
        # With a separator given, what is between two of them is a column even if it is empty.
        columns = tf.strings.split([line], "\t").values
        what = "packed_parallel_tsv_dataset: a line must have 2 columns with a tab between them"
        count = tf.size(columns)
        # Checked when lines are read: a data set is built before any of them is known.
        check = tf.Assert(tf.equal(count, 2), [f"{what}, and has", count, "in", line])
        with tf.control_dependencies([check]):
            # Only what is made within the context waits for the check.
            columns = tf.identity(columns)
        example = {}
        for i, key in enumerate(["inputs", "targets"]):
            ids = vocabularies.vocabulary_of_feature(vocabulary, key).encode_tf(columns[i])
            ids = tf.cast(ids, tf.int32)
            example[key] = tf.concat([ids, [eos_id]], 0) if append_eos else ids
        return example

    dataset = mapped(dataset, encode)
    if max_encoded_len:
        # Before packing, which would cut what is too long; EOS counts, as it has a place.
        dataset = dataset.filter(
            lambda example: (
                tf.maximum(tf.size(example["inputs"]), tf.size(example["targets"]))
                <= max_encoded_len
            )
        )
    return pack_dataset(dataset, sequence_length).prefetch(_PREFETCH)


@gin.configurable(module=MODULE)
def untokenized_tfds_dataset(
    dataset_name: str = gin.REQUIRED,
    text2self: bool = gin.REQUIRED,
    tfds_data_dir: Optional[str] = gin.REQUIRED,
    dataset_split: str = gin.REQUIRED,
    batch_size: Optional[int] = None,
    sequence_length: Lengths = gin.REQUIRED,
    vocabulary: Vocabularies = gin.REQUIRED,
    pack: bool = gin.REQUIRED,
) -> tf.data.Dataset:
    """Returns the encoded examples of a data set of strings of TensorFlow Datasets.

    Args:
      dataset_name: a string, as in "lm1b".
      text2self: a boolean: if True, examples have only targets, from the feature "targets" or
        "text" or the only feature; otherwise they are the supervised pairs of the data set.
      tfds_data_dir: a string, the directory of the data, or `None`.
      dataset_split: a string; "train" is shuffled and repeated, others are read once.
      batch_size: ignored.
      sequence_length: an integer, or a dictionary of them by feature.
      vocabulary: a Vocabulary, or a pair of them, of inputs and of targets.
      pack: a boolean, whether to pack or to pad.

    Returns:
      A Dataset as returned by `pack_or_pad`.

    Raises:
      ImportError: tensorflow_datasets is not installed.
      ValueError: the feature that holds the text is ambiguous.
    """
    del batch_size
    name = "untokenized_tfds_dataset"
    train = dataset_split == "train"
    dataset = vocabularies.tfds_function(name, "load")(
        dataset_name,
        split=dataset_split,
        as_supervised=not text2self,
        data_dir=tfds_data_dir,
        shuffle_files=train,
    )
    if text2self:
        key = _text_key(name, tf.data.experimental.get_structure(dataset))
        dataset = dataset.map(lambda example: {"targets": example[key]})
    else:
        dataset = supervised_to_dict(dataset, text2self)
    if train:
        # The files come in a random order already (shuffle_files), so a small buffer is enough.
        dataset = dataset.repeat().shuffle(_PREFETCH)
    dataset = encode_all_features(dataset, vocabulary)
    return pack_or_pad(dataset, sequence_length, pack=pack).prefetch(_PREFETCH)


def _text_key(name: str, specs: Union[Mapping[str, tf.TensorSpec], tf.TensorSpec]) -> str:
    """Returns the name of the feature that holds the text of a language model."""
    if isinstance(specs, Mapping):
        texts = [k for k, s in specs.items() if s.dtype == tf.string and s.shape.rank == 0]
        for key in ["targets", "text", *(texts if len(texts) == 1 else [])]:
            if key in texts:
                return key
    raise ValueError(
        f'{name}: text2self needs a feature "targets" or "text", or a single one that is a '
        f"string; the data set has {specs}"
    )


# -- TFRecords


_SHUFFLE_BUFFER_OF_RECORDS = 10000
_PREFETCH_RECORDS = 100
_LOOKED_AT = 100  # records, for the names of their features


def _shifted(
    example: Mapping[str, tf.Tensor],
    shift: int,
    append_eos: bool,
    vocabulary: Optional[Vocabularies],
    file: Optional[tf.Tensor] = None,
) -> dict[str, tf.Tensor]:
    """Adds a number to all ids, then appends EOS; checks them against a vocabulary, if any."""
    converted = {}
    where = [] if file is None else ["in", file]
    for k, ids in example.items():
        # In int64, so that no id wraps around by the shift before it is checked.
        ids = checked_int32("reading records", k, tf.cast(ids, tf.int64) + shift, where)
        # After the shift, as EOS has the id of this package.
        if append_eos:
            ids = tf.concat([ids, [vocabularies.EOS_ID]], 0)
        if vocabulary is not None:
            ids = _checked(k, ids, vocabularies.vocabulary_of_feature(vocabulary, k), where)
        converted[k] = ids
    return converted


def _checked(
    key: str, ids: tf.Tensor, vocabulary: vocabularies.Vocabulary, where: Sequence[Any]
) -> tf.Tensor:
    size = vocabulary.vocab_size
    # A lookup of an id beyond the table gives zeros, without an error.
    check = tf.Assert(
        tf.reduce_all(ids < size),
        [
            f"feature {key} has an id that is not in the vocabulary of {size} ids; the data was "
            "encoded with another vocabulary:",
            tf.reduce_max(ids),
            *where,
        ],
    )
    with tf.control_dependencies([check]):
        return tf.identity(ids)


def pretokenized_tfrecord_dataset(
    filenames: Sequence[str],
    text2self: bool,
    eos_included: bool,
    repeat: bool,
    batch_size: Optional[int],
    sequence_length: Lengths,
    vocab_shift: int = 0,
) -> tf.data.Dataset:
    """Returns the packed examples of files of tf.Example records of ids.

    Args:
      filenames: a list of strings, TFRecord files.
      text2self: a boolean, whether to drop the inputs, as for language models.
      eos_included: a boolean, whether the sequences end in EOS; else it is appended.
      repeat: a boolean, whether to repeat the files indefinitely.
      batch_size: ignored.
      sequence_length: an integer, or a dictionary of them by feature.
      vocab_shift: an integer, added to all ids of the records, including EOS.

    Returns:
      A Dataset as returned by `pack_dataset`. A feature that a record lacks is empty.

    Raises:
      ValueError: the first records of the first file all lack a feature. Reading ids that are not
        in the range of int32 raises tf.errors.InvalidArgumentError, with the file.
    """
    del batch_size
    return _tfrecord_dataset(
        filenames, text2self, eos_included, sequence_length, vocab_shift, repeat=repeat
    )


def _tfrecord_dataset(
    filenames: Sequence[str],
    text2self: bool,
    eos_included: bool,
    sequence_length: Lengths,
    vocab_shift: int,
    vocabulary: Optional[Vocabularies] = None,
    *,
    repeat: bool,
    shuffle: bool = False,
) -> tf.data.Dataset:
    keys = ["targets"] if text2self else ["inputs", "targets"]
    # By records that are read here: in the pipeline a missing feature is an empty one, and packing
    # drops rows of empty features without an error.
    _check_features(filenames, keys)
    files = tf.data.Dataset.from_tensor_slices(tf.constant(filenames))
    if shuffle:
        # Before they are repeated, so that each pass has all of them once.
        files = files.shuffle(len(filenames))
    if repeat:
        files = files.repeat()
    # Each record with its file, for errors.
    # One file after the other: without shuffling, records keep the order that they have in files.
    dataset = files.flat_map(
        lambda file: tf.data.TFRecordDataset(file).map(lambda record: (file, record))
    )
    if shuffle:
        # Records and not examples: a buffer of serialized ids takes less room than one of int64.
        dataset = dataset.shuffle(_SHUFFLE_BUFFER_OF_RECORDS)

    def parse(file: tf.Tensor, record: tf.Tensor) -> dict[str, tf.Tensor]:
        # Of any length, none included: records of several kinds may be in one file.
        found = tf.io.parse_single_example(record, {k: tf.io.VarLenFeature(tf.int64) for k in keys})
        ids = {k: v.values for k, v in found.items()}
        return _shifted(ids, vocab_shift, not eos_included, vocabulary, file)

    dataset = mapped(dataset, parse)
    return pack_dataset(dataset, sequence_length).prefetch(_PREFETCH_RECORDS)


def _check_features(filenames: Sequence[str], keys: Sequence[str]) -> None:
    """Raises ValueError if the first records that there are have no ids of a feature at all."""
    file = next((f for f in filenames if tf.io.gfile.exists(f)), None)
    if file is None:
        return  # reading them says so
    records = itertools.islice(tf.io.tf_record_iterator(os.fspath(file)), _LOOKED_AT)
    kinds: dict[str, set[str]] = {}
    for record in records:
        for name, feature in tf.train.Example.FromString(record).features.feature.items():
            # A feature without values may have no kind, and an empty sequence of ids is no mistake.
            kinds.setdefault(name, set()).add(feature.WhichOneof("kind") or "int64_list")
    lacking = [key for key in keys if "int64_list" not in kinds.get(key, set())]
    if kinds and lacking:
        there = ", ".join(f"{name} ({'/'.join(sorted(k))})" for name, k in sorted(kinds.items()))
        raise ValueError(
            f"{file}: its records have no feature {lacking[0]!r} of ids (int64_list); they have "
            f"{there}. Name the features inputs and targets when they are written; records of "
            "targets alone are read with text2self=True"
        )


@gin.configurable(module=MODULE)
def pretokenized_t2t_dataset(
    dataset_name: str = gin.REQUIRED,
    text2self: bool = False,
    data_dir: str = gin.REQUIRED,
    dataset_split: str = "train",
    batch_size: Optional[int] = None,
    sequence_length: Lengths = gin.REQUIRED,
    vocabulary: Optional[Vocabularies] = None,
    eos_included: bool = True,
    vocab_shift: int = 0,
) -> tf.data.Dataset:
    """Returns the packed examples of a data set written by Tensor2Tensor.

    Args:
      dataset_name: a string; the files are `<dataset_name>-<dataset_split>-*`.
      text2self: a boolean, whether to drop the inputs, as for language models.
      data_dir: a string, the directory of the files.
      dataset_split: a string; "train" is shuffled and repeated, others are read once.
      batch_size: ignored.
      sequence_length: an integer, or a dictionary of them by feature.
      vocabulary: a Vocabulary, or a pair of them, of inputs and of targets, or `None`. Reading ids
        that are not in it raises tf.errors.InvalidArgumentError.
      eos_included: a boolean, whether the sequences end in EOS; else it is appended.
      vocab_shift: an integer, added to all ids of the records, including EOS.

    Returns:
      A Dataset as returned by `pack_dataset`.

    Raises:
      ValueError: there are no files, or records lack a feature; see
        `pretokenized_tfrecord_dataset`.
    """
    del batch_size
    pattern = os.path.join(data_dir, f"{dataset_name}-{dataset_split}-*")
    train = dataset_split == "train"
    return _tfrecord_dataset(
        matching_files("pretokenized_t2t_dataset", pattern),
        text2self,
        eos_included,
        sequence_length,
        vocab_shift,
        vocabulary,
        repeat=train,
        shuffle=train,
    )


@gin.configurable(module=MODULE)
def pretokenized_tfds_dataset(
    dataset_name: str = gin.REQUIRED,
    text2self: bool = gin.REQUIRED,
    tfds_data_dir: Optional[str] = gin.REQUIRED,
    dataset_split: str = gin.REQUIRED,
    batch_size: Optional[int] = None,
    sequence_length: Lengths = gin.REQUIRED,
    vocabulary: Optional[Vocabularies] = None,
) -> tf.data.Dataset:
    """Returns the packed examples of an encoded data set of TensorFlow Datasets.

    Its ids are shifted up by 1 to make room for EOS, which is appended; see TFDSVocabulary.

    Args:
      dataset_name: a string, as in "lm1b/subwords32k".
      text2self: a boolean, whether to drop the inputs, as for language models.
      tfds_data_dir: a string, the directory of the data, or `None`.
      dataset_split: a string; "train" is shuffled and repeated, others are read once.
      batch_size: ignored.
      sequence_length: an integer, or a dictionary of them by feature.
      vocabulary: a Vocabulary, or a pair of them, of inputs and of targets, or `None`. Reading ids
        that are not in it raises tf.errors.InvalidArgumentError.

    Returns:
      A Dataset as returned by `pack_dataset`.

    Raises:
      ImportError: tensorflow_datasets is not installed.
    """
    del batch_size
    train = dataset_split == "train"
    dataset = vocabularies.tfds_function("pretokenized_tfds_dataset", "load")(
        dataset_name,
        split=dataset_split,
        as_supervised=True,
        data_dir=tfds_data_dir,
        shuffle_files=train,
    )
    dataset = supervised_to_dict(dataset, text2self)
    if train:
        dataset = dataset.repeat().shuffle(_PREFETCH_RECORDS * 10)
    # Shifted as TFDSVocabulary shifts them: the encoder's first id is 1, which is EOS here.
    dataset = mapped(dataset, lambda example: _shifted(example, 1, True, vocabulary))
    return pack_dataset(dataset, sequence_length).prefetch(_PREFETCH_RECORDS)

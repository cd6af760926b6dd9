"""Sources of ids: records and data sets that are already encoded."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow.transformer import vocabulary as vocabularies
from mesh_tensorflow.transformer.dataset._features import (
    MODULE,
    Lengths,
    Vocabularies,
    checked_int32,
    pack_dataset,
    supervised_to_dict,
)
from mesh_tensorflow.transformer.dataset._text import load_tfds, matching_files

__all__ = [
    "pretokenized_t2t_dataset",
    "pretokenized_tfds_dataset",
    "pretokenized_tfrecord_dataset",
]

_SHUFFLE_BUFFER = 10000
_PREFETCH = 100
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
        filenames,
        text2self,
        eos_included,
        sequence_length,
        vocab_shift,
        None,
        repeat=repeat,
        shuffle=False,
    )


def _tfrecord_dataset(
    filenames: Sequence[str],
    text2self: bool,
    eos_included: bool,
    sequence_length: Lengths,
    vocab_shift: int,
    vocabulary: Optional[Vocabularies],
    repeat: bool,
    shuffle: bool,
) -> tf.data.Dataset:
    keys = ["targets"] if text2self else ["inputs", "targets"]
    _check_features(filenames, keys)
    files = tf.data.Dataset.from_tensor_slices(tf.constant(filenames))
    if shuffle:
        # Before they are repeated, so that each pass has all of them once.
        files = files.shuffle(len(filenames))
    if repeat:
        files = files.repeat()
    # Each record with its file, for errors.
    dataset = files.flat_map(
        lambda file: tf.data.TFRecordDataset(file).map(lambda record: (file, record))
    )
    if shuffle:
        dataset = dataset.shuffle(_SHUFFLE_BUFFER)

    def parse(file: tf.Tensor, record: tf.Tensor) -> dict[str, tf.Tensor]:
        found = tf.io.parse_single_example(record, {k: tf.io.VarLenFeature(tf.int64) for k in keys})
        ids = {k: v.values for k, v in found.items()}
        return _shifted(ids, vocab_shift, not eos_included, vocabulary, file)

    dataset = dataset.map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    return pack_dataset(dataset, sequence_length).prefetch(_PREFETCH)


def _check_features(filenames: Sequence[str], keys: Sequence[str]) -> None:
    """Raises ValueError if the first records that there are have no ids of a feature at all."""
    file = next((f for f in filenames if tf.io.gfile.exists(f)), None)
    if file is None:
        return  # reading them says so
    records = itertools.islice(tf.io.tf_record_iterator(os.fspath(file)), _LOOKED_AT)
    kinds: dict[str, set[str]] = {}
    for record in records:
        for name, feature in tf.train.Example.FromString(record).features.feature.items():
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
    dataset = load_tfds(
        "pretokenized_tfds_dataset",
        dataset_name,
        split=dataset_split,
        as_supervised=True,
        data_dir=tfds_data_dir,
        shuffle_files=train,
    )
    dataset = supervised_to_dict(dataset, text2self)
    if train:
        dataset = dataset.repeat().shuffle(_PREFETCH * 10)
    dataset = dataset.map(
        lambda example: _shifted(example, 1, True, vocabulary), num_parallel_calls=tf.data.AUTOTUNE
    )
    return pack_dataset(dataset, sequence_length).prefetch(_PREFETCH)

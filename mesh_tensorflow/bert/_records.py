"""Writes features as TFRecords of tf.Examples, and reads them in batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf
from google.protobuf import message

__all__ = [
    "check_first_records",
    "int64_features",
    "parsed_record",
    "record_batches",
    "training_order",
    "write_records",
]

_SHUFFLE_BUFFER = 100


def int64_features(values: Mapping[str, Sequence[int]]) -> tf.train.Example:
    """Converts lists of integers to a tf.Example.

    Args:
      values: lists of integers by name.
    """
    return tf.train.Example(
        features=tf.train.Features(
            feature={
                name: tf.train.Feature(int64_list=tf.train.Int64List(value=list(value)))
                for name, value in values.items()
            }
        )
    )


def write_records(path: str, examples: Iterable[Mapping[str, Sequence[int]]]) -> None:
    """Writes a TFRecord file.

    Args:
      path: the path of the file.
      examples: lists of integers by name.
    """
    with tf.io.TFRecordWriter(path) as writer:
        for example in examples:
            writer.write(int64_features(example).SerializeToString())


def check_first_records(
    paths: Iterable[str], features: Mapping[str, Any], flags: Mapping[str, str]
) -> None:
    """Checks that TFRecord files can be read, and that their first records have all features.

    Args:
      paths: the paths of the files.
      features: tf.io.FixedLenFeature of one dimension by name.
      flags: the flags, with their values, that say how long a feature is, by the feature's name.

    Raises:
      ValueError: one is no TFRecord file, is damaged, or has other features.
    """
    for path in paths:
        try:
            record = next(tf.io.tf_record_iterator(path), None)
            found = None if record is None else tf.train.Example.FromString(record).features.feature
        except (tf.errors.OpError, message.DecodeError) as error:
            said = error.message if isinstance(error, tf.errors.OpError) else error
            raise ValueError(f"{path} is no file of TFRecords, or is damaged: {said}") from error
        if found is None:
            continue
        for name, feature in features.items():
            if name not in found:
                there = ", ".join(sorted(found)) or "none"
                raise ValueError(f"{path}: its records have no feature {name}; they have {there}")
            kind = "float_list" if feature.dtype.is_floating else "int64_list"
            count, wanted = len(getattr(found[name], kind).value), feature.shape[0]
            if count != wanted:
                numbers = "numbers" if feature.dtype.is_floating else "integers"
                why = f", by {flags[name]}" if name in flags else ""
                raise ValueError(
                    f"{path}: {name} of its first record has {count} {numbers}; "
                    f"{wanted} are expected{why}"
                )


def training_order(
    data: tf.data.Dataset,
    is_training: bool,
    buffer: int = _SHUFFLE_BUFFER,
    seed: Optional[int] = None,
) -> tf.data.Dataset:
    """Shuffles and repeats a data set for training, with a different order in each epoch.

    Args:
      data: a tf.data.Dataset.
      is_training: if False, the data set is returned unchanged.
      buffer: the size of the shuffle buffer.
      seed: the seed of the order, in addition to the graph's.
    """
    # Shuffled, then repeated: each epoch has all records, in an order of its own.
    return data.shuffle(buffer, seed=seed).repeat() if is_training else data


def parsed_record(record: tf.Tensor, features: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Parses a record; integers become int32.

    Args:
      record: a tf.Example, as bytes.
      features: tf.io.FixedLenFeature by name.
    """
    example = tf.io.parse_single_example(record, features)
    return {name: tf.cast(x, tf.int32) if x.dtype == tf.int64 else x for name, x in example.items()}


def record_batches(
    input_file: str, features: Mapping[str, Any], is_training: bool, drop_remainder: bool
) -> Callable[[Any], Any]:
    """Returns an input function that reads TFRecords.

    Args:
      input_file: the path of the file.
      features: tf.io.FixedLenFeature by name.
      is_training: whether to shuffle and repeat the records.
      drop_remainder: whether to drop a last batch that is not full.

    Returns:
      A function of `params`, which contain "batch_size".
    """

    def input_fn(params: Mapping[str, Any]) -> tf.data.Dataset:
        data = training_order(tf.data.TFRecordDataset(input_file), is_training)
        data = data.map(functools.partial(parsed_record, features=features))
        return data.batch(params["batch_size"], drop_remainder=drop_remainder)

    return input_fn

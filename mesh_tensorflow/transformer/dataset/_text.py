"""Sources of text: files of lines, and data sets of strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Optional, Union

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow.transformer import vocabulary as vocabularies
from mesh_tensorflow.transformer.dataset._features import (
    MODULE,
    Lengths,
    Vocabularies,
    encode_all_features,
    pack_dataset,
    pack_or_pad,
    supervised_to_dict,
)

__all__ = [
    "load_tfds",
    "make_text_line_dataset",
    "matching_files",
    "packed_parallel_tsv_dataset",
    "sample_from_text_line_datasets",
    "simple_text_line_dataset",
    "untokenized_tfds_dataset",
]

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
        columns = tf.strings.split([line], "\t").values
        what = "packed_parallel_tsv_dataset: a line must have 2 columns with a tab between them"
        count = tf.size(columns)
        check = tf.Assert(tf.equal(count, 2), [f"{what}, and has", count, "in", line])
        with tf.control_dependencies([check]):
            columns = tf.identity(columns)
        example = {}
        for i, key in enumerate(["inputs", "targets"]):
            ids = vocabularies.vocabulary_of_feature(vocabulary, key).encode_tf(columns[i])
            ids = tf.cast(ids, tf.int32)
            example[key] = tf.concat([ids, [eos_id]], 0) if append_eos else ids
        return example

    dataset = dataset.map(encode, num_parallel_calls=tf.data.AUTOTUNE)
    if max_encoded_len:
        dataset = dataset.filter(
            lambda example: (
                tf.maximum(tf.size(example["inputs"]), tf.size(example["targets"]))
                <= max_encoded_len
            )
        )
    return pack_dataset(dataset, sequence_length).prefetch(_PREFETCH)


def load_tfds(name: str, *args: object, **kwargs: object) -> tf.data.Dataset:
    """Returns the dataset of `tfds.load`.

    Args:
      name: a string, the name of the calling function.
      *args: arguments of `tfds.load`.
      **kwargs: keyword arguments of `tfds.load`.

    Raises:
      ImportError: tensorflow_datasets is not installed, or does not work.
    """
    return vocabularies.tfds_function(name, "load")(*args, **kwargs)


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
    dataset = load_tfds(
        name,
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

"""Transformations of data sets: encoding, EOS, fixed lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow.transformer import vocabulary as vocabularies
from mesh_tensorflow.transformer.dataset._checks import (
    MODULE,
    Lengths,
    chosen_keys,
    feature_specs,
    length_of,
    spec_text,
)
from mesh_tensorflow.transformer.dataset._pack import pack_dataset

__all__ = [
    "EvalDataset",
    "encode_all_features",
    "encode_dataset",
    "ensure_dataset_eos",
    "pack_or_pad",
    "pad_dataset_with_zeroed_out_examples",
    "supervised_to_dict",
    "trim_and_pad_dataset",
]

Vocabularies = Union[
    vocabularies.Vocabulary, tuple[vocabularies.Vocabulary, vocabularies.Vocabulary]
]


class EvalDataset(NamedTuple):
    """A data set to evaluate a model on.

    Fields:
      name: a string, the name of its files and summaries.
      dataset_fn: a function without arguments that returns a Dataset.
      postprocess_fn: a function of a decoded string and an example that returns what metrics
        compare; None if they compare the strings.
      metric_fns: functions of (targets, predictions), lists, that return dictionaries of numbers.
    """

    name: str
    dataset_fn: Callable[[], tf.data.Dataset]
    postprocess_fn: Optional[Callable[..., Any]]
    metric_fns: Sequence[Callable[..., Mapping[str, float]]]


def encode_dataset(dataset: tf.data.Dataset, vocabulary: Vocabularies) -> tf.data.Dataset:
    """Encodes features of strings; EOS is not appended.

    Args:
      dataset: a Dataset of dictionaries of tf scalars of type string.
      vocabulary: a Vocabulary, or a pair of them, of inputs and of targets.

    Returns:
      A Dataset of dictionaries of integer features [length].

    Raises:
      ValueError: a feature is not a string.
    """
    specs = feature_specs("encode_dataset", dataset)
    for k, spec in specs.items():
        _check_text("encode_dataset", k, spec)
    return dataset.map(
        lambda example: {
            k: vocabularies.vocabulary_of_feature(vocabulary, k).encode_tf(v)
            for k, v in example.items()
        },
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def encode_all_features(dataset: tf.data.Dataset, vocabulary: Vocabularies) -> tf.data.Dataset:
    """Encodes the features that are strings and appends EOS; drops all others.

    An empty text becomes EOS only.

    Args:
      dataset: a Dataset of dictionaries.
      vocabulary: a Vocabulary, or a pair of them, of inputs and of targets.

    Returns:
      A Dataset of dictionaries of int64 features [length].

    Raises:
      ValueError: no feature is a string, or one is several strings.
    """
    specs = feature_specs("encode_all_features", dataset)
    keys = [k for k, spec in specs.items() if spec.dtype == tf.string]
    if not keys:
        raise ValueError(
            "encode_all_features: no feature is a string; the data set has "
            f"{', '.join(f'{k} {spec_text(s)}' for k, s in specs.items())}"
        )
    for k in keys:
        _check_text("encode_all_features", k, specs[k])

    def encode(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        encoded = {}
        for k in keys:
            ids = vocabularies.vocabulary_of_feature(vocabulary, k).encode_tf(example[k])
            encoded[k] = tf.concat([tf.cast(ids, tf.int64), [vocabularies.EOS_ID]], 0)
        return encoded

    return dataset.map(encode, num_parallel_calls=tf.data.AUTOTUNE)


def _check_text(name: str, key: str, spec: tf.TensorSpec) -> None:
    if spec.dtype != tf.string or spec.shape.rank not in (0, None):
        raise ValueError(f"{name}: feature {key!r} {spec_text(spec)} is not a single string")


def ensure_dataset_eos(
    dataset: tf.data.Dataset, feature_keys: Optional[Union[str, Iterable[str]]] = None
) -> tf.data.Dataset:
    """Replaces the last token of each sequence by EOS, unless it is padding.

    For truncated sequences; those that end in EOS or padding, and empty ones, are unchanged.

    Args:
      dataset: a Dataset of dictionaries.
      feature_keys: the names of features [length] of numbers; by default all such features.

    Returns:
      A Dataset of the same features.

    Raises:
      ValueError: there is no such feature, or it is not a vector of numbers.
    """
    specs = feature_specs("ensure_dataset_eos", dataset)
    fit = {k for k, s in specs.items() if s.shape.rank in (1, None) and s.dtype != tf.string}
    keys = set(fit)
    if feature_keys is not None:
        keys = set(chosen_keys("ensure_dataset_eos", specs, feature_keys))
    for k in keys - fit:
        raise ValueError(
            f"ensure_dataset_eos: feature {k!r} {spec_text(specs[k])} is not a one-dimensional "
            "sequence of ids"
        )

    def ended(ids: tf.Tensor) -> tf.Tensor:
        last = tf.cast(ids[-1:] > 0, ids.dtype) * vocabularies.EOS_ID
        result = tf.concat([ids[:-1], last], 0)
        result.set_shape(ids.shape)
        return result

    return dataset.map(
        lambda example: {k: ended(v) if k in keys else v for k, v in example.items()},
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def trim_and_pad_dataset(
    dataset: tf.data.Dataset,
    length: Lengths,
    feature_keys: Optional[Union[str, Iterable[str]]] = None,
) -> tf.data.Dataset:
    """Truncates features to a length, and pads shorter ones with zeros.

    Args:
      dataset: a Dataset of dictionaries.
      length: an integer, or a dictionary of them by feature.
      feature_keys: the names of features [length, ...]; by default all. Others are unchanged.

    Returns:
      A Dataset of the same features, those [length, ...] with a static length.

    Raises:
      ValueError: there is no length for a feature, or it is a scalar, or there is no such feature.
    """
    specs = feature_specs("trim_and_pad_dataset", dataset)
    keys = chosen_keys("trim_and_pad_dataset", specs, feature_keys)
    lengths = {k: length_of("trim_and_pad_dataset", length, k) for k in keys}
    for k in keys:
        if specs[k].shape.rank == 0:
            raise ValueError(
                f"trim_and_pad_dataset: feature {k!r} {spec_text(specs[k])} has no length; name "
                "the features to work on in `feature_keys`"
            )

    def fit(x: tf.Tensor, length: int) -> tf.Tensor:
        x = x[:length]
        shape = [length] + x.shape.as_list()[1:]
        x = tf.pad(x, [[0, length - tf.shape(x)[0]]] + [[0, 0]] * (len(shape) - 1))
        x.set_shape(shape)
        return x

    return dataset.map(
        lambda example: {k: fit(v, lengths[k]) if k in lengths else v for k, v in example.items()},
        num_parallel_calls=tf.data.AUTOTUNE,
    )


@gin.configurable(module=MODULE)
def pack_or_pad(
    dataset: tf.data.Dataset,
    length: Lengths,
    pack: bool = True,
    feature_keys: Optional[Union[str, Iterable[str]]] = None,
    ensure_eos: bool = False,
) -> tf.data.Dataset:
    """Converts features to fixed lengths, by packing or padding.

    Sequences that are too long are truncated, which removes their EOS unless `ensure_eos`.

    Args:
      dataset: a Dataset of dictionaries of integer features [any length].
      length: an integer, or a dictionary of them by feature.
      pack: a boolean, whether to pack (`pack_dataset`); else `trim_and_pad_dataset`.
      feature_keys: the names of the features; by default all. Others are dropped by packing, and
        unchanged by padding.
      ensure_eos: a boolean, whether the last token of a truncated sequence becomes EOS.

    Returns:
      A Dataset of dictionaries of features [length].

    Raises:
      ValueError: see `pack_dataset` and `trim_and_pad_dataset`.
    """
    specs = feature_specs("pack_or_pad", dataset)
    keys = chosen_keys("pack_or_pad", specs, feature_keys)
    lengths = {k: length_of("pack_or_pad", length, k) for k in keys}
    if ensure_eos:
        dataset = dataset.map(
            lambda example: {
                k: _cut_with_eos(v, lengths[k]) if k in lengths else v for k, v in example.items()
            },
            num_parallel_calls=tf.data.AUTOTUNE,
        )
    fixed = pack_dataset if pack else trim_and_pad_dataset
    return fixed(dataset, lengths, keys)


def _cut_with_eos(ids: tf.Tensor, length: int) -> tf.Tensor:
    """Truncates ids to `length`; the last becomes EOS if they fill it or are truncated."""
    head = ids[:length]
    last = tf.cast(head[-1:] > 0, ids.dtype) * vocabularies.EOS_ID
    ended = tf.concat([head[:-1], last], 0)
    return tf.where(tf.fill(tf.shape(head), tf.size(ids) >= length), ended, head)


def pad_dataset_with_zeroed_out_examples(ds: tf.data.Dataset) -> tf.data.Dataset:
    """Appends examples of zeros (and empty strings) indefinitely.

    So every batch is full; code that counts examples needs to know their number.

    Args:
      ds: a Dataset whose elements have static shapes, or all have the shape of the first one.

    Returns:
      A Dataset of the same elements.
    """
    zeros = ds.take(1).map(lambda *x: tf.nest.map_structure(tf.zeros_like, _only(x)))
    # Without the cache, the data would be read again for each example of zeros.
    return ds.concatenate(zeros.cache().repeat())


def _only(elements: tuple) -> Any:
    return elements[0] if len(elements) == 1 else elements


def supervised_to_dict(dataset: tf.data.Dataset, text2self: bool) -> tf.data.Dataset:
    """Converts pairs to dictionaries.

    Args:
      dataset: a Dataset of pairs (inputs, targets).
      text2self: a boolean, whether to drop the inputs, as for language models.

    Returns:
      A Dataset of dictionaries with "inputs" and "targets", or with "targets" only.

    Raises:
      ValueError: the elements are not pairs.
    """
    structure = tf.data.experimental.get_structure(dataset)
    if not isinstance(structure, tuple) or len(structure) != 2:
        raise ValueError(
            "supervised_to_dict: the elements of the data set must be pairs of inputs and "
            f"targets, and are {structure}"
        )

    def named(inputs: tf.Tensor, targets: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"targets": targets} if text2self else {"inputs": inputs, "targets": targets}

    return dataset.map(named, num_parallel_calls=tf.data.AUTOTUNE)

"""Transformations of data sets: encoding, EOS, packing, fixed lengths; checks of arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow.transformer import vocabulary as vocabularies

# The gin module of the functions of this package.
MODULE = "mesh_tensorflow.transformer.dataset"

Lengths = Union[int, Mapping[str, int]]


# -- checks


def checked_int32(name: str, key: str, ids: tf.Tensor, where: Sequence[Any] = ()) -> tf.Tensor:
    """Returns ids as int32; an error when they are read names one that it does not hold.

    Args:
      name: a string, the name of the calling function.
      key: the name of the feature.
      ids: a tensor of integers.
      where: further parts of the message.
    """
    narrow = tf.cast(ids, tf.int32)
    # All values of these fit, so that a check would never fail.
    if ids.dtype in (tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32):
        return narrow
    # A cast wraps large ids around, so these differ from what they were.
    differs = tf.not_equal(tf.cast(narrow, ids.dtype), ids)
    text = f"{name}: feature {key} has an id that is no int32, as models need:"
    found = tf.boolean_mask(ids, differs)[:1]
    check = tf.Assert(tf.logical_not(tf.reduce_any(differs)), [text, found, *where])
    with tf.control_dependencies([check]):
        # Only what is made here waits for the check, hence the identity.
        return tf.identity(narrow)


def spec_text(spec: tf.TensorSpec) -> str:
    """Returns the shape and dtype of a feature as text."""
    return f"{spec.shape} {spec.dtype.name}"


def mapped(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Applies a function to the elements of a data set, to several at the same time."""
    return dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE)


def _feature_specs(
    name: str, dataset: tf.data.Dataset, keys: Optional[Union[str, Iterable[str]]] = None
) -> dict[str, Any]:
    """Returns the specifications of the features to work on: those named by keys, or all of them.

    Raises:
      ValueError: the data set has no such feature, or its elements are not dictionaries.
    """
    specs = tf.data.experimental.get_structure(dataset)
    if not isinstance(specs, Mapping):
        raise ValueError(
            f"{name}: the elements of the data set must be dictionaries of features, and are "
            f"{specs}; supervised_to_dict makes them of pairs"
        )
    keys = specs if keys is None else [keys] if isinstance(keys, str) else list(keys)
    missing = [k for k in keys if k not in specs]
    if missing:
        raise ValueError(
            f"{name}: the data set has no feature {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, specs))}"
        )
    return {k: specs[k] for k in keys}


def _length_of(name: str, length: Lengths, key: str) -> int:
    """Returns the length of a feature.

    Raises:
      ValueError: there is none, or it is not a positive integer.
    """
    if isinstance(length, Mapping):
        if key not in length:
            raise ValueError(
                f"{name}: no length for feature {key!r} in {dict(length)}; give one, or name the "
                "features to work on"
            )
        length = length[key]
    # To Python, True is an integer too, but it is no length.
    if isinstance(length, bool) or not hasattr(length, "__index__") or length < 1:
        raise ValueError(
            f"{name}: the length of {key!r} must be a positive integer, not {length!r}"
        )
    return int(length)


Vocabularies = Union[
    vocabularies.Vocabulary, tuple[vocabularies.Vocabulary, vocabularies.Vocabulary]
]


# -- from text to ids


class EvalDataset(NamedTuple):
    """A data set to evaluate a model on.

    Fields:
      name: a string, the name of its files and summaries.
      dataset_fn: a function without arguments that returns a Dataset.
      postprocess_fn: a function of a decoded string and an example that returns what metrics
        compare; None if they compare the strings.
      metric_fns: functions of (targets, predictions), lists, that return dictionaries of numbers,
        as those of `mesh_tensorflow.transformer.metrics`.
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
    for k, spec in _feature_specs("encode_dataset", dataset).items():
        _check_text("encode_dataset", k, spec)
    return mapped(
        dataset,
        lambda example: {
            k: vocabularies.vocabulary_of_feature(vocabulary, k).encode_tf(v)
            for k, v in example.items()
        },
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
    specs = _feature_specs("encode_all_features", dataset)
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

    return mapped(dataset, encode)


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
    specs = _feature_specs("ensure_dataset_eos", dataset, feature_keys)
    keys = {k for k, s in specs.items() if s.shape.rank in (1, None) and s.dtype != tf.string}
    # By default other features are left as they are; named ones were expected to be sequences.
    for k in specs.keys() - keys if feature_keys is not None else ():
        raise ValueError(
            f"ensure_dataset_eos: feature {k!r} {spec_text(specs[k])} is not a one-dimensional "
            "sequence of ids"
        )

    def ended(ids: tf.Tensor) -> tf.Tensor:
        # A slice is empty for an empty sequence, where the index -1 would be an error.
        last = tf.cast(ids[-1:] > 0, ids.dtype) * vocabularies.EOS_ID
        result = tf.concat([ids[:-1], last], 0)
        result.set_shape(ids.shape)
        return result

    return mapped(
        dataset, lambda example: {k: ended(v) if k in keys else v for k, v in example.items()}
    )


# -- fixed lengths


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
    specs = _feature_specs("trim_and_pad_dataset", dataset, feature_keys)
    lengths = {k: _length_of("trim_and_pad_dataset", length, k) for k in specs}
    for k, spec in specs.items():
        if spec.shape.rank == 0:
            raise ValueError(
                f"trim_and_pad_dataset: feature {k!r} {spec_text(spec)} has no length; name "
                "the features to work on in `feature_keys`"
            )

    def fit(x: tf.Tensor, length: int) -> tf.Tensor:
        x = x[:length]
        shape = [length] + x.shape.as_list()[1:]
        x = tf.pad(x, [[0, length - tf.shape(x)[0]]] + [[0, 0]] * (len(shape) - 1))
        # How much is padded is known only when an example is read, so TensorFlow infers no length.
        x.set_shape(shape)
        return x

    return mapped(
        dataset,
        lambda example: {k: fit(v, lengths[k]) if k in lengths else v for k, v in example.items()},
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
    keys = list(_feature_specs("pack_or_pad", dataset, feature_keys))
    lengths = {k: _length_of("pack_or_pad", length, k) for k in keys}
    # Before anything is cut off, as only a whole sequence shows whether it is too long.
    if ensure_eos:
        dataset = mapped(
            dataset,
            lambda example: {
                k: _cut_with_eos(v, lengths[k]) if k in lengths else v for k, v in example.items()
            },
        )
    fixed = pack_dataset if pack else trim_and_pad_dataset
    return fixed(dataset, lengths, keys)


def _cut_with_eos(ids: tf.Tensor, length: int) -> tf.Tensor:
    """Truncates ids to `length`; the last becomes EOS if they fill it or are truncated."""
    head = ids[:length]
    # Where the last place is padding, the sequence has ended before, and it stays.
    last = tf.cast(head[-1:] > 0, ids.dtype) * vocabularies.EOS_ID
    ended = tf.concat([head[:-1], last], 0)
    # The condition is filled up, since tf.where of TensorFlow 1 does not broadcast it.
    return tf.where(tf.fill(tf.shape(head), tf.size(ids) >= length), ended, head)


def pad_dataset_with_zeroed_out_examples(ds: tf.data.Dataset) -> tf.data.Dataset:
    """Appends examples of zeros (and empty strings) indefinitely.

    So every batch is full; code that counts examples needs to know their number.

    Args:
      ds: a Dataset whose elements have static shapes, or all have the shape of the first one.

    Returns:
      A Dataset of the same elements.
    """
    # An element that is a tuple arrives as several arguments, any other one as one.
    zeros = ds.take(1).map(lambda *x: tf.nest.map_structure(tf.zeros_like, x if x[1:] else x[0]))
    # Without the cache, the data would be read again for each example of zeros.
    return ds.concatenate(zeros.cache().repeat())


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

    return mapped(dataset, named)


# -- several examples in a row


@gin.configurable(module=MODULE)
def pack_dataset(
    dataset: tf.data.Dataset,
    length: Lengths,
    keys: Optional[Union[str, Iterable[str]]] = None,
    use_custom_ops: bool = False,
) -> tf.data.Dataset:
    """Packs several examples into each row.

    Examples stay in order. A row takes examples as long as they fit completely, in every feature;
    examples longer than a row are truncated first. Examples are packed in batches, of as many
    examples as the longest row has positions; the last row of a batch is not filled further. Zeros
    at the end of an example are padding and removed; examples of only zeros are dropped.

    For example, inputs [8, 7, 1], [2, 3, 1] and targets [4, 1], [5, 6, 1] with length 8 become:

        inputs               [8, 7, 1, 2, 3, 1, 0, 0]
        inputs_segmentation  [1, 1, 1, 2, 2, 2, 0, 0]
        inputs_position      [0, 1, 2, 0, 1, 2, 0, 0]
        targets              [4, 1, 5, 6, 1, 0, 0, 0]
        targets_segmentation [1, 1, 2, 2, 2, 0, 0, 0]
        targets_position     [0, 1, 0, 1, 2, 0, 0, 0]

    Args:
      dataset: a Dataset of dictionaries of integer features [any length].
      length: an integer, the length of all rows, or a dictionary of them by feature.
      keys: the names of the features to pack; by default all. Others are dropped.
      use_custom_ops: ignored: packing always uses TensorFlow's own operations.

    Returns:
      A Dataset of dictionaries of int32 features [length]: for each key itself,
      `<key>_segmentation` and `<key>_position`. Reading an id that no int32 holds raises
      tf.errors.InvalidArgumentError.

    Raises:
      ValueError: there is no such feature, or no length for it, or it is not a vector of integers.
    """
    del use_custom_ops
    specs = _feature_specs("pack_dataset", dataset, keys)
    lengths = {k: _length_of("pack_dataset", length, k) for k in specs}
    for k, spec in specs.items():
        if spec.shape.rank not in (1, None) or not spec.dtype.is_integer:
            raise ValueError(
                f"pack_dataset: feature {k!r} {spec_text(spec)} is not a one-dimensional "
                "sequence of integers; name the features to pack in `keys`"
            )

    def trim(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {k: checked_int32("pack_dataset", k, example[k][:n]) for k, n in lengths.items()}

    dataset = mapped(dataset, trim)
    # Examples of any length share a batch; its padding is told from tokens by the zeros.
    # As many at a time as a row has places: with a token each, they can fill one row at least.
    dataset = dataset.padded_batch(max(lengths.values()), padded_shapes={k: [None] for k in specs})
    return mapped(dataset, lambda batch: _packed(batch, lengths)).unbatch()


def _packed(batch: Mapping[str, tf.Tensor], lengths: Mapping[str, int]) -> dict[str, tf.Tensor]:
    """Returns the rows of a batch of padded examples.

    A row is a range of examples, so its tokens are a range of the concatenated tokens of all
    examples; only the beginnings of rows have to be computed sequentially.
    """
    sizes = {k: _sizes(tokens) for k, tokens in batch.items()}
    # For all features at once: segment numbers of inputs and targets have to agree.
    kept = tf.reduce_any(tf.stack([size > 0 for size in sizes.values()]), axis=0)
    sizes = {k: tf.boolean_mask(size, kept) for k, size in sizes.items()}
    ends = {k: tf.cumsum(size) for k, size in sizes.items()}
    starts = _row_starts(sizes, ends, lengths)
    packed = {}
    for k, tokens in batch.items():
        # All tokens in one line without padding, which is then cut where rows begin.
        used = tf.sequence_mask(sizes[k], tf.shape(tokens)[1])
        line = tf.boolean_mask(tf.boolean_mask(tokens, kept), used)
        packed.update(_rows(k, line, sizes[k], ends[k], starts, lengths[k]))
    return packed


def _sizes(tokens: tf.Tensor) -> tf.Tensor:
    """Returns the lengths of sequences [batch, length] without trailing zeros."""
    number = 1 + tf.range(tf.shape(tokens)[1])
    last = tf.where_v2(tf.not_equal(tokens, 0), number, 0)
    # If no example has a token, the maximum over no position is the smallest integer.
    return tf.maximum(tf.reduce_max(last, axis=1), 0)


def _row_starts(
    sizes: Mapping[str, tf.Tensor], ends: Mapping[str, tf.Tensor], lengths: Mapping[str, int]
) -> tf.Tensor:
    """Returns the first example of each row."""
    # If a row begins with example i, the next one begins with the first whose end is beyond its
    # length in any feature. Examples are cut to a row, so this is after i, and the loop below ends.
    next_start = tf.reduce_min(
        tf.stack(
            [tf.searchsorted(ends[k], ends[k] - sizes[k] + lengths[k], side="right") for k in sizes]
        ),
        axis=0,
    )
    count = tf.size(next_start)
    array = tf.TensorArray(tf.int32, size=count, element_shape=[])

    def body(row: tf.Tensor, start: tf.Tensor, array: tf.TensorArray) -> tuple[Any, ...]:
        return row + 1, next_start[start], array.write(row, start)

    # A loop, as each start is found from the one before it.
    rows, _, array = tf.while_loop(
        lambda row, start, array: start < count, body, [tf.constant(0), tf.constant(0), array]
    )
    return array.gather(tf.range(rows))


def _rows(
    key: str,
    line: tf.Tensor,
    sizes: tf.Tensor,
    ends: tf.Tensor,
    starts: tf.Tensor,
    length: int,
) -> dict[str, tf.Tensor]:
    """Returns the rows of one feature, from its concatenated tokens."""
    offsets = ends - sizes
    examples = tf.range(tf.size(sizes))
    # The first example of the row that each example is in.
    first = tf.gather(starts, tf.searchsorted(starts, examples, side="right") - 1)
    example = tf.repeat(examples, sizes)
    # Numbered from 1 in each row: 0 is the segment of padding.
    segment = tf.gather(examples - first + 1, example)
    position = tf.range(tf.size(line)) - tf.gather(offsets, example)
    splits = tf.concat([tf.gather(offsets, starts), [tf.size(line)]], 0)

    def rows(values: tf.Tensor) -> tf.Tensor:
        # The splits are in order by construction, so that checks of each batch would find nothing.
        ragged = tf.RaggedTensor.from_row_splits(values, splits, validate=False)
        return ragged.to_tensor(shape=[None, length])

    # Zeros within an example are padding too.
    segment = tf.where_v2(tf.equal(line, 0), 0, segment)
    return {
        key: rows(line),
        f"{key}_position": rows(position),
        f"{key}_segmentation": rows(segment),
    }

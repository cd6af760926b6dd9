"""Input data for transformers: text and records to features of fixed length, packed or padded.

An example is a dictionary of features, `inputs` and `targets` or `targets` alone, each a sequence
of ids. Id 0 is padding and id 1 ends a sequence (EOS). Training on packed examples needs two more
features for each: `<key>_segmentation`, the number of the example that a token belongs to (from 1,
with 0 for padding), and `<key>_position`, its position in that example.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow.transformer import vocabulary as vocabularies

__all__ = [
    "EvalDataset",
    "encode_all_features",
    "encode_dataset",
    "ensure_dataset_eos",
    "make_text_line_dataset",
    "pack_dataset",
    "pack_or_pad",
    "packed_parallel_tsv_dataset",
    "pad_dataset_with_zeroed_out_examples",
    "pretokenized_t2t_dataset",
    "pretokenized_tfds_dataset",
    "pretokenized_tfrecord_dataset",
    "sample_from_text_line_datasets",
    "simple_text_line_dataset",
    "supervised_to_dict",
    "trim_and_pad_dataset",
    "untokenized_tfds_dataset",
]

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
    first_wrong = tf.boolean_mask(ids, differs)[:1]
    return _asserted(narrow, tf.logical_not(tf.reduce_any(differs)), [text, first_wrong, *where])


def _asserted(x: tf.Tensor, holds: tf.Tensor, message: Sequence[Any]) -> tf.Tensor:
    """Returns `x`; an error when it is read and a condition does not hold."""
    check = tf.Assert(holds, message)
    with tf.control_dependencies([check]):
        # Only what is made here waits for the check, hence the identity.
        return tf.identity(x)


def spec_text(spec: tf.TensorSpec) -> str:
    """Returns the shape and dtype of a feature as text."""
    return f"{spec.shape} {spec.dtype.name}"


def mapped(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Applies a function to the elements of a data set, to several at the same time."""
    return dataset.map(function, num_parallel_calls=tf.data.AUTOTUNE)


def _names(keys: Union[str, Iterable[str]]) -> list[str]:
    """Returns the names of features as a list; a string is one name."""
    return [keys] if isinstance(keys, str) else list(keys)


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
    keys = specs if keys is None else _names(keys)
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
        result = _with_last_eos(ids)
        result.set_shape(ids.shape)
        return result

    return mapped(
        dataset, lambda example: {k: ended(v) if k in keys else v for k, v in example.items()}
    )


def _with_last_eos(ids: tf.Tensor) -> tf.Tensor:
    """Replaces the last id by EOS, unless it is padding: the sequence has ended before then."""
    # A slice is empty for an empty sequence, where the index -1 would be an error.
    last = tf.cast(ids[-1:] > 0, ids.dtype) * vocabularies.EOS_ID
    return tf.concat([ids[:-1], last], 0)


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
    ensure_eos: Union[bool, str, Iterable[str]] = False,
) -> tf.data.Dataset:
    """Converts features to fixed lengths, by packing or padding.

    Sequences that are too long are truncated, which removes their EOS unless `ensure_eos`.

    Args:
      dataset: a Dataset of dictionaries of integer features [any length].
      length: an integer, or a dictionary of them by feature.
      pack: a boolean, whether to pack (`pack_dataset`); else `trim_and_pad_dataset`.
      feature_keys: the names of the features; by default all. Others are dropped by packing, and
        unchanged by padding.
      ensure_eos: whether the last token of a truncated sequence becomes EOS; or the names of the
        features in which it does.

    Returns:
      A Dataset of dictionaries of features [length].

    Raises:
      ValueError: see `pack_dataset` and `trim_and_pad_dataset`.
    """
    keys = list(_feature_specs("pack_or_pad", dataset, feature_keys))
    lengths = {k: _length_of("pack_or_pad", length, k) for k in keys}
    # Before anything is cut off, as only a whole sequence shows whether it is too long.
    if ensure_eos:
        named = keys if isinstance(ensure_eos, bool) else _names(ensure_eos)
        ended = {k: lengths[k] for k in named if k in lengths}
        dataset = mapped(
            dataset,
            lambda example: {
                k: _cut_with_eos(v, ended[k]) if k in ended else v for k, v in example.items()
            },
        )
    fixed = pack_dataset if pack else trim_and_pad_dataset
    return fixed(dataset, lengths, keys)


def _cut_with_eos(ids: tf.Tensor, length: int) -> tf.Tensor:
    """Truncates ids to `length`; the last becomes EOS if they fill it or are truncated."""
    head = ids[:length]
    ended = _with_last_eos(head)
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
    has_tokens = tf.reduce_any(tf.stack([size > 0 for size in sizes.values()]), axis=0)
    sizes = {k: tf.boolean_mask(size, has_tokens) for k, size in sizes.items()}
    ends = {k: tf.cumsum(size) for k, size in sizes.items()}
    starts = _row_starts(sizes, ends, lengths)
    packed = {}
    for k, tokens in batch.items():
        # All tokens in one line without padding, which is then cut where rows begin.
        used = tf.sequence_mask(sizes[k], tf.shape(tokens)[1])
        line = tf.boolean_mask(tf.boolean_mask(tokens, has_tokens), used)
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
        columns = _asserted(columns, tf.equal(count, 2), [f"{what}, and has", count, "in", line])
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
    inside = tf.reduce_all(ids < size)
    text = (
        f"feature {key} has an id that is not in the vocabulary of {size} ids; the data was "
        "encoded with another vocabulary:"
    )
    return _asserted(ids, inside, [text, tf.reduce_max(ids), *where])


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
        features = tf.io.parse_single_example(
            record, {k: tf.io.VarLenFeature(tf.int64) for k in keys}
        )
        ids = {k: v.values for k, v in features.items()}
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
        kinds_text = ", ".join(
            f"{name} ({'/'.join(sorted(k))})" for name, k in sorted(kinds.items())
        )
        raise ValueError(
            f"{file}: its records have no feature {lacking[0]!r} of ids (int64_list); they have "
            f"{kinds_text}. Name the features inputs and targets when they are written; records of "
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

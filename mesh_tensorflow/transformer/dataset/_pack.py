"""Packing: several examples in one row of fixed length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow.transformer.dataset._checks import (
    MODULE,
    Lengths,
    checked_int32,
    chosen_keys,
    feature_specs,
    length_of,
    spec_text,
)

__all__ = ["pack_dataset"]


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
    specs = feature_specs("pack_dataset", dataset)
    keys = chosen_keys("pack_dataset", specs, keys)
    lengths = {k: length_of("pack_dataset", length, k) for k in keys}
    for k in keys:
        if specs[k].shape.rank not in (1, None) or not specs[k].dtype.is_integer:
            raise ValueError(
                f"pack_dataset: feature {k!r} {spec_text(specs[k])} is not a one-dimensional "
                "sequence of integers; name the features to pack in `keys`"
            )

    def trim(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return {k: checked_int32("pack_dataset", k, example[k][: lengths[k]]) for k in keys}

    dataset = dataset.map(trim, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.padded_batch(max(lengths.values()), padded_shapes={k: [None] for k in keys})
    dataset = dataset.map(
        lambda batch: _packed(batch, lengths), num_parallel_calls=tf.data.AUTOTUNE
    )
    return dataset.unbatch()


def _packed(batch: Mapping[str, tf.Tensor], lengths: Mapping[str, int]) -> dict[str, tf.Tensor]:
    """Returns the rows of a batch of padded examples.

    A row is a range of examples, so its tokens are a range of the concatenated tokens of all
    examples; only the beginnings of rows have to be computed sequentially.
    """
    sizes = {k: _sizes(tokens) for k, tokens in batch.items()}
    kept = tf.reduce_any(tf.stack([size > 0 for size in sizes.values()]), axis=0)
    sizes = {k: tf.boolean_mask(size, kept) for k, size in sizes.items()}
    ends = {k: tf.cumsum(size) for k, size in sizes.items()}
    starts = _row_starts(sizes, ends, lengths)
    packed = {}
    for k, tokens in batch.items():
        used = tf.sequence_mask(sizes[k], tf.shape(tokens)[1])
        line = tf.boolean_mask(tf.boolean_mask(tokens, kept), used)
        packed.update(_rows(k, line, sizes[k], ends[k], starts, lengths[k]))
    return packed


def _sizes(tokens: tf.Tensor) -> tf.Tensor:
    """Returns the lengths of sequences [batch, length] without trailing zeros."""
    number = 1 + tf.range(tf.shape(tokens)[1])
    last = tf.where_v2(tf.not_equal(tokens, 0), number, 0)
    return tf.maximum(tf.reduce_max(last, axis=1), 0)


def _row_starts(
    sizes: Mapping[str, tf.Tensor], ends: Mapping[str, tf.Tensor], lengths: Mapping[str, int]
) -> tf.Tensor:
    """Returns the first example of each row."""
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
    first = tf.gather(starts, tf.searchsorted(starts, examples, side="right") - 1)
    example = tf.repeat(examples, sizes)
    segment = tf.gather(examples - first + 1, example)
    position = tf.range(tf.size(line)) - tf.gather(offsets, example)
    splits = tf.concat([tf.gather(offsets, starts), [tf.size(line)]], 0)

    def rows(values: tf.Tensor) -> tf.Tensor:
        ragged = tf.RaggedTensor.from_row_splits(values, splits, validate=False)
        return ragged.to_tensor(shape=[None, length])

    segment = tf.where_v2(tf.equal(line, 0), 0, segment)
    return {
        key: rows(line),
        f"{key}_position": rows(position),
        f"{key}_segmentation": rows(segment),
    }

"""Converts classification examples to features of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow.bert import tokenization
from mesh_tensorflow.bert._classification.glue import InputExample, PaddingInputExample
from mesh_tensorflow.bert._records import record_batches, training_order, write_records

if TYPE_CHECKING:
    from mesh_tensorflow.bert.tokenization import FullTokenizer

__all__ = [
    "InputFeatures",
    "convert_examples_to_features",
    "convert_single_example",
    "file_based_convert_examples_to_features",
    "file_based_input_fn_builder",
    "input_fn_builder",
]

_SHOWN = 5
_LOGGED_EVERY = 10000
_FEATURES = ("input_ids", "input_mask", "segment_ids")

Example = Union[InputExample, PaddingInputExample]


class InputFeatures:
    """An example as integers.

    Attributes:
      input_ids: the ids of tokens.
      input_mask: 1 for each token, 0 for padding.
      segment_ids: 1 for the second sentence.
      label_id: the label's number.
      is_real_example: False for a PaddingInputExample.
    """

    def __init__(
        self,
        input_ids: Sequence[int],
        input_mask: Sequence[int],
        segment_ids: Sequence[int],
        label_id: int,
        is_real_example: bool = True,
    ) -> None:
        self.input_ids = input_ids
        self.input_mask = input_mask
        self.segment_ids = segment_ids
        self.label_id = label_id
        self.is_real_example = is_real_example


def _truncated(tokens_a: list[str], tokens_b: list[str], room: int) -> tuple[list[str], list[str]]:
    """Truncates two sentences to a total length, the longer one first."""
    a, b = len(tokens_a), len(tokens_b)
    while a + b > room:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    return tokens_a[:a], tokens_b[:b]


def convert_single_example(
    ex_index: int,
    example: Example,
    label_list: Sequence[str],
    max_seq_length: int,
    tokenizer: FullTokenizer,
) -> InputFeatures:
    """Returns the features of an example: [CLS] a [SEP], and b [SEP] if there is a second sentence.

    Args:
      ex_index: the number of the example; the first few are logged.
      example: an InputExample or a PaddingInputExample.
      label_list: the labels.
      max_seq_length: the length that features are padded to.
      tokenizer: a FullTokenizer.

    Returns:
      InputFeatures.

    Raises:
      ValueError: the label is unknown, or the length leaves no room for text.
    """
    if isinstance(example, PaddingInputExample):
        zeros = [0] * max_seq_length
        return InputFeatures(zeros, list(zeros), list(zeros), 0, is_real_example=False)
    marks = 3 if example.text_b else 2
    if max_seq_length <= marks:
        raise ValueError(
            f"max_seq_length is {max_seq_length}, but [CLS] and [SEP] take {marks}; make it longer"
        )
    if example.label is None or example.label not in label_list:
        raise ValueError(
            f"example {example.guid} has the label {example.label!r}, which is none of "
            f"{list(label_list)}"
        )
    tokens_a, tokens_b = _truncated(
        tokenizer.tokenize(example.text_a),
        tokenizer.tokenize(example.text_b) if example.text_b else [],
        max_seq_length - marks,
    )
    tokens = ["[CLS]", *tokens_a, "[SEP]"]
    segment_ids = [0] * len(tokens)
    if example.text_b:
        tokens += [*tokens_b, "[SEP]"]
        segment_ids += [1] * (len(tokens_b) + 1)
    input_ids = tokenizer.convert_tokens_to_ids(tokens)
    padding = [0] * (max_seq_length - len(tokens))
    label_id = list(label_list).index(example.label)
    if ex_index < _SHOWN:
        text = " ".join(tokenization.printable_text(token) for token in tokens)
        tf.logging.debug(
            "Example %s: %s (label %s, %d)", example.guid, text, example.label, label_id
        )
    return InputFeatures(
        input_ids + padding, [1] * len(tokens) + padding, segment_ids + padding, label_id
    )


def convert_examples_to_features(
    examples: Iterable[Example],
    label_list: Sequence[str],
    max_seq_length: int,
    tokenizer: FullTokenizer,
) -> list[InputFeatures]:
    """Returns the features of examples; see `convert_single_example`.

    Args:
      examples: the examples.
      label_list: the labels.
      max_seq_length: the length.
      tokenizer: a FullTokenizer.
    """
    features = []
    for number, example in enumerate(examples):
        if number and number % _LOGGED_EVERY == 0:
            tf.logging.info("Converting example %d", number)
        features.append(
            convert_single_example(number, example, label_list, max_seq_length, tokenizer)
        )
    return features


def file_based_convert_examples_to_features(
    examples: Iterable[Example],
    label_list: Sequence[str],
    max_seq_length: int,
    tokenizer: FullTokenizer,
    output_file: str,
) -> None:
    """Writes the features of examples as TFRecords.

    Args:
      examples: the examples.
      label_list: the labels.
      max_seq_length: the length.
      tokenizer: a FullTokenizer.
      output_file: the path of the file.
    """
    converted = (
        convert_single_example(number, example, label_list, max_seq_length, tokenizer)
        for number, example in enumerate(examples)
    )
    write_records(
        output_file,
        (
            {
                "input_ids": f.input_ids,
                "input_mask": f.input_mask,
                "segment_ids": f.segment_ids,
                "label_ids": [f.label_id],
                "is_real_example": [int(f.is_real_example)],
            }
            for f in converted
        ),
    )


def input_fn_builder(
    features: Sequence[InputFeatures], seq_length: int, is_training: bool, drop_remainder: bool
) -> Callable[[Any], Any]:
    """Returns an input function over features in memory.

    Args:
      features: InputFeatures.
      seq_length: their length.
      is_training: whether to shuffle and repeat them.
      drop_remainder: whether to drop a last batch that is not full.

    Returns:
      A function of `params`, which contain "batch_size".
    """
    columns = {
        name: np.array([getattr(f, name) for f in features], np.int32).reshape(-1, seq_length)
        for name in _FEATURES
    }
    columns["label_ids"] = np.array([f.label_id for f in features], np.int32)
    columns["is_real_example"] = np.array([f.is_real_example for f in features], np.int32)

    def input_fn(params: Mapping[str, Any]) -> tf.data.Dataset:
        data = training_order(tf.data.Dataset.from_tensor_slices(columns), is_training)
        return data.batch(params["batch_size"], drop_remainder=drop_remainder)

    return input_fn


def file_based_input_fn_builder(
    input_file: str, seq_length: int, is_training: bool, drop_remainder: bool
) -> Callable[[Any], Any]:
    """Returns an input function over TFRecords.

    Args:
      input_file: a file written by `file_based_convert_examples_to_features`.
      seq_length: the length of the features.
      is_training: whether to shuffle and repeat them.
      drop_remainder: whether to drop a last batch that is not full.

    Returns:
      A function of `params`, which contain "batch_size".
    """
    shapes = {**{name: [seq_length] for name in _FEATURES}, "label_ids": [], "is_real_example": []}
    return record_batches(
        input_file,
        {n: tf.io.FixedLenFeature(s, tf.int64) for n, s in shapes.items()},
        is_training,
        drop_remainder,
    )

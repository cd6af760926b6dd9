"""Converts SQuAD examples to features, with paragraphs split into overlapping spans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow.bert._records import int64_features, record_batches
from mesh_tensorflow.bert._squad.squad_examples import SquadExample

if TYPE_CHECKING:
    from mesh_tensorflow.bert.tokenization import FullTokenizer

__all__ = [
    "FeatureWriter",
    "InputFeatures",
    "convert_examples_to_features",
    "input_fn_builder",
]

_FIRST_ID = 1000000000
_SHOWN = 20
_MARKS = 3  # [CLS] and two [SEP]


class InputFeatures:
    """A question and a span of its paragraph, as integers.

    Attributes:
      unique_id: a unique number.
      example_index: the index of the example.
      doc_span_index: the index of the span.
      tokens: [CLS] question [SEP] span [SEP].
      token_to_orig_map: a dictionary from each token of the span to the index of its word in the
        paragraph.
      token_is_max_context: a dictionary from each token of the span to whether no other span has
        more context for it.
      input_ids: the ids of tokens.
      input_mask: 1 for each token, 0 for padding.
      segment_ids: 1 for tokens of the span.
      start_position: the index of the answer's first token; 0 if it is not in this span.
      end_position: the index of the answer's last token.
      is_impossible: whether there is no answer.
    """

    def __init__(
        self,
        unique_id: int,
        example_index: int,
        doc_span_index: int,
        tokens: Sequence[str],
        token_to_orig_map: Mapping[int, int],
        token_is_max_context: Mapping[int, bool],
        input_ids: Sequence[int],
        input_mask: Sequence[int],
        segment_ids: Sequence[int],
        start_position: Optional[int] = None,
        end_position: Optional[int] = None,
        is_impossible: Optional[bool] = None,
    ) -> None:
        self.unique_id = unique_id
        self.example_index = example_index
        self.doc_span_index = doc_span_index
        self.tokens = tokens
        self.token_to_orig_map = token_to_orig_map
        self.token_is_max_context = token_is_max_context
        self.input_ids = input_ids
        self.input_mask = input_mask
        self.segment_ids = segment_ids
        self.start_position = start_position
        self.end_position = end_position
        self.is_impossible = is_impossible


class FeatureWriter:
    """Writes InputFeatures to a TFRecord file.

    Attributes:
      filename: the path of the file.
      is_training: whether to write answers too.
      num_features: the number of features written.
    """

    def __init__(self, filename: str, is_training: bool) -> None:
        self.filename = filename
        self.is_training = is_training
        self.num_features = 0
        self._writer = tf.io.TFRecordWriter(filename)

    def process_feature(self, feature: InputFeatures) -> None:
        """Writes one InputFeatures.

        Args:
          feature: InputFeatures.
        """
        self.num_features += 1
        values: dict[str, Sequence[Any]] = {
            "unique_ids": [feature.unique_id],
            "input_ids": feature.input_ids,
            "input_mask": feature.input_mask,
            "segment_ids": feature.segment_ids,
        }
        if self.is_training:
            values.update(
                start_positions=[feature.start_position],
                end_positions=[feature.end_position],
                is_impossible=[int(bool(feature.is_impossible))],
            )
        self._writer.write(int64_features(values).SerializeToString())

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


# -- spans


class _Span(NamedTuple):
    """A span of a paragraph, in tokens."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """The index of its last token."""
        return self.start + self.length - 1


def _spans(length: int, room: int, stride: int) -> list[_Span]:
    """Returns spans of at most `room` tokens, which begin `stride` tokens apart."""
    spans: list[_Span] = []
    start = 0
    while start < length:
        spans.append(_Span(start, min(room, length - start)))
        if start + spans[-1].length == length:
            break
        start += min(spans[-1].length, stride)
    return spans


def _best_span(spans: Sequence[_Span], position: int) -> int:
    """Returns the index of the span with the most context on both sides of a token."""

    def context(index: int) -> float:
        span = spans[index]
        return min(position - span.start, span.end - position) + 0.01 * span.length

    return max(
        (i for i, span in enumerate(spans) if span.start <= position <= span.end), key=context
    )


# -- examples


class _Document(NamedTuple):
    """The tokens of a paragraph."""

    tokens: list[str]
    word_of_token: list[int]
    first_token_of_word: list[int]


def _tokenized(words: Sequence[str], tokenizer: FullTokenizer) -> _Document:
    document = _Document([], [], [])
    for number, word in enumerate(words):
        document.first_token_of_word.append(len(document.tokens))
        pieces = tokenizer.tokenize(word)
        document.tokens.extend(pieces)
        document.word_of_token.extend([number] * len(pieces))
    return document


def _answer_tokens(
    example: SquadExample, document: _Document, tokenizer: FullTokenizer
) -> tuple[int, int]:
    """Returns the first and the last token of the answer.

    Its words may contain more than the answer, such as "(1895-1943)." for "1895": the result is the
    longest range of their tokens that equals the answer's tokens, if there is one.
    """
    if example.is_impossible:
        return -1, -1
    assert example.start_position is not None and example.end_position is not None
    assert example.orig_answer_text is not None
    first = document.first_token_of_word[example.start_position]
    after = [*document.first_token_of_word, len(document.tokens)][example.end_position + 1]
    answer = tokenizer.tokenize(example.orig_answer_text)
    for start in range(first, after):
        for end in range(after - 1, start - 1, -1):
            if document.tokens[start : end + 1] == answer:
                return start, end
    return first, after - 1


def _position(answer: tuple[int, int], span: _Span, offset: int) -> tuple[int, int]:
    """Returns the answer's first and last token in a span; (0, 0) if it is not in the span."""
    start, end = answer
    if start < span.start or end > span.end:
        return 0, 0
    return start - span.start + offset, end - span.start + offset


class _Converter:
    """Converts examples to features, and numbers them."""

    def __init__(
        self,
        tokenizer: FullTokenizer,
        max_seq_length: int,
        doc_stride: int,
        max_query_length: int,
        is_training: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._length = max_seq_length
        self._stride = doc_stride
        self._max_query_length = max_query_length
        self._is_training = is_training
        self._next_id = _FIRST_ID

    def features(self, index: int, example: SquadExample) -> Iterable[InputFeatures]:
        """Yields the features of all spans of an example's paragraph."""
        query = self._tokenizer.tokenize(example.question_text)[: self._max_query_length]
        document = _tokenized(example.doc_tokens, self._tokenizer)
        answer = _answer_tokens(example, document, self._tokenizer) if self._is_training else None
        spans = _spans(len(document.tokens), self._length - len(query) - _MARKS, self._stride)
        for number in range(len(spans)):
            made = self._feature(query, document, spans, number)
            made.example_index = index
            if answer is not None:
                made.start_position, made.end_position = (
                    _position(answer, spans[number], len(query) + 2)
                    if not example.is_impossible
                    else (0, 0)
                )
            made.is_impossible = example.is_impossible
            yield made

    def _feature(
        self, query: list[str], document: _Document, spans: Sequence[_Span], number: int
    ) -> InputFeatures:
        span = spans[number]
        tokens = ["[CLS]", *query, "[SEP]"]
        offset = len(tokens)
        positions = range(span.start, span.end + 1)
        tokens += [*(document.tokens[i] for i in positions), "[SEP]"]
        ids = self._tokenizer.convert_tokens_to_ids(tokens)
        padding = [0] * (self._length - len(tokens))
        unique_id, self._next_id = self._next_id, self._next_id + 1
        return InputFeatures(
            unique_id,
            0,
            number,
            tokens,
            {offset + i - span.start: document.word_of_token[i] for i in positions},
            {offset + i - span.start: _best_span(spans, i) == number for i in positions},
            ids + padding,
            [1] * len(tokens) + padding,
            [0] * offset + [1] * (len(tokens) - offset) + padding,
        )


def convert_examples_to_features(
    examples: Iterable[SquadExample],
    tokenizer: FullTokenizer,
    max_seq_length: int,
    doc_stride: int,
    max_query_length: int,
    is_training: bool,
    output_fn: Callable[[InputFeatures], Any],
) -> None:
    """Calls a function with the features of all examples.

    Args:
      examples: SquadExamples.
      tokenizer: a FullTokenizer.
      max_seq_length: the length of sequences.
      doc_stride: the number of tokens between the beginnings of consecutive spans.
      max_query_length: the maximum number of tokens of a question.
      is_training: whether examples have answers.
      output_fn: a function of InputFeatures.

    Raises:
      ValueError: the lengths leave no room for a paragraph.
    """
    if doc_stride < 1 or max_seq_length <= max_query_length + _MARKS:
        raise ValueError(
            f"max_seq_length ({max_seq_length}) must be greater than max_query_length "
            f"({max_query_length}) + {_MARKS}, and doc_stride ({doc_stride}) at least 1"
        )
    converter = _Converter(tokenizer, max_seq_length, doc_stride, max_query_length, is_training)
    for index, example in enumerate(examples):
        for feature in converter.features(index, example):
            if feature.unique_id < _FIRST_ID + _SHOWN:
                tf.logging.debug("Example %s: %s", example.qas_id, " ".join(feature.tokens))
            output_fn(feature)


def input_fn_builder(
    input_file: str, seq_length: int, is_training: bool, drop_remainder: bool
) -> Callable[[Any], Any]:
    """Returns an input function over TFRecords.

    Args:
      input_file: a file written by a FeatureWriter.
      seq_length: the length of the features.
      is_training: whether the features have answers, and are shuffled and repeated.
      drop_remainder: whether to drop a last batch that is not full.

    Returns:
      A function of `params`, which contain "batch_size".
    """
    shapes: dict[str, list[int]] = {
        "unique_ids": [],
        **{name: [seq_length] for name in ("input_ids", "input_mask", "segment_ids")},
        **({"start_positions": [], "end_positions": []} if is_training else {}),
    }
    return record_batches(
        input_file,
        {n: tf.io.FixedLenFeature(s, tf.int64) for n, s in shapes.items()},
        is_training,
        drop_remainder,
    )

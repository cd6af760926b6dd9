r"""Fine-tunes BERT for question answering (SQuAD), and predicts with it.

python -m mesh_tensorflow.bert.run_squad --train_file=train-v1.1.json --do_train \
        --predict_file=dev-v1.1.json --do_predict --vocab_file=vocab.txt \
        --bert_config_file=base.json --output_dir=OUT --mesh_shape="batch:2;model:2"
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf
from absl import flags  # noqa: F401  (a name of the classic)

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import estimator, layers
from mesh_tensorflow._programs import FLAGS, define, run_with_flags
from mesh_tensorflow.bert import tokenization
from mesh_tensorflow.bert._training import (
    MESH_FLAGS,
    TEXT_FLAGS,
    TRAINING_FLAGS,
    Features,
    check_positions,
    import_features,
    int64_features,
    make_estimator,
    make_model_fn,
    predicted,
    read_config,
    record_batches,
    require_flags,
    training_records,
    training_steps,
)
from mesh_tensorflow.bert.bert import BertConfig, BertModel

if TYPE_CHECKING:
    from mesh_tensorflow.bert.tokenization import FullTokenizer


__all__ = [
    "FLAGS",
    "FeatureWriter",
    "InputFeatures",
    "RawResult",
    "SquadExample",
    "convert_examples_to_features",
    "create_model",
    "get_final_text",
    "input_fn_builder",
    "main",
    "model_fn_builder",
    "read_squad_examples",
    "validate_flags_or_throw",
    "write_predictions",
]


define(
    **MESH_FLAGS,
    **TRAINING_FLAGS,
    **TEXT_FLAGS,
    train_file=(None, "JSON file of questions to train on."),
    predict_file=(None, "JSON file of questions to answer."),
    max_seq_length=(384, "Length of sequences: paragraphs are read in pieces of it."),
    doc_stride=(128, "Tokens from one piece of a paragraph to the next."),
    max_query_length=(64, "How many tokens of a question are kept."),
    n_best_size=(20, "How many answers to a question are written."),
    max_answer_length=(30, "How many tokens an answer may have."),
    verbose_logging=(False, "Whether to log answers that are not found in the text."),
    version_2_with_negative=(False, "Whether questions may have no answer, as in SQuAD 2.0."),
    null_score_diff_threshold=(
        0.0,
        "There is no answer if that much more speaks for none than for the best.",
    ),
)


# -- texts and questions


def _without_spaces(text: str) -> tuple[str, list[int]]:
    """Removes spaces from a text; returns the rest and the original index of each character."""
    places = [i for i, char in enumerate(text) if char != " "]
    return "".join(text[i] for i in places), places


def _log_not_found(message: str, *args: str) -> None:
    if FLAGS.verbose_logging:
        tf.logging.info("Unable to find text: " + message, *args)


def _place(pred_text: str, orig_text: str, tok_text: str) -> Optional[tuple[int, int]]:
    """Returns the indices of a prediction's first and last character in the original, or None."""
    start = tok_text.find(pred_text)
    if start == -1:
        _log_not_found("'%s' in '%s'", pred_text, orig_text)
        return None
    end = start + len(pred_text) - 1
    # Tokenization adds spaces only, so that characters other than spaces correspond by number,
    # unless accents that are characters of their own were removed.
    chars, places = _without_spaces(orig_text)
    tok_chars, tok_places = _without_spaces(tok_text)
    if len(chars) != len(tok_chars):
        _log_not_found("tokens have other characters: '%s', '%s'", chars, tok_chars)
        return None
    number = {place: i for i, place in enumerate(tok_places)}
    if start not in number or end not in number:
        _log_not_found("'%s' begins or ends with a space", pred_text)
        return None
    return places[number[start]], places[number[end]]


def get_final_text(pred_text: str, orig_text: str, do_lower_case: bool) -> str:
    """Returns the part of the original text that corresponds to a prediction.

    Tokens are lowercased and without accents, and the original words may contain more than the
    answer: for "Steve Smith's" and the prediction "steve smith" the result is "Steve Smith".

    Args:
      pred_text: tokens joined to words, separated by spaces.
      orig_text: the original words.
      do_lower_case: whether tokens were lowercased.

    Returns:
      A part of `orig_text`; all of it if the prediction cannot be found in it.
    """
    # The same rules as for the prediction, so that its words are found among those of the text.
    tokenizer = tokenization.BasicTokenizer(do_lower_case=do_lower_case)
    place = _place(pred_text, orig_text, " ".join(tokenizer.tokenize(orig_text)))
    return orig_text if place is None else orig_text[place[0] : place[1] + 1]


# U+202F is a narrow space, which TF BERT takes for white space, too.
_SPACES = " \t\r\n\u202f"


@dataclasses.dataclass(eq=False, repr=False)
class SquadExample:
    """A question about a paragraph.

    Attributes:
      qas_id: the question's id.
      question_text: the question.
      doc_tokens: the words of the paragraph.
      orig_answer_text: the answer, or None if it is unknown.
      start_position: the index of its first word.
      end_position: the index of its last word.
      is_impossible: whether the paragraph does not contain an answer.
    """

    qas_id: str
    question_text: str
    doc_tokens: list[str]
    orig_answer_text: Optional[str] = None
    start_position: Optional[int] = None
    end_position: Optional[int] = None
    is_impossible: bool = False

    def __str__(self) -> str:
        answer = f", answer={self.orig_answer_text!r}" if self.orig_answer_text else ""
        return f"SquadExample({self.qas_id!r}, {self.question_text!r}{answer})"

    __repr__ = __str__


def _words(text: str) -> tuple[list[str], list[int]]:
    """Returns the words of a text, and the word index of each character.

    White space belongs to the word before it.
    """
    words: list[str] = []
    of_char: list[int] = []
    inside = False
    # Not by str.split: answers are given by numbers of characters, and each of these has a word.
    for char in text:
        space = char in _SPACES
        if not space:
            if inside:
                words[-1] += char
            else:
                words.append(char)
        inside = not space
        of_char.append(len(words) - 1)
    return words, of_char


def _answer(
    question: Mapping[str, Any], words: list[str], of_char: list[int]
) -> Optional[tuple[str, int, int]]:
    """Returns the answer to train on, with its first and last word; None if it is not in them."""
    answers = question["answers"]
    if len(answers) != 1:
        raise ValueError(
            f"For training, each question should have exactly 1 answer, but {question['id']!r} has "
            f"{len(answers)}; with --version_2_with_negative it may be marked is_impossible"
        )
    text, offset = answers[0]["text"], answers[0]["answer_start"]
    start, end = of_char[offset], of_char[offset + len(text) - 1]
    answer = " ".join(words[start : end + 1])
    # It need only be a part: the first and last word may have more, such as a full stop.
    if " ".join(tokenization.whitespace_tokenize(text)) not in answer:
        tf.logging.warning(
            "Could not find answer: '%s' vs. '%s' of question %s, which is left out",
            answer,
            text,
            question["id"],
        )
        return None
    return text, start, end


def _questions(paragraph: Mapping[str, Any], is_training: bool) -> Iterator[SquadExample]:
    words, of_char = _words(paragraph["context"])
    for question in paragraph["qas"]:
        example = SquadExample(question["id"], question["question"], words)
        if is_training:
            # Files of SQuAD 1.1 have no such key, so the flag is asked first.
            example.is_impossible = FLAGS.version_2_with_negative and bool(
                question["is_impossible"]
            )
            no_answer = ("", -1, -1)
            answer = no_answer if example.is_impossible else _answer(question, words, of_char)
            if answer is None:
                continue
            example.orig_answer_text, example.start_position, example.end_position = answer
        yield example


def read_squad_examples(input_file: str, is_training: bool) -> list[SquadExample]:
    """Reads the questions of a file.

    Rajpurkar et al., "SQuAD: 100,000+ questions for machine comprehension of text" (2016).

    Args:
      input_file: a JSON file in the format of SQuAD.
      is_training: whether to read answers. A question whose answer is not found in its paragraph is
        skipped with a warning.

    Returns:
      A list of SquadExamples.

    Raises:
      ValueError: the file does not exist or is malformed, or a question does not have exactly one
        answer.
    """
    try:
        with tf.io.gfile.GFile(input_file, "r") as f:
            entries = json.load(f)["data"]
        return [
            example
            for entry in entries
            for paragraph in entry["paragraphs"]
            for example in _questions(paragraph, is_training)
        ]
    except tf.errors.NotFoundError as error:
        raise ValueError(f"read_squad_examples: there is no file {input_file}") from error
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(
            f"read_squad_examples: {input_file} is not of SQuAD's form, with data, paragraphs, "
            f"context, qas, question, answers: {type(error).__name__} {error}"
        ) from error


# -- features


_FIRST_ID = 1000000000  # as in TF BERT, so that no id is taken for an index


_SHOWN = 20


_MARKS = 3  # [CLS] and two [SEP]


@dataclasses.dataclass(eq=False, repr=False)
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

    unique_id: int
    example_index: int
    doc_span_index: int
    tokens: Sequence[str]
    token_to_orig_map: Mapping[int, int]
    token_is_max_context: Mapping[int, bool]
    input_ids: Sequence[int]
    input_mask: Sequence[int]
    segment_ids: Sequence[int]
    start_position: Optional[int] = None
    end_position: Optional[int] = None
    is_impossible: Optional[bool] = None


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
        # Any further span would be a part of this one.
        if start + spans[-1].length == length:
            break
        # A stride longer than a span would leave tokens out.
        start += min(spans[-1].length, stride)
    return spans


def _best_span(spans: Sequence[_Span], position: int) -> int:
    """Returns the index of the span with the most context on both sides of a token."""

    def context(index: int) -> float:
        span = spans[index]
        # The shorter side counts; of equal ones, the longer span has a little more.
        return min(position - span.start, span.end - position) + 0.01 * span.length

    return max(
        (i for i, span in enumerate(spans) if span.start <= position <= span.end), key=context
    )


def _answer_tokens(
    example: SquadExample, tokens: list[str], starts: Sequence[int], tokenizer: FullTokenizer
) -> tuple[int, int]:
    """Returns the first and the last token of the answer.

    Its words may contain more than the answer, such as "(1895-1943)." for "1895": the result is the
    longest range of their tokens that equals the answer's tokens, if there is one.

    Args:
      example: a SquadExample with an answer, or that is impossible.
      tokens: the tokens of the paragraph.
      starts: where the tokens of each word begin, and where those of the last one end.
      tokenizer: a FullTokenizer.
    """
    if example.is_impossible:
        return -1, -1
    assert example.start_position is not None and example.end_position is not None
    assert example.orig_answer_text is not None
    first, after = starts[example.start_position], starts[example.end_position + 1]
    answer = tokenizer.tokenize(example.orig_answer_text)
    for start in range(first, after):
        for end in range(after - 1, start - 1, -1):
            if tokens[start : end + 1] == answer:
                return start, end
    return first, after - 1


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
    # In either case spans would never come to the end of a paragraph.
    if doc_stride < 1 or max_seq_length <= max_query_length + _MARKS:
        raise ValueError(
            f"max_seq_length ({max_seq_length}) must be greater than max_query_length "
            f"({max_query_length}) + {_MARKS}, and doc_stride ({doc_stride}) at least 1"
        )
    # Results are matched with features by these numbers: a question may have several spans.
    unique_ids = itertools.count(_FIRST_ID)
    for index, example in enumerate(examples):
        # Cut, as spans without room would never come to the end of the paragraph.
        query = tokenizer.tokenize(example.question_text)[:max_query_length]
        # Answers are given by words, and spans and predictions are of tokens.
        of_words = [tokenizer.tokenize(word) for word in example.doc_tokens]
        document = [token for pieces in of_words for token in pieces]
        word_of_token = [n for n, pieces in enumerate(of_words) for _ in pieces]
        starts = list(itertools.accumulate(map(len, of_words), initial=0))
        answer = _answer_tokens(example, document, starts, tokenizer) if is_training else None
        spans = _spans(len(document), max_seq_length - len(query) - _MARKS, doc_stride)
        for number, span in enumerate(spans):
            tokens = ["[CLS]", *query, "[SEP]"]
            offset = len(tokens)
            places = range(span.start, span.end + 1)
            tokens += [*document[span.start : span.end + 1], "[SEP]"]
            padding = [0] * (max_seq_length - len(tokens))
            feature = InputFeatures(
                next(unique_ids),
                index,
                number,
                tokens,
                {offset + i - span.start: word_of_token[i] for i in places},
                {offset + i - span.start: _best_span(spans, i) == number for i in places},
                tokenizer.convert_tokens_to_ids(tokens) + padding,
                [1] * len(tokens) + padding,
                [0] * offset + [1] * (len(tokens) - offset) + padding,
                is_impossible=example.is_impossible,
            )
            if answer is not None:
                # [CLS] at position 0 stands for no answer in this span.
                inside = span.start <= answer[0] and answer[1] <= span.end
                feature.start_position, feature.end_position = (
                    place - span.start + offset if inside else 0 for place in answer
                )
            if feature.unique_id < _FIRST_ID + _SHOWN:
                tf.logging.debug("Example %s: %s", example.qas_id, " ".join(tokens))
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
    return record_batches(input_file, shapes, is_training, drop_remainder)


# -- answers

RawResult = collections.namedtuple("RawResult", ["unique_id", "start_logits", "end_logits"])


RawResult.__doc__ = "The logits of each token of features as the start and end of the answer."


class _Candidate(NamedTuple):
    """A candidate answer: a span of tokens of one InputFeatures, which become its text."""

    start_logit: float
    end_logit: float
    feature: Optional[InputFeatures] = None
    start: int = 0
    end: int = 0
    text: str = ""

    @property
    def score(self) -> float:
        """The sum of both logits."""
        return self.start_logit + self.end_logit


def _largest(logits: Sequence[float], count: int) -> list[int]:
    """Returns the indices of the largest logits."""
    # `reverse` keeps the order of equal logits: of these, the earlier token is taken.
    return sorted(range(len(logits)), key=lambda i: logits[i], reverse=True)[:count]


def _softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores, default=0.0)
    # exp(score - top) is at most 1, and cannot overflow.
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def _predicted_spans(
    feature: InputFeatures, result: RawResult, n_best_size: int, max_answer_length: int
) -> Iterable[_Candidate]:
    """Yields the candidate answers in a span of the paragraph that has maximum context for them."""
    words = feature.token_to_orig_map
    # The map has the span's tokens alone, so that no answer is of the question or of padding.
    ends = [i for i in _largest(result.end_logits, n_best_size) if i in words]
    for start in _largest(result.start_logits, n_best_size):
        # Spans overlap: without this, an answer would be a candidate of each span that it is in.
        if start not in words or not feature.token_is_max_context.get(start, False):
            continue
        for end in ends:
            if start <= end < start + max_answer_length:
                yield _Candidate(
                    result.start_logits[start], result.end_logits[end], feature, start, end
                )


def _text(span: _Candidate, example: SquadExample, do_lower_case: bool) -> str:
    """Returns the text of a candidate as in the paragraph; "" if it is not an answer."""
    feature = span.feature
    if feature is None:
        return ""
    pieces = " ".join(feature.tokens[span.start : span.end + 1])
    # The first piece may begin within a word, and has no space before it.
    joined = " ".join(pieces.replace(" ##", "").replace("##", "").split())
    first, last = (feature.token_to_orig_map[i] for i in (span.start, span.end))
    return get_final_text(joined, " ".join(example.doc_tokens[first : last + 1]), do_lower_case)


def _predicted(
    example: SquadExample,
    pieces: Sequence[tuple[InputFeatures, Any]],
    n_best_size: int,
    max_answer_length: int,
    do_lower_case: bool,
) -> tuple[str, list[dict[str, Any]], Optional[float]]:
    """Returns the answer to a question from all spans of its paragraph, the best ones, and a score.

    The score is how much more speaks for no answer than for the best one.
    """
    spans = [
        span
        for feature, result in pieces
        for span in _predicted_spans(feature, result, n_best_size, max_answer_length)
    ]
    with_none = FLAGS.version_2_with_negative
    # The null score is the least sum of the logits of [CLS]: a span that lacks the answer scores
    # high, so there is none only if all spans say so.
    of_none = [(result.start_logits[0], result.end_logits[0]) for _, result in pieces]
    null = _Candidate(*min(of_none, key=sum, default=(0.0, 0.0)))
    if with_none:
        spans.append(null)
    spans.sort(key=lambda span: span.score, reverse=True)
    by_text: dict[str, _Candidate] = {}
    for span in spans:
        # Here and not before: texts of several spans may be the same one.
        if len(by_text) >= n_best_size:
            break
        text = _text(span, example, do_lower_case)
        # The spans are sorted, so the first of equal texts has the highest score.
        by_text.setdefault(text, span._replace(text=text))
    answers = list(by_text.values())
    # The list may have been full before this answer came.
    if with_none and not any(answer.text == "" for answer in answers):
        answers.append(null)
    if not answers:
        # As BERT's own script does: each question has an answer, also one without any candidate.
        answers.append(_Candidate(0.0, 0.0, text="empty"))
    nbest = [
        {
            "text": answer.text,
            "probability": probability,
            "start_logit": answer.start_logit,
            "end_logit": answer.end_logit,
        }
        for answer, probability in zip(answers, _softmax([a.score for a in answers]))
    ]
    if not with_none:
        return answers[0].text, nbest, None
    best = next((answer for answer in answers if answer.text), None)
    if best is None:
        return "", nbest, 0.0
    # Devlin et al. (2019), section 4.3: an answer needs best >= null + tau, where tau is the
    # negative of this threshold.
    difference = null.score - best.score
    answer = "" if difference > FLAGS.null_score_diff_threshold else best.text
    return answer, nbest, difference


def _write(path: str, values: object) -> None:
    with tf.io.gfile.GFile(path, "w") as f:
        f.write(json.dumps(values, indent=4) + "\n")


def write_predictions(
    all_examples: Sequence[SquadExample],
    all_features: Sequence[InputFeatures],
    all_results: Sequence[Any],
    n_best_size: int,
    max_answer_length: int,
    do_lower_case: bool,
    output_prediction_file: str,
    output_nbest_file: str,
    output_null_log_odds_file: str,
) -> None:
    """Writes predictions as JSON: best answers, n-best lists, and scores of no answer.

    Args:
      all_examples: SquadExamples.
      all_features: the InputFeatures of the examples.
      all_results: the RawResults of the features.
      n_best_size: the maximum number of answers to a question.
      max_answer_length: the maximum number of tokens of an answer.
      do_lower_case: whether tokens were lowercased.
      output_prediction_file: the path of the answers by question.
      output_nbest_file: the path of the n-best lists, with probabilities and logits.
      output_null_log_odds_file: with --version_2_with_negative, the path of the differences between
        the scores of no answer and of the best answer.

    Raises:
      ValueError: results of some features are missing.
    """
    tf.logging.info("Writing predictions to %s and %s", output_prediction_file, output_nbest_file)
    results = {result.unique_id: result for result in all_results}
    missing = [f.unique_id for f in all_features if f.unique_id not in results]
    if missing:
        raise ValueError(
            f"write_predictions: {len(missing)} of {len(all_features)} features have no result, "
            f"such as {missing[0]}; prediction has to be carried through"
        )
    pieces: dict[int, list[tuple[InputFeatures, Any]]] = collections.defaultdict(list)
    # A long paragraph is several features, and the best answer may be in any of them.
    for feature in all_features:
        pieces[feature.example_index].append((feature, results[feature.unique_id]))
    predictions = {
        example.qas_id: _predicted(
            example, pieces[index], n_best_size, max_answer_length, do_lower_case
        )
        for index, example in enumerate(all_examples)
    }
    _write(output_prediction_file, {key: answer for key, (answer, _, _) in predictions.items()})
    _write(output_nbest_file, {key: nbest for key, (_, nbest, _) in predictions.items()})
    if FLAGS.version_2_with_negative:
        _write(
            output_null_log_odds_file, {key: score for key, (_, _, score) in predictions.items()}
        )


_DEVIATION = 0.02  # standard deviation of initial weights


_SEED = 12345


# -- the model


def create_model(
    bert_config: BertConfig,
    is_training: bool,
    input_ids: mtf.Tensor,
    input_mask: mtf.Tensor,
    segment_ids: mtf.Tensor,
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Builds a model; returns the logits of each token as the start and end of the answer.

    Args:
      bert_config: a BertConfig.
      is_training: whether dropout is applied.
      input_ids: an int32 Tensor [batch, seq].
      input_mask: an int32 Tensor of the same shape, 0 at padding.
      segment_ids: an int32 Tensor of the same shape.

    Returns:
      (start logits [batch, seq], end logits [batch, seq]).
    """
    return _model_and_logits(bert_config, is_training, input_ids, input_mask, segment_ids)[1:]


def _model_and_logits(*args: Any) -> tuple[BertModel, mtf.Tensor, mtf.Tensor]:
    """Returns a BertModel, and what `create_model` returns; takes the arguments of the latter."""
    model = BertModel(*args, mesh_shape=FLAGS.mesh_shape, layout=FLAGS.layout)
    class_dim = mtf.Dimension("class", 2)
    logits = layers.dense(
        model.get_sequence_output(),
        [class_dim],
        reduced_dims=[model.model_dim],
        kernel_initializer=tf.truncated_normal_initializer(stddev=_DEVIATION),
        name="cls/squad/output",
    )
    start, end = mtf.unstack(logits, class_dim)
    return model, start, end


def _loss(logits: mtf.Tensor, positions: mtf.Tensor) -> mtf.Tensor:
    """Returns the mean cross entropy of positions; targets out of range do not count."""
    seq_dim = logits.shape.dims[-1]
    log_probs = mtf.log_softmax(logits, seq_dim)
    # -log softmax over seq at the position; an index out of range is looked up as 0.
    return mtf.negative(mtf.reduce_mean(mtf.gather(log_probs, positions, seq_dim)))


def model_fn_builder(
    bert_config: BertConfig,
    init_checkpoint: Optional[str],
    learning_rate: float,
    num_train_steps: Optional[int],
    num_warmup_steps: Optional[int],
    use_tpu: bool,
) -> Callable[..., Any]:
    """Returns a model function for a TPUEstimator.

    Args:
      bert_config: a BertConfig.
      init_checkpoint: a checkpoint to initialize variables from, or None.
      learning_rate: the peak learning rate.
      num_train_steps: the number of training steps; None without training.
      num_warmup_steps: the number of warmup steps.
      use_tpu: whether the estimator runs one program on each processor.

    Returns:
      A function of features, labels, mode and params that returns a TPUEstimatorSpec.
    """
    modes = estimator.ModeKeys

    def build(mesh: mtf.Mesh, features: Features, mode: str) -> dict[str, mtf.Tensor]:
        if mode not in (modes.TRAIN, modes.PREDICT):
            raise ValueError(
                f"Only TRAIN and PREDICT modes are supported: {mode}; answers are compared by "
                "SQuAD's evaluation script"
            )
        x = import_features(mesh, features)
        model, start, end = _model_and_logits(bert_config, mode == modes.TRAIN, *x)
        if mode == modes.PREDICT:
            return {"start_logits": start, "end_logits": end}
        start_loss = _loss(start, x.of_each(features["start_positions"]))
        end_loss = _loss(end, x.of_each(features["end_positions"]))
        # Devlin et al. (2019), section 4.2: the log-likelihoods of start and end; here their mean.
        return {"loss": 0.5 * (start_loss + end_loss) + model.get_extra_loss()}

    def outputs(features: Features, mode: str, tensors: dict[str, tf.Tensor]) -> dict[str, Any]:
        return {"predictions": {"unique_ids": features["unique_ids"], **tensors}}

    return make_model_fn(
        build,
        outputs,
        init_checkpoint,
        learning_rate,
        num_train_steps or 1,
        num_warmup_steps,
        FLAGS.max_optimized_variable_size,
        use_tpu,
    )


# -- the program


def validate_flags_or_throw(bert_config: BertConfig) -> None:
    """Checks flags.

    Args:
      bert_config: a BertConfig.

    Raises:
      ValueError: a flag is invalid.
    """
    tokenization.validate_case_matches_checkpoint(FLAGS.do_lower_case, FLAGS.init_checkpoint)
    if not (FLAGS.do_train or FLAGS.do_predict):
        raise ValueError(
            "At least one of `do_train` or `do_predict` must be True: pass --do_train or "
            "--do_predict"
        )
    for mode, name in (("do_train", "train_file"), ("do_predict", "predict_file")):
        if getattr(FLAGS, mode) and not getattr(FLAGS, name):
            raise ValueError(f"If `{mode}` is True, then `{name}` must be specified: --{name}=FILE")
    check_positions(bert_config, FLAGS.max_seq_length)
    # Besides the question there is at least one token of the paragraph.
    if FLAGS.max_seq_length <= FLAGS.max_query_length + _MARKS:
        raise ValueError(
            f"The max_seq_length ({FLAGS.max_seq_length}) must be greater than max_query_length "
            f"({FLAGS.max_query_length}) + {_MARKS}"
        )


def _write_features(
    examples: Sequence[SquadExample],
    tokenizer: FullTokenizer,
    path: str,
    is_training: bool,
    batch_size: int = 1,
) -> list[InputFeatures]:
    """Writes features of examples; fills the last batch with copies of the last one."""
    features: list[InputFeatures] = []
    convert_examples_to_features(
        examples,
        tokenizer,
        FLAGS.max_seq_length,
        FLAGS.doc_stride,
        FLAGS.max_query_length,
        is_training,
        features.append,
    )
    with contextlib.closing(FeatureWriter(path, is_training)) as writer:
        # What does not fill a batch is dropped by the input; results of the copies are not asked
        # for.
        for feature in features + features[-1:] * (-len(features) % batch_size):
            writer.process_feature(feature)
    return features


def _predict(run: estimator.tpu.TPUEstimator, tokenizer: FullTokenizer) -> None:
    """Writes answers to predictions.json, nbest_predictions.json and null_odds.json."""
    examples = read_squad_examples(FLAGS.predict_file, is_training=False)
    path = os.path.join(FLAGS.output_dir, "eval.tf_record")
    features = _write_features(examples, tokenizer, path, False, FLAGS.predict_batch_size)
    tf.logging.info("Predicting %d questions in %d pieces", len(examples), len(features))
    input_fn = input_fn_builder(path, FLAGS.max_seq_length, False, True)
    results = [
        # Python's floats, since these are written as JSON, which has none of NumPy's.
        RawResult(int(p["unique_ids"]), p["start_logits"].tolist(), p["end_logits"].tolist())
        for p in predicted(run, input_fn, len(features))
    ]
    names = ("predictions.json", "nbest_predictions.json", "null_odds.json")
    write_predictions(
        examples,
        features,
        results,
        FLAGS.n_best_size,
        FLAGS.max_answer_length,
        FLAGS.do_lower_case,
        *(os.path.join(FLAGS.output_dir, name) for name in names),
    )


def main(_: Sequence[str]) -> None:
    """Trains and predicts, as requested by flags.

    Args:
      _: the remaining command line arguments.

    Raises:
      ValueError: a flag is invalid, or a file is missing.
    """
    require_flags("run_squad", ["vocab_file", "bert_config_file", "output_dir"])
    config = read_config(FLAGS.max_seq_length)
    validate_flags_or_throw(config)
    tokenizer = tokenization.FullTokenizer(FLAGS.vocab_file, FLAGS.do_lower_case)
    examples: list[SquadExample] = []
    steps = 0
    if FLAGS.do_train:
        examples = read_squad_examples(FLAGS.train_file, is_training=True)
        steps = training_steps(len(examples), f"questions of {FLAGS.train_file}")
        # Examples of one paragraph are adjacent.
        # By a generator of its own, so that each run writes the same records.
        random.Random(_SEED).shuffle(examples)
    tf.io.gfile.makedirs(FLAGS.output_dir)
    model_fn = model_fn_builder(
        config,
        FLAGS.init_checkpoint,
        FLAGS.learning_rate,
        steps,
        int(steps * FLAGS.warmup_proportion),
        FLAGS.use_tpu,
    )
    run = make_estimator(model_fn, "train", "predict")
    if FLAGS.do_train:
        path = training_records(lambda path: _write_features(examples, tokenizer, path, True))
        run.train(input_fn_builder(path, FLAGS.max_seq_length, True, True), max_steps=steps)
    if FLAGS.do_predict:
        _predict(run, tokenizer)


if __name__ == "__main__":
    run_with_flags(main, "mesh_tensorflow.bert.run_squad")

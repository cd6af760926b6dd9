"""Selects the best answers by the logits of their first and last tokens."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._flags import FLAGS
from mesh_tensorflow.bert._squad.squad_examples import SquadExample
from mesh_tensorflow.bert._squad.squad_features import InputFeatures
from mesh_tensorflow.bert._squad.squad_text import get_final_text

__all__ = ["RawResult", "write_predictions"]

RawResult = collections.namedtuple("RawResult", ["unique_id", "start_logits", "end_logits"])
RawResult.__doc__ = "The logits of each token of features as the start and end of the answer."


class _Span(NamedTuple):
    """A candidate answer: a span of tokens of one InputFeatures."""

    feature: Optional[InputFeatures]
    start: int
    end: int
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        """The sum of both logits."""
        return self.start_logit + self.end_logit


class _Answer(NamedTuple):
    """A candidate answer as text."""

    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        """The sum of both logits."""
        return self.start_logit + self.end_logit


def _largest(logits: Sequence[float], count: int) -> list[int]:
    """Returns the indices of the largest logits."""
    return sorted(range(len(logits)), key=lambda i: logits[i], reverse=True)[:count]


def _softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores, default=0.0)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def _spans(
    feature: InputFeatures, result: RawResult, n_best_size: int, max_answer_length: int
) -> Iterable[_Span]:
    """Yields the candidate answers in a span of the paragraph that has maximum context for them."""
    words = feature.token_to_orig_map
    ends = [i for i in _largest(result.end_logits, n_best_size) if i in words]
    for start in _largest(result.start_logits, n_best_size):
        if start not in words or not feature.token_is_max_context.get(start, False):
            continue
        for end in ends:
            if start <= end < start + max_answer_length:
                yield _Span(feature, start, end, result.start_logits[start], result.end_logits[end])


def _text(span: _Span, example: SquadExample, do_lower_case: bool) -> str:
    """Returns the text of a candidate as in the paragraph; "" if it is not an answer."""
    feature = span.feature
    if feature is None:
        return ""
    pieces = " ".join(feature.tokens[span.start : span.end + 1])
    joined = " ".join(pieces.replace(" ##", "").replace("##", "").split())
    first, last = (feature.token_to_orig_map[i] for i in (span.start, span.end))
    return get_final_text(joined, " ".join(example.doc_tokens[first : last + 1]), do_lower_case)


def _best_answers(
    spans: Sequence[_Span], example: SquadExample, n_best_size: int, do_lower_case: bool
) -> list[_Answer]:
    """Returns the best candidates as text, without duplicates."""
    found: dict[str, _Answer] = {}
    for span in spans:
        if len(found) >= n_best_size:
            break
        text = _text(span, example, do_lower_case)
        found.setdefault(text, _Answer(text, span.start_logit, span.end_logit))
    return list(found.values())


def _no_answer(pieces: Sequence[tuple[InputFeatures, Any]]) -> _Span:
    """Returns the null score, the minimum over features of the sum of the logits of [CLS]."""
    logits = [(result.start_logits[0], result.end_logits[0]) for _, result in pieces]
    start, end = min(logits, key=sum, default=(0.0, 0.0))
    return _Span(None, 0, 0, start, end)


class _Predictions(NamedTuple):
    """The predictions for one question."""

    answer: str
    nbest: list[dict[str, Any]]
    score_difference: Optional[float]


def _predicted(
    example: SquadExample,
    pieces: Sequence[tuple[InputFeatures, Any]],
    n_best_size: int,
    max_answer_length: int,
    do_lower_case: bool,
) -> _Predictions:
    """Returns the best answers to a question, from all spans of its paragraph."""
    spans = [
        span
        for feature, result in pieces
        for span in _spans(feature, result, n_best_size, max_answer_length)
    ]
    with_none = FLAGS.version_2_with_negative
    null = _no_answer(pieces)
    if with_none:
        spans.append(null)
    spans.sort(key=lambda span: span.score, reverse=True)
    answers = _best_answers(spans, example, n_best_size, do_lower_case)
    if with_none and not any(answer.text == "" for answer in answers):
        answers.append(_Answer("", null.start_logit, null.end_logit))
    if not answers:
        answers.append(_Answer("empty", 0.0, 0.0))
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
        return _Predictions(answers[0].text, nbest, None)
    best = next((answer for answer in answers if answer.text), None)
    if best is None:
        return _Predictions("", nbest, 0.0)
    difference = null.score - best.score
    answer = "" if difference > FLAGS.null_score_diff_threshold else best.text
    return _Predictions(answer, nbest, difference)


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
    for feature in all_features:
        pieces[feature.example_index].append((feature, results[feature.unique_id]))
    predictions = {
        example.qas_id: _predicted(
            example, pieces[index], n_best_size, max_answer_length, do_lower_case
        )
        for index, example in enumerate(all_examples)
    }
    _write(output_prediction_file, {key: p.answer for key, p in predictions.items()})
    _write(output_nbest_file, {key: p.nbest for key, p in predictions.items()})
    if FLAGS.version_2_with_negative:
        _write(
            output_null_log_odds_file, {key: p.score_difference for key, p in predictions.items()}
        )

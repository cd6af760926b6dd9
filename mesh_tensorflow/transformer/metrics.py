"""Metrics of texts: functions of targets and predictions, as `EvalDataset.metric_fns` has them.

A target is a text, or a list of texts any of which is right. Values are from 0 to 100, higher ones
are better.
"""

from __future__ import annotations

import collections
import itertools
import re
import string
from collections.abc import Callable, Sequence
from typing import Any, Union

from mesh_tensorflow._core.errors import missing_package

__all__ = ["bleu", "exact_match", "f1", "rouge"]

Targets = Sequence[Union[str, Sequence[str]]]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def bleu(targets: Targets, predictions: Sequence[str], **options: Any) -> dict[str, float]:
    """Returns BLEU of all texts together, as sacrebleu computes it.

    Papineni et al., "BLEU: a method for automatic evaluation of machine translation" (2002); Post,
    "A call for clarity in reporting BLEU scores" (2018).

    >>> metrics.bleu(["It is a cat."], ["It is a cat."])  # doctest: +SKIP
    {'bleu': 100.0}

    Args:
      targets: for each prediction a text, or a list of them.
      predictions: texts.
      **options: arguments of `sacrebleu.corpus_bleu`, such as `tokenize="zh"` or `lowercase=True`.

    Raises:
      ImportError: sacrebleu is not installed.
      ValueError: there are no texts, or not a prediction for each target.
    """
    try:
        import sacrebleu
    except ImportError as e:
        raise missing_package("metrics.bleu", "sacrebleu", "pip install sacrebleu") from e
    references = _references("bleu", targets, predictions)
    # As sacrebleu takes them: the first ones of all texts, the second ones, and None where a text
    # has no more.
    streams = list(itertools.zip_longest(*references))
    return {"bleu": sacrebleu.corpus_bleu(list(predictions), streams, **options).score}


def rouge(
    targets: Targets,
    predictions: Sequence[str],
    kinds: Sequence[str] = ("rouge1", "rouge2", "rougeLsum"),
    use_stemmer: bool = False,
) -> dict[str, float]:
    """Returns the mean F-measures of ROUGE, as rouge-score computes them.

    Lin, "ROUGE: a package for automatic evaluation of summaries" (2004).

    >>> metrics.rouge(["the cat sat"], ["the cat"], kinds=["rouge1"])  # doctest: +SKIP
    {'rouge1': 80.0}

    Args:
      targets: for each prediction a text, or a list of them, of which the best one counts.
      predictions: texts. For "rougeLsum", each sentence is a line.
      kinds: names of rouge-score: "rouge1" to "rouge9", "rougeL", "rougeLsum".
      use_stemmer: whether English endings do not count.

    Raises:
      ImportError: rouge-score is not installed.
      ValueError: there are no texts, or not a prediction for each target.
    """
    try:
        from rouge_score import rouge_scorer
    except ImportError as e:
        raise missing_package("metrics.rouge", "rouge-score", "pip install rouge-score") from e
    references = _references("rouge", targets, predictions)
    scorer = rouge_scorer.RougeScorer(list(kinds), use_stemmer=use_stemmer)
    scores = [scorer.score_multi(known, text) for known, text in zip(references, predictions)]
    return {kind: _percent([score[kind].fmeasure for score in scores]) for kind in kinds}


def exact_match(
    targets: Sequence[Any], predictions: Sequence[Any], normalize: bool = False
) -> dict[str, float]:
    """Returns the percentage of predictions that are equal to a target, from 0 to 100.

    `LanguageModel.exact_match` of `mtf.models` returns a fraction from 0 to 1 instead.

    >>> metrics.exact_match(["Paris", ["4", "four"]], ["the Paris", "four"])
    {'exact_match': 50.0}
    >>> metrics.exact_match(["Paris", ["4", "four"]], ["the Paris", "four"], normalize=True)
    {'exact_match': 100.0}

    Args:
      targets: for each prediction a text or another value, or a list of them.
      predictions: texts, or other values.
      normalize: whether case, punctuation, the articles a, an and the, and white space do not
        count, as in SQuAD (Rajpurkar et al., 2016).

    Raises:
      ValueError: there are no texts, or not a prediction for each target.
    """

    def same(target: Any, prediction: Any) -> float:
        return float(target == prediction)

    return {"exact_match": _best("exact_match", same, targets, predictions, normalize)}


def f1(targets: Targets, predictions: Sequence[str], normalize: bool = False) -> dict[str, float]:
    """Returns the mean F1 of the words that a prediction and a target share.

    >>> metrics.f1(["the cat sat"], ["the cat"])
    {'f1': 80.0}

    Args:
      targets: for each prediction a text, or a list of them, of which the best one counts.
      predictions: texts, of words with white space between.
      normalize: as for `exact_match`.

    Raises:
      ValueError: there are no texts, or not a prediction for each target.
    """

    def shared(target: str, prediction: str) -> float:
        expected, predicted = target.split(), prediction.split()
        if not expected and not predicted:
            return 1.0
        same = collections.Counter(expected) & collections.Counter(predicted)
        # 2 * precision * recall / (precision + recall)
        return 2 * same.total() / (len(expected) + len(predicted))

    return {"f1": _best("f1", shared, targets, predictions, normalize)}


def _best(
    what: str,
    score: Callable[[Any, Any], float],
    targets: Sequence[Any],
    predictions: Sequence[Any],
    normalize: bool,
) -> float:
    """Returns the mean of the best scores, as a percentage."""
    normalize_text = _normalized if normalize else lambda text: text
    references = _references(what, targets, predictions)
    return _percent(
        [
            max(score(normalize_text(target), normalize_text(prediction)) for target in known)
            for known, prediction in zip(references, predictions)
        ]
    )


def _normalized(text: str) -> str:
    text = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def _percent(shares: Sequence[float]) -> float:
    return 100.0 * sum(shares) / len(shares)


def _references(
    what: str, targets: Sequence[Any], predictions: Sequence[Any]
) -> list[Sequence[Any]]:
    """Returns the list of what is right for each prediction."""
    if len(targets) != len(predictions) or not len(targets):
        raise ValueError(
            f"metrics.{what}: there are {len(targets)} targets and {len(predictions)} predictions; "
            "give one prediction for each target, and at least one"
        )
    references: list[Sequence[Any]] = [t if isinstance(t, (list, tuple)) else [t] for t in targets]
    if not all(references):
        raise ValueError(
            f"metrics.{what}: a target is an empty list, so that nothing would be right. Leave it "
            "out"
        )
    return references

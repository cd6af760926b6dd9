"""Metrics of texts: values worked out by hand, those of the packages themselves, and errors."""

import math
import sys

import pytest

from mesh_tensorflow.transformer import metrics

TARGETS = ["the cat sat on the mat", ["a dog barks", "dogs bark loudly"], "it rains\nit pours"]
TEXTS = ["the cat sat on a mat", "dogs bark", "it pours\nit rains"]


def test_exact_match():
    assert metrics.exact_match(["a", ["b", "c"]], ["a", "c"]) == {"exact_match": 100.0}
    assert metrics.exact_match(["A.", "the b", 3, (1, 4)], ["a", "b", 3, 4]) == {
        "exact_match": 50.0
    }
    assert metrics.exact_match(["A.", "the  b"], ["a", "B"], normalize=True)["exact_match"] == 100
    # An article is a word of its own.
    assert metrics.exact_match(["another"], ["nother"], normalize=True)["exact_match"] == 0


def test_f1():
    # 5 words of 6 and 6 are shared: the second "the" is one more than there are.
    assert metrics.f1([TARGETS[0]], [TEXTS[0]])["f1"] == pytest.approx(100 * 10 / 12)
    # Of "dogs bark loudly": 2 of 3 and 2; of "a dog barks": none.
    assert metrics.f1(TARGETS[:2], TEXTS[:2])["f1"] == pytest.approx((100 * 10 / 12 + 80) / 2)
    assert metrics.f1(["", "a"], ["", ""]) == {"f1": 50.0}
    assert metrics.f1(["the cat"], ["Cat!"], normalize=True) == {"f1": 100.0}


def test_bleu():
    sacrebleu = pytest.importorskip("sacrebleu", reason="sacrebleu is not installed")
    # Of 6, 5, 4 and 3 n-grams 5, 3, 2 and 1 are there; both texts have six words.
    by_hand = 100 * math.prod([5 / 6, 3 / 5, 2 / 4, 1 / 3]) ** (1 / 4)
    assert metrics.bleu([TARGETS[0]], [TEXTS[0]])["bleu"] == pytest.approx(by_hand)
    streams = [[TARGETS[0], "a dog barks", TARGETS[2]], [None, "dogs bark loudly", None]]
    expected = sacrebleu.corpus_bleu(TEXTS, streams, tokenize="char").score
    assert metrics.bleu(TARGETS, TEXTS, tokenize="char") == {"bleu": expected}


def test_rouge():
    rouge_scorer = pytest.importorskip(
        "rouge_score.rouge_scorer", reason="rouge-score is not installed"
    )
    found = metrics.rouge(TARGETS, TEXTS)
    assert list(found) == ["rouge1", "rouge2", "rougeLsum"]
    # Words: 10 / 12; 4 / 5 of the second reference; all of them.
    assert found["rouge1"] == pytest.approx(100 * (10 / 12 + 4 / 5 + 1) / 3)
    # Pairs: 3 of 5 and 5; 1 of 2 and 1; 2 of 3 and 3.
    assert found["rouge2"] == pytest.approx(100 * (3 / 5 + 2 / 3 + 2 / 3) / 3)
    # Lines are matched each for itself.
    scorer = rouge_scorer.RougeScorer(["rougeL", "rougeLsum"], use_stemmer=True)
    again = metrics.rouge(TARGETS[:1], TEXTS[:1], ["rougeL", "rougeLsum"], use_stemmer=True)
    direct = scorer.score(TARGETS[0], TEXTS[0])
    assert again == pytest.approx({n: 100 * direct[n].fmeasure for n in again})


@pytest.mark.parametrize("name, package", [("bleu", "sacrebleu"), ("rouge", "rouge-score")])
def test_without_its_package(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    with pytest.raises(
        ImportError,
        match=f"metrics.{name} needs the package {package}, which is not .* pip install {package}",
    ):
        getattr(metrics, name)(["a"], ["a"])


def test_texts_that_do_not_belong_together():
    with pytest.raises(
        ValueError, match=r"metrics.f1: there are 2 targets and 1 predictions; give one"
    ):
        metrics.f1(["a", "b"], ["a"])
    with pytest.raises(ValueError, match=r"metrics.exact_match: there are 0 targets and 0"):
        metrics.exact_match([], [])
    with pytest.raises(ValueError, match=r"metrics.f1: a target is an empty list, so that nothing"):
        metrics.f1([[]], ["a"])

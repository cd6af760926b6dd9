"""What BERT's programs make of texts and batches: the same as the classic release."""

import json
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.oracle import bert_cases
from helpers.paths import FIXTURES

from mesh_tensorflow.bert import run_classifier, run_squad, tokenization

CLASSIC = json.loads((FIXTURES / "bert_data.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module", autouse=True)
def flags():
    values = tf.flags.FLAGS
    values(["test"])
    kept = values.version_2_with_negative, values.null_score_diff_threshold
    yield values
    values.version_2_with_negative, values.null_score_diff_threshold = kept


def test_tokenization(directory):
    ours = bert_cases.tokenized(directory)
    texts = bert_cases.texts() * 2
    assert len(ours) == len(CLASSIC["tokenization"]) == len(texts) > 500
    for text, found, expected in zip(texts, ours, CLASSIC["tokenization"]):
        assert found == expected, repr(text)


@pytest.mark.parametrize("part", ["classifier", "squad"])
def test_part(directory, part):
    ours = json.loads(json.dumps(bert_cases.PARTS[part](directory)))
    assert set(ours) == set(CLASSIC[part])
    for key, expected in CLASSIC[part].items():
        if key.endswith("/null"):
            assert ours[key] == pytest.approx(expected), key
        elif not key.endswith("best"):
            assert ours[key] == expected, key
    for key in (k for k in CLASSIC[part] if k.endswith("best")):
        assert list(ours[key]) == list(CLASSIC[part][key])
        for question, expected in CLASSIC[part][key].items():
            assert_answers(ours[key][question], expected)


def assert_answers(ours, expected):
    if isinstance(expected, str):
        assert ours == expected
        return
    assert [a["text"] for a in ours] == [a["text"] for a in expected]
    for name in ("probability", "start_logit", "end_logit"):
        assert [a[name] for a in ours] == pytest.approx([a[name] for a in expected])


@pytest.mark.slow
@pytest.mark.parametrize("program", bert_cases.MODES)
def test_model_function(directory, program):
    """Losses, metrics and predictions for the same weights; names and shapes of variables."""
    ours = json.loads(json.dumps(bert_cases.of_model_fn(program, directory)))
    assert set(ours) == set(CLASSIC[program])
    for mode, expected in CLASSIC[program].items():
        if mode.endswith("/variables"):
            assert ours[mode] == expected
            continue
        assert set(ours[mode]) == set(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(ours[mode][name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def test_only_no_answer_among_the_best(directory, flags):
    """Where the classic fails."""
    flags.version_2_with_negative = True
    examples = run_squad.read_squad_examples(bert_cases.squad_file(directory), False)[:1]
    tokenizer = tokenization.FullTokenizer(bert_cases.write_vocab(directory))
    features = []
    run_squad.convert_examples_to_features(examples, tokenizer, 40, 20, 10, False, features.append)
    logits = [9.0] + [0.0] * 39
    paths = [os.path.join(directory, name) for name in ("a", "b", "c")]
    raw = [run_squad.RawResult(f.unique_id, logits, logits) for f in features]
    run_squad.write_predictions(examples, features, raw, 1, 5, True, *paths)
    with open(paths[0]) as f:
        assert json.load(f) == {"q0": ""}
    with pytest.raises(ValueError, match="1 of 1 features have no result"):
        run_squad.write_predictions(examples, features, [], 1, 5, True, *paths)


@pytest.mark.parametrize(
    "first, second, length, expected",
    [
        ("the cat", " \u200b ", 6, [[2, 4, 5, 3, 0, 0], [1, 1, 1, 1, 0, 0], [0] * 6]),
        ("the cat", " ", 4, [[2, 4, 5, 3], [1] * 4, [0] * 4]),
        ("the cat", "cat the", 4, [[2, 4, 3, 0], [1, 1, 1, 0], [0] * 4]),
        (" ", "cat", 5, [[2, 3, 5, 3, 0], [1, 1, 1, 1, 0], [0, 0, 1, 1, 0]]),
    ],
    ids=["blank", "blank_and_full", "truncated_away", "blank_first"],
)
def test_a_text_without_tokens(tmp_path, first, second, length, expected):
    """The numbers are the classic's: only a second text with tokens has a [SEP] and segment 1."""
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\ncat\n")
    example = run_classifier.InputExample("e", first, second, "0")
    found = run_classifier.convert_single_example(
        0, example, ["0"], length, tokenization.FullTokenizer(str(path))
    )
    assert [found.input_ids, found.input_mask, found.segment_ids] == expected


def test_a_vocabulary_in_another_encoding(directory, tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_bytes("[UNK]\ncaf\u00e9\n".encode("latin1"))
    with pytest.raises(
        ValueError,
        match=rf"line 2 of {path} is not in UTF-8 .* at byte 3: "
        r"b'caf.xe9'\), so its token would not be found",
    ):
        tokenization.load_vocab(str(path))
    path.write_bytes("[UNK]\ncaf\u00e9\n".encode())
    assert tokenization.load_vocab(str(path)) == {"[UNK]": 0, "caf\u00e9": 1}


@pytest.mark.parametrize(
    "line, message",
    [
        (
            "1\t2\t3\tcaf\u00e9\tx".encode("latin1"),
            r"line 2 of .*train.tsv is not in UTF-8 .*iconv",
        ),
        (
            b"1\t2\t3\t" + b"w " * 100_000 + b"\tx",
            r"line 2 of .*train.tsv cannot be read: field larger",
        ),
        (b"1\t2", r"line 2 of .*train.tsv has 2 columns, \['1', '2'\], and cannot be read"),
    ],
)
def test_tables_that_cannot_be_read(tmp_path, line, message):
    (tmp_path / "train.tsv").write_bytes(b"Quality\tid\tid\ts1\ts2\n" + line)
    with pytest.raises(ValueError, match=message):
        run_classifier.MrpcProcessor().get_train_examples(str(tmp_path))

"""Vocabularies: round trips, the same in Python and in TensorFlow, and their files."""

import sys
import types

import hypothesis
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from hypothesis import strategies as st

from mesh_tensorflow.transformer import t2t_vocabulary, vocabulary

TEXTS = ["", "hello world", "fünf Äpfel 🍏", "a\tb\nc", "\0x"]


def decoded(tensor):
    return np.vectorize(lambda b: b.decode("utf-8"), otypes=[object])(tensor.numpy())


def test_bytes():
    words = vocabulary.ByteVocabulary()
    assert words.vocab_size == 259
    assert vocabulary.ByteVocabulary(extra_ids=100).vocab_size == 359
    assert words.encode("aé") == [ord("a") + 3, 0xC3 + 3, 0xA9 + 3]
    assert words.encode(b"\xff") == [258]
    assert words.decode([0, 2, 100, 259, 1000, -5, 101, 1, 102]) == "ab"
    assert words.decode(np.array([258, 100])) == "a", "what is not UTF-8 is left out"
    with pytest.raises(ValueError, match="extra_ids -1"):
        vocabulary.ByteVocabulary(extra_ids=-1)


@pytest.mark.slow
@hypothesis.given(st.text(max_size=20))
def test_bytes_round_trip(text):
    words = vocabulary.ByteVocabulary()
    assert words.decode(words.encode(text)) == text
    ids = words.encode_tf(tf.constant(text.encode()))
    assert ids.numpy().tolist() == words.encode(text)
    assert words.decode_tf(ids).numpy().decode() == text


@hypothesis.given(st.lists(st.lists(st.integers(-3, 265), min_size=3, max_size=3), max_size=4))
def test_bytes_decode_alike(ids):
    words = vocabulary.ByteVocabulary()
    expected = [words.decode(row) for row in ids]
    assert decoded(words.decode_tf(np.array(ids, np.int64).reshape([-1, 3]))).tolist() == expected


def test_bytes_in_a_session():
    words = vocabulary.ByteVocabulary()
    with tf.Graph().as_default(), tf.Session() as sess:
        text = tf.placeholder(tf.string, [])
        ids = words.encode_tf(text)
        back = words.decode_tf(tf.concat([ids, [1, 100]], 0)[tf.newaxis])
        assert sess.run(back, {text: "fünf"}).tolist() == ["fünf".encode()]


class Letters(vocabulary.Vocabulary):
    """Code points, their ids from 2 on; encode_tf and decode_tf are those of the base."""

    vocab_size = 1000

    def encode(self, s):
        return [ord(c) + 2 for c in s]

    def decode(self, ids):
        return "".join(chr(i - 2) for i in ids if i > 1)


def test_operations_of_the_base():
    words = Letters()
    dataset = tf.data.Dataset.from_tensor_slices(["abé", ""]).map(words.encode_tf)
    assert dataset.element_spec == tf.TensorSpec([None], tf.int32)
    assert [ids.tolist() for ids in dataset.as_numpy_iterator()] == [words.encode("abé"), []]
    ids = tf.constant([[[99, 100], [1, 0]]], tf.int64)
    texts = words.decode_tf(ids)
    assert texts.shape.as_list() == [1, 2] and decoded(texts).tolist() == [["ab", ""]]
    assert decoded(words.decode_tf(tf.zeros([2, 0], tf.int32))).tolist() == ["", ""]
    assert words.decode_tf(tf.constant([99])).numpy() == b"a"


def test_the_base_defines_nothing():
    base = vocabulary.Vocabulary()
    for call in (lambda: base.vocab_size, lambda: base.encode("a"), lambda: base.decode([1])):
        with pytest.raises(NotImplementedError, match="Vocabulary must define"):
            call()


def test_pairs():
    pair = ("first", "second")
    names = ["inputs", "inputs_pretokenized", "targets", "other"]
    assert [vocabulary.vocabulary_of_feature(pair, n) for n in names] == ["first"] * 2 + [
        "second"
    ] * 2
    assert vocabulary.vocabulary_of_feature("one", "inputs") == "one"
    with pytest.raises(ValueError, match="one for targets are needed, got 3"):
        vocabulary.vocabulary_of_feature((1, 2, 3), "inputs")


# SentencePiece.


def trained(folder, **kwargs):
    sentencepiece = pytest.importorskip("sentencepiece", reason="the extra [transformer]")
    (folder / "text.txt").write_text(
        "\n".join(["the cat sat on the mat", "a dog ate the log"] * 20)
    )
    settings = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, **kwargs}
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "words"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    return str(folder / "words.model")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("sentencepiece"))


def test_sentencepiece(model):
    words = vocabulary.SentencePieceVocabulary(model)
    ids = words.encode("the cat ate")
    assert ids and 0 not in ids and 1 not in ids and max(ids) < words.vocab_size
    assert words.decode([*ids, 1, 5, 5]) == "the cat ate"
    assert words.encode("") == [] and words.decode([]) == ""
    assert words.encode(b"cat \xff") == words.encode("cat \ufffd")
    assert words.decode([10**6]) == words.decode([2])
    assert words.decode([-1]) == words.decode([2])
    assert words.encode_tf(tf.constant("the cat")).numpy().tolist() == words.encode("the cat")
    assert (
        decoded(words.decode_tf(tf.constant([[*ids, 1], [*ids, 0]]))).tolist()
        == ["the cat ate"] * 2
    )


def test_sentencepiece_extra_ids(model):
    plain = vocabulary.SentencePieceVocabulary(model)
    words = vocabulary.SentencePieceVocabulary(model, extra_ids=100)
    assert words.vocab_size == plain.vocab_size + 100
    last = words.vocab_size - 1
    ids = words.encode("the <extra_id_0> sat<extra_id_99> on")
    assert ids == [*plain.encode("the"), last, *plain.encode("sat"), last - 99, *plain.encode("on")]
    assert words.decode(ids) == "the <extra_id_0> sat <extra_id_99> on"
    assert last - 99 == plain.vocab_size
    assert last not in words.encode("<extra_id_100>"), "there is no such id"


def test_sentencepiece_errors(model, tmp_path, monkeypatch):
    other = trained(tmp_path, pad_id=-1, eos_id=2, unk_id=0, bos_id=1)
    with pytest.raises(ValueError, match=r"id -1 for padding and 2 for EOS.*train with pad_id=0"):
        vocabulary.SentencePieceVocabulary(other)
    with pytest.raises(ValueError, match="extra_ids -2"):
        vocabulary.SentencePieceVocabulary(model, extra_ids=-2)
    with pytest.raises(tf.errors.NotFoundError):
        vocabulary.SentencePieceVocabulary(str(tmp_path / "nix"))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"sentencepiece, which is not installed: pip install"):
        vocabulary.SentencePieceVocabulary(model)


# TensorFlow Datasets and Tensor2Tensor, of which there are stand-ins.


class Encoder:
    """A text encoder: code points."""

    vocab_size = 200

    def __init__(self, *args):
        self.args = args

    def encode(self, s):
        return [ord(c) for c in s]

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_tfds(monkeypatch):
    words = vocabulary.TFDSVocabulary(Encoder())
    assert words.vocab_size == 201
    assert words.encode("ab") == [98, 99]
    assert words.decode([98, 99, 1, 0]) == "ab"

    module = types.ModuleType("tensorflow_datasets")
    info = types.SimpleNamespace(
        supervised_keys=("x", "y"),
        features={"x": None, "y": types.SimpleNamespace(encoder=Encoder())},
    )
    module.builder = lambda name, data_dir: types.SimpleNamespace(info=info, data_dir=data_dir)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    assert vocabulary.get_tfds_vocabulary("name").encode("a") == [98]
    info.features["y"] = types.SimpleNamespace(encoder=None)
    with pytest.raises(
        ValueError, match=r"feature 'y' of data set 'name' has no encoder.* not in 'dir'"
    ):
        vocabulary.get_tfds_vocabulary("name", "dir")
    info.supervised_keys = None
    with pytest.raises(ValueError, match="names no pair of inputs and targets"):
        vocabulary.get_tfds_vocabulary("name")


def test_t2t(monkeypatch):
    for name in ("tensor2tensor", "tensor2tensor.data_generators"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    encoders = types.ModuleType("text_encoder")
    encoders.SubwordTextEncoder = Encoder
    sys.modules["tensor2tensor.data_generators"].text_encoder = encoders
    words = t2t_vocabulary.get_t2t_vocabulary("folder", "file")
    assert words._encoder.args == ("folder/file",)
    assert words.vocab_size == 200 and words.encode("ab") == [97, 98]
    assert words.decode(np.array([97, 98, 1, 0])) == "ab"
    assert words.encode_tf(tf.constant("ab")).numpy().tolist() == [97, 98]


def test_without_tensor2tensor(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensor2tensor", None)
    with pytest.raises(
        ImportError, match=r"tensor2tensor, which is not installed: pip .* --no-deps"
    ):
        t2t_vocabulary.T2tVocabulary("file")

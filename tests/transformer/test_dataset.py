"""Packing, padding and encoding of data sets: properties, the classic's results, errors."""

import json
import os

import hypothesis
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer.data_rows import Small, rows, strings
from hypothesis import strategies as st

from mesh_tensorflow.transformer import dataset as data
from mesh_tensorflow.transformer import vocabulary

FIXTURE = os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "..", "oracle", "fixtures", "dataset.json"
)
with open(FIXTURE, encoding="utf-8") as f:
    CASES = json.load(f)


def from_examples(examples, dtype=tf.int64):
    keys = list(examples[0])
    return tf.data.Dataset.from_generator(
        lambda: ({k: np.array(e[k], dtype.as_numpy_dtype) for k in keys} for e in examples),
        dict.fromkeys(keys, dtype),
        {k: [None] for k in keys},
    )


def rows_in_session(make):
    with tf.Graph().as_default(), tf.Session() as sess:
        iterator = tf.data.make_initializable_iterator(make())
        sess.run(iterator.initializer)
        element, found = iterator.get_next(), []
        while True:
            try:
                found.append({k: v.tolist() for k, v in sess.run(element).items()})
            except tf.errors.OutOfRangeError:
                return found


def write_records(path, examples):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for example in examples:
            feature = {
                k: tf.train.Feature(int64_list=tf.train.Int64List(value=v))
                for k, v in example.items()
            }
            message = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(message.SerializeToString())


# The classic.


def dataset_of_case(case, folder):
    fn, kwargs = getattr(data, case["fn"]), case["kwargs"]
    if "examples" in case:
        return fn(from_examples(case["examples"]), **kwargs)
    if "lines" in case:
        lines = tf.data.Dataset.from_tensor_slices(case["lines"])
        words = vocabulary.ByteVocabulary()
        if case["fn"] == "packed_parallel_tsv_dataset":
            return fn(lines, "train", None, vocabulary=words, **kwargs)
        return fn(lines.map(lambda s: {"inputs": s, "targets": s}), words, **kwargs)
    write_records(folder / "records", case["records"])
    return fn([str(folder / "records")], **kwargs)


@pytest.mark.slow_but(1)
@pytest.mark.slow(
    "pack_dataset[12]*",
    "pack_dataset[34]*",
    "pack_or_pad1[01]*",
    "pack_or_pad[3-9]*",
    "packed_parallel_tsv_dataset[1-9]*",
    "pretokenized_tfrecord_dataset[0-3]*",
    "trim_and_pad_dataset[3-7]*",
)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c["fn"])
def test_equals_the_classic(case, tmp_path):
    assert rows(dataset_of_case(case, tmp_path)) == case["result"]


def test_equals_the_classic_in_a_session(tmp_path):
    case = next(c for c in CASES if c["fn"] == "pack_or_pad" and c["kwargs"]["pack"])
    assert rows_in_session(lambda: dataset_of_case(case, tmp_path)) == case["result"]


# Packing.

SEQUENCES = st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=1, max_size=25)


def stripped(ids):
    ids = list(ids)
    while ids and ids[-1] == 0:
        ids.pop()
    return ids


def unpacked(packed, keys):
    """Yields the examples of packed rows."""
    for row in packed:
        for number in range(1, 1 + max(max(row[f"{k}_segmentation"]) for k in keys)):
            example = {}
            for k in keys:
                segments = np.array(row[f"{k}_segmentation"])
                at = np.flatnonzero(segments == number)
                begin, end = (at[0], at[-1] + 1) if at.size else (0, 0)
                # Zeros before a sequence's first token belong to it; its positions tell.
                begin -= row[f"{k}_position"][begin] if at.size else 0
                example[k] = row[k][begin:end]
                assert row[f"{k}_position"][begin:end] == list(range(end - begin))
                assert set(segments[begin:end]) <= {0, number}
            yield example


@pytest.mark.slow
@hypothesis.given(SEQUENCES, SEQUENCES, st.integers(1, 12), st.integers(1, 12))
@hypothesis.settings(max_examples=7)
def test_packing_keeps_every_token_once(inputs, targets, inputs_length, targets_length):
    examples = [{"inputs": i, "targets": t} for i, t in zip(inputs, targets)]
    lengths = {"inputs": inputs_length, "targets": targets_length}
    packed = rows(data.pack_dataset(from_examples(examples), lengths))
    cut = [{k: stripped(e[k][: lengths[k]]) for k in lengths} for e in examples]
    cut = [e for e in cut if any(e.values())]
    assert list(unpacked(packed, ["inputs", "targets"])) == cut
    for row in packed:
        assert any(map(any, (row["inputs"], row["targets"])))
        for k, length in lengths.items():
            assert {len(row[k]), len(row[f"{k}_segmentation"]), len(row[f"{k}_position"])} == {
                length
            }
            assert [s > 0 for s in row[f"{k}_segmentation"]] == [i != 0 for i in row[k]]


def test_rows_are_full_up_to_the_next_example():
    """No example would have fitted into the row before it, within a batch of `length`."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 20)
    packed = rows(data.pack_dataset(from_examples([{"t": [7] * n} for n in sizes]), 20))
    firsts = [row["t_segmentation"].count(1) for row in packed]
    used = [sum(1 for s in row["t_segmentation"] if s) for row in packed]
    assert sum(used) == sizes.sum()
    for before, first in zip(used[:-1], firsts[1:]):
        assert before + first > 20


def test_packing_numbers_the_segments_of_all_features_alike():
    """A sequence without tokens counts, so that inputs and targets of one example agree."""
    examples = [{"i": [], "t": [7]}, {"i": [4], "t": [8]}, {"i": [], "t": []}, {"i": [5], "t": []}]
    (row,) = rows(data.pack_dataset(from_examples(examples), 4))
    assert row["i"] == [4, 5, 0, 0] and row["i_segmentation"] == [2, 3, 0, 0]
    assert row["t"] == [7, 8, 0, 0] and row["t_segmentation"] == [1, 2, 0, 0]


def test_packing_drops_examples_of_padding_alone():
    examples = [{"t": [0, 0]}, {"t": []}, {"t": [3, 3]}, {"t": [0]}, {"t": []}, {"t": [0, 0, 0]}]
    (row,) = rows(data.pack_dataset(from_examples(examples), 3))
    assert row["t"] == [3, 3, 0] and row["t_segmentation"] == [1, 1, 0]
    assert rows(data.pack_dataset(from_examples(examples[:2]), 3)) == []


def test_packing_has_static_shapes_and_one_way(tmp_path):
    dataset = from_examples([{"t": [1, 2], "other": [3]}], tf.int32)
    packed = data.pack_dataset(dataset, 4, keys="t", use_custom_ops=True)
    assert {k: (s.shape.as_list(), s.dtype) for k, s in packed.element_spec.items()} == {
        k: ([4], tf.int32) for k in ("t", "t_segmentation", "t_position")
    }
    assert rows(packed) == rows(data.pack_dataset(dataset, 4, keys=["t"]))


def test_packing_of_data_without_end():
    dataset = from_examples([{"t": [5, 1]}, {"t": [6, 6, 1]}]).repeat()
    first = rows(data.pack_dataset(dataset, 5).take(3))
    assert [row["t"] for row in first] == [[5, 1, 6, 6, 1]] * 2 + [[5, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    "call, words",
    [
        (
            lambda d: data.pack_dataset(d, 4, keys=["nix"]),
            "pack_dataset: the data set has no feature 'nix'; it has 't', 'text'",
        ),
        (
            lambda d: data.pack_dataset(d, 4),
            r"pack_dataset: feature 'text' \(\) string is not a one-dimensional sequence of integers",
        ),
        (
            lambda d: data.pack_dataset(d, {"u": 4}, keys=["t"]),
            "pack_dataset: no length for feature 't' in {'u': 4}",
        ),
        (
            lambda d: data.pack_dataset(d, 0, keys=["t"]),
            "length of 't' must be a positive integer, not 0",
        ),
        (lambda d: data.pack_dataset(d, "8", keys=["t"]), "must be a positive integer, not '8'"),
        (lambda d: data.pack_or_pad(d, {"t": 2.5}, feature_keys="t"), "positive integer, not 2.5"),
        (
            lambda d: data.trim_and_pad_dataset(d, 4),
            r"trim_and_pad_dataset: feature 'text' \(\) string",
        ),
        (lambda d: data.trim_and_pad_dataset(d, 4, ["nix"]), "has no feature 'nix'"),
        (
            lambda d: data.ensure_dataset_eos(d, ["text"]),
            r"ensure_dataset_eos: feature 'text' \(\)",
        ),
        (
            lambda d: data.encode_dataset(d, vocabulary.ByteVocabulary()),
            r"encode_dataset: feature 't' \(2,\) int64 is not a single string",
        ),
        (
            lambda d: data.encode_all_features(d.map(lambda e: {"t": e["t"]}), None),
            r"encode_all_features: no feature is a string; the data set has t \(2,\) int64",
        ),
        (
            lambda d: data.encode_all_features(d.batch(2), None),
            r"encode_all_features: feature 'text' \(None,\) string is not a single string",
        ),
        (
            lambda d: data.pack_dataset(d.map(lambda e: e["t"]), 4),
            "must be dictionaries of features",
        ),
        (lambda d: data.supervised_to_dict(d, True), "must be pairs of inputs and targets"),
    ],
)
def test_errors(call, words):
    dataset = strings(t=np.array([[1, 2]]), text=["a"])
    with pytest.raises(ValueError, match=words):
        call(dataset)


# Fixed lengths and EOS.


def test_trimming_keeps_further_dimensions_and_other_features():
    dataset = strings(t=np.arange(1.0, 7).reshape([1, 3, 2]), words=[["a", "b"]], n=[5])
    (row,) = rows(data.trim_and_pad_dataset(dataset, {"t": 2, "words": 3}, ["t", "words"]))
    assert row == {"t": [[1, 2], [3, 4]], "words": [b"a", b"b", b""], "n": 5}


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(("ensure_eos", "ended"), [
    (["targets"], {"targets"}), ("inputs", {"inputs"}), ({"targets", "others"}, {"targets"}),
    (True, {"inputs", "targets"}), ([], set()),
])  # fmt: skip
def test_eos_in_named_features_alone(pack, ensure_eos, ended):
    """As those have whose vocabulary adds EOS."""
    examples = from_examples([{"inputs": [5, 6, 7, 1], "targets": [8, 9, 10, 1]}])
    [found] = rows(data.pack_or_pad(examples, 3, pack, ensure_eos=ensure_eos))
    for key, last in (("inputs", 7), ("targets", 10)):
        assert found[key][-1] == (1 if key in ended else last)


def test_eos_leaves_strings_alone():
    dataset = strings(t=[[4, 5]], words=[["a", "b"]], n=[5])
    (row,) = rows(data.ensure_dataset_eos(dataset))
    assert row == {"t": [4, 1], "words": [b"a", b"b"], "n": 5}


def test_zeroed_examples_follow_without_end():
    dataset = strings(t=[[4, 5], [6, 7]], text=["a", "b"])
    found = rows(data.pad_dataset_with_zeroed_out_examples(dataset).take(4))
    assert [r["t"] for r in found] == [[4, 5], [6, 7], [0, 0], [0, 0]]
    assert [r["text"] for r in found] == [b"a", b"b", b"", b""]
    again = rows_in_session(
        lambda: data.pad_dataset_with_zeroed_out_examples(strings(t=[[4, 5]])).take(3)
    )
    assert [r["t"] for r in again] == [[4, 5], [0, 0], [0, 0]]


def test_supervised_to_dict():
    pairs = tf.data.Dataset.from_tensor_slices(([1, 2], [3, 4]))
    assert rows(data.supervised_to_dict(pairs, False)) == [
        {"inputs": 1, "targets": 3},
        {"inputs": 2, "targets": 4},
    ]
    assert rows(data.supervised_to_dict(pairs, True)) == [{"targets": 3}, {"targets": 4}]


def test_eval_dataset_is_a_named_tuple():
    entry = data.EvalDataset("name", len, str, [max])
    assert entry == ("name", len, str, [max])
    assert entry._fields == ("name", "dataset_fn", "postprocess_fn", "metric_fns")


# Encoding.


class Shifted(vocabulary.ByteVocabulary):
    """Bytes, each one higher."""

    def encode_tf(self, s):
        return super().encode_tf(s) + 1


@pytest.mark.slow
def test_pairs_of_vocabularies():
    pair = (vocabulary.ByteVocabulary(), Shifted())
    a = ord("a") + 3
    texts = strings(inputs=["a"], targets=["a"])
    assert rows(data.encode_dataset(texts, pair)) == [{"inputs": [a], "targets": [a + 1]}]
    assert rows(data.encode_all_features(texts, pair)) == [
        {"inputs": [a, 1], "targets": [a + 1, 1]}
    ]
    lines = tf.data.Dataset.from_tensor_slices(["a\ta"])
    (row,) = rows(data.packed_parallel_tsv_dataset(lines, "train", None, 3, pair))
    assert row["inputs"] == [a, 1, 0] and row["targets"] == [a + 1, 1, 0]


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("line", ["a", "a\tb\tc", ""])
def test_lines_without_two_columns(line):
    lines = tf.data.Dataset.from_tensor_slices([line])
    dataset = data.packed_parallel_tsv_dataset(lines, "train", None, 8, vocabulary.ByteVocabulary())
    with pytest.raises(tf.errors.InvalidArgumentError, match="must have 2 columns"):
        rows(dataset)


# Files of text.


@pytest.fixture
def text_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    (tmp_path / "b.txt").write_text("x\ny\n")
    return tmp_path


def lines_of(dataset):
    return [line.decode() for line in dataset.as_numpy_iterator()]


def test_text_lines(text_files):
    glob = str(text_files / "*.txt")
    in_order = ["one", "two", "", "three", "x", "y"]
    assert lines_of(data.simple_text_line_dataset(glob, shuffle_buffer_size=1)) == in_order
    assert sorted(lines_of(data.simple_text_line_dataset(glob))) == sorted(in_order)
    again = lines_of(data.make_text_line_dataset([str(text_files / "b.txt")]).take(40))
    assert sorted(again) == ["x"] * 20 + ["y"] * 20


def test_mixture_of_text_lines(text_files):
    tf.random.set_random_seed(0)
    mixture = data.sample_from_text_line_datasets(
        [(str(text_files / "a.txt"), 1), (str(text_files / "b.txt"), 3.0)], shuffle_buffer_size=4
    )
    found = lines_of(mixture.take(600))
    share = sum(line in ("x", "y") for line in found) / 600
    assert 0.65 < share < 0.85
    assert set(found) == {"one", "two", "", "three", "x", "y"}


def test_errors_of_text_lines(text_files):
    for call in (data.simple_text_line_dataset, data.make_text_line_dataset):
        with pytest.raises(ValueError, match=f"{call.__name__}: no file matches '.*nix"):
            call(str(text_files / "nix*"))
    with pytest.raises(ValueError, match="is empty"):
        data.sample_from_text_line_datasets([])
    with pytest.raises(ValueError, match="weights must be positive"):
        data.sample_from_text_line_datasets([(str(text_files / "*"), 0)])


# Records.


@pytest.mark.slow
def test_t2t_records(tmp_path):
    write_records(tmp_path / "name-train-00000-of-00002", [{"inputs": [5, 1], "targets": [6, 1]}])
    write_records(tmp_path / "name-train-00001-of-00002", [{"inputs": [7, 1], "targets": [8, 1]}])
    write_records(tmp_path / "name-dev-00000-of-00001", [{"inputs": [9, 1], "targets": [10, 1]}])
    kwargs = {"data_dir": str(tmp_path), "sequence_length": 2}
    train = rows(data.pretokenized_t2t_dataset("name", **kwargs).take(40))
    # Read again and again, shuffled: each example as often as the other, but for the last round.
    assert abs(sum(r["inputs"] == [5, 1] for r in train) - 20) < 15
    dev = rows(data.pretokenized_t2t_dataset("name", dataset_split="dev", **kwargs))
    assert [(r["inputs"], r["targets"]) for r in dev] == [([9, 1], [10, 1])]
    alone = rows(
        data.pretokenized_t2t_dataset("name", text2self=True, dataset_split="dev", **kwargs)
    )
    assert "inputs" not in alone[0]
    with pytest.raises(
        ValueError, match=r"pretokenized_t2t_dataset: no file matches .*name-nix-\*"
    ):
        data.pretokenized_t2t_dataset("name", dataset_split="nix", **kwargs)


@pytest.mark.slow
def test_ids_beyond_the_vocabulary(tmp_path):
    write_records(tmp_path / "name-dev-0", [{"inputs": [9, 1], "targets": [10, 1]}])

    def dataset(vocabulary):
        return data.pretokenized_t2t_dataset(
            "name",
            data_dir=str(tmp_path),
            dataset_split="dev",
            sequence_length=4,
            vocabulary=vocabulary,
        )

    with pytest.raises(
        tf.errors.InvalidArgumentError, match="feature targets has an id that is not in the voc"
    ):
        rows(dataset(Small()))
    with pytest.raises(tf.errors.InvalidArgumentError, match="vocabulary of 10 ids"):
        rows(dataset((vocabulary.ByteVocabulary(), Small())))
    assert rows(dataset((Small(), vocabulary.ByteVocabulary())))[0]["targets"] == [10, 1, 0, 0]


# -- records that are not what is read


def read_records(path, text2self=True, **arguments):
    def make():
        return data.pretokenized_tfrecord_dataset(
            [str(path)], text2self, True, False, None, 4, **arguments
        )

    return rows_in_session(make)


@pytest.mark.slow
@pytest.mark.parametrize(("value", "shift"), [(2**40, 0), (-(2**31) - 1, 0), (2**31 - 1, 5)])
def test_ids_that_are_no_int32(value, shift, tmp_path):
    """They would become other ids, such as 0, the padding."""
    path = tmp_path / "ids[1].tfrecord"
    write_records(path, [{"targets": [3, 1]}, {"targets": [7, value, 1]}])
    with pytest.raises(tf.errors.InvalidArgumentError) as e:
        read_records(path, vocab_shift=shift)
    assert "feature targets has an id that is no int32" in str(e.value)
    assert str(value + shift) in str(e.value) and "ids[1].tfrecord" in str(e.value)
    examples = [{"a": [1, value + shift]}]
    with pytest.raises(tf.errors.InvalidArgumentError, match="pack_dataset: feature a has an id"):
        rows_in_session(lambda: data.pack_dataset(from_examples(examples), 4))


@pytest.mark.slow
def test_records_without_targets(tmp_path):
    path = tmp_path / "r.tfrecord"
    write_records(path, [{"target": [3, 1], "inputs": [2]}])
    for text2self in (True, False):
        with pytest.raises(
            ValueError, match=r"r\.tfrecord: its records have no feature 'targets'"
        ) as e:
            read_records(path, text2self)
        assert "they have inputs (int64_list), target (int64_list)" in str(e.value)
    with tf.io.TFRecordWriter(str(path)) as writer:
        text = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"a text"]))
        example = tf.train.Example(features=tf.train.Features(feature={"targets": text}))
        writer.write(example.SerializeToString())
    with pytest.raises(
        ValueError, match=r"no feature 'targets' of ids \(int64_list\); they have ta"
    ):
        read_records(path)
    write_records(path, [{"inputs": [3, 1]}, {"targets": [5, 1]}, {"targets": []}])
    assert [row["targets"] for row in read_records(path)] == [[5, 1, 0, 0]]
    with pytest.raises(tf.errors.NotFoundError):
        read_records(tmp_path / "none")

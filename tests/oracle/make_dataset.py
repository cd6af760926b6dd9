"""Writes what the classic release's data sets give for some examples, to fixtures/dataset.json.

Run with the oracle's Python (see README.md):  python -m oracle.make_dataset

The file has the examples too: `tests/transformer/test_dataset.py` reads both.  Left out is where
this package means to differ: zeros within a sequence (the classic loses the tokens after them),
and sequences without tokens beside others (the classic then numbers the segments of inputs and
targets differently, and makes rows of nothing).
"""

import json
import os
import random
import sys
import tempfile
from unittest import mock

import classic_shim  # noqa: F401  (first: makes the classic importable)
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.ERROR)
sys.modules["tensorflow_datasets"] = mock.MagicMock()

from mesh_tensorflow.transformer import dataset as classic  # noqa: E402
from mesh_tensorflow.transformer import vocabulary  # noqa: E402

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures", "dataset.json")


class Bytes(vocabulary.Vocabulary):
    """Bytes, their ids from 3 on."""

    vocab_size = 259

    def encode(self, s):
        raise NotImplementedError

    def decode(self, ids):
        raise NotImplementedError

    def encode_tf(self, s):
        return tf.cast(tf.decode_raw(s, tf.uint8), tf.int32) + 3


def from_examples(examples):
    keys = list(examples[0])
    return tf.data.Dataset.from_generator(
        lambda: ({k: np.array(e[k], np.int64) for k in keys} for e in examples),
        dict.fromkeys(keys, tf.int64),
        {k: [None] for k in keys},
    )


def write_records(path, examples):
    with tf.python_io.TFRecordWriter(path) as writer:
        for example in examples:
            feature = {
                k: tf.train.Feature(int64_list=tf.train.Int64List(value=v))
                for k, v in example.items()
            }
            message = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(message.SerializeToString())


def elements(make):
    """Returns all elements of a data set, as lists."""
    with tf.Graph().as_default(), tf.Session() as sess, tempfile.TemporaryDirectory() as folder:
        iterator = tf.data.make_initializable_iterator(make(folder))
        sess.run(iterator.initializer)
        element, found = iterator.get_next(), []
        while True:
            try:
                values = sess.run(element)
            except tf.errors.OutOfRangeError:
                return found
            found.append({k: v.tolist() for k, v in values.items()})


def result(case):
    """Returns what the classic makes of a case."""
    fn, kwargs = getattr(classic, case["fn"]), case["kwargs"]

    def make(folder):
        if "examples" in case:
            return fn(from_examples(case["examples"]), **kwargs)
        if "lines" in case:
            lines = tf.data.Dataset.from_tensor_slices(case["lines"])
            if case["fn"] == "packed_parallel_tsv_dataset":
                return fn(lines, "train", None, vocabulary=Bytes(), **kwargs)
            return fn(lines.map(lambda s: {"inputs": s, "targets": s}), Bytes(), **kwargs)
        path = os.path.join(folder, "records")
        write_records(path, case["records"])
        return fn([path], **kwargs)

    return elements(make)


def random_examples(rng, keys, count, longest, padding):
    def sequence():
        ids = [rng.randint(2, 99) for _ in range(rng.randint(0, longest - 1))] + [1]
        return ids + [0] * rng.choice([0, 0, 1, 3] if padding else [0])

    return [{k: sequence() for k in keys} for _ in range(count)]


def random_case(seed):
    rng = random.Random(seed)
    keys = rng.choice([["targets"], ["inputs", "targets"], ["inputs", "targets", "other"]])
    longest = rng.randint(1, 12)
    examples = random_examples(rng, keys, rng.randint(1, 40), longest, rng.random() < 0.5)
    lengths = {k: rng.randint(1, 24) for k in keys}
    length = rng.choice([lengths, rng.randint(1, 24)])
    fn = rng.choice(["pack_dataset", "pack_or_pad", "pack_or_pad", "trim_and_pad_dataset"])
    kwargs = {"length": length}
    if fn == "pack_or_pad":
        kwargs.update(pack=rng.random() < 0.7, ensure_eos=rng.random() < 0.5)
        if rng.random() < 0.3:
            kwargs["feature_keys"] = rng.sample(keys, rng.randint(1, len(keys)))
    if fn == "pack_dataset" and rng.random() < 0.3:
        kwargs["keys"] = rng.sample(keys, rng.randint(1, len(keys)))
    return {"fn": fn, "examples": examples, "kwargs": kwargs}


def other_cases():
    rng = random.Random("others")
    examples = random_examples(rng, ["inputs", "targets"], 12, 6, True)
    examples += [{"inputs": [], "targets": [5]}, {"inputs": [4, 6], "targets": [7, 0]}]
    yield {"fn": "ensure_dataset_eos", "examples": examples, "kwargs": {}}
    yield {"fn": "ensure_dataset_eos", "examples": examples, "kwargs": {"feature_keys": ["inputs"]}}
    yield {
        "fn": "trim_and_pad_dataset",
        "examples": examples,
        "kwargs": {"length": 4, "feature_keys": ["targets"]},
    }
    lines = ["one two\tthree", "vier\tfünf sechs", 'a "b\tc" d', "x\ty", "long long long\tshort"]
    for kwargs in ({}, {"append_eos": False}, {"eos_id": 2}, {"max_encoded_len": 8}):
        yield {
            "fn": "packed_parallel_tsv_dataset",
            "lines": lines,
            "kwargs": {"sequence_length": {"inputs": 16, "targets": 12}, **kwargs},
        }
    for fn in ("encode_dataset", "encode_all_features"):
        yield {"fn": fn, "lines": ["one", "zwölf", "", "a\tb"], "kwargs": {}}
    records = random_examples(rng, ["inputs", "targets"], 12, 6, False)
    for kwargs in (
        {},
        {"text2self": True},
        {"eos_included": False},
        {"vocab_shift": 7},
        {"vocab_shift": 7, "eos_included": False},
    ):
        defaults = {
            "text2self": False,
            "eos_included": True,
            "repeat": False,
            "batch_size": None,
            "sequence_length": {"inputs": 16, "targets": 20},
        }
        yield {
            "fn": "pretokenized_tfrecord_dataset",
            "records": records,
            "kwargs": {**defaults, **kwargs},
        }


def main():
    cases = [random_case(seed) for seed in range(24)] + list(other_cases())
    with open(PATH, "w") as f:
        # A line for each case.
        f.write(
            "[\n"
            + ",\n".join(
                json.dumps({**case, "result": result(case)}, separators=(",", ":"), sort_keys=True)
                for case in cases
            )
            + "\n]\n"
        )
    print(len(cases), "cases")


if __name__ == "__main__":
    main()

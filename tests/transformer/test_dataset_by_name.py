"""Data sets by the names of TensorFlow Datasets, of which there is a stand-in here.

`test_tensorflow_datasets.py` loads them by that package, where it is installed.
"""

import sys
import types

import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer.data_rows import Small, rows, strings

from mesh_tensorflow.transformer import dataset as data
from mesh_tensorflow.transformer import vocabulary


@pytest.fixture
def tfds(monkeypatch):
    """A module tensorflow_datasets whose `load` gives `module.data`, and keeps its arguments."""
    module = types.ModuleType("tensorflow_datasets")

    def load(name, **kwargs):
        module.loaded = {"name": name, **kwargs}
        return module.data

    module.load = load
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    return module


@pytest.mark.slow
def test_pretokenized_tfds(tfds):
    tfds.data = tf.data.Dataset.from_tensor_slices(([[5, 6, 7]], [[3, 4, 2]]))
    kwargs = {"tfds_data_dir": "dir", "sequence_length": 6}
    (row,) = rows(data.pretokenized_tfds_dataset("x", False, dataset_split="validation", **kwargs))
    assert row["inputs"] == [6, 7, 8, 1, 0, 0] and row["targets"] == [4, 5, 3, 1, 0, 0]
    assert tfds.loaded == {
        "name": "x",
        "split": "validation",
        "as_supervised": True,
        "data_dir": "dir",
        "shuffle_files": False,
    }
    train = rows(data.pretokenized_tfds_dataset("x", True, dataset_split="train", **kwargs).take(9))
    assert [r["targets"] for r in train] == [[4, 5, 3, 1, 0, 0]] * 9
    assert tfds.loaded["shuffle_files"]
    with pytest.raises(tf.errors.InvalidArgumentError, match="vocabulary of 10 ids"):
        tfds.data = tf.data.Dataset.from_tensor_slices(([[9]], [[3]]))
        rows(
            data.pretokenized_tfds_dataset(
                "x", False, dataset_split="test", vocabulary=Small(), **kwargs
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "features, key",
    [
        ({"text": ["ab"], "n": [1]}, "text"),
        ({"targets": ["ab"], "text": ["c"]}, "targets"),
        ({"words": ["ab"], "n": [1]}, "words"),
    ],
)
def test_untokenized_tfds_text(tfds, features, key):
    tfds.data = strings(**features)
    words = vocabulary.ByteVocabulary()
    (row,) = rows(
        data.untokenized_tfds_dataset(
            "x", True, None, "validation", None, {"targets": 4}, words, True
        )
    )
    assert row["targets"] == [*words.encode("ab"), 1, 0]
    assert tfds.loaded["as_supervised"] is False


def test_untokenized_tfds_pairs(tfds):
    tfds.data = tf.data.Dataset.from_tensor_slices((["a"], ["b"]))
    words = vocabulary.ByteVocabulary()
    args = ("x", False, None, "train", None, 3, words)
    padded = rows(data.untokenized_tfds_dataset(*args, False).take(2))
    assert padded == [{"inputs": [100, 1, 0], "targets": [101, 1, 0]}] * 2
    packed = rows(data.untokenized_tfds_dataset(*args, True).take(2))
    assert "inputs_segmentation" in packed[0]
    with pytest.raises(ValueError, match='text2self needs a feature "targets" or "text"'):
        data.untokenized_tfds_dataset("x", True, *args[2:], True)


@pytest.mark.parametrize(
    "module, words",
    [
        (
            None,
            r"needs the package tensorflow-datasets, which is not installed: pip install tensorflow-d",
        ),
        # What there is after an import that failed within.
        (
            types.ModuleType("tensorflow_datasets"),
            r"needs tensorflow_datasets\.(load|builder), but .* could not import its parts",
        ),
    ],
)
def test_without_tensorflow_datasets(monkeypatch, module, words):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    for call in (
        lambda: data.pretokenized_tfds_dataset("x", True, None, "train", None, 4),
        lambda: data.untokenized_tfds_dataset("x", True, None, "train", None, 4, None, True),
        lambda: vocabulary.get_tfds_vocabulary("x"),
    ):
        with pytest.raises(ImportError, match=words):
            call()

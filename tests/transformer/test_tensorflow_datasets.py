"""Data sets of TensorFlow Datasets: of strings and of ids, by name, from code and from files alone."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.oracle import utils_runs as runs
from helpers.transformer.data_rows import rows

from mesh_tensorflow.transformer import dataset, utils, vocabulary

tfds = pytest.importorskip(
    "tensorflow_datasets",
    reason="tensorflow-datasets is not installed; it is of the extra [transformer]",
)

runs.register(dataset)

WORDS = vocabulary.ByteVocabulary()
PAIRS = {
    "train": [
        ("one two", "eins zwei"), ("three", "drei"), ("four five six", "vier f\u00fcnf sechs"),
        ("seven", "sieben"),
    ],
    "validation": [("eight", "acht"), ("nine ten", "neun zehn")],
}  # fmt: skip
TEXT = tfds.deprecated.text


class Base(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Pairs of strings, from files of tab-separated values."""

    VERSION = tfds.core.Version("1.0.0")
    FOLDER = None  # where the files are
    FEATURES, SUPERVISED = ("source", "target"), ("source", "target")

    def feature(self):
        return tfds.features.Text()

    def encoded(self, text):
        return text

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            supervised_keys=self.SUPERVISED,
            features=tfds.features.FeaturesDict({name: self.feature() for name in self.FEATURES}),
        )

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(self.FOLDER / f"{split}.tsv") for split in PAIRS}

    def _generate_examples(self, path):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            texts = zip(self.FEATURES, line.split("\t"))
            yield number, {name: self.encoded(text) for name, text in texts}


class TabPairs(Base):
    """Pairs of strings."""


class TabTexts(Base):
    """Strings."""

    FEATURES, SUPERVISED = ("text",), None


class TabIds(Base):
    """Pairs of encoded strings; the encoder is made of the data, and kept with them."""

    BUILDER_CONFIGS = (tfds.core.BuilderConfig(name="subwords", version="1.0.0"),)

    def feature(self):
        return tfds.features.Text(
            encoder_config=TEXT.TextEncoderConfig(
                encoder_cls=TEXT.SubwordTextEncoder, vocab_size=300
            )
        )

    def _split_generators(self, dl_manager):
        for column, name in enumerate(self.FEATURES):
            corpus = [pair[column] for pair in PAIRS["train"]]
            self.info.features[name].maybe_build_from_corpus(corpus)
        return super()._split_generators(dl_manager)


class FilesOfPairs(TabPairs, skip_registration=True):
    """Pairs of strings; no code is found by this name."""


class FilesOfIds(Base, skip_registration=True):
    """Pairs of sequences of ids; no code is found by this name."""

    def feature(self):
        return tfds.features.Sequence(np.int64)

    def encoded(self, text):
        return list(text.encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The directory of all data sets."""
    root = tmp_path_factory.mktemp("tfds")
    Base.FOLDER = root / "text"
    Base.FOLDER.mkdir()
    tfds.disable_progress_bar()
    for split, pairs in PAIRS.items():
        lines = "".join("\t".join(pair) + "\n" for pair in pairs)
        (Base.FOLDER / f"{split}.tsv").write_text(lines, encoding="utf-8")
    for builder in (TabPairs, TabTexts, TabIds, FilesOfPairs, FilesOfIds):
        builder(data_dir=str(root / "data")).download_and_prepare()
    return str(root / "data")


def text(ids):
    """Returns the texts of packed or padded ids, one for each EOS."""
    ends = [i for i, x in enumerate(ids) if x == 1]
    return [WORDS.decode(ids[i:j]) for i, j in zip([0, *(e + 1 for e in ends)], ends)]


def untokenized(name, folder, split="validation", text2self=False, pack=False, length=24):
    return dataset.untokenized_tfds_dataset(
        name, text2self, folder, split, None, {"inputs": length, "targets": length}, WORDS, pack
    )


@pytest.mark.parametrize("name", ["tab_pairs", "tab_pairs:1.0.0", "files_of_pairs"])
def test_pairs_of_strings(folder, name):
    found = rows(untokenized(name, folder))
    pairs = sorted((*text(row["inputs"]), *text(row["targets"])) for row in found)
    assert pairs == PAIRS["validation"]
    assert {len(x) for row in found for x in row.values()} == {24}
    [packed] = rows(untokenized(name, folder, pack=True))
    assert sorted(zip(text(packed["inputs"]), text(packed["targets"]))) == PAIRS["validation"]
    assert max(packed["inputs_segmentation"]) == 2


def test_training_reads_again_and_again_and_other_splits_once(folder):
    train = rows(untokenized("tab_pairs", folder, "train").take(400))
    seen = [text(row["inputs"])[0] for row in train]
    assert {w: seen.count(w) for w in set(seen)} == {
        w: pytest.approx(100, abs=80) for w, _ in PAIRS["train"]
    }
    assert len(rows(untokenized("tab_pairs", folder, "train[:50%]"))) == 2
    assert len(rows(untokenized("tab_pairs", folder, "train+validation"))) == 6


def test_texts_of_a_language_model(folder):
    [packed] = rows(untokenized("tab_texts", folder, text2self=True, pack=True))
    assert sorted(text(packed["targets"])) == [source for source, _ in PAIRS["validation"]]
    assert not any(key.startswith("inputs") for key in packed)
    with pytest.raises(ValueError, match="text2self needs a feature"):
        untokenized("tab_pairs", folder, text2self=True)


def test_a_data_set_without_pairs(folder):
    with pytest.raises(ValueError, match="as_supervised"):
        untokenized("tab_texts", folder)


def pretokenized(name, folder, split="validation", text2self=False, **kwargs):
    return dataset.pretokenized_tfds_dataset(
        name, text2self, folder, split, None, {"inputs": 24, "targets": 24}, **kwargs
    )


def test_ids_with_an_encoder(folder):
    words = vocabulary.get_tfds_vocabulary("tab_ids/subwords", folder)
    assert 256 < words.vocab_size <= 301
    [row] = rows(pretokenized("tab_ids/subwords", folder, vocabulary=words))
    ids = np.array(row["targets"])
    ends = np.flatnonzero(ids == 1)
    found = [words.decode(part) for part in np.split(ids, ends + 1)[:-1]]
    assert sorted(found) == [target for _, target in PAIRS["validation"]]
    assert row["targets_segmentation"][ends[0]] == 1 and row["targets_segmentation"][ends[1]] == 2
    alone = rows(pretokenized("tab_ids/subwords", folder, "train", True).take(3))
    assert all("inputs" not in row for row in alone)


def test_ids_of_files_alone(folder):
    [row] = rows(pretokenized("files_of_ids", folder))
    # Bytes, one higher.
    ids = [i + 2 if i > 1 else i for i in row["inputs"]]
    assert sorted(text(ids)) == [source for source, _ in PAIRS["validation"]]


def test_directories_that_are_known_to_tensorflow_datasets(folder):
    """In the place of an argument."""
    with pytest.raises(
        ValueError, match="feature 'target' of data set 'tab_ids/subwords' has no encoder"
    ):
        vocabulary.get_tfds_vocabulary("tab_ids/subwords")
    tfds.core.add_data_dir(folder)
    assert vocabulary.get_tfds_vocabulary("tab_ids/subwords").vocab_size > 256
    assert len(rows(untokenized("files_of_pairs", None))) == 2


def test_vocabularies_that_there_are_not(folder):
    with pytest.raises(ValueError, match="feature 'target' of data set 'tab_pairs' has no encoder"):
        vocabulary.get_tfds_vocabulary("tab_pairs", folder)
    with pytest.raises(ValueError, match="names no pair of inputs and targets"):
        vocabulary.get_tfds_vocabulary("tab_texts", folder)


@pytest.fixture
def train(folder, tmp_path):
    def train(model_type, further):
        tf.flags.FLAGS(["test"])
        directory = str(tmp_path / "model")
        runs.call(
            utils.run,
            directory,
            model_type,
            "train",
            (f"run.train_steps = 2\n{further}".replace("FOLDER", folder)),
        )
        return runs.summaries(directory)["loss"]

    return train


UNTOKENIZED = """
run.vocabulary = @vocabulary.ByteVocabulary()
run.train_dataset_fn = @dataset.untokenized_tfds_dataset
untokenized_tfds_dataset.tfds_data_dir = "FOLDER"
"""


def test_training_of_pairs(train):
    loss = train(
        "bitransformer",
        f"""{UNTOKENIZED}
        untokenized_tfds_dataset.dataset_name = "tab_pairs"
        untokenized_tfds_dataset.text2self = False
        untokenized_tfds_dataset.pack = True
        run.sequence_length = {{"inputs": 32, "targets": 24}}
        """,
    )
    assert 0.5 * np.log(259) < loss < 3 * np.log(259)


def test_training_of_a_language_model(train):
    loss = train(
        "lm",
        f"""{UNTOKENIZED}
        untokenized_tfds_dataset.dataset_name = "tab_texts"
        untokenized_tfds_dataset.text2self = True
        untokenized_tfds_dataset.pack = False
        run.sequence_length = {{"targets": 16}}
        """,
    )
    assert 0.5 * np.log(259) < loss < 3 * np.log(259)


def test_training_on_ids(train):
    loss = train(
        "bitransformer",
        """
        run.vocabulary = @vocabulary.get_tfds_vocabulary()
        get_tfds_vocabulary.dataset_name = "tab_ids/subwords"
        get_tfds_vocabulary.tfds_data_dir = "FOLDER"
        run.train_dataset_fn = @dataset.pretokenized_tfds_dataset
        pretokenized_tfds_dataset.dataset_name = "tab_ids/subwords"
        pretokenized_tfds_dataset.tfds_data_dir = "FOLDER"
        pretokenized_tfds_dataset.text2self = False
        """,
    )
    assert 0.5 * np.log(259) < loss < 3 * np.log(259)

"""Data sets of labeled sentences: CoLA, MRPC, MultiNLI and XNLI."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow.bert import tokenization

__all__ = [
    "PROCESSORS",
    "ColaProcessor",
    "DataProcessor",
    "InputExample",
    "MnliProcessor",
    "MrpcProcessor",
    "PaddingInputExample",
    "XnliProcessor",
]


class InputExample:
    """One or two sentences, with a label.

    Attributes:
      guid: a string, unique among the examples.
      text_a: the first sentence.
      text_b: the second one, or None.
      label: a string, or None if it is unknown.
    """

    def __init__(
        self,
        guid: Union[str, int],
        text_a: str,
        text_b: Optional[str] = None,
        label: Optional[str] = None,
    ) -> None:
        self.guid = guid
        self.text_a = text_a
        self.text_b = text_b
        self.label = label


class PaddingInputExample:
    """An example that pads the last batch and does not count."""


class DataProcessor:
    """Base class of data sets."""

    def get_train_examples(self, data_dir: str) -> list[InputExample]:
        """Returns examples for training.

        Args:
          data_dir: the directory of the data.
        """
        raise NotImplementedError(f"{type(self).__name__} has no get_train_examples")

    def get_dev_examples(self, data_dir: str) -> list[InputExample]:
        """Returns examples for evaluation.

        Args:
          data_dir: the directory of the data.
        """
        raise NotImplementedError(f"{type(self).__name__} has no get_dev_examples")

    def get_test_examples(self, data_dir: str) -> list[InputExample]:
        """Returns examples for prediction.

        Args:
          data_dir: the directory of the data.
        """
        raise NotImplementedError(f"{type(self).__name__} has no get_test_examples")

    def get_labels(self) -> list[str]:
        """Returns the labels."""
        raise NotImplementedError(f"{type(self).__name__} has no get_labels")

    @classmethod
    def _read_tsv(cls, input_file: str, quotechar: Optional[str] = None) -> list[list[str]]:
        """Reads the rows of a file of tab-separated columns."""
        if not tf.io.gfile.exists(input_file):
            raise ValueError(
                f"{cls.__name__}: there is no file {input_file}; --data_dir should be the "
                "directory of the data"
            )
        with tf.io.gfile.GFile(input_file, "rb") as f:
            content = f.read()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise ValueError(
                f"{cls.__name__}: line {line} of {input_file} is not in UTF-8 ({error.reason}); "
                "convert the file, as by `iconv -f latin1 -t utf-8`"
            ) from error
        reader = csv.reader(
            io.StringIO(text, newline="\n"),
            delimiter="\t",
            quotechar=quotechar,
            quoting=csv.QUOTE_MINIMAL if quotechar else csv.QUOTE_NONE,
        )
        try:
            return list(reader)
        except csv.Error as error:
            raise ValueError(
                f"{cls.__name__}: line {reader.line_num} of {input_file} cannot be read: {error}"
            ) from error


class _Split(NamedTuple):
    """A file of examples and its columns.

    Attributes:
      file: its name in the directory.
      name: what guids begin with.
      header: whether its first line has column names.
      text_a, text_b, label, guid: column numbers, or None; without a guid column, guids have line
      numbers.
      constant_label: the label of examples with unknown labels.
    """

    file: str
    name: str
    header: bool
    text_a: int
    text_b: Optional[int] = None
    label: Optional[int] = None
    constant_label: Optional[str] = None
    guid: Optional[int] = None


class _TableProcessor(DataProcessor):
    """A data set whose splits are files of tab-separated columns."""

    _labels: Sequence[str]
    _train: _Split
    _dev: _Split
    _test: _Split

    def get_train_examples(self, data_dir: str) -> list[InputExample]:
        return self._examples(data_dir, self._train)

    def get_dev_examples(self, data_dir: str) -> list[InputExample]:
        return self._examples(data_dir, self._dev)

    def get_test_examples(self, data_dir: str) -> list[InputExample]:
        return self._examples(data_dir, self._test)

    def get_labels(self) -> list[str]:
        return list(self._labels)

    def _examples(self, data_dir: str, split: _Split) -> list[InputExample]:
        path = os.path.join(data_dir, split.file)
        examples = []
        for number, row in enumerate(self._read_tsv(path)):
            if split.header and number == 0:
                continue
            try:
                examples.append(self._example(number, row, split))
            except (IndexError, ValueError) as error:
                raise ValueError(
                    f"{type(self).__name__}: line {number + 1} of {path} has {len(row)} columns, "
                    f"{row}, and cannot be read: {error}"
                ) from error
        return examples

    def _example(self, number: int, row: Sequence[str], split: _Split) -> InputExample:
        def text(column: Optional[int]) -> Optional[str]:
            return None if column is None else tokenization.convert_to_unicode(row[column])

        guid = number if split.guid is None else text(split.guid)
        label = split.constant_label if split.label is None else text(split.label)
        if label not in self._labels:
            raise ValueError(f"the label is {label!r}, not one of {list(self._labels)}")
        return InputExample(
            f"{split.name}-{guid}", text(split.text_a) or "", text(split.text_b), label
        )


class ColaProcessor(_TableProcessor):
    """The corpus of linguistic acceptability (Warstadt et al., 2018)."""

    _labels = ("0", "1")
    _train = _Split("train.tsv", "train", False, 3, label=1)
    _dev = _Split("dev.tsv", "dev", False, 3, label=1)
    _test = _Split("test.tsv", "test", True, 1, constant_label="0")


class MrpcProcessor(_TableProcessor):
    """The Microsoft research paraphrase corpus (Dolan and Brockett, 2005)."""

    _labels = ("0", "1")
    _train = _Split("train.tsv", "train", True, 3, 4, label=0)
    _dev = _Split("dev.tsv", "dev", True, 3, 4, label=0)
    _test = _Split("test.tsv", "test", True, 3, 4, constant_label="0")


class MnliProcessor(_TableProcessor):
    """MultiNLI (Williams et al., 2018)."""

    _labels = ("contradiction", "entailment", "neutral")
    _train = _Split("train.tsv", "train", True, 8, 9, label=-1, guid=0)
    _dev = _Split("dev_matched.tsv", "dev_matched", True, 8, 9, label=-1, guid=0)
    _test = _Split("test_matched.tsv", "test", True, 8, 9, constant_label="contradiction", guid=0)


class XnliProcessor(DataProcessor):
    """XNLI (Conneau et al., 2018), in one language.

    Attributes:
      language: the language code.
    """

    def __init__(self) -> None:
        self.language = "zh"

    def get_train_examples(self, data_dir: str) -> list[InputExample]:
        """Reads the translated MultiNLI training set of this language."""
        path = os.path.join(data_dir, "multinli", f"multinli.train.{self.language}.tsv")
        examples = []
        for number, row in enumerate(self._read_tsv(path)):
            if number == 0:
                continue
            text_a, text_b, label = map(tokenization.convert_to_unicode, row[:3])
            label = "contradiction" if label == "contradictory" else label
            examples.append(InputExample(f"train-{number}", text_a, text_b, label))
        return examples

    def get_dev_examples(self, data_dir: str) -> list[InputExample]:
        """Reads the rows of this language of XNLI's development set."""
        examples = []
        for number, row in enumerate(self._read_tsv(os.path.join(data_dir, "xnli.dev.tsv"))):
            if number == 0 or tokenization.convert_to_unicode(row[0]) != self.language:
                continue
            text_a, text_b, label = (tokenization.convert_to_unicode(row[i]) for i in (6, 7, 1))
            examples.append(InputExample(f"dev-{number}", text_a, text_b, label))
        return examples

    def get_labels(self) -> list[str]:
        """Returns the three labels of natural language inference."""
        return ["contradiction", "entailment", "neutral"]


PROCESSORS: dict[str, type[DataProcessor]] = {
    "cola": ColaProcessor,
    "mnli": MnliProcessor,
    "mrpc": MrpcProcessor,
    "xnli": XnliProcessor,
}

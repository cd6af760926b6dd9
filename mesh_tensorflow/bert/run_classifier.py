r"""Fine-tunes BERT to classify sentences or sentence pairs, and predicts with it.

python -m mesh_tensorflow.bert.run_classifier --task_name=cola --data_dir=CoLA \
        --vocab_file=vocab.txt --bert_config_file=base.json --output_dir=OUT \
        --do_train --do_eval --mesh_shape="batch:2;model:2"
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf
from absl import flags  # noqa: F401  (a name of the classic)

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import estimator, layers
from mesh_tensorflow._programs import FLAGS, define, run_with_flags
from mesh_tensorflow.bert import tokenization
from mesh_tensorflow.bert._training import (
    MESH_FLAGS,
    TEXT_FLAGS,
    TRAINING_FLAGS,
    Features,
    evaluate,
    import_features,
    make_estimator,
    make_model_fn,
    predicted,
    read_config,
    record_batches,
    require_flags,
    training_order,
    training_records,
    training_steps,
    write_records,
)
from mesh_tensorflow.bert.bert import BertConfig, BertModel

if TYPE_CHECKING:
    from mesh_tensorflow.bert.tokenization import FullTokenizer


__all__ = [
    "FLAGS",
    "ColaProcessor",
    "DataProcessor",
    "InputExample",
    "InputFeatures",
    "MnliProcessor",
    "MrpcProcessor",
    "PaddingInputExample",
    "XnliProcessor",
    "convert_examples_to_features",
    "convert_single_example",
    "create_model",
    "file_based_convert_examples_to_features",
    "file_based_input_fn_builder",
    "input_fn_builder",
    "main",
    "model_fn_builder",
]


define(
    **MESH_FLAGS,
    **TRAINING_FLAGS,
    **TEXT_FLAGS,
    data_dir=(None, "Directory of the data, with .tsv files."),
    task_name=(None, "cola, mnli, mrpc or xnli."),
    max_seq_length=(128, "Length of sequences: longer ones are cut, others padded."),
    do_eval=(False, "Whether to evaluate on the dev set."),
    eval_batch_size=(32, "Sequences of a batch in evaluation."),
)


# -- data sets


@dataclasses.dataclass(eq=False, repr=False)
class InputExample:
    """One or two sentences, with a label.

    Attributes:
      guid: a string, unique among the examples.
      text_a: the first sentence.
      text_b: the second one, or None.
      label: a string, or None if it is unknown.
    """

    guid: Union[str, int]
    text_a: str
    text_b: Optional[str] = None
    label: Optional[str] = None


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
            # So a carriage return within a sentence is an error; it does not silently begin a row.
            io.StringIO(text, newline="\n"),
            delimiter="\t",
            quotechar=quotechar,
            # A sentence may have a quote that nothing closes, at which csv would join lines.
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
      file: its path in the directory.
      name: what guids begin with.
      header: whether its first line has column names.
      text_a, text_b, label, guid: column numbers, or None; without a guid column, guids have line
      numbers.
      constant_label: the label of examples with unknown labels.
      language: the column that says the language of a line, or None if all are read.
    """

    file: str
    name: str
    header: bool
    text_a: int
    text_b: Optional[int] = None
    label: Optional[int] = None
    constant_label: Optional[str] = None
    guid: Optional[int] = None
    language: Optional[int] = None


class _TableProcessor(DataProcessor):
    """A data set whose splits are files of tab-separated columns."""

    language: Optional[str] = None
    _synonyms: Mapping[Optional[str], str] = {}
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
        path = os.path.join(data_dir, split.file.format(language=self.language))
        examples = []
        for number, row in enumerate(self._read_tsv(path)):
            if split.header and number == 0:
                continue
            try:
                if split.language is None or row[split.language] == self.language:
                    examples.append(self._example(number, row, split))
            except (IndexError, ValueError) as error:
                raise ValueError(
                    f"{type(self).__name__}: line {number + 1} of {path} has {len(row)} columns, "
                    f"{row}, and cannot be read: {error}"
                ) from error
        return examples

    def _example(self, number: int, row: Sequence[str], split: _Split) -> InputExample:
        guid = number if split.guid is None else row[split.guid]
        # Test sets have no labels; their features need one, which no prediction depends on.
        label = split.constant_label if split.label is None else row[split.label]
        label = self._synonyms.get(label, label)
        if label not in self._labels:
            raise ValueError(f"the label is {label!r}, not one of {list(self._labels)}")
        text_b = None if split.text_b is None else row[split.text_b]
        return InputExample(f"{split.name}-{guid}", row[split.text_a], text_b, label)


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

    # In the order of TF BERT, by which its checkpoints have a row of weights for each label.
    _labels = ("contradiction", "entailment", "neutral")
    # The label is the last column, before which files have different numbers of others.
    _train = _Split("train.tsv", "train", True, 8, 9, label=-1, guid=0)
    _dev = _Split("dev_matched.tsv", "dev_matched", True, 8, 9, label=-1, guid=0)
    _test = _Split("test_matched.tsv", "test", True, 8, 9, constant_label="contradiction", guid=0)


class XnliProcessor(_TableProcessor):
    """XNLI (Conneau et al., 2018), in one language, with the translated MultiNLI to train on.

    Attributes:
      language: the language code.
    """

    _labels = MnliProcessor._labels
    _train = _Split("multinli/multinli.train.{language}.tsv", "train", True, 0, 1, label=2)
    _dev = _Split("xnli.dev.tsv", "dev", True, 6, 7, label=1, language=0)
    get_test_examples = DataProcessor.get_test_examples

    def __init__(self) -> None:
        self.language = "zh"
        # The translated training set has another word for it than the development set.
        self._synonyms = {"contradictory": "contradiction"}


PROCESSORS: dict[str, type[DataProcessor]] = {
    "cola": ColaProcessor,
    "mnli": MnliProcessor,
    "mrpc": MrpcProcessor,
    "xnli": XnliProcessor,
}


# -- features


_SHOWN = 5


_LOGGED_EVERY = 10000


# What every model reads; labels and weights are added to them.
_FEATURES = ("input_ids", "input_mask", "segment_ids")


Example = Union[InputExample, PaddingInputExample]


@dataclasses.dataclass(eq=False, repr=False)
class InputFeatures:
    """An example as integers.

    Attributes:
      input_ids: the ids of tokens.
      input_mask: 1 for each token, 0 for padding.
      segment_ids: 1 for the second sentence.
      label_id: the label's number.
      is_real_example: False for a PaddingInputExample.
    """

    input_ids: Sequence[int]
    input_mask: Sequence[int]
    segment_ids: Sequence[int]
    label_id: int
    is_real_example: bool = True


def _truncated(tokens_a: list[str], tokens_b: list[str], room: int) -> tuple[list[str], list[str]]:
    """Truncates two sentences to a total length, the longer one first."""
    # Token by token from the longer one, so that a short text keeps more than its share.
    a, b = len(tokens_a), len(tokens_b)
    while a + b > room:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    return tokens_a[:a], tokens_b[:b]


def convert_single_example(
    ex_index: int,
    example: Example,
    label_list: Sequence[str],
    max_seq_length: int,
    tokenizer: FullTokenizer,
) -> InputFeatures:
    """Returns the features of an example: [CLS] a [SEP], and b [SEP] if there is a second sentence.

    Args:
      ex_index: the number of the example; the first few are logged.
      example: an InputExample or a PaddingInputExample.
      label_list: the labels.
      max_seq_length: the length that features are padded to.
      tokenizer: a FullTokenizer.

    Returns:
      InputFeatures.

    Raises:
      ValueError: the label is unknown, or the length leaves no room for text.
    """
    if isinstance(example, PaddingInputExample):
        # A real label id, since losses of padding are computed and then have the weight 0.
        zeros = [0] * max_seq_length
        return InputFeatures(zeros, list(zeros), list(zeros), 0, is_real_example=False)
    if example.label is None or example.label not in label_list:
        raise ValueError(
            f"example {example.guid} has the label {example.label!r}, which is none of "
            f"{list(label_list)}"
        )
    tokens_a = tokenizer.tokenize(example.text_a)
    # As in the classic, a second text without a token (it may be blank) is none, and has no [SEP].
    tokens_b = tokenizer.tokenize(example.text_b) if example.text_b else []
    marks = 3 if tokens_b else 2
    if max_seq_length <= marks:
        raise ValueError(
            f"max_seq_length is {max_seq_length}, but [CLS] and [SEP] take {marks}; make it longer"
        )
    tokens_a, tokens_b = _truncated(tokens_a, tokens_b, max_seq_length - marks)
    tokens = ["[CLS]", *tokens_a, "[SEP]"]
    segment_ids = [0] * len(tokens)
    if tokens_b:
        tokens += [*tokens_b, "[SEP]"]
        segment_ids += [1] * (len(tokens_b) + 1)
    input_ids = tokenizer.convert_tokens_to_ids(tokens)
    padding = [0] * (max_seq_length - len(tokens))
    label_id = list(label_list).index(example.label)
    # A few in the log show a user whether vocabulary, case and columns are the right ones.
    if ex_index < _SHOWN:
        text = " ".join(tokenization.printable_text(token) for token in tokens)
        tf.logging.debug(
            "Example %s: %s (label %s, %d)", example.guid, text, example.label, label_id
        )
    return InputFeatures(
        input_ids + padding, [1] * len(tokens) + padding, segment_ids + padding, label_id
    )


def convert_examples_to_features(
    examples: Iterable[Example],
    label_list: Sequence[str],
    max_seq_length: int,
    tokenizer: FullTokenizer,
) -> list[InputFeatures]:
    """Returns the features of examples; see `convert_single_example`.

    Args:
      examples: the examples.
      label_list: the labels.
      max_seq_length: the length.
      tokenizer: a FullTokenizer.
    """
    return list(_converted(examples, label_list, max_seq_length, tokenizer))


def _converted(
    examples: Iterable[Example],
    label_list: Sequence[str],
    max_seq_length: int,
    tokenizer: FullTokenizer,
) -> Iterator[InputFeatures]:
    for number, example in enumerate(examples):
        if number and number % _LOGGED_EVERY == 0:
            tf.logging.info("Converting example %d", number)
        yield convert_single_example(number, example, label_list, max_seq_length, tokenizer)


def file_based_convert_examples_to_features(
    examples: Iterable[Example],
    label_list: Sequence[str],
    max_seq_length: int,
    tokenizer: FullTokenizer,
    output_file: str,
) -> None:
    """Writes the features of examples as TFRecords.

    Args:
      examples: the examples.
      label_list: the labels.
      max_seq_length: the length.
      tokenizer: a FullTokenizer.
      output_file: the path of the file.
    """
    write_records(
        output_file,
        # One after the other, so that not all features are in memory at a time.
        (
            {
                "input_ids": f.input_ids,
                "input_mask": f.input_mask,
                "segment_ids": f.segment_ids,
                "label_ids": [f.label_id],
                "is_real_example": [int(f.is_real_example)],
            }
            for f in _converted(examples, label_list, max_seq_length, tokenizer)
        ),
    )


def input_fn_builder(
    features: Sequence[InputFeatures], seq_length: int, is_training: bool, drop_remainder: bool
) -> Callable[[Any], Any]:
    """Returns an input function over features in memory.

    Args:
      features: InputFeatures.
      seq_length: their length.
      is_training: whether to shuffle and repeat them.
      drop_remainder: whether to drop a last batch that is not full.

    Returns:
      A function of `params`, which contain "batch_size".
    """
    columns = {
        # Reshaped, as the array of no features would otherwise have rank 1.
        name: np.array([getattr(f, name) for f in features], np.int32).reshape(-1, seq_length)
        for name in _FEATURES
    }
    columns["label_ids"] = np.array([f.label_id for f in features], np.int32)
    columns["is_real_example"] = np.array([f.is_real_example for f in features], np.int32)

    def input_fn(params: Mapping[str, Any]) -> tf.data.Dataset:
        data = training_order(tf.data.Dataset.from_tensor_slices(columns), is_training)
        return data.batch(params["batch_size"], drop_remainder=drop_remainder)

    return input_fn


def file_based_input_fn_builder(
    input_file: str, seq_length: int, is_training: bool, drop_remainder: bool
) -> Callable[[Any], Any]:
    """Returns an input function over TFRecords.

    Args:
      input_file: a file written by `file_based_convert_examples_to_features`.
      seq_length: the length of the features.
      is_training: whether to shuffle and repeat them.
      drop_remainder: whether to drop a last batch that is not full.

    Returns:
      A function of `params`, which contain "batch_size".
    """
    shapes = {**{name: [seq_length] for name in _FEATURES}, "label_ids": [], "is_real_example": []}
    return record_batches(input_file, shapes, is_training, drop_remainder)


_DROPOUT = 0.1


_DEVIATION = 0.02  # standard deviation of initial weights


# -- the model


def create_model(
    bert_config: BertConfig,
    is_training: bool,
    input_ids: mtf.Tensor,
    input_mask: mtf.Tensor,
    segment_ids: mtf.Tensor,
    labels: mtf.Tensor,
    num_labels_dim: mtf.Dimension,
    layout: Union[mtf.LayoutRules, str],
    mesh_shape: Union[mtf.Shape, str],
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Builds a classifier; returns its losses, logits and probabilities.

    Args:
      bert_config: a BertConfig.
      is_training: whether dropout is applied.
      input_ids: an int32 Tensor [batch, seq].
      input_mask: an int32 Tensor of the same shape, 0 at padding.
      segment_ids: an int32 Tensor of the same shape.
      labels: an int32 Tensor [batch].
      num_labels_dim: the Dimension of the labels.
      layout: the layout.
      mesh_shape: the mesh.

    Returns:
      (the mean loss, the losses [batch], logits [batch, labels], probabilities).
    """
    model = BertModel(
        bert_config,
        is_training,
        input_ids,
        input_mask,
        segment_ids,
        mesh_shape=mesh_shape,
        layout=layout,
    )
    # Not by layers.dense: checkpoints have this name, and this order of dimensions.
    weights = mtf.get_variable(
        input_ids.mesh,
        "output_weights",
        mtf.Shape([num_labels_dim, model.model_dim]),
        initializer=tf.truncated_normal_initializer(stddev=_DEVIATION),
    )
    bias = mtf.get_variable(
        input_ids.mesh,
        "output_bias",
        mtf.Shape([num_labels_dim]),
        initializer=tf.zeros_initializer(),
    )
    with tf.variable_scope("loss"):
        x = mtf.dropout(model.get_pooled_output(), is_training, rate=_DROPOUT)
        logits = mtf.einsum([x, weights], reduced_dims=[model.model_dim]) + bias
        each = layers.softmax_cross_entropy_with_logits(logits, labels, num_labels_dim)
        loss = mtf.reduce_mean(each) + model.get_extra_loss()
        return loss, each, logits, mtf.softmax(logits, num_labels_dim)


def model_fn_builder(
    bert_config: BertConfig,
    num_labels: int,
    init_checkpoint: Optional[str],
    learning_rate: float,
    num_train_steps: Optional[int],
    num_warmup_steps: Optional[int],
    use_tpu: bool,
) -> Callable[..., Any]:
    """Returns a model function for a TPUEstimator.

    Args:
      bert_config: a BertConfig.
      num_labels: the number of labels.
      init_checkpoint: a checkpoint to initialize variables from, or None.
      learning_rate: the peak learning rate.
      num_train_steps: the number of training steps; None without training.
      num_warmup_steps: the number of warmup steps.
      use_tpu: whether the estimator runs one program on each processor.

    Returns:
      A function of features, labels, mode and params that returns a TPUEstimatorSpec.
    """
    modes = estimator.ModeKeys

    def build(mesh: mtf.Mesh, features: Features, mode: str) -> dict[str, mtf.Tensor]:
        x = import_features(mesh, features)
        loss, each, logits, probabilities = create_model(
            bert_config,
            mode == modes.TRAIN,
            *x,
            x.of_each(features["label_ids"]),
            mtf.Dimension("labels", num_labels),
            FLAGS.layout,
            FLAGS.mesh_shape,
        )
        if mode == modes.PREDICT:
            return {"probabilities": probabilities}
        return {"loss": loss, "each": each, "logits": logits}

    def outputs(features: Features, mode: str, tensors: dict[str, tf.Tensor]) -> dict[str, Any]:
        if mode == modes.PREDICT:
            return {"predictions": tensors}
        real = tf.cast(features["is_real_example"], tf.float32)
        inputs = [tensors["each"], features["label_ids"], tensors["logits"], real]
        # This mean includes padding examples; eval_loss is the one without them.
        return {"loss": tensors["loss"], "eval_metrics": (_metrics, inputs)}

    return make_model_fn(
        build,
        outputs,
        init_checkpoint,
        learning_rate,
        num_train_steps or 1,
        num_warmup_steps,
        FLAGS.max_optimized_variable_size,
        use_tpu,
    )


def _metrics(
    each: tf.Tensor, label_ids: tf.Tensor, logits: tf.Tensor, real: tf.Tensor
) -> dict[str, Any]:
    """Returns metrics, in which padding examples do not count."""
    predictions = tf.argmax(logits, axis=-1, output_type=tf.int32)
    return {
        "eval_accuracy": tf.metrics.accuracy(label_ids, predictions, weights=real),
        "eval_loss": tf.metrics.mean(each, weights=real),
    }


# -- the program


class _Task:
    """A data set, and how it is converted to features."""

    def __init__(self) -> None:
        name = FLAGS.task_name.lower()
        if name not in PROCESSORS:
            raise ValueError(
                f"Task not found: {name}; --task_name should be one of {', '.join(PROCESSORS)}"
            )
        self.processor = PROCESSORS[name]()
        self.labels = self.processor.get_labels()
        self.tokenizer = tokenization.FullTokenizer(FLAGS.vocab_file, FLAGS.do_lower_case)

    def write(self, examples: Sequence[Any], path: str) -> None:
        """Writes features of examples."""
        file_based_convert_examples_to_features(
            examples, self.labels, FLAGS.max_seq_length, self.tokenizer, path
        )

    def held_out(
        self, examples: Sequence[Any], name: str, batch_size: int
    ) -> tuple[Callable[[Any], Any], int]:
        """Writes examples to the output directory; returns their input function and batches."""
        # Shapes of a program are static: what does not fill the last batch would be dropped.
        padding = [PaddingInputExample() for _ in range(-len(examples) % batch_size)]
        path = os.path.join(FLAGS.output_dir, name)
        self.write([*examples, *padding], path)
        input_fn = file_based_input_fn_builder(path, FLAGS.max_seq_length, False, True)
        return input_fn, -(-len(examples) // batch_size)


def _evaluate(run: estimator.tpu.TPUEstimator, task: _Task) -> None:
    """Evaluates on the dev set, and writes eval_results.txt."""
    examples = task.processor.get_dev_examples(FLAGS.data_dir)
    tf.logging.info("Evaluating %d examples", len(examples))
    evaluate(run, *task.held_out(examples, "eval.tf_record", FLAGS.eval_batch_size))


def _predict(run: estimator.tpu.TPUEstimator, task: _Task) -> None:
    """Writes the probabilities of labels of the test set to test_results.tsv."""
    examples = task.processor.get_test_examples(FLAGS.data_dir)
    tf.logging.info("Predicting %d examples", len(examples))
    input_fn, _ = task.held_out(examples, "predict.tf_record", FLAGS.predict_batch_size)
    with tf.io.gfile.GFile(os.path.join(FLAGS.output_dir, "test_results.tsv"), "w") as f:
        for prediction in predicted(run, input_fn, len(examples)):
            f.write("\t".join(map(str, prediction["probabilities"])) + "\n")


def main(_: Sequence[str]) -> None:
    """Trains, evaluates and predicts, as requested by flags.

    Args:
      _: the remaining command line arguments.

    Raises:
      ValueError: a flag is invalid, or a file is missing.
    """
    require_flags(
        "run_classifier", ["data_dir", "task_name", "vocab_file", "bert_config_file", "output_dir"]
    )
    if not (FLAGS.do_train or FLAGS.do_eval or FLAGS.do_predict):
        raise ValueError(
            "At least one of `do_train`, `do_eval` or `do_predict` must be True: pass --do_train, "
            "--do_eval or --do_predict"
        )
    tokenization.validate_case_matches_checkpoint(FLAGS.do_lower_case, FLAGS.init_checkpoint)
    config = read_config(FLAGS.max_seq_length)
    task = _Task()
    tf.io.gfile.makedirs(FLAGS.output_dir)
    # Read before the model is made: its rate decays to 0 over as many steps as the examples give.
    examples: list[InputExample] = []
    steps = 0
    if FLAGS.do_train:
        examples = task.processor.get_train_examples(FLAGS.data_dir)
        steps = training_steps(len(examples), "examples")
    model_fn = model_fn_builder(
        config,
        len(task.labels),
        FLAGS.init_checkpoint,
        FLAGS.learning_rate,
        steps,
        int(steps * FLAGS.warmup_proportion),
        FLAGS.use_tpu,
    )
    run = make_estimator(model_fn, "train", "eval", "predict")
    if FLAGS.do_train:
        path = training_records(lambda path: task.write(examples, path))
        input_fn = file_based_input_fn_builder(path, FLAGS.max_seq_length, True, True)
        # Not steps=: a run that is called again goes on from its checkpoint, to the same end.
        run.train(input_fn, max_steps=steps)
    if FLAGS.do_eval:
        _evaluate(run, task)
    if FLAGS.do_predict:
        _predict(run, task)


if __name__ == "__main__":
    run_with_flags(main, "mesh_tensorflow.bert.run_classifier")

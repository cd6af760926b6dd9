r"""Fine-tunes BERT to classify sentences or sentence pairs, and predicts with it.

python -m mesh_tensorflow.bert.run_classifier --task_name=cola --data_dir=CoLA \
        --vocab_file=vocab.txt --bert_config_file=base.json --output_dir=OUT \
        --do_train --do_eval --mesh_shape="batch:2;model:2"
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf
from absl import flags  # noqa: F401  (a name of the classic)

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import estimator, layers
from mesh_tensorflow._flags import FLAGS, define
from mesh_tensorflow._programs import run_with_flags
from mesh_tensorflow.bert import tokenization
from mesh_tensorflow.bert._classification import (
    PROCESSORS,
    ColaProcessor,
    DataProcessor,
    InputExample,
    InputFeatures,
    MnliProcessor,
    MrpcProcessor,
    PaddingInputExample,
    XnliProcessor,
    convert_examples_to_features,
    convert_single_example,
    file_based_convert_examples_to_features,
    file_based_input_fn_builder,
    input_fn_builder,
)
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
    require_flags,
    training_records,
    training_steps,
)
from mesh_tensorflow.bert.bert import BertConfig, BertModel

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
        given = [tensors["each"], features["label_ids"], tensors["logits"], real]
        # This mean includes padding examples; eval_loss is the one without them.
        return {"loss": tensors["loss"], "eval_metrics": (_metrics, given)}

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
        run.train(input_fn, max_steps=steps)
    if FLAGS.do_eval:
        _evaluate(run, task)
    if FLAGS.do_predict:
        _predict(run, task)


if __name__ == "__main__":
    run_with_flags(main, "mesh_tensorflow.bert.run_classifier")

r"""Fine-tunes BERT for question answering (SQuAD), and predicts with it.

python -m mesh_tensorflow.bert.run_squad --train_file=train-v1.1.json --do_train \
        --predict_file=dev-v1.1.json --do_predict --vocab_file=vocab.txt \
        --bert_config_file=base.json --output_dir=OUT --mesh_shape="batch:2;model:2"
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf
from absl import flags  # noqa: F401  (a name of the classic)

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import estimator, layers
from mesh_tensorflow._flags import FLAGS, define
from mesh_tensorflow._programs import run_with_flags
from mesh_tensorflow.bert import tokenization
from mesh_tensorflow.bert._squad import (
    FeatureWriter,
    InputFeatures,
    RawResult,
    SquadExample,
    convert_examples_to_features,
    get_final_text,
    input_fn_builder,
    read_squad_examples,
    write_predictions,
)
from mesh_tensorflow.bert._training import (
    MESH_FLAGS,
    TEXT_FLAGS,
    TRAINING_FLAGS,
    Features,
    check_positions,
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

if TYPE_CHECKING:
    from mesh_tensorflow.bert.tokenization import FullTokenizer

__all__ = [
    "FLAGS",
    "FeatureWriter",
    "InputFeatures",
    "RawResult",
    "SquadExample",
    "convert_examples_to_features",
    "create_model",
    "get_final_text",
    "input_fn_builder",
    "main",
    "model_fn_builder",
    "read_squad_examples",
    "validate_flags_or_throw",
    "write_predictions",
]

define(
    **MESH_FLAGS,
    **TRAINING_FLAGS,
    **TEXT_FLAGS,
    train_file=(None, "JSON file of questions to train on."),
    predict_file=(None, "JSON file of questions to answer."),
    max_seq_length=(384, "Length of sequences: paragraphs are read in pieces of it."),
    doc_stride=(128, "Tokens from one piece of a paragraph to the next."),
    max_query_length=(64, "How many tokens of a question are kept."),
    n_best_size=(20, "How many answers to a question are written."),
    max_answer_length=(30, "How many tokens an answer may have."),
    verbose_logging=(False, "Whether to log answers that are not found in the text."),
    version_2_with_negative=(False, "Whether questions may have no answer, as in SQuAD 2.0."),
    null_score_diff_threshold=(
        0.0,
        "There is no answer if that much more speaks for none than for the best.",
    ),
)

_DEVIATION = 0.02  # standard deviation of initial weights
_SEED = 12345


# -- the model


def create_model(
    bert_config: BertConfig,
    is_training: bool,
    input_ids: mtf.Tensor,
    input_mask: mtf.Tensor,
    segment_ids: mtf.Tensor,
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Builds a model; returns the logits of each token as the start and end of the answer.

    Args:
      bert_config: a BertConfig.
      is_training: whether dropout is applied.
      input_ids: an int32 Tensor [batch, seq].
      input_mask: an int32 Tensor of the same shape, 0 at padding.
      segment_ids: an int32 Tensor of the same shape.

    Returns:
      (start logits [batch, seq], end logits [batch, seq]).
    """
    return _model_and_logits(bert_config, is_training, input_ids, input_mask, segment_ids)[1:]


def _model_and_logits(*args: Any) -> tuple[BertModel, mtf.Tensor, mtf.Tensor]:
    """Returns a BertModel, and what `create_model` returns; takes the arguments of the latter."""
    model = BertModel(*args, mesh_shape=FLAGS.mesh_shape, layout=FLAGS.layout)
    class_dim = mtf.Dimension("class", 2)
    logits = layers.dense(
        model.get_sequence_output(),
        [class_dim],
        reduced_dims=[model.model_dim],
        kernel_initializer=tf.truncated_normal_initializer(stddev=_DEVIATION),
        name="cls/squad/output",
    )
    start, end = mtf.unstack(logits, class_dim)
    return model, start, end


def _loss(logits: mtf.Tensor, positions: mtf.Tensor) -> mtf.Tensor:
    """Returns the mean cross entropy of positions; targets out of range do not count."""
    seq_dim = logits.shape.dims[-1]
    log_probs = mtf.log_softmax(logits, seq_dim)
    # -log softmax over seq at the position; an index out of range is looked up as 0.
    return mtf.negative(mtf.reduce_mean(mtf.gather(log_probs, positions, seq_dim)))


def model_fn_builder(
    bert_config: BertConfig,
    init_checkpoint: Optional[str],
    learning_rate: float,
    num_train_steps: Optional[int],
    num_warmup_steps: Optional[int],
    use_tpu: bool,
) -> Callable[..., Any]:
    """Returns a model function for a TPUEstimator.

    Args:
      bert_config: a BertConfig.
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
        if mode not in (modes.TRAIN, modes.PREDICT):
            raise ValueError(
                f"Only TRAIN and PREDICT modes are supported: {mode}; answers are compared by "
                "SQuAD's evaluation script"
            )
        x = import_features(mesh, features)
        model, start, end = _model_and_logits(bert_config, mode == modes.TRAIN, *x)
        if mode == modes.PREDICT:
            return {"start_logits": start, "end_logits": end}
        start_loss = _loss(start, x.of_each(features["start_positions"]))
        end_loss = _loss(end, x.of_each(features["end_positions"]))
        return {"loss": 0.5 * (start_loss + end_loss) + model.get_extra_loss()}

    def outputs(features: Features, mode: str, tensors: dict[str, tf.Tensor]) -> dict[str, Any]:
        return {"predictions": {"unique_ids": features["unique_ids"], **tensors}}

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


# -- the program


def validate_flags_or_throw(bert_config: BertConfig) -> None:
    """Checks flags.

    Args:
      bert_config: a BertConfig.

    Raises:
      ValueError: a flag is invalid.
    """
    tokenization.validate_case_matches_checkpoint(FLAGS.do_lower_case, FLAGS.init_checkpoint)
    if not (FLAGS.do_train or FLAGS.do_predict):
        raise ValueError(
            "At least one of `do_train` or `do_predict` must be True: pass --do_train or "
            "--do_predict"
        )
    for mode, name in (("do_train", "train_file"), ("do_predict", "predict_file")):
        if getattr(FLAGS, mode) and not getattr(FLAGS, name):
            raise ValueError(f"If `{mode}` is True, then `{name}` must be specified: --{name}=FILE")
    check_positions(bert_config, FLAGS.max_seq_length)
    if FLAGS.max_seq_length <= FLAGS.max_query_length + 3:
        raise ValueError(
            f"The max_seq_length ({FLAGS.max_seq_length}) must be greater than max_query_length "
            f"({FLAGS.max_query_length}) + 3"
        )


def _write_features(
    examples: Sequence[SquadExample],
    tokenizer: FullTokenizer,
    path: str,
    is_training: bool,
    batch_size: int = 1,
) -> list[InputFeatures]:
    """Writes features of examples; fills the last batch with copies of the last one."""
    features: list[InputFeatures] = []
    convert_examples_to_features(
        examples,
        tokenizer,
        FLAGS.max_seq_length,
        FLAGS.doc_stride,
        FLAGS.max_query_length,
        is_training,
        features.append,
    )
    with contextlib.closing(FeatureWriter(path, is_training)) as writer:
        # What does not fill a batch is dropped by the input; results of the copies are not asked
        # for.
        for feature in features + features[-1:] * (-len(features) % batch_size):
            writer.process_feature(feature)
    return features


def _predict(run: estimator.tpu.TPUEstimator, tokenizer: FullTokenizer) -> None:
    """Writes answers to predictions.json, nbest_predictions.json and null_odds.json."""
    examples = read_squad_examples(FLAGS.predict_file, is_training=False)
    path = os.path.join(FLAGS.output_dir, "eval.tf_record")
    features = _write_features(examples, tokenizer, path, False, FLAGS.predict_batch_size)
    tf.logging.info("Predicting %d questions in %d pieces", len(examples), len(features))
    input_fn = input_fn_builder(path, FLAGS.max_seq_length, False, True)
    results = [
        # Python's floats, since these are written as JSON, which has none of NumPy's.
        RawResult(int(p["unique_ids"]), p["start_logits"].tolist(), p["end_logits"].tolist())
        for p in predicted(run, input_fn, len(features))
    ]
    names = ("predictions.json", "nbest_predictions.json", "null_odds.json")
    write_predictions(
        examples,
        features,
        results,
        FLAGS.n_best_size,
        FLAGS.max_answer_length,
        FLAGS.do_lower_case,
        *(os.path.join(FLAGS.output_dir, name) for name in names),
    )


def main(_: Sequence[str]) -> None:
    """Trains and predicts, as requested by flags.

    Args:
      _: the remaining command line arguments.

    Raises:
      ValueError: a flag is invalid, or a file is missing.
    """
    require_flags("run_squad", ["vocab_file", "bert_config_file", "output_dir"])
    config = read_config(FLAGS.max_seq_length)
    validate_flags_or_throw(config)
    tokenizer = tokenization.FullTokenizer(FLAGS.vocab_file, FLAGS.do_lower_case)
    examples: list[SquadExample] = []
    steps = 0
    if FLAGS.do_train:
        examples = read_squad_examples(FLAGS.train_file, is_training=True)
        steps = training_steps(len(examples), f"questions of {FLAGS.train_file}")
        # Examples of one paragraph are adjacent.
        # By a generator of its own, so that each run writes the same records.
        random.Random(_SEED).shuffle(examples)
    tf.io.gfile.makedirs(FLAGS.output_dir)
    model_fn = model_fn_builder(
        config,
        FLAGS.init_checkpoint,
        FLAGS.learning_rate,
        steps,
        int(steps * FLAGS.warmup_proportion),
        FLAGS.use_tpu,
    )
    run = make_estimator(model_fn, "train", "predict")
    if FLAGS.do_train:
        path = training_records(lambda path: _write_features(examples, tokenizer, path, True))
        run.train(input_fn_builder(path, FLAGS.max_seq_length, True, True), max_steps=steps)
    if FLAGS.do_predict:
        _predict(run, tokenizer)


if __name__ == "__main__":
    run_with_flags(main, "mesh_tensorflow.bert.run_squad")

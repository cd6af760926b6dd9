r"""Pre-trains BERT on records of text with masked tokens, as written by TF BERT's tools.

python -m mesh_tensorflow.bert.run_pretraining --input_train_files="train*.tfrecord" \
        --input_eval_files="eval*.tfrecord" --bert_config_file=base.json --output_dir=OUT \
        --mesh_shape="batch:2;model:2"
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf
from absl import flags  # noqa: F401  (a name of the classic)

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._programs import FLAGS, define, run_with_flags
from mesh_tensorflow.bert._training import (
    MESH_FLAGS,
    TRAINING_FLAGS,
    Features,
    check_first_records,
    evaluate,
    import_features,
    make_estimator,
    make_model_fn,
    parsed_record,
    read_config,
    require_flags,
    training_order,
)
from mesh_tensorflow.bert.bert import BertConfig, BertModel
from mesh_tensorflow.checkpoint import load_global_step

__all__ = ["FLAGS", "input_fn_builder", "main", "model_fn_builder"]

define(
    **MESH_FLAGS,
    **TRAINING_FLAGS,
    input_train_files=(None, "Patterns of the names of files to train on, with commas."),
    input_eval_files=(None, "Patterns of the names of files to evaluate on."),
    max_seq_length=(128, "Length of the sequences in the records."),
    max_predictions_per_seq=(20, "How many hidden tokens a sequence of the records has."),
    mode=("train_and_eval", "train_and_eval, train or eval."),
    eval_batch_size=(8, "Sequences of a batch in evaluation."),
    num_train_steps=(100000, "The step to train to."),
    num_warmup_steps=(10000, "In how many steps the learning rate grows."),
    steps_per_eval=(5000, "Steps from one evaluation to the next."),
    max_eval_steps=(100, "How many batches are evaluated."),
)

PRETRAINING_MODES = ("train_and_eval", "train", "eval")

_SHUFFLE_BUFFER = 1000
_OF_PREDICTIONS = "max_predictions_per_seq"


def _features(max_seq_length: int, max_predictions_per_seq: int) -> dict[str, Any]:
    """Returns the features of a record."""
    sizes = {
        "input_ids": max_seq_length,
        "input_mask": max_seq_length,
        "segment_ids": max_seq_length,
        "masked_lm_positions": max_predictions_per_seq,
        "masked_lm_ids": max_predictions_per_seq,
        "masked_lm_weights": max_predictions_per_seq,
        "next_sentence_labels": 1,
    }
    return {
        name: tf.io.FixedLenFeature([size], tf.float32 if name == "masked_lm_weights" else tf.int64)
        for name, size in sizes.items()
    }


def input_fn_builder(
    input_files: Sequence[str],
    max_seq_length: int,
    max_predictions_per_seq: int,
    is_training: bool,
    num_cpu_threads: int = 4,
) -> Callable[[Any], Any]:
    """Returns an input function over TFRecords.

    Args:
      input_files: the paths of the files.
      max_seq_length: the length of input_ids, input_mask and segment_ids.
      max_predictions_per_seq: the length of masked_lm_positions, masked_lm_ids and
        masked_lm_weights.
      is_training: whether to shuffle and repeat files and records.
      num_cpu_threads: the number of files that are read in parallel in training.

    Returns:
      A function of `params`, which contain "batch_size". It drops a last batch that is not full.
    """
    features = _features(max_seq_length, max_predictions_per_seq)

    def input_fn(params: Mapping[str, Any]) -> tf.data.Dataset:
        # Training consists of several calls, each of which should see different data.
        seed = params.get("data_seed")
        files = tf.data.Dataset.from_tensor_slices(list(input_files))
        # The buffer of records below mixes neighbors only, so files are in random order too.
        files = training_order(files, is_training, len(input_files), seed)
        at_a_time = min(num_cpu_threads, len(input_files)) if is_training else 1
        # In parallel, and still in a fixed order, so that a seed says which records come next.
        data = files.interleave(
            tf.data.TFRecordDataset,
            cycle_length=at_a_time,
            num_parallel_calls=at_a_time if is_training else None,
        )
        if is_training:
            # Not by `training_order`: the files are repeated already.
            data = data.shuffle(_SHUFFLE_BUFFER, seed=seed)
        data = data.map(functools.partial(parsed_record, features=features))
        return data.batch(params["batch_size"], drop_remainder=True)

    return input_fn


# -- the model


def _metrics(
    masked_losses: tf.Tensor,
    masked_predictions: tf.Tensor,
    next_losses: tf.Tensor,
    next_predictions: tf.Tensor,
    ids: tf.Tensor,
    weights: tf.Tensor,
    labels: tf.Tensor,
) -> dict[str, Any]:
    """Returns the metrics of both tasks."""
    return {
        "masked_lm_accuracy": tf.metrics.accuracy(ids, masked_predictions, weights=weights),
        "masked_lm_loss": tf.metrics.mean(masked_losses, weights=weights),
        "next_sentence_accuracy": tf.metrics.accuracy(labels, next_predictions),
        "next_sentence_loss": tf.metrics.mean(next_losses),
    }


def model_fn_builder(
    bert_config: BertConfig,
    init_checkpoint: Optional[str],
    learning_rate: float,
    num_train_steps: int,
    num_warmup_steps: int,
) -> Callable[..., Any]:
    """Returns a model function for a TPUEstimator.

    Args:
      bert_config: a BertConfig.
      init_checkpoint: a checkpoint to initialize variables from, or None.
      learning_rate: the peak learning rate.
      num_train_steps: the number of training steps.
      num_warmup_steps: the number of warmup steps.

    Returns:
      A function of features, labels, mode and params that returns a TPUEstimatorSpec.
    """
    modes = estimator.ModeKeys

    def build(mesh: mtf.Mesh, features: Features, mode: str) -> dict[str, mtf.Tensor]:
        if mode not in (modes.TRAIN, modes.EVAL):
            raise ValueError(f"Only TRAIN and EVAL modes are supported: {mode}")
        x = import_features(mesh, features)
        model = BertModel(
            bert_config,
            mode == modes.TRAIN,
            *x,
            mesh_shape=FLAGS.mesh_shape,
            layout=FLAGS.layout,
        )
        number = mtf.Dimension(_OF_PREDICTIONS, features["masked_lm_positions"].shape.as_list()[1])
        masked_loss, masked_losses, tokens = model.get_masked_lm_output(
            *(
                x.of_each(features[f"masked_lm_{name}"], number)
                for name in ("positions", "ids", "weights")
            )
        )
        next_loss, next_losses, classes = model.get_next_sentence_output(
            x.of_each(_next_labels(features))
        )
        # Devlin et al. (2019), appendix A.2: the sum of the mean losses of both tasks.
        loss = masked_loss + next_loss + model.get_extra_loss()
        if mode == modes.TRAIN:
            return {"loss": loss}
        return {
            "loss": loss,
            "masked_losses": masked_losses,
            # Of each hidden token the best id alone: logits have the size of the vocabulary.
            "masked_predictions": mtf.argmax(tokens, tokens.shape.dims[-1]),
            "next_losses": next_losses,
            "next_predictions": mtf.argmax(classes, classes.shape.dims[-1]),
        }

    def outputs(features: Features, mode: str, tensors: dict[str, tf.Tensor]) -> dict[str, Any]:
        loss = tensors.pop("loss")
        tensors.update(
            ids=features["masked_lm_ids"],
            weights=features["masked_lm_weights"],
            labels=_next_labels(features),
        )
        return {"loss": loss, "eval_metrics": (_metrics, tensors)}

    return make_model_fn(
        build, outputs, init_checkpoint, learning_rate, num_train_steps, num_warmup_steps
    )


def _next_labels(features: Features) -> tf.Tensor:
    return tf.reshape(features["next_sentence_labels"], [-1])


# -- the program


def _files(name: str) -> list[str]:
    """Returns the files that a flag's patterns match."""
    require_flags("run_pretraining", [name])
    files = [
        path
        for pattern in getattr(FLAGS, name).split(",")
        for path in checkpoint_files.matching(pattern.strip())
    ]
    if not files:
        raise ValueError(f"run_pretraining: no file matches --{name}={getattr(FLAGS, name)}")
    # Records have the lengths that they were written with. Others would be errors of the input
    # pipeline in the first step, which name neither the file nor the flag.
    features = _features(FLAGS.max_seq_length, FLAGS.max_predictions_per_seq)
    flag_of = {name: "max_seq_length" for name in features if name != "next_sentence_labels"}
    flag_of.update({name: _OF_PREDICTIONS for name in features if name.startswith("masked_lm_")})
    lengths = {name: f"--{flag}={FLAGS[flag].value}" for name, flag in flag_of.items()}
    check_first_records(files, features, lengths)
    return files


def _input_fn(files: Sequence[str], is_training: bool, seed: int = 0) -> Callable[[Any], Any]:
    input_fn = input_fn_builder(
        files, FLAGS.max_seq_length, FLAGS.max_predictions_per_seq, is_training
    )
    return lambda params: input_fn({**params, "data_seed": seed})


def main(_: Sequence[str]) -> None:
    """Trains and evaluates, according to the flag `mode`.

    Args:
      _: the remaining command line arguments.

    Raises:
      ValueError: a flag is invalid, or a file is missing.
    """
    require_flags("run_pretraining", ["bert_config_file", "output_dir"])
    if FLAGS.mode not in PRETRAINING_MODES:
        raise ValueError(
            f"Unknown mode: {FLAGS.mode!r}; --mode is one of {', '.join(PRETRAINING_MODES)}"
        )
    if FLAGS.mode == "train_and_eval" and FLAGS.steps_per_eval < 1:
        raise ValueError(
            f"run_pretraining: --steps_per_eval={FLAGS.steps_per_eval} should be 1 or more; use "
            "--mode=train to train without evaluation"
        )
    config = read_config(FLAGS.max_seq_length)
    train_files = _files("input_train_files") if FLAGS.mode != "eval" else []
    eval_files = _files("input_eval_files") if FLAGS.mode != "train" else []
    tf.io.gfile.makedirs(FLAGS.output_dir)
    model_fn = model_fn_builder(
        config,
        FLAGS.init_checkpoint,
        FLAGS.learning_rate,
        FLAGS.num_train_steps,
        FLAGS.num_warmup_steps,
    )
    run = make_estimator(model_fn, "train", "eval")
    step = load_global_step(FLAGS.output_dir)

    def evaluate_now() -> None:
        name = f"eval_results_{step}.txt"  # one for each evaluation
        evaluate(run, _input_fn(eval_files, False), FLAGS.max_eval_steps, name)

    if FLAGS.mode == "eval":
        evaluate_now()
        return
    total = FLAGS.num_train_steps
    every = FLAGS.steps_per_eval if eval_files else total
    while step < total:
        # The next multiple, so that a run that goes on evaluates at the same steps.
        done, step = step, min(total, (step // every + 1) * every)
        run.train(_input_fn(train_files, True, seed=done), max_steps=step)
        if eval_files:
            evaluate_now()


if __name__ == "__main__":
    run_with_flags(main, "mesh_tensorflow.bert.run_pretraining")

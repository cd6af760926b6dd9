"""Evaluation: metrics of decoded outputs and of target likelihoods."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow import estimator as mtf_estimator
from mesh_tensorflow.transformer import dataset as transformer_dataset
from mesh_tensorflow.transformer.utils._data import (
    call_dataset_fn,
    combined_input_fn,
    examples_of,
    model_features,
    write_lines_to_file,
)
from mesh_tensorflow.transformer.utils._decode import (
    decode,
    postprocessed,
    postprocessed_targets,
    texts_of_inputs,
)
from mesh_tensorflow.transformer.utils._score import score_with_estimator
from mesh_tensorflow.transformer.utils._settings import (
    Lengths,
    Steps,
    get_checkpoint_iterator,
    get_step_from_checkpoint_path,
)

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset import EvalDataset
    from mesh_tensorflow.transformer.dataset._features import Vocabularies


Metric = tuple[Any, tf.Tensor]


# How values of a batch become one, and how that is joined with those of earlier batches.
_KINDS = {"sum": (tf.reduce_sum, tf.add), "max": (tf.reduce_max, tf.maximum)}


def _accumulated(values: tf.Tensor, name: Optional[str], kind: str) -> Metric:
    """Returns a metric of values over all batches, from 0 on, and the operation that adds some."""
    reduce, combine = _KINDS[kind]
    with tf.variable_scope(name, f"metric_{kind}"):
        total = tf.get_variable(
            "accum",
            shape=[],
            dtype=tf.float32,
            trainable=False,
            initializer=tf.constant_initializer(0.0),
            # The old kind of variable hands out its memory, which a later assignment changes.
            use_resource=True,
            # No checkpoint has it, and each evaluation begins with its initial value.
            collections=[tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES],
        )
        reduced = reduce(tf.cast(values, tf.float32))
        update = total.assign(combine(total, reduced), read_value=False)
        with tf.control_dependencies([update]):
            updated = total.read_value()
    # The value must not run the update, or reading it at the end would count the last batch twice.
    return total.read_value(), updated


def metric_sum(values: tf.Tensor, name: Optional[str] = None, **kwargs: object) -> Metric:
    """Sums values over all batches, in the style of `tf.metrics`.

    Args:
      values: a tf Tensor of numbers.
      name: a name for its variable scope.
      **kwargs: ignored.

    Returns:
      (the value, the operation that adds a batch), both float32 scalars.
    """
    del kwargs
    return _accumulated(values, name, "sum")


def metric_max(values: tf.Tensor, name: Optional[str] = None, **kwargs: object) -> Metric:
    """Returns the maximum of values over all batches, at least 0, in the style of `tf.metrics`.

    Args:
      values: a tf Tensor of numbers.
      name: a name for its variable scope.
      **kwargs: ignored.

    Returns:
      (the value, the operation that adds a batch), both float32 scalars.
    """
    del kwargs
    return _accumulated(values, name, "max")


def token_metrics(tensors: Mapping[str, tf.Tensor]) -> dict[str, Metric]:
    """Returns metrics of a model's predictions of given targets.

    Args:
      tensors: "targets", "weights" (1 where a target counts), "predicted" and "negative_log_prob",
        all [rows, length].

    Returns:
      A dictionary of metrics.
    """
    weights = tf.cast(tensors["weights"], tf.float32)
    right = tf.cast(tf.equal(tensors["predicted"], tensors["targets"]), tf.float32)
    wrong = tf.reduce_sum((1.0 - right) * weights, axis=-1)
    lengths = tf.reduce_sum(weights, axis=-1)
    # Rows that only fill up the last batch have no targets, and are not counted.
    there = tf.cast(tf.greater(lengths, 0), tf.float32)
    return {
        "token_accuracy": tf.metrics.mean(right, weights),
        "sequence_accuracy": tf.metrics.mean(tf.cast(tf.equal(wrong, 0), tf.float32), there),
        "mean_label": tf.metrics.mean(tf.cast(tensors["targets"], tf.float32), weights),
        "num_eval_tokens": metric_sum(weights, name="num_eval_tokens"),
        "max_targets_length": metric_max(lengths, name="max_targets_length"),
        # log(perplexity) is the mean of -log p(target), over the targets that count.
        "neg_log_perplexity": tf.metrics.mean(-tensors["negative_log_prob"], weights),
    }


def _write_metrics(
    writer: tf.summary.FileWriter, name: str, metrics: Mapping[str, float], step: int
) -> None:
    for metric, value in metrics.items():
        tag = f"eval/{name}/{metric}"
        if np.ndim(value) or not np.issubdtype(np.asarray(value).dtype, np.number):
            tf.logging.warning("%s at step %d is no number: %r", tag, step, value)
            continue
        tf.logging.info("%s at step %d: %.3f", tag, step, value)
        writer.add_summary(
            tf.Summary(value=[tf.Summary.Value(tag=tag, simple_value=float(value))]), step
        )
    writer.flush()


def _evaluate_outputs(
    tasks: Sequence[tuple[EvalDataset, list[dict[str, Any]], list[Any]]],
    outputs: list[Any],
    step: int,
    directory: str,
    scores: bool,
    write: bool,
) -> None:
    """Calls the metric functions of each data set with its targets and its part of the outputs."""
    with tf.Graph().as_default():  # FileWriter does not work in eager mode
        writer = tf.summary.FileWriterCache.get(directory)
    # Outputs of all data sets are in a row, as one input function has read them.
    rest = iter(outputs)
    for dataset, examples, targets in tasks:
        own = list(itertools.islice(rest, len(examples)))
        if not scores:
            own = [postprocessed(dataset, output, example=e) for output, e in zip(own, examples)]
        if write:
            kind = "scores" if scores else "predictions"
            write_lines_to_file(own, os.path.join(directory, f"{dataset.name}_{step}_{kind}"))
        for metric_fn in dataset.metric_fns:
            _write_metrics(writer, dataset.name, metric_fn(targets, own), step)


def _scores_of(returned: Any, count: int) -> list[float]:
    """Returns the scores among what a `score_with_estimator_fn` returned for `count` examples."""
    if returned is None:
        raise ValueError(
            "eval_model: score_with_estimator_fn returned None, and metrics need the scores of all "
            "examples; use one that returns them, such as score_with_estimator"
        )
    # As `save_scores` does, they come alone or as the first of several lists.
    scores = returned[0] if isinstance(returned, tuple) else returned
    values = [float(s) for s in scores]
    if len(values) < count:
        raise ValueError(
            f"eval_model: score_with_estimator_fn returned {len(values)} scores for {count} "
            "examples; return one for each of its num_examples, in order"
        )
    # Rows that fill up the last batch may have scores too.
    return values[:count]


def _with_suffix(directory: str, suffix: Optional[str]) -> str:
    return f"{directory}_{suffix}" if suffix else directory


def eval_model(
    estimator: mtf_estimator.tpu.TPUEstimator,
    vocabulary: Vocabularies,
    sequence_length: Lengths,
    batch_size: int,
    dataset_split: str,
    model_dir: str,
    eval_dataset_fn: Callable[..., Sequence[Any]],
    eval_summary_dir: Optional[str],
    eval_checkpoint_step: Steps,
    eval_with_score: bool = False,
    output_eval_examples: bool = True,
    eval_dir_suffix: Optional[str] = None,
    score_with_estimator_fn: Callable[..., Any] = score_with_estimator,
) -> None:
    """Decodes or scores the examples of data sets with several checkpoints, and computes metrics.

    Metrics are written as summaries eval/<task>/<metric>; <task>_inputs, <task>_targets and
    <task>_<step>_predictions (or _scores) are files of text beside them.

    Args:
      estimator: what `get_estimator` returns.
      vocabulary: a Vocabulary, or a pair of them.
      sequence_length: an integer, or a dictionary of them by feature.
      batch_size: the number of examples decoded together.
      dataset_split: such as "validation".
      model_dir: the directory of checkpoints.
      eval_dataset_fn: a function of `sequence_length`, `vocabulary` and `dataset_split` that
        returns a list of EvalDatasets. Their `postprocess_fn` is called with a text, `example` and
        `is_target`, and is None if texts are compared as they are; their `metric_fns` with lists
        of targets and of predictions or scores.
      eval_summary_dir: the directory to write to; <split>_eval in `model_dir` if None.
      eval_checkpoint_step: which checkpoints; see `get_checkpoint_iterator`.
      eval_with_score: whether to score targets instead of decoding.
      output_eval_examples: whether to write text files of examples.
      eval_dir_suffix: a suffix of the directory name.
      score_with_estimator_fn: a function like `score_with_estimator`, which returns scores, or a
        tuple that begins with them.

    Raises:
      ValueError: there are no data, or not a score for each example.
    """
    datasets = call_dataset_fn(
        eval_dataset_fn, "eval_dataset_fn", sequence_length, vocabulary, dataset_split
    )
    # What no metric is computed from need not be decoded.
    datasets = [d for d in datasets if d.metric_fns]
    if not datasets:
        raise ValueError(
            f"eval_model: there is nothing to evaluate: no data for the split {dataset_split!r}, "
            "or none with metric_fns"
        )
    directory = _with_suffix(
        eval_summary_dir or os.path.join(model_dir, f"{dataset_split}_eval"), eval_dir_suffix
    )
    tf.io.gfile.makedirs(directory)
    tasks = []
    # Once for all checkpoints, as examples and targets do not depend on weights.
    for dataset in datasets:
        examples = list(examples_of(dataset.dataset_fn))
        if dataset.postprocess_fn is None:
            tf.logging.info("%s has no postprocess_fn: its metrics compare texts", dataset.name)
        targets = postprocessed_targets(dataset, examples, vocabulary)
        tasks.append((dataset, examples, targets))
        if output_eval_examples:
            name = os.path.join(directory, dataset.name)
            write_lines_to_file(targets, f"{name}_targets")
            write_lines_to_file(texts_of_inputs(examples, vocabulary), f"{name}_inputs")
    count = sum(len(examples) for _, examples, _ in tasks)
    # All data sets in one input, so that each checkpoint is restored only once.
    input_fn = combined_input_fn([d.dataset_fn for d in datasets], batch_size)
    for path in get_checkpoint_iterator(eval_checkpoint_step, model_dir):
        step = get_step_from_checkpoint_path(path)
        if eval_with_score:
            # It goes through checkpoints itself, and by one step it is given just this one.
            # With its own `score_postprocess_fn`: functions may lack that parameter, or pass more.
            outputs = _scores_of(
                score_with_estimator_fn(
                    estimator, input_fn, step, model_dir, vocabulary, num_examples=count
                ),
                count,
            )
        else:
            # The rows that fill up the last batch have outputs too, which belong to no example.
            outputs = list(itertools.islice(decode(estimator, input_fn, vocabulary, path), count))
        _evaluate_outputs(tasks, outputs, step, directory, eval_with_score, output_eval_examples)


def perplexity_eval(
    estimator: mtf_estimator.tpu.TPUEstimator,
    vocabulary: Vocabularies,
    sequence_length: Lengths,
    batch_size: int,
    dataset_split: str,
    model_dir: str,
    eval_dataset_fn: Callable[..., Sequence[Any]],
    eval_checkpoint_step: Steps,
    perplexity_eval_steps: int,
    eval_dir_suffix: Optional[str] = None,
) -> None:
    """Computes the perplexity of the targets of data sets, with several checkpoints.

    Args:
      estimator: what `get_estimator` returns.
      vocabulary: a Vocabulary, or a pair of them.
      sequence_length: an integer, or a dictionary of them by feature.
      batch_size: the number of examples in a batch.
      dataset_split: such as "validation".
      model_dir: the directory of checkpoints.
      eval_dataset_fn: see `eval_model`.
      eval_checkpoint_step: which checkpoints; see `get_checkpoint_iterator`.
      perplexity_eval_steps: the number of batches; data sets that are too short are padded with
        zeros.
      eval_dir_suffix: a suffix of the name of the summary directory.

    Raises:
      ValueError: there are no data.
    """
    datasets = call_dataset_fn(
        eval_dataset_fn, "eval_dataset_fn", sequence_length, vocabulary, dataset_split
    )
    if not datasets:
        raise ValueError(f"perplexity_eval: there are no data for the split {dataset_split!r}")
    for path in get_checkpoint_iterator(eval_checkpoint_step, model_dir):
        for dataset in datasets:

            def input_fn(params: object = None, dataset: EvalDataset = dataset) -> tf.data.Dataset:
                del params
                ds = dataset.dataset_fn().map(model_features)
                # Endless zeros fill up these batches; they have no weight in metrics.
                ds = transformer_dataset.pad_dataset_with_zeroed_out_examples(ds)
                # Nothing is dropped, as these data have no end; it makes the size of batches
                # static.
                return ds.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

            # Evaluations write to a directory by this name: those of other numbers of examples have
            # their own.
            name = _with_suffix(
                f"{dataset.name}_{dataset_split}_{perplexity_eval_steps * batch_size}",
                eval_dir_suffix,
            )
            estimator.evaluate(
                input_fn, steps=perplexity_eval_steps, checkpoint_path=path, name=name
            )

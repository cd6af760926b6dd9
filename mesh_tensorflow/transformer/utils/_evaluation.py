"""Evaluation of checkpoints: log likelihoods of given targets, metrics of outputs, perplexity."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow import estimator as mtf_estimator
from mesh_tensorflow.estimator import summaries
from mesh_tensorflow.transformer import dataset as transformer_dataset
from mesh_tensorflow.transformer.utils._data import (
    arrays_input_fn,
    as_text,
    call_dataset_fn,
    combined_input_fn,
    encode_delimited_lm,
    encode_inputs,
    examples_of,
    get_inputs_from_file,
    lines_text,
    model_features,
    temporary_name,
    write_lines_to_file,
)
from mesh_tensorflow.transformer.utils._decode import (
    dataset_of,
    decode,
    postprocessed,
    postprocessed_targets,
    texts_of_inputs,
)
from mesh_tensorflow.transformer.utils._settings import (
    MODULE,
    Lengths,
    Steps,
    get_checkpoint_iterator,
    get_step_from_checkpoint_path,
    inputs_length,
    length_of_feature,
    targets_vocabulary,
)
from mesh_tensorflow.transformer.vocabulary import vocabulary_of_feature

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset import EvalDataset, Vocabularies
    from mesh_tensorflow.transformer.vocabulary import Vocabulary


# -- files of scores


Examples = Sequence[Mapping[str, Any]]


def _decoded(vocabulary: Vocabulary, ids: list[int]) -> Any:
    """Decodes ids; keeps other results of a vocabulary, such as lists of words, unchanged."""
    text = vocabulary.decode(ids)
    return as_text(text) if isinstance(text, (bytes, str)) else text


def maybe_add_pretokenized_features(
    examples: Examples, vocabulary: Vocabularies
) -> list[dict[str, Any]]:
    """Adds decoded texts to examples.

    Args:
      examples: dictionaries with arrays "inputs" or "targets".
      vocabulary: a Vocabulary, or a pair of them.

    Returns:
      Dictionaries with additional keys: <key>_pretokenized, and for negative ids, which are not
      scored, <key>_neg_pretokenized.
    """
    result = []
    for example in examples:
        added = dict(example)
        for key in ("inputs", "targets"):
            own, name = vocabulary_of_feature(vocabulary, key), f"{key}_pretokenized"
            if key not in example or name in example:
                continue
            if isinstance(example[key], (bytes, str)):
                added[name] = as_text(example[key])
                continue
            ids = np.asarray(example[key]).tolist()
            added[name] = _decoded(own, [i for i in ids if i > 0])
            # Negative ids are given, not predicted: their text is no part of what the score is of.
            negative = [-i for i in ids if i < 0]
            if negative:
                added[f"{key}_neg_pretokenized"] = _decoded(own, negative)
        result.append(added)
    return result


def _checked(results: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    results = list(results)
    if not results:
        raise ValueError("No examples were scored.")
    return results


@gin.configurable(module=MODULE)
def save_scores(
    results: Examples,
    vocabulary: Vocabularies,
    scores_filename: Optional[str] = None,
    save_example_text: bool = True,
) -> Union[list[float], tuple[list[Any], ...]]:
    """Writes scores and their texts, one example per line.

    Files are `scores_filename` with ".scores", ".targets", ".lengths" (the number of ids of
    targets), and ".inputs", if examples have inputs.

    Args:
      results: dictionaries with "scores", "targets" and perhaps "inputs".
      vocabulary: a Vocabulary, or a pair of them.
      scores_filename: the path of the files without these suffixes; None to write no files.
      save_example_text: whether to write and return texts besides scores.

    Returns:
      A list of scores; with `save_example_text` a tuple of lists: scores, inputs if there are any,
      targets.

    Raises:
      ValueError: there are no examples.
    """
    results = _checked(results)
    scores = [r["scores"] for r in results]
    files: dict[str, list[Any]] = {"scores": [f"{float(s):g}" for s in scores]}
    texts: list[list[Any]] = []
    if save_example_text:
        lengths = [
            len(r["targets"].split())
            if isinstance(r["targets"], (bytes, str))
            else int(np.count_nonzero(r["targets"]))
            for r in results
        ]
        results = maybe_add_pretokenized_features(results, vocabulary)
        for key in ("inputs", "targets"):
            if f"{key}_pretokenized" in results[0]:
                files[key] = [as_text(r[f"{key}_pretokenized"]) for r in results]
                texts.append(files[key])
        files["lengths"] = [str(n) for n in lengths]
    if scores_filename:
        for name, lines in files.items():
            write_lines_to_file(lines, f"{scores_filename}.{name}")
    return (scores, *texts) if save_example_text else scores


def _bytes_feature(text: object) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[as_text(text).encode("utf-8")]))


def _read_text(example: Mapping[str, Any]) -> str:
    """Returns the text that an example's targets follow: given ids, or inputs, or nothing."""
    # A language model has its inputs among its targets, as negative ids.
    for key in ("targets_neg_pretokenized", "inputs_pretokenized"):
        if key in example:
            return as_text(example[key])
    return ""


@gin.configurable(module=MODULE)
def save_scores_to_tfrecords(
    results: Examples,
    vocabulary: Vocabularies,
    scores_filename: str,
    shard_idx: int = 0,
    save_ids_only: bool = False,
) -> None:
    """Writes scores to a file of tf.Examples, `scores_filename`_<shard>.tfrecord.

    Each has "score", and the texts "input" (of inputs, or of the ids given before targets) and
    "target".

    Args:
      results: dictionaries with "scores", "targets" and perhaps "inputs".
      vocabulary: a Vocabulary, or a pair of them.
      scores_filename: the path of the file, without suffixes.
      shard_idx: the number of the file.
      save_ids_only: whether "input" is only what comes before the first space of the text, which
        is an identifier in data sets that begin inputs with one.

    Raises:
      ValueError: there are no examples.
    """
    results = maybe_add_pretokenized_features(_checked(results), vocabulary)
    path = f"{scores_filename}_{shard_idx}.tfrecord"
    # Unique, so that a process that scores the same examples does not write into this file.
    temporary = temporary_name(path)
    with tf.io.TFRecordWriter(temporary) as writer:
        for r in results:
            source = _read_text(r)
            score = tf.train.FloatList(value=[float(r.get("scores", 0.0))])
            features = {
                "input": _bytes_feature(source.split(" ", 1)[0] if save_ids_only else source),
                "target": _bytes_feature(r["targets_pretokenized"]),
                "score": tf.train.Feature(float_list=score),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    # Under its own name a shard is whole, so that others may read those that exist.
    tf.io.gfile.rename(temporary, path, overwrite=True)


# -- scores by checkpoint


@gin.configurable(module=MODULE)
def compute_log_likelihoods(
    estimator: mtf_estimator.tpu.TPUEstimator,
    input_fn: Callable[..., Any],
    checkpoint_path: Optional[str] = None,
) -> list[float]:
    """Returns the log likelihoods of targets.

    Args:
      estimator: what `get_estimator` returns with `score_in_predict_mode`.
      input_fn: an input function of features.
      checkpoint_path: a checkpoint; the latest if None.

    Returns:
      A list of floats.
    """
    predictions = estimator.predict(input_fn, checkpoint_path=checkpoint_path)
    return [float(p["scores"]) for p in predictions]


def _scored(
    estimator: mtf_estimator.tpu.TPUEstimator,
    input_fn: Callable[..., Any],
    path: str,
    num_examples: Optional[int],
) -> Iterator[dict[str, Any]]:
    """Yields scores with their targets, without the examples that fill up the last batch."""
    results = estimator.predict(input_fn, checkpoint_path=path)
    # An example whose targets are all padding is one: without it, later scores would stand in the
    # lines of other inputs. If their number is not known, those at the end are taken as filling.
    return itertools.islice(results if num_examples is not None else _filled(results), num_examples)


def _filled(results: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields results up to the last one that has targets."""
    empty: list[dict[str, Any]] = []
    for r in results:
        # Kept back until a later result with targets shows that these are examples too.
        empty.append(r)
        if np.any(r["targets"]):
            yield from empty
            empty.clear()


@gin.configurable(module=MODULE)
def score_with_estimator(
    estimator: mtf_estimator.tpu.TPUEstimator,
    input_fn: Callable[..., Any],
    eval_checkpoint_step: Steps,
    model_dir: str,
    vocabulary: Vocabularies,
    score_postprocess_fn: Callable[..., Any] = save_scores,
    num_examples: Optional[int] = None,
) -> Any:
    """Scores the examples of an input function with each of several checkpoints.

    Args:
      estimator: what `get_estimator` returns with `score_in_predict_mode`.
      input_fn: an input function of features.
      eval_checkpoint_step: which checkpoints; see `get_checkpoint_iterator`.
      model_dir: their directory.
      vocabulary: a Vocabulary, or a pair of them.
      score_postprocess_fn: a function of (results, vocabulary), where results are dictionaries with
        "scores" and "targets".
      num_examples: the number of examples, if the input function pads the last batch.

    Returns:
      What `score_postprocess_fn` returned for the last checkpoint.
    """
    returned = None
    for path in get_checkpoint_iterator(eval_checkpoint_step, model_dir):
        results = list(_scored(estimator, input_fn, path, num_examples))
        returned = score_postprocess_fn(results, vocabulary)
    return returned


@gin.configurable(module=MODULE)
def score_with_estimator_lazy(
    estimator: mtf_estimator.tpu.TPUEstimator,
    input_fn: Callable[..., Any],
    eval_checkpoint_step: Steps,
    model_dir: str,
    vocabulary: Vocabularies,
    score_postprocess_fn: Callable[..., Any] = save_scores_to_tfrecords,
    num_examples: Optional[int] = None,
    num_examples_per_shard: int = 100000,
) -> None:
    """Like `score_with_estimator`, but in shards of examples.

    Args:
      estimator: what `get_estimator` returns with `score_in_predict_mode`.
      input_fn: an input function of features.
      eval_checkpoint_step: which checkpoints; see `get_checkpoint_iterator`.
      model_dir: their directory.
      vocabulary: a Vocabulary, or a pair of them.
      score_postprocess_fn: a function of (results, vocabulary, shard_idx=).
      num_examples: the number of examples, if the input function pads the last batch.
      num_examples_per_shard: the number of examples in a shard; 0 for one shard of all.
    """
    for path in get_checkpoint_iterator(eval_checkpoint_step, model_dir):
        # An iterator, so that one shard at a time is in memory.
        results = _scored(estimator, input_fn, path, num_examples)
        for shard in itertools.count():
            some = list(itertools.islice(results, num_examples_per_shard or None))
            if not some:
                break
            score_postprocess_fn(some, vocabulary, shard_idx=shard)


def _score(
    score_fn: Callable[..., Any],
    postprocess_fn: Optional[Callable[..., Any]],
    where: tuple[Any, ...],
    **count: int,
) -> Any:
    """Calls a function that scores; without a `postprocess_fn` it prints, or has one of its own."""
    # By position, whatever a function of the user's own calls its arguments.
    if postprocess_fn is not None:
        return score_fn(*where, postprocess_fn, *count.values())
    if score_fn is not score_with_estimator:
        return score_fn(*where, **count)
    estimator, input_fn, steps, model_dir, vocabulary = where
    scores: list[float] = []
    for path in get_checkpoint_iterator(steps, model_dir):
        results: Examples = _checked(_scored(estimator, input_fn, path, count.get("num_examples")))
        # Once for both uses below: `save_scores` keeps texts that are there.
        results = maybe_add_pretokenized_features(results, vocabulary)
        filename = os.path.join(model_dir, f"scores_{get_step_from_checkpoint_path(path)}")
        save_scores(results, vocabulary, filename)
        scores = [float(r["scores"]) for r in results]
        for score, r in zip(scores, results):
            # A line of a file, which has its own end.
            print(f"{score:.6g}\t{lines_text([r['targets_pretokenized']])}", end="")
        tf.logging.info("Scores are in %s.scores, and their texts beside it", filename)
    return scores


# -- what is scored: pairs of lines, and data sets


def _lines(source: Union[str, Sequence[str], None]) -> list[str]:
    """Returns the given strings, or the lines of the named file."""
    return get_inputs_from_file(source) if isinstance(source, str) else list(source or [])


def _source(given: object, name: str) -> str:
    """Returns the source of lines in error messages: a file, or the argument name."""
    return given if isinstance(given, str) else f"score_from_strings: {name}"


def _paired(inputs: Sequence[str], targets: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Returns as many inputs as targets, where each input has several, or one stands for all.

    Raises:
      ValueError: the numbers do not allow it.
    """
    if len(targets) == 1:
        targets = [*targets] * len(inputs)
    repeats, rest = divmod(len(targets), len(inputs) or 1)
    if rest or not repeats or not inputs:
        raise ValueError(
            f"score_from_strings: there are {len(inputs)} inputs, but {len(targets)} targets; give "
            "each input one target, or each the same number in a row, or all of them one"
        )
    # The targets of an input are consecutive, as `decode_from_file(repeats=)` writes them.
    return [line for line in inputs for _ in range(repeats)], targets


@gin.configurable(module=MODULE)
def score_from_strings(
    estimator: mtf_estimator.tpu.TPUEstimator,
    vocabulary: Vocabularies,
    model_type: str,
    batch_size: int,
    sequence_length: Lengths,
    model_dir: str,
    eval_checkpoint_step: Steps,
    inputs: Union[str, Sequence[str], None] = gin.REQUIRED,
    targets: Union[str, Sequence[str]] = gin.REQUIRED,
    score_postprocess_fn: Optional[Callable[..., Any]] = None,
    eos_id: int = 1,
    score_eos: bool = True,
    score_with_estimator_fn: Callable[..., Any] = score_with_estimator,
) -> Any:
    """Scores pairs of lines.

    An input may have several targets, in a row, if all inputs have as many; a single target is that
    of all inputs.

    Args:
      estimator: what `get_estimator` returns with `score_in_predict_mode`.
      vocabulary: a Vocabulary, or a pair of them.
      model_type: such as "lm", for which inputs are prefixes of the targets and may be None.
      batch_size: the number of pairs scored together.
      sequence_length: an integer, or a dictionary of them by feature.
      model_dir: the directory of checkpoints.
      eval_checkpoint_step: which checkpoints; see `get_checkpoint_iterator`.
      inputs: strings, or the path of a file.
      targets: strings, or the path of a file.
      score_postprocess_fn: see `score_with_estimator`; if None, scores and targets are printed, and
        written to files `model_dir`/scores_<step>.scores, .targets and others; or what another
        `score_with_estimator_fn` does by itself.
      eos_id: the id of EOS.
      score_eos: whether EOS at the end of targets is scored.
      score_with_estimator_fn: `score_with_estimator` or the lazy one.

    Returns:
      What `score_with_estimator_fn` returns; the scores if there is no `score_postprocess_fn`.

    Raises:
      ValueError: inputs and targets cannot be paired, or a line of a file is empty (see
        `get_inputs_from_file`) or not valid UTF-8, or a line cannot be encoded; the message has its
        number, and its file if there is one.
    """
    sources = (_source(inputs, "inputs"), _source(targets, "targets"))
    inputs, targets = _lines(inputs), _lines(targets)
    # A language model alone may have targets without inputs.
    if inputs or model_type != "lm":
        inputs, targets = _paired(inputs, targets)
    length = length_of_feature(sequence_length, "targets")
    own = targets_vocabulary(vocabulary)
    features: dict[str, np.ndarray] = {}
    if model_type == "lm":
        # One sequence: inputs are a prefix of negative ids, which are read and have no score.
        # Lines come first in `sources` and prefixes second, and here the targets are the lines.
        features["targets"] = encode_inputs(
            targets, own, model_type, batch_size, length, eos_id, inputs, sources[::-1]
        )
    elif model_type == "delimited_lm":
        # Inputs and targets stand in one row, each with the end that delimits it.
        both = inputs_length(sequence_length) + length
        features["targets"] = encode_delimited_lm(
            inputs, targets, vocabulary, batch_size, both, eos_id, score_eos, sources
        )
    else:
        features["inputs"] = encode_inputs(
            inputs, vocabulary, model_type, batch_size, sequence_length, eos_id, None, sources
        )
        # The type by which no EOS is appended.
        kind = model_type if score_eos else "lm"
        features["targets"] = encode_inputs(
            targets, own, kind, batch_size, length, eos_id, None, sources[1:]
        )
    input_fn = arrays_input_fn(features, batch_size)
    where = (estimator, input_fn, eval_checkpoint_step, model_dir, vocabulary)
    return _score(score_with_estimator_fn, score_postprocess_fn, where, num_examples=len(targets))


@gin.configurable(module=MODULE)
def score_from_dataset(
    estimator: mtf_estimator.tpu.TPUEstimator,
    vocabulary: Vocabularies,
    batch_size: int,
    sequence_length: Lengths,
    model_dir: str,
    eval_checkpoint_step: Steps,
    dataset_split: str,
    score_dataset_fn: Optional[Callable[..., Sequence[Any]]] = None,
    score_postprocess_fn: Optional[Callable[..., Any]] = None,
    score_with_estimator_fn: Callable[..., Any] = score_with_estimator,
) -> Any:
    """Scores the targets of data sets.

    Args:
      estimator: what `get_estimator` returns with `score_in_predict_mode`.
      vocabulary: a Vocabulary, or a pair of them.
      batch_size: the number of examples scored together.
      sequence_length: an integer, or a dictionary of them by feature.
      model_dir: the directory of checkpoints.
      eval_checkpoint_step: which checkpoints; see `get_checkpoint_iterator`.
      dataset_split: such as "validation".
      score_dataset_fn: a function of `sequence_length`, `vocabulary` and `dataset_split` that
        returns a list of EvalDatasets.
      score_postprocess_fn: see `score_with_estimator`; if None, scores and targets are printed, and
        written to files `model_dir`/scores_<step>.scores, .targets and others; or what another
        `score_with_estimator_fn` does by itself.
      score_with_estimator_fn: `score_with_estimator` or the lazy one.

    Returns:
      What `score_with_estimator_fn` returns; the scores if there is no `score_postprocess_fn`.

    Raises:
      ValueError: there are no data.
    """
    datasets = call_dataset_fn(
        score_dataset_fn, "score_dataset_fn", sequence_length, vocabulary, dataset_split
    )
    if not datasets:
        raise ValueError(f"score_from_dataset: there are no data for the split {dataset_split!r}")

    input_fn = combined_input_fn(
        [functools.partial(dataset_of, d, sequence_length) for d in datasets], batch_size
    )
    where = (estimator, input_fn, eval_checkpoint_step, model_dir, vocabulary)
    # Without a number of examples, which is not known before the data sets have been read.
    return _score(score_with_estimator_fn, score_postprocess_fn, where)


# -- metrics of outputs, scores and perplexity


def _write_metrics(
    directory: str, name: str, metrics: Union[Mapping[str, float], tf.Summary], step: int
) -> None:
    if isinstance(metrics, tf.Summary):
        # The function's own, such as a histogram or a text, under tags of its own.
        summaries.write(directory, step, metrics.value)
        return
    values = {}
    for metric, value in metrics.items():
        tag = f"eval/{name}/{metric}"
        if np.ndim(value) or not np.issubdtype(np.asarray(value).dtype, np.number):
            tf.logging.warning("%s at step %d is no number: %r", tag, step, value)
            continue
        tf.logging.info("%s at step %d: %.3f", tag, step, value)
        values[tag] = float(value)
    summaries.write(directory, step, summaries.scalars(values))


def _evaluate_outputs(
    tasks: Sequence[tuple[EvalDataset, list[dict[str, Any]], list[Any]]],
    outputs: list[Any],
    step: int,
    directory: str,
    write: bool,
) -> None:
    """Calls the metric functions of each data set with its targets and its part of the outputs."""
    # Outputs of all data sets are in a row, as one input function has read them.
    rest = iter(outputs)
    for dataset, examples, targets in tasks:
        own = list(itertools.islice(rest, len(examples)))
        # Scores too: by the example, a function can say what it is that the score is of.
        own = [postprocessed(dataset, output, example=e) for output, e in zip(own, examples)]
        if write:
            write_lines_to_file(own, os.path.join(directory, f"{dataset.name}_{step}_predictions"))
        for metric_fn in dataset.metric_fns:
            _write_metrics(directory, dataset.name, metric_fn(targets, own), step)


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


def longest_examples(examples: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Returns the lengths of the longest inputs and targets, at least 1.

    Args:
      examples: dictionaries of arrays, "inputs" and "targets" among them.
    """
    lengths = {"inputs": 1, "targets": 1}
    for example in examples:
        for key in lengths.keys() & example.keys():
            lengths[key] = max(lengths[key], len(example[key]))
    return lengths


def evaluated_datasets(
    eval_dataset_fn: Optional[Callable[..., Sequence[Any]]],
    sequence_length: Optional[Lengths],
    vocabulary: Vocabularies,
    dataset_split: str,
) -> list[EvalDataset]:
    """Returns the data sets that have metrics; what no metric is computed from is not decoded.

    Args:
      eval_dataset_fn: see `eval_model`.
      sequence_length: an integer, or a dictionary of them by feature; None for whole examples.
      vocabulary: a Vocabulary, or a pair of them.
      dataset_split: such as "validation".

    Raises:
      ValueError: there are no data at all.
    """
    datasets = call_dataset_fn(
        eval_dataset_fn, "eval_dataset_fn", sequence_length, vocabulary, dataset_split
    )
    if not datasets:
        raise ValueError(
            f"eval_model: there is nothing to evaluate: no data for the split {dataset_split!r}"
        )
    # They may be plain tuples.
    datasets = [transformer_dataset.EvalDataset(*d) for d in datasets]
    without = [d.name for d in datasets if not d.metric_fns]
    if without:
        tf.logging.warning("Not evaluated, as they have no metric_fns: %s", ", ".join(without))
    return [d for d in datasets if d.metric_fns]


def eval_model(
    estimator: Union[mtf_estimator.tpu.TPUEstimator, Callable[..., Any]],
    vocabulary: Vocabularies,
    sequence_length: Optional[Lengths],
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
    <task>_<step>_predictions are files of text beside them.

    Args:
      estimator: what `get_estimator` returns; or a function that returns it, of `sequence_length`
        if that is None.
      vocabulary: a Vocabulary, or a pair of them.
      sequence_length: an integer, or a dictionary of them by feature; None for the lengths of the
        longest inputs and targets.
      batch_size: the number of examples decoded together.
      dataset_split: such as "validation".
      model_dir: the directory of checkpoints.
      eval_dataset_fn: a function of `sequence_length`, `vocabulary` and `dataset_split` that
        returns a list of EvalDatasets. Their `dataset_fn` is called without arguments for whole
        examples, and, if it takes one, with a `sequence_length` for those that the model gets.
        Their `postprocess_fn` is called with the text of a target, `example` and `is_target`, and
        with an output or a score and `example`; it is None if these are compared as they are.
        Their `metric_fns` are called with lists of both, and return numbers by name, or a
        tf.Summary. Those without `metric_fns` are left out.
      eval_summary_dir: the directory to write to; <split>_eval in `model_dir` if None.
      eval_checkpoint_step: which checkpoints; see `get_checkpoint_iterator`.
      eval_with_score: whether to score targets instead of decoding.
      output_eval_examples: whether to write text files of examples.
      eval_dir_suffix: a suffix of the directory name.
      score_with_estimator_fn: a function like `score_with_estimator`, which returns scores, or a
        tuple that begins with them.

    Raises:
      ValueError: there are no data, no length and no function that makes the estimator, or not a
        score for each example.
    """
    if sequence_length is None and not callable(estimator):
        raise ValueError(
            "eval_model: without a sequence_length, that of the longest example is used: give a "
            "function of sequence_length that returns the estimator, or the length"
        )
    datasets = evaluated_datasets(eval_dataset_fn, sequence_length, vocabulary, dataset_split)
    if not datasets:
        return
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
    every = [example for _, examples, _ in tasks for example in examples]
    count = len(every)
    if callable(estimator):
        own = {} if sequence_length is not None else {"sequence_length": longest_examples(every)}
        sequence_length = own.get("sequence_length", sequence_length)
        estimator = estimator(**own)
    # All data sets in one input, so that each checkpoint is restored only once.
    assert sequence_length is not None
    input_fn = combined_input_fn(
        [functools.partial(dataset_of, d, sequence_length) for d in datasets], batch_size
    )
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
        _evaluate_outputs(tasks, outputs, step, directory, output_eval_examples)


def perplexity_eval(
    estimator: mtf_estimator.tpu.TPUEstimator,
    vocabulary: Vocabularies,
    sequence_length: Lengths,
    batch_size: int,
    dataset_split: str,
    model_dir: str,
    eval_dataset_fn: Optional[Callable[..., Sequence[Any]]],
    eval_checkpoint_step: Steps,
    perplexity_eval_steps: int,
    eval_dir_suffix: Optional[str] = None,
    train_dataset_fn: Optional[Callable[..., tf.data.Dataset]] = None,
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
      train_dataset_fn: the data to train on, which are evaluated under the name "eval" if there is
        no `eval_dataset_fn`.

    Raises:
      ValueError: there are no data.
    """
    where = sequence_length, vocabulary, dataset_split
    if eval_dataset_fn is None and train_dataset_fn is not None:
        tf.logging.warning("There is no eval_dataset_fn: evaluating on train_dataset_fn")
        make = functools.partial(call_dataset_fn, train_dataset_fn, "train_dataset_fn", *where)
        datasets = [transformer_dataset.EvalDataset("eval", make, None, ())]
    else:
        datasets = [
            transformer_dataset.EvalDataset(*d)
            for d in call_dataset_fn(eval_dataset_fn, "eval_dataset_fn", *where)
        ]
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

"""Files of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow.transformer.utils._data.text import (
    as_text,
    temporary_name,
    write_lines_to_file,
)
from mesh_tensorflow.transformer.utils._data.vocabularies import (
    inputs_vocabulary,
    targets_vocabulary,
)
from mesh_tensorflow.transformer.utils._flags import MODULE

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset._features import Vocabularies
    from mesh_tensorflow.transformer.vocabulary import Vocabulary

__all__ = [
    "maybe_add_pretokenized_features",
    "print_and_save_scores",
    "save_scores",
    "save_scores_to_tfrecords",
]

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
    vocabularies = {
        "inputs": inputs_vocabulary(vocabulary),
        "targets": targets_vocabulary(vocabulary),
    }
    result = []
    for example in examples:
        added = dict(example)
        for key, own in vocabularies.items():
            name = f"{key}_pretokenized"
            if key not in example or name in example:
                continue
            if isinstance(example[key], (bytes, str)):
                added[name] = as_text(example[key])
                continue
            ids = np.asarray(example[key]).tolist()
            added[name] = _decoded(own, [i for i in ids if i > 0])
            negative = [-i for i in ids if i < 0]
            if negative:
                added[f"{key}_neg_pretokenized"] = _decoded(own, negative)
        result.append(added)
    return result


def _checked(results: Examples) -> list[Mapping[str, Any]]:
    results = list(results)
    if not results:
        raise ValueError("No examples were scored.")
    return results


def _in_one_line(text: object) -> str:
    return as_text(text).replace("\n", " ")


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
                texts.append([as_text(r[f"{key}_pretokenized"]) for r in results])
                files[key] = [_in_one_line(text) for text in texts[-1]]
        files["lengths"] = [str(n) for n in lengths]
    if scores_filename:
        for name, lines in files.items():
            write_lines_to_file(lines, f"{scores_filename}.{name}")
    return (scores, *texts) if save_example_text else scores


def print_and_save_scores(
    results: Examples, vocabulary: Vocabularies, filename: str
) -> list[float]:
    """Prints a line for each example, its score and its target, and writes files.

    See `save_scores` for the files.

    Args:
      results: dictionaries with "scores", "targets" and perhaps "inputs".
      vocabulary: a Vocabulary, or a pair of them.
      filename: the path of the files, without their suffixes.

    Returns:
      The scores.
    """
    results = maybe_add_pretokenized_features(_checked(results), vocabulary)
    save_scores(results, vocabulary, filename)
    for r in results:
        print(f"{float(r['scores']):.6g}\t{_in_one_line(r['targets_pretokenized'])}")
    tf.logging.info("Scores are in %s.scores, and their texts beside it", filename)
    return [float(r["scores"]) for r in results]


def _bytes_feature(text: object) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[as_text(text).encode("utf-8")]))


def _ids_feature(ids: Sequence[int]) -> tf.train.Feature:
    return tf.train.Feature(
        int64_list=tf.train.Int64List(value=[int(i) for i in np.ravel(ids) if i])
    )


@gin.configurable(module=MODULE)
def save_scores_to_tfrecords(
    results: Examples,
    vocabulary: Vocabularies,
    scores_filename: str,
    shard_idx: int = 0,
    save_ids_only: bool = False,
) -> None:
    """Writes scores to a file of tf.Examples, `scores_filename`_<shard>.tfrecord.

    Each has "score", and "input" and "target" as text or as ids.

    Args:
      results: dictionaries with "scores", "targets" and perhaps "inputs".
      vocabulary: a Vocabulary, or a pair of them.
      scores_filename: the path of the file, without suffixes.
      shard_idx: the number of the file.
      save_ids_only: whether to write ids instead of texts.

    Raises:
      ValueError: there are no examples.
    """
    results = _checked(results)
    if not save_ids_only:
        results = list(maybe_add_pretokenized_features(results, vocabulary))
    path = f"{scores_filename}_{shard_idx}.tfrecord"
    temporary = temporary_name(path)
    with tf.io.TFRecordWriter(temporary) as writer:
        for r in results:
            features = {
                "score": tf.train.Feature(float_list=tf.train.FloatList(value=[float(r["scores"])]))
            }
            for key, name in (("inputs", "input"), ("targets", "target")):
                if save_ids_only:
                    features[name] = _ids_feature(r.get(key, ()))
                else:
                    features[name] = _bytes_feature(r.get(f"{key}_pretokenized", ""))
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    tf.io.gfile.rename(temporary, path, overwrite=True)

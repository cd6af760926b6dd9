"""Exports models for serving, from text to text or scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow import estimator as mtf_estimator
from mesh_tensorflow.transformer.utils._data.batching import (
    Lengths,
    inputs_length,
    length_of_feature,
)
from mesh_tensorflow.transformer.utils._data.vocabularies import (
    inputs_vocabulary,
    targets_vocabulary,
)
from mesh_tensorflow.transformer.utils._outputs.predict_step import ROWS

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset._features import Vocabularies
    from mesh_tensorflow.transformer.vocabulary import Vocabulary

__all__ = ["export_model"]

_EOS = 1


def _encoded(
    vocabulary: Vocabulary, texts: tf.Tensor, length: int, batch_size: int, eos: bool
) -> tf.Tensor:
    """Returns the ids of texts [rows], padded to [batch_size, length]."""

    def row(text: tf.Tensor) -> tf.Tensor:
        ids = tf.cast(vocabulary.encode_tf(text), tf.int32)
        ids = tf.concat([ids, [_EOS]], 0) if eos else ids
        ids = ids[:length]
        return tf.pad(ids, [[0, length - tf.size(ids)]])

    ids = tf.map_fn(row, texts, fn_output_signature=tf.TensorSpec([length], tf.int32))
    missing = batch_size - tf.shape(texts)[0]
    return tf.ensure_shape(tf.pad(ids, [[0, missing], [0, 0]]), [batch_size, length])


def _targets_after_inputs(targets: tf.Tensor, inputs: tf.Tensor, length: int) -> tf.Tensor:
    """Prepends inputs to targets, as negative ids, which are not scored."""
    rows = []
    for before, after in zip(tf.unstack(inputs), tf.unstack(targets)):
        ids = tf.concat([-tf.boolean_mask(before, before > 0), after], 0)[:length]
        rows.append(tf.pad(ids, [[0, length - tf.size(ids)]]))
    return tf.ensure_shape(tf.stack(rows), [targets.shape[0], length])


def export_model(
    estimator: mtf_estimator.tpu.TPUEstimator,
    export_dir: str,
    vocabulary: Vocabularies,
    sequence_length: Lengths,
    model_type: str,
    eval_with_score: bool = False,
    batch_size: int = 1,
    checkpoint_path: Optional[str] = None,
) -> bytes:
    """Writes a SavedModel with text inputs.

    Its signature "serving_default" takes "inputs", up to `batch_size` strings, and returns their
    "outputs", and "inputs" as the model received them. With scores it also takes "targets", and
    returns "scores" and "targets".

    Args:
      estimator: what `get_estimator` returns, with `score_in_predict_mode` for scores.
      export_dir: a directory; the model is written to a new subdirectory, named by a timestamp.
      vocabulary: a Vocabulary, or a pair of them, with `encode_tf`, which encodes in a graph.
      sequence_length: an integer, or a dictionary of them by feature.
      model_type: such as "lm".
      eval_with_score: whether the model scores targets instead of decoding.
      batch_size: the largest number of texts in a call.
      checkpoint_path: a checkpoint; the latest if None.

    Returns:
      The new directory, as bytes.

    Raises:
      ValueError: there is no checkpoint.
    """
    eos = model_type != "lm"

    def receiver_fn() -> Any:
        texts = {"inputs": tf.placeholder(tf.string, [None], "inputs")}
        if eval_with_score:
            texts["targets"] = tf.placeholder(tf.string, [None], "targets")
        rows = tf.shape(texts["inputs"])[0]
        checks = [
            tf.debugging.assert_less_equal(
                rows, batch_size, message=f"the model was exported for {batch_size} texts at a time"
            )
        ]
        with tf.control_dependencies(checks):
            features = {
                ROWS: tf.identity(rows),
                "inputs": _encoded(
                    inputs_vocabulary(vocabulary),
                    texts["inputs"],
                    inputs_length(sequence_length),
                    batch_size,
                    eos,
                ),
            }
            if eval_with_score:
                length = length_of_feature(sequence_length, "targets")
                features["targets"] = _encoded(
                    targets_vocabulary(vocabulary), texts["targets"], length, batch_size, eos
                )
        if eval_with_score and model_type == "lm":
            features["targets"] = _targets_after_inputs(
                features["targets"], features.pop("inputs"), length
            )
        return mtf_estimator.export.ServingInputReceiver(features, texts)

    return estimator.export_saved_model(export_dir, receiver_fn, checkpoint_path=checkpoint_path)

"""The model function in prediction: decoding, or scoring of given targets; exports of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import estimator as mtf_estimator
from mesh_tensorflow import layers
from mesh_tensorflow.estimator import ModeKeys
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.utils._data import (
    check_features,
    clean_decodes,
    dynamic_text2self,
    import_features,
)
from mesh_tensorflow.transformer.utils._program import (
    Outputs,
    call_model,
    check_length,
    get_variable_dtype,
    is_unitransformer,
    outside_program,
    run_on_mesh,
)
from mesh_tensorflow.transformer.utils._settings import (
    Lengths,
    Settings,
    inputs_length,
    inputs_vocabulary,
    length_of_feature,
    targets_vocabulary,
)

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset._features import Vocabularies
    from mesh_tensorflow.transformer.vocabulary import Vocabulary


def target_weights(targets: mtf.Tensor, model_type: str) -> mtf.Tensor:
    """Returns 1 at targets to predict, and 0 at padding and given ids.

    Args:
      targets: an integer Tensor [..., length]; negative ids are given.
      model_type: such as "lm"; for "delimited_lm" the inputs are given.

    Returns:
      A float32 Tensor of the same shape.
    """
    weights = mtf.cast(mtf.greater(targets, 0), tf.float32)
    if model_type == "delimited_lm":
        inputs = transformer.delimited_lm_inputs_mask(targets)
        weights *= mtf.cast(mtf.logical_not(inputs), tf.float32)
    return weights


def negative_log_prob(logits: mtf.Tensor, targets: mtf.Tensor) -> mtf.Tensor:
    """Returns the negative log likelihood of each target.

    Args:
      logits: a Tensor [..., length, vocab].
      targets: an integer Tensor [..., length].

    Returns:
      A float32 Tensor [..., length].
    """
    vocab = logits.shape.dims[-1]
    # They are summed over a row, for which the 8 significant bits of bfloat16 are too few.
    logits = mtf.cast(logits, tf.float32)
    # Given ids are negative; they have no weight, so that any label will do.
    labels = mtf.one_hot(mtf.maximum(targets, 0), vocab, dtype=tf.float32)
    return layers.softmax_cross_entropy_with_logits(logits, labels, vocab)


def evaluated(
    logits: mtf.Tensor, features: Mapping[str, mtf.Tensor], model_type: str
) -> dict[str, mtf.Tensor]:
    """Returns the per-target values that metrics are computed from.

    Args:
      logits: a Tensor [..., length, vocab].
      features: Tensors by name, "targets" [..., length] among them.
      model_type: such as "lm".

    Returns:
      A dictionary of Tensors [..., length].
    """
    targets = features["targets"]
    return {
        "targets": targets,
        "weights": target_weights(targets, model_type),
        "predicted": mtf.argmax(logits, logits.shape.dims[-1]),
        "negative_log_prob": negative_log_prob(logits, targets),
    }


# A feature of exported models: the number of rows of the batch that are not padding.
ROWS = "_rows"


def imported(
    settings: Settings, mesh: mtf.Mesh, features: Mapping[str, tf.Tensor], mode: str
) -> dict[str, mtf.Tensor]:
    """Imports features; joins those of a delimited language model to one sequence.

    Args:
      settings: the arguments of the model function.
      mesh: a Mesh.
      features: integer tf Tensors [rows, length] by name.
      mode: a ModeKeys value.

    Returns:
      A dictionary of Tensors [batch..., length].

    Raises:
      ValueError: targets, or inputs with targets, are longer than the model's positions.
    """
    has_targets = mode != ModeKeys.PREDICT or settings.score_in_predict_mode
    delimited = has_targets and settings.model_type == "delimited_lm"
    joins = delimited and (mode != ModeKeys.PREDICT or "inputs" in features)
    lengths = settings.sequence_length
    if delimited and not joins:
        # They were joined when they were encoded.
        lengths = settings.joined_length
    elif mode == ModeKeys.PREDICT and isinstance(lengths, Mapping):
        lengths = {"inputs": inputs_length(lengths), **lengths}
    mtf_features = import_features(mesh, features, settings.batch_dims(mode), lengths)
    if joins:
        mtf_features = dynamic_text2self(mtf_features)
    elif has_targets and settings.model_type == "lm":
        # A language model reads its targets, shifted by one, and would read these in their place.
        mtf_features.pop("inputs", None)
    if has_targets:
        length = max(x.shape.dims[-1].size for x in mtf_features.values())
        check_length(settings.transformer_model, length)
    return mtf_features


# -- scores


def _scoring_program(
    settings: Settings, mesh: mtf.Mesh, features: Mapping[str, tf.Tensor]
) -> Outputs:
    mtf_features = imported(settings, mesh, features, ModeKeys.PREDICT)
    targets = mtf_features["targets"]
    logits, _ = call_model(
        settings.transformer_model, mtf_features, "score", get_variable_dtype(), compute_loss=False
    )
    scores = -negative_log_prob(logits, targets) * target_weights(targets, settings.model_type)
    batch = settings.batch_dims(ModeKeys.PREDICT)
    # log p(targets) of a row = the sum of log p(target | those before it) over its positions.
    return Outputs({"scores": mtf.reduce_sum(scores, output_shape=batch), "targets": targets})


# -- decoding


def _decoding_program(
    settings: Settings, mesh: mtf.Mesh, features: Mapping[str, tf.Tensor]
) -> Outputs:
    mtf_features = imported(settings, mesh, features, ModeKeys.PREDICT)
    inputs, model = mtf_features["inputs"], settings.transformer_model
    length = inputs.shape.dims[-1]
    variable_dtype = get_variable_dtype()
    if settings.predict_fn is not None:
        outputs = settings.predict_fn(
            model=model, features=mtf_features, variable_dtype=variable_dtype
        )
    elif settings.model_type == "aligned":
        check_length(model, length.size)
        logits, _ = call_model(
            model, {"inputs": inputs}, ModeKeys.PREDICT, variable_dtype, compute_loss=False
        )
        # The most likely id at each position.
        outputs = mtf.argmax(logits, logits.shape.dims[-1])
    elif is_unitransformer(model):
        check_length(model, settings.joined_length)
        more, start = settings.joined_length - length.size, inputs
        if more > 0:
            # Decoding fills in zeros after the inputs, and so needs some.
            start = mtf.pad(inputs, [0, more], length.name)
        outputs = model.sample_autoregressive(
            start, variable_dtype=variable_dtype, remove_partial_sequences=True
        )
    else:
        check_length(model, length.size)
        outputs = model.decode(inputs, variable_dtype=variable_dtype)
    return Outputs({"inputs": inputs, "outputs": outputs})


# -- the specification


def _texts(settings: Settings, predictions: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Replaces ids by text in predictions, if the vocabularies can decode in a graph."""
    targets = targets_vocabulary(settings.vocabulary)
    by_name = {
        "inputs": inputs_vocabulary(settings.vocabulary),
        "outputs": targets,
        "targets": targets,
    }
    result = dict(predictions)
    for name in predictions.keys() & by_name.keys():
        decode = getattr(by_name[name], "decode_tf", None)
        if decode is None:
            tf.logging.warning("%s are exported as ids: the vocabulary has no decode_tf", name)
        else:
            # Ids that are given and not scored are negative.
            result[name] = decode(clean_decodes(tf.abs(predictions[name])))
    return result


def prediction_spec(settings: Settings, features: Mapping[str, tf.Tensor]) -> Any:
    """Builds the EstimatorSpec for prediction.

    Args:
      settings: the arguments of the model function.
      features: tf Tensors by name.

    Returns:
      An EstimatorSpec whose predictions are ids: "outputs" and their "inputs", or "scores" and
      their "targets". Exported models return text.
    """
    mode = ModeKeys.PREDICT
    check_features(features, settings.model_type, mode, settings.score_in_predict_mode)
    program = _scoring_program if settings.score_in_predict_mode else _decoding_program
    results = run_on_mesh(settings, lambda mesh: program(settings, mesh, features))
    predictions = dict(results.tensors)
    if not settings.score_in_predict_mode:
        # A row may go on after its EOS until all rows have ended; the ids there mean nothing.
        predictions["outputs"] = clean_decodes(predictions["outputs"])
    exported: Optional[dict[str, Any]] = None
    if ROWS in features:
        # The batch of an exported model has a fixed size: rows that fill it up are left out.
        there = {name: x[: features[ROWS]] for name, x in predictions.items()}
        predictions = _texts(settings, there)
        exported = {"serving_default": mtf_estimator.export.PredictOutput(predictions)}
    with outside_program(settings):
        hooks = [mtf.MtfRestoreHook(results.lowering)]
    spec = mtf_estimator.tpu.TPUEstimatorSpec(
        mode, predictions=predictions, export_outputs=exported, prediction_hooks=hooks
    )
    return spec.as_estimator_spec() if settings.context is None else spec


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

    # Row by row, since `encode_tf` takes a single text.
    ids = tf.map_fn(row, texts, fn_output_signature=tf.TensorSpec([length], tf.int32))
    missing = batch_size - tf.shape(texts)[0]
    return tf.ensure_shape(tf.pad(ids, [[0, missing], [0, 0]]), [batch_size, length])


def _targets_after_inputs(targets: tf.Tensor, inputs: tf.Tensor, length: int) -> tf.Tensor:
    """Prepends inputs to targets, as negative ids, which are not scored."""
    rows = []
    # By rows, since in each the targets begin where its own inputs end.
    for before, after in zip(tf.unstack(inputs), tf.unstack(targets)):
        ids = tf.concat([-tf.boolean_mask(before, before > 0), after], 0)[:length]
        rows.append(tf.pad(ids, [[0, length - tf.size(ids)]]))
    return tf.ensure_shape(tf.stack(rows), [targets.shape[0], length])


# -- export


def export_model(
    estimator: mtf_estimator.tpu.TPUEstimator,
    export_dir: str,
    vocabulary: Vocabularies,
    sequence_length: Lengths,
    model_type: str,
    eval_with_score: bool = False,
    batch_size: int = 1,
    checkpoint_path: Optional[str] = None,
    *,
    any_batch: bool = False,
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
      any_batch: whether a call may have any number of texts, which are computed `batch_size` at a
        time.

    Returns:
      The new directory, as bytes.

    Raises:
      ValueError: there is no checkpoint.
    """
    # A language model goes on after its inputs, which for it have no end.
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
                # The identity waits for the check; what was made outside of the context does not.
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

    return estimator.export_saved_model(
        export_dir,
        receiver_fn,
        checkpoint_path=checkpoint_path,
        rows_at_a_time=batch_size if any_batch else None,
    )

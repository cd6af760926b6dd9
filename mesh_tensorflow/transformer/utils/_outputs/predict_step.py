"""The model function in prediction: decoding of inputs, or scoring of given targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow.transformer.utils._data.batching import Lengths
from mesh_tensorflow.transformer.utils._data.features import (
    check_features,
    dynamic_text2self,
    import_features,
)
from mesh_tensorflow.transformer.utils._data.text import clean_decodes
from mesh_tensorflow.transformer.utils._data.vocabularies import (
    inputs_vocabulary,
    targets_vocabulary,
)
from mesh_tensorflow.transformer.utils._model import call_model, check_length, is_unitransformer
from mesh_tensorflow.transformer.utils._outputs.token_scores import (
    negative_log_prob,
    target_weights,
)
from mesh_tensorflow.transformer.utils._program import Outputs, outside_program, run_on_mesh
from mesh_tensorflow.transformer.utils._settings import Settings
from mesh_tensorflow.transformer.utils._training.variables import get_variable_dtype

__all__ = ["ROWS", "prediction_spec"]

# A feature of exported models: the number of rows of the batch that are not padding.
ROWS = "_rows"


def _lengths(settings: Settings) -> Lengths:
    """Returns the lengths of features; targets of a delimited language model include the inputs."""
    if settings.scoring and settings.model_type == "delimited_lm":
        return settings.joined_length
    if isinstance(settings.sequence_length, Mapping) and "inputs" not in settings.sequence_length:
        return {**settings.sequence_length, "inputs": settings.sequence_length["targets"]}
    return settings.sequence_length


def _imported(
    settings: Settings, mesh: mtf.Mesh, features: Mapping[str, tf.Tensor]
) -> dict[str, mtf.Tensor]:
    dims = settings.batch_dims(training=False).dims
    if settings.scoring and settings.model_type == "delimited_lm" and "inputs" in features:
        separate = import_features(mesh, features, dims, settings.sequence_length)
        return dynamic_text2self(separate)
    return import_features(mesh, features, dims, _lengths(settings))


# -- scores


def _scoring_program(
    settings: Settings, mesh: mtf.Mesh, features: Mapping[str, tf.Tensor]
) -> Outputs:
    mtf_features = _imported(settings, mesh, features)
    if settings.model_type == "lm":
        mtf_features.pop("inputs", None)
    targets = mtf_features["targets"]
    check_length(settings.model, targets.shape.dims[-1].size)
    logits, _ = call_model(
        settings.model, mtf_features, "score", get_variable_dtype(), compute_loss=False
    )
    scores = -negative_log_prob(logits, targets) * target_weights(targets, settings.model_type)
    batch = settings.batch_dims(training=False).batch
    return Outputs({"scores": mtf.reduce_sum(scores, output_shape=[batch]), "targets": targets})


# -- decoding


def _continued(
    settings: Settings, features: Mapping[str, mtf.Tensor], variable_dtype: mtf.VariableDType
) -> mtf.Tensor:
    """Decodes a continuation with a language model."""
    inputs = features["inputs"]
    length = inputs.shape.dims[-1]
    more = settings.joined_length - length.size
    check_length(settings.model, settings.joined_length)
    if more > 0:
        inputs = mtf.pad(inputs, [0, more], length.name)
    return settings.model.sample_autoregressive(
        inputs, variable_dtype=variable_dtype, remove_partial_sequences=True
    )


def _aligned(
    settings: Settings, features: Mapping[str, mtf.Tensor], variable_dtype: mtf.VariableDType
) -> mtf.Tensor:
    """Returns the most likely id at each position."""
    inputs = features["inputs"]
    check_length(settings.model, inputs.shape.dims[-1].size)
    logits, _ = settings.model.call_simple(
        inputs=inputs,
        targets=None,
        compute_loss=False,
        mode=estimator.ModeKeys.PREDICT,
        variable_dtype=variable_dtype,
    )
    return mtf.argmax(logits, logits.shape.dims[-1])


def _decoded(
    settings: Settings, features: Mapping[str, mtf.Tensor], variable_dtype: mtf.VariableDType
) -> mtf.Tensor:
    """Decodes outputs with an encoder-decoder model."""
    check_length(settings.model, features["inputs"].shape.dims[-1].size)
    return settings.model.decode(features["inputs"], variable_dtype=variable_dtype)


def _decoder(settings: Settings) -> Callable[..., mtf.Tensor]:
    if settings.model_type == "aligned":
        return _aligned
    return _continued if is_unitransformer(settings.model) else _decoded


def _decoding_program(
    settings: Settings, mesh: mtf.Mesh, features: Mapping[str, tf.Tensor]
) -> Outputs:
    mtf_features = _imported(settings, mesh, features)
    variable_dtype = get_variable_dtype()
    if settings.predict_fn is not None:
        outputs = settings.predict_fn(
            model=settings.model, features=mtf_features, variable_dtype=variable_dtype
        )
    else:
        outputs = _decoder(settings)(settings, mtf_features, variable_dtype)
    return Outputs({"inputs": mtf_features["inputs"], "outputs": outputs})


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
    mode = estimator.ModeKeys.PREDICT
    check_features(features, settings.model_type, mode, settings.scoring)
    program = _scoring_program if settings.scoring else _decoding_program
    results = run_on_mesh(settings, lambda mesh: program(settings, mesh, features))
    predictions = dict(results.tensors)
    if not settings.scoring:
        predictions["outputs"] = clean_decodes(predictions["outputs"])
    exported: Optional[dict[str, Any]] = None
    if ROWS in features:
        there = {name: x[: features[ROWS]] for name, x in predictions.items()}
        predictions = _texts(settings, there)
        exported = {"serving_default": estimator.export.PredictOutput(predictions)}
    with outside_program(settings):
        hooks = [mtf.MtfRestoreHook(results.lowering)]
    if settings.context is not None:
        return estimator.tpu.TPUEstimatorSpec(mode, predictions=predictions, prediction_hooks=hooks)
    return estimator.EstimatorSpec(
        mode, predictions=predictions, export_outputs=exported, prediction_hooks=hooks
    )

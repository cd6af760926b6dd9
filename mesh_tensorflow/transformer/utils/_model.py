"""Builds models by type, and calls them on batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional, Union

import gin

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer import transformer

__all__ = ["build_model", "call_model", "check_length", "is_unitransformer"]

# By model type: how to build the model from (input_vocab_size, output_vocab_size, layout,
# mesh_shape).
_LANGUAGE_MODELS = {"lm": True, "delimited_lm": True, "aligned": False}
_MODELS = {
    "bitransformer": transformer.make_bitransformer,
    "bi_student_teacher": transformer.make_bi_student_teacher,
}
_SMALLEST_VOCABULARY = 3  # padding, EOS and one token


def build_model(
    model_type: str = "bitransformer",
    input_vocab_size: int = gin.REQUIRED,
    output_vocab_size: int = gin.REQUIRED,
    layout_rules: Union[mtf.LayoutRules, str, None] = None,
    mesh_shape: Union[mtf.Shape, str, None] = None,
) -> Any:
    """Builds a model, whose layers gin configures.

    Args:
      model_type: "bitransformer", "bi_student_teacher" (a bitransformer that learns from another),
        "lm" (one stack, each position attends to those before it), "delimited_lm" (the same for
        pairs of inputs and targets) or "aligned" (one stack, all positions attend to each other).
      input_vocab_size: the number of ids of inputs.
      output_vocab_size: the number of ids of targets.
      layout_rules: the layout that the model will be lowered with.
      mesh_shape: the mesh.

    Returns:
      A Unitransformer, Bitransformer or StudentTeacher.

    Raises:
      ValueError: the type is unknown, or a vocabulary is too small.
    """
    for name, size in (("input", input_vocab_size), ("output", output_vocab_size)):
        if size is not gin.REQUIRED and size < _SMALLEST_VOCABULARY:
            raise ValueError(
                f"build_model: the {name} vocabulary is too small, with vocab_size {size}: id 0 is "
                "padding and id 1 the end of a sequence, and there should be others"
            )
    sizes: dict[str, Any] = {
        "input_vocab_size": input_vocab_size,
        "output_vocab_size": output_vocab_size,
    }
    where: dict[str, Any] = {
        "layout": None if layout_rules is None else mtf.convert_to_layout_rules(layout_rules),
        "mesh_shape": None if mesh_shape is None else mtf.convert_to_shape(mesh_shape),
    }
    if model_type in _MODELS:
        return _MODELS[model_type](**sizes, **where)
    if model_type not in _LANGUAGE_MODELS:
        raise ValueError(
            f"build_model: unknown model_type {model_type!r}; it should be one of "
            f"{', '.join(map(repr, [*_MODELS, *_LANGUAGE_MODELS]))}"
        )
    autoregressive = _LANGUAGE_MODELS[model_type]
    return transformer.Unitransformer(
        transformer.make_layer_stack(), autoregressive=autoregressive, **sizes, **where
    )


def is_unitransformer(model: Any) -> bool:
    """Returns whether a model, or its student, is a single stack.

    Args:
      model: a model.

    Returns:
      A bool.
    """
    return isinstance(getattr(model, "student", model), transformer.Unitransformer)


def check_length(model: Any, length: int) -> None:
    """Checks that sequences do not exceed a model's number of positions.

    Args:
      model: a model.
      length: the length of the longest sequences.

    Raises:
      ValueError: they do.
    """
    model = getattr(model, "student", model)
    parts: list[Any] = (
        [model]
        if is_unitransformer(model)
        else [getattr(model, name, None) for name in ("encoder", "decoder")]
    )
    for part in parts:
        positions = getattr(part, "max_length_dim", None)
        embedded = any(
            getattr(part, name, False)
            for name in ("positional_embedding", "sinusoid_positional_embedding")
        )
        if positions is not None and embedded and length > positions.size:
            raise ValueError(
                f"a sequence of length {length} (utils.run.sequence_length) is longer than the "
                f"{positions.size} positions of {part.name!r}; bind Unitransformer.max_length to "
                "a larger number, or make sequences shorter"
            )


def _unitransformer_arguments(features: Mapping[str, mtf.Tensor]) -> dict[str, Any]:
    targets = features["targets"]
    segments = features.get("targets_segmentation")
    inputs = features.get("inputs")
    if inputs is None:
        inputs = transformer.autoregressive_inputs(targets, sequence_id=segments)
    return {
        "inputs": inputs,
        "targets": targets,
        "sequence_id": segments,
        "subsequence_id": features.get("targets_subsegmentation"),
        "position": features.get("targets_position"),
    }


def _bitransformer_arguments(features: Mapping[str, mtf.Tensor]) -> dict[str, Any]:
    return {
        "inputs": features["inputs"],
        "targets": features["targets"],
        "encoder_sequence_id": features.get("inputs_segmentation"),
        "decoder_sequence_id": features.get("targets_segmentation"),
        "decoder_subsequence_id": features.get("targets_subsegmentation"),
        "encoder_position": features.get("inputs_position"),
        "decoder_position": features.get("targets_position"),
    }


def call_model(
    model: Any,
    features: Mapping[str, mtf.Tensor],
    mode: str,
    variable_dtype: mtf.VariableDType,
    compute_loss: bool,
    num_microbatches: int = 1,
) -> tuple[mtf.Tensor, Optional[mtf.Tensor]]:
    """Calls a model on all positions of a batch at once.

    Args:
      model: a model.
      features: Tensors by name.
      mode: a mode of the model, such as "train" or "score".
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      compute_loss: whether to compute the loss.
      num_microbatches: the number of microbatches that the batch is divided into.

    Returns:
      (logits [batch..., length, vocab], loss), where the loss is None without `compute_loss`.
    """
    arguments = _unitransformer_arguments if is_unitransformer(model) else _bitransformer_arguments
    return model.call_simple(
        **arguments(features),
        compute_loss=compute_loss,
        mode=mode,
        variable_dtype=variable_dtype,
        num_microbatches=num_microbatches,
    )

"""Beam search with a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import beam_search as mtf_beam_search
from mesh_tensorflow._core.errors import tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.transformer.transformer._decoding.incremental import IncrementalModel

__all__ = ["beam_search"]


@leaves_no_node
def beam_search(
    model: Any,
    inputs: mtf.Tensor,
    decode_length: Any,
    variable_dtype: mtf.VariableDType = mtf.VariableDType(tf.float32),
    encoder_output: Optional[mtf.Tensor] = None,
    encoder_sequence_id: Optional[mtf.Tensor] = None,
    encoder_inputs: Optional[mtf.Tensor] = None,
    alpha: float = 0.6,
    shared_params: Optional[dict] = None,
    encoder_layer_outputs: Optional[list] = None,
    bos_id: int = 0,
) -> mtf.Tensor:
    """Returns the best sequences that a beam search finds; see `mtf.beam_search.beam_search`.

    Args:
      model: a Unitransformer, autoregressive.
      inputs: an int32 Tensor with dimensions [batch..., beam, length], zeros.
      decode_length: the largest length, an int or an int32 scalar Tensor.
      variable_dtype: a VariableDType.
      encoder_output: a Tensor with dimensions [batch..., memory_length, d_model], or None.
      encoder_sequence_id: a Tensor with dimensions [batch..., memory_length], or None.
      encoder_inputs: a Tensor with dimensions [batch..., memory_length], or None.
      alpha: a number; the larger, the longer the preferred sequences.
      shared_params: a dictionary with an "embedding" and a "positional_embedding" that are used
        in place of the model's own; or None.
      encoder_layer_outputs: a list of Tensors, or None.
      bos_id: an int, what the model is fed before the first id.

    Returns:
      A Tensor with dimensions [batch..., length].

    Raises:
      ValueError: the model is not autoregressive, or the inputs have no beams.
    """
    if len(inputs.shape) < 3:
        raise ValueError(
            f"{model.name}: for a beam search, inputs must have the dimensions [batch, beam, "
            f"length], not {tensors_text([inputs])}"
        )
    *rows, beam_dim, length_dim = inputs.shape.dims
    mesh = inputs.mesh
    incremental = IncrementalModel(
        model, inputs, mtf.zeros(mesh, mtf.Shape([*rows, beam_dim]), tf.int32), variable_dtype,
        encoder_output, encoder_sequence_id, encoder_inputs, shared_params, encoder_layer_outputs,
        bos_id,
    )  # fmt: skip

    def logits_fn(
        step: mtf.Tensor, ids: mtf.Tensor, states: Sequence[mtf.Tensor]
    ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
        last = mtf.gather(ids, step - 1, length_dim)
        if bos_id:
            last += mtf.to_int32(mtf.equal(step, 0)) * bos_id
        return incremental.step(step, last, states)

    ids, _ = mtf_beam_search.beam_search(
        logits_fn,
        inputs,
        alpha,
        states=[mtf.zeros(mesh, x.shape, x.dtype) for x in incremental.states],
        decode_length=decode_length,
        dtype=tf.float32,
        layout=model.layout,
        mesh_shape=model.mesh_shape,
    )
    return mtf.gather(ids, mtf.constant(mesh, 0, dtype=tf.int32), beam_dim)

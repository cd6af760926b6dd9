"""Decoding with an encoder and a decoder: sequences for sequences."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import tensors_text
from mesh_tensorflow._core.graph import leaves_no_node

__all__ = ["decode"]


@leaves_no_node
def decode(
    model: Any,
    inputs: mtf.Tensor,
    variable_dtype: mtf.VariableDType = mtf.VariableDType(tf.float32),
    beam_size: int = 1,
    alpha: float = 0.6,
    temperature: float = 0.0,
    sampling_keep_top_k: int = -1,
    decode_length_multiplier: float = 1.5,
    decode_length_constant: float = 10,
    max_decode_length: Optional[int] = None,
) -> mtf.Tensor:
    """Returns sequences for inputs, by sampling or by beam search.

    Args:
      model: a Bitransformer.
      inputs: an int32 Tensor with dimensions [batch..., length], ids, 0 at padding.
      variable_dtype: a VariableDType.
      beam_size: an int; 1 for sampling.
      alpha: a number, for beam search: the larger, the longer the preferred sequences.
      temperature: a number, for sampling: 0.0 takes the id with the largest logit, 1.0 draws from
        the softmax.
      sampling_keep_top_k: an int, for sampling: an id is drawn from so many with the largest
        logits; -1 for all.
      decode_length_multiplier: a number, for beam search: sequences are at most so many times as
        long as the longest of the inputs,
      decode_length_constant: a number: and so much longer.
      max_decode_length: an int, the size of the result's length; that of the inputs if None.

    Returns:
      An int32 Tensor with dimensions [batch..., length].

    Raises:
      ValueError: `beam_size` is not positive, or the inputs are no ids.
    """
    if beam_size < 1:
        raise ValueError(f"decode: beam_size must be 1, for sampling, or more, not {beam_size}")
    if not inputs.shape.dims or not inputs.dtype.is_integer:
        raise ValueError(
            "decode: inputs must be an integer Tensor with dimensions [batch..., length], not "
            f"{tensors_text([inputs])}"
        )
    *rows, length_dim = inputs.shape.dims
    if max_decode_length is None:
        decode_dim = length_dim
    else:
        decode_dim = mtf.Dimension("length", max_decode_length)
    encoded = _encode(model, inputs, variable_dtype)
    if beam_size == 1:
        return model.decoder.sample_autoregressive(
            mtf.zeros(inputs.mesh, mtf.Shape([*rows, decode_dim]), tf.int32),
            temperature=temperature,
            variable_dtype=variable_dtype,
            has_partial_sequences=False,
            sampling_keep_top_k=sampling_keep_top_k,
            **encoded,
        )
    lengths = mtf.reduce_sum(mtf.to_float(mtf.not_equal(inputs, 0)), reduced_dim=length_dim)
    longest = mtf.reduce_max(lengths, output_shape=[])
    decode_length = longest * float(decode_length_multiplier) + float(decode_length_constant)
    beams = mtf.Shape([*rows, mtf.Dimension("beam", beam_size), decode_dim])
    return model.decoder.beam_search(
        mtf.zeros(inputs.mesh, beams, tf.int32),
        mtf.to_int32(decode_length),
        variable_dtype=variable_dtype,
        alpha=alpha,
        **encoded,
    )


def _encode(model: Any, inputs: mtf.Tensor, variable_dtype: mtf.VariableDType) -> dict[str, Any]:
    """Returns the decoder's arguments that depend on the inputs."""
    sequence_id = mtf.minimum(inputs, 1)
    shared_params = model._shared_params(inputs.mesh, variable_dtype)
    layer_outputs: list[mtf.Tensor] = []
    output, _ = model.encoder.call_simple(
        inputs,
        None,
        compute_loss=False,
        mode="infer",
        variable_dtype=variable_dtype,
        sequence_id=sequence_id,
        shared_params=shared_params,
        layer_outputs=layer_outputs,
    )
    to_memory = layers.rename_length_to_memory_length
    return {
        "encoder_output": to_memory(output),
        "encoder_sequence_id": to_memory(model._encoded_sequence_id(sequence_id)),
        "encoder_inputs": to_memory(inputs),
        "encoder_layer_outputs": layer_outputs,
        "shared_params": shared_params,
    }

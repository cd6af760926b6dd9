"""Decoding with an encoder and a decoder: sequences for sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.transformer.transformer._context import EncoderOutputs
from mesh_tensorflow.transformer.transformer._decoding.speculative import Draft, draft_scope

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._models.bitransformer import Bitransformer

__all__ = ["decode"]


@leaves_no_node
def decode(
    model: Bitransformer,
    inputs: mtf.Tensor,
    variable_dtype: mtf.VariableDType,
    beam_size: int,
    alpha: float,
    temperature: float,
    sampling_keep_top_k: int,
    decode_length_multiplier: float,
    decode_length_constant: float,
    max_decode_length: Optional[int],
    draft_model: Optional[Bitransformer] = None,
    num_draft_ids: int = 4,
) -> mtf.Tensor:
    """Returns output sequences, by sampling or beam search; see `Bitransformer.decode`.

    Args:
      model: a Bitransformer.
      inputs: an int32 Tensor with dimensions [batch..., length], ids, 0 at padding.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      beam_size: an int; 1 for sampling.
      alpha: a number, the length penalty of a beam search.
      temperature: a number, for sampling; 0.0 for beam search.
      sampling_keep_top_k: an int, for sampling; -1 for beam search.
      decode_length_multiplier: a number, for beam search.
      decode_length_constant: a number, for beam search.
      max_decode_length: an int, the size of the result's length; that of the inputs if None.
      draft_model: a Bitransformer that proposes ids, for sampling; or None.
      num_draft_ids: an int, how many ids it proposes in a step.

    Returns:
      An int32 Tensor with dimensions [batch..., length].

    Raises:
      ValueError: `beam_size` is not positive, `inputs` is not such a Tensor, or there is a draft,
        a temperature or a number of ids to sample from for a beam search.
    """
    if beam_size < 1:
        raise ValueError(f"decode: beam_size must be 1, for sampling, or more, not {beam_size}")
    if beam_size > 1 and draft_model is not None:
        raise ValueError(
            f"decode: draft_model proposes ids for sampling, but beam_size is {beam_size}; set "
            "beam_size=1, or leave draft_model out"
        )
    if beam_size > 1 and (temperature != 0.0 or sampling_keep_top_k != -1):
        raise ValueError(
            f"decode: a beam search draws no ids, so temperature={temperature} and "
            f"sampling_keep_top_k={sampling_keep_top_k} have no meaning with beam_size="
            f"{beam_size}; set beam_size=1 to sample, or temperature=0.0 and "
            "sampling_keep_top_k=-1 for beams"
        )
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
        draft = None
        if draft_model is not None:
            with draft_scope():
                read = _encode(draft_model, inputs, variable_dtype)
            draft = Draft(draft_model.decoder, read, num_draft_ids)
        return model.decoder.sample_autoregressive(
            mtf.zeros(inputs.mesh, mtf.Shape([*rows, decode_dim]), tf.int32),
            temperature=temperature,
            variable_dtype=variable_dtype,
            has_partial_sequences=False,
            sampling_keep_top_k=sampling_keep_top_k,
            draft_model=draft,
            **encoded.arguments(),
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
        **encoded.arguments(),
    )


def _encode(
    model: Bitransformer, inputs: mtf.Tensor, variable_dtype: mtf.VariableDType
) -> EncoderOutputs:
    """Calls the encoder and returns what the decoder reads from it."""
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
    return model._encoder_outputs(output, sequence_id, inputs, layer_outputs, shared_params)

"""Beam search with a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import beam_search as mtf_beam_search
from mesh_tensorflow._core.errors import tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.transformer.transformer._decoding.incremental import IncrementalModel
from mesh_tensorflow.transformer.transformer._encoder_outputs import EncoderOutputs

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._models.unitransformer import Unitransformer

__all__ = ["beam_search"]


@leaves_no_node
def beam_search(
    model: Unitransformer,
    inputs: mtf.Tensor,
    decode_length: Union[int, mtf.Tensor],
    variable_dtype: mtf.VariableDType,
    encoded: EncoderOutputs,
    alpha: float = 0.6,
    bos_id: int = 0,
) -> mtf.Tensor:
    """Returns the best sequences found by a beam search; see `Unitransformer.beam_search`.

    Args:
      model: an autoregressive Unitransformer.
      inputs: an int32 Tensor with dimensions [batch..., beam, length], all zeros.
      decode_length: the maximum length, an int or an int32 scalar Tensor.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      encoded: the EncoderOutputs that the model reads.
      alpha: a number, the length penalty: larger values prefer longer sequences.
      bos_id: an int, the id that is fed before the first one.

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
    start = mtf.zeros(mesh, mtf.Shape([*rows, beam_dim]), tf.int32)
    incremental = IncrementalModel(model, inputs, start, variable_dtype, encoded, bos_id)

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

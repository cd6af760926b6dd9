"""What a decoder reads from its encoder."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf

__all__ = ["EncoderOutputs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderOutputs:
    """What a decoder reads from its encoder; all fields are None without one.

    The fields have the names of the corresponding arguments of Context, of
    `Unitransformer.sample_autoregressive` and of `Unitransformer.beam_search`.

    Attributes:
      encoder_output: a Tensor with dimensions [batch..., memory_length, d_model].
      encoder_sequence_id: an integer Tensor with dimensions [batch..., memory_length].
      encoder_inputs: an integer Tensor with dimensions [batch..., memory_length], the ids.
      encoder_layer_outputs: a list of Tensors, the outputs of the encoder's layers.
      shared_params: a dictionary with the "embedding" and the "positional_embedding" to use
        instead of the decoder's own. It may be set without an encoder, too.
    """

    encoder_output: Optional[mtf.Tensor] = None
    encoder_sequence_id: Optional[mtf.Tensor] = None
    encoder_inputs: Optional[mtf.Tensor] = None
    encoder_layer_outputs: Optional[list[mtf.Tensor]] = None
    shared_params: Optional[dict[str, Any]] = None

    def arguments(self) -> dict[str, Any]:
        """Returns the fields as keyword arguments."""
        # Not dataclasses.asdict, which would copy the lists and dictionaries.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

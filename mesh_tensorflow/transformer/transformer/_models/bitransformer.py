"""Models with an encoder and a decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.transformer.transformer._context import EncoderOutputs
from mesh_tensorflow.transformer.transformer._decoding import decode as _decode
from mesh_tensorflow.transformer.transformer._inputs import (
    autoregressive_inputs,
    get_vocab_embedding_cls,
)

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._models.unitransformer import Unitransformer

__all__ = ["Bitransformer"]


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
class Bitransformer:
    """A sequence-to-sequence model of an encoder and a decoder.

    Vaswani et al., "Attention is all you need" (2017).
    """

    def __init__(
        self, encoder: Unitransformer, decoder: Unitransformer, shared_embedding: bool = True
    ) -> None:
        """Creates the model.

        Args:
          encoder: a Unitransformer without an output vocabulary.
          decoder: an autoregressive Unitransformer, whose layers read the encoder's output.
          shared_embedding: whether both use the same embeddings of ids and of positions, which
            are in the variable scope `shared`. Positional embeddings are shared only if both
            have the same maximum length.

        Raises:
          ValueError: the embeddings cannot be shared.
        """
        self.encoder = encoder
        self.decoder = decoder
        self.shared_embedding = shared_embedding
        sides = [[m.input_vocab_dim, m.model_dim] for m in (encoder, decoder)]
        if shared_embedding and sides[0] != sides[1]:
            raise ValueError(
                "Bitransformer: shared_embedding needs encoder and decoder of one d_model and "
                f"one input vocabulary, got {dims_text(sides[0])} and {dims_text(sides[1])}; "
                "change the sizes, or set shared_embedding=False"
            )

    @property
    def output_vocab_dim(self) -> Optional[mtf.Dimension]:
        """The output vocabulary of the decoder."""
        return self.decoder.output_vocab_dim

    @property
    def z_loss(self) -> float:
        """The coefficient of the decoder's z loss."""
        return self.decoder.z_loss

    def loss_denominator(self, targets: mtf.Tensor, num_microbatches: int) -> float:
        """Returns the denominator of the decoder's loss.

        Args:
          targets: a Tensor with dimensions [batch..., length].
          num_microbatches: an integer, the number of microbatches.
        """
        return self.decoder.loss_denominator(targets, num_microbatches)

    def _encoded_sequence_id(self, encoder_sequence_id: mtf.Tensor) -> mtf.Tensor:
        """Returns the sequence_id of the encoder's output; here that of its input."""
        return encoder_sequence_id

    def _shared_params(
        self, mesh: mtf.Mesh, variable_dtype: mtf.VariableDType
    ) -> Optional[dict[str, Any]]:
        """Returns the embeddings that encoder and decoder share, in the scope `shared`, or None."""
        if not self.shared_embedding:
            return None
        encoder, decoder = self.encoder, self.decoder
        params = {}
        with tf.variable_scope("shared"):
            params["embedding"] = get_vocab_embedding_cls()(
                mesh,
                encoder.input_vocab_dim,
                encoder.model_dim,
                variable_dtype,
                name="embedding",
                ensemble_dim=encoder.ensemble_dim,
            )
            max_length_dim = encoder.max_length_dim
            sinusoids = [m.sinusoid_positional_embedding for m in (encoder, decoder)]
            if (
                max_length_dim is not None
                and max_length_dim == decoder.max_length_dim
                and not all(sinusoids)
            ):
                params["positional_embedding"] = layers.embedding_weights(
                    mesh,
                    max_length_dim,
                    encoder.model_dim,
                    variable_dtype,
                    "positional_embedding",
                    ensemble_dim=encoder.ensemble_dim,
                )
        return params

    def _encoder_outputs(
        self,
        output: mtf.Tensor,
        sequence_id: mtf.Tensor,
        inputs: mtf.Tensor,
        layer_outputs: list[mtf.Tensor],
        shared_params: Optional[dict[str, Any]],
    ) -> EncoderOutputs:
        """Returns what the decoder reads, with the encoder's length as its memory length."""
        to_memory = layers.rename_length_to_memory_length
        return EncoderOutputs(
            encoder_output=to_memory(output),
            encoder_sequence_id=to_memory(self._encoded_sequence_id(sequence_id)),
            encoder_inputs=to_memory(inputs),
            encoder_layer_outputs=layer_outputs,
            shared_params=shared_params,
        )

    @leaves_no_node
    def call_simple(
        self,
        inputs: mtf.Tensor,
        targets: mtf.Tensor,
        compute_loss: bool,
        mode: str = "train",
        variable_dtype: mtf.VariableDType = mtf.VariableDType(tf.float32),
        encoder_sequence_id: Optional[mtf.Tensor] = None,
        decoder_sequence_id: Optional[mtf.Tensor] = None,
        decoder_subsequence_id: Optional[mtf.Tensor] = None,
        encoder_position: Optional[mtf.Tensor] = None,
        decoder_position: Optional[mtf.Tensor] = None,
        num_microbatches: int = 1,
    ) -> tuple[mtf.Tensor, Any]:
        """Returns the logits of all target positions, and the loss.

        The inputs of the decoder are the targets shifted by one position.

        Args:
          inputs: an integer Tensor with dimensions [batch..., length], ids, 0 at padding.
          targets: an integer Tensor with dimensions [batch..., length], ids, 0 at padding; the
            length may differ from that of the inputs.
          compute_loss: a bool, whether to compute the loss.
          mode: "train", "eval" or "infer"; see tf.estimator.ModeKeys.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          encoder_sequence_id: a Tensor of the shape of `inputs`, which numbers the examples
            packed into a row from 1, and is 0 at padding. If None, each row is one example, with
            padding where its ids are 0.
          decoder_sequence_id: a Tensor of the shape of `targets`, as `encoder_sequence_id`.
          decoder_subsequence_id: a Tensor of the shape of `targets`, for parts of examples.
          encoder_position: a Tensor of the shape of `inputs`, the positions within examples; 0,
            1, 2, ... if None.
          decoder_position: a Tensor of the shape of `targets`, as `encoder_position`.
          num_microbatches: an integer, the number of microbatches; this call is for one of them.

        Returns:
          (logits, loss). The logits are a Tensor with dimensions [batch..., length, vocab]; the
          loss is a scalar Tensor, or None if no loss is computed.
        """
        if encoder_sequence_id is None:
            # One example for each row: 1 at ids, 0 at padding.
            encoder_sequence_id = mtf.minimum(inputs, 1)
        if decoder_sequence_id is None:
            decoder_sequence_id = mtf.minimum(targets, 1)
        shared_params = self._shared_params(inputs.mesh, variable_dtype)
        encoder_layer_outputs: list[mtf.Tensor] = []
        encoder_output, encoder_loss = self.encoder.call_simple(
            inputs,
            None,
            compute_loss,
            mode=mode,
            variable_dtype=variable_dtype,
            sequence_id=encoder_sequence_id,
            position=encoder_position,
            shared_params=shared_params,
            layer_outputs=encoder_layer_outputs,
            num_microbatches=num_microbatches,
        )
        decoder_inputs = autoregressive_inputs(targets, sequence_id=decoder_sequence_id)
        encoded = self._encoder_outputs(
            encoder_output, encoder_sequence_id, inputs, encoder_layer_outputs, shared_params
        )
        logits, loss = self.decoder.call_simple(
            decoder_inputs,
            targets,
            compute_loss,
            mode=mode,
            variable_dtype=variable_dtype,
            sequence_id=decoder_sequence_id,
            subsequence_id=decoder_subsequence_id,
            position=decoder_position,
            num_microbatches=num_microbatches,
            **encoded.arguments(),
        )
        if compute_loss:
            loss = loss + encoder_loss
        return logits, loss

    @gin.configurable(module="Bitransformer")
    def decode(
        self,
        inputs: mtf.Tensor,
        variable_dtype: mtf.VariableDType = mtf.VariableDType(tf.float32),
        beam_size: int = 1,
        alpha: float = 0.6,
        temperature: float = 0.0,
        sampling_keep_top_k: int = -1,
        decode_length_multiplier: float = 1.5,
        decode_length_constant: float = 10,
        max_decode_length: Optional[int] = None,
        draft_model: Optional[Bitransformer] = None,
        num_draft_ids: int = 4,
    ) -> mtf.Tensor:
        """Returns output sequences, by sampling or beam search.

        Args:
          inputs: an int32 Tensor with dimensions [batch..., length], ids, 0 at padding.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          beam_size: an int; 1 for sampling.
          alpha: a number, the length penalty of beam search: larger values prefer longer
            sequences.
          temperature: a number, for sampling: 0.0 takes the id with the largest logit, 1.0
            samples from the softmax. A beam search samples nothing: it must be 0.0.
          sampling_keep_top_k: an int, for sampling: the number of ids with the largest logits to
            sample from; -1 for all, which it must be for beam search.
          decode_length_multiplier: a number, for beam search: the maximum length is this times
            the length of the longest input, plus `decode_length_constant`.
          decode_length_constant: a number, for beam search.
          max_decode_length: an int, the size of the result's length; that of the inputs if None.
          draft_model: for sampling, a small Bitransformer of the same vocabulary that proposes
            ids; its variables are in the scope "draft". See
            `Unitransformer.sample_autoregressive`.
          num_draft_ids: an int, how many ids it proposes in a step.

        Returns:
          An int32 Tensor with dimensions [batch..., length].

        Raises:
          ValueError: `beam_size` is not positive, `inputs` is not such a Tensor, the draft does
            not fit, or a beam search is given arguments of sampling.
        """
        return _decode.decode(
            self,
            inputs=inputs,
            variable_dtype=variable_dtype,
            beam_size=beam_size,
            alpha=alpha,
            temperature=temperature,
            sampling_keep_top_k=sampling_keep_top_k,
            decode_length_multiplier=decode_length_multiplier,
            decode_length_constant=decode_length_constant,
            max_decode_length=max_decode_length,
            draft_model=draft_model,
            num_draft_ids=num_draft_ids,
        )

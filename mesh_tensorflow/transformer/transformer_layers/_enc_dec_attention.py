"""Attention of a decoder to its encoder: to the output, or to a mix of the encoder's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.layers import _masks
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.attention import _dot_product
from mesh_tensorflow.transformer.transformer._stack import to_length
from mesh_tensorflow.transformer.transformer_layers import _parts
from mesh_tensorflow.transformer.transformer_layers._self_attention import SelfAttention, output_of

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context


# The types of relative attention whose bias does not depend on the query.
RELATIVE_KINDS = (None, "bias", "bias_shared")
_NOT_SPLIT = {"bias": "None", "bias_shared": "None"}


def _encoder_inputs(context: Context) -> mtf.Tensor:
    """Returns the encoder's ids, with the length dimension renamed to memory_length."""
    ids = context.encoder_inputs
    if ids is None or context.inputs is None:
        raise ValueError(
            "relative_position_spans finds sentinels in the ids of encoder and decoder, which the "
            "Context does not have; call the models with ids, or set relative_attention_type=None"
        )
    names = ids.shape.dimension_names
    # A Bitransformer has renamed them; other callers may give the ids as they are.
    if context.encoder_length_dim.name in names:
        return ids
    return mtf.rename_dimension(ids, context.length_dim.name, context.encoder_length_dim.name)


def _sentinels_so_far(context: Context, is_sentinel: mtf.Tensor) -> mtf.Tensor:
    """Returns how many sentinels the decoder's inputs have up to each position.

    In decoding, the count up to the current position is kept as a state.
    """
    if context.mode == "incremental":
        [count] = context.get_states(1)
        count = count + mtf.cast(is_sentinel, count.dtype)
        context.record_new_states([count])
        return mtf.to_int32(count)
    count = mtf.to_int32(is_sentinel)
    if context.mode == "first_part":
        # The state counts what comes before decoding: a step adds its own position.
        before = count
        if context.initial_position is not None:
            positions = mtf.range(context.mesh, context.length_dim, tf.int32)
            is_past = mtf.less(positions, context.initial_position)
            before = mtf.multiply(count, mtf.to_int32(is_past), output_shape=count.shape)
        total = mtf.reduce_sum(before, reduced_dim=context.length_dim)
        # Floating point, since beam search selects states by a matrix product.
        context.record_new_states([mtf.to_float(total)])
    return mtf.cumsum(count, context.length_dim)


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
def relative_position_spans(context: Context, num_sentinels: int = gin.REQUIRED) -> mtf.Tensor:
    """Returns each encoder position relative to the one that the decoder position is aligned with.

    For models trained on span corruption: encoder inputs have a sentinel in place of each span, and
    the decoder repeats it before the span. A decoder position is aligned with the last sentinel
    before it. Sentinels are the last ids of the vocabulary.

    As in the classic, counts run on through a packed row, and padding of the encoder, whose
    sequence id is 0, counts as a place before every example: alignments are exact in rows of one
    example without padding, and shifted by the same number in training and in decoding otherwise.

    Args:
      context: a Context of a decoder, with ids of encoder and decoder.
      num_sentinels: how many of the last ids are sentinels.

    Returns:
      An int32 Tensor with dimensions [batch..., length, memory_length].

    Raises:
      ValueError: the Context has no ids.
    """
    encoder_ids = _encoder_inputs(context)
    memory = context.encoder_length_dim
    # Of the size without what pads it to a multiple: sentinels end where the vocabulary does.
    first = context.model.input_vocab_size_unpadded - num_sentinels
    of_memory = mtf.cumsum(mtf.to_int32(mtf.greater_equal(encoder_ids, first)), memory)
    of_query = _sentinels_so_far(context, mtf.greater_equal(context.inputs, first))
    length = context.length_dim.size
    if context.sequence_id is not None and context.encoder_sequence_id is not None:
        # Packed examples do not share counts.
        of_memory = of_memory + context.encoder_sequence_id * length
        of_query = of_query + context.sequence_id * length
    shape = mtf.Shape([*of_query.shape, memory])
    # Counts of the encoder never fall within an example, so the number of smaller ones is the index
    # of the sentinel that the query has reached.
    place = mtf.reduce_sum(
        mtf.to_int32(mtf.less(of_memory, of_query, output_shape=shape)), reduced_dim=memory
    )
    return mtf.sub(place, mtf.range(context.mesh, memory, tf.int32), output_shape=shape)


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
def enc_dec_attention_bias(
    layer: SelfAttention,
    context: Context,
    heads_dims: list[mtf.Dimension],
    relative_position_fn: Callable[[Any], mtf.Tensor] = relative_position_spans,
) -> Optional[mtf.Tensor]:
    """Returns the bias of attention over an encoder's output.

    Args:
      layer: a layer with `relative_attention_type` and `relative_attention_num_buckets`.
      context: a Context of a decoder.
      heads_dims: a list of Dimensions; each head has its own relative position bias.
      relative_position_fn: a function of a Context; returns an int32 Tensor with dimensions
        [batch..., length, memory_length].

    Returns:
      A Tensor, or None if nothing is masked and there is no relative attention.

    Raises:
      ValueError: the layer's relative_attention_type is not None, "bias" or "bias_shared".
    """
    kind = layer.relative_attention_type
    _parts.check_type("enc_dec_attention_bias", kind, RELATIVE_KINDS)
    ids: Any = ("equal", context.sequence_id, context.encoder_sequence_id)
    of_positions = all(isinstance(x, mtf.Tensor) for x in ids[1:])
    dtype = context.activation_dtype
    # In a ring no Tensor may have both lengths: ids go along, and are compared part by part.
    if _parts.in_ring(layer, context, _NOT_SPLIT) and (of_positions or None in ids):
        return _masks.stand_in(context.mesh, [ids], dtype) if of_positions else None
    hidden = None
    # Two numbers say that on both sides there is one example without padding: nothing is hidden.
    if None not in ids and any(isinstance(x, mtf.Tensor) for x in ids[1:]):
        hidden = attention.visibility_mask_to_attention_bias(mtf.equal(*ids[1:]), dtype)
        # Blocks compare two tensors of ids; with a number in place of one they read the mask.
        if of_positions:
            hidden = _masks.made_of(hidden, [ids])
    if kind is None:
        return hidden
    buckets_dim = mtf.Dimension("buckets", layer.relative_attention_num_buckets)
    values = _parts.shared_bias_values(
        context,
        "enc_dec_relative_attention_bias",
        heads_dims,
        buckets_dim,
        ("enc_dec_relative_attention_bias", tuple(heads_dims)) if kind == "bias_shared" else None,
    )
    buckets = _parts.relative_position_bucket(
        relative_position_fn(context), num_buckets=buckets_dim.size
    )
    bias = _masks.of_buckets(values, buckets, buckets_dim, context.encoder_length_dim)
    if hidden is None:
        return bias
    both = bias + hidden
    # Blocks take the bias alone, as they make the mask of the ids again.
    return _masks.made_of(both, hidden.made_of.visible, bias) if hidden.made_of else both


def _exchanging(layer: SelfAttention, context: Context, heads_dim: mtf.Dimension) -> Context:
    """Returns the Context in which queries attend: another one if positions become heads."""
    function = getattr(layer, "attention_func", None)  # a user's layer may lack it
    if function != _dot_product.ALL_TO_ALL or context.mode == "incremental":
        return context
    what = type(layer).__name__
    if layer.relative_attention_type is not None:
        raise ValueError(
            f"{what}: relative_attention_type={layer.relative_attention_type!r} makes a bias of "
            f"{context.length_dim.name} times memory_length, which attention_func={function!r} "
            "does not exchange. Set relative_attention_type=None, or attention_func=None"
        )
    _dot_product.check_layout(what, context, heads_dim)
    return _dot_product.of_heads(context)


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
def enc_dec_attention(
    self_attention_layer: SelfAttention,
    memory_antecedent: mtf.Tensor,
    context: Context,
    x: mtf.Tensor,
    losses: Optional[list[mtf.Tensor]],
    attention_fn: Callable[..., mtf.Tensor] = attention.attention,
    z_loss_coeff: Optional[float] = None,
) -> mtf.Tensor:
    """Returns the cross-attention output of each decoder position.

    In decoding, the keys and values of the memory are computed once.

    Args:
      self_attention_layer: a SelfAttention, whose options and weights are used.
      memory_antecedent: a Tensor with dimensions [batch..., memory_length, d_model].
      context: the Context of this call of the model: its mode, positions, states and losses.
      x: a Tensor with dimensions [batch..., length, d_model]; without `length` in mode
        "incremental".
      losses: a list or None.
      attention_fn: a function with the arguments of `attention`.
      z_loss_coeff: the factor of a loss on the logits, see `attention`; or None.

    Returns:
      A Tensor of the shape of `x`.
    """
    layer = self_attention_layer
    params = layer.make_params(context)
    q = params.compute_q(x)

    def keys_and_values(memory: mtf.Tensor) -> list[mtf.Tensor]:
        if params.shared_kv:
            return [params.compute_kv(memory)] * 2
        return [params.compute_k(memory), params.compute_v(memory)]

    k, v, memory_length = _parts.constant_states(
        context,
        lambda _: memory_antecedent,
        keys_and_values,
        keep=_parts.next_to_channels,
    )
    seen = _exchanging(layer, context, params.query_heads_dims[0])
    if seen is not context:
        # Only after they are kept, as steps of decoding exchange nothing.
        k, v = (_dot_product.by_heads(x, memory_length.name) for x in (k, v))
        memory_length = mtf.Dimension(_dot_product.memory_name(seen), memory_length.size)
    o = attention_fn(
        _dot_product.matched(q, seen),
        k,
        v,
        memory_length,
        layer.kv_dim,
        layer.kv_dim,
        bias=enc_dec_attention_bias(layer, seen, params.query_heads_dims),
        context=seen,
        z_loss_coeff=z_loss_coeff,
        **layer.attention_kwargs_from_context(seen),
    )
    if seen is not context:
        o = _dot_product.by_positions(o, context)
    return output_of(layer, context, params, x, o, losses)


class EncDecMixin(SelfAttention):
    """Mixin that turns a self-attention layer into encoder-decoder attention.

    List it before the self-attention class among the bases. Layers that do not attend by
    `enc_dec_attention` override `call`.
    """

    def __init__(self, relative_attention_type: Optional[str] = None, **kwargs: Any) -> None:
        """Creates the layer.

        Args:
          relative_attention_type: None, "bias" or "bias_shared", see `relative_position_spans`.
          **kwargs: further arguments of the self-attention layer.
        """
        super().__init__(relative_attention_type=relative_attention_type, **kwargs)

    def _get_memory_antecedent(self, context: Context) -> mtf.Tensor:
        """Returns the attention memory, a Tensor [batch..., memory_length, d_model].

        Raises:
          ValueError: there is no encoder output.
        """
        if context.encoder_output is None:
            raise ValueError(
                "attention over an encoder's output: the Context has no encoder_output; use the "
                "layer in the decoder of a Bitransformer, or call the model with encoder_output"
            )
        return context.encoder_output

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the cross-attention output of each position.

        Args:
          context: a Context of a decoder.
          x: a Tensor with dimensions [batch..., length, d_model].
          losses: a list or None.

        Returns:
          A Tensor of the shape of `x`.
        """
        return enc_dec_attention(
            self,
            self._get_memory_antecedent(context),
            context,
            x,
            losses,
            z_loss_coeff=self.z_loss_coeff,
        )


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class EncDecAttention(EncDecMixin):
    """Attention of a decoder to the output of an encoder.

    Vaswani et al., "Attention is all you need" (2017).

    For long sequences, `attention_kwargs={"ring": True}` passes parts of keys and values around,
    and `attention_func="all_to_all"` exchanges positions of both sequences for heads, as in
    `SelfAttention`.
    """

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Attends to the encoder's output."""
        return enc_dec_attention(
            self,
            self._get_memory_antecedent(context),
            context,
            x,
            losses,
            attention_fn=self.attention_fn,
            z_loss_coeff=self.z_loss_coeff,
        )

    @property
    def attention_fn(self) -> Callable[..., mtf.Tensor]:
        """The attention function."""
        return attention.attention


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class TransparentEncDecAttention(EncDecAttention):
    """Encoder-decoder attention to learned mixes of the encoder's layers, one per decoder module.

    Bapna et al., "Training deeper neural machine translation models with transparent attention"
    (2018). Encoder and decoder are grouped into modules of several layers; a mix is a weighted sum
    of the encoder's input and the outputs of its modules.
    """

    def __init__(
        self,
        layers_per_encoder_module: int = gin.REQUIRED,
        layers_per_decoder_module: int = gin.REQUIRED,
        encoder_num_modules: int = gin.REQUIRED,
        decoder_num_modules: int = gin.REQUIRED,
        dropout_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        """Creates the layer.

        Args:
          layers_per_encoder_module: an integer.
          layers_per_decoder_module: an integer.
          encoder_num_modules: an integer.
          decoder_num_modules: an integer.
          dropout_rate: the dropout rate of the mixing weights and of the attention weights.
          **kwargs: further arguments of `EncDecAttention`.
        """
        super().__init__(dropout_rate=dropout_rate, **kwargs)
        self.layers_per_encoder_module = layers_per_encoder_module
        self.layers_per_decoder_module = layers_per_decoder_module
        self.encoder_num_modules = encoder_num_modules
        self.decoder_num_modules = decoder_num_modules

    def _get_memory_antecedent(self, context: Context) -> mtf.Tensor:
        # The first layer of this kind computes the mixes for all of them.
        if not hasattr(context, "decoder_layers_per_module"):
            context.decoder_layers_per_module = self._get_decoder_inputs(context)
        module = context.layer_index // self.layers_per_decoder_module
        if module >= self.decoder_num_modules:
            raise ValueError(
                f"TransparentEncDecAttention: layer {context.layer_index} of the decoder is in "
                f"module {module} of layers_per_decoder_module={self.layers_per_decoder_module}, "
                f"but decoder_num_modules={self.decoder_num_modules}"
            )
        return context.decoder_layers_per_module[module]

    def _get_decoder_inputs(self, context: Context) -> list[mtf.Tensor]:
        """Returns the mix for each decoder module."""
        outputs = self._module_outputs(context)
        stacked = mtf.stack(outputs, "encoder_module_outputs")
        encoder_dim = stacked.shape.dims[0]
        decoder_dim = mtf.Dimension("decoder_module_inputs", self.decoder_num_modules)
        weights = mtf.get_variable(
            context.mesh,
            "w",
            mtf.Shape([encoder_dim, decoder_dim]),
            initializer=tf.random_normal_initializer(stddev=encoder_dim.size**-0.5),
            dtype=context.variable_dtype,
        )
        rate = self.dropout_rate if context.train else 0.0
        # Before the softmax: a logit that is dropped is 0, and its module still has a share.
        weights = mtf.dropout(weights, context.train, keep_prob=1.0 - rate)
        weights = mtf.softmax(weights, encoder_dim)
        # mixed[d] = sum over e of softmax(w[:, d])[e] * outputs[e] (Bapna et al., 2018).
        mixed = mtf.einsum(
            [weights, stacked], output_shape=mtf.Shape([decoder_dim, *outputs[0].shape])
        )
        return mtf.unstack(mixed, decoder_dim)

    def _module_outputs(self, context: Context) -> list[mtf.Tensor]:
        """Returns the encoder's input and the outputs of its modules."""
        outputs = context.encoder_layer_outputs or []
        # One more than layers: the first output is what they begin with.
        needed = self.encoder_num_modules * self.layers_per_encoder_module + 1
        if len(outputs) != needed:
            raise ValueError(
                f"TransparentEncDecAttention: the encoder has {len(outputs)} layer outputs, its "
                f"input among them, not {needed} by encoder_num_modules="
                f"{self.encoder_num_modules} times layers_per_encoder_module="
                f"{self.layers_per_encoder_module} plus 1; set these to what the encoder is"
            )
        length_name = context.length_dim.name
        # Every layers_per_encoder_module-th output, from the input on, is that of a module.
        modules = [to_length(x, length_name) for x in outputs[:: self.layers_per_encoder_module]]
        return [
            layers.rename_length_to_memory_length(x, length_name)
            if length_name in x.shape.dimension_names
            else x
            for x in modules
        ]

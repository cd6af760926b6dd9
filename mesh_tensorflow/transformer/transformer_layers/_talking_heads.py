"""Attention with projections across heads, and by a general bilinear form for each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import gin

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.layers import _masks
from mesh_tensorflow.layers._attention import dropped
from mesh_tensorflow.transformer.transformer_layers import _parts
from mesh_tensorflow.transformer.transformer_layers._enc_dec_attention import (
    RELATIVE_KINDS,
    EncDecMixin,
    enc_dec_attention_bias,
)
from mesh_tensorflow.transformer.transformer_layers._self_attention import SelfAttention

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context


_Dims = Sequence[Any]
_HEADS = (("heads", 12),)

# Arguments of SelfAttention for layers with weights and an attention function of their own.
WITHOUT_OPTIONS: dict[str, Any] = {
    "num_memory_heads": 0,
    "attention_kwargs": None,
    "attention_func": None,
    "combine_dims": True,
    "keep_query_heads_dims": False,
    "fold_scaling_into_initializer": True,
    "z_loss_coeff": None,
    "use_hyperprompt": False,
    "hyperprompt_mtlshare": False,
    "hyperprompt_length_encoder": None,
    "hyperprompt_length_decoder": None,
    "hyperprompt_hidden_dim": None,
    "hyperprompt_task_num": 8,
    "rotary": None,
    "biases": "",
    "qk_norm_epsilon": None,
    "query_scale": None,
}


def as_dims(dims: _Dims) -> list[mtf.Dimension]:
    """Converts (name, size) pairs to Dimensions."""
    return [mtf.convert_to_dimension(d) for d in dims]


def projection(
    context: Context,
    x: mtf.Tensor,
    new_dims: Sequence[mtf.Dimension],
    reduced_dims: Sequence[mtf.Dimension],
    name: str,
    scale: float = 1.0,
    expert_dims: Sequence[mtf.Dimension] = (),
) -> mtf.Tensor:
    """Applies a dense layer without bias; each member of an ensemble has its own.

    Args:
      context: the Context of this call of the model: its mode, positions, states and losses.
      x: a Tensor.
      new_dims: a list of Dimensions.
      reduced_dims: a list of Dimensions of `x`.
      name: a string, the variable scope.
      scale: a factor of the variance of initial values.
      expert_dims: a list of Dimensions of `x`; each index has its own weights.
    """
    return layers.dense(
        x,
        list(new_dims),
        reduced_dims=list(reduced_dims),
        expert_dims=[*context.model.ensemble_dims, *expert_dims],
        use_bias=False,
        kernel_initializer=layers.VarianceScalingInitializer(scale=scale),
        variable_dtype=context.variable_dtype,
        name=name,
    )


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class TalkingHeadsSelfAttention(SelfAttention):
    """Talking-heads self-attention: projections across heads before and after the softmax.

    Shazeer et al., "Talking-heads attention" (2020). Logits are projected from key heads to softmax
    heads, and weights from softmax heads to value heads. A projection may add dynamic parts,
    computed from each query or memory position.

    Attributes:
      key_heads_dims: a list of Dimensions.
      softmax_heads_dims: a list of Dimensions.
      value_heads_dims: a list of Dimensions.
      key_dim: the Dimension of channels of queries and keys.
      value_dim: the Dimension of channels of values.
      dropout_rate: the share of elements that are dropped in training, from 0 to less than 1.
      relative_attention_type: a string or None.
      relative_attention_num_buckets: an integer.
      dynamic_projections: a list of "x2l", "m2l", "x2w" and "m2w".
      dynamic_projections_init_scale: a number.
    """

    _kinds = RELATIVE_KINDS

    def __init__(
        self,
        key_heads_dims: _Dims = _HEADS,
        softmax_heads_dims: _Dims = _HEADS,
        value_heads_dims: _Dims = _HEADS,
        key_size: int = 64,
        value_size: int = 64,
        dropout_rate: float = 0.0,
        relative_attention_type: Optional[str] = None,
        relative_attention_num_buckets: int = 32,
        dynamic_projections: Optional[Sequence[str]] = None,
        dynamic_projections_init_scale: float = 1e-2,
    ) -> None:
        """Creates the layer.

        Args:
          key_heads_dims: (name, size) pairs; the projection between two of these lists does not mix
            the dimensions that they share.
          softmax_heads_dims: (name, size) pairs.
          value_heads_dims: (name, size) pairs.
          key_size: the number of channels of a key.
          value_size: the number of channels of a value.
          dropout_rate: the dropout rate of the attention weights; all queries share one dropout
            mask.
          relative_attention_type: None, "bias" or "bias_shared".
          relative_attention_num_buckets: an integer.
          dynamic_projections: which projections have dynamic parts: of logits ("l") or weights
            ("w"), computed from the query position ("x2") or the memory position ("m2"). A
            projection between equal heads has none.
          dynamic_projections_init_scale: a factor of the variance of their initial values.

        Raises:
          ValueError: `relative_attention_type` is unknown.
        """
        self.key_heads_dims = as_dims(key_heads_dims)
        self.softmax_heads_dims = as_dims(softmax_heads_dims)
        self.value_heads_dims = as_dims(value_heads_dims)
        self.key_dim = mtf.Dimension("d_k", key_size)
        self.value_dim = mtf.Dimension("d_v", value_size)
        # Options of SelfAttention that the layer does not have are given, or gin would bind them.
        super().__init__(
            num_heads=mtf.list_product(d.size for d in self.key_heads_dims),
            key_value_size=key_size,
            shared_kv=False,
            dropout_rate=dropout_rate,
            relative_attention_type=relative_attention_type,
            relative_attention_num_buckets=relative_attention_num_buckets,
            **WITHOUT_OPTIONS,
        )
        self.dynamic_projections = dynamic_projections or []
        self.dynamic_projections_init_scale = dynamic_projections_init_scale

    def compute_q(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Returns queries.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model].
        """
        dims = [*self.key_heads_dims, self.key_dim]
        # A product sums key_dim terms: queries of variance 1 / key_dim give logits of variance 1.
        return projection(context, x, dims, x.shape.dims[-1:], "q", scale=1.0 / self.key_dim.size)

    def compute_k(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Returns keys.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., memory_length, d_model].
        """
        return projection(context, x, [*self.key_heads_dims, self.key_dim], x.shape.dims[-1:], "k")

    def compute_v(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Returns values.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., memory_length, d_model].
        """
        return projection(
            context, x, [*self.value_heads_dims, self.value_dim], x.shape.dims[-1:], "v"
        )

    def compute_y(self, context: Context, u: mtf.Tensor) -> mtf.Tensor:
        """Returns the output.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          u: a Tensor with dimensions [batch..., length, value_heads_dims..., d_v].
        """
        reduced = [*self.value_heads_dims, self.value_dim]
        return projection(context, u, [context.model.model_dim], reduced, "y")

    @property
    def _keeps_memory(self) -> bool:
        """Whether decoding needs the memory itself, besides its keys and values."""
        # These project all positions of the memory again in each step.
        return any(name.startswith("m2") for name in self.dynamic_projections)

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the self-attention output of each position.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model].
          losses: a list or None.

        Returns:
          A Tensor of the shape of `x`.
        """
        memory_length = self.memory_length(context)
        q = self.compute_q(context, x)
        m = self._as_memory(x, context)
        states = [self.compute_k(context, m), self.compute_v(context, m)]
        states += [m] if self._keeps_memory else []
        states = _parts.states_so_far(context, states, memory_length)
        k, v = states[:2]
        m = states[2] if self._keeps_memory else m
        # It is added after the projection of logits, which have the heads of the softmax then.
        bias = self.compute_bias(
            context, self._memory_position(context), x, self.softmax_heads_dims, q
        )
        return self.attention_internal(context, x, m, q, k, v, memory_length, bias)

    def attention_internal(
        self,
        context: Context,
        x: mtf.Tensor,
        m: mtf.Tensor,
        q: mtf.Tensor,
        k: mtf.Tensor,
        v: mtf.Tensor,
        memory_length: mtf.Dimension,
        bias: Optional[mtf.Tensor],
    ) -> mtf.Tensor:
        """Returns the output of attention.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model].
          m: the memory, a Tensor with dimensions [batch..., memory_length, d_model].
          q: queries, as `compute_q` returns.
          k: keys, as `compute_k` returns.
          v: values, as `compute_v` returns.
          memory_length: a Dimension.
          bias: a Tensor that is added to the logits of the softmax, or None.

        Returns:
          A Tensor of the shape of `x`.
        """
        # Their order numbers the dynamic projections, and the numbers are in names of variables.
        sources = {"x": x, "m": m}

        def made_by(target: str) -> list[mtf.Tensor]:
            return [t for n, t in sources.items() if f"{n}2{target}" in self.dynamic_projections]

        positions = [*x.shape.dims[:-1]]
        # J = q k, L = J P_l + bias, W = softmax(L), U = W P_w and o = U v (Shazeer et al., 2020).
        logits = layers.us_einsum(
            [q, k], output_shape=mtf.Shape([*positions, *self.key_heads_dims, memory_length])
        )
        logits = self.talking_heads(
            context, logits, "logits", self.key_heads_dims, self.softmax_heads_dims, made_by("l")
        )
        weights = mtf.softmax(_masks.biased(logits, bias), memory_length)
        weights = self.talking_heads(
            context,
            weights,
            "weights",
            self.softmax_heads_dims,
            self.value_heads_dims,
            made_by("w"),
        )
        weights = dropped(weights, (), context.train, self.dropout_rate, [context.length_dim])
        heads = [*self.value_heads_dims, self.value_dim]
        u = mtf.einsum([weights, v], output_shape=mtf.Shape([*positions, *heads]))
        return self.compute_y(context, u)

    def talking_heads(
        self,
        context: Context,
        inp: mtf.Tensor,
        name: str,
        input_heads_dims: list[mtf.Dimension],
        output_heads_dims: list[mtf.Dimension],
        dynamic_projections_from: Optional[Sequence[mtf.Tensor]] = None,
    ) -> mtf.Tensor:
        """Projects input heads to output heads; returns `inp` itself if they are the same.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          inp: a Tensor with dimensions [..., input_heads_dims..., memory_length].
          name: a string, the variable scope.
          input_heads_dims: a list of Dimensions.
          output_heads_dims: a list of Dimensions.
          dynamic_projections_from: Tensors with dimensions [..., d_model] from which dynamic parts
            of the projection are computed; or None.

        Returns:
          A Tensor with `output_heads_dims` in place of `input_heads_dims`.
        """
        shared = [d for d in input_heads_dims if d in output_heads_dims]
        reduced = [d for d in input_heads_dims if d not in shared]
        new = [d for d in output_heads_dims if d not in shared]
        if not reduced and not new:
            return inp
        # Heads that are in both lists are not mixed: each has a matrix of its own, as an expert.
        y = projection(context, inp, new, reduced, name, expert_dims=shared)
        fan_in = mtf.list_product(d.size for d in reduced)
        for i, source in enumerate(dynamic_projections_from or []):
            weights = projection(
                context,
                source,
                [*shared, *reduced, *new],
                source.shape.dims[-1:],
                f"{name}/{name}_dynamic_{i}",
                # The product sums over all reduced heads, which the initializer does not know of.
                scale=self.dynamic_projections_init_scale / fan_in,
            )
            # y[new] += sum over reduced of inp[reduced] * weights[reduced, new], by position.
            y = y + layers.us_einsum([inp, weights], output_shape=y.shape)
        return y


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class TalkingHeadsEncDecAttention(EncDecMixin, TalkingHeadsSelfAttention):
    """Talking-heads encoder-decoder attention."""

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Attends to the encoder's output with projections across heads."""
        # Not only for the states: dynamic projections are made of the memory itself in each step.
        m = self._get_memory_antecedent(context)
        q = self.compute_q(context, x)
        k, v, memory_length = _parts.constant_states(
            context,
            lambda _: m,
            lambda m: [self.compute_k(context, m), self.compute_v(context, m)],
        )
        bias = enc_dec_attention_bias(self, context, self.softmax_heads_dims)
        return self.attention_internal(context, x, m, q, k, v, memory_length, bias)


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class GeneralBilinearSelfAttention(SelfAttention):
    """Attention of a sequence to itself, without projections of keys and values.

    Shazeer et al., "Talking-heads attention" (2020), section 6: queries have as many channels as
    the model, and keys and values are the memory itself.

    Attributes:
      heads_dims: a list of Dimensions.
      dropout_rate: the share of elements that are dropped in training, from 0 to less than 1.
      relative_attention_type: a string or None.
      relative_attention_num_buckets: an integer.
    """

    _kinds = RELATIVE_KINDS

    def __init__(
        self,
        heads_dims: Sequence[tuple[str, int]] = (("heads", 12),),
        dropout_rate: float = 0.0,
        relative_attention_type: Optional[str] = None,
        relative_attention_num_buckets: int = 32,
    ) -> None:
        """Creates the layer.

        Args:
          heads_dims: (name, size) pairs.
          dropout_rate: the dropout rate of the attention weights; all queries share one dropout
            mask.
          relative_attention_type: None, "bias" or "bias_shared".
          relative_attention_num_buckets: an integer.

        Raises:
          ValueError: `relative_attention_type` is unknown.
        """
        self.heads_dims = as_dims(heads_dims)
        # Options of SelfAttention that the layer does not have are given, or gin would bind them.
        super().__init__(
            num_heads=mtf.list_product(d.size for d in self.heads_dims),
            key_value_size=0,  # that of the model, which is not known here
            shared_kv=True,
            dropout_rate=dropout_rate,
            relative_attention_type=relative_attention_type,
            relative_attention_num_buckets=relative_attention_num_buckets,
            **WITHOUT_OPTIONS,
        )

    def compute_q(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Returns queries, [batch..., length, heads..., d_model].

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model].
        """
        channels = x.shape.dims[-1]
        # As in talking heads: the product sums over all channels of the model.
        return projection(
            context, x, [*self.heads_dims, channels], [channels], "q", scale=1.0 / channels.size
        )

    def compute_y(self, context: Context, u: mtf.Tensor) -> mtf.Tensor:
        """Returns the output.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          u: a Tensor with dimensions [batch..., length, heads..., d_model].
        """
        channels = context.model.model_dim
        return projection(context, u, [channels], [*self.heads_dims, channels], "y")

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the self-attention output of each position.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model].
          losses: a list or None.

        Returns:
          A Tensor of the shape of `x`.
        """
        memory_length = self.memory_length(context)
        q = self.compute_q(context, x)
        # The memory is its own state, as there are no projections of it.
        [m] = _parts.states_so_far(context, [self._as_memory(x, context)], memory_length)
        bias = self.compute_bias(context, self._memory_position(context), x, self.heads_dims, q)
        return self.attention_internal(context, q, m, memory_length, bias)

    def attention_internal(
        self,
        context: Context,
        q: mtf.Tensor,
        m: mtf.Tensor,
        memory_length: mtf.Dimension,
        bias: Optional[mtf.Tensor],
    ) -> mtf.Tensor:
        """Returns the output of attention.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          q: queries, as `compute_q` returns.
          m: the memory, a Tensor with dimensions [batch..., memory_length, d_model].
          memory_length: a Dimension.
          bias: a Tensor that is added to the logits, or None.

        Returns:
          A Tensor with dimensions [batch..., length, d_model].
        """
        channels = m.shape.dims[-1]
        # Queries hold the whole form, x W[h] m: the memory is its own key.
        logits = layers.us_einsum([q, m], output_shape=q.shape - channels + memory_length)
        weights = mtf.softmax(_masks.biased(logits, bias), memory_length)
        weights = dropped(weights, (), context.train, self.dropout_rate, [context.length_dim])
        return self.compute_y(context, mtf.einsum([weights, m], output_shape=q.shape))


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class GeneralBilinearEncDecAttention(EncDecMixin, GeneralBilinearSelfAttention):
    """Attention to the output of an encoder, without projections of keys and values."""

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Attends to the encoder's output by a bilinear form for each head."""
        q = self.compute_q(context, x)
        m, memory_length = _parts.constant_states(
            context, self._get_memory_antecedent, lambda m: [m]
        )
        bias = enc_dec_attention_bias(self, context, self.heads_dims)
        return self.attention_internal(context, q, m, memory_length, bias)

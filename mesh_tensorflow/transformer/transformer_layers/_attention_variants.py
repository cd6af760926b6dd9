"""Attention layers of other kinds: local, in branches, with experts, and synthesized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._calls import arguments_of
from mesh_tensorflow.transformer import attention, moe
from mesh_tensorflow.transformer.attention import _dot_product, _other_weights
from mesh_tensorflow.transformer.transformer._context import (
    Context,
    made_once,
    memory_length_of,
)
from mesh_tensorflow.transformer.transformer_layers import _parts
from mesh_tensorflow.transformer.transformer_layers._enc_dec_attention import (
    EncDecMixin,
    enc_dec_attention_bias,
)
from mesh_tensorflow.transformer.transformer_layers._feed_forward import DenseReluDense
from mesh_tensorflow.transformer.transformer_layers._self_attention import (
    SelfAttention,
    output_of,
    query_position,
)

# -- a window of near positions


def _hidden_of_window(context: Context, window: mtf.Dimension) -> mtf.Tensor:
    """Returns the mask of a step on the ring buffer of the last positions."""
    assert context.position is not None
    slot = mtf.range(context.mesh, window, tf.int32)
    # The latest position up to the current one that has this slot in the ring buffer.
    position = context.position - mtf.mod(context.position - slot, window.size)
    # Slots that nothing has been written to yet would be those of positions before the first.
    visible = mtf.greater_equal(position, 0)
    return attention.visibility_mask_to_attention_bias(visible, context.activation_dtype)


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class LocalSelfAttention(SelfAttention):
    """Self-attention to the `radius` positions up to each one, and as many after it in an encoder.

    In decoding, the states are ring buffers of `radius` positions. There are no relative biases,
    prompts and z-losses: what gin binds of them for `SelfAttention` is for other layers.

    Attributes:
      radius: an integer.
    """

    def __init__(
        self,
        radius: int = 128,
        num_heads: int = 8,
        num_memory_heads: int = 0,
        key_value_size: int = 128,
        shared_kv: bool = False,
        dropout_rate: float = 0.0,
        attention_kwargs: Optional[dict[str, Any]] = None,
        **kwargs: Any,
    ) -> None:
        """Creates the layer.

        Args:
          radius: the number of positions on each side; those before include the position itself.
          num_heads: this and the following arguments are those of `SelfAttention`.
          num_memory_heads: an integer.
          key_value_size: an integer.
          shared_kv: a bool.
          dropout_rate: the share of elements that are dropped in training, from 0 to less than 1.
          attention_kwargs: a dictionary of further arguments of `attention`, or None.
          **kwargs: `rotary`, `biases`, `query_scale`, those of norms of queries and keys,
            `combine_dims` and `fold_scaling_into_initializer` of `SelfAttention`.

        Raises:
          ValueError: the radius is below 1.
        """
        super().__init__(
            **arguments_of(SelfAttention, locals()),
            # Options of SelfAttention that a window does not have are given, or gin would bind
            # them.
            relative_attention_type=None,
            attention_func=None,
            keep_query_heads_dims=False,
            z_loss_coeff=None,
            hyperprompt_length_encoder=None,
            hyperprompt_length_decoder=None,
            **kwargs,
        )
        if radius < 1:
            raise ValueError(f"LocalSelfAttention: radius must be 1 or more, got {radius}")
        self.radius = radius

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the local self-attention output of each position.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model].
          losses: a list or None.

        Returns:
          A Tensor of the shape of `x`.
        """
        params = self.make_params(context)
        position = query_position(context)
        q = self._turned(context, params.compute_q(x), position)
        # With shared keys and values one entry, which is the first and also the last.
        if params.shared_kv:
            new = [params.compute_kv(x)]
        else:
            new = [self._turned(context, params.compute_k(x), position), params.compute_v(x)]
        if context.mode == "incremental":
            o = self._attend_to_window(context, q, new)
        else:
            if context.mode == "first_part":
                context.record_new_states([self._last_positions(context, t) for t in new])
            o = self._attend_to_blocks(context, q, new)
        y = params.compute_output(o, output_shape=x.shape)
        return self.layer_output_from_attention_output(context, y, losses)

    def _attend_to_blocks(
        self, context: Context, q: mtf.Tensor, kv: list[mtf.Tensor]
    ) -> mtf.Tensor:
        model = context.model
        num_splits = 1
        if model.layout is not None and model.mesh_shape is not None:
            # A block that two processors have parts of would have to be gathered.
            num_splits = mtf.tensor_dim_to_mesh_dim_size(
                model.layout, model.mesh_shape, context.length_dim
            )
        sequence_id = (
            context.sequence_id if context.subsequence_id is None else context.subsequence_id
        )
        priorities = {}
        # Otherwise the window is one-sided, which hides later positions already.
        if not model.fully_autoregressive:
            priorities["write_priority"] = context.write_priority
            priorities["read_priority"] = context.read_priority
        return attention.local_attention_1d(
            q,
            kv[0],
            kv[-1],
            length_dim=context.length_dim,
            key_dim=self.kv_dim,
            value_dim=self.kv_dim,
            fully_autoregressive=model.fully_autoregressive,
            length_dim_num_splits=num_splits,
            radius=self.radius,
            sequence_id=sequence_id,
            attention_kwargs={"context": context, **self.attention_kwargs_from_context(context)},
            **priorities,
        )

    def _state_dim(self, context: Context) -> mtf.Dimension:
        """Returns the Dimension of the states: at most as long as the sequence."""
        window, length = self.window_dim, getattr(context, "states_length", None)
        length = context.length_dim.size if length is None else length
        return mtf.Dimension(window.name, min(window.size, length))

    def _last_positions(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Returns keys or values of the last positions before decoding begins.

        Args:
          context: a Context in mode "first_part".
          x: a Tensor with dimensions [batch..., length, ...].

        Returns:
          A Tensor with dimensions [batch..., window, ...]; position p is at p modulo its size.
        """
        window = self._state_dim(context)
        slot = mtf.range(context.mesh, window, tf.int32)
        begin = context.initial_position
        if begin is None:
            begin = mtf.zeros(context.mesh, mtf.Shape([]), dtype=tf.int32)
        last = begin - 1
        # The latest position p up to the last one with p mod window = slot; it is negative for
        # slots that are empty yet, which `_attend_to_window` hides.
        position = last - mtf.mod(last - slot, window.size)
        return mtf.gather(
            x,
            position,
            context.length_dim,
            mtf.replace_dimensions(x.shape, context.length_dim, window),
        )

    def _attend_to_window(
        self, context: Context, q: mtf.Tensor, new: list[mtf.Tensor]
    ) -> mtf.Tensor:
        window = self._state_dim(context)
        position = made_once(
            context, ("window", window), lambda: mtf.mod(context.position, window.size)
        )
        # This overwrites the position of one window ago, which is just out of reach.
        kv = _parts.updated_states(context, new, window, position=position)
        bias = made_once(
            context, ("hidden of window", window), lambda: _hidden_of_window(context, window)
        )
        return self._attend(context, q, kv[0], kv[-1], window, bias)

    def min_relative_position(self, context: Context) -> Optional[int]:
        """Returns how far back a position attends, a negative number.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
        """
        # The current position is one of the `radius` positions, the last of them.
        return 1 - self.radius

    def max_relative_position(self, context: Context) -> Optional[int]:
        """Returns how far ahead a position attends; None if a mask hides later positions.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
        """
        return None if context.model.fully_autoregressive else self.radius

    @property
    def window_dim(self) -> mtf.Dimension:
        """The Dimension of the states."""
        return mtf.Dimension("window", self.radius)


# -- branches, experts, synthesizers


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class BranchedSelfAttention(SelfAttention):
    """Self-attention as a weighted sum of branches, one per head.

    Ahmed et al., "Weighted transformer network for machine translation" (2017). Each head is
    projected to the model's dimension separately, scaled, passed through a feed-forward layer that
    all branches share, and scaled again.

    Attributes:
      dense_layer: a DenseReluDense.
      kappa_init: a TensorFlow initializer of the first scales.
      alpha_init: a TensorFlow initializer of the second scales.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Creates the layer.

        Args:
          **kwargs: arguments of `SelfAttention`; except num_memory_heads, combine_dims and
            keep_query_heads_dims, which branches determine.

        Raises:
          ValueError: `num_memory_heads` is given.
        """
        # Each head's output is a branch: heads are not summed over, nor joined with channels.
        super().__init__(**{**kwargs, "combine_dims": False, "keep_query_heads_dims": True})
        if self.num_memory_heads:
            raise ValueError(
                f"{type(self).__name__}: num_memory_heads={self.num_memory_heads}, but each head "
                "is a branch with keys and values of its own. Set num_memory_heads to 0"
            )
        self.dense_layer = DenseReluDense()
        # In the paper both scales sum to 1 over heads; here they are as free as other variables.
        self.kappa_init = tf.random_uniform_initializer(minval=0.0, maxval=1.0)
        self.alpha_init = tf.random_uniform_initializer(minval=0.0, maxval=1.0)

    def layer_output_from_attention_output(
        self, context: Context, attention_output: mtf.Tensor, losses: Optional[list[mtf.Tensor]]
    ) -> mtf.Tensor:
        """Returns the sum of the branches.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          attention_output: a Tensor with dimensions [batch..., length, heads, d_model].
          losses: a list or None.

        Returns:
          A Tensor with dimensions [batch..., length, d_model].
        """
        heads_dim = mtf.Dimension("heads", self.num_heads)
        kappa, alpha = (
            mtf.get_variable(
                context.mesh,
                name,
                mtf.Shape([heads_dim]),
                initializer=initializer,
                dtype=context.variable_dtype,
            )
            for name, initializer in (("kappa", self.kappa_init), ("alpha", self.alpha_init))
        )
        branches = mtf.multiply(attention_output, kappa, output_shape=attention_output.shape)
        branches = self.dense_layer.call(context, branches, losses)
        # The sum over heads of alpha[h] * FFN(kappa[h] * head[h]) (Ahmed et al., 2017).
        return mtf.einsum([branches, alpha], reduced_dims=[heads_dim])


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class BranchedEncDecAttention(EncDecMixin, BranchedSelfAttention):
    """Encoder-decoder attention as a weighted sum of branches, one per head."""


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class ExpertsSelfAttention(SelfAttention):
    """Self-attention whose queries and keys, which double as values, are computed by experts.

    Fedus et al., "Switch transformers: scaling to trillion parameter models with simple and
    efficient sparsity" (2021), appendix A.

    Attributes:
      expert_computation: "qkv", "q" or "kv": what the experts compute.
      attend_to_memory: whether positions attend to each other. If False, keys keep the length
        dimension of the queries, and each position attends to its own value only: what models
        trained with releases up to 0.1.21 compute.
    """

    def __init__(
        self,
        num_experts: int = 16,
        loss_coef: float = 0.01,
        group_size: int = 1024,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        moe_gating: str = "switch",
        min_expert_capacity: int = 4,
        switch_policy_train: str = "input_jitter",
        switch_policy_eval: str = "input_jitter",
        switch_dropout: float = 0.0,
        switch_temperature: float = 1.0,
        switch_jitter: float = 0.01,
        ntlb_top_k: int = 4,
        hidden_size: int = 3072,
        activation: str = "relu",
        z_loss: Optional[float] = None,
        expert_computation: str = "qkv",
        **kwargs: Any,
    ) -> None:
        """Creates the layer.

        Args:
          num_experts: this and the following arguments are those of MoE1D.
          loss_coef: a number.
          group_size: an integer.
          capacity_factor_train: a number.
          capacity_factor_eval: a number.
          moe_gating: a string.
          min_expert_capacity: an integer.
          switch_policy_train: a string.
          switch_policy_eval: a string.
          switch_dropout: a number.
          switch_temperature: a number.
          switch_jitter: a number.
          ntlb_top_k: an integer.
          hidden_size: an integer.
          activation: a string.
          z_loss: a number or None.
          expert_computation: "qkv", "q" or "kv": what the experts compute.
          **kwargs: further arguments of `SelfAttention`, where shared_kv must be True; and
            attend_to_memory, False by default.
        """
        self.attend_to_memory = kwargs.pop("attend_to_memory", False)
        super().__init__(**kwargs)
        self.expert_computation = expert_computation
        self._hparams = moe.HParams(**arguments_of(moe.MoE1D, locals()))
        if not self.attend_to_memory:
            tf.logging.log_first_n(
                tf.logging.WARN,
                "%s: positions do not see each other, as in releases up to 0.1.21; for attention "
                "to other positions set attend_to_memory=True",
                1,
                type(self).__name__,
            )

    def make_params(self, context: Context) -> attention.ExpertsAttentionParams:
        """Returns the weights and the experts; creates their variables if they do not exist.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
        """
        return attention.ExpertsAttentionParams(
            context.mesh,
            **self._params_arguments(context),
            context=context,
            experts_hparams=self._hparams,
            expert_computation=self.expert_computation,
        )

    def _by_heads(self, context: Context) -> bool:
        if super()._by_heads(context):
            raise ValueError(
                f"{type(self).__name__}: attention_func={self.attention_func!r} is for layers "
                "whose keys are not computed by experts; leave attention_func out, or take "
                "SelfAttention"
            )
        return False

    def _keys_and_values(
        self,
        context: Context,
        x: mtf.Tensor,
        params: attention.AttentionParams,
        memory_length: mtf.Dimension,
    ) -> tuple[mtf.Tensor, mtf.Tensor]:
        keys = params.compute_kv(x)
        if not self.attend_to_memory:
            # Nothing is kept in decoding, as each position sees its own value only.
            return keys, keys
        # Only after the experts, which find padding by the length's own name.
        keys = self._as_memory(keys, context)
        [keys] = _parts.states_so_far(context, [keys], memory_length)
        return keys, keys

    def _attend(
        self,
        context: Context,
        q: mtf.Tensor,
        k: mtf.Tensor,
        v: mtf.Tensor,
        memory_length: mtf.Dimension,
        bias: Optional[mtf.Tensor],
    ) -> mtf.Tensor:
        if bias is None and not self.attend_to_memory:
            # Keys lack the memory's length here: the bias gives it to the logits. The weights of a
            # query sum to 1 over it, so each gets its own value.
            bias = mtf.zeros(context.mesh, mtf.Shape([memory_length]), dtype=q.dtype)
        return super()._attend(context, q, k, v, memory_length, bias)

    @property
    def attention_fn(self) -> Callable[..., mtf.Tensor]:
        """The attention function, one that does not check keys which lack the memory's length."""
        return super().attention_fn if self.attend_to_memory else _dot_product.attend


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class ExpertsEncDecAttention(EncDecMixin, ExpertsSelfAttention):
    """Encoder-decoder attention whose queries and keys are computed by experts.

    Without attend_to_memory each position attends to its own value only, not to the encoder.
    """

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Attends to the encoder's output with queries and keys of a mixture of experts."""
        params = self.make_params(context)
        # First, since experts for both make the keys at the same time.
        q = params.compute_q(x)
        if self.attend_to_memory:
            keys, memory_length = _parts.constant_states(
                context,
                self._get_memory_antecedent,
                lambda m: [
                    params.keys_of_memory(m, memory_length_of(m), context.encoder_sequence_id)
                ],
            )
        else:
            # Of the decoder's own positions; of the memory, weights have the length alone.
            keys = params.compute_kv(x)
            memory_length = memory_length_of(self._get_memory_antecedent(context))
        bias = enc_dec_attention_bias(self, context, params.query_heads_dims)
        o = self._attend(context, q, keys, keys, memory_length, bias)
        y = params.compute_output(o, output_shape=x.shape)
        return self.layer_output_from_attention_output(context, y, losses)


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class Synthesizer(SelfAttention):
    """Self-attention with weights that are learned directly or computed from the queries alone.

    Tay et al., "Synthesizer: rethinking self-attention in transformer models" (2020).

    Attributes:
      synthesize_mode: a string, see `synthetic_attention`.
      no_query: whether there are no queries.
    """

    def __init__(
        self,
        num_heads: int = 8,
        num_memory_heads: int = 0,
        key_value_size: int = 128,
        shared_kv: bool = False,
        dropout_rate: float = 0.0,
        attention_kwargs: Optional[dict[str, Any]] = None,
        relative_attention_type: Optional[str] = None,
        relative_attention_num_buckets: int = 32,
        attention_func: Optional[str] = None,
        combine_dims: bool = True,
        keep_query_heads_dims: bool = False,
        synthesize_mode: str = "random_plus_alpha",
        fold_scaling_into_initializer: bool = True,
        **kwargs: Any,
    ) -> None:
        """Creates the layer.

        Args:
          num_heads: this and the following arguments are those of `SelfAttention`.
          num_memory_heads: an integer.
          key_value_size: an integer.
          shared_kv: a bool; True in the modes "random", "factorized" and "dense_minus".
          dropout_rate: the share of elements that are dropped in training, from 0 to less than 1.
          attention_kwargs: a dictionary of further arguments of `synthetic_attention`, or None.
          relative_attention_type: a string or None.
          relative_attention_num_buckets: an integer.
          attention_func: ignored.
          combine_dims: a bool.
          keep_query_heads_dims: a bool.
          synthesize_mode: "random", "random_plus", "random_plus_alpha", "dense_minus",
            "dense_plus", "dense_plus_alpha" or "factorized"; see `synthetic_attention`.
          fold_scaling_into_initializer: a bool.
          **kwargs: further arguments of `SelfAttention`.

        Raises:
          ValueError: `synthesize_mode` is unknown.
        """
        products = _other_weights.uses_products(synthesize_mode)
        # Keys serve the products alone: without these, there is one weight, for values.
        shared_kv = shared_kv or not products
        super().__init__(**arguments_of(SelfAttention, locals()), **kwargs)
        self.synthesize_mode = synthesize_mode
        self.no_query = not _other_weights.uses_queries(synthesize_mode)

    def _check_function(self) -> None:
        # attention_func is accepted for compatibility; there is only one attention function.
        return

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
        params = self.make_params(context)
        memory_length = self.memory_length(context)
        k, v = self._keys_and_values(context, x, params, memory_length)
        q = None
        if not self.no_query:
            q = self._turned(context, params.compute_q(x), query_position(context))
        bias = self.compute_bias(
            context, self._memory_position(context), x, params.query_heads_dims, q
        )
        o = attention.synthetic_attention(
            q,
            k,
            v,
            memory_length,
            self.kv_dim,
            self.kv_dim,
            bias=bias,
            synthesize=True,
            synthesize_mode=self.synthesize_mode,
            context=context,
            **self.attention_kwargs_from_context(context),
        )
        return output_of(self, context, params, x, o, losses)

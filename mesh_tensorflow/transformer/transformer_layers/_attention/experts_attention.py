"""Attention whose queries and keys are computed by a mixture of experts."""

from __future__ import annotations

from typing import Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer import attention, moe
from mesh_tensorflow.transformer.attention import _dot_product
from mesh_tensorflow.transformer.transformer._context import Context, memory_length_of
from mesh_tensorflow.transformer.transformer_layers._attention import states as _states
from mesh_tensorflow.transformer.transformer_layers._attention.enc_dec_attention import (
    EncDecMixin,
    enc_dec_attention_bias,
)
from mesh_tensorflow.transformer.transformer_layers._attention.params import params_arguments
from mesh_tensorflow.transformer.transformer_layers._attention.self_attention import SelfAttention

__all__ = ["ExpertsEncDecAttention", "ExpertsSelfAttention"]


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
        self._hparams = moe.HParams(
            moe_gating=moe_gating,
            num_experts=num_experts,
            loss_coef=loss_coef,
            group_size=group_size,
            min_expert_capacity=min_expert_capacity,
            capacity_factor_train=capacity_factor_train,
            capacity_factor_eval=capacity_factor_eval,
            switch_policy_train=switch_policy_train,
            switch_policy_eval=switch_policy_eval,
            switch_dropout=switch_dropout,
            switch_temperature=switch_temperature,
            switch_jitter=switch_jitter,
            ntlb_top_k=ntlb_top_k,
            hidden_size=hidden_size,
            activation=activation,
            z_loss=z_loss,
        )
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
            **params_arguments(context, self.kv_dim, self.num_heads, self.num_memory_heads),
            shared_kv=self.shared_kv,
            combine_dims=self.combine_dims,
            keep_query_heads_dims=self.keep_query_heads_dims,
            fold_scaling_into_initializer=self.fold_scaling_into_initializer,
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
            return keys, keys
        if context.mode == "incremental":
            [keys] = _states.updated_states(context, [keys], memory_length)
        else:
            keys = self.rename_length_to_memory_length(keys, context)
            if context.mode == "first_part":
                context.record_new_states([keys])
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
        if self.attend_to_memory:
            return super()._attend(context, q, k, v, memory_length, bias)
        kwargs = self.attention_kwargs_from_context(context)
        if bias is None:
            bias = mtf.zeros(context.mesh, mtf.Shape([memory_length]), dtype=q.dtype)
        return _dot_product.attend(
            q,
            k,
            v,
            memory_length,
            self.kv_dim,
            self.kv_dim,
            bias=bias,
            context=context,
            z_loss_coeff=self.z_loss_coeff,
            **kwargs,
        )


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
        q = params.compute_q(x)
        if self.attend_to_memory:
            keys, memory_length = _states.constant_states(
                context,
                self._get_memory_antecedent,
                lambda m: [
                    params.keys_of_memory(m, memory_length_of(m), context.encoder_sequence_id)
                ],
            )
        else:
            keys = params.compute_kv(x)
            memory_length = memory_length_of(self._get_memory_antecedent(context))
        bias = enc_dec_attention_bias(self, context, params.query_heads_dims)
        o = self._attend(context, q, keys, keys, memory_length, bias)
        y = params.compute_output(o, output_shape=x.shape)
        return self.layer_output_from_attention_output(context, y, losses)

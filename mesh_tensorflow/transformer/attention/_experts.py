"""Queries and keys computed by a mixture of experts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional, Union

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer import moe
from mesh_tensorflow.transformer.attention._params import AttentionParams

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["ExpertsAttentionParams"]

# What experts compute, by `expert_computation`: queries, keys (which double as values).
_MADE_BY_EXPERTS = {"qkv": (True, True), "q": (True, False), "kv": (False, True)}


def _check(
    expert_computation: str,
    combine_dims: bool,
    shared_kv: bool,
    query_heads_dims: Optional[Sequence[mtf.Dimension]],
    memory_heads_dims: Optional[Sequence[mtf.Dimension]],
) -> None:
    if expert_computation not in _MADE_BY_EXPERTS:
        raise ValueError(
            f"ExpertsAttentionParams: expert_computation={expert_computation!r} is none of "
            f"{', '.join(_MADE_BY_EXPERTS)}"
        )
    for name, value in (("combine_dims", combine_dims), ("shared_kv", shared_kv)):
        if not value:
            raise ValueError(
                f"ExpertsAttentionParams: experts make one vector that is cut into heads, and "
                f"keys that are values; set {name}=True"
            )
    if list(query_heads_dims or []) != list(memory_heads_dims or []):
        raise ValueError(
            "ExpertsAttentionParams: queries and keys come from the same experts and have the "
            "same heads; set num_memory_heads=0"
        )


class ExpertsAttentionParams(AttentionParams):
    """Attention projections; those of queries, keys or both are mixtures of experts.

    Fedus et al., "Switch transformers: scaling to trillion parameter models with simple and
    efficient sparsity" (2021), appendix A. Keys double as values.

    Attributes:
      context: the Context of this call of the model: its mode, positions, states and losses.
      expert_computation: "qkv", "q" or "kv": what the experts compute.
      moe_layer: a MoE1D.
    """

    def __init__(
        self,
        mesh: mtf.Mesh,
        query_input_dim: mtf.Dimension,
        memory_input_dim: mtf.Dimension,
        output_dim: mtf.Dimension,
        key_dim: mtf.Dimension,
        value_dim: mtf.Dimension,
        query_heads_dims: Optional[Sequence[mtf.Dimension]],
        memory_heads_dims: Optional[Sequence[mtf.Dimension]],
        variable_dtype: mtf.VariableDType,
        shared_kv: bool = False,
        no_query: bool = False,
        combine_dims: bool = True,
        ensemble_dim: Optional[mtf.Dimension] = None,
        keep_query_heads_dims: bool = False,
        fold_scaling_into_initializer: bool = True,
        context: Context = None,  # type: ignore[assignment]
        experts_hparams: object = None,
        expert_computation: str = "qkv",
    ) -> None:
        """Creates the variables that do not belong to experts, in the current variable scope.

        Args:
          mesh: a Mesh; the arguments up to `fold_scaling_into_initializer` are those of
            `AttentionParams`.
          query_input_dim: a Dimension.
          memory_input_dim: a Dimension.
          output_dim: a Dimension.
          key_dim: the Dimension of channels of queries and keys.
          value_dim: the Dimension of channels of values.
          query_heads_dims: a list of Dimensions.
          memory_heads_dims: a list of Dimensions, equal to those of the queries.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          shared_kv: must be True.
          no_query: a bool.
          combine_dims: must be True.
          ensemble_dim: a Dimension or None.
          keep_query_heads_dims: a bool.
          fold_scaling_into_initializer: ignored; queries are scaled.
          context: the Context of this call of the model: its mode, positions, states and losses.
          experts_hparams: an object with the arguments of MoE1D as attributes.
          expert_computation: "qkv", "q" or "kv": what the experts compute.

        Raises:
          ValueError: an argument has a value that is not supported.
        """
        _check(expert_computation, combine_dims, shared_kv, query_heads_dims, memory_heads_dims)
        self.context = context
        self.expert_computation = expert_computation
        self._query_by_experts, self._keys_by_experts = _MADE_BY_EXPERTS[expert_computation]
        self._keys: Optional[mtf.Tensor] = None
        super().__init__(
            mesh,
            query_input_dim=query_input_dim,
            memory_input_dim=memory_input_dim,
            output_dim=output_dim,
            key_dim=key_dim,
            value_dim=value_dim,
            query_heads_dims=query_heads_dims,
            memory_heads_dims=memory_heads_dims,
            variable_dtype=variable_dtype,
            shared_kv=shared_kv,
            no_query=no_query,
            combine_dims=combine_dims,
            ensemble_dim=ensemble_dim,
            keep_query_heads_dims=keep_query_heads_dims,
            fold_scaling_into_initializer=fold_scaling_into_initializer,
            make_attention_vars=False,
        )
        if not self._query_by_experts:
            self.wq = self._weight("q", self.q_shape, query_input_dim.size**-0.5)
        if not self._keys_by_experts:
            self.wkv = self._weight("kv", self.k_shape, memory_input_dim.size**-0.5)
        self.moe_layer = self._make_layer(experts_hparams)

    def _make_layer(self, hparams: object) -> moe.MoE1D:
        """Returns the experts, whose output concatenates all heads."""
        [combined] = self._stored(self.q_dims)
        settings = {
            name: value
            for name, value in vars(hparams).items()
            if not name.startswith("_") and name not in ("output_dim", "use_experts_attention")
        }
        return moe.MoE1D(
            **settings,
            output_dim=mtf.Dimension(self.query_input_dim.name, combined.size),
            use_experts_attention=self._query_by_experts and self._keys_by_experts,
        )

    def _in_heads(self, y: mtf.Tensor) -> mtf.Tensor:
        """Splits the last dimension of the experts' output into heads and channels."""
        return mtf.reshape(y, mtf.Shape([*y.shape.dims[:-1], *self.q_dims]))

    def scaled(self, q: mtf.Tensor) -> mtf.Tensor:
        """Returns the queries divided by the square root of the key size."""
        return q * self.key_dim.size**-0.5

    def compute_q(self, query_antecedent: mtf.Tensor) -> mtf.Tensor:
        """Returns queries; in mode "qkv" the experts compute the keys at the same time."""
        if not self._query_by_experts:
            return super().compute_q(query_antecedent)
        made = self.moe_layer.call(self.context, query_antecedent)
        if self._keys_by_experts:
            made, keys = made
            self._keys = self._in_heads(keys)
        return self.scaled(self._in_heads(made))

    def compute_k(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
        """Returns keys, which double as values; see `compute_kv`."""
        return self.compute_kv(memory_antecedent)

    def compute_v(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
        """Returns values, which equal the keys; see `compute_kv`."""
        return self.compute_kv(memory_antecedent)

    def compute_kv(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
        """Returns keys that double as values; in mode "qkv" those computed with the queries."""
        if not self._keys_by_experts:
            return super().compute_kv(memory_antecedent)
        if self._keys is not None:
            return self._keys
        return self._in_heads(self.moe_layer.call(self.context, memory_antecedent))

    def keys_of_memory(
        self,
        memory_antecedent: mtf.Tensor,
        length_dim: mtf.Dimension,
        sequence_id: Union[mtf.Tensor, int, None],
    ) -> mtf.Tensor:
        """Returns the keys of a sequence other than that of the queries.

        Args:
          memory_antecedent: a Tensor with dimensions [batch..., length_dim, memory_input_dim].
          length_dim: a Dimension.
          sequence_id: the sequence id of the memory, as in a Context.
        """
        if not self._keys_by_experts:
            return super().compute_kv(memory_antecedent)
        context = copy.copy(self.context)
        context.length_dim = length_dim
        context.sequence_id = sequence_id
        made = self.moe_layer.call(context, memory_antecedent)
        return self._in_heads(made[1] if self._query_by_experts else made)

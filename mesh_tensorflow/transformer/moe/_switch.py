"""Switch gating, and its variant in which experts keep their best tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer.moe._assign import (
    Assignment,
    best_of_group,
    dispatch_and_combine,
)
from mesh_tensorflow.transformer.moe._hparams import hparam
from mesh_tensorflow.transformer.moe._router import Router, switch_policy

__all__: list[str] = []


def _choice(router: Router, policy: str) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Returns (the gate of each token's expert, the expert as a one-hot vector, the loss)."""
    gates = mtf.softmax(router.logits, router.experts_dim)
    if policy == "sample":
        temperature = hparam(router.hparams, "switch_temperature")
        index = mtf.sample_with_temperature(router.logits, router.experts_dim, temperature)
        chosen = mtf.one_hot(index, router.experts_dim)
        gate = mtf.reduce_sum(gates * chosen, reduced_dim=router.experts_dim)
    else:
        gate, index = mtf.top_1(gates, router.experts_dim)
        chosen = mtf.one_hot(index, router.experts_dim)
    tokens = router.in_first_place()
    loss = router.balance(chosen, gates, tokens, tokens)
    return gate, chosen if tokens is None else chosen * tokens, loss


def _switch_gating(
    inputs: mtf.Tensor,
    outer_expert_dims: Sequence[mtf.Dimension],
    experts_dim: mtf.Dimension,
    expert_capacity_dim: mtf.Dimension,
    hparams: object,
    train: bool,
    variable_dtype: mtf.VariableDType,
    importance: Optional[mtf.Tensor] = None,
    name: str = "switch_gating",
    num_microbatches: Optional[int] = None,
    token_embeddings: Optional[mtf.Tensor] = None,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Sends each token of importance 1 to one expert.

    Fedus et al., "Switch transformers: scaling to trillion parameter models with simple and
    efficient sparsity" (2021). The policy selects the expert: the best one ("argmax";
    "input_dropout" and "input_jitter" add noise to the router's input in training) or a sampled one
    ("sample").

    Args and results are those of `_top_2_gating`.

    Raises:
      ValueError: the policy is unknown.
    """
    policy, noise = switch_policy(hparams, train)
    router = Router.make(
        inputs, outer_expert_dims, experts_dim, expert_capacity_dim, hparams, train,
        variable_dtype, importance, name, num_microbatches, token_embeddings, noise,
    )  # fmt: skip
    router.sometimes_without_best()
    gate, chosen, loss = _choice(router, policy)
    assignment = Assignment(router)
    assignment.place(chosen, gate)
    return *assignment.tensors(), router.total_loss(loss)


def _switch_max_gating(
    inputs: mtf.Tensor,
    outer_expert_dims: Sequence[mtf.Dimension],
    experts_dim: mtf.Dimension,
    expert_capacity_dim: mtf.Dimension,
    hparams: object,
    train: bool,
    variable_dtype: mtf.VariableDType,
    importance: Optional[mtf.Tensor] = None,
    name: str = "switch_max_gating",
    num_microbatches: Optional[int] = None,
    token_embeddings: Optional[mtf.Tensor] = None,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Switch gating in which an expert over capacity keeps the tokens with the highest gates.

    Riquelme et al., "Scaling vision with sparse mixture of experts" (2021), section 4, calls this
    batch prioritized routing.

    Args are those of `_top_2_gating`; so are results, but with dimensions [..., experts,
    expert_capacity, group].

    Raises:
      ValueError: the policy is unknown.
    """
    policy, noise = switch_policy(hparams, train)
    router = Router.make(
        inputs, outer_expert_dims, experts_dim, expert_capacity_dim, hparams, train,
        variable_dtype, importance, name, num_microbatches, token_embeddings, noise,
    )  # fmt: skip
    router.sometimes_without_best()
    gate, chosen, loss = _choice(router, policy)
    values, places = best_of_group(router, chosen * gate)
    dispatch, combine = dispatch_and_combine(values * places, router.dtype)
    return dispatch, combine, router.total_loss(loss)

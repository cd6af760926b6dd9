"""Expert choice gating: each expert chooses its best tokens, instead of tokens their experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer.moe._assign import best_of_group, dispatch_and_combine
from mesh_tensorflow.transformer.moe._router import Router, switch_policy

__all__: list[str] = []


def _expert_selection_gating(
    inputs: mtf.Tensor,
    outer_expert_dims: Sequence[mtf.Dimension],
    experts_dim: mtf.Dimension,
    group_size_dim: mtf.Dimension,
    expert_capacity_dim: mtf.Dimension,
    hparams: object,
    train: bool,
    variable_dtype: mtf.VariableDType,
    importance: Optional[mtf.Tensor] = None,
    name: str = "expert_selection_gating",
    num_microbatches: Optional[int] = None,
    normalize_by_num_experts_routed: bool = True,
    token_embeddings: Optional[mtf.Tensor] = None,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Fills each expert with the tokens of the group that have the highest gates for it.

    Zhou et al., "Mixture-of-experts with expert choice routing" (2022), with a softmax over the
    tokens of the group. All experts take the same number of tokens; a token may go to several
    experts or to none. The switch policies "input_dropout" and "input_jitter" add noise to the
    router's input in training. The loss has its minimum, 1, if the gates of each token have the
    same sum.

    Args are those of `_top_2_gating`, and:
      group_size_dim: a Dimension, the tokens of a group.
      normalize_by_num_experts_routed: whether a token's gates are divided by the number of experts
        that choose it.

    Returns:
      (dispatch, combine), Tensors with dimensions [..., experts, expert_capacity, group], and
      the loss, a scalar.
    """
    _, noise = switch_policy(hparams, train, strict=False)
    router = Router.make(
        inputs, outer_expert_dims, experts_dim, expert_capacity_dim, hparams, train,
        variable_dtype, importance, name, num_microbatches, token_embeddings, noise,
    )  # fmt: skip
    # Over the tokens: each expert takes its best ones, so that all experts are full and no loss is
    # needed for balance between them (Zhou et al., 2022).
    gates = mtf.softmax(router.masked_out(router.logits), group_size_dim)
    values, places = best_of_group(router, gates)
    if normalize_by_num_experts_routed:
        chosen = mtf.reduce_sum(places, output_shape=gates.shape - experts_dim)
        values *= mtf.reduce_sum(places / mtf.maximum(chosen, 1.0), reduced_dim=group_size_dim)

    coverage = mtf.square(mtf.reduce_mean(gates, reduced_dim=experts_dim))
    tokens = router.in_first_place()
    if tokens is not None and router.importance is not None:
        coverage *= tokens * mtf.reduce_mean(router.importance, reduced_dim=group_size_dim)
    loss = mtf.reduce_mean(coverage, reduced_dim=group_size_dim) * float(group_size_dim.size**2)
    if router.only_tokens(tokens):
        loss = router.mean_of_groups(loss, mtf.reduce_sum(tokens, reduced_dim=group_size_dim))
    else:
        loss = mtf.reduce_mean(loss)
    dispatch, combine = dispatch_and_combine(values * places, router.dtype)
    return dispatch, combine, router.total_loss(loss)

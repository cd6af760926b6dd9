"""No-token-left-behind gating: a token whose expert is full goes to its next best one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer.moe._assign import Assignment
from mesh_tensorflow.transformer.moe._hparams import hparam
from mesh_tensorflow.transformer.moe._router import Router, switch_policy

__all__: list[str] = []


def _ntlb_gating(
    inputs: mtf.Tensor,
    outer_expert_dims: Sequence[mtf.Dimension],
    experts_dim: mtf.Dimension,
    expert_capacity_dim: mtf.Dimension,
    hparams: object,
    train: bool,
    variable_dtype: mtf.VariableDType,
    importance: Optional[mtf.Tensor] = None,
    name: str = "ntlb_gating",
    num_microbatches: Optional[int] = None,
    token_embeddings: Optional[mtf.Tensor] = None,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Sends each token of importance 1 to the best expert with capacity left.

    Fedus et al., "Switch transformers" (2021), appendix B: in `ntlb_top_k` rounds, tokens that
    exceed the capacity of their best expert go to the second best, and so on. The loss is the mean
    of the load-balancing losses of first, second, ... choices. Of the switch policies only
    "input_jitter" has an effect, noise at the router's input in training.

    Args and results are those of `_top_2_gating`.
    """
    _, noise = switch_policy(hparams, train, strict=False, noises=["input_jitter"])
    router = Router.make(
        inputs, outer_expert_dims, experts_dim, expert_capacity_dim, hparams, train,
        variable_dtype, importance, name, num_microbatches, token_embeddings, noise,
    )  # fmt: skip
    router.sometimes_without_best()
    gates = mtf.softmax(router.logits, experts_dim)
    tokens = router.in_first_place()
    rounds = min(hparam(hparams, "ntlb_top_k"), experts_dim.size)
    if rounds < 1:
        raise ValueError(f"ntlb gating: ntlb_top_k={rounds} must be at least 1")

    assignment = Assignment(router)
    left, rest, choices = tokens, gates, []
    for _ in range(rounds):
        gate, index = mtf.top_1(rest, experts_dim)
        chosen = mtf.one_hot(index, experts_dim)
        choices.append(chosen)
        placed = assignment.place(chosen if left is None else chosen * left, gate)
        left = 1.0 - placed if left is None else left - placed
        # For all tokens, placed or not: what is next best for a token is found from the gates
        # alone, and `left` says who still tries.
        rest = rest * (1.0 - chosen)
    # The load-balancing loss is linear in the choices.
    loss = router.balance(mtf.add_n(choices) * (1.0 / rounds), gates, tokens, tokens)
    return *assignment.tensors(), router.total_loss(loss)

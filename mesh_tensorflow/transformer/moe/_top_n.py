"""Gatings by which tokens choose: each goes to its best expert and to the next n - 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer.moe._assign import Assignment
from mesh_tensorflow.transformer.moe._hparams import hparam, hparam_by_mode
from mesh_tensorflow.transformer.moe._router import Router

__all__: list[str] = []

_EPSILON = 1e-9


def _all(gate: mtf.Tensor, threshold: float) -> Optional[mtf.Tensor]:
    return None


def _none(gate: mtf.Tensor, threshold: float) -> Optional[mtf.Tensor]:
    return mtf.zeros_like(gate)


def _threshold(gate: mtf.Tensor, threshold: float) -> Optional[mtf.Tensor]:
    return mtf.to_float(mtf.greater(gate, threshold))


def _random(gate: mtf.Tensor, threshold: float) -> Optional[mtf.Tensor]:
    chance = mtf.random_uniform(gate.mesh, gate.shape)
    return mtf.to_float(mtf.less(chance, gate / max(threshold, _EPSILON)))


# By policy: a function of the second expert's gate that returns 1 where a token is sent to it and 0
# elsewhere; None to send all.
_POLICIES = {"all": _all, "none": _none, "threshold": _threshold, "random": _random}


def _sent(router: Router, choices: mtf.Tensor, gate: mtf.Tensor) -> mtf.Tensor:
    """Applies the policy to the choices of a second or later expert."""
    policy = hparam_by_mode(router.hparams, "second_policy", router.train)
    if policy not in _POLICIES:
        raise ValueError(
            f"Unknown policy {policy!r} for second experts: it is none of "
            f"{', '.join(sorted(_POLICIES))}"
        )
    threshold = hparam_by_mode(router.hparams, "second_threshold", router.train)
    sent = _POLICIES[policy](gate, threshold)
    return choices if sent is None else choices * sent


def _of_tokens(x: mtf.Tensor, tokens: Optional[mtf.Tensor]) -> mtf.Tensor:
    return x if tokens is None else x * tokens


def _normalized(gates: mtf.Tensor, dim: mtf.Dimension) -> mtf.Tensor:
    return gates / (mtf.reduce_sum(gates, reduced_dim=dim) + _EPSILON)


def _top_2_gating(
    inputs: mtf.Tensor,
    outer_expert_dims: Sequence[mtf.Dimension],
    experts_dim: mtf.Dimension,
    expert_capacity_dim: mtf.Dimension,
    hparams: object,
    train: bool,
    variable_dtype: mtf.VariableDType,
    importance: Optional[mtf.Tensor] = None,
    name: str = "top_2_gating",
    num_microbatches: Optional[int] = None,
    token_embeddings: Optional[mtf.Tensor] = None,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Sends each token to its best expert, and by policy also to the second best.

    Lepikhin et al., "GShard: scaling giant models with conditional computation and automatic
    sharding" (2020), algorithm 1. First choices are placed before second choices. For a token with
    an importance between 0 and 1, the best expert counts as a second choice.

    Args:
      inputs: a Tensor with dimensions [..., group, d_model].
      outer_expert_dims: a list of Dimensions; each index has its own router weights.
      experts_dim: a Dimension.
      expert_capacity_dim: a Dimension.
      hparams: an object with attributes such as moe_num_experts; see `HParams`.
      train: whether the model is being trained.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      importance: a Tensor with dimensions [..., group], or None for ones.
      name: a string, the scope of the router's kernel.
      num_microbatches: an integer or None.
      token_embeddings: a Tensor of the shape of the inputs, or None.

    Returns:
      (dispatch, combine), Tensors with dimensions [..., group, experts, expert_capacity], and
      the loss, a scalar.
    """
    router = Router.make(
        inputs, outer_expert_dims, experts_dim, expert_capacity_dim, hparams, train,
        variable_dtype, importance, name, num_microbatches, token_embeddings,
    )  # fmt: skip
    gates = mtf.softmax(router.logits, experts_dim)
    first_place, any_place = router.in_first_place(), router.in_any_place()

    gate_1, index_1 = mtf.top_1(gates, experts_dim)
    choices_1 = _of_tokens(mtf.one_hot(index_1, experts_dim), first_place)
    gate_1 = _of_tokens(gate_1, first_place)
    # A token whose importance is not 1 has no first choice, so its best expert is still among
    # these.
    rest = gates * (1.0 - choices_1)
    gate_2, index_2 = mtf.top_1(rest, experts_dim)
    choices_2 = _of_tokens(mtf.one_hot(index_2, experts_dim), any_place)
    # Before anything is dropped or left out by the policy: a token that loses an expert has a
    # smaller output, and not another share of the one that remains.
    total = gate_1 + gate_2 + _EPSILON
    gate_1, gate_2 = gate_1 / total, gate_2 / total

    loss = router.balance(choices_1, _of_tokens(gates, first_place), counted=first_place)
    if hparam(hparams, "use_second_place_loss"):
        loss += 0.5 * router.balance(choices_2, _normalized(rest, experts_dim), counted=any_place)
    assignment = Assignment(router)
    # All first choices before any second one: if places are short, second choices are dropped.
    assignment.place(choices_1, gate_1)
    assignment.place(_sent(router, choices_2, gate_2), gate_2)
    return *assignment.tensors(), router.total_loss(loss)


def _top_n_gating(
    inputs: mtf.Tensor,
    outer_expert_dims: Sequence[mtf.Dimension],
    experts_dim: mtf.Dimension,
    expert_capacity_dim: mtf.Dimension,
    hparams: object,
    train: bool,
    variable_dtype: mtf.VariableDType,
    importance: Optional[mtf.Tensor] = None,
    name: str = "top_n_gating",
    num_microbatches: Optional[int] = None,
    token_embeddings: Optional[mtf.Tensor] = None,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Sends each token to its `top_n_num_experts_per_token` best experts.

    Like `top_2`, but every token of importance above 0 is sent to all of its experts. The gates of
    a token's experts are normalized to a sum of 1 if there are several. `use_second_place_loss`
    adds the load-balancing loss of the third choice (of the second, if there are two).

    Args and results are those of `_top_2_gating`.
    """
    router = Router.make(
        inputs, outer_expert_dims, experts_dim, expert_capacity_dim, hparams, train,
        variable_dtype, importance, name, num_microbatches, token_embeddings,
    )  # fmt: skip
    n = min(hparam(hparams, "top_n_num_experts_per_token"), experts_dim.size)
    if n < 1:
        raise ValueError(
            f"top_n gating: top_n_num_experts_per_token={n} must be at least 1, and is cut to the "
            f"number of experts {experts_dim}"
        )
    gates = mtf.softmax(router.logits, experts_dim)
    any_place = router.in_any_place()

    rest, best, choices, rests = gates, [], [], []
    for _ in range(n):
        gate, index = mtf.top_1(rest, experts_dim)
        chosen = _of_tokens(mtf.one_hot(index, experts_dim), any_place)
        best.append(gate)
        choices.append(chosen)
        rests.append(rest)
        rest = rest * (1.0 - chosen)
    if n > 1:
        total = mtf.add_n(best) + _EPSILON
        best = [gate / total for gate in best]

    first_place = router.in_first_place()
    loss = router.balance(choices[0], _of_tokens(gates, first_place), counted=first_place)
    if hparam(hparams, "use_second_place_loss") and n > 1:
        place = min(2, n - 1)
        loss += 0.5 * router.balance(
            choices[place], _normalized(rests[place], experts_dim), counted=any_place
        )
    assignment = Assignment(router)
    assignment.place(choices[0], best[0])
    for chosen, gate in zip(choices[1:], best[1:]):
        assignment.place(_sent(router, chosen, gate), gate)
    return *assignment.tensors(), router.total_loss(loss)

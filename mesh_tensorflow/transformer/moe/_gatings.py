"""Gatings: how tokens are sent to experts, as functions of a Router; and their table by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer.moe._router import (
    INPUT_NOISE,
    Assignment,
    Mixture,
    Router,
    best_of_group,
    switch_noise,
)

_EPSILON = 1e-9


def _all(gate: mtf.Tensor, threshold: float) -> Optional[mtf.Tensor]:
    return None


def _none(gate: mtf.Tensor, threshold: float) -> Optional[mtf.Tensor]:
    return mtf.zeros_like(gate)


def _threshold(gate: mtf.Tensor, threshold: float) -> Optional[mtf.Tensor]:
    return mtf.to_float(mtf.greater(gate, threshold))


def _random(gate: mtf.Tensor, threshold: float) -> Optional[mtf.Tensor]:
    chance = mtf.random_uniform(gate.mesh, gate.shape)
    # Sent with the probability min(1, gate / threshold).
    # A threshold of 0 sends all, and must not divide.
    return mtf.to_float(mtf.less(chance, gate / max(threshold, _EPSILON)))


# By policy: a function of the second expert's gate that returns 1 where a token is sent to it and 0
# elsewhere; None to send all.
_POLICIES = {"all": _all, "none": _none, "threshold": _threshold, "random": _random}


def _sent(router: Router, choices: mtf.Tensor, gate: mtf.Tensor) -> mtf.Tensor:
    """Applies the policy to the choices of a second or later expert."""
    policy = router.mixture.of_mode("second_policy")
    if policy not in _POLICIES:
        raise ValueError(
            f"Unknown policy {policy!r} for second experts: it is none of "
            f"{', '.join(sorted(_POLICIES))}"
        )
    threshold = router.mixture.of_mode("second_threshold")
    # By now the gate is the expert's share among those chosen, no longer its softmax.
    sent = _POLICIES[policy](gate, threshold)
    return choices if sent is None else choices * sent


def _of_tokens(x: mtf.Tensor, tokens: Optional[mtf.Tensor]) -> mtf.Tensor:
    return x if tokens is None else x * tokens


def _normalized(gates: mtf.Tensor, dim: mtf.Dimension) -> mtf.Tensor:
    # Padding has no gates: with the epsilon this is 0, and 0 / 0 without it.
    return gates / (mtf.reduce_sum(gates, reduced_dim=dim) + _EPSILON)


def _top_2(router: Router) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Sends each token to its best expert, and by policy also to the second best.

    Lepikhin et al., "GShard: scaling giant models with conditional computation and automatic
    sharding" (2020), algorithm 1. First choices are placed before second choices. For a token with
    an importance between 0 and 1, the best expert counts as a second choice.
    """
    gates = mtf.softmax(router.logits, router.experts_dim)
    first_place, any_place = router.in_first_place(), router.in_any_place()

    gate_1, index_1 = mtf.top_1(gates, router.experts_dim)
    choices_1 = _of_tokens(mtf.one_hot(index_1, router.experts_dim), first_place)
    gate_1 = _of_tokens(gate_1, first_place)
    # A token whose importance is not 1 has no first choice, so its best expert is still among
    # these.
    rest = gates * (1.0 - choices_1)
    gate_2, index_2 = mtf.top_1(rest, router.experts_dim)
    choices_2 = _of_tokens(mtf.one_hot(index_2, router.experts_dim), any_place)
    # Before anything is dropped or left out by the policy: a token that loses an expert has a
    # smaller output, and not another share of the one that remains.
    total = gate_1 + gate_2 + _EPSILON
    gate_1, gate_2 = gate_1 / total, gate_2 / total

    loss = router.balance(choices_1, _of_tokens(gates, first_place), counted=first_place)
    if router.mixture.hparam("use_second_place_loss"):
        loss += 0.5 * router.balance(
            choices_2, _normalized(rest, router.experts_dim), counted=any_place
        )
    assignment = Assignment(router)
    # All first choices before any second one: if places are short, second choices are dropped.
    assignment.place(choices_1, gate_1)
    assignment.place(_sent(router, choices_2, gate_2), gate_2)
    return assignment.combine, loss


def _top_n(router: Router) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Sends each token to its `top_n_num_experts_per_token` best experts.

    Like `top_2`, but every token of importance above 0 is sent to all of its experts. The gates of
    a token's experts are normalized to a sum of 1 if there are several; `top_n_normalized` says
    otherwise. `use_second_place_loss` adds the load-balancing loss of the third choice (of the
    second, if there are two).
    """
    n = min(router.mixture.hparam("top_n_num_experts_per_token"), router.experts_dim.size)
    if n < 1:
        raise ValueError(
            f"top_n gating: top_n_num_experts_per_token={n} must be at least 1, and is cut to the "
            f"number of experts {router.experts_dim}"
        )
    gates = mtf.softmax(router.logits, router.experts_dim)
    any_place = router.in_any_place()

    rest, best, choices, rests = gates, [], [], []
    for _ in range(n):
        gate, index = mtf.top_1(rest, router.experts_dim)
        chosen = _of_tokens(mtf.one_hot(index, router.experts_dim), any_place)
        best.append(gate)
        choices.append(chosen)
        rests.append(rest)
        # Only what was sent is taken out: for padding, where `chosen` is 0, all of it remains.
        rest = rest * (1.0 - chosen)
    # The share of a single expert would be 1 for all tokens, and the router would not learn by it.
    normalized = router.mixture.hparam("top_n_normalized")
    if n > 1 if normalized is None else normalized:
        total = mtf.add_n(best) + _EPSILON
        best = [gate / total for gate in best]

    first_place = router.in_first_place()
    loss = router.balance(choices[0], _of_tokens(gates, first_place), counted=first_place)
    if router.mixture.hparam("use_second_place_loss") and n > 1:
        place = min(2, n - 1)
        loss += 0.5 * router.balance(
            choices[place], _normalized(rests[place], router.experts_dim), counted=any_place
        )
    assignment = Assignment(router)
    assignment.place(choices[0], best[0])
    for chosen, gate in zip(choices[1:], best[1:]):
        assignment.place(_sent(router, chosen, gate), gate)
    return assignment.combine, loss


def _choice(router: Router) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Returns (the gate of each token's expert, the expert as a one-hot vector, the loss)."""
    router.sometimes_without_best()
    gates = mtf.softmax(router.logits, router.experts_dim)
    if router.mixture.of_mode("switch_policy") == "sample":
        temperature = router.mixture.hparam("switch_temperature")
        # Sampling has no gradient: the router learns by the gate of the expert that was drawn.
        index = mtf.sample_with_temperature(router.logits, router.experts_dim, temperature)
        chosen = mtf.one_hot(index, router.experts_dim)
        # The probability without the temperature, so that gates mean the same for both policies.
        gate = mtf.reduce_sum(gates * chosen, reduced_dim=router.experts_dim)
    else:
        gate, index = mtf.top_1(gates, router.experts_dim)
        chosen = mtf.one_hot(index, router.experts_dim)
    tokens = router.in_first_place()
    loss = router.balance(chosen, gates, tokens, tokens)
    return gate, chosen if tokens is None else chosen * tokens, loss


def _switch(router: Router) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Sends each token of importance 1 to one expert.

    Fedus et al., "Switch transformers: scaling to trillion parameter models with simple and
    efficient sparsity" (2021). The policy selects the expert: the best one ("argmax";
    "input_dropout" and "input_jitter" add noise to the router's input in training) or a sampled one
    ("sample").
    """
    gate, chosen, loss = _choice(router)
    assignment = Assignment(router)
    assignment.place(chosen, gate)
    return assignment.combine, loss


def _switch_max(router: Router) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Switch gating in which an expert over capacity keeps the tokens with the highest gates.

    Riquelme et al., "Scaling vision with sparse mixture of experts" (2021), section 4, calls this
    batch prioritized routing.
    """
    gate, chosen, loss = _choice(router)
    # Tokens that chose other experts have the score 0: where they fill places, they are not sent.
    values, places = best_of_group(router, chosen * gate)
    return values * places, loss


def _ntlb(router: Router) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Sends each token of importance 1 to the best expert with capacity left.

    Fedus et al., "Switch transformers" (2021), appendix B: in `ntlb_top_k` rounds, tokens that
    exceed the capacity of their best expert go to the second best, and so on. The loss is the mean
    of the load-balancing losses of first, second, ... choices. Of the switch policies only
    "input_jitter" has an effect, noise at the router's input in training.
    """
    router.sometimes_without_best()
    gates = mtf.softmax(router.logits, router.experts_dim)
    tokens = router.in_first_place()
    rounds = min(router.mixture.hparam("ntlb_top_k"), router.experts_dim.size)
    if rounds < 1:
        raise ValueError(f"ntlb gating: ntlb_top_k={rounds} must be at least 1")

    assignment = Assignment(router)
    left, rest, choices = tokens, gates, []
    for _ in range(rounds):
        gate, index = mtf.top_1(rest, router.experts_dim)
        chosen = mtf.one_hot(index, router.experts_dim)
        choices.append(chosen)
        # Places of earlier rounds stay taken, so a token of this round gets what they have left.
        placed = assignment.place(chosen if left is None else chosen * left, gate)
        left = 1.0 - placed if left is None else left - placed
        # For all tokens, placed or not: what is next best for a token is found from the gates
        # alone, and `left` says who still tries.
        rest = rest * (1.0 - chosen)
    # The load-balancing loss is linear in the choices.
    loss = router.balance(mtf.add_n(choices) * (1.0 / rounds), gates, tokens, tokens)
    return assignment.combine, loss


def _expert_selection(
    router: Router, normalize_by_num_experts_routed: bool = True
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Fills each expert with the tokens of the group that have the highest gates for it.

    Zhou et al., "Mixture-of-experts with expert choice routing" (2022), with a softmax over the
    tokens of the group. All experts take the same number of tokens; a token may go to several
    experts or to none. The switch policies "input_dropout" and "input_jitter" add noise to the
    router's input in training. The loss has its minimum, 1, if the gates of each token have the
    same sum.
    """
    # Over the tokens: each expert takes its best ones, so that all experts are full and no loss is
    # needed for balance between them (Zhou et al., 2022).
    gates = mtf.softmax(router.masked_out(router.logits), router.group_dim)
    # The mask has made gates of padding 0 (but in a group of padding alone), so it is not sent.
    values, places = best_of_group(router, gates)
    if normalize_by_num_experts_routed:
        chosen = mtf.reduce_sum(places, output_shape=gates.shape - router.experts_dim)
        # `places` is the one-hot vector of the token at a place, so the inner sum is 1 / the number
        # of experts that took this token.
        values *= mtf.reduce_sum(places / mtf.maximum(chosen, 1.0), reduced_dim=router.group_dim)

    # The gates of an expert sum to 1 over a group of n tokens, so n times the sum of the squares of
    # mean gates is at least 1, which it is if all means are 1 / n.
    coverage = mtf.square(mtf.reduce_mean(gates, reduced_dim=router.experts_dim))
    tokens = router.in_first_place()
    if tokens is not None and router.importance is not None:
        # Gates of the k tokens that are no padding are 1 / k at best: times k / n, this is 1 too.
        coverage *= tokens * mtf.reduce_mean(router.importance, reduced_dim=router.group_dim)
    loss = mtf.reduce_mean(coverage, reduced_dim=router.group_dim) * float(router.group_dim.size**2)
    if router.only_tokens(tokens):
        loss = router.mean_of_groups(loss, mtf.reduce_sum(tokens, reduced_dim=router.group_dim))
    else:
        loss = mtf.reduce_mean(loss)
    return values * places, loss


class Gating(NamedTuple):
    """A gating, and what the router does for it.

    Attributes:
      name: the scope of the router's kernel is `<name>_gating`.
      send: a function of the Router that returns the combine tensor in float32, and the loss of a
        microbatch without z-loss.
      noises: the switch policies that add noise to the router's input in training.
      strict: whether an unknown switch policy is an error.
    """

    name: str
    send: Callable[[Router], tuple[mtf.Tensor, mtf.Tensor]]
    noises: Collection[str] = ()
    strict: bool = False


_GATINGS = [
    Gating("top_2", _top_2),
    Gating("top_n", _top_n),
    Gating("switch", _switch, tuple(INPUT_NOISE), strict=True),
    Gating("ntlb", _ntlb, ("input_jitter",)),
    Gating("switch_max", _switch_max, tuple(INPUT_NOISE), strict=True),
    Gating("expert_selection", _expert_selection, tuple(INPUT_NOISE)),
]
GATINGS = {gating.name: gating for gating in _GATINGS}


def gate(
    router: Router, gating: Optional[Gating] = None
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Sends the tokens of a router to experts.

    Args:
      router: a Router.
      gating: a Gating; by default `hparams.moe_gating`.

    Returns:
      (dispatch, combine), Tensors with dimensions [..., group, experts, expert_capacity], and the
      loss, a scalar. "switch_max" and "expert_selection" have the dimensions [..., experts,
      expert_capacity, group].

    Raises:
      ValueError: the gating is unknown.
    """
    if gating is None:
        name = router.mixture.hparam("gating")
        if name not in GATINGS:
            raise ValueError(
                f"unknown hparams.moe_gating={name}: it is none of {', '.join(GATINGS)}"
            )
        gating = GATINGS[name]
    noise = switch_noise(router.mixture, gating.strict, gating.noises)
    router.compute_logits(f"{gating.name}_gating", noise)
    combine, loss = gating.send(router)
    # Of the float32 gates: float16 rounds small ones to 0, and their tokens would not be sent.
    dtype = router.inputs.dtype
    dispatch = mtf.cast(mtf.not_equal(combine, 0.0), dtype)
    if router.mixture.routings is not None and (routing := router.routing(dispatch)) is not None:
        router.mixture.routings.append(routing)
    return dispatch, mtf.cast(combine, dtype), router.total_loss(loss)


def _classic(gating: str) -> Callable[..., tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]]:
    """Returns a gating as the function of tensors that it was in the classic release."""

    def gate_tokens(
        inputs: mtf.Tensor,
        outer_expert_dims: Sequence[mtf.Dimension],
        experts_dim: mtf.Dimension,
        expert_capacity_dim: mtf.Dimension,
        hparams: object,
        train: bool,
        variable_dtype: mtf.VariableDType,
        importance: Optional[mtf.Tensor] = None,
        name: str = f"{gating}_gating",
        num_microbatches: Optional[int] = None,
        token_embeddings: Optional[mtf.Tensor] = None,
    ) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
        """Sends tokens to experts.

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
          the loss, a scalar. "switch_max" and "expert_selection" have the dimensions [...,
          experts, expert_capacity, group].
        """
        mixture = Mixture(hparams, train, variable_dtype, num_microbatches=num_microbatches)
        router = Router(
            mixture, inputs, experts_dim, expert_capacity_dim, outer_expert_dims, importance, name,
            token_embeddings,
        )  # fmt: skip
        return gate(router, GATINGS[gating])

    gate_tokens.__name__ = gate_tokens.__qualname__ = f"_{gating}_gating"
    return gate_tokens


_top_2_gating = _classic("top_2")
_top_n_gating = _classic("top_n")
_switch_gating = _classic("switch")
_ntlb_gating = _classic("ntlb")
_switch_max_gating = _classic("switch_max")


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
    """Is "expert_selection" as the function that it was in the classic release.

    Args are those of `_top_2_gating`, and:
      group_size_dim: a Dimension, the tokens of a group.
      normalize_by_num_experts_routed: whether a token's gates are divided by the number of experts
        that choose it.
    """
    send = functools.partial(
        _expert_selection, normalize_by_num_experts_routed=normalize_by_num_experts_routed
    )
    mixture = Mixture(hparams, train, variable_dtype, num_microbatches=num_microbatches)
    router = Router(
        mixture, inputs, experts_dim, expert_capacity_dim, outer_expert_dims, importance, name,
        token_embeddings,
    )  # fmt: skip
    # The classic's function takes this dimension as an argument.
    router.group_dim = group_size_dim
    return gate(router, GATINGS["expert_selection"]._replace(send=send))

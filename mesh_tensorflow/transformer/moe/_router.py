"""How tokens are sent to experts: hyperparameters, the router, and the gatings by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Optional, TypeGuard, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.layers._masks import MASKED_LOGIT
from mesh_tensorflow.ops._microbatches import mean_over_microbatches
from mesh_tensorflow.transformer.transformer._stack import joined_channels

# -- hyperparameters

# What `set_default_moe_hparams` sets. All but the coefficient of the loss have to be
# set: what lacks them was not made for a mixture of experts.
_BASIC: dict[str, Any] = {
    "num_experts": 16,
    "loss_coef": 0.01,
    "gating": "top_2",
    "capacity_factor_train": 1.25,
    "capacity_factor_eval": 2.0,
    "capacity_factor_second_level": 1.0,
    "hidden_size": 4096,
    "group_size": 1024,
    "use_second_place_loss": 0,
    "second_policy_train": "random",
    "second_policy_eval": "random",
    "second_threshold_train": 0.2,
    "second_threshold_eval": 0.2,
}
_OF_TENSOR2TENSOR = ("num_experts", "loss_coef")

# Hyperparameters that objects made for earlier releases lack.
_LATER: dict[str, Any] = {
    "min_expert_capacity": 4,
    "dropout_rate": 0.0,
    "switch_policy_train": "input_jitter",
    "switch_policy_eval": "input_jitter",
    "switch_dropout": 0.1,
    "switch_temperature": 1.0,
    "switch_jitter": 0.01,
    "ntlb_top_k": 4,
    "output_dim": None,
    "top_n_num_experts_per_token": 3,
    "use_experts_attention": False,
    "z_loss": None,
    "balance_padding": True,
    "groups_in_rows": False,
    "word_embed_mode": None,
    "use_second_place_expert_prob": None,
    "use_second_place_expert_prob_temp": None,
    "num_layers": 1,
    "top_n_normalized": None,
    "shared_hidden_size": 0,
    "shared_gate": False,
    "heterogeneous_mask_info": None,
}

# All hyperparameters, without the prefix moe_ of their attributes.
DEFAULTS = {**_BASIC, **_LATER}
_FALLBACKS = {"loss_coef": _BASIC["loss_coef"], **_LATER}


class HParams:
    """Hyperparameters as attributes, such as `moe_num_experts`.

    Any other object with these attributes works too, such as Tensor2Tensor's.
    """

    def __init__(self, **kwargs: object) -> None:
        for k, v in kwargs.items():
            self.add_hparam(k, v)

    def add_hparam(self, k: str, v: object) -> None:
        """Sets the attribute `k`."""
        setattr(self, k, v)


def set_default_moe_hparams(hparams: Any) -> None:
    """Adds the hyperparameters of a mixture of experts to Tensor2Tensor's.

    Args:
      hparams: an object with `add_hparam(name, value)`. Tensor2Tensor's basic hyperparameters have
        `moe_num_experts` and `moe_loss_coef` already: these two are overwritten.
    """
    for name, value in _BASIC.items():
        if name in _OF_TENSOR2TENSOR:
            setattr(hparams, f"moe_{name}", value)
        else:
            hparams.add_hparam(f"moe_{name}", value)


def hparams_of(arguments: Mapping[str, Any], **others: object) -> HParams:
    """Returns the hyperparameters among the arguments of a layer's constructor, and others.

    Args:
      arguments: a dictionary by names of arguments, which may have the prefix moe_; it may have
        arguments that are no hyperparameters.
      **others: further hyperparameters by names without prefix.
    """
    plain = {name.removeprefix("moe_"): value for name, value in arguments.items()}
    chosen = {name: value for name, value in {**plain, **others}.items() if name in DEFAULTS}
    return HParams(**{f"moe_{name}": value for name, value in chosen.items()})


class Routing(NamedTuple):
    """What a router has done with the tokens that are no padding, in float32.

    Attributes:
      chosen: a Tensor with the dimension of the experts, how many tokens chose each.
      gates: one with the same dimension, the sum of the gates of each, before any is left out.
      tokens: a scalar, how many tokens there are.
      placed: a scalar, how many choices were followed; the others found an expert full.
    """

    chosen: mtf.Tensor
    gates: mtf.Tensor
    tokens: mtf.Tensor
    placed: mtf.Tensor


@dataclasses.dataclass(frozen=True)
class Mixture:
    """What all parts of a mixture of experts take into account.

    Attributes:
      hparams: an object with attributes such as moe_num_experts; see `HParams`.
      train: whether the model is being trained.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      layout: a LayoutRules or None.
      mesh_shape: a Shape or None; no group of tokens is split over processors.
      num_microbatches: an integer that losses are divided by, or None.
      routings: a list that a Routing is appended to, or None.
    """

    hparams: object
    train: bool
    variable_dtype: mtf.VariableDType
    layout: Union[mtf.LayoutRules, str, None] = None
    mesh_shape: Union[mtf.Shape, str, None] = None
    num_microbatches: Optional[int] = None
    routings: Optional[list[Routing]] = None

    def hparam(self, name: str) -> Any:
        """Returns `hparams.moe_<name>`, or its default if an earlier release had no such field.

        Raises:
          ValueError: there is no such field and no default.
        """
        if hasattr(self.hparams, f"moe_{name}"):
            return getattr(self.hparams, f"moe_{name}")
        if name not in _FALLBACKS:
            raise ValueError(
                f"mixture of experts: the hyperparameters have no moe_{name}; set it, for example "
                f"with hparams.add_hparam('moe_{name}', ...)"
            )
        return _FALLBACKS[name]

    def of_mode(self, name: str) -> Any:
        """Returns `hparams.moe_<name>_train` or `hparams.moe_<name>_eval`."""
        return self.hparam(f"{name}_{'train' if self.train else 'eval'}")

    def slices(self, dim: mtf.Dimension) -> int:
        """Returns the number of slices of a dimension; 1 without layout and mesh."""
        if self.layout is None or self.mesh_shape is None:
            return 1
        return mtf.tensor_dim_to_mesh_dim_size(self.layout, self.mesh_shape, dim)


# -- the router


# By mode: how the router's input is made of its inputs and embeddings.
_WORD_EMBED_MODES: dict[str, Callable[[mtf.Tensor, mtf.Tensor], mtf.Tensor]] = {
    "add": lambda x, embeddings: x + embeddings,
    "add_stop_grad": lambda x, embeddings: x + mtf.stop_gradient(embeddings),
    "concat": lambda x, embeddings: joined_channels([x, embeddings]),
    "concat_stop_grad": lambda x, embeddings: joined_channels([x, mtf.stop_gradient(embeddings)]),
    "embed_only": lambda x, embeddings: embeddings,
}


def _input_dropout(inputs: mtf.Tensor, mixture: Mixture) -> mtf.Tensor:
    return mtf.dropout(inputs, True, rate=mixture.hparam("switch_dropout"))


def _input_jitter(inputs: mtf.Tensor, mixture: Mixture) -> mtf.Tensor:
    return layers.multiplicative_jitter(inputs, mixture.hparam("switch_jitter"))


Noise = Callable[[mtf.Tensor, Mixture], mtf.Tensor]
# By switch policy: the noise that it adds to the router's input when training.
INPUT_NOISE: dict[str, Noise] = {"input_dropout": _input_dropout, "input_jitter": _input_jitter}
_SWITCH_POLICIES = ("argmax", "sample", *INPUT_NOISE)


@dataclasses.dataclass
class Router:
    """The router: expert logits of tokens, and statistics for a gating.

    Everything is computed in float32.

    Attributes:
      mixture: the Mixture that it is part of.
      inputs: a Tensor with dimensions [outer expert dims and batch..., group, d_model].
      experts_dim: a Dimension.
      capacity_dim: a Dimension, the tokens of a group that an expert takes.
      outer_expert_dims: a list of Dimensions; each index has its own router weights.
      importance: a Tensor with dimensions [..., group], or None if all tokens have importance 1.
        A token of importance 0 is not dispatched.
      name: the scope of the variable `kernel`; None for that of the gating.
      token_embeddings: a Tensor of the shape of the inputs, or None.
      group_dim: a Dimension, the tokens of a group.
      logits: a Tensor with dimensions [..., group, experts], of `compute_logits`.
      chosen: a Tensor with dimensions [..., experts], how many tokens of a group chose each expert;
        None for gatings without an Assignment.
    """

    mixture: Mixture
    inputs: mtf.Tensor
    experts_dim: mtf.Dimension
    capacity_dim: mtf.Dimension
    outer_expert_dims: Sequence[mtf.Dimension] = ()
    importance: Optional[mtf.Tensor] = None
    name: Optional[str] = None
    token_embeddings: Optional[mtf.Tensor] = None
    group_dim: mtf.Dimension = dataclasses.field(init=False)
    logits: mtf.Tensor = dataclasses.field(init=False)
    chosen: Optional[mtf.Tensor] = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        self.group_dim = self.inputs.shape.dims[-2]

    def compute_logits(self, name: str, noise: Optional[Noise] = None) -> None:
        """Computes the logits with a variable `name/kernel`.

        Args:
          name: a string, used if the router has no name of its own.
          noise: a function of the router's input and the Mixture, or None.
        """
        # In float32, also if the model computes in bfloat16: exponentials of rounded logits make
        # training unstable (Fedus et al., 2021, section 2.4).
        x = _with_embeddings(mtf.to_float(self.inputs), self.token_embeddings, self.mixture)
        if noise is not None:
            # For the router alone: the experts get the tokens without noise.
            x = noise(x, self.mixture)
        self.logits = layers.dense(
            x,
            self.experts_dim,
            reduced_dims=x.shape.dims[-1:],
            expert_dims=self.outer_expert_dims,
            use_bias=False,
            variable_dtype=self.mixture.variable_dtype,
            name=name if self.name is None else self.name,
        )
        if self.importance is not None:
            self.importance = mtf.to_float(self.importance)

    def in_first_place(self) -> Optional[mtf.Tensor]:
        """Returns 1.0 where the importance is 1, else 0.0; None without importance."""
        if self.importance is None:
            return None
        return mtf.to_float(mtf.equal(self.importance, 1.0))

    def in_any_place(self) -> Optional[mtf.Tensor]:
        """Returns 1.0 where the importance is above 0, else 0.0; None without importance."""
        if self.importance is None:
            return None
        return mtf.to_float(mtf.greater(self.importance, 0.0))

    def balance(
        self,
        choices: mtf.Tensor,
        gates: mtf.Tensor,
        tokens: Optional[mtf.Tensor] = None,
        counted: Optional[mtf.Tensor] = None,
    ) -> mtf.Tensor:
        """Returns the load-balancing loss: at least 1, which means perfect balance.

        The mean over groups of num_experts * sum over experts of (the share of tokens that
        choose the expert) * (its mean gate); Shazeer et al., "Mesh-TensorFlow" (2018), and
        Fedus et al., "Switch transformers" (2021), section 2.2.

        Args:
          choices: a Tensor with dimensions [..., group, experts] of zeros and ones.
          gates: a Tensor of the same shape, through which gradients flow.
          tokens: a Tensor with dimensions [..., group], the tokens that count; all if None.
          counted: a Tensor of these dimensions, the tokens over which shares and means are taken
            without `balance_padding`; all if None.
        """
        if self.only_tokens(counted):
            return self._balance_of(choices, gates, counted)
        shape = choices.shape - self.group_dim
        # Fedus et al. (2021), equation 4. The shares of tokens are counts and have no gradient; it
        # flows through the mean gates.
        product = mtf.reduce_mean(choices, output_shape=shape) * mtf.reduce_mean(
            gates, output_shape=shape
        )
        if tokens is not None:
            product *= mtf.reduce_mean(tokens, reduced_dim=self.group_dim)
        # The mean over experts divides by their number, the loss multiplies a sum by it: hence the
        # square.
        return mtf.reduce_mean(product) * float(self.experts_dim.size**2)

    def only_tokens(self, counted: Optional[mtf.Tensor]) -> TypeGuard[mtf.Tensor]:
        """Returns whether losses are means over the counted tokens, without padding."""
        return counted is not None and not self.mixture.hparam("balance_padding")

    def _balance_of(
        self, choices: mtf.Tensor, gates: mtf.Tensor, counted: mtf.Tensor
    ) -> mtf.Tensor:
        """Returns the load-balancing loss of some tokens, a mean of groups by their numbers."""
        shape = choices.shape - self.group_dim
        # Equation 4 of Fedus et al. (2021) for each group, with shares of its counted tokens:
        # num_experts * sum over experts of (chosen / number) * (gated / number).
        number = mtf.reduce_sum(counted, reduced_dim=self.group_dim)
        chosen = mtf.reduce_sum(choices * counted, output_shape=shape)
        gated = mtf.reduce_sum(gates * counted, output_shape=shape)
        each = mtf.reduce_sum(chosen * gated, reduced_dim=self.experts_dim)
        # A group without counted tokens has 0 / 1 here, and no weight in the mean.
        return self.mean_of_groups(each / mtf.square(mtf.maximum(number, 1.0)), number) * float(
            self.experts_dim.size
        )

    def mean_of_groups(self, values: mtf.Tensor, number: mtf.Tensor) -> mtf.Tensor:
        """Returns the mean of values of groups, weighted by their numbers of tokens."""
        # Numbers may lack dimensions that values have: along these, each index counts.
        total = mtf.maximum(mtf.reduce_sum(number), 1.0) * (values.shape.size // number.shape.size)
        return mtf.reduce_sum(values * number) / total

    def total_loss(self, loss: mtf.Tensor) -> mtf.Tensor:
        """Adds the router's z-loss in training, and divides by the number of microbatches.

        The z-loss is the mean of log(z)^2 over tokens, where z is the softmax's denominator; Zoph
        et al., "ST-MoE" (2022), section 3.
        """
        coefficient = self.mixture.hparam("z_loss") if self.mixture.train else None
        if coefficient is not None:
            # log(z) is at least the largest logit, and exponentials of large logits magnify
            # rounding errors.
            z = mtf.square(mtf.reduce_logsumexp(self.logits, self.experts_dim))
            loss += coefficient * self._mean_over_tokens(z)
        number = self.mixture.num_microbatches or 1
        if number > 1:
            # Losses of microbatches are summed, and this one is to count once for the batch.
            loss /= number
        loss = mtf.cast(loss, self.inputs.dtype)
        # Balance is that of the tokens which are computed together.
        return loss if number > 1 else mean_over_microbatches(loss)

    def routing(self, dispatch: mtf.Tensor) -> Optional[Routing]:
        """Returns what the router has done; None for gatings in which experts choose.

        Args:
          dispatch: a Tensor with dimensions [..., group, experts, expert_capacity], 1 where a token
            has a place and 0 elsewhere.
        """
        if self.chosen is None:
            return None
        shape, tokens = mtf.Shape([self.experts_dim]), self.in_any_place()
        gates = mtf.softmax(self.logits, self.experts_dim)
        if tokens is None:
            number = self.logits.shape.size // self.experts_dim.size
            count = mtf.constant(gates.mesh, float(number), mtf.Shape([]), tf.float32)
        else:
            gates, count = gates * tokens, mtf.reduce_sum(tokens)
        return Routing(
            mtf.reduce_sum(self.chosen, output_shape=shape),
            mtf.reduce_sum(gates, output_shape=shape),
            count,
            mtf.reduce_sum(mtf.to_float(dispatch)),
        )

    def _mean_over_tokens(self, x: mtf.Tensor) -> mtf.Tensor:
        tokens = self.in_first_place()
        if tokens is None:
            return mtf.reduce_mean(x)
        count = mtf.maximum(mtf.reduce_sum(tokens), 1.0)
        # As in `mean_of_groups`, the importance may lack dimensions of `x`.
        return mtf.reduce_sum(x * tokens) / (count * (x.shape.size // tokens.shape.size))

    def sometimes_without_best(self) -> None:
        """Masks the best expert's logit for randomly chosen tokens, in training.

        The next best expert takes its place; or, if a temperature is set, one sampled from the
        others, whose gate is then 1.
        """
        probability = self.mixture.hparam("use_second_place_expert_prob")
        if probability is None or not self.mixture.train:
            return
        temperature = self.mixture.hparam("use_second_place_expert_prob_temp")
        best = mtf.one_hot(mtf.argmax(self.logits, self.experts_dim), self.experts_dim)
        # Not -inf, which would be NaN times the zeros of the one-hot.
        rest = self.logits + best * MASKED_LOGIT
        if temperature is not None:
            drawn = mtf.sample_with_temperature(rest, self.experts_dim, temperature)
            # The best expert is masked twice now, and only the drawn one not at all.
            rest += (1.0 - mtf.one_hot(drawn, self.experts_dim)) * MASKED_LOGIT
        # One number for each token: the choice is between all of its logits and all of the masked
        # ones.
        chance = mtf.random_uniform(self.logits.mesh, self.logits.shape - self.experts_dim)
        self.logits = mtf.where(mtf.less(chance, probability), rest, self.logits)

    def masked_out(self, x: mtf.Tensor) -> mtf.Tensor:
        """Sets `x` far below all other values for tokens of importance 0."""
        if self.importance is None:
            return x
        # Not -inf, which is NaN times 0, and in the softmax of a group of padding alone.
        return x + mtf.to_float(mtf.equal(self.importance, 0.0)) * MASKED_LOGIT


def _with_embeddings(
    x: mtf.Tensor, embeddings: Optional[mtf.Tensor], mixture: Mixture
) -> mtf.Tensor:
    mode = mixture.hparam("word_embed_mode")
    if mode is None:
        return x
    if mode not in _WORD_EMBED_MODES:
        raise ValueError(
            f"Unimplemented moe word embed mode: {mode!r} is none of "
            f"{', '.join(sorted(_WORD_EMBED_MODES))}"
        )
    if embeddings is None:
        raise ValueError(
            f"mixture of experts: word_embed_mode={mode!r} needs token_embeddings, the "
            "embeddings of the model's input ids; the Context has them as input_embeddings"
        )
    # The router's input is in float32 by now, and both must have one dtype.
    return _WORD_EMBED_MODES[mode](x, mtf.to_float(embeddings))


def switch_noise(mixture: Mixture, strict: bool, noises: Collection[str]) -> Optional[Noise]:
    """Returns a function that adds the switch policy's noise to the router's input, or None.

    Args:
      mixture: the Mixture.
      strict: whether an unknown policy is an error.
      noises: the policies whose noise the gating adds.

    Raises:
      ValueError: the policy is unknown.
    """
    policy = mixture.of_mode("switch_policy")
    if strict and policy not in _SWITCH_POLICIES:
        raise ValueError(
            f"Unknown Switch gating policy {policy!r}: it is none of {', '.join(_SWITCH_POLICIES)}"
        )
    return INPUT_NOISE[policy] if mixture.train and policy in noises else None


@dataclasses.dataclass
class Assignment:
    """Assigns expert capacity to tokens in the order of their group.

    Tokens beyond the capacity are dropped.

    Attributes:
      router: the Router, whose `chosen` grows with each call of `place`.
      combine: the gates of tokens at their places, a Tensor with dimensions [..., group, experts,
        expert_capacity]; None before `place` is called.
    """

    router: Router
    combine: Any = None

    def place(self, choices: mtf.Tensor, gates: mtf.Tensor) -> mtf.Tensor:
        """Assigns places after those that are already taken.

        Args:
          choices: a Tensor with dimensions [..., group, experts], 1.0 where a token chooses an
            expert, at most one per token, and 0.0 elsewhere.
          gates: a Tensor with dimensions [..., group], the weights of the tokens' outputs.

        Returns:
          A Tensor with dimensions [..., group], 1.0 where a token got a place.
        """
        router = self.router
        # The place of a token is the number of earlier tokens of its group that chose the same
        # expert.
        places = mtf.cumsum(choices, router.group_dim, exclusive=True)
        if router.chosen is not None:
            places += router.chosen
        fits = choices * mtf.to_float(mtf.less(places, float(router.capacity_dim.size)))
        # A call chooses at most one expert for a token, so the sum is the token's place there.
        # Tokens without one have place 0 here, where `kept` makes their gate 0.
        place = mtf.reduce_sum(places * fits, reduced_dim=router.experts_dim)
        combine = mtf.einsum(
            [fits, gates, mtf.one_hot(mtf.to_int32(place), router.capacity_dim)],
            output_shape=fits.shape + router.capacity_dim,
        )
        # Of all choices, also those that got no place: where there are such, the expert is full
        # anyway.
        chosen = mtf.reduce_sum(choices, reduced_dim=router.group_dim)
        router.chosen = chosen if router.chosen is None else router.chosen + chosen
        self.combine = combine if self.combine is None else self.combine + combine
        return mtf.reduce_sum(fits, reduced_dim=router.experts_dim)


def best_of_group(router: Router, scores: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns the highest scores of each expert, and their tokens as one-hot vectors.

    Args:
      router: a Router.
      scores: a Tensor with dimensions [..., group, experts].

    Returns:
      (a Tensor with dimensions [..., experts, expert_capacity], one with [..., experts,
      expert_capacity, group]); zeros where the capacity exceeds the group.
    """
    capacity_dim, group_dim = router.capacity_dim, router.group_dim
    # The minimum capacity may exceed the tokens of a small group, and top_k cannot.
    k_dim = mtf.Dimension(capacity_dim.name, min(capacity_dim.size, group_dim.size))
    values, tokens = mtf.top_k(scores, group_dim, k_dim)
    places = mtf.one_hot(tokens, group_dim)
    beyond = [0, capacity_dim.size - k_dim.size]
    if beyond[1]:
        # Gates are 0 in places beyond the tokens, so that nothing is sent there.
        values = mtf.pad(values, beyond, capacity_dim.name)
        places = mtf.pad(places, beyond, capacity_dim.name)
    return values, places


# -- gatings

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
        loss += _second_place_loss(router, choices_2, rest, any_place)
    return _placed(router, [choices_1, choices_2], [gate_1, gate_2]), loss


def _second_place_loss(
    router: Router, choices: mtf.Tensor, rest: mtf.Tensor, counted: Optional[mtf.Tensor]
) -> mtf.Tensor:
    """Returns the loss of a later choice, among the gates that earlier ones have left."""
    return 0.5 * router.balance(choices, _normalized(rest, router.experts_dim), counted=counted)


def _placed(
    router: Router, choices: Sequence[mtf.Tensor], gates: Sequence[mtf.Tensor]
) -> mtf.Tensor:
    """Returns the combine tensor of first choices, and of those of later ones that are sent."""
    assignment = Assignment(router)
    # All first choices before any second one: if places are short, second choices are dropped.
    assignment.place(choices[0], gates[0])
    for chosen, gate in zip(choices[1:], gates[1:]):
        assignment.place(_sent(router, chosen, gate), gate)
    return assignment.combine


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
        loss += _second_place_loss(router, choices[place], rests[place], any_place)
    return _placed(router, choices, best), loss


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
